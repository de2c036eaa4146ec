"""Numbers the distinct rows of a gradient, and adds up the entries of each.

A CPU sorts the ids alone, searches each entry's row among them, and adds every entry to
its row. Other devices sort the ids together with the positions of the entries, and add
up neighbours: on a GPU, additions to one address wait for each other, and their order,
and with it the last bits, is left to chance.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._moves import (
    expand,
    in_bounds,
    row_bounds,
    scatter_add_rows,
    scatter_rows,
    take_rows,
)
from ._search import search

# How many neighbours a round adds up. XLA makes one GPU kernel of it, which reads each
# entry once from memory and this many times from the caches.
_NEIGHBOURS = 8


class _Order(NamedTuple):
    """The entries of a gradient in the order of their rows.

    Attributes:
      columns: `[nse, n_sparse]`, the row of each entry.
      position: `[nse]`, where the entry was.
      number: `[nse]`, the number of its row in ascending order, `nse` for padding.
      last: `[nse]`, the place of the last entry of each row, by the row's number.
      rows: Scalar; how many rows there are.
    """

    columns: jax.Array
    position: jax.Array
    number: jax.Array
    last: jax.Array
    rows: jax.Array


@functools.partial(jax.jit, static_argnames=("shape", "is_sorted"))
def group_rows(
    indices: jax.Array, shape: tuple[int, ...], is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers the distinct rows in ascending order.

    Returns:
      The distinct rows `[nse, n_sparse]` in ascending order, then slots without
      meaning; how many they are; and for each entry the number of its row, `nse` for
      padding.
    """
    return lax.platform_dependent(
        indices,
        cpu=lambda indices: _search_groups(indices, shape, is_sorted),
        default=lambda indices: _order_groups(indices, shape, is_sorted),
    )


@functools.partial(jax.jit, static_argnames=("shape", "is_sorted"))
def sum_rows(
    indices: jax.Array, data: jax.Array, shape: tuple[int, ...], is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds up the entries of each row.

    Returns:
      The distinct rows and how many they are, as `group_rows`; and their sums, then
      zeros.
    """

    def scattered(indices: jax.Array, data: jax.Array) -> tuple[jax.Array, ...]:
        distinct, count, group = _search_groups(indices, shape, is_sorted)
        zeros = jnp.zeros_like(data)
        sums = scatter_add_rows(zeros, group[:, None], data, unique=False)
        return distinct, count, sums

    def neighbours(indices: jax.Array, data: jax.Array) -> tuple[jax.Array, ...]:
        found = _in_order(indices, shape, is_sorted)
        ordered = data if is_sorted else take_rows(data, found.position[:, None])
        return _distinct(found), found.rows, _sum_neighbours(ordered, found)

    return lax.platform_dependent(indices, data, cpu=scattered, default=neighbours)


def sum_groups(data: jax.Array, group: jax.Array) -> jax.Array:
    """Adds up the entries of each group, by the third result of `group_rows`."""
    _, _, sums = sum_rows(group[:, None], data, (len(group),), is_sorted=False)
    return sums


def _flat_rows(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array | None:
    """One number for each row, the largest for padding; none where no type holds it."""
    size = math.prod(shape[: indices.shape[1]])
    if size > jnp.iinfo(indices.dtype).max:
        return None
    key = jnp.zeros(len(indices), indices.dtype)
    for axis in range(indices.shape[1]):
        key = key * np.asarray(shape[axis], key.dtype) + indices[:, axis]
    return jnp.where(in_bounds(indices, shape), key, np.asarray(size, key.dtype))


def _unflatten(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    columns = []
    for size in reversed(shape[1:]):
        bound = np.asarray(max(size, 1), flat.dtype)
        columns.append(flat % bound)
        flat = flat // bound
    return jnp.stack([flat, *reversed(columns)], axis=1)


def _changes(columns: jax.Array) -> jax.Array:
    """Says of each entry but the last whether the next one has another row."""
    return jnp.any(columns[1:] != columns[:-1], axis=1)


def _search_groups(
    indices: jax.Array, shape: tuple[int, ...], is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`group_rows` for CPUs."""
    nse = len(indices)
    key = _flat_rows(indices, shape)
    if key is None:
        return _order_groups(indices, shape, is_sorted)
    # To sort the ids alone and to search them afterwards is three times faster on a CPU
    # than to carry the positions through the sort.
    ordered = key if is_sorted else jnp.sort(key)
    columns = _unflatten(ordered, shape[: indices.shape[1]])
    real = ordered < np.asarray(math.prod(shape[: indices.shape[1]]), key.dtype)
    first = jnp.concatenate([jnp.ones([1], bool), _changes(ordered[:, None])]) & real
    number = jnp.cumsum(first, dtype=jnp.int32) - 1
    target = jnp.where(first, number, nse)[:, None]
    distinct = scatter_rows(jnp.zeros_like(columns), target, columns)
    group = number if is_sorted else number[search(ordered, key)]
    return distinct, number[-1] + 1, jnp.where(in_bounds(indices, shape), group, nse)


def _order_groups(
    indices: jax.Array, shape: tuple[int, ...], is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`group_rows` for all other devices."""
    found = _in_order(indices, shape, is_sorted)
    position = found.position[:, None]
    group = scatter_rows(jnp.zeros_like(found.number), position, found.number)
    return _distinct(found), found.rows, group


def _in_order(indices: jax.Array, shape: tuple[int, ...], is_sorted: bool) -> _Order:
    nse, n_sparse = indices.shape
    slot = jnp.arange(nse, dtype=jnp.int32)
    key = _flat_rows(indices, shape)
    if is_sorted:
        columns, position = indices, slot
    elif key is None:
        inside = in_bounds(indices, shape)[:, None]
        padded = jnp.where(inside, indices, row_bounds(shape, indices))
        *keys, position = lax.sort((*padded.T, slot), num_keys=n_sparse)
        columns = jnp.stack(keys, axis=1)
    else:
        key, position = lax.sort((key, slot), num_keys=1)
        columns = _unflatten(key, shape[:n_sparse])
    real = in_bounds(columns, shape)
    last = jnp.concatenate([_changes(columns), jnp.ones([1], bool)]) & real
    before = jnp.cumsum(last, dtype=jnp.int32) - last.astype(jnp.int32)
    target = jnp.where(last, before, nse)[:, None]
    return _Order(
        columns=columns,
        position=position,
        number=jnp.where(real, before, nse),
        last=scatter_rows(jnp.zeros_like(slot), target, slot),
        rows=jnp.sum(last, dtype=jnp.int32),
    )


def _distinct(found: _Order) -> jax.Array:
    return take_rows(found.columns, found.last[:, None])


def _sum_neighbours(data: jax.Array, found: _Order) -> jax.Array:
    """The sums of the rows, then zeros; `data` is in their order."""
    sums = take_rows(_running_sums(data, found.number), found.last[:, None])
    real = jnp.arange(len(data), dtype=jnp.int32) < found.rows
    return jnp.where(expand(real, sums), sums, 0)


def _running_sums(data: jax.Array, number: jax.Array) -> jax.Array:
    """For each entry the sum of its row's entries up to it, in a fixed order.

    First within blocks of neighbours; then the last sums of the blocks, which are few,
    are themselves entries that add up.
    """
    nse = len(data)
    data, number = _in_blocks(data), _in_blocks(number)
    earlier = jnp.tril(jnp.ones([_NEIGHBOURS, _NEIGHBOURS], bool))
    joined = (number[:, :, None] == number[:, None, :]) & earlier[None]
    others = data[:, None]
    sums = jnp.sum(jnp.where(expand(joined, others), others, 0), axis=2)
    # Without a barrier XLA would compute the sums anew wherever one is read.
    sums = lax.optimization_barrier(sums)
    if len(sums) > 1:
        carried = _running_sums(sums[:, -1], number[:, -1])
        block = jnp.arange(len(sums), dtype=jnp.int32)
        # Read like this, rather than shifted by a slice, a GPU needs no branch for it.
        before = jnp.maximum(block - 1, 0)[:, None]
        joined = (block > 0)[:, None] & (
            number == take_rows(number[:, -1], before)[:, None]
        )
        carried = take_rows(carried, before)[:, None]
        sums = sums + jnp.where(expand(joined, carried), carried, 0)
    size = len(sums) * _NEIGHBOURS
    return sums.reshape(size, *data.shape[2:])[:nse]


def _in_blocks(entries: jax.Array) -> jax.Array:
    """`[nse, ...]`, filled up with zeros, as `[blocks, neighbours, ...]`."""
    blocks = -(-len(entries) // _NEIGHBOURS)
    missing = blocks * _NEIGHBOURS - len(entries)
    fill = [(0, missing, 0), *[(0, 0, 0)] * (entries.ndim - 1)]
    entries = lax.pad(entries, jnp.zeros([], entries.dtype), fill)
    return entries.reshape(blocks, _NEIGHBOURS, *entries.shape[1:])
