"""Gathers and scatters of rows by `[nse, n_sparse]` indices, by XLA; see `padding`.

They are `lax.gather` and `lax.scatter` with three additions: gathers and scatters of a
single row are of two (see `append_padding`), Explicit mesh axes are left to
the partitioner (`call_with_auto_axes`), and `checkify` does not look into them
(`unchecked`), because padding is out of bounds on purpose. `RowOps` are made of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax_extras.sharding import call_with_auto_axes, mesh_of
from .._jax_extras.unchecked import unchecked
from .padding import append_padding, expand_like, mask_padding, narrow_ids
from .source import Bounds


def _dimensions(table: jax.Array, n_sparse: int) -> tuple[Any, Any]:
    """Axes of a table that indices are for, and axes of gathered rows that are its."""
    return tuple(range(n_sparse)), tuple(range(1, 1 + table.ndim - n_sparse))


def take_rows(
    table: jax.Array, indices: jax.Array, *, in_parts: bool = False
) -> jax.Array:
    """`table[indices]`; padding reads any row.

    With `in_parts`, for CPUs, some columns at a time where that is faster.
    """
    if len(indices) == 1:  # as two, see `padding.append_padding`
        # Twice the row, and no padding: a derivative of this adds to no other row. And
        # behind a barrier, as a GPU would gather a single number once more for each
        # that reads it, also after it is written: XLA copies the whole table then.
        # Test, on a GPU: `test_steps` in `tests/gradients/test_cost_of_steps.py`.
        rows = take_rows(table, jnp.concatenate([indices, indices]))
        return lax.optimization_barrier(rows)[:1]
    n_sparse = indices.shape[1]
    if 0 in table.shape:  # XLA gathers nothing from a table without rows
        return jnp.zeros((len(indices), *table.shape[n_sparse:]), table.dtype)
    if in_parts and _is_slow(table, indices):
        starts = range(0, table.shape[-1], _PART)
        return jnp.concatenate([_take_part(table, indices, x) for x in starts], axis=-1)
    # A row of a [30, 40, 8] table at [k, 2] indices: axes (0, 1) are looked up, and the
    # row is axis 1 of the result, [k, 8].
    sparse, dense = _dimensions(table, n_sparse)
    # mode="clip" compares in int32 where 64-bit types are off, and changes every index
    # into a table of more than 2**31 rows. XLA clamps by itself.
    gather = functools.partial(
        lax.gather,
        dimension_numbers=lax.GatherDimensionNumbers(dense, sparse, sparse),
        slice_sizes=(1,) * n_sparse + table.shape[n_sparse:],
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    axes = (None, *range(n_sparse, table.ndim))
    read = unchecked(gather)
    return call_with_auto_axes(read, table, indices, like=table, axes=axes)


_PART = 16  # columns
VECTORIZED = 80  # columns from which on XLA for CPUs copies a row as vectors


def _is_slow(table: jax.Array, indices: jax.Array) -> bool:
    """Whether a CPU reads these rows faster `_PART` columns at a time.

    Problem: a CPU takes three times as long for rows of 64 float32 as for rows of 80.
    Cause: XLA leaves the loop over the columns to LLVM, which unrolls it where they are
    few and then copies one number at a time; so the processor waits for the memory of
    few rows at once. 16 columns LLVM copies as vectors. Remedy: gathers of 16 columns
    each, which XLA puts into one fusion. Safe, because they are the same numbers, and
    each gather is of the whole table: there is no slice of it that could be stored.
    At 24 columns and fewer, and where they are no multiple of 8, nothing is gained.
    Test: `test_rows_in_parts`, and the times of `benchmarks/steps.py` in plain JAX.
    """
    is_between = 24 < table.shape[-1] < VECTORIZED and table.shape[-1] % 8 == 0
    is_row = table.ndim == 2 and indices.shape[1] == 1
    is_known = table.dtype == jnp.float32 and mesh_of(table, indices).empty
    return is_between and is_row and is_known


def _take_part(table: jax.Array, indices: jax.Array, start: int) -> jax.Array:
    """`table[indices, start : start + _PART]`."""
    place = jnp.concatenate([indices, jnp.full_like(indices, start)], axis=1)
    gather = functools.partial(
        lax.gather,
        dimension_numbers=lax.GatherDimensionNumbers((1,), (0,), (0, 1)),
        slice_sizes=(1, min(_PART, table.shape[-1] - start)),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return unchecked(gather)(table, place)


def look_up_rows(table: jax.Array, ids: jax.Array, bounds: Bounds) -> jax.Array:
    """`table[ids]` as a loss has it, `[*ids.shape, *table.shape[1:]]`.

    Visible to `checkify`, as the bounds are the user's.
    """
    rank, row_shape = ids.ndim, table.shape[1:]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(rank, rank + len(row_shape))),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    return gather_windows(
        table,
        ids[..., None],
        dimension_numbers=numbers,
        slice_sizes=(1, *row_shape),
        mode=bounds.mode,
        fill_value=bounds.fill,
        indices_are_sorted=bounds.is_sorted,
        unique_indices=bounds.is_unique,
    )


def gather_windows(array: jax.Array, indices: jax.Array, **params: Any) -> jax.Array:
    """`lax.gather`, of at least two windows: see `take_rows`."""
    numbers = params["dimension_numbers"]
    is_one = math.prod(indices.shape[:-1]) == 1 and not numbers.operand_batching_dims
    if not is_one or mesh_of(array, indices).explicit_axes:
        return lax.gather(array, indices, **params)
    # Two equal lookups, stacked: one more axis in front of those of the window.
    offsets = tuple(1 + axis for axis in numbers.offset_dims)
    twice = numbers._replace(offset_dims=offsets)
    params |= {"dimension_numbers": twice, "unique_indices": False}
    return lax.gather(array, jnp.stack([indices] * 2), **params)[0]


def fill_outside(
    rows: jax.Array, ids: jax.Array, num_rows: int, fill: float
) -> jax.Array:
    """Looked-up rows, and a value in the place of each whose id is out of bounds."""
    ids = narrow_ids(ids, num_rows)
    inside = (ids >= 0) & (ids < np.asarray(num_rows, ids.dtype))
    return jnp.where(expand_like(inside, rows), rows, jnp.asarray(fill, rows.dtype))


def gather_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """`table[indices]`; padding reads zeros."""
    return mask_padding(take_rows(table, indices), indices, table.shape)


def prevent_fusion(rows: jax.Array) -> jax.Array:
    """Keeps the computation of rows out of the kernel that scatters them.

    Problem: a GPU copies the whole table. Cause: XLA fuses the computation of the new
    rows into their scatter, and gives a kernel that reads and writes one table a copy
    to read from. Remedy: an optimization barrier. Safe, because it changes no value.
    Test: `tests/whole/test_compilers.py`.
    """
    return lax.optimization_barrier(rows)


def order_after_gather(old: jax.Array, rows: jax.Array) -> jax.Array:
    """Orders the scatter of rows into a table after the gather of its old ones.

    Problem: XLA copies the table. Cause: where new rows are not computed from the old
    ones, as the last gradient in Adan, but something else is, XLA does not know which
    comes first; on a CPU it drops an `optimization_barrier` before it looks. Remedy: a
    select that depends on the old rows, and that XLA does not see through. Safe,
    because no value is above infinity, NaN included. Test: the memory of every
    transformation in `tests/optimizers/test_lazy_optax.py`, which tells when this can
    go.
    """
    if not jnp.issubdtype(old.dtype, jnp.floating):
        return rows
    return jnp.where(old > jnp.inf, old, rows.astype(old.dtype))


def order_after_read(values: jax.Array, indices: jax.Array) -> jax.Array:
    """Orders what is scattered at these indices after the read of stale rows.

    Problem: XLA for CPUs copies the arrays that `exact_adam` keeps of a table, or this.
    Cause: a transformation in front has read them, and what `exact_adam` writes need
    not depend on that; its `last` never does. Remedy: that of `order_after_gather`, for
    the indices, of the values that were computed of all of them. Safe for the same
    reason. Test: `test_memory_of_what_reads_in_front` in
    `tests/optimizers/test_memory.py`.
    """
    is_above = (values > jnp.inf).any(axis=tuple(range(1, values.ndim)))
    return jnp.where(is_above[:, None], -1, indices)


def cast_rows(rows: jax.Array, table: jax.Array) -> jax.Array:
    # PRNG keys reject `astype`, even to their own type.
    return rows if rows.dtype == table.dtype else rows.astype(table.dtype)


def scatter_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].set(rows)` for unique indices; padding is dropped."""
    rows = prevent_fusion(cast_rows(rows, table))
    return _scatter(lax.scatter, table, indices, rows, unique=True)


def scatter_add_rows(
    table: jax.Array, indices: jax.Array, rows: jax.Array, *, unique: bool
) -> jax.Array:
    """`table.at[indices].add(rows)`; padding is dropped."""
    rows = cast_rows(rows, table)
    return _scatter(lax.scatter_add, table, indices, rows, unique=unique)


def _scatter(
    function: Callable[..., jax.Array],
    table: jax.Array,
    indices: jax.Array,
    rows: jax.Array,
    *,
    unique: bool,
) -> jax.Array:
    if len(indices) == 1:  # [[7]] -> [[7], [-1]], whose second row is dropped
        indices, rows = append_padding(indices), jnp.concatenate([rows, rows])
    sparse, dense = _dimensions(table, indices.shape[1])
    scatter = functools.partial(
        function,
        dimension_numbers=lax.ScatterDimensionNumbers(dense, sparse, sparse),
        unique_indices=unique,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    axes = range(table.ndim)
    return call_with_auto_axes(
        unchecked(scatter), table, indices, rows, like=table, axes=axes
    )
