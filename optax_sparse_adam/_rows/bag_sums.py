"""Sums of the rows of bags by XLA; see `bags`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.sharding import (
    call_with_auto_axes,
    mesh_of,
    partitions_of,
    shard_axes_like,
)
from .entries import accumulator_dtype
from .padding import expand_like, narrow_ids


def pool(
    num_bags: int,
    table: jax.Array,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """`RowOps.look_up_bags` of a table."""
    return add_up(num_bags, take(table, ids), segments, weights)


def take(
    table: jax.Array, ids: jax.Array, flags: tuple[bool, bool] = (False, False)
) -> jax.Array:
    """`table[ids]`, zeros for padding; on Explicit mesh axes, of all ids everywhere."""
    out = None
    if (mesh := mesh_of(table, ids)).explicit_axes:
        columns = partitions_of(jax.typeof(table).sharding.spec)[1:]
        spec = PartitionSpec(*(None for _ in ids.shape), *columns)
        out = NamedSharding(mesh, spec)
    return table.at[ids].get(
        mode="fill",
        fill_value=0,
        wrap_negative_indices=False,
        out_sharding=out,
        indices_are_sorted=flags[0],
        unique_indices=flags[1],
    )


def take_whole(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`take`, whose transpose scatters to rows that there are.

    Padding adds a zero to some row, each entry to another one, where `checkify` would
    report that it is out of bounds. Over Explicit mesh axes it does: see `take`.
    """
    if mesh_of(table, ids).explicit_axes:
        return take(table, ids)
    ids = narrow_ids(ids, len(table))
    size = np.asarray(len(table), ids.dtype)
    inside = (ids >= 0) & (ids < size)
    slot = jnp.arange(ids.size, dtype=ids.dtype).reshape(ids.shape) % size
    rows = table.at[jnp.where(inside, ids, slot)].get(mode="promise_in_bounds")
    return jnp.where(expand_like(inside, rows), rows, jnp.zeros_like(rows))


def add_up(
    num_bags: int,
    values: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None = None,
) -> jax.Array:
    """The weighted sum of the values of each bag, `[num_bags, ...]`."""
    values = values.astype(accumulator_dtype(values.dtype))
    if weights is not None:
        if mesh_of(values).explicit_axes:
            # Rows are looked up for all devices, and ids may lie on some each.
            weights = shard_axes_like(values, weights, range(weights.ndim))
        values = values * expand_like(weights, values)
    if segments is None:
        return jnp.sum(values, axis=1)
    add: Any = functools.partial(jax.ops.segment_sum, num_segments=num_bags)
    axes = (None, *range(1, values.ndim))
    return call_with_auto_axes(add, values, segments, like=values, axes=axes)
