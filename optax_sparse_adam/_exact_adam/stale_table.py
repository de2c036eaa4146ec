"""Stale rows of a table, as whoever looks rows up knows them: `_rows/stale.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._rows.padding import expand_like
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

    def values(
        self, rows: jax.Array, take: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        # A vector's state has an axis of length 1 in the place of the last one.
        own = jax.tree.map(lambda x: take(expand_like(x, self.rows.nu)), self.rows)
        return values_of_rows(rows, own, self.state, self.constants)

    def for_kernel(self) -> native.Stale:
        return kernel_stale(self.rows, self.arrays, self.constants)

    def map(self, function: Callable[[Any, bool], Any]) -> "StaleTable":
        rows = jax.tree.map(lambda x: function(x, True), self.rows)
        others = jax.tree.map(lambda x: function(x, False), self[1:])
        return StaleTable(rows, *others)
