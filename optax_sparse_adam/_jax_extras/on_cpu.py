"""One function with two implementations, one of them for CPUs."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def on_cpu(
    special: Callable[..., Any],
    pure: Callable[..., Any],
    *args: Any,
    elsewhere: Callable[..., Any] | None = None,
) -> Any:
    """`special(*args)` on a CPU, else `pure(*args)`, or `elsewhere(*args)` if given.

    `lax.platform_dependent` chooses by the platform that a program is compiled for.
    Derivatives and `vmap` are those of `pure`: a call of the kernel has no derivative,
    and under `vmap` it, or a loop over blocks, would copy each of many tables.
    So `pure` has the results of `special`, in their order; `elsewhere` need not.
    """
    leaves, tree = jax.tree.flatten(args)

    @jax.custom_batching.custom_vmap
    def one(*leaves: jax.Array) -> Any:
        # `vmap` of the `cond` inside `platform_dependent` batches its constants, which
        # `custom_vmap` refuses. Under a `jit` of its own, `special` keeps them.
        return jax.jit(special)(*jax.tree.unflatten(tree, leaves))

    def default(*leaves: jax.Array) -> Any:
        return pure(*jax.tree.unflatten(tree, leaves))

    @one.def_vmap
    def many(_: int, in_batched: list[bool], *leaves: jax.Array) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        out = jax.vmap(default, axes)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    call = jax.custom_jvp(one)
    # The primal values come from `call` as well: `vmap` of a `custom_jvp` expects them
    # to have the batch axes of the tangents.
    call.defjvp(lambda x, dx: (call(*x), jax.jvp(default, x, dx)[1]))

    def other(*leaves: jax.Array) -> Any:
        return (elsewhere or pure)(*jax.tree.unflatten(tree, leaves))

    return lax.platform_dependent(*leaves, cpu=call, default=other)
