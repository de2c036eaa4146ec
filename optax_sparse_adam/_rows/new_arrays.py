"""The arrays of a new state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._jax_extras.sharding import shard_axes_like
from ..native import _calls as native


def full_along(
    param: jax.Array, value: Any = 0, dtype: DTypeLike | None = None, axes: Any = None
) -> jax.Array:
    """An array full of a value, of the shape of these axes of a parameter, or all."""
    full = tuple(jnp.shape(param))
    axes = range(len(full)) if axes is None else axes
    shape = tuple(full[axis] for axis in axes)
    own = jnp.result_type(param) if dtype is None else jnp.dtype(dtype)
    is_zero = isinstance(value, int | float) and value == 0
    if is_zero and native.supports_zeros(param, shape, own):
        return _zeros(param, shape, own)
    x = jnp.full_like(param, value, dtype, None if shape == full else shape)
    return shard_axes_like(param, x, axes)


@functools.partial(jax.jit, static_argnums=(1, 2), keep_unused=True)
def _zeros(param: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros on the device of a parameter, which is a CPU."""
    del param
    return native.zeros(shape, dtype)
