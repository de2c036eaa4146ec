"""The rule of a walk for functions with a custom JVP, such as `relu`.

`jax.nn.relu(table)[ids]` is the program

    a = custom_jvp_call[call_jaxpr={max x 0.0}, jvp=...] table
    b = gather a ids

The call cannot be bound for some rows of the table, as JAX holds its jaxpr and its rule
for the table's shape. If both are elementwise, as nearly always, they are traced for
that shape and evaluated on rows, under a new function with a custom JVP. Else the call
gets the table as an array.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jax_extras.jaxprs import evaluate_eqn
from .backward_slice import as_closed
from .expressions import Expression, elementwise
from .walk import Program, Results, Walk


class _NotElementwise(Exception):
    """Raised where a function needs more of a table than the elements at one place."""


def custom_jvp(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Applies an elementwise function, and its rule, to the rows that are looked up."""
    out: Any = eqn.outvars[0].aval
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    if len(eqn.outvars) > 1 or not all(
        jnp.issubdtype(x.dtype, jnp.floating) and x.shape in ((), out.shape)
        for x in avals
    ):
        return NotImplemented
    body, rules = as_closed(eqn.params["call_jaxpr"]), walk.program.rules
    rule = functools.cache(lambda: _rule(eqn))
    known = walk.program.elementwise
    # A rule may call the function that it is the rule of. That call is elementwise if
    # the rest is.
    key = (eqn.params.get("name"), str(body.jaxpr))
    if key not in known and id(eqn) not in known:
        known[key] = True, eqn
        result = all(_is_elementwise(walk.program, x()) for x in (lambda: body, rule))
        del known[key]
        known[id(eqn)] = result, eqn  # which stays alive with its `id`
    if key not in known and not known[id(eqn)][0]:
        return NotImplemented

    # JAX keeps the rule for later, and with it whatever the function refers to: not
    # `walk.program`, whose plans hold jaxprs, and JAX 0.12 keeps their tracers in them.
    def function(*args: Any) -> Any:
        @jax.custom_jvp
        def own(*args: Any) -> Any:
            return _at_rows(Program(rules), body, args)[0]

        @own.defjvp
        def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
            both = _at_rows(Program(rules), rule(), (*primals, *tangents))
            return both[0], both[1]

        return own(*args)

    return [elementwise(out, function, *args)]


def _rule(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr `(*primals, *tangents) -> (result, tangent)` of the custom rule."""

    def differentiate(*args: Any) -> tuple[Any, Any]:
        count = len(eqn.invars)
        result: tuple[Any, Any] = jax.jvp(
            lambda *primals: evaluate_eqn(eqn, primals)[0], args[:count], args[count:]
        )
        return result

    avals = [atom.aval for atom in eqn.invars]
    return jax.make_jaxpr(differentiate)(*avals, *avals)


def _refuse(*args: Any) -> Any:
    raise _NotElementwise


def _refuse_arrays(x: Any) -> Any:
    return _refuse() if jnp.ndim(x) else x


def _at_rows(program: Program, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr that was traced for a whole table on some rows.

    Arguments of the table's shape become expressions whose values are the rows.

    Raises:
      _NotElementwise: If it is not elementwise.
    """
    memo: dict[Any, jax.Array] = {}
    values: list[Any] = []
    for var, arg in zip(closed.jaxpr.invars, args, strict=True):
        aval: Any = var.aval
        if aval.shape:
            stand_in = Expression(aval.shape, aval.dtype, _refuse, ())
            memo[stand_in] = arg
            arg = stand_in
        values.append(arg)
    results = Walk(program, iter(())).evaluate(closed, values)
    shape = max(map(jnp.shape, args), key=len)
    for i, (var, value) in enumerate(zip(closed.jaxpr.outvars, results, strict=True)):
        if isinstance(value, Expression):
            results[i] = value.select(_refuse_arrays, shape, memo=memo)
        elif var.aval.shape:
            raise _NotElementwise
    return results


def _is_elementwise(program: Program, closed: ClosedJaxpr) -> bool:
    avals = [var.aval for var in closed.jaxpr.invars]
    try:
        jax.eval_shape(lambda *args: _at_rows(program, closed, args), *avals)
    except _NotElementwise:
        return False
    return True
