"""`flush` and `incremental_update`, which read all rows of stale tables."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._rows.checks import leaves_like
from .._rows.map_rows import Tables, map_all_rows
from .remaining_update import Constants
from .rows import catch_up_rows, mark_updated, value_of, values_of_rows
from .schedule import hold_values
from .state import (
    RowState,
    TableState,
    exact_states,
    is_exact,
    replaced,
    rows_by_parameter,
    table_states,
)

Params = TypeVar("Params")
State = TypeVar("State")


def _flush_rows(
    tables: Tables, _: Tables, before: TableState, after: TableState, constants: Any
) -> Tables:
    param, *arrays = tables
    rows = RowState.of(*arrays)
    found = catch_up_rows(param, rows, before, constants)
    mu, nu = found.moments(rows)
    moments = mu.astype(rows.mu.dtype), nu.astype(rows.nu.dtype)
    return value_of(param, rows, before, found), *moments, *mark_updated(rows, after)


@jax.jit
def _flush(
    param: jax.Array,
    rows: RowState,
    before: TableState,
    after: TableState,
    constants: Constants,
) -> tuple[jax.Array, RowState]:
    tables = (param, *rows.arrays)
    param, *arrays = map_all_rows(_flush_rows, tables, before, after, constants)
    return param, RowState.of(*arrays)


def flush(params: Params, state: State) -> tuple[Params, State]:
    """Applies all pending updates: the parameters hold the values of dense Adam.

    Between flushes, the parameters hold the projected final value of each row whose
    last gradient was row-sparse: its value once its momentum has died out, without the
    weight decay since that gradient. Call `flush` before the parameters are
    read by anything without `read=state`: an export, a checkpoint for another program;
    before rows are changed by hand; and before the learning rate, the schedule, the
    weight decay, `nesterov` or the state's `count` change (afterwards, too, where the
    state is still that of before). Training goes on with what it returns, with the same
    numbers. Checkpoints of both parameters and state need no flush.

    It reads and writes all rows, once. Under `jit` with both arguments donated this is
    in place, on a CPU in blocks of rows.

    Args:
      params: The parameters.
      state: The state of `exact_adam` or `exact_adamw`, or of an optimiser that holds
        it: a chain, `optax.partition`, `optax.masked`.

    Returns:
      The parameters as dense Adam would have them, and a state that says so. Nothing
      else in the state is changed.

    Raises:
      ValueError: If the state holds no state of `exact_adam`, or that of other
        parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, tx = jnp.ones((1000, 4)), osa.exact_adam(0.1)
      >>> step = osa.make_train_step(lambda t, ids: jnp.sum(t[ids] ** 2), tx)
      >>> table, state, _ = step(table, tx.init(table), jnp.array([3, 7]))
      >>> round(float(table[3, 0]), 2)  # where its momentum will carry the row
      0.4
      >>> table, state = osa.flush(table, state)
      >>> round(float(table[3, 0]), 2)
      0.9
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    nodes, structure = exact_states(state, "flush")
    for n, node in enumerate(nodes):
        if not is_exact(node):
            continue
        parts = rows_by_parameter(node, list(map(jnp.shape, leaves)), treedef)
        before, news = table_states(node), []
        after = hold_values(before)
        for place, (i, rows) in enumerate(parts.items()):
            args = rows, before.at(place), after.at(place), node.constants
            leaves[i], new = _flush(jnp.asarray(leaves[i]), *args)
            news.append(new)
        nodes[n] = replaced(node, news, after)
    return treedef.unflatten(leaves), structure.unflatten(nodes)


@jax.jit
def _move(average: jax.Array, value: jax.Array, step_size: Any) -> jax.Array:
    moved = step_size * value + (1 - step_size) * average
    return moved.astype(average.dtype)


@jax.jit
def _move_rows(
    average: jax.Array,
    param: jax.Array,
    rows: RowState,
    table: TableState,
    constants: Constants,
    step_size: Any,
) -> jax.Array:
    def function(averages: Tables, read: Tables, *args: Any) -> Tables:
        param, *arrays = read
        *of_table, step_size = args
        value = values_of_rows(param, RowState.of(*arrays), *of_table)
        return (_move(averages[0], value, step_size),)

    args = table, constants, jnp.asarray(step_size)
    read = (param, *rows.arrays)
    return map_all_rows(function, (average,), *args, read=read)[0]


def incremental_update(
    params: Params, average: Params, step_size: float | jax.Array, *, read: Any = None
) -> Params:
    """`optax.incremental_update` of parameters some of whose rows are stale.

    `step_size * params + (1 - step_size) * average`, where `params` are the values that
    dense Adam would have now. It reads the tables, their moments and the average, and
    writes the average, in place where it is donated under `jit`. That costs what the
    tables cost: call it every `n` steps, 100 or so, with `1 - decay**n`. The values of
    every hundredth step make the same average as those of all, but for noise that it
    exists to forget.

    Args:
      params: The parameters.
      average: Their average so far; `jax.tree.map(jnp.copy, params)` in the beginning.
      step_size: The share of the new values.
      read: The state of `exact_adam` or `exact_adamw`, or of any optimiser that holds
        it; `None` if no rows are stale.

    Returns:
      The new average.

    Raises:
      ValueError: If `read` holds no state of `exact_adam`, or that of other parameters,
        or if the trees differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, tx = jnp.ones((1000, 4)), osa.exact_adam(0.1)
      >>> average, state = jnp.copy(table), tx.init(table)
      >>> step = osa.make_train_step(lambda t, ids: jnp.sum(t[ids] ** 2), tx)
      >>> table, state, _ = step(table, state, jnp.array([3, 7]))
      >>> average = osa.incremental_update(table, average, 0.5, read=state)
      >>> [round(float(average[i, 0]), 4) for i in (0, 3)]
      [1.0, 0.95]
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    averages = leaves_like(treedef, average, "The average", "parameters")
    results: list[Any] = [None] * len(leaves)
    for node in [] if read is None else exact_states(read, "incremental_update")[0]:
        if is_exact(node):
            tables, shapes = table_states(node), list(map(jnp.shape, leaves))
            parts = rows_by_parameter(node, shapes, treedef)
            for place, (i, rows) in enumerate(parts.items()):
                args = rows, tables.at(place), node.constants, step_size
                results[i] = _move_rows(averages[i], leaves[i], *args)
    for i, (old, value) in enumerate(zip(averages, leaves, strict=True)):
        if results[i] is None:
            results[i] = _move(old, value, step_size)
    new: Params = treedef.unflatten(results)
    return new
