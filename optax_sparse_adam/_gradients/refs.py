"""Mutable arrays that a step of a loop makes, as `jax.new_ref(jnp.zeros(4))`.

Problem: `jax.value_and_grad` of a scan whose body makes one of constants, writes to it
and reads it is wrong, and often zero, from JAX 0.10 to 0.12. Cause: JAX takes what is
read of it for known, as its first values are, so the same in all steps, and reads it
once, before the loop. Remedy: a zero is subtracted from its first values that is a
function of what the step gets, and has a derivative if that has. Safe, because they
stay as they are, negative zeros included. Test: `test_refs_of_a_loop` in
`tests/gradients/test_walk.py`, and what is "in a scan" in `test_differential.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from .._jax_extras.jaxprs import empty_values, name_and_params
from .backward_slice import CALLS, as_closed


def makes_ref(eqn: JaxprEqn) -> bool:
    """Whether an equation makes a mutable array, or what it calls or repeats does."""
    name, params = name_and_params(eqn)
    inner: Sequence[Any] = ()
    if name in CALLS and name != "remat2":  # JAX knows nothing of what that computes
        inner = [as_closed(params[CALLS[name]])]
    elif name == "scan":
        inner = [params["jaxpr"]]
    elif name == "cond":
        inner = params["branches"]
    made = name in ("new_ref", "empty_ref")
    return made or any(makes_ref(x) for closed in inner for x in closed.jaxpr.eqns)


def zero_of(values: Sequence[Any]) -> jax.Array | None:
    """A zero that is a function of all these values: the sum of none of them."""
    nothing = [
        jnp.sum(jnp.real(x).reshape(-1)[:0].astype(jnp.float32))
        for x in values
        if isinstance(jax.typeof(x), ShapedArray)
        and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool)
    ]
    return sum(nothing[1:], nothing[0]) if nothing else None


def begun_with(zero: jax.Array, eqn: JaxprEqn, args: Sequence[Any]) -> Any:
    """The mutable array that an equation makes."""
    first = args[0] if args else empty_values(eqn)
    if jnp.issubdtype(first.dtype, jnp.number):
        first = first - zero.astype(first.dtype)
    elif first.dtype == bool:
        first = first ^ (zero != 0)
    space, kind = eqn.params["memory_space"], eqn.params.get("kind")
    return jax.new_ref(first, memory_space=space, kind=kind)
