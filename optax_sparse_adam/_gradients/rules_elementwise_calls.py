"""Calls of elementwise functions: those with a custom JVP, such as `relu`; branches.

`jax.nn.relu(table)[ids]` is the program

    a = custom_jvp_call[call_jaxpr={max x 0.0}, jvp=...] table
    b = gather a ids

The call cannot be bound for some rows of the table, as JAX holds its jaxpr and its rule
for the table's shape. If both are elementwise, as nearly always, they are traced for
that shape and evaluated on rows, under a new function with a custom JVP. Branches of
`cond` that return functions of a table are treated in the same way. Else the call gets
the table as an array.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
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
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    is_floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in avals)
    body, rules = as_closed(eqn.params["call_jaxpr"]), walk.program.rules
    rule = functools.cache(lambda: _rule(eqn))
    name = eqn.params.get("name"), str(body.jaxpr)
    jaxprs = (get() for get in (lambda: body, rule))
    if not is_floating or not _is_elementwise(walk.program, eqn, name, jaxprs):
        return NotImplemented

    # A call `relu(table)` has become a function of rows `[n, D]`:
    #     own(rows)                    is  max(rows, 0)
    #     derivative(rows, tangents)   is  (max(rows, 0), select(rows > 0, tangents, 0))
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

    return [elementwise(avals[-1], function, *args)]


def elementwise_branches(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Functions of tables that leave a branch of `cond`."""
    branches, program = eqn.params["branches"], walk.program
    if not _is_elementwise(program, eqn, None, branches):
        return NotImplemented

    def function(result: int, index: jax.Array, *args: Any) -> Any:
        def run(branch: ClosedJaxpr) -> Any:
            return _at_rows(program, branch, args)[result]

        return switch(eqn, index, [functools.partial(run, b) for b in branches])

    return [
        elementwise(var.aval, functools.partial(function, i), *args)
        for i, var in enumerate(eqn.outvars)
    ]


def switch(eqn: JaxprEqn, index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    """Runs one of these functions in the place of the branches of a `cond`."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches)
    # Those of `lax.platform_dependent`. JAX compiles one of them only; the others may
    # not compile at all, as a kernel for another platform.
    pairs = list(zip(platforms, branches, strict=True))
    named = {name: branch for names, branch in pairs for name in names or ()}
    default = next((branch for names, branch in pairs if names is None), None)
    return lax.platform_dependent(default=default, **named)


def _is_elementwise(
    program: Program,
    eqn: JaxprEqn,
    name: Any,
    jaxprs: Iterable[ClosedJaxpr],
) -> bool:
    """Whether all jaxprs of a call are elementwise functions of one shape and scalars.

    A rule may call the function `name` that it is the rule of, as that of
    `jnp.logaddexp` does: this call is elementwise if the rest is.
    """
    atoms: Any = eqn.invars, eqn.outvars
    ins, outs = ({x.aval.shape for x in group} for group in atoms)
    if len(outs) != 1 or () in outs or ins - outs - {()}:
        return False
    known = program.elementwise
    # Meanwhile, calls of the same name inside of this one count as elementwise.
    if name not in known and id(eqn) not in known:
        known[name] = True, eqn
        try:
            for closed in jaxprs:
                avals = [var.aval for var in closed.jaxpr.invars]
                jax.eval_shape(functools.partial(_at_rows, program, closed), avals)
            result = True
        except _NotElementwise:
            result = False
        del known[name]
        known[id(eqn)] = result, eqn  # which stays alive with its `id`
    return name in known or bool(known[id(eqn)][0])


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


def _at_rows(program: Program, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr that was traced for a whole table on some rows.

    Arguments of the table's shape become expressions whose values are the rows. Raises
    `_NotElementwise` where that is not enough.
    """
    memo: dict[Any, jax.Array] = {}
    values: list[Any] = []
    # The memo says what a lookup would have made of the stand-ins. Whatever needs
    # other elements of one, as a `reduce_sum` does, or for an array inside of the
    # function, calls `_refuse`.
    for var, arg in zip(closed.jaxpr.invars, args, strict=True):
        aval: Any = var.aval
        if aval.shape:
            stand_in = Expression(aval.shape, aval.dtype, _refuse, ())
            memo[stand_in] = arg
            arg = stand_in
        values.append(arg)
    results = Walk(program, iter(())).evaluate(closed, values)
    shape = max(map(jnp.shape, args), key=len)
    outvars: list[Any] = closed.jaxpr.outvars
    for i, (out, value) in enumerate(zip(outvars, results, strict=True)):
        if isinstance(value, Expression):
            results[i] = value.select(_refuse, shape, memo=memo)
        elif out.aval.shape:
            raise _NotElementwise
    return results
