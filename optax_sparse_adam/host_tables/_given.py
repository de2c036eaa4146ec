"""What a loss computes of floats on the way to ids, in the small program and the step.

Two programs may round floats differently: the small one that computes ids, and the
step. So each value on the way is computed once, by the small one. A step takes over
those that anything else is computed of, and so computes what is behind them of the
values that the ids belong to:

    y = log1p(x) * 9                        given, as `part` is computed of it
    ids = floor(y).astype(int32)            given
    unique, inverse = jnp.unique(ids, ...)  computed of `ids` in both: no floats
    part = y - ids                          computed by the step

This is partial evaluation (Jones, Gomard and Sestoft, 1993), of what reads floats.
"""

import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._gradients.backward_slice import as_closed
from .._gradients.walk import Program, Walk
from .._jax_extras.inject import with_derivative_of
from .._jax_extras.jaxprs import Equation, FlatJaxpr, name_and_params
from ._callbacks import callback_of

# What chooses among its operands, and whose derivative goes to what was chosen.
_CHOOSES = (
    *("sort", "top_k", "approx_top_k", "reduce_max", "reduce_min", "max", "min"),
    *("clamp", "cummax", "cummin"),
)
# What moves numbers and rounds none; and so does a cast of parameters alone.
_MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "reshape", "rev", "slice", "squeeze"),
    "transpose",
)
# A value's number among those of a program, and a digest of what comes before it.
Number = tuple[int, int]


class GivenWalk(Walk):
    """A walk that takes, or notes, what a loss computes.

    A `jit` is walked through: what is computed inside is a value like others. In the
    bodies of loops, branches and the like that look rows up, which are other walks,
    nothing is given.

    Attributes:
      computed: The arrays that were not given, by their numbers.
    """

    def __init__(self, program: Program, deltas: Any, given: Mapping[Number, Any]):
        super().__init__(program, deltas)
        self.computed: dict[Number, jax.Array] = {}
        self._given = dict(given)
        self._number: Number = 0, 0
        self._differ: Any = np.False_

    @property
    def are_others(self) -> Any:
        """Whether what was given is of another program, by name, shape or values.

        So it is where as many integers differ as not by rounding: those of `np.random`,
        of which a loss may compute more than ids.
        """
        return self._differ | bool(self._given)

    def evaluate_by_jax(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        name, params = name_and_params(eqn)
        name = callback_of(eqn) or name
        if name == "jit" and not params["name"].startswith("optax_sparse_adam_"):
            return self.evaluate(as_closed(params["jaxpr"]), args)
        results = super().evaluate_by_jax(eqn, args)
        for i, var in enumerate(eqn.outvars):
            number = self._next(name, var.aval)
            if number in self._given:
                results[i] = self._taken(results[i], self._given.pop(number))
            elif _is_array(var.aval):
                self.computed[number] = results[i]
        return results

    def _next(self, name: str, aval: Any) -> Number:
        count, digest = self._number
        text = name, getattr(aval, "shape", None), str(getattr(aval, "dtype", None))
        self._number = count + 1, zlib.crc32(repr(text).encode(), digest)
        return self._number

    def _taken(self, own: jax.Array, given: jax.Array) -> jax.Array:
        layout = jax.typeof(own).sharding
        if layout.mesh.explicit_axes:
            given = jax.reshard(given, layout)
        if jnp.issubdtype(own.dtype, jnp.inexact):
            # Of parameters, it has a derivative.
            return with_derivative_of(given, own)
        self._differ |= jnp.sum(own != given) > 2 + own.size // 8
        return given


def _is_array(aval: Any) -> bool:
    """No mutable array, and none of random keys."""
    is_array = isinstance(aval, jax.core.ShapedArray)
    return is_array and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _jaxprs_in(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    def inside(x: Any) -> Iterator[Jaxpr]:
        if type(x) in (tuple, list):
            for y in x:
                yield from inside(y)
        jaxpr = x.jaxpr if isinstance(x, ClosedJaxpr) else x
        if isinstance(jaxpr, Jaxpr):
            yield jaxpr

    for x in name_and_params(eqn)[1].values():
        yield from inside(x)


def _reads_floats(eqn: JaxprEqn) -> bool:
    """Whether an operand is floating, or something that it computes inside."""
    avals = (x.aval for x in eqn.invars)
    kinds = (getattr(x, "dtype", np.int32) for x in avals)
    return any(jnp.issubdtype(x, jnp.inexact) for x in kinds) or any(
        any(map(_reads_floats, jaxpr.eqns)) for jaxpr in _jaxprs_in(eqn)
    )


def _key(eqn: JaxprEqn) -> Any:
    """What an equation does, to tell whether another one computes the same.

    A function that is made anew in each call, as one with a closure, has another jaxpr,
    of the same text. Of one that has a rule for derivatives the value alone counts.
    """
    name, params = name_and_params(eqn)
    if name.startswith(("custom_jvp_call", "custom_vjp_call")):
        params = {key: x for key, x in params.items() if key == "call_jaxpr"}

    def of(x: Any) -> Any:
        if type(x) in (tuple, list):
            return tuple(map(of, x))
        if isinstance(x, ClosedJaxpr):
            return str(x.jaxpr), *map(id, x.consts)
        return str(x) if isinstance(x, Jaxpr) else x

    return eqn.primitive, *((key, of(x)) for key, x in params.items())


def _computed_alike(program: FlatJaxpr, on_the_way: Sequence[Equation]) -> Any:
    """For each value the first one that is computed in the same way.

    A loss may call a function of its own twice, for ids and for a mask.
    """

    def kind(eqn: JaxprEqn) -> Any:
        return name_and_params(eqn)[0], *(str(x.aval) for x in eqn.outvars)

    kinds = {kind(x.eqn) for x in on_the_way}
    seen: dict[Any, Any] = {}
    alike = {x: x for x in range(program.size)}
    for x, value in program.literals.items():
        array = np.asarray(value)
        key = type(value), array.dtype, array.tobytes()
        alike[x] = seen.setdefault(key, x)
    for x, value in program.consts.items():
        alike[x] = seen.setdefault(id(value), x)
    for eqn, operands, results in program.equations:
        if eqn.effects or kind(eqn) not in kinds:
            continue
        try:
            key = _key(eqn), *(alike[x] for x in operands)
            first = seen.setdefault(key, results)
        except TypeError:  # a parameter that cannot be hashed
            continue
        alike.update(zip(results, first, strict=True))
    return alike


class WayToIds:
    """The equations of a loss that lie on the way to its ids.

    Args:
      closed: It returns ids, what the function returns, and values that it computes.
      count: How many are ids.
      num_results: How many the function returns.
      reads: The arguments that ids depend on.
      dense: Those with derivatives, the parameters.
      is_of_batch: Whether the result of a place depends on these and on the batch alone
        where that is not seen at once: a loop may compute something else, too.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        count: int,
        num_results: int,
        reads: Container[int],
        dense: Container[int],
        is_of_batch: Callable[[int], bool],
    ):
        program = self._program = FlatJaxpr(closed)
        self._avals, self._reads = closed.out_avals, reads
        self._is_of_batch, first = is_of_batch, count + num_results
        self._places: dict[int, int] = {}
        for place, x in enumerate(program.outputs[first:], first):
            self._places.setdefault(x, place)
        to_ids, _ = program.slice(program.outputs[:count])
        self._alike = _computed_alike(program, to_ids)
        names = {self._alike[x] for equation in to_ids for x in equation.results}
        self._on_the_way = [
            x for x in program.equations if names & {self._alike[y] for y in x.results}
        ]
        self._results = {*program.outputs[:first]}
        self._read = self._results.union(*(x.operands for x in program.equations))
        self._of_params = {i for i in program.inputs if i in dense}
        for _, operands, made in program.equations:
            if not self._of_params.isdisjoint(operands):
                self._of_params.update(made)
        self._casts = self._casts_of({i for i in program.inputs if i in dense})
        self._givable: dict[int, bool] = {}

    def given(self) -> dict[int, int]:
        """Which values a step takes over: their places among the results.

        With each that of the first one that is computed alike. Behind those that read
        floats all integers may be the small program's as well: of a sum of comparisons
        it has fewer to give, of `jnp.unique` more.
        """
        cuts = [self._cut(self._of_small(x)) for x in (False, True)]
        return min(cuts, key=lambda x: sum(map(self._size, {*x.values()})))

    def _size(self, place: int) -> int:
        return self._avals[place].size * self._avals[place].dtype.itemsize

    def _casts_of(self, values: set[int]) -> set[int]:
        """What is moved or cast of arguments alone: each program has it."""
        known, literals = {*values}, self._program.literals
        for eqn, operands, made in self._program.equations:
            is_cast = name_and_params(eqn)[0] in (*_MOVES, "convert_element_type")
            if is_cast and all(x in known or x in literals for x in operands):
                known.update(made)
        return known

    def _can_be_given(self, x: int) -> bool:
        if x not in self._givable:
            self._givable[x] = x in self._places and self._is_of_ids(x)
        return self._givable[x]

    def _is_of_ids(self, x: int) -> bool:
        equations, starts = self._program.slice([x])
        consts, inputs = self._program.consts, self._program.inputs
        # What is written to a mutable array happens once.
        if any(isinstance(consts.get(i), jax.Ref) for i in starts):
            return False
        if any(equation.eqn.effects for equation in equations):
            return False
        # A barrier may stand in the place of an io_callback.
        names = {name_and_params(equation.eqn)[0] for equation in equations}
        is_seen = all(i in self._reads for i in starts if i in inputs)
        is_seen &= "optimization_barrier" not in names
        return is_seen or self._is_of_batch(self._places[x])

    def _is_decision(self, x: int) -> bool:
        place = self._places.get(x)
        return place is not None and not jnp.issubdtype(
            self._avals[place].dtype, jnp.inexact
        )

    def _of_small(self, with_integers: bool) -> list[Equation]:
        """Those whose values the small program alone computes.

        They read floats; and with integers those that compute of their results. Not
        what comes of others, as of a loop whose results cannot all be given.
        """
        of_small, known, of_step = list[Equation](), set[int](), set[int]()
        for equation in self._on_the_way:
            eqn, operands, made = equation
            is_moved = name_and_params(eqn)[0] in _MOVES
            is_moved |= self._casts.issuperset(made)
            may_round = _reads_floats(eqn) and not is_moved
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
        is_mixed &= next(_jaxprs_in(eqn), None) is not None
        is_mixed &= not self._of_params.isdisjoint(operands)
        return not is_mixed and all(map(self._can_be_given, needed))

    def _cut(self, of_small: list[Equation]) -> dict[int, int]:
        """What others read of these equations' values."""
        computed = {x.results[0] for x in of_small}
        others = (x for x in self._program.equations if computed.isdisjoint(x.results))
        used = self._results.union(*(x.operands for x in others))
        given, with_derivatives = list[int](), set[int]()
        # Who uses a value comes behind it.
        for eqn, operands, made in reversed(of_small):
            wanted = {x for x in made if x in used}
            decisions = {*filter(self._is_decision, made)}
            floats = (wanted - decisions) & self._of_params
            if floats and (decisions or name_and_params(eqn)[0] in _CHOOSES):
                # Of the same operands the step chooses the same ones.
                used.update(operands)
            if floats or not with_derivatives.isdisjoint(made):
                with_derivatives.update(operands)
            # Derivatives go by decisions.
            more = (decisions - wanted) & with_derivatives
            given += sorted(wanted | {*filter(self._can_be_given, more)})
        places = self._places
        return {places[x]: places.get(self._alike[x], places[x]) for x in given}
