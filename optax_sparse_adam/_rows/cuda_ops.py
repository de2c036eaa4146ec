"""`RowOps` by a kernel for NVIDIA GPUs, printed from the formula; else by XLA.

One kernel adds entries up and runs the formula at each complete row (`rows.cu`). So a
step is a sort of the ids and that kernel, for every optimiser whose formula the printer
knows. `native.gpu_status` says what took XLA's path, and why.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..native import _cuda
from ..native._cuda_printer import ROWS, Program, Unsupported, print_formula
from ..native._cuda_source import (
    Array,
    Kernel,
    Tuning,
    columns_of_lane,
    source_of,
    text_of,
)
from .bag_gradient import BagEntries
from .entries import Entries, Rows, accumulator_dtype
from .map_rows import RowFunction, Tables
from .padding import in_bounds, narrow_ids, pad_indices, padding_key
from .row_ops import Formula, RowOps, Update, where
from .source import Bounds, Source

_MOST = 2**31 - 1024  # keys and places are numbers of 32 bits
_MOST_COLUMNS = 1024
_SHARED_BYTES = 96 << 10  # of a block

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


class _Layout(NamedTuple):
    """How arrays have rows: `[*sizes]` or `[*sizes, *row_shape]`."""

    sizes: tuple[int, ...]
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], n_sparse: int) -> "_Layout":
        layout = cls(tuple(shape[:n_sparse]), tuple(shape[n_sparse:]))
        if not 0 < layout.rows < _MOST:
            raise Unsupported(f"{layout.rows} rows")
        if not 0 < layout.columns <= _MOST_COLUMNS:
            raise Unsupported(f"rows of {layout.columns} numbers")
        return layout

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def columns(self) -> int:
        return math.prod(self.row_shape)

    def array(self, x: jax.Array) -> Array:
        shapes = {(*self.sizes, *self.row_shape): True, self.sizes: False}
        for shape, is_wide in shapes.items():
            if x.shape == shape:
                return Array(x.dtype, is_wide or not self.row_shape)
        raise Unsupported(f"an array of shape {x.shape} beside rows {self.row_shape}")

    def flat(self, x: jax.Array) -> jax.Array:
        shape = (self.rows, self.columns) if self.array(x).is_wide else (self.rows,)
        return x if x.shape == shape else x.reshape(shape)

    def keys(self, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The place of each row in the flattened table, and whether it is one."""
        if not 0 < len(indices) < _MOST:
            raise Unsupported(f"{len(indices)} entries")
        if indices.dtype.itemsize < 4:  # which may not hold the number of rows
            indices = indices.astype(jnp.int32)
        valid = in_bounds(indices, self.sizes)
        keys = jnp.where(valid, indices[:, 0], 0).astype(jnp.int32)
        for axis, size in enumerate(self.sizes[1:], 1):
            index = jnp.where(valid, indices[:, axis], 0).astype(jnp.int32)
            keys = keys * jnp.int32(size) + index
        return keys, valid

    def indices(self, keys: jax.Array, dtype: Any) -> jax.Array:
        """The reverse of `keys`."""
        columns = []
        for size in self.sizes[:0:-1]:
            columns.append(keys % jnp.int32(size))
            keys = keys // jnp.int32(size)
        return jnp.stack([keys, *columns[::-1]], axis=1).astype(dtype)


class _Sorted(NamedTuple):
    """The entries of a gradient by rows.

    Attributes:
      keys: `[nse]`, their rows, or the places of these; ascending, then `PAD`.
      places: `[nse]`, where an entry was.
      data: Values; with `segments` those of bags.
      segments: The bag of each entry, unsorted, if that is not `place // length`.
      weights: The weight of each entry, unsorted.
      rows_of: For each place its row, if keys are places.
      count: How many of these there are.
      length: How many entries each bag has, if all have as many.
    """

    keys: jax.Array
    places: jax.Array
    data: jax.Array
    segments: jax.Array | None = None
    weights: jax.Array | None = None
    rows_of: jax.Array | None = None
    count: jax.Array | None = None  # type: ignore[assignment]  # tuple has a method count
    length: int | None = None

    def by_place(self) -> "_Sorted":
        """With the places of the touched rows, in ascending order, as keys."""
        keys, size = self.keys, len(self.keys)
        pad = padding_key(jnp.int32)
        real, slot = keys != pad, jnp.arange(size, dtype=jnp.int32)
        last = jnp.concatenate([keys[1:] != keys[:-1], jnp.ones([1], bool)]) & real
        rank = jnp.cumsum(last, dtype=jnp.int32) - last.astype(jnp.int32)
        target = jnp.where(last, rank, size + slot)
        rows = (
            jnp.zeros_like(keys).at[target].set(keys, mode="drop", unique_indices=True)
        )
        return self._replace(
            keys=jnp.where(real, rank, pad),
            rows_of=rows,
            count=jnp.sum(last, dtype=jnp.int32),
        )


def _takes_look_up(source: Source, ids: jax.Array, *, bounds: Bounds) -> bool:
    # Rows that are as they are stored XLA looks up as fast.
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
class CudaOps(RowOps):
    """Sums, steps and updates of rows by one kernel each."""

    tuning: ClassVar[Tuning] = Tuning()

    @staticmethod
    def available() -> bool:
        """Whether the kernel may be used in this process."""
        return _cuda.available()

    def launch(self, *args: Any) -> tuple[jax.Array, ...]:
        return _cuda.launch(*args)

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
        names = ["g", *(f"t{i}" for i in range(len(tables) + len(targets)))]
        # What is read besides is the parameter, and where it is the target, too, it is
        # read once.
        others = () if targets else read
        names += [f"r{i}" for i in range(len(others))]
        arrays = [layout.array(x) for x in (*tables, *targets, *others)]

        def function(rows: Sequence[jax.Array], *args: Any) -> list[jax.Array]:
            grad, olds = rows[0], tuple(rows[1 : 1 + len(tables) + len(read)])
            change, news = formula.rows(grad, olds, *args)
            change, made = _like(change, grad), _cast(news, tables)
            if targets:
                return [*made, rows[-1] + change.astype(rows[-1].dtype)]
            return [change, *made]

        shapes = _row_shapes(names, [Array(entries.dtype, True), *arrays], layout)
        program = print_formula(function, shapes, layout.columns, args)
        out = None if targets else entries.dtype
        own = tuple(map(layout.flat, (*tables, *targets)))
        called = program, own, tuple(map(layout.flat, others)), layout, out
        if entries.unique_indices:
            keys, valid = layout.keys(entries.indices)
            data = entries.data.reshape(-1, layout.columns)
            *news, change = self._known(*called, jnp.where(valid, keys, -1), data)
            slot = jnp.arange(len(keys), dtype=jnp.int32)
            indices = pad_indices(entries.indices, valid, slot, entries.shape)
        else:
            ordered = self._sorted(entries, layout)
            if not targets:
                ordered = ordered.by_place()
            *news, change = self._reduced(*called, ordered)
            if not targets:
                indices = _indices(ordered, layout, entries)
        shaped = [
            x.reshape(old.shape)
            for x, old in zip(news, (*tables, *targets), strict=True)
        ]
        if targets:
            return Update(param=shaped[-1]), tuple(shaped[:-1])
        change = change.reshape(len(change), *layout.row_shape)
        return Update((indices, change)), tuple(shaped)

    def sum(self, entries: Entries) -> Rows:
        # Those that are unique need no sum.
        return super().sum(entries) if entries.unique_indices else self._sum(entries)

    def _sum(self, entries: Entries) -> Rows:
        try:
            layout = _layout_of(entries)
            ordered = self._sorted(entries, layout).by_place()
            shape = _row_shapes(["g"], [Array(entries.dtype, True)], layout)
            program = print_formula(lambda rows: rows, shape, layout.columns, ())
            called = program, (), (), layout, entries.dtype
            *_, sums = self._reduced(*called, ordered)
        except Unsupported as why:
            _cuda.note("sum", str(why))
            return super().sum(entries)
        _cuda.note("sum")
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

    @_or_by_xla
    def add(
        self, table: jax.Array, indices: jax.Array, rows: jax.Array, *, is_unique: bool
    ) -> jax.Array:
        layout = _Layout.of(table.shape, indices.shape[1])
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
        arrays = [Array(data.dtype, True), layout.array(table)]
        shapes = _row_shapes(["g", "t0"], arrays, layout)
        program = print_formula(function, shapes, layout.columns, ())
        called = program, (layout.flat(table),), (), layout, None
        keys, valid = layout.keys(indices)
        if is_unique:
            new, _ = self._known(*called, jnp.where(valid, keys, -1), data)
        else:
            ordered = _Sorted(*self._order(keys, valid, layout.rows), data)
            new, _ = self._reduced(*called, ordered)
        return new.reshape(table.shape)

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
        """`update`, with zeros for the change of padding."""
        has_data = isinstance(data, jax.Array)
        if not has_data and jax.tree.leaves(data):
            raise Unsupported("a tree of gradients")
        if not (*tables, *read):
            raise Unsupported("no rows of a table")
        n_sparse = indices.shape[1]
        widest = max((*tables, *read), key=lambda x: x.ndim)
        shape = (
            *widest.shape[:n_sparse],
            *(data.shape[1:] if has_data else widest.shape[n_sparse:]),
        )
        layout = _Layout.of(shape, n_sparse)
        arrays = [layout.array(x) for x in (*tables, *read)]
        names = [f"t{i}" for i in range(len(tables))]
        names += [f"r{i}" for i in range(len(read))]
        if has_data:
            names.insert(0, "g")
            arrays.insert(0, Array(data.dtype, True))

        def function(rows: Sequence[jax.Array], *args: Any) -> list[jax.Array]:
            grad, olds = (rows[0], rows[1:]) if has_data else (data, rows)
            out, news = row_fn(grad, tuple(olds), *args)
            if has_data:
                return [_like(out, grad), *_cast(news, tables)]
            if jax.tree.leaves(out):
                raise Unsupported("a change without a gradient")
            return _cast(news, tables)

        shapes = _row_shapes(names, arrays, layout)
        program = print_formula(function, shapes, layout.columns, args, size)
        keys, valid = layout.keys(indices)
        values = data.reshape(-1, layout.columns) if has_data else None
        out = data.dtype if has_data else None
        own, others = (tuple(map(layout.flat, group)) for group in (tables, read))
        called = program, own, others, layout, out
        *news, change = self._known(*called, jnp.where(valid, keys, -1), values)
        shaped = tuple(
            x.reshape(old.shape) for x, old in zip(news, tables, strict=True)
        )
        return (change.reshape(data.shape) if has_data else ()), shaped

    @where(_takes_look_up)
    @_or_by_xla
    def look_up(self, source: Source, ids: jax.Array, *, bounds: Bounds) -> jax.Array:
        if not ids.size:
            raise Unsupported("no ids")
        num_rows, flat = len(source.array), narrow_ids(ids, _MOST).reshape(-1)
        if bounds.fill is None:
            flat = jnp.clip(flat, 0, num_rows - 1)
        layout, program, read = self._stale(source)
        kernel = _kernel((), read, layout, source.array.dtype)
        kernel = kernel._replace(fill=0.0 if bounds.fill is None else bounds.fill)
        called = kernel, program, [flat], (), read
        (rows,) = self._each_row(*called, (len(flat), layout.rows), len(flat))
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
        layout, program, read = self._stale(source)
        kernel = _kernel((), read, layout, jnp.float32)
        kernel = kernel._replace(pools=True, weighted=weights is not None)
        in_front = [narrow_ids(ids, _MOST).reshape(-1)]
        if weights is not None:
            in_front.append(weights.reshape(-1).astype(jnp.float32))
        numbers = num_bags, ids.shape[1], layout.rows
        (sums,) = self._each_row(kernel, program, in_front, (), read, numbers, num_bags)
        return sums.reshape(num_bags, *source.array.shape[1:])

    def _stale(self, source: Source) -> tuple[_Layout, Program, Tables]:
        """What brings the rows of a stale table up to date."""
        stale, table = source.stale, source.array
        layout = _Layout.of(table.shape, 1)
        read = (table,) if stale is None else (table, *stale.tables)
        names = [f"r{i}" for i in range(len(read))]

        def function(rows: Sequence[jax.Array], shared: Any) -> list[jax.Array]:
            if stale is None:
                return [rows[0]]
            return [stale.value_of(rows[0], tuple(rows[1:]), shared)]

        shapes = _row_shapes(names, list(map(layout.array, read)), layout)
        shared = None if stale is None else stale.shared
        program = print_formula(function, shapes, layout.columns, (shared,))
        return layout, program, tuple(map(layout.flat, read))

    def _sorted(self, entries: Entries, layout: _Layout) -> _Sorted:
        keys, valid = layout.keys(entries.indices)
        ordered = self._order(keys, valid, layout.rows, entries.indices_sorted)
        if not isinstance(entries, BagEntries):
            return _Sorted(*ordered, entries.data.reshape(-1, layout.columns))
        values = entries.values.reshape(-1, layout.columns)
        length = entries.length
        segments = entries.segments if length is None else None
        return _Sorted(*ordered, values, segments, entries.weights, length=length)

    def _order(
        self, keys: jax.Array, valid: jax.Array, rows: int, is_sorted: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The keys in ascending order, and where they were."""
        size = len(keys)
        if size <= self.tuning.ranked and not is_sorted:
            # XLA's own sort of few entries takes longer: see `rank.cu`.
            call = _cuda.Call(
                text_of("rank.cu"),
                "rank_kernel",
                (),
                (0, -1, -2),
                ((-(-size // 32), 256, 0, size, rows),),
            )
            like = jax.ShapeDtypeStruct((size,), jnp.int32)
            found = self.launch(call, [jnp.where(valid, keys, -1)], [like, like], {})
            return found[0], found[1]
        keys = jnp.where(valid, keys, padding_key(jnp.int32))
        places = jnp.arange(size, dtype=jnp.int32)
        if is_sorted:
            return keys, places
        ordered = lax.sort((keys, places), num_keys=1)
        return ordered[0], ordered[1]

    def _reduced(
        self,
        program: Program,
        tables: Tables,
        read: Tables,
        layout: _Layout,
        out: Any,
        ordered: _Sorted,
    ) -> list[Any]:
        """The kernel that sums entries: the new tables, and what it has put `out`."""
        size, columns = len(ordered.keys), layout.columns
        if ordered.data.dtype != jnp.float32:
            raise Unsupported(f"sums of {ordered.data.dtype}")
        in_front = [x for x in ordered if isinstance(x, jax.Array)]
        kernel = _kernel(tables, read, layout, out)._replace(
            data=ordered.data.dtype,
            reduces=True,
            by_place=ordered.rows_of is not None,
            bags=0 if ordered.segments is not None else ordered.length,
            weighted=ordered.weights is not None,
        )
        rows = size if kernel.by_place else layout.rows
        launches, slots = _launches(size, columns, rows, self.tuning)
        like = jax.ShapeDtypeStruct
        lists = [like((slots,), jnp.int32), like((slots,), jnp.int32)]
        lists.append(like((slots, columns), jnp.float32))
        results = [*lists, *([like((size, columns), out)] if out is not None else [])]
        return self._call(kernel, program, in_front, tables, read, results, launches)

    def _known(
        self,
        program: Program,
        tables: Tables,
        read: Tables,
        layout: _Layout,
        out: Any,
        keys: jax.Array,
        data: jax.Array | None,
    ) -> list[Any]:
        """The kernel for rows that occur once: as `_reduced`."""
        kernel = _kernel(tables, read, layout, out)
        in_front = [keys]
        if data is not None:
            kernel = kernel._replace(data=data.dtype)
            in_front.append(data)
        numbers, size = (len(keys), layout.rows), len(keys)
        return self._each_row(kernel, program, in_front, tables, read, numbers, size)

    def _each_row(
        self,
        kernel: Kernel,
        program: Program,
        in_front: list[jax.Array],
        tables: Tables,
        read: Tables,
        numbers: tuple[int, ...],
        size: int,
    ) -> list[Any]:
        """A kernel with a warp for each of `size` results."""
        warps, results = self.tuning.warps, []
        if kernel.out is not None:
            results.append(jax.ShapeDtypeStruct((size, kernel.columns), kernel.out))
        launches = ((-(-size // warps), 32 * warps, 0, *numbers),)
        return self._call(kernel, program, in_front, tables, read, results, launches)

    def _call(
        self,
        kernel: Kernel,
        program: Program,
        in_front: list[jax.Array],
        tables: Tables,
        read: Tables,
        results: list[Any],
        launches: tuple[tuple[int, ...], ...],
    ) -> list[Any]:
        """The new tables, and the last result, or `None` if nothing is put out."""
        text, shared = source_of(kernel, program, self.tuning)
        operands = [*in_front, *shared, *tables, *read]
        first = len(in_front) + len(shared)
        made = range(len(results))
        # Of the results the tables come first; they have the memory of the operands.
        pointers = [
            *range(len(in_front)),
            *(-1 - len(tables) - i for i in made),
            *range(len(in_front), first),
            *(-1 - i for i in range(len(tables))),
            *range(first + len(tables), len(operands)),
        ]
        call = _cuda.Call(
            text, "rows_kernel", self.tuning.options, tuple(pointers), launches
        )
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tables]
        aliases = {first + i: i for i in range(len(tables))}
        found = self.launch(call, operands, [*like, *results], aliases)
        last = None if kernel.out is None else found[-1]
        return [*found[: len(tables)], last]


def _layout_of(entries: Entries) -> _Layout:
    if entries.dtype != jnp.float32:
        raise Unsupported(f"gradients of {jnp.dtype(entries.dtype).name}")
    if not 0 < entries.nse < _MOST:
        raise Unsupported(f"{entries.nse} entries")
    return _Layout.of(entries.shape, entries.n_sparse)


def _indices(ordered: _Sorted, layout: _Layout, entries: Entries) -> jax.Array:
    """The indices of the touched rows, and then of padding."""
    assert ordered.rows_of is not None
    slot = jnp.arange(len(ordered.keys), dtype=jnp.int32)
    assert ordered.count is not None
    indices = layout.indices(ordered.rows_of, entries.indices.dtype)
    return pad_indices(indices, slot < ordered.count, slot, entries.shape)


def _row_shapes(
    names: Sequence[str], arrays: Sequence[Array], layout: _Layout
) -> list[tuple[str, tuple[int, ...], Any, bool]]:
    return [
        (name, layout.row_shape if x.is_wide else (), x.dtype, x.is_wide)
        for name, x in zip(names, arrays, strict=True)
    ]


def _cast(news: Sequence[jax.Array], tables: Tables) -> list[jax.Array]:
    return [new.astype(old.dtype) for new, old in zip(news, tables, strict=True)]


def _like(change: Any, grad: jax.Array) -> jax.Array:
    if not isinstance(change, jax.Array):
        raise Unsupported("a tree of changes")
    if change.shape != grad.shape:
        raise Unsupported(f"a change of shape {change.shape}")
    return change.astype(grad.dtype)


def _kernel(tables: Tables, read: Tables, layout: _Layout, out: Any) -> Kernel:
    def of(group: Tables) -> tuple[Array, ...]:
        return tuple(Array(x.dtype, x.ndim == 2) for x in group)

    return Kernel(layout.columns, of(tables), of(read), out)


def _launches(
    size: int, columns: int, rows: int, tuning: Tuning
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The launches for so many entries, and how many slots the lists between have.

    24 a chunk, 1,048,576 entries become 87,382 slots, these by blocks of 512 slots 342,
    which a single block takes.
    """
    ring = tuning.ahead * columns_of_lane(columns)[1] * 32 * 4
    most = max(1, _SHARED_BYTES // ring)
    warps = min(tuning.warps, most)
    chunk = tuning.small if size <= tuning.few else tuning.large
    chunks = -(-size // chunk)
    in_blocks = -(-chunks // warps), 32 * warps, ring * warps
    launches = [(*in_blocks, size, chunk, -1, 0, 0, 0, 0, rows)]
    start, end, size = 0, 2 * chunks, 2 * chunks
    while chunks > 1:
        part, chunk, warps = next(x[1:] for x in tuning.parts if size <= x[0])
        warps = min(warps, most)
        chunks, room = -(-size // part), _room(min(size, part), chunk)
        after = end + 2 * chunks
        numbers = size, chunk, start, end, part, after, room, rows
        launches.append((chunks, 32 * warps, ring * warps, *numbers))
        start, end, size = end, after + chunks * room, 2 * chunks
    return tuple(launches), end


def _room(size: int, chunk: int) -> int:
    """The slots of all lists that a block makes of so many, but for the last two."""
    room = 0
    while (chunks := -(-size // chunk)) > 1:
        size = 2 * chunks
        room += size
    return room
