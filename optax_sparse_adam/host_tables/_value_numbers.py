"""Value numbering: which values of a program are computed in the same way."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._gradients.backward_slice import as_closed
from .._jax_extras.jaxprs import Equation, FlatJaxpr, name_and_params


def _key(eqn: JaxprEqn) -> Any:
    """What an equation does, to tell whether another one computes the same.

    Two closures of one function have two jaxprs: their equations are compared, and what
    these hold by identity. Of a function with a rule for derivatives the value counts.
    """
    name, params = name_and_params(eqn)
    if name.startswith(("custom_jvp_call", "custom_vjp_call")):
        params = {key: x for key, x in params.items() if key == "call_jaxpr"}
    return eqn.primitive, *((key, _held(x)) for key, x in params.items())


def _held(x: Any) -> Any:
    if type(x) in (tuple, list):
        return tuple(map(_held, x))
    if not isinstance(x, ClosedJaxpr | Jaxpr):  # from JAX 0.11 on the same type
        return x
    closed = as_closed(x)
    jaxpr: Jaxpr = closed.jaxpr
    numbers: dict[Any, int] = {}

    def of(atom: Any) -> Any:
        is_literal = isinstance(atom, Literal)
        number = _literal(atom.val) if is_literal else len(numbers)
        return number if is_literal else numbers.setdefault(atom, number)

    def aval(atom: Any) -> Any:
        return of(atom), str(atom.aval)

    begin = *map(id, closed.consts), *map(aval, (*jaxpr.constvars, *jaxpr.invars))
    eqns = [(_key(y), *map(of, y.invars), *map(aval, y.outvars)) for y in jaxpr.eqns]
    return begin, *eqns, *map(of, jaxpr.outvars)


def _literal(value: Any) -> Any:
    array = np.asarray(value)
    return type(value), array.dtype, array.tobytes()


def value_numbers(program: FlatJaxpr, on_the_way: Sequence[Equation]) -> dict[int, int]:
    """For each value the first one that is computed in the same way.

    A loss may call a function twice, for ids and for a mask. Equations of other kinds
    than those on the way are not looked at.
    """

    def kind(eqn: JaxprEqn) -> Any:
        return name_and_params(eqn)[0], *(str(x.aval) for x in eqn.outvars)

    kinds = {kind(x.eqn) for x in on_the_way}
    seen: dict[Any, Any] = {}
    numbers = {x: x for x in range(program.size)}
    for x, value in program.literals.items():
        numbers[x] = seen.setdefault(_literal(value), x)
    for x, value in program.consts.items():
        numbers[x] = seen.setdefault(id(value), x)
    for eqn, operands, results in program.equations:
        if eqn.effects or kind(eqn) not in kinds:
            continue
        try:
            key = _key(eqn), *(numbers[x] for x in operands)
            first = seen.setdefault(key, results)
        except TypeError:  # a parameter that cannot be hashed
            continue
        numbers.update(zip(results, first, strict=True))
    return numbers
