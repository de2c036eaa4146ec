"""How the rows of a table are summed, read, written and added: chosen once for a table.

Neither the step of a table nor a lookup asks for the platform. `with_ops` chooses at
its top which `RowOps` it uses, and all below it call their methods. Here they are those
of XLA; a kernel is a class that replaces some (`kernel_ops`), each of them `where` it
takes the operands.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from .._jax_extras.sums_of_shards import sum_of_shards
from . import bag_sums, gather_scatter, map_rows
from .duplicates import Sums
from .entries import Entries, Rows, accumulator_dtype, sum_entries
from .map_rows import RowFunction, Tables
from .source import ZEROS, Bounds, Mode, Source

Method = TypeVar("Method", bound=Callable[..., Any])


class Formula(NamedTuple):
    """What is computed of each touched row.

    Attributes:
      rows: `rows(data, rows_of_tables, *args)`, what to add to the rows of the
        parameter, and the new rows of the tables; see `map_rows`. It treats each row
        alone, and takes any number of them.
      name: By which a kernel knows it. The step of a formula with a name leaves the
        rows of an update in any order; that of another one in ascending order.
    """

    rows: RowFunction
    name: str | None = None


class Update(NamedTuple):
    """What a step has made of a parameter: exactly one of both.

    Attributes:
      change: What is to be added to the parameter: an array, a BCOO, or inside of a
        step the rows of a table, `(indices, values)`.
      param: The parameter to which it was added.
    """

    change: Any = None
    param: jax.Array | None = None


def where(takes: Callable[..., bool]) -> Callable[[Method], Method]:
    """A method of a kernel where it takes the operands; else that of `RowOps`."""

    def of(method: Method) -> Method:
        by_xla = getattr(RowOps, method.__name__)

        @functools.wraps(method)
        def either(self: Any, *operands: Any, **flags: Any) -> Any:
            chosen = method if takes(*operands, **flags) else by_xla
            return chosen(self, *operands, **flags)

        either.takes = takes  # type: ignore[attr-defined]
        return cast(Method, either)

    return of


@dataclass(frozen=True)
class RowOps:
    """Those of XLA.

    Attributes:
      sums: How duplicates are added up; see `duplicates`.
      in_blocks: Whether rows are updated in blocks, and read in parts, as on a CPU; see
        `map_rows` and `gather_scatter.take_rows`.
    """

    sums: Sums = "scan"
    in_blocks: bool = False

    @classmethod
    def replaces(cls, method: str, *operands: Any, **flags: Any) -> bool:
        """Whether this is a kernel with this method, and takes these operands."""
        function = getattr(cls, method)
        if function is getattr(RowOps, method):
            return False
        takes = getattr(function, "takes", None)
        return takes is None or bool(takes(*operands, **flags))

    def step(
        self,
        formula: Formula,
        entries: Entries,
        tables: Tables,
        read: Tables,
        targets: Tables,
        *args: Any,
    ) -> tuple[Update, Tables]:
        """One table: adds entries up, looks rows up, computes, and writes them back.

        `entries` are the derivatives with respect to the rows that a loss has looked
        up, or `SummedEntries`, if something else has needed their sums. `map` is
        `update`, of all rows at once or in blocks.

        Args:
          formula: The dense transformation.
          entries: The gradient, duplicates included.
          tables: The arrays of the state, which get new rows.
          read: What else the formula reads of the rows: the parameter, or nothing.
          targets: The parameter, if the update is to be added to it, or nothing.
          *args: What the formula takes besides.
        """
        rows, changes = self.sum(entries), []
        parts = [rows] if self.in_blocks else map_rows.parts(rows, tables)
        for part in parts:
            # Where the parameter is the target, it is read as the part before left it.
            reads = targets if read and targets else read
            change, tables = self.map(formula.rows, part, tables, reads, *args)
            if targets:
                add = functools.partial(self.add, is_unique=True)
                targets = (add(targets[0], part.indices, change),)
            else:
                changes.append(change)
        if targets:
            return Update(param=targets[0]), tables
        change = changes[0] if len(changes) == 1 else jnp.concatenate(changes)
        return Update((rows.indices, change)), tables

    def update(
        self,
        row_fn: RowFunction,
        data: Any,
        indices: jax.Array,
        tables: Tables,
        read: Tables,
        *args: Any,
    ) -> tuple[Any, Tables]:
        """Looks rows up, calls `row_fn(data, rows, *args)`, and writes rows back.

        Rows and results in padding slots have no meaning. The first result may be a
        tree.
        """
        rows = tuple(self.take(table, indices) for table in (*tables, *read))
        out, new_rows = row_fn(data, rows, *args)
        # Adan keeps the last gradient: its new rows need no old ones, which the update
        # reads. Nothing but `order_after_gather` says then that these are gathered
        # first.
        made = map(gather_scatter.order_after_gather, rows, new_rows)
        pairs = zip(tables, made, strict=True)
        written = tuple(self.put(table, indices, new) for table, new in pairs)
        # The update is kept apart as well: it reads the table that it will be added to.
        return gather_scatter.prevent_fusion(out), written

    def sum(self, entries: Entries) -> Rows:
        """The touched rows, duplicates added up."""
        return sum_entries(entries, self.sums)

    def take(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        """`table[indices]`; padding reads any row."""
        return gather_scatter.take_rows(table, indices, in_parts=self.in_blocks)

    def put(self, table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
        """`table.at[indices].set(rows)` for unique indices; padding is dropped."""
        return gather_scatter.scatter_rows(table, indices, rows)

    def add(
        self, table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
    ) -> jax.Array:
        """`table.at[indices].add(rows)`; padding is dropped.

        A table of lower precision than the sums needs unique indices: it is rounded
        once.
        """
        dtype = accumulator_dtype(table.dtype, rows.dtype)
        if table.dtype == dtype:
            add = gather_scatter.scatter_add_rows
            return add(table, indices, rows, unique=is_unique)
        old = self.take(table, indices).astype(dtype)
        return self.put(table, indices, old + rows.astype(dtype))

    def map(
        self,
        row_fn: RowFunction,
        rows: Rows,
        tables: Tables,
        read: Tables,
        *args: Any,
    ) -> tuple[jax.Array, Tables]:
        """`update` of rows, each of which is treated alone; see `map_rows.map_rows`."""
        update_rows = map_rows.in_blocks if self.in_blocks else map_rows.in_one_pass
        return update_rows(self, row_fn, rows, tables, read, *args)

    def look_up(self, source: Source, ids: jax.Array, *, bounds: Bounds) -> jax.Array:
        """`table[ids]` in a loss: rows of a table, or of a stale one as they are now.

        Under `vmap` over tables, and in derivatives by the table, this one is used, not
        that of a kernel: see `lookups`. A kernel gets the arrays as they are; `source`
        says how stale rows are brought up to date.

        Args:
          source: A table `[num_rows, *row_shape]`, and what brings its rows up to date.
          ids: Of any shape, and of any type of integers. None counts from the end.
          bounds: What an id out of bounds reads: `bounds.fill`, or where that is `None`
            the row next to it.

        Returns:
          `[*ids.shape, *row_shape]`, in the type of the table.
        """
        if source.stale is None:
            return gather_scatter.look_up_rows(source.array, ids, bounds)
        look_up = gather_scatter.look_up_rows
        if bounds.fill is None:
            return source.values(lambda x: look_up(x, ids, bounds))
        clamped = bounds._replace(mode=Mode.CLIP, fill=None)
        rows = source.values(lambda x: look_up(x, ids, clamped))
        return gather_scatter.fill_outside(rows, ids, len(source.array), bounds.fill)

    def look_up_bags(
        self,
        source: Source,
        ids: jax.Array,
        segments: jax.Array | None,
        weights: jax.Array | None,
        *,
        num_bags: int,
    ) -> jax.Array:
        """`sum_j weights_j * table[ids_j]` of each bag, `[num_bags, *row_shape]`.

        In the type of the table, but float32 at least. A kernel gets the arrays as they
        are: each bag is to be added up as its rows are read.

        Args:
          source: As in `look_up`.
          ids: `[num_bags, length]`, or `[entries]` with segments. Out of bounds:
            padding, of which nothing is added.
          segments: `[entries]`, the bag of each id, in bounds and in any order; or
            `None`.
          weights: Of the shape of `ids`, and of the type of the result; or `None` for
            ones.
          num_bags: Their number.
        """
        if source.stale is not None:
            rows = self.look_up(source, ids, bounds=ZEROS)
            return bag_sums.add_up(num_bags, rows, segments, weights)
        tree: Any
        entries, tree = jax.tree.flatten((ids, segments, weights))

        def pool(table: jax.Array, *entries: jax.Array) -> jax.Array:
            return bag_sums.pool(num_bags, table, *tree.unflatten(entries))

        return sum_of_shards(pool, source.array, *entries)

    def map_all(
        self, function: Callable[..., Tables], tables: Tables, *args: Any
    ) -> Tables:
        """`function(tables, *args)`, the new tables; see `map_rows.map_all_rows`."""
        map_all_rows = (
            map_rows.all_in_blocks if self.in_blocks else map_rows.all_in_one_pass
        )
        return map_all_rows(self, function, tables, *args)
