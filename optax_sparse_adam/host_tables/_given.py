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


def _reads_floats(eqn: JaxprEqn) -> bool:
    """Whether an operand is floating, or something that it computes inside."""

    def is_float(var: Any) -> bool:
        return jnp.issubdtype(getattr(var.aval, "dtype", np.int32), jnp.inexact)

    def inside(x: Any) -> bool:
        if type(x) in (tuple, list):
            return any(map(inside, x))
        jaxpr = x.jaxpr if isinstance(x, ClosedJaxpr) else x
        return isinstance(jaxpr, Jaxpr) and any(map(_reads_floats, jaxpr.eqns))

    return any(map(is_float, eqn.invars)) or any(map(inside, eqn.params.values()))


def _computed_alike(program: FlatJaxpr) -> dict[int, int]:
    """For each value the first one that is computed in the same way.

    A loss may call a function of its own twice, for ids and for a mask.
    """
    seen: dict[Any, Any] = {}
    alike = {x: x for x in range(program.size)}
    for x, value in program.literals.items():
        array = np.asarray(value)
        key = type(value), array.dtype, array.tobytes()
        alike[x] = seen.setdefault(key, x)
    for x, value in program.consts.items():
        alike[x] = seen.setdefault(id(value), x)
    for eqn, operands, results in program.equations:
        parts = eqn.primitive, tuple(eqn.params.items()), *(alike[x] for x in operands)
        try:
            first = seen.setdefault(parts, results)
        except TypeError:  # a parameter that cannot be hashed
            continue
        if not eqn.effects:
            alike.update(zip(results, first, strict=True))
    return alike


def given_of(
    closed: ClosedJaxpr,
    count: int,
    num_results: int,
    reads: Container[int],
    is_of_ids: Callable[[int], bool],
    with_decisions: bool,
) -> Iterator[tuple[int, int]]:
    """Which values of a program a step takes over.

    Args:
      closed: It returns ids, what the function returns, and values that it computes.
      count: How many are ids.
      num_results: How many the function returns.
      reads: The arguments that ids depend on.
      is_of_ids: Whether the result of a place depends on these alone, where that is not
        seen at once: a loop may compute something else, too.
      with_decisions: With all integers on the way, as floats have derivatives.

    Yields:
      The place of each among the results, and that of the first one computed alike.
    """
    program, first = FlatJaxpr(closed), count + num_results
    alike, places = _computed_alike(program), dict[int, int]()
    for place, x in enumerate(program.outputs[first:], first):
        places.setdefault(x, place)
    to_ids, _ = program.slice(program.outputs[:count])
    on_the_way = {alike[x] for equation in to_ids for x in equation.results}

    def can_be_given(x: int) -> bool:
        equations, starts = program.slice([x])
        held = [program.consts[i] for i in starts if i in program.consts]
        if any(isinstance(y, jax.Ref) for y in held):
            return False
        # What is written to a mutable array happens once.
        if any(y.eqn.effects for y in equations) or x not in places:
            return False
        # A barrier may stand in the place of an io_callback.
        names = {name_and_params(y.eqn)[0] for y in equations}
        is_seen = all(i in reads for i in starts if i in program.inputs)
        is_seen &= "optimization_barrier" not in names
        return is_seen or is_of_ids(places[x])

    def is_decision(x: int) -> bool:
        return x in places and not jnp.issubdtype(
            closed.out_avals[places[x]].dtype, jnp.inexact
        )

    small = list[Equation]()  # those whose values the small program alone computes
    used = set(program.outputs[:first])
    for equation in program.equations:
        if on_the_way & {alike[x] for x in equation.results} and _reads_floats(
            equation.eqn
        ):
            small.append(equation)
        else:
            used.update(equation.operands)
    # Who uses a value comes behind it.
    for equation in reversed(small):
        wanted = [x for x in equation.results if x in used]
        if all(map(can_be_given, wanted)):
            if with_decisions:
                more = filter(is_decision, equation.results)
                wanted = [*{*wanted, *filter(can_be_given, more)}]
            yield from ((places[x], places.get(alike[x], places[x])) for x in wanted)
        else:
            used.update(equation.operands)
