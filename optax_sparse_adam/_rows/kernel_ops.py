"""`RowOps` by the kernel for CPUs, where it knows the types; else by XLA."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..native import _calls as native
from .entries import Entries, Rows
from .gather_scatter import VECTORIZED
from .map_rows import Tables
from .row_ops import Formula, RowOps, Update, where
from .source import Bounds, Source


class KernelFormula(NamedTuple):
    """A formula in the kernel.

    Attributes:
      call: `call(entries, tables, read, targets, *args)`: indices and values of the
        update, each row once in any order, or where `targets` holds the parameter, the
        new one; and the new tables.
      takes: Which of the kernel's types: "low", moments of float32 or bfloat16;
        "single", one number a row of float32 as its last moment, and a parameter that
        it reads of float32; "float32", all of float32 but the dates of rows.
    """

    call: Callable[..., Any]
    takes: Literal["low", "single", "float32"]


def _by_formula(name: str) -> Callable[..., Any]:
    return functools.partial(native.update_by_formula, name)


# The formulas by their names. That of exact Adam is added in `_exact_adam/step.py`.
CALLS = {
    "adam": KernelFormula(_by_formula("adam"), "low"),
    "rowwise_adagrad": KernelFormula(_by_formula("rowwise_adagrad"), "single"),
    "rowwise_adam": KernelFormula(_by_formula("rowwise_adam"), "single"),
}


# From so many columns on the kernel reads rows. At 64 it takes a third or a quarter of
# XLA's time: XLA unrolls its loop over a row, and vectorizes it only from 80 on. Longer
# ones it reads as fast, but where they are more than 32 MB a step takes a fifth to a
# third less time, as the kernel asks for huge pages in what it writes (`frame.h`).
# Narrow ones XLA reads where they are used, and does not store.
_FEWEST_COLUMNS = 17


def _takes_step(
    formula: Formula,
    entries: Entries,
    tables: Tables,
    read: Tables,
    targets: Tables,
    *args: Any,
) -> bool:
    if formula.name not in CALLS:
        return False
    kind = CALLS[formula.name].takes
    wide, is_single = tuple[jax.Array, ...](), True
    if kind == "single":
        wide, is_single = (tables[-1], *read), tables[-1].ndim == 1
    elif kind == "float32":
        wide = tuple(x for x in (*tables, *read) if x.dtype != jnp.int32)
        is_single = all(x.ndim == 1 for x in tables if x.dtype == jnp.int32)
    floats = [x for x in (*tables, *read, *targets) if x.dtype != jnp.int32]
    return (
        is_single
        and all(x.dtype == jnp.float32 for x in wide)
        and _takes_entries(entries, *floats)
    )


def _takes_sum(entries: Entries) -> bool:
    return not entries.unique_indices and _takes_entries(entries)


def _takes_entries(entries: Any, *tables: jax.Array) -> bool:
    return (
        entries.dtype == jnp.float32
        and entries.n_sparse == 1
        and entries.nse > 0
        and math.prod(entries.shape) > 0
        and native.supports(tables, native.indices_of(entries), entries)
    )


def _takes_look_up(source: Source, ids: jax.Array, *, bounds: Bounds) -> bool:
    table, is_stale = source.array, source.stale is not None
    # OLD_JAX: 0.11.2. XLA may widen a bfloat16 table, before a loop that reads it.
    is_low = table.dtype == jnp.bfloat16
    is_wide = math.prod(table.shape[1:]) >= _FEWEST_COLUMNS
    return (is_stale or is_low or is_wide) and _takes_source(source, ids)


def _takes_bags(
    source: Source,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
    *,
    num_bags: int,
) -> bool:
    return _takes_source(source, ids)


def _takes_source(source: Source, ids: jax.Array) -> bool:
    """Stale rows, and those of bags, at any width.

    XLA gathers them from three tables or more, or writes them before it adds them up.
    """
    table, stale = source
    if stale is None:
        floats, dates, is_single = [table], [], True
    else:
        mu, nu, last, *decays = stale.tables
        floats, dates = [table, mu, nu, *decays], [last]
        is_single = all(x.dtype == jnp.float32 for x in floats)
        is_single = is_single and last.dtype == jnp.int32 and last.ndim == 1
    return is_single and native.supports(floats, ids, dates)


def _takes_take(table: jax.Array, indices: jax.Array) -> bool:
    # A step holds few rows at once: those that XLA vectorizes it may read in place. (A
    # loss holds them all: there the kernel reads these, too; see `native._calls`.)
    is_slow = math.prod(table.shape[1:]) < VECTORIZED or table.dtype == jnp.bfloat16
    is_row = is_slow and indices.shape[1] == 1
    return is_row and _takes_look_up(Source(table), indices, bounds=Bounds())


def _takes_put(table: jax.Array, indices: jax.Array, rows: jax.Array) -> bool:
    # The rows get the type of the table.
    return _takes_add(table, indices, table, is_unique=True)


def _takes_add(
    table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
) -> bool:
    # Only unique rows: two threads of the kernel must not add to one row.
    is_row = is_unique and indices.shape[1] == 1
    return is_row and native.supports((table, rows), indices)


@dataclass(frozen=True)
class KernelOps(RowOps):
    """Sums, steps and lookups in one call, and rows that XLA reads or writes slowly.

    Which operands the kernel takes say the functions `_takes_*`, and nothing else.
    """

    @staticmethod
    def available() -> bool:
        """Whether the kernel may be used in this process."""
        return native.available()

    @where(_takes_step)
    def step(
        self,
        formula: Formula,
        entries: Entries,
        tables: Tables,
        read: Tables,
        targets: Tables,
        *args: Any,
    ) -> tuple[Update, Tables]:
        assert formula.name is not None
        call = CALLS[formula.name].call
        new, tables = call(entries, tables, read, targets, *args)
        return (Update(param=new) if targets else Update(new)), tables

    @where(_takes_sum)
    def sum(self, entries: Entries) -> Rows:
        return Rows(*native.sum_rows(entries))

    @where(_takes_take)
    def take(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        return native.look_up_rows(table, indices[:, 0], None)

    @where(_takes_put)
    def put(self, table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
        """Of float32 because XLA takes long to compile it, of bfloat16 to be in place.

        A step takes as long either way. XLA takes 12 ms of CPU to compile a scatter,
        with 26 tables under `lazy(optax.adam)` a third of the whole time. Into a
        bfloat16 table, XLA for CPUs has no scatter in jaxlib 0.10, and converts the
        table to float32 and back, which costs what the table costs; a gather in a loop
        has the table converted before the loop. Test: `test_memory_of_a_step`.
        """
        return native.put_rows(table, indices, rows.astype(table.dtype))

    @where(_takes_add)
    def add(
        self, table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
    ) -> jax.Array:
        return native.add_rows(table, indices, rows)

    @where(_takes_look_up)
    def look_up(self, source: Source, ids: jax.Array, *, bounds: Bounds) -> jax.Array:
        table, stale = source
        if stale is None:
            return native.look_up_rows(table, ids, bounds.fill)
        return native.look_up_stale_rows(table, stale.for_cpu(), ids, bounds.fill)

    @where(_takes_bags)
    def look_up_bags(
        self,
        source: Source,
        ids: jax.Array,
        segments: jax.Array | None,
        weights: jax.Array | None,
        *,
        num_bags: int,
    ) -> jax.Array:
        table, stale = source
        if stale is None:
            return native.read_bags(table, ids, segments, weights, num_bags)
        # Rows by the kernel, their sums by XLA.
        operands = source, ids, segments, weights
        return super().look_up_bags(*operands, num_bags=num_bags)
