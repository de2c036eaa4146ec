"""Kinds of rules: how results inherit being sums of rows from operands.

Each function makes a `Rule` of what to do with a primitive (`apply`), with the `demand`
and the `obstacles` of its kind: `all_of` is the kind of an addition, `any_of` that of a
product, `each_of` that of a barrier, `never` that of a lookup.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from .analysis import Analysis, Obstacle, Obstacles, Rule
from .interpreter import Results

Apply = Callable[..., Results]


def none(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    """The demand of an equation of which no operand is a sum of rows."""
    return [False] * len(eqn.invars)


def never(apply: Apply) -> Rule:
    """No result is a sum of rows."""

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        return [Obstacle(eqn)] * len(eqn.outvars)

    return Rule(apply, none, obstacles)


def all_of(
    apply: Apply,
    start: int = 0,
    stop: int | None = None,
    condition: Callable[[JaxprEqn], bool] = lambda eqn: True,
) -> Rule:
    """The result is a sum of rows if all of these operands are."""

    def demand(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
        chosen = range(len(eqn.invars))[start:stop]
        return [i in chosen and condition(eqn) for i in range(len(eqn.invars))]

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        if not condition(eqn):
            return [Obstacle(eqn)]
        found = (x for x in operands[start:stop] if x is not None)
        return [next(found, None)]

    return Rule(apply, demand, obstacles)


def any_of(apply: Apply) -> Rule:
    """The result is a sum of rows if one of the operands is."""

    def may_be(eqn: JaxprEqn) -> list[bool]:
        atoms: list[Any] = eqn.invars
        out: Any = eqn.outvars[0].aval
        shape = out.shape
        return [not isinstance(x, Literal) and x.aval.shape == shape for x in atoms]

    def demand(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
        return may_be(eqn)

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        found = [x for x, may in zip(operands, may_be(eqn), strict=True) if may]
        return [None if None in found else next(iter(found), Obstacle(eqn))]

    return Rule(apply, demand, obstacles)


def each_of(apply: Apply) -> Rule:
    """Each result is a sum of rows if its operand is."""
    return Rule(
        apply,
        demand=lambda analysis, eqn, wanted: wanted,
        obstacles=lambda analysis, eqn, wanted, operands: operands,
    )
