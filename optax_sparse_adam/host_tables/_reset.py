"""Rows that begin again: what is asked for, and the compiled program that does it.

Between two steps it runs on these rows alone. Before the step of a batch it runs on the
rows of the batch, which are on the device by then: what begins again is read and
written with what the step changes anyway, and no row is in between.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._row_tables import native_dtype, refuse_repeated, tables_of
from .._row_verbs import reset_rows
from .._rows.checks import new_rows_like

_FEWEST = 64  # a program is compiled for this, and twice, four times, ... as many rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchWithReset:
    """A batch of a `HostTrainer`, before whose step rows are begun again.

    For keys that come and go: `run` draws batches ahead, so the rows that a
    `Vocabulary` has made fresh for a batch travel with it. The step does to them what
    `HostTrainer.reset_rows(ids, rows)` right before it would do.

    Args:
      batch: What the loss takes beside the parameters: a tuple; or the one argument.
      ids: As for `HostTrainer.reset_rows`, such as `{"table": fresh, "w": None}`.
      rows: As there. Of rows that begin by their key, compute them of `fresh_keys`.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import host_tables as host
      >>> def loss(params, ids):
      ...     return jnp.sum(params["table"][ids])
      >>> def prepare(step, keys):
      ...     rows, fresh, _ = vocab.assign(keys, step)
      ...     ones = np.ones((len(fresh), 4), np.float32)
      ...     return host.BatchWithReset(rows, {"table": fresh}, {"table": ones})
      >>> vocab, params = osa.Vocabulary(9), {"table": host.HostTable((9, 4))}
      >>> options = {"prepare": prepare, "stateful": {"keys": vocab}}
      >>> trainer = host.HostTrainer(loss, osa.sparse_adam(0.1), params, **options)
      >>> [float(x) for x in trainer.run(np.array([[7, 2**40], [2**41, 7]]))]
      [8.0, 7.6...]
    """

    batch: Any
    ids: Any
    rows: Any


class Reset(NamedTuple):
    """Rows that begin again, of each `HostTable`; `None` for one that has none.

    Attributes:
      rows: `[k]`, int32, their numbers in any order; -1 is padding.
      values: `[k, ...]`, the new ones.
    """

    rows: list[np.ndarray | None]
    values: list[np.ndarray | None]

    def places(self, k: int, position: Any, positions: np.ndarray) -> Any:
        """Where among ascending positions the rows of a table are; of padding, -1."""
        rows = self.rows[k]
        if rows is None:
            return None
        places = np.searchsorted(positions, position(np.maximum(rows, 0)))
        return np.where(rows < 0, -1, places).astype(np.int32)


def reset_of(plan: Any, params: Any, ids: Any, rows: Any) -> Reset:
    """What the arguments of `reset_rows` say, if they are right.

    Args:
      plan: The `Plan`.
      params: The user's, with `HostTable`s.
      ids: The user's.
      rows: The user's.

    Raises:
      TypeError: As `HostTrainer.reset_rows`.
      ValueError: Likewise.
    """
    tables = tables_of("reset_rows", params, ids)
    refuse_repeated(tables)
    for i, table in enumerate(tables):
        if i not in plan.tables and table is not None:
            raise ValueError(
                "HostTrainer.reset_rows resets rows of HostTables, got ids for "
                f"{table.path} of the parameters, which is none. Put None there."
            )
    new = new_rows_like(params, ids, rows)
    reset = Reset([], [])
    for host, i in zip(plan.hosts, plan.tables, strict=True):
        table = tables[i]
        if table is None:
            reset.rows.append(None)
            reset.values.append(None)
            continue
        table.check_rows(host, new[i])
        wanted = np.asarray(table.ids)
        numbers = np.where((wanted >= 0) & (wanted < host.shape[0]), wanted, -1)
        more = _length(len(numbers)) - len(numbers)
        values = np.asarray(new[i])
        values = values.astype(native_dtype(values), copy=False)
        width = (0, more), *((0, 0) for _ in host.shape[1:])
        reset.rows.append(
            np.pad(numbers.astype(np.int32), width[0], constant_values=-1)
        )
        reset.values.append(np.pad(values, width))
    return reset


def _length(count: int) -> int:
    size = _FEWEST
    while size < count:
        size *= 2
    return size


def program_of(plan: Any, **options: Any) -> Callable[..., Any]:
    """`arrays = program(rest, arrays, places, values)`, compiled and donated.

    Args:
      plan: The `Plan`.
      **options: Of `jax.jit`.
    """

    def begin(rest: Any, arrays: Any, places: Any, values: Any) -> Any:
        params, state = plan.join(rest, arrays)
        ids: list[Any] = [None] * plan.treedef.num_leaves
        new = jax.tree.leaves(params)
        for i, at, rows in zip(plan.tables, places, values, strict=True):
            if at is not None:
                ids[i], new[i] = at, rows
        trees = map(plan.treedef.unflatten, (ids, new))
        return plan.split(*reset_rows(plan.tx, params, state, *trees))[1]

    return jax.jit(begin, donate_argnums=1, **options)
