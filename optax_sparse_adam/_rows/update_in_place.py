"""Updates of rows in place, by dependence analysis of the update's jaxpr.

Much state is a moving average or a sum: each new element is computed from the old one
in its place and from one other, as in `old + weight * (grad - old)`. A scatter with
this formula as its combiner reads and writes such rows in one pass. To gather them, to
compute and to scatter takes three, and memory for what is in between.

The analysis follows the old rows of a table through the jaxpr to the new ones. In

    a = sub grad mu; b = mul 0.1 a; new_mu = add mu b
    c = mul grad grad; d = sub c nu; e = mul 0.01 d; new_nu = add nu e

`a`, `b` and `new_mu` depend on `mu`, and these three equations, all elementwise, read
one other array, `grad`: `mu` is updated in place by the combiner `x + 0.1 * (y - x)`,
and `nu` by `x + 0.01 * (y - x)` with `c` as the other array. A new row that is computed
from two other arrays, or by an operation that is not elementwise, is gathered, computed
and scattered.

Worth it on a GPU: in the compiled step of `sparse_adam` for 1,048,576 ids of 128
columns, to gather, to compute and to scatter takes 1.69 GB of temporary memory in place
of 1.10, and moves 2.1 GB more. On a CPU both take the same time in blocks.

Known limits: tables of floating-point numbers only, whose new rows, and the other
array, have the type of the table; old rows that a further result depends on, other than
by the new ones, are gathered.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax_extras.jaxprs import ELEMENTWISE, Equation, FlatJaxpr, run_equations
from .._jax_extras.scatter_combining import Combiner
from .gather_scatter import (
    combine_rows,
    order_after_gather,
    prevent_fusion,
    scatter_rows,
    take_rows,
)

Tables = tuple[jax.Array, ...]
RowFunction = Callable[..., tuple[jax.Array, Tables]]


def _find_dependents(program: FlatJaxpr, value_ids: list[int]) -> set[int]:
    """The ids of these values, and of all that are computed from one of them."""
    dependents = set(value_ids)
    for _, operands, results in program.equations:
        if not dependents.isdisjoint(operands):
            dependents.update(results)
    return dependents


def _find_combiner(
    program: FlatJaxpr, table: Any, old: list[int], place: int, new: int
) -> tuple[Combiner, int] | None:
    """How the old rows of a table are combined into new ones, `None` if they are not.

    Args:
      program: The update.
      table: The table.
      old: The ids of the old rows of all tables.
      place: Which of them is the table's.
      new: The id of its new rows.

    Returns:
      The new element as a function of the old one and of another, and the id of the
      value that holds the others.
    """
    # The path from the old row to the new one: `sub grad mu`, `mul 0.1 _`, `add mu _`.
    dependents = _find_dependents(program, [old[place]])
    path = [s for s in program.slice([new])[0] if not dependents.isdisjoint(s.operands)]
    avals: dict[int, Any] = {
        value_id: atom.aval
        for eqn, operands, results in path
        for value_id, atom in zip(
            (*operands, *results), (*eqn.invars, *eqn.outvars), strict=True
        )
    }
    # A combiner gets one other element beside the old one. Here that is `grad`. The old
    # row of another table will not do: that may be updated first.
    others = avals.keys() - dependents - program.literals.keys()
    if new not in avals or len(others) != 1:
        return None
    # A combiner sees one element at a time: nothing on the path may broadcast, or sum
    # over a row, and what it reads and what it stores have the table's type.
    (other,) = others
    value_ids = others | (avals.keys() & dependents)
    like = avals[old[place]]
    if not (
        jnp.issubdtype(table.dtype, jnp.floating)
        and avals[new].dtype == avals[other].dtype == table.dtype
        and all(avals[value_id].shape == like.shape for value_id in value_ids)
        and all(step.eqn.primitive.name in ELEMENTWISE for step in path)
        and other not in _find_dependents(program, old)
    ):
        return None

    # The path again, of scalars now: `x + 0.1 * (y - x)`.
    def formula(x: jax.Array, y: jax.Array) -> jax.Array:
        env = program.literals | {old[place]: x, other: y}
        for eqn, operands, (result,) in path:
            env[result] = eqn.primitive.bind(
                *(env[value_id] for value_id in operands), **eqn.params
            )
        return env[new]

    return formula, other


def update_rows(
    row_fn: RowFunction,
    data: jax.Array,
    indices: jax.Array,
    tables: Tables,
    read: Tables,
    *args: Any,
) -> tuple[jax.Array, Tables]:
    """Gathers rows, calls `row_fn(data, rows, *args)`, scatters rows; see `map_rows`.

    Results in padding slots have no meaning.
    """
    rows = tuple(take_rows(table, indices) for table in (*tables, *read))
    closed = jax.make_jaxpr(row_fn)(data, rows, *args)
    program = FlatJaxpr(closed)
    given = dict(zip(program.inputs, jax.tree.leaves((data, rows, args)), strict=True))
    known = program.literals | program.consts | given
    # Inputs are data, old rows of tables, rows that are only read, and arguments;
    # outputs are the update and the new rows of tables.
    old = program.inputs[1 : 1 + len(tables)]
    out, *new = program.outputs
    places = range(len(tables))
    found = {i: _find_combiner(program, tables[i], old, i, new[i]) for i in places}
    combined = {i: one for i, one in found.items() if one is not None}

    def steps_behind() -> tuple[list[Equation], list[int]]:
        """What is computed from the new rows of the combined tables."""
        wanted = [out, *(new[i] for i in places if i not in combined)]
        ready = {new[i] for i in combined}
        return program.slice(wanted, lambda value_id: value_id in ready)

    # Old rows are gathered if something else is computed from them, too: `old - new`,
    # say, as an update. That may need the old rows of another table in turn.
    while lost := {i for i in combined if old[i] in steps_behind()[1]}:
        combined = {i: combined[i] for i in combined if i not in lost}
    steps, _ = program.slice([other for _, other in combined.values()])
    env = run_equations(steps, known)
    # First the tables whose rows are combined where they lie, and these are read again.
    updated = list(tables)
    for i, (formula, other) in combined.items():
        updated[i] = combine_rows(tables[i], indices, env[other], formula)
        known[new[i]] = take_rows(updated[i], indices)
    # Then all else, of those new rows: the update and the other tables.
    others, starts = steps_behind()
    env = run_equations(others, known)
    for i in places:
        if i not in combined:
            new_rows = jnp.asarray(env[new[i]])
            # Adan keeps the last gradient: its new rows need no old ones, which the
            # update reads. Nothing says then that these are gathered first.
            if old[i] in starts and new[i] not in _find_dependents(program, [old[i]]):
                new_rows = order_after_gather(rows[i], new_rows)
            updated[i] = scatter_rows(tables[i], indices, new_rows)
    result = jnp.asarray(env[out])
    if out in _find_dependents(
        program, program.inputs[1 + len(tables) : len(rows) + 1]
    ):
        result = prevent_fusion(result)  # it reads the table that it will be added to
    return result, tuple(updated)
