"""Proves of which tables an update treats each row alone, and takes it apart.

The update of compact trees is traced once, and each value of its jaxpr is judged:

- *rows of a table*, `[nse, ...]`: row `r` is computed from row `r` of what this table
  brings, its gradient and its gathered rows, and from plain values;
- *alike*: all rows are equal, such as a number broadcast to `[nse, ...]`;
- *plain*: all else, which may depend on everything: scalars, dense leaves, sums over
  rows, and the results of every operation that has no rule here.

A table whose results are rows of it, computed with plain values that nobody's gathered
rows are needed for, may be updated in blocks: the same equations hold for any of its
rows. What has no rule only makes values plain, so a missing rule costs time, and no
rule is needed to be right.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ._equations import ELEMENTWISE, evaluate_eqn

_ALIKE = -1  # in place of the number of a table
_NOBODY: frozenset[int] = frozenset()

_REDUCTIONS = {f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or")}
# The parameter of a primitive that says how many rows it makes.
_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}

Middle = Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]


class _Value(NamedTuple):
    """What is known of a value.

    Attributes:
      kind: The number of the table whose rows it has, `_ALIKE`, or `None` if plain.
      own: Tables of whose gathered rows each row needs its own.
      needs: Tables whose gathered rows are needed, more than its own.
    """

    kind: int | None = None
    own: frozenset[int] = _NOBODY
    needs: frozenset[int] = _NOBODY

    @property
    def reads(self) -> frozenset[int]:
        return self.own | self.needs


class _Step(NamedTuple):
    """An equation whose operands and results are numbered."""

    eqn: JaxprEqn
    operands: list[int]
    results: list[int]


def _is_for_all(
    kind: int | None, operand: tuple[int, ...], shape: tuple[int, ...]
) -> bool:
    """Whether an operand is the same for each row of a result of this shape."""
    is_one_row = kind in (None, _ALIKE) and operand[:1] == (1,) != shape[:1]
    return not operand or is_one_row


def _kind(eqn: JaxprEqn, kinds: list[int | None]) -> int | None:
    """The kind of the result, given those of the operands."""
    name, params = eqn.primitive.name, eqn.params
    avals: list[Any] = [atom.aval for atom in (eqn.outvars[0], *eqn.invars)]
    shape, *shapes = (aval.shape for aval in avals)
    pairs = zip(kinds, shapes, strict=True)
    apart = [pair for pair in pairs if not _is_for_all(*pair, shape)]
    if name in ELEMENTWISE:
        keeps = all(operand[:1] == shape[:1] for _, operand in apart)
    elif name == "broadcast_in_dim":
        axes = params["broadcast_dimensions"]
        is_one_row = not apart and axes[:1] == (0,)
        if shape and (is_one_row or (kinds[0] is None and 0 not in axes)):
            return _ALIKE
        keeps = axes[:1] == (0,) and shapes[0][0] == shape[0]
    elif name == "reshape":
        keeps = params["dimensions"] is None and shapes[0][:1] == shape[:1]
    elif name == "transpose":
        keeps = params["permutation"][:1] == (0,)
    elif name == "squeeze":
        keeps = 0 not in params["dimensions"]
    elif name in _REDUCTIONS:
        keeps = 0 not in params["axes"]
    else:
        keeps = False
    found = {kind for kind, _ in apart}
    tables = found - {_ALIKE}
    if keeps and found and None not in tables and len(tables) <= 1:
        return next(iter(tables), _ALIKE)
    return None


class _Program:
    """The equations of a jaxpr, those of each `jit` inside of it included.

    Values are numbered, the arguments first.
    """

    def __init__(self, closed: ClosedJaxpr):
        self.steps: list[_Step] = []
        self.maker: dict[int, int] = {}  # the step that makes a value
        self.literals: dict[int, Any] = {}
        self.consts: dict[int, Any] = {}
        self.size = len(closed.jaxpr.invars)
        self.inputs = list(range(self.size))
        self.outputs = self._inline(closed, self.inputs)

    def _new(self, known: dict[int, Any], value: Any = None) -> int:
        number, self.size = self.size, self.size + 1
        known[number] = value
        return number

    def _inline(self, closed: ClosedJaxpr, args: list[int]) -> list[int]:
        numbers: dict[Any, int] = dict(zip(closed.jaxpr.invars, args, strict=True))
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[var] = self._new(self.consts, value)

        def number(atom: Any) -> int:
            is_literal = isinstance(atom, Literal)
            return self._new(self.literals, atom.val) if is_literal else numbers[atom]

        for eqn in closed.jaxpr.eqns:
            operands = list(map(number, eqn.invars))
            if eqn.primitive.name == "jit":
                results = self._inline(eqn.params["jaxpr"], operands)
            else:
                step = len(self.steps)
                results = [self._new(self.maker, step) for _ in eqn.outvars]
                self.steps.append(_Step(eqn, operands, results))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return list(map(number, closed.jaxpr.outvars))

    def judge(self, inputs: dict[int, _Value]) -> list[_Value]:
        values = [_Value()] * self.size
        for number, value in inputs.items():
            values[number] = value
        for eqn, operands, results in self.steps:
            args = [values[number] for number in operands]
            own = _NOBODY.union(*(arg.own for arg in args))
            needs = _NOBODY.union(*(arg.needs for arg in args))
            kind = _kind(eqn, [arg.kind for arg in args])
            plain = _Value(None, _NOBODY, own | needs)
            for number in results:
                values[number] = plain if kind is None else _Value(kind, own, needs)
        return values

    def slice(
        self, wanted: Iterable[int], stop: Callable[[int], bool] = lambda number: False
    ) -> tuple[list[int], list[int]]:
        """The steps that lead to these values, and the values that they start from."""
        todo, seen, steps, starts = list(wanted), set[int](), set[int](), list[int]()
        while todo:
            number = todo.pop()
            if number in seen or number in self.literals:
                continue
            seen.add(number)
            if number in self.maker and not stop(number):
                steps.add(self.maker[number])
                todo += self.steps[self.maker[number]].operands
            else:
                starts.append(number)
        return sorted(steps), starts

    def evaluate(
        self, steps: list[int], given: dict[int, Any], rows: int | None = None
    ) -> dict[int, Any]:
        """All that these steps make of the given values; of so many rows, if said."""
        env = self.literals | given
        for eqn, operands, results in (self.steps[step] for step in steps):
            name = _SHAPES.get(eqn.primitive.name)
            if rows is not None and name is not None:
                shape = (rows, *eqn.params[name][1:])
                eqn = eqn.replace(params=eqn.params | {name: shape})
            made = evaluate_eqn(eqn, [env[number] for number in operands])
            env.update(zip(results, made, strict=True))
        return env


class Parts(NamedTuple):
    """An update, taken apart.

    Attributes:
      middles: For each table that is updated row by row the middle for `map_rows`.
      rest: `rest(data, old)`, with `old` for the other tables, returns the results of
        the update, `None` in place of those of the middles; and for each middle the
        values that it takes besides rows.
    """

    middles: dict[int, Middle]
    rest: Callable[..., tuple[list[Any], dict[int, Any]]]


def take_apart(
    update: Callable[..., list[Any]], owners: list[int | None], data: Any, old: Any
) -> Parts:
    """Takes an update apart as far as it provably treats rows alone.

    Args:
      update: `update(data, old)`.
      owners: For each result of `update` the number of the table that it is of, or
        `None`: for each table its update, then new rows in the order of the old ones.
      data: For each table, by its number, the rows of its gradient.
      old: For each table shapes and types of the rows that are gathered: those that it
        gets new ones of, then those that are only read.
    """
    if not data:
        return Parts({}, lambda data, old: (update(data, old), {}))
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(data, old)
    if closed.effects:  # they happen once, and in order
        return take_apart(update, owners, {}, {})
    program = _Program(closed)
    treedefs: Any = jax.tree.structure((data, old)), jax.tree.structure(shapes)
    data_at, old_at = treedefs[0].unflatten(program.inputs)
    results_at = treedefs[1].unflatten(program.outputs)
    given = {number: _Value(i) for i, number in data_at.items()}
    for i, numbers in old_at.items():
        given |= dict.fromkeys(numbers, _Value(i, own=frozenset([i])))
    values = program.judge(given)
    places: dict[int, list[int]] = {i: [] for i in data}
    for place, owner in enumerate(owners):
        if owner in places:
            places[owner].append(place)

    def is_by_row(i: int) -> bool:
        """Whether all results of this table are rows, like those that they replace."""
        return all(
            isinstance(results_at[place], int)
            and values[results_at[place]].kind in (i, _ALIKE)
            and not values[results_at[place]].needs
            and shapes[place].shape == like.shape
            for place, like in zip(places[i], (data[i], *old[i]), strict=False)
        )

    def without(tables: Iterable[int]) -> list[Any]:
        """Where the results are that are not of these tables."""
        gone = {place for i in tables for place in places[i]}
        return [None if n in gone else at for n, at in enumerate(results_at)]

    by_row = [i for i in data if is_by_row(i)]
    read = (values[number].reads for number in jax.tree.leaves(without(by_row)))
    by_row = sorted(set(by_row).difference(*read))
    middles, extra_at = {}, {}
    for i in by_row:
        outputs = [results_at[place] for place in places[i]]
        steps, starts = program.slice(outputs, lambda n: values[n].kind is None)
        extra_at[i] = [n for n in starts if values[n].kind is None]
        inputs = [data_at[i], *old_at[i], *extra_at[i]]
        middles[i] = _middle(program, steps, inputs, outputs)
    wanted = without(by_row), extra_at
    steps, _ = program.slice(jax.tree.leaves(wanted))

    def rest(data: Any, old: Any) -> Any:
        numbers = data_at, {i: old_at[i] for i in old}
        given = zip(jax.tree.leaves(numbers), jax.tree.leaves((data, old)), strict=True)
        env = program.evaluate(steps, program.consts | dict(given))
        return jax.tree.map(env.__getitem__, wanted)

    return Parts(middles, rest)


def _middle(
    program: _Program, steps: list[int], inputs: list[int], outputs: list[int]
) -> Middle:
    def middle(
        data: jax.Array, old: tuple[jax.Array, ...], extra: list[Any]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        given = zip(inputs, (data, *old, *extra), strict=True)
        env = program.evaluate(steps, dict(given), len(data))
        update, *new = (env[number] for number in outputs)
        return update, tuple(new)

    return middle
