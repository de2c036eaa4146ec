"""Two ways to compute the same, of which one is for CPUs."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def on_cpu(special: Callable[..., Any], pure: Callable[..., Any], *args: Any) -> Any:
    """`special(*args)` on a CPU, else `pure(*args)`, which has the derivatives too.

    And `vmap`: the kernel, or a loop over blocks, would copy each of many tables.
    """
    leaves, tree = jax.tree.flatten(args)

    @jax.custom_batching.custom_vmap
    def one(*leaves: jax.Array) -> Any:
        # Compiled in its own right, it keeps its constants: as those of a `cond` under
        # `vmap`, they would be batched, which `custom_vmap` refuses.
        return jax.jit(special)(*jax.tree.unflatten(tree, leaves))

    def default(*leaves: jax.Array) -> Any:
        return pure(*jax.tree.unflatten(tree, leaves))

    @one.def_vmap
    def many(_: int, in_batched: list[bool], *leaves: jax.Array) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        out = jax.vmap(default, axes)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    call = jax.custom_jvp(one)
    # Values by `call`, too: under `vmap`, JAX takes their axes to be the same.
    call.defjvp(lambda x, dx: (call(*x), jax.jvp(default, x, dx)[1]))
    return lax.platform_dependent(*leaves, cpu=call, default=default)
