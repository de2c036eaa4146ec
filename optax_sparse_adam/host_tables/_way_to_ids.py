"""What a loss computes of floats on the way to ids, in the small program and the step.

Two programs may round floats differently: the small one that computes ids, and the
step. So each value on the way is computed once, by the small one. A step takes over
those that anything else is computed of, the residuals, and so computes what is behind
them of the values that the ids belong to:

    y = log1p(x) * 9                        a residual, as `part` is computed of it
    ids = floor(y).astype(int32)            a residual
    unique, inverse = jnp.unique(ids, ...)  computed of `ids` in both: no floats
    part = y - ids                          computed by the step

This is partial evaluation (Jones, Gomard and Sestoft, 1993), of what reads floats.
"""

from collections.abc import Callable, Collection, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._gradients.rules import is_wider
from .._jax_extras.jaxprs import Equation, FlatJaxpr, name_and_params
from ._residuals import jaxprs_in
from ._value_numbers import value_numbers

# What chooses by its operands, and whose derivative goes by the choice.
_CHOOSES = (
    *("sort", "top_k", "approx_top_k", "reduce_max", "reduce_min", "max", "min"),
    *("clamp", "cummax", "cummin", "reduce_window_max", "reduce_window_min"),
    *("scatter-max", "scatter-min", "abs", "rem"),
)
# What jumps: of two numbers that are nearly equal it may make two that are not.
_JUMPS = (
    *("atan2", "ceil", "floor", "nextafter", "reduce_precision", "rem", "round"),
    "sign",
)
# What moves numbers and rounds none.
_MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "optimization_barrier", "pvary"),
    *("reshape", "reshard", "rev", "sharding_constraint", "slice", "squeeze"),
    "transpose",
)


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", np.int32), jnp.inexact)


def _reads_floats(eqn: JaxprEqn) -> bool:
    """Whether an operand is floating, or something that it computes inside."""
    return any(map(_is_float, eqn.invars)) or any(
        any(map(_reads_floats, x.jaxpr.eqns)) for x in jaxprs_in(eqn)
    )


def _may_round(eqn: JaxprEqn) -> bool:
    name, params = name_and_params(eqn)
    is_exact = name in _MOVES
    if name == "convert_element_type" and _is_float(eqn.outvars[0]):
        source: Any = eqn.invars[0].aval
        is_exact = is_wider(params["new_dtype"], source.dtype)
    return not is_exact and _reads_floats(eqn)


class WayToIds:
    """The equations of a loss that lie on the way to its ids.

    Args:
      closed: It returns ids, what the function returns, and values that it computes.
      count: How many are ids.
      num_results: How many the function returns.
      reads: The arguments that ids depend on.
      dense: Those with derivatives, the parameters.
      batch: Those that may be read for a residual.
      depends_on: What the result of a place depends on, as a loop may compute something
        else, too; `None` where that happens once.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        count: int,
        num_results: int,
        reads: Collection[int],
        dense: Container[int],
        batch: Container[int],
        depends_on: Callable[[int], Collection[int] | None],
    ):
        program = self._program = FlatJaxpr(closed)
        self._avals, first = closed.out_avals, count + num_results
        self._places: dict[int, int] = {}
        for place, x in enumerate(program.outputs[first:], first):
            self._places.setdefault(x, place)
        to_ids, _ = program.slice(program.outputs[:count])
        self._numbers = value_numbers(program, to_ids)
        self._names = {
            self._numbers[x] for equation in to_ids for x in equation.results
        }
        self._on_the_way = [
            equation
            for equation in program.equations
            if self._names & {self._numbers[x] for x in equation.results}
        ]
        self._results = {*program.outputs[:first]}
        self._read = self._results.union(*(x.operands for x in program.equations))
        self._of_params = {i for i in program.inputs if i in dense}
        for _, operands, made in program.equations:
            if not self._of_params.isdisjoint(operands):
                self._of_params.update(made)
        self._allowed = {i for i in program.inputs if i in reads or i in batch}
        self._sources = self._sources_of({*reads}, depends_on)

    def residuals(self) -> tuple[dict[int, int], set[int]]:
        """The residuals: their places among the results, and what they depend on.

        With each place that of the first value that is computed in the same way. Behind
        equations that read floats, those of integers may be the small program's, too:
        of a sum of comparisons it has fewer bytes to hand over, of `jnp.unique` more.
        """
        cuts = [self._cut(self._of_small(x)) for x in (False, True)]
        places = min(cuts, key=lambda x: sum(map(self._size, {*x.values()})))
        values = [x for x, place in self._places.items() if place in places]
        return places, {i for x in values for i in self._sources[x] or ()}

    def _sources_of(
        self, reads: set[int], depends_on: Callable[[int], Collection[int] | None]
    ) -> dict[int, frozenset[int] | None]:
        """The arguments that each value depends on; `None` for what happens once."""
        program = self._program
        sources: dict[int, frozenset[int] | None]
        sources = {i: frozenset([i]) for i in program.inputs}
        for x, value in program.consts.items():
            sources[x] = None if isinstance(value, jax.Ref) else frozenset()
        sources |= dict.fromkeys(program.literals, frozenset())
        for eqn, operands, made in program.equations:
            of_operands = {sources[x] for x in operands}
            # What is written to a mutable array happens once.
            if eqn.effects or None in of_operands:
                sources |= dict.fromkeys(made, None)
                continue
            union = frozenset(i for x in of_operands for i in x or ())
            sources |= dict.fromkeys(made, union)
            # A barrier may stand in the place of an io_callback.
            is_barrier = name_and_params(eqn)[0] == "optimization_barrier"
            may_be_less = not union <= reads and next(jaxprs_in(eqn), None)
            if not is_barrier and not may_be_less:
                continue
            for x in made:
                if x in self._places and self._numbers[x] in self._names:
                    exact = depends_on(self._places[x])
                    sources[x] = None if exact is None else frozenset(exact)
        return sources

    def _size(self, place: int) -> int:
        return self._avals[place].size * self._avals[place].dtype.itemsize

    def _can_be_residual(self, x: int) -> bool:
        sources = self._sources[x]
        return x in self._places and sources is not None and sources <= self._allowed

    def _is_decision(self, x: int) -> bool:
        place = self._places.get(x)
        return place is not None and not jnp.issubdtype(
            self._avals[place].dtype, jnp.inexact
        )

    def _of_small(self, with_integers: bool) -> list[Equation]:
        """Those whose values the small program alone computes.

        They read floats; and with integers those that compute of their results. Not
        what comes of others, as of a loop whose results cannot all be residuals.
        """
        of_small, known, of_step = list[Equation](), set[int](), set[int]()
        for equation in self._on_the_way:
            eqn, operands, made = equation
            may_round = _may_round(eqn)
            is_of_floats = may_round or (
                with_integers and not known.isdisjoint(operands)
            )
            if not of_step.isdisjoint(operands):
                of_step.update(made)
            elif is_of_floats and self._is_alone(equation):
                of_small.append(equation)
                known.update(made)
            elif may_round:
                of_step.update(made)
        return of_small

    def _is_alone(self, equation: Equation) -> bool:
        """Whether a step may take over all results of an equation."""
        eqn, operands, made = equation
        needed = {x for x in made if x in self._read}
        # A derivative would go by decisions of the step's that are made inside.
        is_mixed = len({*map(self._is_decision, needed)}) == 2
        is_mixed &= next(jaxprs_in(eqn), None) is not None
        is_mixed &= not self._of_params.isdisjoint(operands)
        return not is_mixed and all(map(self._can_be_residual, needed))

    def _cut(self, of_small: list[Equation]) -> dict[int, int]:
        """What others read of these equations' values."""
        computed = {x.results[0] for x in of_small}
        others = (x for x in self._program.equations if computed.isdisjoint(x.results))
        used = self._results.union(*(x.operands for x in others))
        residuals, with_derivatives = list[int](), set[int]()
        # Who uses a value comes behind it.
        for eqn, operands, made in reversed(of_small):
            wanted = {x for x in made if x in used}
            decisions = {*filter(self._is_decision, made)}
            floats = (wanted - decisions) & self._of_params
            if floats or not with_derivatives.isdisjoint(made):
                with_derivatives.update(operands)
                if name_and_params(eqn)[0] in _CHOOSES or (floats and decisions):
                    # Of the same operands the step chooses the same ones.
                    used.update(operands)
            # Derivatives go by decisions, and by what has jumped.
            jumps = {*made} if name_and_params(eqn)[0] in _JUMPS else decisions
            more = (jumps - wanted) & with_derivatives
            residuals += sorted(wanted | {*filter(self._can_be_residual, more)})
        places = self._places
        return {places[x]: places.get(self._numbers[x], places[x]) for x in residuals}
