"""Mutable arrays that a step of a loop makes, as `jax.new_ref(jnp.zeros(4))`.

Problem: `jax.value_and_grad` of a scan whose body makes one of constants, writes to it
and reads it is wrong, and often zero, from JAX 0.10 to 0.12. Cause: JAX takes what is
read of it for known, as its first values are, so the same in all steps, and reads it
once, before the loop. Remedy: a zero is subtracted from its first values that is a
function of what the step gets, and has a derivative if that has. Safe, because they
stay as they are, negative zeros included. Test: `test_refs_of_a_loop` in
`tests/gradients/test_refs.py`, and what is "in a scan" in `test_differential.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from .._jax_extras.jaxprs import empty_values, name_and_params
from .._jax_extras.varying_axes import varying_axes
from .backward_slice import CALLS, as_closed

# JAX knows nothing of what a `checkpoint` computes, and a device has its own part.
_APART = "remat2", "shard_map"


def makes_ref(eqn: JaxprEqn) -> bool:
    """Whether an equation makes a mutable array, or what it calls or repeats does."""
    name, params = name_and_params(eqn)
    inner: Sequence[Any] = ()
    if name in CALLS and name not in _APART:
        inner = [as_closed(params[CALLS[name]])]
    elif name == "scan":
        inner = [params["jaxpr"]]
    elif name == "cond":
        inner = params["branches"]
    made = name in ("new_ref", "empty_ref")
    return made or any(makes_ref(x) for closed in inner for x in closed.jaxpr.eqns)


def begun_with(values: Sequence[Any], eqn: JaxprEqn, args: Sequence[Any]) -> Any:
    """The mutable array that an equation makes in a step that gets these values."""
    first = args[0] if args else empty_values(eqn)
    zero = _zero_of(values, varying_axes(first))
    if jnp.issubdtype(first.dtype, jnp.number):
        first = first - zero.astype(first.dtype)
    elif first.dtype == bool:
        first = first ^ (zero != 0)
    space, kind = eqn.params["memory_space"], eqn.params.get("kind")
    return jax.new_ref(first, memory_space=space, kind=kind)


def _zero_of(values: Sequence[Any], axes: Sequence[str]) -> jax.Array:
    """A function of all these values that vary over no other mesh axes.

    It is the sum of none of them.
    """
    zero = jnp.zeros((), jnp.float32)
    for x in values:
        if isinstance(x, jax.Ref):
            x = x[...]
        is_array = isinstance(jax.typeof(x), ShapedArray)
        x = jnp.asarray(x) if is_array else x  # Python's numbers
        is_number = is_array and (
            jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
        )
        if is_number and set(varying_axes(x)) <= set(axes):
            # Along an axis of its own, which no mesh splits; and by `lax`, as indexing
            # an array of a free size by `[:0]` makes a constant.
            none = lax.slice_in_dim(lax.expand_dims(jnp.real(x), [0]), 0, 0)
            zero += jnp.sum(none.astype(zero.dtype))
    return zero
