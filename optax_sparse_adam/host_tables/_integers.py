"""Integers that a loss computes of floats, on the way to ids.

Two programs may round floats differently: the small one that computes ids, and the
step. So the small one hands over the integers in which floats end, and the step
computes ids, inverses, counts and branches of these, as integers do not round:

    ids = floor(log1p(x) * 9).astype(int32)    given to the step
    unique, inverse = jnp.unique(ids, ...)     computed of them, in both

Floats that go by steps, those of `floor` above, are among these integers.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._gradients.walk import Program, Walk
from .._jax_extras.jaxprs import FlatJaxpr, name_and_params

# Functions of floats, and of jax.numpy, that go by steps: their derivatives are zero.
_STEPS = "ceil", "floor", "floor_divide", "rint", "round", "sign", "trunc"


class IntegersWalk(Walk):
    """A walk that gets, or notes, what integers a loss computes of floats.

    In the bodies of loops, branches and the like that look rows up, which are other
    walks, nothing is given.

    Attributes:
      given: By their number among all integers, in the order of the program, which has
        as many where its callbacks are not called.
      integers: Those that are computed of floats, by their number.
      are_others: Whether so many differ that it is not by rounding, as those of
        `np.random` do, of which a loss may compute more than integers.
    """

    def __init__(self, program: Program, deltas: Any, given: Mapping[int, Any]):
        super().__init__(program, deltas)
        self.given = given
        self.integers: dict[int, jax.Array] = {}
        self.are_others: Any = np.False_
        self._count = 0

    def evaluate_by_jax(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        results = super().evaluate_by_jax(eqn, args)
        name, params = name_and_params(eqn)
        is_step = (params["name"] if name == "jit" else name) in _STEPS
        places = [i for i, x in enumerate(eqn.outvars) if is_step or _is_integer(x)]
        if places and _reads_floats(eqn):
            for number, i in enumerate(places, self._count):
                if number in self.given:
                    results[i] = self._taken(results[i], self.given[number])
                self.integers[number] = results[i]
        self._count += len(places)
        return results

    def _taken(self, own: jax.Array, given: jax.Array) -> jax.Array:
        if (own.shape, own.dtype) != (given.shape, given.dtype):  # of another program
            self.are_others = np.True_
            return own
        differ = (own != given) & (own == own)  # but for NaN
        self.are_others |= jnp.sum(differ) > 2 + own.size // 8
        return given


def _is_integer(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", np.float32)
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, np.bool_)


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


def integers_of(closed: ClosedJaxpr, count: int, reads: Container[int]) -> list[int]:
    """Which of further results lie on the way to the first ones, the ids.

    All integers that these equations compute, so that what else a loss makes of them
    fits: a mask, or what is sorted with ids. None that depends on other arguments than
    ids do, and so is on the way to something else (a loop may compute both); nor on
    what happens once, which is written to a mutable array, or has a barrier in the
    place of an io_callback.
    """
    program = FlatJaxpr(closed)
    equations, _ = program.slice(program.outputs[:count])
    computed = {x for equation in equations for x in equation.results}

    def is_of_ids(x: int) -> bool:
        equations, starts = program.slice([x])
        names = {name_and_params(y.eqn)[0] for y in equations}
        held = [program.consts[i] for i in starts if i in program.consts]
        return (
            all(i in reads for i in starts if i in program.inputs)
            and not any(isinstance(y, jax.Ref) for y in held)
            and not any(y.eqn.effects for y in equations)
            and "optimization_barrier" not in names
        )

    further = enumerate(program.outputs[count:], count)
    return [place for place, x in further if x in computed and is_of_ids(x)]
