"""Gradients as rows and their indices (TensorFlow: IndexedSlices), and what adds up."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import call_with_auto_axes
from .._rows.bag_gradient import BagGradient, expand_bags
from .._rows.coalesce import accumulator_dtype, cast_entries
from .._rows.duplicates import sum_duplicates
from .._rows.gather_scatter import scatter_add_rows
from .._rows.guarded import GuardedBCOO, StaleBCOO
from .._rows.padding import pad_indices, row_bounds
from .lookups import leading_columns


class RowSlices(NamedTuple):
    """Some rows of a table of zeros; rows with one index add up.

    Attributes:
      indices: `[n, depth]`.
      values: `[n, *shape[depth:]]`; with segments, `[bags, *shape[depth:]]`.
      segments: `[n]`, the row of `values` that an entry has, or `None`.
      weights: `[n]`, by which it is multiplied, or `None`.
    """

    indices: jax.Array
    values: jax.Array
    segments: jax.Array | None = None
    weights: jax.Array | None = None

    def expanded(self) -> "RowSlices":
        if self.segments is None:
            return self
        rows = expand_bags(self.values, self.segments, self.weights)
        return RowSlices(self.indices, rows)


def dense_sum(shape: tuple[int, ...], slices: RowSlices) -> jax.Array:
    zeros = jnp.zeros(shape, slices.values.dtype)
    return scatter_add_rows(zeros, slices.indices, slices.values, unique=False)


def every_row(indices: jax.Array, total: jax.Array, depth: int) -> RowSlices:
    """All rows of a table of values; those not among the indices are padding."""
    shape = total.shape[:depth]

    def mark(touched: jax.Array, indices: jax.Array) -> jax.Array:
        return touched.at[tuple(indices.T)].set(True, mode="drop")

    touched = call_with_auto_axes(
        mark,
        jnp.zeros(shape, bool),
        leading_columns(indices, depth, total.shape),
        like=total,
        axes=range(depth),
    )
    size = math.prod(shape)
    ids = jnp.indices(shape, jnp.int32, sparse=False).reshape(depth, size).T
    outside = row_bounds(shape, ids) + jnp.arange(size, dtype=jnp.int32)[:, None]
    chosen = jnp.where(touched.reshape(size, 1), ids, outside)
    return RowSlices(chosen, total.reshape(size, *total.shape[depth:]))


def concatenated(
    slices: Sequence[RowSlices], shape: tuple[int, ...], depth: int, dtype: Any
) -> RowSlices:
    """All rows in one; at most as many as the table has rows."""
    if not slices:
        return RowSlices(
            jnp.zeros((0, depth), jnp.int32), jnp.zeros((0, *shape[depth:]), dtype)
        )
    dtype = jnp.result_type(*(x.indices.dtype for x in slices))
    total = RowSlices(
        jnp.concatenate([x.indices.astype(dtype) for x in slices]),
        jnp.concatenate([x.values for x in slices]),
    )
    if len(total.indices) <= math.prod(shape[:depth]):
        return total
    return every_row(total.indices, dense_sum(shape, total), depth)


def coalesced(slices: RowSlices, shape: tuple[int, ...]) -> RowSlices:
    """The same sum with each row stored once; duplicates add up as in `coalesce`."""
    stored, dtype = len(slices.indices), slices.values.dtype
    grad = BCOO((slices.values, slices.indices), shape=shape)
    grad = cast_entries(grad, accumulator_dtype(dtype))
    indices, values, count = sum_duplicates(
        grad.indices, grad.data, shape, is_sorted=False
    )
    slot = jnp.arange(stored, dtype=jnp.int32)
    indices = pad_indices(indices, slot < count, slot, shape)
    return RowSlices(indices, values.astype(dtype))


def _gradient_of_bags(
    slices: Sequence[RowSlices], shape: tuple[int, ...], dtype: Any, *, is_stale: bool
) -> BagGradient:
    """All bags in one; a lookup of single rows is bags of one id."""
    segments, weights, first = [], [], 0
    has_weights = any(x.weights is not None for x in slices)
    for x in slices:
        own = x.segments
        if own is None:
            own = jnp.arange(len(x.values), dtype=jnp.int32)
        segments.append(own + first)
        ones = jnp.ones(own.shape, x.values.dtype)
        weights.append(ones if x.weights is None else x.weights.astype(ones.dtype))
        first += len(x.values)
    indices = jnp.concatenate([x.indices.astype(jnp.int32) for x in slices])
    args = (
        jnp.concatenate([x.values for x in slices]),
        indices,
        jnp.concatenate(segments),
        jnp.concatenate(weights) if has_weights else None,
    )
    return BagGradient(args, shape=shape, dtype=dtype, is_stale=is_stale)


def to_bcoo(
    slices: Sequence[RowSlices],
    shape: tuple[int, ...],
    depth: int,
    dtype: Any,
    *,
    is_stale: bool,
) -> BCOO:
    """The row-sparse gradient that all these rows add up to.

    Those of a wider type add up before the sum is rounded, as under `jax.grad`.
    `is_stale` says that rows were not read up to date, for `exact_adam` to know.
    """
    types = [dtype, *(x.values.dtype for x in slices)]
    widest = max(types, key=lambda dtype: jnp.finfo(dtype).bits)
    slices = [x._replace(values=x.values.astype(widest)) for x in slices]
    stored = sum(len(x.indices) for x in slices)
    if any(x.segments is not None for x in slices):
        if stored <= shape[0]:
            return _gradient_of_bags(slices, shape, dtype, is_stale=is_stale)
        slices = [x.expanded() for x in slices]
    total = concatenated(slices, shape, depth, dtype)
    is_unique = stored > len(total.indices)
    if widest != dtype and not is_unique and stored > 1:
        total, is_unique = coalesced(total, shape), True
    return (StaleBCOO if is_stale else GuardedBCOO)(
        (total.values.astype(dtype), total.indices),
        shape=shape,
        unique_indices=is_unique,
    )
