"""Which values of a gradient's jaxpr are sums of rows: a data-flow analysis.

Two passes over a jaxpr, of which neither computes anything:

* backwards from the gradients of the wanted leaves (`Analysis.demand`): through which
  values does a sum of rows reach one of them? What reaches none, such as an
  activation or another leaf's gradient that happens to have the table's shape, is an
  array like any other.
* forwards (`Analysis.obstacles`): which of these values are sums of rows indeed, and
  which equation is in the way for the others?

For the loss `sum(tanh(2 * t)[ids])`, in short:

    a = broadcast_in_dim 0.0      demanded through b          zeros: a sum of no rows
    b = scatter-add a ids g       demanded through c          adds rows to a sum
    c = mul b d                   demanded through e          linear in b
    e = mul c 2.0                 the gradient of t           linear in c

With `f = broadcast_in_dim 1.0; g = add_any e f` for weight decay at the end, `f` is
demanded and no sum of rows, so `broadcast_in_dim` is the obstacle of `g`.

Known limits: both passes follow variables, so that an operand that could be a sum of
rows is demanded even where the rule in question turns out to need another one, and a
loop's carried sum is followed once through the body. Either costs time at most: the
interpreter makes an array of every sum that it cannot keep.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var


class Obstacle(NamedTuple):
    """Why a value is no sum of rows; `None` in its place for one that is.

    Attributes:
      eqn: The equation in the way, `None` if unknown.
      line: Where the user's code calls for it.
    """

    eqn: JaxprEqn | None
    line: str = ""


class Number(NamedTuple):
    """A scalar that is known while tracing, such as the zero of a broadcast.

    Attributes:
      value: The scalar.
    """

    value: Any


# What is known of a value: a sum of rows (`None`), none and why, or a known scalar.
State = Obstacle | Number | None
Obstacles = Sequence[State]
UNKNOWN = Obstacle(None)


def number_of(value: Any) -> Number | None:
    """What is known of a value before anything is computed: a scalar, or nothing."""
    if isinstance(value, jax.Array) or not isinstance(
        value, int | float | np.generic | np.ndarray
    ):
        return None
    return None if np.ndim(value) else Number(value)


def cast_number(eqn: JaxprEqn, value: Any) -> Number | None:
    """The result of a cast of a scalar, as jnp functions make one of each `0`."""
    number = number_of(value)
    if number is None or eqn.primitive.name != "convert_element_type":
        return None
    if eqn.params["weak_type"]:
        return None
    return Number(np.asarray(number.value).astype(eqn.params["new_dtype"]))


class Rule(NamedTuple):
    """What to do with one primitive when tables are concerned.

    Attributes:
      apply: `apply(context, eqn, *args)` returns the list of results, or
        `NotImplemented` to let JAX evaluate the equation on plain arrays.
      demand: `demand(analysis, eqn, wanted)` says for each operand whether one of the
        wanted results may be a sum of rows because that operand is.
      obstacles: `obstacles(analysis, eqn, wanted, operands)` returns an obstacle or
        `None` for each result, given the same for each operand.
    """

    apply: Callable[..., Any]
    demand: Callable[["Analysis", JaxprEqn, Sequence[bool]], Sequence[bool]]
    obstacles: Callable[["Analysis", JaxprEqn, Sequence[bool], Obstacles], Obstacles]


class Demand(NamedTuple):
    """The variables of a jaxpr through which sums of rows reach the wanted outputs.

    Attributes:
      variables: All of them.
      inputs: Says for each input whether it is one of them.
    """

    variables: frozenset[Var]
    inputs: tuple[bool, ...]


class Analysis:
    """Both passes for one program, nested jaxprs included.

    Each jaxpr is judged once for each set of wanted outputs, however many equations
    call it.
    """

    def __init__(self, rules: dict[str, Rule]):
        self._rules = rules
        self._demands: dict[Any, Demand] = {}
        self._obstacles: dict[Any, list[Obstacle | None]] = {}
        self._keys: list[Any] = []  # what is known by its `id` stays alive

    def demand(self, jaxpr: Jaxpr, wanted: Sequence[bool]) -> Demand:
        """Follows the wanted outputs back to what they are made of."""
        key = (id(jaxpr), tuple(wanted))
        if key not in self._demands:
            self._keys.append(jaxpr)
            self._demands[key] = self._demand(jaxpr, wanted)
        return self._demands[key]

    def _demand(self, jaxpr: Jaxpr, wanted: Sequence[bool]) -> Demand:
        found: set[Var] = set()

        def add(atoms: Sequence[Any], flags: Sequence[bool]) -> None:
            pairs = zip(atoms, flags, strict=True)
            found.update(atom for atom, flag in pairs if flag and isinstance(atom, Var))

        add(jaxpr.outvars, wanted)
        for eqn in reversed(jaxpr.eqns):
            results = [var in found for var in eqn.outvars]
            rule = self._rules.get(eqn.primitive.name)
            if rule is not None and any(results):
                add(eqn.invars, rule.demand(self, eqn, results))
        return Demand(frozenset(found), tuple(var in found for var in jaxpr.invars))

    def obstacles(
        self, jaxpr: Jaxpr, wanted: Sequence[bool], inputs: Obstacles
    ) -> list[Obstacle | None]:
        """Finds what keeps each wanted output from being a sum of rows.

        Args:
          jaxpr: The jaxpr.
          wanted: Which outputs are to be sums of rows.
          inputs: What is known of each input.
        """
        # The result is the same for all calls whose inputs have obstacles at the same
        # places, but for these obstacles.
        marks: list[State] = [
            Obstacle(None, f"input {i}") if isinstance(x, Obstacle) and x.line else x
            for i, x in enumerate(inputs)
        ]
        key = (id(jaxpr), tuple(wanted), *map(_key, marks))
        if key not in self._obstacles:
            self._keys.append(jaxpr)
            self._obstacles[key] = self._find_obstacles(jaxpr, wanted, marks)
        originals: dict[Obstacle | None, Obstacle | None] = {
            mark: x
            for mark, x in zip(marks, inputs, strict=True)
            if isinstance(mark, Obstacle) and isinstance(x, Obstacle)
        }
        return [originals.get(x, x) for x in self._obstacles[key]]

    def _find_obstacles(
        self, jaxpr: Jaxpr, wanted: Sequence[bool], inputs: Obstacles
    ) -> list[Obstacle | None]:
        demanded = self.demand(jaxpr, wanted).variables
        known: dict[Any, State] = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> State:
            if isinstance(atom, Literal):
                return number_of(atom.val) or UNKNOWN
            return known.get(atom, UNKNOWN)

        for eqn in jaxpr.eqns:
            results = [var in demanded for var in eqn.outvars]
            if not any(results):
                operand = of(eqn.invars[0]) if eqn.invars else None
                if isinstance(operand, Number):
                    known[eqn.outvars[0]] = cast_number(eqn, operand.value) or UNKNOWN
                continue
            rule = self._rules.get(eqn.primitive.name)
            if rule is None:
                found: Obstacles = [Obstacle(eqn)] * len(results)
            else:
                found = rule.obstacles(self, eqn, results, list(map(of, eqn.invars)))
            for var, obstacle in zip(eqn.outvars, found, strict=True):
                known[var] = _located(obstacle, eqn)
        outputs = map(of, jaxpr.outvars)
        return [UNKNOWN if isinstance(x, Number) else x for x in outputs]


def _key(state: State) -> Any:
    if isinstance(state, Number):
        value = np.asarray(state.value)
        return value.dtype.name, value.tobytes()
    return state if state is None else state.line


def _located(state: State, eqn: JaxprEqn) -> State:
    """An obstacle with a line; what jnp functions hold inside has none of its own."""
    if state is None or (isinstance(state, Obstacle) and state.line):
        return state
    where = (state.eqn if isinstance(state, Obstacle) else None) or eqn
    return Obstacle(where, source_info_util.summarize(eqn.source_info))
