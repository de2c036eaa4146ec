"""Brings all rows of a table up to date."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._rows.map_rows import Tables, map_all_rows
from .._rows.resting_rows import compute_type, move_rows, rows_now, stamp
from .._rows.resting_state import (
    RowState,
    TableState,
    exact_states,
    held_by,
    is_exact,
    replace_rows,
    replace_tables,
    table_states,
)
from .._rows.ways import Constants
from .exact_schedule import hold_values

Params = TypeVar("Params")
State = TypeVar("State")


def _flush_rows(
    tables: Tables, _: Tables, before: TableState, after: TableState, constants: Any
) -> Tables:
    param, mu, nu, last, *decays = tables
    rows = RowState(mu, nu, last, tuple(decays))
    dtype = compute_type(param, rows)
    rows = rows._replace(mu=mu.astype(dtype), nu=nu.astype(dtype))
    moved = move_rows(rows, before, constants)
    last, log_decay = stamp(rows, after)
    moments = moved.mu.astype(mu.dtype), moved.nu.astype(nu.dtype)
    return rows_now(param, moved), *moments, last, *log_decay


@jax.jit
def _flush(
    param: jax.Array,
    rows: RowState,
    before: TableState,
    after: TableState,
    constants: Constants,
) -> tuple[jax.Array, RowState]:
    tables = (param, rows.mu, rows.nu, rows.last, *rows.log_decay)
    tables = map_all_rows(_flush_rows, tables, before, after, constants)
    param, mu, nu, last, *decays = tables
    return param, RowState(mu, nu, last, tuple(decays))


def flush(params: Params, state: State) -> tuple[Params, State]:
    """Puts the values of all rows in the place of what `exact_adam` keeps of them.

    Between flushes, the parameters hold the resting point of each row whose last
    gradient was row-sparse: where it is going to be once its momentum has died out,
    before the weight decay since that gradient. Call `flush` before the parameters are
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
        parts = held_by(node, list(map(jnp.shape, leaves)), treedef)
        before = table_states(node)
        after = hold_values(before)
        news = []
        for i, held in parts.items():
            tables = before.at(held.place), after.at(held.place)
            args = held.rows, *tables, node.constants
            leaves[i], rows = _flush(jnp.asarray(leaves[i]), *args)
            news.append(rows)
        nodes[n] = replace_tables(replace_rows(node, news), after)
    return treedef.unflatten(leaves), structure.unflatten(nodes)
