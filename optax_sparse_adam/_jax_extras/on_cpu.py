"""One function with two implementations, one of them for CPUs."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .unchecked import unchecked


def on_cpu(
    special: Callable[..., Any],
    pure: Callable[..., Any],
    *args: Any,
    keeps_order: bool = True,
) -> Any:
    """`special(*args)` on a CPU, else `pure(*args)`.

    `lax.platform_dependent` chooses by the platform that a program is compiled for.
    Derivatives and `vmap` are those of `pure`: a call of the kernel has no derivative,
    and under `vmap` it, or a loop over blocks, would copy each of many tables. Where
    `pure` orders rows differently, what is differentiated has its order.
    """
    leaves, tree = jax.tree.flatten(args)

    def call(*leaves: jax.Array) -> Any:
        # `vmap` of the `cond` inside `platform_dependent` batches its constants, which
        # `custom_vmap` refuses. Under a `jit` of its own, `special` keeps them.
        return jax.jit(special)(*jax.tree.unflatten(tree, leaves))

    def default(*leaves: jax.Array) -> Any:
        return pure(*jax.tree.unflatten(tree, leaves))

    cpu = unchecked(call, default, keeps_order=keeps_order)
    return lax.platform_dependent(*leaves, cpu=cpu, default=default)
