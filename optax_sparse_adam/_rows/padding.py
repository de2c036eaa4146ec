"""Padding: entries whose index is out of bounds of the table.

Arrays have a static number of entries, `nse`, and programs often have fewer rows to
name. The other slots are padding. One rule holds everywhere: an entry is padding if any
of its indices is negative or not less than the size of its dimension (`in_bounds` says
which). Scatters drop padding; `gather_rows` reads zeros for it, and `take_rows`, which
is faster, any row of the table. In `coalesce.Rows` and in updates the values of padding
are zeros; in a gradient that is not coalesced they may be anything, and whoever adds up
its values masks them.

Any index out of bounds is padding. Those that this package writes, for a table of
`num_rows` rows:

- `num_rows + slot` (`pad_indices`): distinct, as `unique_indices` promises, and
  ascending, so that padding at the end keeps sorted indices sorted. The indices of
  touched rows and of blocks (there `num_rows + place in the block`), and the targets of
  scatters into buffers of `nse` slots (`nse + slot`).
- `num_rows`, the sizes of all dimensions (`row_bounds`): where entries may be equal.
  Entries of a gradient that are not coalesced; the segment (`nse`) of entries that
  belong to none; rows that no device has requested (`shard_rows`, in `_collectives`).
- The last indices of the type (`last_indices`): for a batch of gradients of any
  shape, whose entries became zeros.
- The largest integer of the type (`padding_key`): in sort keys, which then do not
  depend on the size of the table; sorts after all rows. Never an index.
- `-1`: beside a single index, whose table need not be known (`append_padding`).

For a table of 10 rows, `[7, -3, 3, 12]` holds the rows 7 and 3 and two padding entries;
coalesced it is `[3, 7, 12, 13]`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def row_bounds(shape: tuple[int, ...], indices: jax.Array) -> np.ndarray:
    """The sizes of the sparse dimensions as one row of indices: `[1, n_sparse]`."""
    return np.asarray(shape[: indices.shape[1]], indices.dtype)[None, :]


def narrow_ids(ids: jax.Array, size: int) -> jax.Array:
    """The same ids as `int32`, or where there are more of them in a type that they fit.

    Ids out of bounds stay below or above all others, in the same order.
    """
    # A symbolic size, of `jax.export`, is an int32 in the program.
    is_large = isinstance(size, int) and size > jnp.iinfo(jnp.int32).max
    if ids.dtype == jnp.int32 or (is_large and ids.dtype in (jnp.uint32, jnp.int64)):
        return ids
    wide = jnp.int64 if is_large and ids.dtype.itemsize == 8 else jnp.int32
    # For 10 rows, 2**40 becomes 2**31 - 1 and -2**40 becomes -1: both stay padding.
    id_limits, wide_limits = jnp.iinfo(ids.dtype), jnp.iinfo(wide)
    low, high = max(id_limits.min, -1), min(id_limits.max, wide_limits.max)
    return jnp.clip(ids, *np.asarray([low, high], ids.dtype)).astype(wide)


def in_bounds(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Says for each of the `[nse, n_sparse]` indices whether it is a row: `[nse]`."""
    inside = (indices >= 0) & (indices < row_bounds(shape, indices))
    return jnp.all(inside, axis=1)


def expand_like(flags: jax.Array, data: jax.Array) -> jax.Array:
    """`flags` with further axes of size one, so that it broadcasts against `data`."""
    return flags.reshape(flags.shape + (1,) * (data.ndim - flags.ndim))


def mask_padding(
    data: jax.Array, indices: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """`data` with zeros in the padding slots."""
    zero = jnp.zeros([], data.dtype)  # a 0 would promote booleans
    return jnp.where(expand_like(in_bounds(indices, shape), data), data, zero)


def pad_indices(
    indices: jax.Array, valid: jax.Array, slot: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Replaces the indices of slots that are not valid by `num_rows + slot`.

    `indices` are `[nse, n_sparse]`, `valid` and `slot`, which is distinct, `[nse]`. The
    type of the indices must hold `num_rows + slot`; `entries.open_gradient` widens it.
    """
    outside = row_bounds(shape, indices) + slot.astype(indices.dtype)[:, None]
    return jnp.where(valid[:, None], indices, outside)


def last_indices(slot: jax.Array, axis: int) -> jax.Array:
    """The last indices of the type, as many as there are slots along an axis.

    Distinct and ascending as the slots are, and out of bounds of every table whose
    padding the type can hold.
    """
    # The size first: `jax.export` computes free ones in int32, which ends at the last.
    return slot - max(slot.shape[axis] - 1, 0) + jnp.iinfo(slot.dtype).max


def append_padding(index: jax.Array) -> jax.Array:
    """A single row and one of padding, `[2, n_sparse]`: for scatters of a single row.

    Problem: a scatter of a single row copies the table, and on a GPU or a TPU
    all-gathers a sharded one. Cause: XLA turns it into a dynamic-update-slice, and a
    gather of a single row into a dynamic-slice, which it fuses into each of its users;
    some of these run after the table has been updated in place. Remedy: scatters and
    gathers (see `gather_scatter.take_rows`) of two rows, which XLA leaves as they are.
    Safe, because padding is dropped. Test: `tests/gradients/test_cost_of_steps.py`, for
    gathers. Scatters on CPUs would not copy from jaxlib 0.10.2 on; a GPU has to tell.
    """
    if index.dtype.itemsize < 4:
        index = index.astype(jnp.int32)  # as a uint8, -1 may be a row
    outside = np.full(index.shape, -1).astype(index.dtype)
    return jnp.concatenate([index, outside])


def padding_key(dtype: DTypeLike) -> np.ndarray:
    """The sort key of padding: the largest integer of the type, never a row."""
    return np.asarray(jnp.iinfo(dtype).max, dtype)
