"""Updates rows where they are in their table, as far as the formula allows it.

Much state is a moving average or a sum: each new number is computed from the old one in
its place and from one other, as in `old + weight * (grad - old)`. A scatter with this
formula as its combiner reads and writes such rows in one pass. To gather them, to
compute and to scatter takes three, and memory for what is in between.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax_extras.jaxprs import ELEMENTWISE, Program, Step, evaluate
from .gather_scatter import (
    combine_rows,
    order_after_gather,
    prevent_fusion,
    scatter_rows,
    take_rows,
)

Tables = tuple[jax.Array, ...]
Middle = Callable[..., tuple[jax.Array, Tables]]


class _Combination(NamedTuple):
    """How the rows of one table may be updated where they are.

    Attributes:
      formula: The new number, from the old one and from another.
      other: Which value of the program holds the others.
    """

    formula: Callable[[jax.Array, jax.Array], jax.Array]
    other: int


def _find_dependents(program: Program, numbers: list[int]) -> set[int]:
    """These values, and all that are computed from one of them."""
    found = set(numbers)
    for _, operands, results in program.steps:
        if not found.isdisjoint(operands):
            found.update(results)
    return found


def _find_combination(
    program: Program, table: Any, old: list[int], place: int, new: int
) -> _Combination | None:
    """How the old rows at this place become new ones, if it is a combination."""
    moving = _find_dependents(program, [old[place]])
    path = [s for s in program.slice([new])[0] if not moving.isdisjoint(s.operands)]
    avals: dict[int, Any] = {
        number: atom.aval
        for eqn, operands, results in path
        for number, atom in zip(
            (*operands, *results), (*eqn.invars, *eqn.outvars), strict=True
        )
    }
    others = avals.keys() - moving - program.literals.keys()
    if new not in avals or len(others) != 1:
        return None
    (other,) = others
    numbers = others | (avals.keys() & moving)
    like = avals[old[place]]
    if not (
        jnp.issubdtype(table.dtype, jnp.floating)
        and avals[new].dtype == avals[other].dtype == table.dtype
        and all(avals[number].shape == like.shape for number in numbers)
        and all(step.eqn.primitive.name in ELEMENTWISE for step in path)
        and other not in _find_dependents(program, old)
    ):
        return None

    def formula(x: jax.Array, y: jax.Array) -> jax.Array:
        env = program.literals | {old[place]: x, other: y}
        for eqn, operands, (result,) in path:
            env[result] = eqn.primitive.bind(*(env[n] for n in operands), **eqn.params)
        return env[new]

    return _Combination(formula, other)


def update_rows(
    middle: Middle,
    data: jax.Array,
    indices: jax.Array,
    tables: Tables,
    read: Tables,
    *args: Any,
) -> tuple[jax.Array, Tables]:
    """Gathers rows, calls `middle(data, rows, *args)`, scatters rows; see `map_rows`.

    What comes out of padding has no meaning.
    """
    rows = tuple(take_rows(table, indices) for table in (*tables, *read))
    closed = jax.make_jaxpr(middle)(data, rows, *args)
    program = Program(closed)
    given = dict(zip(program.inputs, jax.tree.leaves((data, rows, args)), strict=True))
    known = program.literals | program.consts | given
    old = program.inputs[1 : 1 + len(tables)]
    out, *new = program.outputs
    places = range(len(tables))
    found = {i: _find_combination(program, tables[i], old, i, new[i]) for i in places}
    combined = {i: one for i, one in found.items() if one is not None}

    def rest() -> tuple[list[Step], list[int]]:
        """What is computed from the new rows of the combined tables."""
        wanted = [out, *(new[i] for i in places if i not in combined)]
        ready = {new[i] for i in combined}
        return program.slice(wanted, lambda number: number in ready)

    # Old rows that something else is computed from, too, are gathered.
    while lost := {i for i in combined if old[i] in rest()[1]}:
        combined = {i: combined[i] for i in combined if i not in lost}
    steps, _ = program.slice([one.other for one in combined.values()])
    env = evaluate(steps, known)
    updated = list(tables)
    for i, (formula, other) in combined.items():
        updated[i] = combine_rows(tables[i], indices, env[other], formula)
        known[new[i]] = take_rows(updated[i], indices)
    others, starts = rest()
    env = evaluate(others, known)
    for i in places:
        if i not in combined:
            made = jnp.asarray(env[new[i]])
            if old[i] in starts and new[i] not in _find_dependents(program, [old[i]]):
                made = order_after_gather(rows[i], made)
            updated[i] = scatter_rows(tables[i], indices, made)
    result = jnp.asarray(env[out])
    if out in _find_dependents(
        program, program.inputs[1 + len(tables) : len(rows) + 1]
    ):
        result = prevent_fusion(result)  # it reads the table that it will be added to
    return result, tuple(updated)
