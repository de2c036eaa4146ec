"""`flush`: all rows of stale tables, brought up to date."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._jax_extras.compiled import compiled
from .._jax_extras.sharding import reduced_like, without_reduced
from .._rows.map_rows import Tables
from .._rows.stale import stale_states
from .._rows.update_table import map_all_rows
from .remaining_update import Constants
from .rows import RowState, TableState, catch_up_rows, mark_updated, value_of
from .schedule import hold_values
from .state import is_exact, replaced, rows_by_parameter, table_states

Params = TypeVar("Params")
State = TypeVar("State")


def _flush_rows(
    tables: Tables, before: TableState, after: TableState, constants: Any
) -> Tables:
    param, *arrays = tables
    rows = RowState.of(*arrays)
    catch_up = catch_up_rows(param, rows, before, constants)
    mu, nu = catch_up.moments(rows)
    moments = mu.astype(rows.mu.dtype), nu.astype(rows.nu.dtype)
    return value_of(param, rows, before, catch_up), *moments, *mark_updated(rows, after)


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


@compiled
def _of_each(*tables: TableState) -> list[tuple[TableState, ...]]:
    """The states before and after of each parameter."""
    places = range(len(tables[0].values_until))
    return [tuple(x.at(place) for x in tables) for place in places]


def flush(params: Params, state: State) -> tuple[Params, State]:
    """Applies all pending updates: the parameters hold the values of dense Adam.

    Between flushes, the parameters hold the projected final value of each row whose
    last gradient was row-sparse: its value once its momentum has died out, without the
    weight decay since that gradient. Call `flush`

    - before anything reads the parameters without `read=state`: an export, a checkpoint
      for another program;
    - before rows are changed by hand (`reset_rows` needs no flush);
    - before the learning rate, the schedule, the weight decay, `nesterov` or the
      state's `count` change. A new optimiser may be made first: `flush` reads what it
      needs from the old state.

    Training goes on with what it returns, with the same numbers. Checkpoints of both
    parameters and state need no flush.

    It reads and writes all rows, once. Under `jit` with both arguments donated this is
    in place, on a CPU in blocks of rows.

    Args:
      params: The parameters.
      state: The state of the optimiser: `exact_adam` or `exact_adamw`, or one that
        holds it, as a chain, `optax.partition` or `optax.masked`. With any other, whose
        rows are always up to date, both arguments come back as they are.

    Returns:
      The parameters as dense Adam would have them, and the state that goes with them:
      its rows are up to date, all else in it is unchanged.

    Raises:
      ValueError: If the state is seen to be none of an optimiser, or that of other
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
    structure: Any
    leaves, treedef = jax.tree.flatten(params)
    stale: Any = iter(stale_states(state, "flush", params))
    nodes, structure = jax.tree.flatten(state, is_leaf=is_exact)
    for n, node in enumerate(nodes):
        if not is_exact(node):
            continue
        node = next(stale)
        parts = rows_by_parameter(node, list(map(jnp.shape, leaves)), treedef)
        after, new_rows = hold_values(table_states(node)), []
        each = _of_each(table_states(node), after)
        for place, (i, rows) in enumerate(parts.items()):
            args = rows, *each[place], node.constants
            leaf = jnp.asarray(leaves[i])
            flushed, new = _flush(without_reduced(leaf), *args)
            leaves[i] = reduced_like(flushed, leaf)
            new_rows.append(new)
        nodes[n] = replaced(node, new_rows, after)
    return treedef.unflatten(leaves), structure.unflatten(nodes)
