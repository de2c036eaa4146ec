"""The arrays of a new state."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._jax_extras.sharding import mesh_of, shard_axes_like
from ..native import _calls as native

_CLEARED = ("float32", "bfloat16", "float16", "float64", "int32")
_HUGE_PAGES = 4 << 20  # bytes that have a page of 2 MB inside, wherever they begin


def full_along(
    param: jax.Array, value: Any = 0, dtype: DTypeLike | None = None, axes: Any = None
) -> jax.Array:
    """An array full of a value, of the shape of these axes of a parameter, or all."""
    full = tuple(jnp.shape(param))
    axes = range(len(full)) if axes is None else axes
    shape = tuple(full[axis] for axis in axes)
    result_type = jnp.result_type(param) if dtype is None else jnp.dtype(dtype)
    is_zero = isinstance(value, int | float) and value == 0
    if is_zero and _takes_zeros(param, shape, result_type):
        return _zeros(param, shape, result_type)
    x = jnp.full_like(param, value, dtype, None if shape == full else shape)
    return shard_axes_like(param, x, axes)


@functools.partial(jax.jit, static_argnums=(1, 2), keep_unused=True)
def _zeros(param: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros on the device of a parameter, which is a CPU."""
    del param
    return native.zeros(shape, dtype)


def _takes_zeros(param: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether the kernel is there and makes these zeros, on the device of `param`.

    A step goes to some rows of a state, and to others in the next one. The processor
    remembers the places of more memory by pages of 2 MB than by those of 4 kB, which
    XLA's own arrays have: a step of 8,192 ids of 1M x 64 takes an eighth less, one of
    65,536 a twentieth.

    Not inside of a program, which XLA would keep from merging equal arrays, and from
    dropping those that are not used.
    """
    if not isinstance(param, jax.Array) or isinstance(param, jax.core.Tracer):
        return False
    devices: Any = param.sharding.device_set
    device, *other_devices = devices
    return (
        str(dtype) in _CLEARED
        and math.prod(shape) * dtype.itemsize >= _HUGE_PAGES
        and device.platform == "cpu"
        and not other_devices
        and param.sharding.memory_kind in (None, device.default_memory().kind)
        and mesh_of(param).empty
        and native.available()
    )
