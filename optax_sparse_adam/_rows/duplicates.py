"""Sums of duplicates: entries of one row, a segment, are added up.

Two methods, by `Sums`; `with_ops` chooses that of a platform, as `RowOps.sums`:

- "search", of a CPU, sorts the ids alone, finds the row of each entry by binary search
  among them, and scatter-adds every entry to its row.
- "scan", of other devices, sorts the ids together with the positions of the entries,
  and adds up each segment in a segmented scan. On a GPU, atomic additions to one
  address wait for each other, and their order, and with it the last bits, varies from
  run to run.

For a table of 10 rows and the ids `[7, 3, -1, 7]` with the values `[a, b, c, d]`, the
distinct rows are `[3, 7]`, `count` is 2, the segments of the entries are `[1, 0, 4, 1]`
(`nse`, here 4, for padding), and the sums are `[b, a + d, 0, 0]`.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .gather_scatter import scatter_add_rows, scatter_rows, take_rows
from .padding import expand_like, in_bounds, padding_key

# How many entries a tile of the segmented scan has. XLA makes one GPU kernel of a
# level, which reads each entry once from memory and this many times from the caches.
_TILE = 8

Sums = Literal["search", "scan"]

# Distinct rows; for each entry its segment, or for each row its sum; how many rows.
Segments = tuple[jax.Array, jax.Array, jax.Array]


class _SortedEntries(NamedTuple):
    """The entries of a gradient in the order of their rows.

    Attributes:
      distinct: `[nse, k]`, the keys of the distinct rows, as `_keys` has them.
      position: `[nse]`, where the entry was.
      segment: `[nse]`, the place of its row among the distinct rows, `nse` for padding.
      last: `[nse]`, for each segment the place of its last entry.
      count: Scalar; how many rows there are.
    """

    distinct: jax.Array
    position: jax.Array
    segment: jax.Array
    last: jax.Array
    count: jax.Array  # type: ignore[assignment]  # tuple has a method count


def segment_rows(
    indices: jax.Array, shape: tuple[int, ...], is_sorted: bool, by: Sums
) -> Segments:
    """Assigns entries to segments, one for each row, in ascending order of the rows.

    Returns:
      The distinct rows `[nse, n_sparse]` in ascending order, then slots without
      meaning; for each entry the segment that it is in, which is the place of its row
      among them, `nse` for padding; and how many rows they are.
    """
    keys, segment, count = _segment_keys(by, _keys(indices, shape), is_sorted)
    return _indices_of(keys, shape[: indices.shape[1]]), segment, count


def sum_duplicates(
    indices: jax.Array,
    data: jax.Array,
    shape: tuple[int, ...],
    is_sorted: bool,
    by: Sums,
) -> Segments:
    """Adds up the entries of each row.

    Args:
      indices: `[nse, n_sparse]`.
      data: `[nse, *row_shape]`.
      shape: Of the table.
      is_sorted: Whether the indices are in order.
      by: The method.

    Returns:
      The distinct rows, as `segment_rows`; their sums, then zeros; and their number.
    """
    keys, sums, count = _sum_keys(by, _keys(indices, shape), data, is_sorted)
    return _indices_of(keys, shape[: indices.shape[1]]), sums, count


def _keys(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sort keys of the entries, which order them as their rows are ordered.

    Padding has the same key for tables of all sizes, so that JAX traces what follows
    once for all of them.

    Returns:
      `[nse, 1]`, the place of the row in the flattened table; or the indices
      themselves, `[nse, n_sparse]`, where the type does not hold that.
    """
    if not isinstance(indices.shape[0], int):
        raise ValueError(
            "The entries of a row are added up, by coalesce and by every optimiser, in "
            f"programs that know their number; got {indices.shape[0]} of them, a size "
            "that jax.export leaves free. Export a program for each size of the batch. "
            "A gradient itself, and evaluation, may have free sizes."
        )
    # The row (2, 3) of a table of 4 x 5 rows has the key 2 * 5 + 3 = 13.
    sizes, keys = shape[: indices.shape[1]], indices
    if math.prod(sizes) <= jnp.iinfo(indices.dtype).max:
        keys = indices[:, :1]
        for axis, size in enumerate(sizes[1:], 1):
            bound = np.asarray(size, keys.dtype)
            keys = keys * bound + indices[:, axis : axis + 1]
    return jnp.where(in_bounds(indices, shape)[:, None], keys, padding_key(keys.dtype))


def _indices_of(keys: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """The indices `[nse, n_sparse]` of rows from their keys."""
    if keys.shape[1] == len(sizes):
        return keys
    columns = []  # 13 of 4 x 5 rows: 13 % 5 = 3, 13 // 5 = 2
    for size in reversed(sizes[1:]):
        bound = np.asarray(max(size, 1), keys.dtype)
        columns.append(keys % bound)
        keys = keys // bound
    return jnp.concatenate([keys, *reversed(columns)], axis=1)


def _differs_from_next(keys: jax.Array) -> jax.Array:
    """Says of each entry but the last whether the next one has another row."""
    return jnp.any(keys[1:] != keys[:-1], axis=1)


@functools.partial(jax.jit, static_argnames=("by", "is_sorted"))
def _segment_keys(by: Sums, keys: jax.Array, is_sorted: bool) -> Segments:
    segments = _segments_by_search if by == "search" else _segments_by_sort
    return segments(keys, is_sorted)


@functools.partial(jax.jit, static_argnames=("by", "is_sorted"))
def _sum_keys(by: Sums, keys: jax.Array, data: jax.Array, is_sorted: bool) -> Segments:
    if by == "search":
        distinct, segment, count = _segments_by_search(keys, is_sorted)
        zeros = jnp.zeros_like(data)
        sums = scatter_add_rows(zeros, segment[:, None], data, unique=False)
        return distinct, sums, count
    order = _sort_entries(keys, is_sorted)
    ordered = data if is_sorted else take_rows(data, order.position[:, None])
    # Its sum so far, at the last entry of a segment, is the sum of the segment.
    sums = _segmented_scan(ordered, order.segment)
    sums = take_rows(sums, order.last[:, None])
    real = expand_like(jnp.arange(len(data), dtype=jnp.int32) < order.count, sums)
    return order.distinct, jnp.where(real, sums, 0), order.count


def _segments_by_search(keys: jax.Array, is_sorted: bool) -> Segments:
    """`segment_rows` for CPUs."""
    if keys.shape[1] > 1:
        return _segments_by_sort(keys, is_sorted)
    nse, key = len(keys), keys[:, 0]
    # A CPU sorts the ids alone and searches them afterwards three times faster than it
    # carries the positions through the sort.
    # For the keys [7, 3, P, 7] (P: padding) `ordered` is [3, 7, 7, P], `first` is
    # [1, 1, 0, 0], `rank` [0, 1, 1, 1], and the segments are [1, 0, 4, 1].
    ordered = key if is_sorted else jnp.sort(key)
    first = jnp.concatenate([jnp.ones([1], bool), _differs_from_next(ordered[:, None])])
    first &= ordered != padding_key(keys.dtype)
    rank = jnp.cumsum(first, dtype=jnp.int32) - 1
    # Entries that are not the first of their row get targets out of bounds, each its
    # own: `[0, 1, 6, 7]` here. The scatter drops them, and its indices are unique.
    target = jnp.where(first, rank, nse + jnp.arange(nse, dtype=jnp.int32))[:, None]
    distinct = scatter_rows(jnp.zeros_like(keys), target, ordered[:, None])
    segment = rank if is_sorted else rank[search(ordered, key)]
    segment = jnp.where(key != padding_key(keys.dtype), segment, nse)
    return distinct, segment, rank[-1] + 1


def search(ordered: jax.Array, keys: jax.Array) -> jax.Array:
    """How many of the ordered values, at least one, are less than each key: `[keys]`.

    For `ordered` `[2, 5, 5]` and the keys `[1, 5, 9]` it is `[0, 1, 3]`. It is
    `jnp.searchsorted`, which takes twice the time on a CPU, and with jax 0.10.2 is an
    error inside of a `shard_map` over some of the axes of a mesh.
    """
    size = len(ordered)
    # Steps of 4, 2 and 1 for 5 values: `place` of them are known to be less than the
    # key, and it moves on where `step` more of them are.
    steps = 1 << np.arange((size - 1).bit_length(), dtype=np.int32)[::-1]

    def body(place: jax.Array, step: Any) -> tuple[jax.Array, None]:
        further = place + jnp.minimum(step, size - place)
        is_less = take_rows(ordered, further[:, None] - 1) < keys
        return jnp.where(is_less, further, place), None

    start = jnp.where(ordered[-1:] < keys, np.int32(size), np.int32(0))
    return lax.scan(body, start, steps)[0]


def _segments_by_sort(keys: jax.Array, is_sorted: bool) -> Segments:
    """`segment_rows` for all other devices."""
    order = _sort_entries(keys, is_sorted)
    position = order.position[:, None]
    segment = scatter_rows(jnp.zeros_like(order.segment), position, order.segment)
    return order.distinct, segment, order.count


def _sort_entries(keys: jax.Array, is_sorted: bool) -> _SortedEntries:
    """A stable sort of the entries by key, so that sums have a fixed order."""
    nse = len(keys)
    slot = position = jnp.arange(nse, dtype=jnp.int32)
    if not is_sorted:
        *columns, position = lax.sort((*keys.T, slot), num_keys=keys.shape[1])
        keys = jnp.stack(columns, axis=1)
    real = keys[:, 0] != padding_key(keys.dtype)
    last = jnp.concatenate([_differs_from_next(keys), jnp.ones([1], bool)]) & real
    # `last` marks the last entry of each segment, so the count of those before an entry
    # is its segment. For the sorted keys [3, 7, 7, P]: `last` is [1, 0, 1, 0], `before`
    # [0, 1, 1, 2], the segments are [0, 1, 1, 4], and their last entries at 0 and 2.
    before = jnp.cumsum(last, dtype=jnp.int32) - last.astype(jnp.int32)
    segment = jnp.where(real, before, nse)
    count = jnp.sum(last, dtype=jnp.int32)
    target = jnp.where(last, before, nse + slot)[:, None]
    last = scatter_rows(jnp.zeros_like(slot), target, slot)
    return _SortedEntries(
        take_rows(keys, last[:, None]), position, segment, last, count
    )


def _segmented_scan(data: jax.Array, segment: jax.Array) -> jax.Array:
    """For each entry the sum of its segment's entries up to it, in a fixed order.

    A segmented scan (a prefix sum that restarts with each segment) in two steps: sums
    within tiles of sorted entries; then a scan of the last sums of the tiles, which are
    few, and which every tile adds to the entries that continue the segment before it.
    With tiles of two, the segments `[0, 0 | 0, 1 | 1, 1]` and the values
    `[a, b | c, d | e, f]`:

        sums within tiles            [a, a+b | c,     d | e,   e+f  ]
        scan of their last ones      [   a+b |        d |    d+e+f  ]
        carried over                 [       | a+b      | d,   d    ]
        result                       [a, a+b | a+b+c, d | d+e, d+e+f]
    """
    nse = len(data)
    data, segment = _split_into_blocks(data), _split_into_blocks(segment)
    earlier = jnp.tril(jnp.ones([_TILE, _TILE], bool))
    # `joined[b, i, j]`: whether entry j of block b belongs to the sum at entry i. Of
    # the segments [0, 0, 1] the rows are [1, 0, 0], [1, 1, 0] and [0, 0, 1].
    joined = (segment[:, :, None] == segment[:, None, :]) & earlier[None]
    values = data[:, None]
    sums = jnp.sum(jnp.where(expand_like(joined, values), values, 0), axis=2)
    # Without this barrier, XLA computes the sums again wherever one is read.
    sums = lax.optimization_barrier(sums)
    if len(sums) > 1:
        carried = _segmented_scan(sums[:, -1], segment[:, -1])
        block = jnp.arange(len(sums), dtype=jnp.int32)
        # A gather, as a GPU would need a branch for a shift by a slice.
        before = jnp.maximum(block - 1, 0)[:, None]
        joined = (block > 0)[:, None] & (
            segment == take_rows(segment[:, -1], before)[:, None]
        )
        carried = take_rows(carried, before)[:, None]
        sums = sums + jnp.where(expand_like(joined, carried), carried, 0)
    size = len(sums) * _TILE
    return sums.reshape(size, *data.shape[2:])[:nse]


def _split_into_blocks(entries: jax.Array) -> jax.Array:
    """`[nse, ...]`, filled up with zeros, as `[blocks, _TILE, ...]`."""
    blocks = -(-len(entries) // _TILE)
    missing = blocks * _TILE - len(entries)
    fill = [(0, missing, 0), *[(0, 0, 0)] * (entries.ndim - 1)]
    entries = lax.pad(entries, jnp.zeros([], entries.dtype), fill)
    return entries.reshape(blocks, _TILE, *entries.shape[1:])
