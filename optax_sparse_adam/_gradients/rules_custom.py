"""The rule of the interpreter for functions with a `jax.custom_jvp`, such as `relu`.

The jaxpr of a gradient still calls them: `jax.nn.relu(table)[ids]` leaves

    a = custom_jvp_call[call_jaxpr={max x 0.0}, jvp=...] table
    b = gather a ids

and whoever differentiates the gradient again needs the rule at `a`. It cannot be bound
for some rows of the table, as JAX holds it for the table's shape. If body and rule are
elementwise, as nearly always, a new function with a custom derivative takes its place:
both are traced for the table's shape and evaluated on rows. Else the call gets the
table as an array.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jax_extras.jaxprs import evaluate_eqn
from .interpreter import Context, Results, as_closed, shape_of
from .symbolic_values import Deferred, RowSum, elementwise


class _NotElementwise(Exception):
    """Raised where a function needs more of a table than the elements at one place."""


def custom_jvp(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Applies an elementwise function, and its rule, to the rows that are looked up."""
    if not context.passes_table(eqn, args) or len(eqn.outvars) != 1:
        return NotImplemented
    out: Any = eqn.outvars[0].aval
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    if (
        any(isinstance(arg, RowSum) for arg in args)
        or any(shape_of(arg) not in ((), out.shape) for arg in args)
        or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (out, *avals))
        or not _is_elementwise(context, eqn)
    ):
        return NotImplemented

    # JAX keeps the rule for later, and with it whatever the function refers to.
    later = context.in_new_trace()

    def function(*args: Any) -> Any:
        return _at_rows(later, eqn, args)

    return [elementwise(out.shape, out.dtype, function, *args)]


def _at_rows(context: Context, eqn: JaxprEqn, args: Sequence[Any]) -> Any:
    """The function of the equation, with its rule, for operands of another shape."""

    @jax.custom_jvp
    def function(*args: Any) -> Any:
        body = as_closed(eqn.params["call_jaxpr"])
        return _evaluate(context, body, args)[0]

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        result, tangent = _evaluate(context, _rule(eqn), (*primals, *tangents))
        return result, tangent

    return function(*args)


def _rule(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr `(*primals, *tangents) -> (result, tangent)` of the custom rule."""

    def differentiate(*args: Any) -> tuple[Any, Any]:
        number = len(eqn.invars)
        result: tuple[Any, Any] = jax.jvp(
            lambda *primals: evaluate_eqn(eqn, primals)[0], args[:number], args[number:]
        )
        return result

    avals = [atom.aval for atom in eqn.invars]
    return jax.make_jaxpr(differentiate)(*avals, *avals)


def _evaluate(context: Context, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr that was traced for a whole table on some rows.

    Raises:
      _NotElementwise: If it is not elementwise.
    """

    def refuse(shape: Any) -> Any:
        raise _NotElementwise

    shape = max(map(jnp.shape, args), key=len)
    known: dict[Deferred, jax.Array] = {}
    values: list[Any] = []
    for var, arg in zip(closed.jaxpr.invars, args, strict=True):
        aval: Any = var.aval
        if aval.shape:
            stand_in = Deferred(aval.shape, aval.dtype, refuse, (), has_table=True)
            known[stand_in] = arg
            arg = stand_in
        values.append(arg)
    wanted = [False] * len(closed.jaxpr.outvars)
    results = context.in_new_trace().evaluate(closed, values, wanted)
    if any(shape_of(x) and not isinstance(x, Deferred) for x in results):
        raise _NotElementwise
    return [
        x.select(lambda array: array, shape, known) if isinstance(x, Deferred) else x
        for x in results
    ]


def _is_elementwise(context: Context, eqn: JaxprEqn) -> bool:
    """Whether the body of a call is elementwise, and the rule for its derivative."""
    body = as_closed(eqn.params["call_jaxpr"])
    # A rule may call the function that it is the rule of, as that of `relu` does.
    function = (eqn.params.get("name"), str(body.jaxpr))
    if function in context.elementwise:
        return True
    inner = context._replace(elementwise=context.elementwise | {function})
    try:
        for closed in (body, _rule(eqn)):
            evaluate = functools.partial(_evaluate, inner, closed)
            avals = [var.aval for var in closed.jaxpr.invars]
            jax.eval_shape(lambda *args, f=evaluate: f(args), *avals)
    except _NotElementwise:
        return False
    return True
