"""Row-independence analysis for `lazy`: which tables an update treats row by row.

The update of compact trees is traced once, and each value of its jaxpr is judged:

- *rows of a table*, `[nse, ...]`: row `r` is computed from row `r` of what this table
  brings, its gradient and its gathered rows, and from plain values;
- *alike*: all rows are equal, such as a number broadcast to `[nse, ...]`;
- *plain*: all else, which may depend on everything: scalars, dense leaves, sums over
  rows, and the results of every operation that has no rule here.

A table may be updated in blocks if its results are rows of it, and if the plain values
that they use depend on no table's gathered rows: the same equations hold for any of its
rows. What has no rule only makes values plain, so a missing rule costs time, and no
rule is needed to be right.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._jax_extras.jaxprs import ELEMENTWISE, Program, Step, evaluate

_ALIKE = -1  # in place of the number of a table
_NOBODY: frozenset[int] = frozenset()

_REDUCTIONS = [f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or")]
# For each primitive a test of its parameters: does row r of the result depend on row r
# of the operands only, if the number of rows stays the same?
_KEEPS_ROWS: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(ELEMENTWISE, lambda params: True),
    **dict.fromkeys(_REDUCTIONS, lambda params: 0 not in params["axes"]),
    "broadcast_in_dim": lambda params: params["broadcast_dimensions"][:1] == (0,),
    "reshape": lambda params: params["dimensions"] is None,
    "squeeze": lambda params: 0 not in params["dimensions"],
    "transpose": lambda params: params["permutation"][:1] == (0,),
}

Middle = Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]


class _Value(NamedTuple):
    """What is known of a value.

    Attributes:
      kind: The number of the table whose rows it has, `_ALIKE`, or `None` if plain.
      own: Tables of whose gathered rows row `r` depends on row `r` only.
      needs: Tables on whose gathered rows it depends in any other way.
    """

    kind: int | None = None
    own: frozenset[int] = _NOBODY
    needs: frozenset[int] = _NOBODY

    @property
    def reads(self) -> frozenset[int]:
        return self.own | self.needs


def _is_for_all(kind: int | None, shape: tuple[int, ...]) -> bool:
    """Whether an operand is the same for every row: a number, or one row for all."""
    return not shape or (kind in (None, _ALIKE) and shape[0] == 1)


def _kind(eqn: JaxprEqn, kinds: list[int | None]) -> int | None:
    """The kind of the result, given those of the operands."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _KEEPS_ROWS:
        return None
    avals: list[Any] = [atom.aval for atom in (eqn.outvars[0], *eqn.invars)]
    shape, *shapes = (aval.shape for aval in avals)
    pairs = zip(kinds, shapes, strict=True)
    apart = [pair for pair in pairs if not _is_for_all(*pair)]
    if name == "broadcast_in_dim" and shape and kinds[0] in (None, _ALIKE):
        axes = params["broadcast_dimensions"]
        is_new = 0 not in axes and kinds[0] is None
        if is_new or (not apart and axes[0] == 0):
            return _ALIKE
    same_number = all(operand[:1] == shape[:1] for _, operand in apart)
    found = {kind for kind, _ in apart}
    tables = found - {_ALIKE}
    if not (found and same_number and _KEEPS_ROWS[name](params)):
        return None
    return next(iter(tables), _ALIKE) if len(tables) <= 1 else None


def _judge(program: Program, inputs: dict[int, _Value]) -> list[_Value]:
    """What is known of each value, by its number, given that of the inputs."""
    plain = _Value()
    values = [plain] * program.size
    for number, value in inputs.items():
        values[number] = value
    for eqn, operands, results in program.steps:
        args = [values[number] for number in operands]
        is_new = eqn.primitive.name == "broadcast_in_dim"  # of a number, may be alike
        if not is_new and all(arg is plain for arg in args):
            continue
        own = _NOBODY.union(*(arg.own for arg in args))
        needs = _NOBODY.union(*(arg.needs for arg in args))
        kind = _kind(eqn, [arg.kind for arg in args])
        value = _Value(kind, own, needs)
        for number in results:
            values[number] = _Value(needs=own | needs) if kind is None else value
    return values


class Parts(NamedTuple):
    """An update, taken apart.

    Attributes:
      results: The results of the update. Those of the tables that are updated row by
        row are not used, and then XLA computes nothing for them.
      middles: For each table that is updated row by row the middle for `map_rows`, and
        the values that it takes besides rows.
    """

    results: list[Any]
    middles: dict[int, tuple[Middle, list[jax.Array]]]


def take_apart(
    update: Callable[..., list[Any]], owners: list[int | None], data: Any, old: Any
) -> Parts:
    """Takes an update apart as far as it provably treats rows alone.

    Args:
      update: `update(data, old)`.
      owners: For each result of `update` the number of the table that it is of, or
        `None`: for each table its update, then new rows in the order of the old ones.
      data: For each table, by its number, the rows of its gradient.
      old: For each table the rows that are gathered: those that it gets new ones of,
        then those that are only read.
    """
    if not data:
        return Parts(update(data, old), {})
    compiled = jax.jit(update)  # of which JAX keeps the jaxpr for the second call
    closed = jax.make_jaxpr(compiled)(data, old)
    results = compiled(data, old)
    if closed.effects:  # they happen once, and in order
        return Parts(results, {})
    program = Program(closed)
    treedefs: Any = jax.tree.structure((data, old)), jax.tree.structure(results)
    data_at, old_at = treedefs[0].unflatten(program.inputs)
    results_at = treedefs[1].unflatten(program.outputs)
    known = {number: _Value(i) for i, number in data_at.items()}
    for i, numbers in old_at.items():
        known |= dict.fromkeys(numbers, _Value(i, own=frozenset([i])))
    values = _judge(program, known)
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
            and results[place].shape == like.shape
            for place, like in zip(places[i], (data[i], *old[i]), strict=False)
        )

    by_row = {i for i in data if is_by_row(i)}
    others = [at for at, i in zip(results_at, owners, strict=True) if i not in by_row]
    read = (values[number].reads for number in jax.tree.leaves(others))
    middles, extra_at = {}, {}
    for i in sorted(by_row.difference(*read)):
        outputs = [results_at[place] for place in places[i]]
        steps, starts = program.slice(outputs, lambda n: values[n].kind is None)
        extra_at[i] = [n for n in starts if values[n].kind is None]
        inputs = [data_at[i], *old_at[i], *extra_at[i]]
        middles[i] = _middle(steps, program.literals, inputs, outputs)
    # Computed anew, among the results too; XLA makes one of equal operations.
    steps, _ = program.slice(jax.tree.leaves(extra_at))
    given = dict(zip(program.inputs, jax.tree.leaves((data, old)), strict=True))
    env = evaluate(steps, program.literals | program.consts | given)
    extra = jax.tree.map(lambda number: jnp.asarray(env[number]), extra_at)
    return Parts(results, {i: (middles[i], extra[i]) for i in middles})


def _middle(
    steps: list[Step], literals: dict[int, Any], inputs: list[int], outputs: list[int]
) -> Middle:
    def middle(
        data: jax.Array, old: tuple[jax.Array, ...], extra: list[Any]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        given = zip(inputs, (data, *old, *extra), strict=True)
        env = evaluate(steps, literals | dict(given), len(data))
        update, *new = (env[number] for number in outputs)
        return update, tuple(new)

    return middle
