"""Lookups in a loss: the two functions that `value_and_grad` knows as a whole.

`look_up` reads rows, where a kernel does it (`kernels_for`); `sum_bags` reads and adds
up the rows of bags. Both choose their `RowOps` here, once. What they are without
derivatives, `look_up_rows` and `look_up_bags`, is `known_in_jaxprs`: a walk over a
program, as that of a gradient in a loss, finds their static arguments and operands by
`call_of`, and `LOOKUPS` in `_gradients/rules.py` holds their rules.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jax_extras.jaxprs import known_in_jaxprs
from .._jax_extras.sharding import mesh_of
from .._jax_extras.unchecked import show_bounds
from . import bag_sums
from .row_ops import RowOps
from .source import ZEROS, Bounds, Source, are_zeros, tangent_of
from .with_ops import kernels_for, with_ops


def reads_by_kernel(source: Source, ids: jax.Array, bounds: Bounds) -> bool:
    """Whether `look_up` is faster than a gather of XLA: a kernel reads these rows."""
    return bool(kernels_for("look_up", source, ids, bounds=bounds))


@known_in_jaxprs
def look_up_rows(bounds: Bounds, source: Source, ids: jax.Array) -> jax.Array:
    """`look_up` without derivatives."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(ids.ndim, ids.ndim + source.array.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    params = {
        "dimension_numbers": numbers,
        "slice_sizes": (1, *source.array.shape[1:]),
        "mode": bounds.mode,
        "fill_value": bounds.fill,
    }
    if not bounds.is_padded:
        show_bounds(lax.gather, source.array, [ids[..., None]], params)

    def read(ops: RowOps, source: Source, ids: jax.Array) -> jax.Array:
        return ops.look_up(source, ids, bounds=bounds)

    @jax.custom_batching.custom_vmap
    def call(source: Source, ids: jax.Array) -> jax.Array:
        kernels = kernels_for("look_up", source, ids, bounds=bounds)
        rows: jax.Array = with_ops(read, source, ids, kernels=kernels, has_rules=True)
        return rows

    @call.def_vmap
    def many(
        _: int, batched: Any, source: Source, ids: jax.Array
    ) -> tuple[jax.Array, bool]:
        of_source, is_batched = batched
        if not any(jax.tree.leaves(of_source)):  # ids of one table: so many more
            return look_up(bounds, source, ids), True
        axes = jax.tree.map(lambda x: 0 if x else None, (of_source, is_batched))
        each = jax.vmap(functools.partial(read, RowOps()), axes)
        return each(source, ids), True

    rows: jax.Array = call(source, ids)
    return rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def look_up(bounds: Bounds, source: Source, ids: jax.Array) -> jax.Array:
    """`RowOps.look_up`, `[*ids.shape, *row_shape]`.

    Its derivative, by the values of a table, is a lookup by XLA in the tangent; by the
    state of stale rows it is that of their formula. Under `vmap`, ids of many batches
    are one lookup.
    """
    rows: jax.Array = look_up_rows(bounds, source, ids)
    return rows


@functools.partial(look_up.defjvp, symbolic_zeros=True)
def _look_up_jvp(bounds: Bounds, primals: Any, tangents: Any) -> Any:
    source, ids = primals
    rows = look_up(bounds, source, ids)
    d_table = tangents[0].array
    if not are_zeros(tangents[0].stale):
        read = functools.partial(RowOps().look_up, ids=ids, bounds=bounds)
        return rows, tangent_of(read, primals[:1], tangents[:1])
    if isinstance(d_table, SymbolicZero):
        return rows, jnp.zeros_like(rows)
    if bounds.fill is not None:
        bounds = bounds._replace(fill=0)
    return rows, RowOps().look_up(Source(d_table), ids, bounds=bounds)


def look_up_padded(
    table: jax.Array, ids: jax.Array, flags: tuple[bool, bool] = (False, False)
) -> jax.Array:
    """`table[ids]`, zeros for padding, which `checkify` does not report.

    Over Explicit mesh axes it does, where this is a gather by XLA of all ids
    everywhere.
    """
    if mesh_of(table, ids).explicit_axes:
        return bag_sums.take(table, ids, flags)
    bounds = ZEROS._replace(is_sorted=flags[0], is_unique=flags[1])
    rows: jax.Array = look_up(bounds, Source(table), ids)
    return rows


@known_in_jaxprs
def look_up_bags(
    num_bags: int,
    source: Source,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """`sum_bags` without derivatives."""
    tree: Any
    leaves, tree = jax.tree.flatten((source, ids, segments, weights))

    @jax.custom_batching.custom_vmap
    def call(*leaves: jax.Array) -> jax.Array:
        operands: Any = tree.unflatten(leaves)

        def read(ops: RowOps, *operands: Any) -> jax.Array:
            return ops.look_up_bags(*operands, num_bags=num_bags)

        kernels = kernels_for("look_up_bags", *operands, num_bags=num_bags)
        sums: jax.Array = with_ops(read, *operands, kernels=kernels, has_rules=True)
        return sums

    @call.def_vmap
    def many(
        size: int, batched: list[bool], *leaves: jax.Array
    ) -> tuple[jax.Array, bool]:
        of_source, *_ = tree.unflatten(batched)
        is_explicit = bool(mesh_of(*leaves).explicit_axes)  # may split bags or ids
        if is_explicit or any(jax.tree.leaves(of_source)):  # or many tables
            axes = tuple(0 if x else None for x in batched)

            def one(*leaves: jax.Array) -> jax.Array:
                return _pool(num_bags, *tree.unflatten(leaves))

            return jax.vmap(one, axes)(*leaves), True
        # Bags of one table: so many more of them.
        source, *entries = tree.unflatten(leaves)
        _, *are_batched = tree.unflatten(batched)
        ids, segments, weights = jax.tree.map(
            lambda x, is_batched: (
                x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            ),
            entries,
            are_batched,
        )
        if segments is not None:
            # Three batches of 4 bags are 12 bags: bag 1 of batch 2 is 2 * 4 + 1 = 9. A
            # segment out of bounds becomes 12, as 4 would be a bag of the next batch.
            inside = (segments >= 0) & (segments < num_bags)
            first = jnp.arange(size, dtype=segments.dtype)[:, None] * num_bags
            segments = jnp.where(inside, segments + first, size * num_bags)
        merged = jax.tree.map(
            lambda x: x.reshape(size * x.shape[1], *x.shape[2:]),
            (ids, segments, weights),
        )
        sums = sum_bags(size * num_bags, source, *merged)
        return sums.reshape(size, num_bags, *sums.shape[1:]), True

    sums: jax.Array = call(*leaves)
    return sums


def _pool(num_bags: int, source: Source, *entries: Any) -> jax.Array:
    """`look_up_bags` with derivatives and `vmap`, which on a mesh it has not."""
    if source.stale is None:
        return bag_sums.pool(num_bags, source.array, *entries)
    return RowOps().look_up_bags(source, *entries, num_bags=num_bags)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sum_bags(
    num_bags: int,
    source: Source,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """`sum_j weights_j * table[ids_j]` of each bag, `[num_bags, *row_shape]`.

    Its derivative is that of XLA's sum, taken only for what is differentiated: XLA
    would compute that of all weights for nothing. Under `vmap`, bags of many batches
    are one lookup.

    Args:
      num_bags: The number of bags.
      source: A table `[num_rows, *row_shape]`; derivatives are those by its values.
      ids: `[num_bags, length]`, or `[entries]` with segments. Out of bounds: padding.
      segments: `[entries]`, the bag of each id, or `None`.
      weights: Of the shape of `ids`, or `None` for ones.
    """
    sums: jax.Array = look_up_bags(num_bags, source, ids, segments, weights)
    return sums


@functools.partial(sum_bags.defjvp, symbolic_zeros=True)
def _sum_bags_jvp(num_bags: int, primals: Any, tangents: Any) -> Any:
    source, ids, segments, weights = primals
    d_source, _, _, d_weights = tangents
    sums = sum_bags(num_bags, source, ids, segments, weights)
    change = jnp.zeros_like(sums)
    if not are_zeros(d_source.stale):

        def read(source: Source) -> jax.Array:
            return _pool(num_bags, source, ids, segments, weights)

        change = change + tangent_of(read, (source,), (d_source,))
    elif not isinstance(d_source.array, SymbolicZero):
        d_table = d_source.array
        change = change + _pool(num_bags, Source(d_table), ids, segments, weights)
    if weights is not None and not isinstance(d_weights, SymbolicZero):
        if mesh_of(source.array, ids).explicit_axes:
            change = change + _pool(num_bags, source, ids, segments, d_weights)
        else:  # `checkify` does not see these rows
            rows = look_up(ZEROS, source, ids)
            change = change + bag_sums.add_up(num_bags, rows, segments, d_weights)
    return sums, change
