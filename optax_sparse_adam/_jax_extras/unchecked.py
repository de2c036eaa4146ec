"""Operations that `checkify.index_checks` does not look into.

checkify takes every index out of bounds for an error, also where the mode of a gather
or a scatter says what becomes of it; padding of ours is out of bounds on purpose. It
has no way to except an operation (jax 0.10). It enters `jit`, loops, branches and
functions with derivatives of their own, and no function with a `vmap` of its own.
"""

from collections.abc import Callable
from typing import Any

import jax


def unchecked(
    function: Callable[..., Any],
    plain: Callable[..., Any] | None = None,
    *,
    keeps_order: bool = True,
) -> Callable[..., Any]:
    """The same function of arrays, unseen by `checkify`; so is `vmap` of it.

    Its derivatives and `vmap` are those of `plain`, another implementation, if given.
    Where that orders rows differently, what is differentiated gets its values by it,
    too. The derivatives are seen: a scatter with padding under `jax.grad` reports that.
    (tests/gradients/test_checkify.py)
    """
    other = function if plain is None else plain

    @jax.custom_batching.custom_vmap
    def one(*args: Any) -> Any:
        return function(*args)

    @one.def_vmap
    def many(_: int, in_batched: list[bool], *args: Any) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        out = unchecked(jax.vmap(other, axes))(*args)
        return out, jax.tree.map(lambda _: True, out)

    call = jax.custom_jvp(one)
    # The primal values come from such a function as well: `vmap` of a `custom_jvp`
    # expects them to have the batch axes of the tangents.
    values = call if keeps_order else unchecked(other)
    call.defjvp(lambda x, dx: (values(*x), jax.jvp(other, x, dx)[1]))
    return call
