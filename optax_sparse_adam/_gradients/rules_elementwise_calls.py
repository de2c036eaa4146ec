"""Calls of elementwise functions: `custom_jvp`, such as `relu`, and branches.

`jax.nn.relu(table)[ids]` is the program

    a = custom_jvp_call[call_jaxpr={max x 0.0}, jvp=...] table
    b = gather a ids

The call cannot be bound for some rows of the table, as JAX holds its jaxpr and its rule
for the table's shape. If both are elementwise, as nearly always, they are traced for
that shape and evaluated on rows, under a new function with a derivative of its own.
Branches of `cond` that return functions of a table are treated in the same way. Else
the call gets the table as an array.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jax_extras.jaxprs import evaluate_eqn
from .backward_slice import as_closed
from .expressions import Expression, elementwise
from .walk import Program, Results, Walk


class _NotElementwise(Exception):
    """Raised where a function needs more of a table than the elements at one place."""


def custom_jvp(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Applies an elementwise function, and its rule, to the rows that are looked up."""
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    if len(eqn.outvars) != 1 or not _are_floating([*avals, eqn.outvars[0].aval]):
        return NotImplemented
    body, rules = as_closed(eqn.params["call_jaxpr"]), walk.program.rules
    # A rule may call the function that it is the rule of, as that of `relu` does.
    key = (eqn.params.get("name"), str(body.jaxpr))
    jaxprs = functools.cache(lambda: (body, _rule(eqn)))
    if not _waits(walk, eqn, args, key, jaxprs):
        return NotImplemented

    # JAX keeps the rule for later, and with it whatever the function refers to: not
    # `walk.program`, whose plans hold jaxprs, and JAX 0.12 keeps their tracers in them.
    def function(*args: Any) -> Any:
        @jax.custom_jvp
        def own(*args: Any) -> Any:
            return _at_rows(Program(rules), body, args)[0]

        @own.defjvp
        def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
            every = (*primals, *tangents)
            results = _at_rows(Program(rules), jaxprs()[1], every)
            return results[0], results[1]

        return own(*args)

    out: Any = eqn.outvars[0].aval
    return [elementwise(out, function, *args)]


def elementwise_branches(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Functions of tables that leave a branch of `cond`."""
    branches, program = eqn.params["branches"], walk.program
    if not _waits(walk, eqn, args, None, lambda: branches, start=1):
        return NotImplemented

    def function(index: jax.Array, *args: Any, result: int) -> Any:
        def run(branch: ClosedJaxpr) -> Any:
            return _at_rows(program, branch, args)[result]

        return lax.switch(index, [functools.partial(run, b) for b in branches])

    outs: list[Any] = [var.aval for var in eqn.outvars]
    return [
        elementwise(out, functools.partial(function, result=i), *args)
        for i, out in enumerate(outs)
    ]


def _are_floating(avals: Sequence[Any]) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in avals)


def _waits(
    walk: Walk,
    eqn: JaxprEqn,
    args: Sequence[Any],
    key: Any,
    jaxprs: Callable[[], Sequence[ClosedJaxpr]],
    start: int = 0,
) -> bool:
    """Whether a call is an elementwise function of expressions and scalars."""
    shape = next(x.shape for x in args if isinstance(x, Expression))
    atoms: list[Any] = eqn.invars[start:]
    outs: list[Any] = eqn.outvars
    if any(var.aval.shape != shape for var in outs) or any(
        x.shape != shape if isinstance(x, Expression) else atom.aval.shape != ()
        for atom, x in zip(atoms, args[start:], strict=True)
    ):
        return False
    known = walk.program.elementwise
    if key in known:  # inside of what is being found out
        return True
    if id(eqn) not in known:
        known[key] = True, eqn
        result = all(_is_elementwise(walk.program, x) for x in jaxprs())
        del known[key]
        known[id(eqn)] = result, eqn  # which stays alive with its `id`
    return bool(known[id(eqn)][0])


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
    walk = Walk(program, iter(()))
    results = walk.evaluate(closed, values)
    rows = []
    shape = max(map(jnp.shape, args), key=len)
    for var, value in zip(closed.jaxpr.outvars, results, strict=True):
        if isinstance(value, Expression):
            value = value.select(_refuse_arrays, shape, memo=memo)
        elif var.aval.shape:
            raise _NotElementwise
        rows.append(value)
    return rows


def _is_elementwise(program: Program, closed: ClosedJaxpr) -> bool:
    avals = [var.aval for var in closed.jaxpr.invars]
    try:
        jax.eval_shape(lambda *args: _at_rows(program, closed, args), *avals)
    except _NotElementwise:
        return False
    return True
