"""Stale rows of a table, as whoever looks rows up knows them: `_rows/stale.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..native import _calls as native
from .kernel_arrays import KernelArrays, kernel_stale
from .remaining_update import Constants
from .rows import RowState, TableState, values_of_rows


class StaleTable(NamedTuple):
    """What brings the rows of a parameter up to date; `StaleRows` in `_rows` says how.

    `arrays` are `state` and `constants` for the kernel.
    """

    rows: RowState
    state: TableState
    constants: Constants
    arrays: KernelArrays

    @property
    def clock(self) -> jax.Array:
        return self.state.clock

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        return self.rows.arrays

    @property
    def shared(self) -> tuple[TableState, Constants]:
        return self.state, self.constants

    @property
    def decays(self) -> bool:
        return len(self.rows.log_decay) > 0

    @staticmethod
    def value_of(
        row: jax.Array,
        rows_of_tables: tuple[jax.Array, ...],
        shared: tuple[TableState, Constants],
    ) -> jax.Array:
        return values_of_rows(row, RowState.of(*rows_of_tables), *shared)

    def for_cpu(self) -> native.Stale:
        return kernel_stale(self.rows, self.arrays, self.constants)

    def map(self, function: Callable[[Any, bool], Any]) -> "StaleTable":
        rows = jax.tree.map(lambda x: function(x, True), self.rows)
        shared = jax.tree.map(lambda x: function(x, False), self[1:])
        return StaleTable(rows, *shared)
