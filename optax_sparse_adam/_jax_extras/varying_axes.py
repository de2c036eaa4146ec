"""The mesh axes over which a value varies, inside `jax.shard_map` with `check_vma`."""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive


def varying_axes(*arrays: Any) -> tuple[str, ...]:
    """The mesh axes over which at least one of the arrays varies.

    Empty outside `shard_map`, and without `check_vma`, where types do not say it.
    """
    return tuple(sorted({a for x in arrays for a in axes_of_type(jax.typeof(x))}))


def axes_of_type(aval: Any) -> tuple[str, ...]:
    """The mesh axes over which a value of this type varies.

    In jax 0.10 and 0.11 the type has the attribute `manual_axis_type`, before `vma`.
    """
    of_axes = getattr(aval, "manual_axis_type", None)
    names = getattr(aval, "vma", frozenset()) if of_axes is None else of_axes.varying
    return tuple(sorted(names))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts an array to vary over these axes as well."""
    varying = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Casts an array to vary over the axes that another one varies over.

    Over axes that the other one is reduced over, `x` is reduced, too.
    """
    of_axes = getattr(jax.typeof(like), "manual_axis_type", None)
    if axes := tuple(sorted(getattr(of_axes, "reduced", ()))):
        x = lax.pcast(x, axes, to="reduced")
    return vary(x, varying_axes(like))


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Applies a primitive to operands that may vary over different mesh axes.

    A primitive itself takes no such operands; looked-up rows vary as their ids do, even
    where their table does not.
    """
    axes = varying_axes(*operands) if len(operands) > 1 else ()
    return primitive.bind(*(vary(x, axes) for x in operands), **params)
