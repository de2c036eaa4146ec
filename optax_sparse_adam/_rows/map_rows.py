"""Gather rows, update them, scatter them: in blocks on a CPU, else in one pass.

Blocks of some thousand rows stay in a CPU's cache, and need no temporaries of the size
of the gradient. A GPU runs one pass. Whole steps of `lazy` with 1M rows of 64 float32
and 65,536 ids, in blocks and in one pass: 23 and 27 ms and 36 and 51 MB for
`optax.adam`, 27 and 36 ms and 36 and 67 MB for `optax.lion`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax_extras.sharding import mesh_of, shard_columns_like
from .entries import Rows
from .gather_scatter import gather_rows
from .padding import in_bounds, mask_padding, pad_indices

Tables = tuple[jax.Array, ...]
RowFunction = Callable[..., tuple[jax.Array, Tables]]

# Rows of this many bytes (one operand) make a block on a CPU. Measured with 1M rows of
# 64 float32 and 65,536 ids: 512 and 1024 rows a block are equally fast, 256 and 4096
# slower. Larger blocks leave the second-level cache, smaller ones pay for the loop.
_BLOCK_BYTES = 1 << 18


_PARTS, _PART_BYTES = 4, 64 << 20


def parts(rows: Rows, tables: Tables) -> list[Rows]:
    """Large gradients as up to four, for what makes one pass over each.

    Problem: at 1,048,576 ids of 128 columns a step of `sparse_adam` holds 2.2 GB on a
    GPU, 4.1 gradients. Cause: XLA makes one fusion of the formula, which writes the
    update and all moments, beside the sums that it reads, before they are scattered.
    Remedy: a quarter of the rows after another, 1.0 GB; the bytes that are moved are
    the same. From 64 MB a part on, as each costs five launches of some microseconds.
    Safe, because each row is treated alone, and a part writes before the next one
    reads. Not where a table has integers, as dates: XLA then copied the tables, which
    `order_after_gather` does not prevent for these. Test: `tests/rows/test_parts.py`,
    and `tests/whole/test_compilers.py` for the memory.
    """
    nse = len(rows.indices)
    number = max(1, min(_PARTS, rows.data.nbytes // _PART_BYTES))
    is_float = all(jnp.issubdtype(x.dtype, jnp.floating) for x in tables)
    takes = is_float and _has_wide_state(rows, tables)
    if number == 1 or not takes or not mesh_of(rows.data, *tables).empty:
        return [rows]
    size = -(-nse // number)
    starts = range(0, nse, size)
    pieces = [(rows.indices[i : i + size], rows.data[i : i + size]) for i in starts]
    return [Rows(indices, data, rows.count) for indices, data in pieces]


def in_one_pass(
    ops: Any,
    row_fn: RowFunction,
    rows: Rows,
    tables: Tables,
    read: Tables,
    *args: Any,
) -> tuple[jax.Array, Tables]:
    """Gathers rows, calls `row_fn(data, rows_of_tables, *args)`, scatters rows.

    `row_fn` must treat each row alone: on a CPU it sees them in blocks. It gets rows of
    the tables in `read` after those of `tables`, and returns new ones of `tables`.

    Returns:
      The first result of `row_fn`, `[nse, *row_shape]` (zero where padding), and the
      tables with the touched rows replaced.
    """
    rows, shape = _laid_out(rows, (*tables, *read)), tables[0].shape
    out, tables = ops.update(row_fn, rows.data, rows.indices, tables, read, *args)
    return mask_padding(out, rows.indices, shape).astype(rows.data.dtype), tables


def in_blocks(
    ops: Any,
    row_fn: RowFunction,
    rows: Rows,
    tables: Tables,
    read: Tables,
    *args: Any,
) -> tuple[jax.Array, Tables]:
    """`in_one_pass`, in a loop over blocks of rows where that is faster."""
    # With a state of one number a row, as in row-wise Adagrad, one pass takes 5 to 20 %
    # less time.
    nse, size = len(rows.data), _block_rows(rows.data)
    if not _has_wide_state(rows, tables) or nse <= size:
        return in_one_pass(ops, row_fn, rows, tables, read, *args)
    rows, shape = _laid_out(rows, (*tables, *read)), tables[0].shape

    # The C library maps and faults in temporary memory above 32 MB afresh at each call,
    # which costs more than the arithmetic; a block stays in cache. Under vmap, each
    # iteration would copy the tables: there is one pass then. Gather and scatter read
    # and write the values, too, because XLA copies a whole buffer in each iteration
    # that both slices and updates it.
    # With 5 touched rows in 10 slots and blocks of 4: slots 0 to 3, then 4 to 7, of
    # which 5 to 7 are padding. No block begins at slot 8.
    def block(state: Any) -> Any:
        start, data, tables = state
        place = jnp.arange(size, dtype=jnp.int32)
        slot = start + place
        indices = gather_rows(rows.indices, slot[:, None])
        # Padding is numbered by its place in the block: for a slot beyond nse, num_rows
        # + slot might not fit the type. It stays distinct from the padding that was
        # there, as slots of the last block are larger than any place.
        indices = pad_indices(indices, slot < nse, place, shape)
        part = ops.take(data, slot[:, None])
        out, tables = ops.update(row_fn, part, indices, tables, read, *args)
        # Padding keeps its zeros: dropped here, it needs no mask over the values.
        target = jnp.where(in_bounds(indices, shape), slot, nse + slot)
        return start + size, ops.put(data, target[:, None], out), tables

    state = jnp.zeros([], rows.count.dtype), rows.data, tables
    return lax.while_loop(lambda state: state[0] < rows.count, block, state)[1:]


def _has_wide_state(rows: Rows, tables: Tables) -> bool:
    ndim = rows.indices.shape[1] + rows.data.ndim - 1
    return any(x.ndim == ndim for x in tables)


def _laid_out(rows: Rows, arrays: Tables) -> Rows:
    """The rows, whose columns lie as those of the first array that has columns.

    What has one scalar for each row, `[num_rows]`, does not say.
    """
    ndim = rows.indices.shape[1] + rows.data.ndim - 1
    for table in [x for x in arrays if x.ndim == ndim][:1]:
        rows = rows._replace(data=shard_columns_like(table, rows.data))
    return rows


def all_in_one_pass(
    ops: Any, function: Callable[..., Tables], tables: Tables, *args: Any
) -> Tables:
    return function(tables, *args)


def all_in_blocks(
    ops: Any, function: Callable[..., Tables], tables: Tables, *args: Any
) -> Tables:
    """`function(tables, *args)`, the new tables, in place.

    `function` must treat each row alone: on a CPU it sees them in blocks, because XLA
    for CPUs computes the tables one after the other, and keeps a copy of each old one
    that another new one is computed from. The first table has all columns. On a mesh
    there are no blocks: their rows might lie on another device.
    """
    num_rows = len(tables[0]) if tables[0].ndim else 1
    size = _block_rows(tables[0]) if tables[0].ndim else 1
    mesh = mesh_of(*tables)
    if num_rows <= size or mesh.auto_axes or mesh.explicit_axes:
        return function(tables, *args)

    def by_rows(_: Any, rows: Tables, *args: Any) -> tuple[Any, Tables]:
        return (), function(rows, *args)

    ops = replace(ops, in_blocks=False)  # rows in order are read fast as they lie

    def block(i: jax.Array, tables: Tables) -> Tables:
        place = jnp.arange(size, dtype=jnp.int32)[:, None]
        slot = i * size + place  # the last block may go beyond the table
        indices = jnp.where(slot < num_rows, slot, num_rows + place)
        new_tables: Tables = ops.update(by_rows, (), indices, tables, (), *args)[1]
        return new_tables

    return lax.fori_loop(0, -(-num_rows // size), block, tables)


def _block_rows(data: jax.Array) -> int:
    row_bytes = math.prod(data.shape[1:]) * data.dtype.itemsize
    return max(1, _BLOCK_BYTES // max(1, row_bytes))
