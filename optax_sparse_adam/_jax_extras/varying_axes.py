"""The mesh axes over which a value varies, inside `jax.shard_map` with `check_vma`."""

from typing import Any

import jax
from jax import lax


def varying_axes(*arrays: Any) -> tuple[str, ...]:
    """The mesh axes over which at least one of the arrays varies.

    Empty outside `shard_map`, and without `check_vma`, where types do not say it.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if any(_varies(x, axis) for x in arrays))


def _varies(x: Any, axis: str) -> bool:
    # No public function tells. `pcast` raises for an axis that a value varies over.
    try:
        lax.pcast(x, axis, to="varying")
    except ValueError:
        return True
    return False


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts an array to vary over these axes as well."""
    own = varying_axes(x)
    return lax.pcast(x, tuple(a for a in axes if a not in own), to="varying")
