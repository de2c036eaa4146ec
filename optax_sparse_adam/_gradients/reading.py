"""How the rows of a table, or of an elementwise function of tables, are read.

By the kernel where it is there and takes the arrays, else by XLA's gather.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive

from .._exact_adam.rows import look_up_values
from .._jax_extras.on_cpu import on_cpu
from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import bind
from ..native import _calls as native
from .expressions import Expression, Leaf, StaleTable, Table, inject, table
from .lookups import (
    start_ids,
    starts_inside,
)

_Mode = lax.GatherScatterMode
Deltas = dict[Leaf, jax.Array] | None


def read_slice(
    eqn: Any,
    value: Expression,
    starts: Sequence[jax.Array],
    indices: jax.Array,
    deltas: Deltas,
) -> jax.Array:
    """A slice of rows of a table or of a function of one, as a gather of each row.

    Args:
      eqn: The slice.
      value: What it reads.
      starts: The other operands of a dynamic slice.
      indices: Where each row begins, `indices_of_slice`.
      deltas: What is injected.
    """
    window = eqn.outvars[0].aval.shape
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, len(window))),
        collapsed_slice_dims=(0,),
        start_index_map=tuple(range(len(window))),
    )
    params = {
        "dimension_numbers": numbers,
        "slice_sizes": (1, *window[1:]),
        "mode": _Mode.PROMISE_IN_BOUNDS,
    }

    def take(array: jax.Array) -> jax.Array:
        if starts:
            _show_bounds(eqn.primitive, array, starts, eqn.params)
        return _gather(lax.gather, array, indices, params)

    return value.select(take, window, deltas)


def _show_bounds(
    read: Primitive,
    table: jax.Array,
    indices: Sequence[jax.Array],
    params: dict[str, Any],
) -> None:
    """Reads nothing at these indices, for `checkify.index_checks` to check them.

    checkify has a rule for a gather and for a dynamic_slice, and sees neither what the
    kernel reads nor that an index has been clamped. A slice without columns has the
    same bounds, and XLA drops it. (tests/gradients/test_checkify.py)
    """
    collapsed: Sequence[int] = ()
    if "dimension_numbers" in params:
        collapsed = params["dimension_numbers"].collapsed_slice_dims
    sizes = params["slice_sizes"]
    sizes = tuple(
        size if axis == 0 or axis in collapsed else 0 for axis, size in enumerate(sizes)
    )
    bind(read, table, *indices, **params | {"slice_sizes": sizes})


def read_gather(
    eqn: Any, value: Expression, indices: jax.Array, deltas: Deltas
) -> jax.Array | None:
    """A gather from a table or from a function of one, at the gathered elements only.

    Returns `None` where that would need a fill value that only the gather knows.
    """
    params, out = eqn.params, eqn.outvars[0].aval
    if not value.is_table:
        is_filled = params["mode"] == _Mode.FILL_OR_DROP
        has_nan = jnp.issubdtype(out.dtype, jnp.inexact)
        if is_filled and params["fill_value"] is None and not has_nan:
            return None
        return _gather_elements(eqn.primitive, params, out, value, indices, deltas)
    rows = _rows_by_kernel(eqn, value, indices)
    if rows is None and isinstance(value.source, Table):
        array = jnp.asarray(value.source.array)
        rows = _gather(_bound(eqn.primitive), array, indices, params)
    elif rows is None:
        rows = _gather_elements(eqn.primitive, params, out, value, indices, None)
    return rows if deltas is None else inject(rows, deltas[value.leaves[0]])


def _bound(gather: Primitive) -> Callable[..., jax.Array]:
    return functools.partial(bind, gather)


def _reads(source: Any, ids: jax.Array) -> bool:
    """Whether the kernel takes the arrays."""
    if isinstance(source, Table):
        return native.reads(source.array, ids)
    rows = source.rows
    return native.reads_now(source.array, (*rows[:3], *rows.log_decay), ids)


def _rows_by_kernel(eqn: Any, value: Expression, indices: jax.Array) -> Any:
    """A gather of whole rows by the kernel, or `None` where XLA's is as good."""
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    axes = numbers.start_index_map
    # A scalar id under `vmap` indexes all axes; clamped, the others begin at zero.
    rest_is_clamped = eqn.params["mode"] != _Mode.FILL_OR_DROP
    whole = 0 in axes and (len(axes) == 1 or rest_is_clamped)
    whole = whole and eqn.params["slice_sizes"] == (1, *value.shape[1:])
    last = numbers.offset_dims == tuple(range(indices.ndim - 1, out.ndim))
    if not (whole and last and _reads(value.source, indices)):
        return None
    items = (*eqn.params.items(),)
    return look_up_by_kernel(eqn.primitive, items, out, value.source, indices)


def first_gather(jaxpr: Jaxpr, shape: tuple[int, ...]) -> JaxprEqn | None:
    """The gather of this shape that a function by the kernel stands for."""
    for eqn in jaxpr.eqns:
        out: Any = eqn.outvars[0].aval
        if eqn.primitive.name == "gather" and out.shape == shape:
            return eqn
        for branch in eqn.params.get("branches", ()):
            found = first_gather(branch.jaxpr, shape)
            if found is not None:
                return found
    return None


def _gather(
    gather: Callable[..., jax.Array],
    array: jax.Array,
    indices: jax.Array,
    params: dict[str, Any],
) -> jax.Array:
    """A gather that reads at least two rows: see `_rows.gather_scatter.repeat_row`.

    An axis of length 1 stands for all columns; XLA clamps indices into it.
    """
    numbers = params["dimension_numbers"]
    sizes = tuple(map(min, params["slice_sizes"], array.shape))
    params = params | {"slice_sizes": sizes}
    if math.prod(indices.shape[:-1]) != 1 or mesh_of(array, indices).explicit_axes:
        return gather(array, indices, **params)
    twice = numbers._replace(
        offset_dims=tuple(1 + axis for axis in numbers.offset_dims),
        start_indices_batching_dims=tuple(
            1 + axis for axis in numbers.start_indices_batching_dims
        ),
    )
    params = params | {"dimension_numbers": twice, "unique_indices": False}
    return gather(array, jnp.stack([indices, indices]), **params)[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def look_up_by_kernel(
    gather: Primitive,
    items: Any,
    out: Any,
    source: Table | StaleTable,
    indices: jax.Array,
) -> jax.Array:
    params = dict(items)
    _show_bounds(gather, source.array, [indices], params)
    column = params["dimension_numbers"].start_index_map.index(0)
    fill = None
    if params["mode"] == _Mode.FILL_OR_DROP:
        fill = math.nan if params["fill_value"] is None else params["fill_value"]

    def by_kernel(source: Table | StaleTable, indices: jax.Array) -> jax.Array:
        ids = indices[..., column]
        if isinstance(source, Table):
            rows = native.look_up_rows(source.array, ids, fill)
        else:
            rows = look_up_values(*source, ids, fill)
        return rows.reshape(out.shape)

    def by_xla(source: Table | StaleTable, indices: jax.Array) -> jax.Array:
        if isinstance(source, Table):
            rows: jax.Array = gather.bind(source.array, indices, **params)
            return rows
        value = table(source, source.array.shape, source.array.dtype)
        return _gather_elements(gather, params, out, value, indices, None)

    return on_cpu(by_kernel, by_xla, source, indices)


def _gather_elements(
    gather: Primitive,
    params: dict[str, Any],
    out: Any,
    value: Expression,
    indices: jax.Array,
    deltas: Deltas,
) -> jax.Array:
    fill, is_filled = params["fill_value"], params["mode"] == _Mode.FILL_OR_DROP
    if is_filled:
        params = params | {"mode": _Mode.CLIP, "fill_value": None}

    def take(array: jax.Array) -> jax.Array:
        return _gather(_bound(gather), array, indices, params)

    result = value.select(take, out.shape, deltas)
    if not is_filled:
        return result
    numbers = params["dimension_numbers"]
    axes = numbers.start_index_map
    limits = [value.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    inside = starts_inside(start_ids(indices, limits, clamps=False), limits)
    batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    inside = lax.broadcast_in_dim(inside, out.shape, batch)
    return jnp.where(
        inside, result, jnp.asarray(jnp.nan if fill is None else fill, out.dtype)
    )
