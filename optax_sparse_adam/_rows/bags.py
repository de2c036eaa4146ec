"""Bags of ids: pooled lookups, `sum_j weight_j * table[id_j]` for each bag.

For a table of the rows `[r0, r1, r2, r3]`, the bags `[[0, 3], [3, -1]]` are `r0 + r3`
and `r3`; -1 is padding. As ids in a row they are `ids = [0, 3, 3]` with
`segments = [0, 0, 1]`, the bag of each entry.

`lookups.sum_bags` is one lookup to `value_and_grad`: a bag's row is a sum, so that the
gradient of the table needs no more than that of each bag, `[B, D]` (`BagEntries`). The
rows themselves, `[N, D]`, are nowhere: the kernel adds them up as it reads them, and
XLA fuses the gather with the sum. Mean and sqrtn are that sum, divided. Max keeps the
rows, whose gradient goes to the first of the largest.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax_extras.sharding import (
    call_with_auto_axes,
    mesh_axes,
    mesh_of,
    partitions_of,
    shard_axes_like,
)
from .bag_sums import add_up
from .checks import refuse_masked
from .entries import accumulator_dtype
from .lookups import look_up_padded, sum_bags
from .padding import expand_like, narrow_ids
from .source import Source

MODES = ("sum", "mean", "sqrtn", "max")
_FORMS = (
    "embedding_bag takes ids [bags, length]; or ids [entries] with offsets [bags]; or "
    "ids [entries] with segment_ids [entries] and num_segments"
)


def embedding_bag(
    table: jax.Array,
    ids: jax.Array,
    *,
    offsets: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    weights: jax.Array | None = None,
    mode: str = "sum",
    include_last_offset: bool = False,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
) -> jax.Array:
    """Sums, means or maxima of looked-up rows, one for each bag of ids.

    As `torch.nn.functional.embedding_bag` and TensorFlow's `embedding_lookup_sparse`:
    `sum_j weights_j * table[ids_j]`. Under `value_and_grad` it is a lookup as others
    are: the gradient of the table is row-sparse. Within one program the optimisers
    take it by bags, `[bags, *row_shape]`; what asks for its `data`, or maps over its
    arrays, sees a row for each id.

    Ids come in one of three forms:

    - `ids [bags, length]`.
    - `ids [entries]` with `offsets [bags]`, ascending, as in torch: bag `i` begins at
      `offsets[i]` and ends where the next one begins, or with the ids. Ids before the
      first offset belong to no bag. With `include_last_offset` there are `bags + 1`
      offsets, and the last one ends the last bag: ids behind it belong to no bag.
    - `ids [entries]` with `segment_ids [entries]`, in any order, and `num_segments`, as
      in `jax.ops.segment_sum`. A segment out of bounds belongs to no bag.

    In each form ids out of bounds, negative ones included, are padding: shapes are
    fixed, so pad ragged data with `-1`.

    Args:
      table: `[num_rows, *row_shape]`, floating point.
      ids: Integers.
      offsets: Where each bag begins.
      segment_ids: The bag of each id.
      num_segments: The number of bags, known while tracing.
      weights: One for each id, of the shape of `ids`; differentiable. Not with "max".
      mode: "sum"; "mean", `sum(w * x) / sum(w)`; "sqrtn", `sum(w * x) /
        sqrt(sum(w**2))`; or "max", whose gradient goes to the first of equal rows, as
        in torch. Padding is not counted.
      include_last_offset: Whether the last offset is the end of the last bag, as in
        torch and in CSR matrices, for the used part of a buffer of fixed length.
      indices_are_sorted: A promise, as that of `table.at[ids].get`, that ids ascend,
        with padding and ids of no bag at the end. The gradient has this flag.
      unique_indices: A promise that no row is there twice, in whatever bag. The
        gradient has a row for each id, and this flag: updates sort nothing.

    Returns:
      `[bags, *row_shape]` in the table's type, added up in float32 at least. A bag
      without ids is zeros; so is a mean whose weights add up to zero.

    Raises:
      TypeError: If ids are not integers, or table or weights not floating point.
      ValueError: If shapes do not fit, forms are mixed, or the mode is unknown; if
        offsets are negative or do not ascend, or the last bag ends behind the ids,
        where a compiled program makes NaN of all bags.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table = jnp.array([[1.0], [2.0], [4.0], [8.0]])
      >>> osa.embedding_bag(table, jnp.array([[0, 3], [3, -1]])).ravel().tolist()
      [9.0, 8.0]
      >>> ids, begins = jnp.array([0, 3, 3]), jnp.array([0, 2])
      >>> osa.embedding_bag(table, ids, offsets=begins, mode="mean").ravel().tolist()
      [4.5, 8.0]
      >>> grad = osa.grad(lambda t: jnp.sum(osa.embedding_bag(t, ids, offsets=begins)))
      >>> osa.coalesce(grad(table)).indices.ravel().tolist()  # 6 is padding
      [0, 3, 6]
    """
    table, ids = _table_of(table), as_array(ids)
    bags = {"offsets": offsets, "segment_ids": segment_ids, "weights": weights}
    arrays = {name: as_array(x) for name, x in bags.items() if x is not None}
    num_bags = _check(table, ids, arrays, num_segments, mode, include_last_offset)
    if offsets is not None and not isinstance(offsets, jax.core.Tracer):
        begins = np.asarray(offsets)
        if (begins[1:] < begins[:-1]).any() or (begins < 0).any():
            raise ValueError(
                f"offsets must be ascending, from 0 on, got {begins.tolist()}."
            )
        if include_last_offset and begins[-1] > len(ids):
            raise ValueError(
                f"The last of the offsets must be at most {len(ids)}, the number of "
                f"ids, as it ends the last bag; got {begins.tolist()}."
            )
    if num_bags == 0:
        return jnp.zeros((0, *table.shape[1:]), table.dtype)
    ids, segments, weights, valid = _flatten(table, ids, num_bags, **arrays)
    flags = indices_are_sorted, unique_indices
    pooled = _pooled(table, ids, segments, weights, valid, num_bags, mode, flags)
    if isinstance(offsets, jax.core.Tracer):
        # What would raise outside of a program is NaN inside.
        is_ascending = jnp.all(offsets[1:] >= offsets[:-1]) & (offsets[0] >= 0)
        if include_last_offset:
            end: Any = ids.shape[0]
            if isinstance(end, int):  # else a symbolic size, of `jax.export`
                end = np.asarray(min(end, jnp.iinfo(offsets.dtype).max), offsets.dtype)
            is_ascending &= offsets[-1] <= end
        pooled = jnp.where(is_ascending, pooled, jnp.full_like(pooled, jnp.nan))
    return pooled


def _pooled(
    table: jax.Array,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
    valid: jax.Array,
    num_bags: int,
    mode: str,
    flags: tuple[bool, bool],
) -> jax.Array:
    dtype = table.dtype
    if mode == "max" and ids.size:
        rows = look_up_padded(table, ids, flags)
        entries = (valid,) if segments is None else (valid, segments)
        largest = functools.partial(_max, num_bags)
        axes = (None, *range(ids.ndim, rows.ndim))
        return call_with_auto_axes(largest, rows, *entries, like=rows, axes=axes)
    if any(flags):  # nothing to add up for a row: an ordinary lookup hands them on
        rows = look_up_padded(table, ids, flags)
        sums = add_up(num_bags, rows, segments, weights)
    else:
        sums = sum_bags(num_bags, Source(table), ids, segments, weights)
    if mode in ("sum", "max"):
        return sums.astype(dtype)
    counted = valid.astype(sums.dtype) if weights is None else weights
    if mode == "sqrtn":
        counted = counted * counted
    size = add_up(num_bags, counted, segments)
    bags, _, *columns = (
        {*mesh_axes(axis)}
        for x in (size, sums)
        for axis in partitions_of(jax.typeof(x).sharding.spec)
    )
    if any(bags & axes for axes in columns):  # no axis can split both
        size = shard_axes_like(sums, size, (0,))
    size = expand_like(size, sums)
    empty, size = size == 0, jnp.where(size == 0, jnp.ones_like(size), size)
    means = sums / (jnp.sqrt(size) if mode == "sqrtn" else size)
    return jnp.where(empty, jnp.zeros_like(means), means).astype(dtype)


def _check(
    table: jax.Array,
    ids: jax.Array,
    arrays: dict[str, jax.Array],
    num_segments: int | None,
    mode: str,
    include_last_offset: bool,
) -> int:
    """The number of bags; raises unless the arguments fit."""
    floats = {"a table": table} | {k: v for k, v in arrays.items() if k == "weights"}
    for name, x in floats.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"embedding_bag takes {name} of floating point, got {x.dtype}."
            )
    for name, x in ({"ids": ids} | arrays).items():
        if name != "weights" and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"embedding_bag takes {name} of integers, got {x.dtype}.")
    if mode not in MODES:
        raise ValueError(f"embedding_bag has the modes {MODES}, got {mode!r}.")
    if mode == "max" and "weights" in arrays:
        raise ValueError("embedding_bag takes no weights with mode 'max'. Drop them.")
    shapes = {name: x.shape for name, x in ({"ids": ids} | arrays).items()}
    forms = [name for name in ("offsets", "segment_ids") if name in arrays]
    if (
        len(forms) > 1
        or ids.ndim != (1 if forms else 2)
        or ("segment_ids" in arrays) != (num_segments is not None)
        or ("offsets" in arrays and arrays["offsets"].ndim != 1)
        or ("segment_ids" in arrays and arrays["segment_ids"].shape != ids.shape)
    ):
        raise ValueError(f"{_FORMS}; got {shapes} and num_segments={num_segments}.")
    if include_last_offset and not arrays.get("offsets", ids[:0]).size:
        raise ValueError(
            "include_last_offset is for offsets [bags + 1], the last of which ends the "
            f"last bag; got {shapes}."
        )
    if "weights" in arrays and arrays["weights"].shape != ids.shape:
        raise ValueError(f"embedding_bag takes a weight for each id, got {shapes}.")
    if table.ndim and not isinstance(table.shape[0], int):
        raise ValueError(
            "embedding_bag takes a table of a known number of rows, got the shape "
            f"{table.shape}. jax.export may leave the sizes of ids free, not the "
            "table's."
        )
    if table.ndim == 0 or not table.shape[0]:
        raise ValueError(f"embedding_bag takes a table of rows, got {table.shape}.")
    if num_segments is None:
        return arrays.get("offsets", ids).shape[0] - bool(include_last_offset)
    num_bags = operator.index(num_segments)
    if num_bags < 0:
        raise ValueError(f"num_segments must be at least 0, got {num_bags}.")
    return num_bags


def _flatten(
    table: jax.Array,
    ids: jax.Array,
    num_bags: int,
    offsets: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Ids, segments and weights as `sum_bags` takes them; and which ids are real.

    An id of no bag becomes padding of some bag. The weight of padding becomes zero.
    """
    ids, segments = narrow_ids(ids, table.shape[0]), segment_ids
    valid = (ids >= 0) & (ids < np.asarray(len(table), ids.dtype))
    if offsets is not None:
        # Offsets [0, 2] of three ids: [1, 0, 1] begin a bag, so the bags are [0, 0, 1].
        # An empty bag at the end begins behind the ids.
        begins = jnp.zeros([ids.shape[0] + 1], jnp.int32)
        offsets = jnp.clip(narrow_ids(offsets, ids.shape[0]), 0, ids.shape[0])
        segments = jnp.cumsum(begins.at[offsets].add(1)[:-1]) - 1
    if segments is not None:
        segments = narrow_ids(segments, num_bags)
        valid &= (segments >= 0) & (segments < num_bags)
        # The largest number, so that ids in order stay so with padding at their end.
        ids = jnp.where(valid, ids, jnp.iinfo(ids.dtype).max)
        segments = jnp.clip(segments, 0, num_bags - 1)
    if weights is not None:
        weights = weights.astype(accumulator_dtype(table.dtype))
        if mesh_of(ids, weights).explicit_axes:  # which may lie otherwise than ids
            weights = shard_axes_like(ids, weights, range(ids.ndim))
        weights = jnp.where(valid, weights, jnp.zeros_like(weights))
    return ids, segments, weights, valid


def _table_of(table: Any) -> jax.Array:
    try:
        return jnp.asarray(table)
    except (TypeError, ValueError):
        dtype = f" of {table.dtype}" if isinstance(table, np.ndarray) else ""
        raise TypeError(
            "embedding_bag takes a table that is an array of a type that JAX has, got "
            f"a {type(table).__name__}{dtype}. Of a layer give its array: "
            "embed.embedding[...] in Flax NNX, embedding.weight in Equinox."
        ) from None


def as_array(x: Any, name: str = "embedding_bag") -> jax.Array:
    """`jnp.asarray`, but ids that its type does not hold stay out of bounds.

    Without 64-bit types JAX makes row 3 of NumPy's `2**32 + 3`.
    """
    if not isinstance(x, jax.Array):
        refuse_masked(x, name)
        kind, x = type(x).__name__, np.asarray(x)
        if x.dtype.kind in "OSU":
            raise TypeError(f"{name} takes arrays of numbers, got a {kind}.")
        if np.issubdtype(x.dtype, np.integer):
            held = jnp.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
            x = np.clip(x, held.min, held.max)
    return jnp.asarray(x)


def _max(
    num_bags: int,
    rows: jax.Array,
    valid: jax.Array,
    segments: jax.Array | None = None,
) -> jax.Array:
    """The largest number of each bag and column, which is that of one row.

    Each number has one source, the first entry of its bag that is the largest or NaN.
    It is gathered from there, so that its gradient goes there and nowhere else.
    """
    row_shape, nse = rows.shape[valid.ndim :], valid.size
    seen = lax.stop_gradient(jnp.where(expand_like(valid, rows), rows, -jnp.inf))
    # For one bag of the rows [1, 9] and [5, 2], `first` is [1, 0].
    if segments is None:
        first = _first_of_bags(seen, valid)
        rows = rows.reshape(nse, *rows.shape[2:])
    else:
        first = _first_of_segments(seen, valid, segments, num_bags)
    # `indices` takes no sizes that are left free, as an iota does.
    ones = [1] * len(row_shape)
    columns = [
        lax.broadcasted_iota(jnp.int32, (*ones[:k], size, *ones[k + 1 :]), k)
        for k, size in enumerate(row_shape)
    ]
    # The bag of none reads any row: checkify reports what is out of bounds.
    inside = first < nse
    first = jnp.where(inside, first, jnp.zeros_like(first))
    rows = rows.at[first, *columns].get(mode="promise_in_bounds")
    return jnp.where(inside, rows, jnp.zeros_like(rows))


def _first_of_bags(seen: jax.Array, valid: jax.Array) -> jax.Array:
    """The first of the largest entries in each bag, or the number of all entries."""
    num_bags, length = valid.shape
    begins = jnp.arange(num_bags, dtype=jnp.int32) * length
    # Padding is no smaller than a row of -inf.
    real = begins + lax.argmax(valid, 1, jnp.int32)
    real = jnp.where(valid.any(axis=1), real, valid.size)
    places = lax.argmax(seen, 1, jnp.int32)
    begins, real = (expand_like(x, places) for x in (begins, real))
    return jnp.where(valid.ravel()[begins + places], begins + places, real)


def _first_of_segments(
    seen: jax.Array, valid: jax.Array, segments: jax.Array, num_bags: int
) -> jax.Array:
    """The same for entries with segments."""
    nse = segments.shape[0]
    slots = jnp.arange(nse, dtype=jnp.int32)
    if not (isinstance(nse, int) and nse <= 1):  # one, or a size that is left free
        # Problem: no entry is the largest, and value and gradient are zero. Cause:
        # where rows are computed, as stale ones are, XLA computes them once for the
        # largest and once for the comparison, and may round differently. Remedy: a
        # buffer, written by a scatter, with which XLA fuses nothing. (It drops an
        # `optimization_barrier`.) Safe, as all slots are written. Test:
        # `test_one_rounding` in `tests/rows/test_bags.py`.
        seen = jnp.zeros_like(seen).at[slots].set(seen, unique_indices=True)
        largest = jax.ops.segment_max(seen, segments, num_bags)
        is_largest = (seen == largest[segments]) | jnp.isnan(seen)
        valid = expand_like(valid, seen) & is_largest
    slots = jnp.where(expand_like(valid, seen), expand_like(slots, seen), nse)
    return jax.ops.segment_min(slots, segments, num_bags)
