"""One function with two implementations, one of them for CPUs."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .._jax_extras.unchecked import unchecked
from . import _calls, _library


def on_cpu(
    special: Callable[..., Any],
    default: Callable[..., Any],
    *args: Any,
    keeps_order: bool = True,
) -> Any:
    """`special(*args)` on a CPU, else `default(*args)`.

    `lax.platform_dependent` chooses by the platform that a program is compiled for.
    Under `vmap` and differentiation `default` is used on CPUs as well: a call of the
    kernel has no derivative, and batching it, or a loop over blocks, would copy every
    table. `default` returns the same values; where it orders rows differently, pass
    `keeps_order=False`, and values beside derivatives have its order.

    Half of a step's tracing is that of `default`. A process that uses the kernel and
    has CPUs only leaves it out, where nothing asks for it: its programs compile for no
    other platform, as a call of the kernel in them says. With
    `OPTAX_SPARSE_ADAM_NATIVE=0` they do.
    """
    leaves, tree = jax.tree.flatten(args)

    def on_leaves(*leaves: jax.Array) -> Any:
        # `vmap` of the `cond` inside `platform_dependent` batches its constants, which
        # `custom_vmap` refuses. Under a `jit` of its own, `special` keeps them.
        return jax.jit(special)(*jax.tree.unflatten(tree, leaves))

    def otherwise(*leaves: jax.Array) -> Any:
        return default(*jax.tree.unflatten(tree, leaves))

    cpu = unchecked(on_leaves, otherwise, keeps_order=keeps_order)
    if _calls.available() and _library.has_cpus_only():
        return cpu(*leaves)
    return lax.platform_dependent(*leaves, cpu=cpu, default=otherwise)
