"""`RowOps` by the kernel for CPUs, where it knows the types; else by XLA."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..native import _calls as native
from .entries import Entries, Rows
from .map_rows import Tables
from .row_ops import Formula, RowOps, Update

# What the kernel updates has one number a row as its last moment, of float32, or is of
# float32 as a whole; other formulas also have moments and parameters of bfloat16.
_SINGLE = {"rowwise_adagrad", "rowwise_adam"}
_FLOAT32 = {"exact_adam"}


@dataclass(frozen=True)
class KernelOps(RowOps):
    """Sums and steps in one call, and rows that XLA reads or writes slowly.

    Which operands the kernel takes is asked here, and nowhere else in a step.
    """

    @staticmethod
    def available() -> bool:
        """Whether the kernel may be used in this process."""
        return native.available()

    def step(
        self,
        formula: Formula,
        entries: Entries,
        tables: Tables,
        read: Tables,
        targets: Tables,
        *args: Any,
    ) -> tuple[Update, Tables]:
        if formula.call is None or not _knows(formula, entries, tables, read, targets):
            return super().step(formula, entries, tables, read, targets, *args)
        found, tables = formula.call(entries, tables, read, targets, *args)
        return (Update(param=found) if targets else Update(found)), tables

    def sum(self, entries: Entries) -> Rows:
        if entries.unique_indices or not native.supports_update(entries):
            return super().sum(entries)
        return Rows(*native.sum_rows(entries))

    def take(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        if indices.shape[1] > 1 or not native.supports_lookup(table, indices):
            return super().take(table, indices)
        return native.look_up_rows(table, indices[:, 0], None)

    def put(self, table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
        """Of bfloat16, because XLA might widen the table.

        Problem: a scatter into a bfloat16 table costs what the table costs. Cause: XLA
        for CPUs has no scatter of this type in jaxlib 0.10, and converts the table to
        float32 and back; a gather in a loop has the table converted before the loop;
        and reading the bits as integers copies them, too. Remedy: the kernel, where it
        is available. Safe, because it writes the same rows. Test:
        `test_memory_of_a_step`. XLA is in place, too, from the jaxlib on that is marked
        here. OLD_JAX: 0.11.2
        """
        own = rows.astype(table.dtype) if table.dtype == jnp.bfloat16 else rows
        if own is rows and table.dtype != jnp.bfloat16:
            return super().put(table, indices, rows)
        if not native.supports_write(table, indices, own):
            return super().put(table, indices, rows)
        return native.put_rows(table, indices, own)

    def add(
        self, table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
    ) -> jax.Array:
        # Only unique rows: two threads of the kernel must not add to one row.
        if is_unique and native.supports_write(table, indices, rows):
            return native.add_rows(table, indices, rows)
        return super().add(table, indices, rows, is_unique=is_unique)


def _knows(
    formula: Formula, entries: Entries, tables: Tables, read: Tables, targets: Tables
) -> bool:
    """Whether the kernel takes this step."""
    if formula.name in _SINGLE:
        own, is_single = (tables[-1], *read), tables[-1].ndim == 1
    elif formula.name in _FLOAT32:
        own = tuple(x for x in (*tables, *read) if x.dtype != jnp.int32)
        is_single = all(x.ndim == 1 for x in tables if x.dtype == jnp.int32)
    else:
        own, is_single = (), True
    floats = [x for x in (*tables, *read, *targets) if x.dtype != jnp.int32]
    return (
        is_single
        and all(x.dtype == jnp.float32 for x in own)
        and native.supports_update(entries, *floats)
    )
