"""Over which mesh axes a value varies, inside of `jax.shard_map` with `check_vma`."""

from typing import Any

import jax
from jax import lax


def varying_axes(*arrays: Any) -> tuple[str, ...]:
    """The mesh axes over which one of the arrays at least may vary.

    None outside of `shard_map`, and none that JAX knows of without `check_vma`.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if any(_varies(x, axis) for x in arrays))


def _varies(x: Any, axis: str) -> bool:
    # The public way to find out: a cast is an error where there is nothing to cast.
    try:
        lax.pcast(x, axis, to="varying")
    except ValueError:
        return True
    return False


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts an array to one that varies over these axes too."""
    own = varying_axes(x)
    return lax.pcast(x, tuple(a for a in axes if a not in own), to="varying")
