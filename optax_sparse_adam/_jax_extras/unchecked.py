"""Operations that `checkify.index_checks` does not look into.

checkify takes every index out of bounds for an error, also where the mode of a gather
or a scatter says what becomes of it; padding of ours is out of bounds on purpose. It
has no way to except an operation (jax 0.10). It enters `jit`, loops, branches and
functions with derivatives of their own, and no function with a `vmap` of its own.
"""

from collections.abc import Callable
from typing import Any

import jax


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays, unseen by `checkify`; so is `vmap` of it.

    Its derivatives are those of the function and are seen: a scatter with padding
    under `jax.grad` reports that. (tests/gradients/test_checkify.py)
    """

    @jax.custom_batching.custom_vmap
    def one(*args: Any) -> Any:
        return function(*args)

    @one.def_vmap
    def many(_: int, in_batched: list[bool], *args: Any) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        out = unchecked(jax.vmap(function, axes))(*args)
        return out, jax.tree.map(lambda _: True, out)

    call = jax.custom_jvp(one)
    # Values by `call`, too: under `vmap`, JAX takes their axes to be the same.
    call.defjvp(lambda x, dx: (call(*x), jax.jvp(function, x, dx)[1]))
    return call
