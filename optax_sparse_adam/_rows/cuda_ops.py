"""`RowOps` by a kernel for NVIDIA GPUs, printed from the formula; else by XLA.

One kernel adds entries up and runs the formula at each complete row (`rows.cu`). So a
step is a sort of the ids and that kernel, for every optimiser whose formula the printer
knows. `native.gpu_status` says what took XLA's path, and why. What the kernel sees of
the arrays is in `cuda_layout`, its calls are in `cuda_calls`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ..native import _cuda
from ..native._cuda_printer import ROWS, Unsupported
from .bag_gradient import BagEntries
from .cuda_calls import KernelCalls, SortedEntries
from .cuda_layout import MOST, Layout, RowProgram, row_program
from .entries import Entries, Rows, accumulator_dtype
from .map_rows import RowFunction, Tables
from .padding import narrow_ids, pad_indices
from .row_ops import Formula, RowOps, Update, where
from .source import Bounds, Source

Method = TypeVar("Method", bound=Callable[..., Any])


def _or_by_xla(method: Method) -> Method:
    """A method by the kernel, or where that takes it not, that of `RowOps`."""

    @functools.wraps(method)
    def either(self: Any, *args: Any, **flags: Any) -> Any:
        name = method.__name__
        try:
            sizes = (getattr(x, "size", 0) for x in jax.tree.leaves((args, flags)))
            if not all(isinstance(size, int) for size in sizes):  # of `jax.export`
                raise Unsupported("sizes that are not known yet")
            result = method(self, *args, **flags)
        except Unsupported as why:
            _cuda.note(name, str(why))
            return getattr(RowOps, name)(self, *args, **flags)
        _cuda.note(name)
        return result

    return cast(Method, either)


# XLA adds single entries up as fast (steps of 1,048,576 x 128 take 2.74 ms for 2.76, of
# 262,144 x 64 0.48 for 0.52), and looks rows up as fast that are as they are stored.
def _takes_sum(entries: Entries) -> bool:
    return isinstance(entries, BagEntries)


def _takes_look_up(source: Source, ids: jax.Array, *, bounds: Bounds) -> bool:
    return source.stale is not None


def _takes_look_up_bags(
    source: Source,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
    *,
    num_bags: int,
) -> bool:
    return source.stale is not None and segments is None


@dataclass(frozen=True)
class CudaOps(KernelCalls, RowOps):
    """Sums, steps and updates of rows by one kernel each."""

    @staticmethod
    def available() -> bool:
        """Whether the kernel may be used in this process."""
        return _cuda.available()

    @_or_by_xla
    def step(
        self,
        formula: Formula,
        entries: Entries,
        tables: Tables,
        read: Tables,
        targets: Tables,
        *args: Any,
    ) -> tuple[Update, Tables]:
        layout = _layout_of(entries)

        def function(rows: Sequence[jax.Array], *args: Any) -> list[jax.Array]:
            grad, old_rows = rows[0], tuple(rows[1 : 1 + len(tables) + len(read)])
            change, new_rows = formula.rows(grad, old_rows, *args)
            change, made = _like(change, grad), _cast(new_rows, tables)
            if targets:
                return [*made, rows[-1] + change.astype(rows[-1].dtype)]
            return [change, *made]

        # What is read besides is the parameter, and where it is the target, too, it is
        # read once.
        written, dtype = (*tables, *targets), entries.dtype
        arrays = layout, written, () if targets else read
        out = None if targets else dtype
        program = row_program(function, *arrays, *args, grad=dtype, out=out)
        if entries.unique_indices:
            keys, valid = layout.keys(entries.indices)
            data = entries.data.reshape(-1, layout.columns)
            new, change = self.each_row(program, jnp.where(valid, keys, -1), data)
            slot = jnp.arange(len(keys), dtype=jnp.int32)
            indices = pad_indices(entries.indices, valid, slot, entries.shape)
        else:
            ordered = self.sort(entries, layout)
            ordered = ordered if targets else ordered.by_place()
            new, change = self.by_row(program, ordered)
            if not targets:
                indices = _indices(ordered, layout, entries)
        new = _shaped_as(written, new)
        if targets:
            return Update(param=new[-1]), new[:-1]
        change = change.reshape(len(change), *layout.row_shape)
        return Update((indices, change)), new

    @where(_takes_sum)
    @_or_by_xla
    def sum(self, entries: Entries) -> Rows:
        layout = _layout_of(entries)
        ordered, dtype = self.sort(entries, layout).by_place(), entries.dtype
        program = row_program(lambda rows: rows, layout, (), (), grad=dtype, out=dtype)
        _, sums = self.by_row(program, ordered)
        assert ordered.count is not None
        sums = sums.reshape(len(sums), *layout.row_shape)
        return Rows(_indices(ordered, layout, entries), sums, ordered.count)

    @_or_by_xla
    def map(
        self,
        row_fn: RowFunction,
        rows: Rows,
        tables: Tables,
        read: Tables,
        *args: Any,
    ) -> tuple[jax.Array, Tables]:
        # What padding has is zeros.
        operands = rows.data, rows.indices, tables, read, *args
        return self._update(ROWS, row_fn, *operands)

    @_or_by_xla
    def update(
        self,
        row_fn: RowFunction,
        data: Any,
        indices: jax.Array,
        tables: Tables,
        read: Tables,
        *args: Any,
    ) -> tuple[Any, Tables]:
        # The function may know how many rows it gets.
        operands = data, indices, tables, read, *args
        return self._update(len(indices), row_fn, *operands)

    def _update(
        self,
        size: int,
        row_fn: RowFunction,
        data: Any,
        indices: jax.Array,
        tables: Tables,
        read: Tables,
        *args: Any,
    ) -> tuple[Any, Tables]:
        """`update`, with zeros for the change of padding; `size` rows are traced."""
        has_data = isinstance(data, jax.Array)
        if not has_data and jax.tree.leaves(data):
            raise Unsupported("a tree of gradients")
        if not (*tables, *read):
            raise Unsupported("no rows of a table")
        n_sparse = indices.shape[1]
        widest = max((*tables, *read), key=lambda x: x.ndim).shape
        row_shape = data.shape[1:] if has_data else widest[n_sparse:]
        layout = Layout.of((*widest[:n_sparse], *row_shape), n_sparse)

        def function(rows: Sequence[jax.Array], *args: Any) -> list[jax.Array]:
            grad, old_rows = (rows[0], rows[1:]) if has_data else (data, rows)
            change, new_rows = row_fn(grad, tuple(old_rows), *args)
            if has_data:
                return [_like(change, grad), *_cast(new_rows, tables)]
            if jax.tree.leaves(change):
                raise Unsupported("a change without a gradient")
            return _cast(new_rows, tables)

        dtype = data.dtype if has_data else None
        types: Any = {"grad": dtype, "out": dtype, "size": size}
        program = row_program(function, layout, tables, read, *args, **types)
        keys, valid = layout.keys(indices)
        values = data.reshape(-1, layout.columns) if has_data else None
        new, change = self.each_row(program, jnp.where(valid, keys, -1), values)
        change = change.reshape(data.shape) if has_data else ()
        return change, _shaped_as(tables, new)

    @_or_by_xla
    def add(
        self, table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
    ) -> jax.Array:
        layout = Layout.of(table.shape, indices.shape[1])
        dtype = accumulator_dtype(table.dtype, rows.dtype)
        if not is_unique and table.dtype != jnp.float32:
            raise Unsupported(f"duplicates in an update of {table.dtype}")

        def function(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            change, old = arrays
            if old.dtype == dtype:
                return [old + change.astype(dtype)]
            return [(old.astype(dtype) + change.astype(dtype)).astype(old.dtype)]

        data = rows.reshape(-1, layout.columns)
        if not is_unique:
            data = data.astype(table.dtype)
        program = row_program(function, layout, (table,), (), grad=data.dtype)
        keys, valid = layout.keys(indices)
        if is_unique:
            (new,), _ = self.each_row(program, jnp.where(valid, keys, -1), data)
        else:
            ordered = SortedEntries(*self.order(keys, valid, layout.rows), data)
            (new,), _ = self.by_row(program, ordered)
        return new.reshape(table.shape)

    @where(_takes_look_up)
    @_or_by_xla
    def look_up(self, source: Source, ids: jax.Array, *, bounds: Bounds) -> jax.Array:
        if not ids.size:
            raise Unsupported("no ids")
        num_rows, flat = len(source.array), narrow_ids(ids, MOST).reshape(-1)
        if bounds.fill is None:
            flat = jnp.clip(flat, 0, num_rows - 1)
        program, fill = _reading(source), bounds.fill
        kernel = program.kernel._replace(
            out=source.array.dtype, fill=0.0 if fill is None else fill
        )
        _, rows = self.warp_for_each(kernel, program, [flat], len(flat), len(flat))
        return rows.reshape(*ids.shape, *source.array.shape[1:])

    @where(_takes_look_up_bags)
    @_or_by_xla
    def look_up_bags(
        self,
        source: Source,
        ids: jax.Array,
        segments: jax.Array | None,
        weights: jax.Array | None,
        *,
        num_bags: int,
    ) -> jax.Array:
        if not ids.size:
            raise Unsupported("no ids")
        program, arrays = _reading(source), [narrow_ids(ids, MOST).reshape(-1)]
        if weights is not None:
            arrays.append(weights.reshape(-1).astype(jnp.float32))
        kernel = program.kernel._replace(
            out=jnp.float32, pools=True, weighted=weights is not None
        )
        numbers = num_bags, num_bags, ids.shape[1]
        _, sums = self.warp_for_each(kernel, program, arrays, *numbers)
        return sums.reshape(num_bags, *source.array.shape[1:])


def _reading(source: Source) -> RowProgram:
    """What brings the rows of a table up to date, if they are stale."""
    stale, table = source.stale, source.array

    def function(rows: Sequence[jax.Array], shared: Any) -> list[jax.Array]:
        if stale is None:
            return [rows[0]]
        return [stale.value_of(rows[0], tuple(rows[1:]), shared)]

    read = (table,) if stale is None else (table, *stale.tables)
    shared = None if stale is None else stale.shared
    return row_program(function, Layout.of(table.shape, 1), (), read, shared)


def _layout_of(entries: Entries) -> Layout:
    if entries.dtype != jnp.float32:
        raise Unsupported(f"gradients of {jnp.dtype(entries.dtype).name}")
    if not 0 < entries.nse < MOST:
        raise Unsupported(f"{entries.nse} entries")
    return Layout.of(entries.shape, entries.n_sparse)


def _indices(ordered: SortedEntries, layout: Layout, entries: Entries) -> jax.Array:
    """The indices of the touched rows, and then of padding."""
    assert ordered.rows_of is not None
    assert ordered.count is not None
    slot = jnp.arange(len(ordered.keys), dtype=jnp.int32)
    indices = layout.indices(ordered.rows_of, entries.indices.dtype)
    return pad_indices(indices, slot < ordered.count, slot, entries.shape)


def _shaped_as(tables: Tables, flat: Tables) -> Tables:
    return tuple(x.reshape(like.shape) for x, like in zip(flat, tables, strict=True))


def _cast(rows: Sequence[jax.Array], tables: Tables) -> list[jax.Array]:
    return [x.astype(like.dtype) for x, like in zip(rows, tables, strict=True)]


def _like(change: Any, grad: jax.Array) -> jax.Array:
    if not isinstance(change, jax.Array):
        raise Unsupported("a tree of changes")
    if change.shape != grad.shape:
        raise Unsupported(f"a change of shape {change.shape}")
    return change.astype(grad.dtype)
