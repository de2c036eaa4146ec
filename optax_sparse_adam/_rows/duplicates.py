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

from .binary_search import search
from .gather_scatter import scatter_add_rows, scatter_rows, take_rows
from .padding import expand_like, in_bounds, padding_key

# How many neighbours a round adds up. XLA makes one GPU kernel of it, which reads each
# entry once from memory and this many times from the caches.
_NEIGHBOURS = 8


class _Order(NamedTuple):
    """The entries of a gradient in the order of their rows.

    Attributes:
      keys: `[nse, k]`, the row of each entry, as `_keys` has it.
      position: `[nse]`, where the entry was.
      number: `[nse]`, the number of its row in ascending order, `nse` for padding.
      last: `[nse]`, the place of the last entry of each row, by the row's number.
      rows: Scalar; how many rows there are.
    """

    keys: jax.Array
    position: jax.Array
    number: jax.Array
    last: jax.Array
    rows: jax.Array


def group_rows(
    indices: jax.Array, shape: tuple[int, ...], is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers the distinct rows in ascending order.

    Returns:
      The distinct rows `[nse, n_sparse]` in ascending order, then slots without
      meaning; for each entry the group that it is in, which is the place of its row
      among them, `nse` for padding; and how many rows they are.
    """
    keys, group, count = _group_keys(_keys(indices, shape), is_sorted=is_sorted)
    return _rows_of(keys, shape[: indices.shape[1]]), group, count


def sum_duplicates(
    indices: jax.Array, data: jax.Array, shape: tuple[int, ...], is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds up the entries of each row.

    Returns:
      The distinct rows, as `group_rows`; their sums, then zeros; and how many rows they
      are.
    """
    keys, sums, count = _sum_keys(_keys(indices, shape), data, is_sorted=is_sorted)
    return _rows_of(keys, shape[: indices.shape[1]]), sums, count


def sum_groups(data: jax.Array, group: jax.Array) -> jax.Array:
    """Adds up the entries of each group, by the second result of `group_rows`."""
    _, sums, _ = sum_duplicates(group[:, None], data, (len(group),), is_sorted=False)
    return sums


def _keys(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What tells rows apart, in their order, whatever the size of the table.

    JAX then traces what follows once for tables of all sizes.

    Returns:
      `[nse, 1]`, one number for each row; or the indices themselves, `[nse, n_sparse]`,
      where the type does not hold that.
    """
    sizes, keys = shape[: indices.shape[1]], indices
    if math.prod(sizes) <= jnp.iinfo(indices.dtype).max:
        keys = indices[:, :1]
        for axis, size in enumerate(sizes[1:], 1):
            bound = np.asarray(size, keys.dtype)
            keys = keys * bound + indices[:, axis : axis + 1]
    return jnp.where(in_bounds(indices, shape)[:, None], keys, padding_key(keys.dtype))


def _rows_of(keys: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """The indices `[nse, n_sparse]` of rows from their keys."""
    if keys.shape[1] == len(sizes):
        return keys
    columns = []
    for size in reversed(sizes[1:]):
        bound = np.asarray(max(size, 1), keys.dtype)
        columns.append(keys % bound)
        keys = keys // bound
    return jnp.concatenate([keys, *reversed(columns)], axis=1)


def _changes(keys: jax.Array) -> jax.Array:
    """Says of each entry but the last whether the next one has another row."""
    return jnp.any(keys[1:] != keys[:-1], axis=1)


@functools.partial(jax.jit, static_argnames="is_sorted")
def _group_keys(
    keys: jax.Array, *, is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return lax.platform_dependent(
        keys,
        cpu=lambda keys: _search_groups(keys, is_sorted),
        default=lambda keys: _order_groups(keys, is_sorted),
    )


@functools.partial(jax.jit, static_argnames="is_sorted")
def _sum_keys(
    keys: jax.Array, data: jax.Array, *, is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def scattered(keys: jax.Array, data: jax.Array) -> tuple[jax.Array, ...]:
        distinct, group, count = _search_groups(keys, is_sorted)
        zeros = jnp.zeros_like(data)
        sums = scatter_add_rows(zeros, group[:, None], data, unique=False)
        return distinct, sums, count

    def neighbours(keys: jax.Array, data: jax.Array) -> tuple[jax.Array, ...]:
        found = _in_order(keys, is_sorted)
        ordered = data if is_sorted else take_rows(data, found.position[:, None])
        return _distinct(found), _sum_neighbours(ordered, found), found.rows

    return lax.platform_dependent(keys, data, cpu=scattered, default=neighbours)


def _search_groups(
    keys: jax.Array, is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`group_rows` for CPUs."""
    if keys.shape[1] > 1:
        return _order_groups(keys, is_sorted)
    nse, key = len(keys), keys[:, 0]
    # To sort the ids alone and to search them afterwards is three times faster on a CPU
    # than to carry the positions through the sort.
    ordered = key if is_sorted else jnp.sort(key)
    first = jnp.concatenate([jnp.ones([1], bool), _changes(ordered[:, None])])
    first &= ordered != padding_key(keys.dtype)
    number = jnp.cumsum(first, dtype=jnp.int32) - 1
    target = jnp.where(first, number, nse)[:, None]
    distinct = scatter_rows(jnp.zeros_like(keys), target, ordered[:, None])
    group = number if is_sorted else number[search(ordered, key)]
    group = jnp.where(key != padding_key(keys.dtype), group, nse)
    return distinct, group, number[-1] + 1


def _order_groups(
    keys: jax.Array, is_sorted: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`group_rows` for all other devices."""
    found = _in_order(keys, is_sorted)
    position = found.position[:, None]
    group = scatter_rows(jnp.zeros_like(found.number), position, found.number)
    return _distinct(found), group, found.rows


def _in_order(keys: jax.Array, is_sorted: bool) -> _Order:
    nse = len(keys)
    slot = position = jnp.arange(nse, dtype=jnp.int32)
    if not is_sorted:
        *columns, position = lax.sort((*keys.T, slot), num_keys=keys.shape[1])
        keys = jnp.stack(columns, axis=1)
    real = keys[:, 0] != padding_key(keys.dtype)
    last = jnp.concatenate([_changes(keys), jnp.ones([1], bool)]) & real
    before = jnp.cumsum(last, dtype=jnp.int32) - last.astype(jnp.int32)
    target = jnp.where(last, before, nse)[:, None]
    return _Order(
        keys=keys,
        position=position,
        number=jnp.where(real, before, nse),
        last=scatter_rows(jnp.zeros_like(slot), target, slot),
        rows=jnp.sum(last, dtype=jnp.int32),
    )


def _distinct(found: _Order) -> jax.Array:
    return take_rows(found.keys, found.last[:, None])


def _sum_neighbours(data: jax.Array, found: _Order) -> jax.Array:
    """The sums of the rows, then zeros; `data` is in their order."""
    sums = take_rows(_running_sums(data, found.number), found.last[:, None])
    real = jnp.arange(len(data), dtype=jnp.int32) < found.rows
    return jnp.where(expand_like(real, sums), sums, 0)


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
    sums = jnp.sum(jnp.where(expand_like(joined, others), others, 0), axis=2)
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
        sums = sums + jnp.where(expand_like(joined, carried), carried, 0)
    size = len(sums) * _NEIGHBOURS
    return sums.reshape(size, *data.shape[2:])[:nse]


def _in_blocks(entries: jax.Array) -> jax.Array:
    """`[nse, ...]`, filled up with zeros, as `[blocks, neighbours, ...]`."""
    blocks = -(-len(entries) // _NEIGHBOURS)
    missing = blocks * _NEIGHBOURS - len(entries)
    fill = [(0, missing, 0), *[(0, 0, 0)] * (entries.ndim - 1)]
    entries = lax.pad(entries, jnp.zeros([], entries.dtype), fill)
    return entries.reshape(blocks, _NEIGHBOURS, *entries.shape[1:])
