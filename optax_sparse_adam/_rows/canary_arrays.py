"""The two arrays that a row-sparse gradient has beside its values and indices.

The canary, `[*batch, nse, 1]`, is of integers, as indices are, and says what was done
to these: see `canary`. Where rows were read up to date it has a second column, the
clock of the state of `exact_adam` that they were read by.

Functions of all arrays at once, such as `optax.tree.norm`, would count indices and
canary as values. So there is the guard, of a type that JAX does not promote with
float32: what adds, compares or concatenates numbers of different arrays raises while
tracing. A sum of the guard alone overflows to NaN, for who adds Python's numbers up.
Known limits: a maximum of each array as a Python number has that of the indices; a norm
of all arrays that are cast to one type first counts indices and canary; and what
multiplies floating arrays by a float32 array meets the guard and raises.

An armed guard is of a type that has no arithmetic at all: see `armed`.
"""

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jax.sharding import PartitionSpec

from .._jax_extras.compiled import compiled
from .._jax_extras.sharding import layout_of
from .padding import last_indices

CANARY = 1_618_033_989
# The largest number: two of them add up to NaN, and so do three or twelve; of
# float8_e4m3fn, they do not on a GPU.
_GUARD_TYPE, _GUARD = jnp.float8_e4m3b11fnuz, 30
CLOCK_OF_UPDATE, CHANGED_CLOCK, ANY_CLOCK = -1, -2, np.iinfo(np.int32).max
REMEDY = (
    "A transformation that does not know BCOO, such as optax.scale, has changed them "
    "together with the values. Put that chain inside lazy: "
    "optax_sparse_adam.lazy(optax.chain(...)). To map over trees of gradients, let "
    "each be one leaf: is_leaf=lambda x: isinstance(x, BCOO)."
)


def new_canary(indices: jax.Array, read_at: Any = None) -> jax.Array:
    canary = jnp.full((*indices.shape[:-1], 1), CANARY, jnp.int32)
    if read_at is None:
        return canary
    read_at = jnp.broadcast_to(jnp.asarray(read_at, jnp.int32), canary.shape)
    layout = layout_of(read_at)
    if layout is not None:  # the clocks of a batch that Explicit axes split
        canary = jax.reshard(canary, layout)
    return jnp.concatenate([canary, read_at], axis=-1)


def new_guard(indices: jax.Array) -> jax.Array:
    return jnp.full((*indices.shape[:-1], 2), _GUARD, _GUARD_TYPE)


@compiled
def new_marks(indices: jax.Array, read_at: Any = None) -> tuple[jax.Array, jax.Array]:
    """A new canary and a new guard."""
    return new_canary(indices, read_at), new_guard(indices)


def is_changed(canary: Any) -> Any:
    """Says for each entry whether an update of `exact_adam` was changed."""
    return (canary[..., 1:] == CHANGED_CLOCK).any(axis=-1, keepdims=True)


def is_zero(values: Any, n_batch: int, indices: Any = None) -> Any:
    """Says for each row of values, `[*batch, rows, ...]`, whether all are zero.

    Problem: the gradient of `jnp.sum(table[ids])` takes seconds to compile. Cause: its
    values are constant, and XLA reduces constants while compiling, slowly. Remedy: a
    comparison of the indices, which XLA does not know. Safe, since the smallest integer
    is the index of no row. Test: `tests/rows/test_canary.py`.
    """
    empty = values == 0
    if indices is not None:
        empty |= (indices == jnp.iinfo(indices.dtype).min).any()
    return empty.all(axis=tuple(range(n_batch + 1, values.ndim)))


def find_intact(
    empty: jax.Array, indices: jax.Array, canary: jax.Array, n_batch: int
) -> tuple[jax.Array, jax.Array]:
    """Says which entries are as they were made, `[*batch, nse, 1]`; and the indices."""
    layout = layout_of(indices)
    if layout is not None:  # a constant of a batch lies whole
        whole = layout.update(spec=PartitionSpec(*layout.spec[:-1], None))
        canary = jax.reshard(canary, whole)
    is_intact = (canary[..., :1] == CANARY) & ~is_changed(canary)
    is_empty = (canary[..., :1] == 0) & empty[..., None]
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    # Entries that were changed go to the rows 0, 1, ..., where their NaN is seen; those
    # that became zeros are padding. Both are distinct and ascending, as the flags say.
    slot = jax.lax.broadcasted_iota(
        indices.dtype, indices.shape, n_batch, out_sharding=layout
    )
    outside = last_indices(slot, n_batch)
    indices = jnp.where(is_intact, indices, jnp.where(is_empty, outside, slot))
    return is_intact | is_empty, indices


@functools.cache
def _armour() -> Any:
    """The implementation of the "random keys" of which armed guards are made."""

    def no_numbers(*_: Any) -> NoReturn:
        raise TypeError(f"The guard of a row-sparse gradient is no key. {REMEDY}")

    functions = dict.fromkeys(("seed", "split", "random_bits", "fold_in"), no_numbers)
    name = "optax_sparse_adam_guard"
    return define_prng_impl(key_shape=(1,), name=name, tag="guard", **functions)


def armed_guard(indices: jax.Array) -> jax.Array:
    data = jnp.zeros((*indices.shape[:-1], 1), jnp.uint32)
    keys: jax.Array = jax.random.wrap_key_data(data, impl=_armour())
    return keys


@functools.cache
def _armed_type() -> Any:
    return jax.eval_shape(armed_guard, jax.ShapeDtypeStruct([0, 1], jnp.int32)).dtype


def is_armed_guard(x: Any) -> bool:
    return bool(getattr(x, "dtype", None) == _armed_type())


def clocks_of(canary: jax.Array) -> jax.Array:
    """The second column of a canary; `ANY_CLOCK` for entries of zeros."""
    return jnp.where(canary[..., :1] == 0, ANY_CLOCK, canary[..., 1:])


def one_clock(clocks: jax.Array, *, is_same: bool = False) -> jax.Array:
    """The clock of what is made of entries of these, `[..., n, 1]`: `[..., 1, 1]`.

    Two gradients of clock 5 add up to one of clock 5; with one of clock 6 the sum has
    `CHANGED_CLOCK`. So has all that is made of an update, as `CLOCK_OF_UPDATE` is
    negative, but its coalesced form (`is_same`). Entries of zeros fit any clock.
    """
    first = jnp.min(clocks, axis=-2, keepdims=True, initial=ANY_CLOCK)
    is_kept = jnp.all((clocks == first) | (clocks == ANY_CLOCK), axis=-2, keepdims=True)
    is_kept &= is_same | (first >= 0)
    return jnp.where(is_kept, first, CHANGED_CLOCK)
