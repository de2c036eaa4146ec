"""One function with several implementations, some of them for one platform."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

from .unchecked import unchecked

Function = Callable[..., Any]


def by_platform(
    special: Mapping[str, tuple[Function, Function | None]],
    default: Function,
    *args: Any,
    keeps_order: bool = True,
    only: str | None = None,
) -> Any:
    """`f(*args)` of the platform that a program is compiled for, else `default(*args)`.

    `lax.platform_dependent` chooses. Under `vmap` and differentiation another function
    is used on this platform as well: a call of a kernel has no derivative, and batching
    it, or a loop over blocks, would copy every table.

    Args:
      special: For a platform its function, and the one under `vmap` and derivatives, if
        that is another. It returns the same values; where it orders rows differently,
        pass `keeps_order=False`, and values beside derivatives have its order.
      default: That of all other platforms.
      *args: Trees of arrays.
      keeps_order: Whether the two functions of a platform order rows in the same way.
      only: The one platform for which programs are compiled, if that is known: what is
        for others is not traced.
    """
    leaves, tree = jax.tree.flatten(args)

    def of_leaves(function: Function) -> Function:
        return lambda *leaves: function(*jax.tree.unflatten(tree, leaves))

    def own(function: Function, derivative_of: Function | None) -> Function:
        if derivative_of is None:
            return of_leaves(function)

        # `vmap` of the `cond` inside `platform_dependent` batches its constants, which
        # `custom_vmap` refuses. Under a `jit` of its own, the function keeps them.
        def called(*leaves: jax.Array) -> Any:
            return jax.jit(function)(*jax.tree.unflatten(tree, leaves))

        return unchecked(called, of_leaves(derivative_of), keeps_order=keeps_order)

    if not special:
        return default(*args)
    if only is not None and only in special:
        return own(*special[only])(*leaves)
    each = {platform: own(*functions) for platform, functions in special.items()}
    return lax.platform_dependent(*leaves, default=of_leaves(default), **each)
