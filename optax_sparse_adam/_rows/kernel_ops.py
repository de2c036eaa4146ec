"""`RowOps` by the kernel for CPUs, where it knows the types; else by XLA."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ..native import _calls as native
from .entries import Entries, Rows
from .gather_scatter import VECTORIZED
from .kernel_reads import reader_of_rows
from .map_rows import Tables
from .row_ops import Formula, RowOps, Update

# What each formula takes of the kernel's types: "low", moments of float32 or bfloat16;
# "single", one number a row of float32 as its last moment, and a parameter that it
# reads of float32; "float32", all of float32 but the dates of rows.
_TAKES = {
    "adam": "low",
    "exact_adam": "float32",
    "rowwise_adagrad": "single",
    "rowwise_adam": "single",
}


Method = TypeVar("Method", bound=Callable[..., Any])


def _where(takes: Callable[..., bool]) -> Callable[[Method], Method]:
    """A method by the kernel where it takes the operands; else that of `RowOps`."""

    def of(method: Method) -> Method:
        by_xla = getattr(RowOps, method.__name__)

        @functools.wraps(method)
        def either(self: Any, *operands: Any, **flags: Any) -> Any:
            own = method if takes(*operands, **flags) else by_xla
            return own(self, *operands, **flags)

        return cast(Method, either)

    return of


def _takes_step(
    formula: Formula,
    entries: Entries,
    tables: Tables,
    read: Tables,
    targets: Tables,
    *args: Any,
) -> bool:
    if formula.call is None:
        return False
    assert formula.name is not None
    kind = _TAKES[formula.name]
    own, is_single = tuple[jax.Array, ...](), True
    if kind == "single":
        own, is_single = (tables[-1], *read), tables[-1].ndim == 1
    elif kind == "float32":
        own = tuple(x for x in (*tables, *read) if x.dtype != jnp.int32)
        is_single = all(x.ndim == 1 for x in tables if x.dtype == jnp.int32)
    floats = [x for x in (*tables, *read, *targets) if x.dtype != jnp.int32]
    return (
        is_single
        and all(x.dtype == jnp.float32 for x in own)
        and native.supports_update(entries, *floats)
    )


def _takes_sum(entries: Entries) -> bool:
    return not entries.unique_indices and native.supports_update(entries)


def _takes_take(table: jax.Array, indices: jax.Array) -> bool:
    # A step holds few rows at once: those that XLA vectorizes it may read in place. (A
    # loss holds them all: there the kernel reads these, too; see `native._calls`.)
    is_slow = math.prod(table.shape[1:]) < VECTORIZED or table.dtype == jnp.bfloat16
    is_row = is_slow and indices.shape[1] == 1
    return is_row and reader_of_rows(table, indices) is not None


def _takes_put(table: jax.Array, indices: jax.Array, rows: jax.Array) -> bool:
    # The rows get the type of the table.
    is_low = table.dtype == jnp.bfloat16
    return is_low and native.supports_write(table, indices, table)


def _takes_add(
    table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
) -> bool:
    # Only unique rows: two threads of the kernel must not add to one row.
    return is_unique and native.supports_write(table, indices, rows)


@dataclass(frozen=True)
class KernelOps(RowOps):
    """Sums and steps in one call, and rows that XLA reads or writes slowly.

    Which operands the kernel takes is asked by `_where`, and nowhere else in an update.
    Of lookups in a loss, `kernel_reads` asks it.
    """

    @staticmethod
    def available() -> bool:
        """Whether the kernel may be used in this process."""
        return native.available()

    @_where(_takes_step)
    def step(
        self,
        formula: Formula,
        entries: Entries,
        tables: Tables,
        read: Tables,
        targets: Tables,
        *args: Any,
    ) -> tuple[Update, Tables]:
        call: Any = formula.call
        found, tables = call(entries, tables, read, targets, *args)
        return (Update(param=found) if targets else Update(found)), tables

    @_where(_takes_sum)
    def sum(self, entries: Entries) -> Rows:
        return Rows(*native.sum_rows(entries))

    @_where(_takes_take)
    def take(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        return native.look_up_rows(table, indices[:, 0], None)

    @_where(_takes_put)
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
        return native.put_rows(table, indices, rows.astype(table.dtype))

    @_where(_takes_add)
    def add(
        self, table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
    ) -> jax.Array:
        return native.add_rows(table, indices, rows)
