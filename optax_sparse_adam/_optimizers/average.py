"""An average of the parameters, which sees the values of stale rows."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._rows.checks import leaves_like
from .._rows.map_rows import Tables, map_all_rows
from .._rows.resting_rows import values_of_rows
from .._rows.resting_state import (
    RowState,
    TableState,
    exact_states,
    held_by,
    is_exact,
    table_states,
)
from .._rows.ways import Constants

Params = TypeVar("Params")


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
    def function(
        averages: Tables, read: Tables, table: TableState, *args: Any
    ) -> Tables:
        param, mu, nu, last, *decays = read
        rows = RowState(mu, nu, last, tuple(decays))
        constants, step_size = args
        value = values_of_rows(param, rows, table, constants)
        return (_move(averages[0], value, step_size),)

    read = (param, rows.mu, rows.nu, rows.last, *rows.log_decay)
    args = table, constants, jnp.asarray(step_size)
    (average,) = map_all_rows(function, (average,), *args, read=read)
    return average


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
            for i, (place, rows) in held_by(node, shapes, treedef).items():
                args = rows, tables.at(place), node.constants, step_size
                results[i] = _move_rows(averages[i], leaves[i], *args)
    for i, (old, value) in enumerate(zip(averages, leaves, strict=True)):
        if results[i] is None:
            results[i] = _move(old, value, step_size)
    new: Params = treedef.unflatten(results)
    return new
