"""Gradients as rows and their indices (TensorFlow: IndexedSlices), and what adds up."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import call_with_auto_axes, columns_as_in, layout_of
from .._jax_extras.unchecked import unchecked
from .._rows.bag_gradient import BagEntries
from .._rows.canary import CanaryBCOO
from .._rows.coalesce import touched_rows
from .._rows.entries import accumulator_dtype
from .._rows.padding import row_bounds
from .._rows.source import Source
from .lookups import Promises


class LookupEntries(NamedTuple):
    """The rows that a lookup reads, one for each row of values; or for bags, more.

    Attributes:
      ids: `[entries, depth]`; an id that is there twice adds up.
      segments: `[entries]`, the row of the values that an entry has, or `None`.
      weights: `[entries]`, by which it is multiplied, or `None`.
    """

    ids: jax.Array
    segments: jax.Array | None = None
    weights: jax.Array | None = None


RowSlices = tuple[LookupEntries, jax.Array]


def to_bcoo(
    slices: Sequence[RowSlices],
    totals: Sequence[jax.Array],
    source: Source,
    depth: int,
    promises: Promises,
    bag_length: int | None,
) -> BCOO:
    """The gradient of a table of which `depth` leading axes are the index of a row.

    Rows of a wider type add up before the sum is rounded, as under `jax.grad`. If there
    are `totals`, of the table's shape, these hold all values. `promises` are those of
    the only lookup, if it is one, and `bag_length` its number of entries of each bag.
    """
    shape, dtype = jnp.shape(source.array), jnp.result_type(source.array)
    # Over Explicit axes a gradient lies as its table, as the update will.
    lay_out = functools.partial(columns_as_in, source.array)
    slices = [(x, lay_out(values)) for x, values in slices]
    read_at = source.clock  # for `exact_adam`, which refuses gradients of another step
    types = [dtype, *(x.dtype for x in (*totals, *(x for _, x in slices)))]
    widest = max(types, key=lambda dtype: jnp.finfo(dtype).bits)
    indices = _joined([x.ids for x, _ in slices], (0, depth), jnp.int32)
    # More rows were looked up than there are: the ids say which ones, and the deltas of
    # the table's shape (one for each type it was cast to) what their gradient is.
    if totals:
        total = sum(x.astype(widest) for x in totals[1:]) + totals[0].astype(widest)
        indices, values = _every_row(indices, total, depth)
        values = lay_out(values)
        promises = Promises(unique_indices=True)
    elif any(x.segments is not None for x, _ in slices):
        bags = _joined_bags(slices, shape, dtype, widest, bag_length)
        grad = CanaryBCOO.of_bags(bags, read_at)
        grad.layout = layout_of(source.array)
        return grad
    else:
        rows = [x.astype(widest) for _, x in slices]
        values = _joined(rows, (0, *shape[depth:]), widest)
        # A bfloat16 table that is looked up in float32: one entry of 1 and 256 of 1/256
        # in a row are 2, and would be 1 if bfloat16 entries were added up.
        if widest != dtype and len(indices) > 1 and not promises.unique_indices:
            indices, values = _coalesced(indices, values, shape)
            promises = Promises(unique_indices=True)
    args = values.astype(dtype), indices
    grad = CanaryBCOO(args, shape=shape, read_at=read_at, **promises._asdict())
    grad.layout = layout_of(source.array)
    return grad


def _joined(arrays: Sequence[jax.Array], empty: tuple[int, ...], dtype: Any) -> Any:
    if not arrays:
        return jnp.zeros(empty, dtype)
    dtype = jnp.result_type(*(x.dtype for x in arrays))
    return jnp.concatenate([x.astype(dtype) for x in arrays])


def _every_row(indices: jax.Array, total: jax.Array, depth: int) -> tuple[Any, Any]:
    """All rows of a table of values; those not among the indices are padding."""
    shape = total.shape[:depth]

    def mark(touched: jax.Array, indices: jax.Array) -> jax.Array:
        return touched.at[tuple(indices.T)].set(True, mode="drop")

    # XLA's shapes are static, so rows that were not read are stored as padding.
    # For 4 rows of which [2, 2, 0] were read, the ids are [0, 5, 2, 7].
    zeros = jnp.zeros(shape, bool)
    touched = call_with_auto_axes(
        unchecked(mark), zeros, indices, like=total, axes=range(depth)
    ).reshape(-1, 1)
    ids = jnp.indices(shape, jnp.int32, sparse=False).reshape(depth, -1).T
    slot = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    ids = jnp.where(touched, ids, row_bounds(shape, ids) + slot)
    return ids, total.reshape(math.prod(shape), *total.shape[depth:])


def _coalesced(
    indices: jax.Array, values: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The same sum with each row stored once; duplicates add up as in `coalesce`."""
    grad = BCOO((values, indices), shape=shape)
    rows = touched_rows(grad, accumulator_dtype(values.dtype))
    return rows.indices, rows.data.astype(values.dtype)


def _joined_bags(
    slices: Sequence[RowSlices],
    shape: tuple[int, ...],
    dtype: Any,
    widest: Any,
    length: int | None,
) -> BagEntries:
    """All bags in one; a lookup of single rows is bags of one id."""
    # A lookup of two bags, with the segments [0, 1, 1], and one of three single rows
    # have five rows of values together, and the segments [0, 1, 1, 2, 3, 4].
    segments, weights, first = [], [], 0
    for entries, values in slices:
        lookup_segments = entries.segments
        if lookup_segments is None:
            lookup_segments = jnp.arange(values.shape[0], dtype=jnp.int32)
        segments.append(lookup_segments + first)
        ones = jnp.ones(lookup_segments.shape, widest)
        weights.append(ones if entries.weights is None else entries.weights)
        first += values.shape[0]
    has_weights = any(x.weights is not None for x, _ in slices)
    return BagEntries(
        jnp.concatenate([x.astype(widest) for _, x in slices]),
        jnp.concatenate([x.ids.astype(jnp.int32) for x, _ in slices]),
        jnp.concatenate(segments),
        jnp.concatenate([x.astype(widest) for x in weights]) if has_weights else None,
        shape,
        jnp.dtype(dtype),
        length,
    )
