"""Programs whose callbacks are not called, as those that compute ids beside a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._jax_extras.jaxprs import name_and_params

# Those that happen once, in the step.
CALLBACKS = "io_callback", "debug_callback"


def without_callbacks(jaxpr: Jaxpr, names: Sequence[str] = CALLBACKS) -> Jaxpr:
    """A program in which callbacks are not called.

    The ids are computed apart from the step, which shows what the user wants to see and
    calls what he wants to be called once. In place of the result of a callback there
    are zeros, computed of its arguments by a function of a name that is looked for.
    """

    def inner(x: Any) -> Any:
        if type(x) in (tuple, list):
            return type(x)(map(inner, x))
        if isinstance(x, Jaxpr):  # from JAX 0.11 on closed ones are, too
            return without_callbacks(x, names)
        if isinstance(x, ClosedJaxpr):
            return ClosedJaxpr(without_callbacks(x.jaxpr, names), x.consts)
        return x

    eqns = []
    for eqn in jaxpr.eqns:
        effects, name = _other_effects(eqn), name_and_params(eqn)[0]
        if name in names and eqn.outvars:
            avals = [[x.aval for x in side] for side in (eqn.outvars, eqn.invars)]
            eqns.append(eqn.replace(**_zeros_of(name, *avals), effects=set()))
        elif eqn.outvars or effects:  # not what shows values, or nothing else
            params = {name: inner(x) for name, x in eqn.params.items()}
            eqns.append(eqn.replace(params=params, effects=effects))
    return jaxpr.replace(eqns=eqns, effects=_other_effects(jaxpr))


def zeros_in_place_of(name: str) -> str:
    """The name of the function that stands for a callback."""
    return f"optax_sparse_adam_zeros_of_{name}"


def callback_of(eqn: JaxprEqn) -> str | None:
    """The name of the callback in whose place there are zeros."""
    name = str(eqn.params.get("name", ""))
    prefix = zeros_in_place_of("")
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _zeros_of(
    name: str, out_avals: Sequence[Any], in_avals: Sequence[Any]
) -> dict[str, Any]:
    """A `jit` that returns zeros, but needs its arguments: primitive, parameters."""

    def zeros(*args: Any) -> Any:
        results = [jnp.zeros(x.shape, x.dtype) for x in out_avals]
        return lax.optimization_barrier((results, args))[0]

    zeros.__name__ = zeros_in_place_of(name)
    (eqn,) = jax.make_jaxpr(jax.jit(zeros))(*in_avals).eqns
    return {"primitive": eqn.primitive, "params": eqn.params}


def _other_effects(program: Jaxpr | JaxprEqn) -> set[Any]:
    """Effects but those of callbacks, for whose types JAX has no public names."""
    names = "DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"
    return {x for x in program.effects if type(x).__name__.lstrip("_") not in names}
