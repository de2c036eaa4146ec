"""Calls of the kernel for GPUs, with entries sorted by row or rows that occur once."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..native import _cuda
from ..native._cuda_printer import Unsupported
from ..native._cuda_source import (
    Kernel,
    Tuning,
    columns_of_lane,
    source_of,
    text_of,
)
from .bag_gradient import BagEntries
from .cuda_layout import Layout, RowProgram
from .entries import Entries
from .map_rows import Tables
from .padding import padding_key

_SHARED_BYTES = 96 << 10  # of a block


class SortedEntries(NamedTuple):
    """The entries of a gradient by rows.

    Attributes:
      keys: `[nse]`, their rows, or the places of these; ascending, then `PAD`.
      places: `[nse]`, where an entry was.
      data: Values; those of bags, if there are segments or a length.
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

    def by_place(self) -> "SortedEntries":
        """With the places of the touched rows, in ascending order, as keys."""
        keys, size = self.keys, len(self.keys)
        pad = padding_key(jnp.int32)
        real, slot = keys != pad, jnp.arange(size, dtype=jnp.int32)
        last = jnp.concatenate([keys[1:] != keys[:-1], jnp.ones([1], bool)]) & real
        rank = jnp.cumsum(last, dtype=jnp.int32) - last.astype(jnp.int32)
        target = jnp.where(last, rank, size + slot)
        rows = jnp.zeros_like(keys)
        rows = rows.at[target].set(keys, mode="drop", unique_indices=True)
        return self._replace(
            keys=jnp.where(real, rank, pad),
            rows_of=rows,
            count=jnp.sum(last, dtype=jnp.int32),
        )


class KernelCalls:
    """What `CudaOps` asks of the kernel: new tables, and what is put out by key."""

    tuning: ClassVar[Tuning] = Tuning()

    def launch(self, *args: Any) -> tuple[jax.Array, ...]:
        return _cuda.launch(*args)

    def sort(self, entries: Entries, layout: Layout) -> SortedEntries:
        keys, valid = layout.keys(entries.indices)
        order = self.order(keys, valid, layout.rows, entries.indices_sorted)
        if not isinstance(entries, BagEntries):
            return SortedEntries(*order, entries.data.reshape(-1, layout.columns))
        values, length = entries.values.reshape(-1, layout.columns), entries.length
        segments = entries.segments if length is None else None
        return SortedEntries(*order, values, segments, entries.weights, length=length)

    def order(
        self, keys: jax.Array, valid: jax.Array, rows: int, is_sorted: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The keys in ascending order, and where they were."""
        size = len(keys)
        if size <= self.tuning.ranked and not is_sorted:
            # XLA's own sort of few entries takes longer: see `rank.cu`.
            launches = ((-(-size // 32), 256, 0, size, rows),)
            source, name = text_of("rank.cu"), "rank_kernel"
            call = _cuda.Call(source, name, (), (0, -1, -2), launches)
            like = jax.ShapeDtypeStruct((size,), jnp.int32)
            keys, places = self.launch(
                call, [jnp.where(valid, keys, -1)], [like, like], {}
            )
            return keys, places
        keys = jnp.where(valid, keys, padding_key(jnp.int32))
        places = jnp.arange(size, dtype=jnp.int32)
        if is_sorted:
            return keys, places
        keys, places = lax.sort((keys, places), num_keys=1)
        return keys, places

    def by_row(self, program: RowProgram, entries: SortedEntries) -> tuple[Tables, Any]:
        """Adds entries up; the formula runs at each complete row."""
        size, columns = len(entries.keys), program.layout.columns
        if entries.data.dtype != jnp.float32:
            raise Unsupported(f"sums of {entries.data.dtype}")
        kernel = program.kernel._replace(
            data=entries.data.dtype,
            reduces=True,
            by_place=entries.rows_of is not None,
            bags=0 if entries.segments is not None else entries.length,
            weighted=entries.weights is not None,
        )
        rows = size if kernel.by_place else program.layout.rows
        launches, slots = _launches(size, columns, rows, self.tuning)
        like = jax.ShapeDtypeStruct
        lists = [like((slots,), jnp.int32), like((slots,), jnp.int32)]
        lists.append(like((slots, columns), jnp.float32))
        arrays = [x for x in entries if isinstance(x, jax.Array)]
        return self._call(kernel, program, arrays, size, launches, lists)

    def each_row(
        self, program: RowProgram, keys: jax.Array, data: jax.Array | None = None
    ) -> tuple[Tables, Any]:
        """The formula for keys that occur once; for -1, no row, zeros are put out."""
        kernel, arrays = program.kernel, [keys]
        if data is not None:
            kernel = kernel._replace(data=data.dtype)
            arrays.append(data)
        return self.warp_for_each(kernel, program, arrays, len(keys), len(keys))

    def warp_for_each(
        self,
        kernel: Kernel,
        program: RowProgram,
        arrays: list[jax.Array],
        size: int,
        *numbers: int,
    ) -> tuple[Tables, Any]:
        """`size` results, for each of which there is a warp."""
        warps = self.tuning.warps
        numbers = *numbers, program.layout.rows
        launches = ((-(-size // warps), 32 * warps, 0, *numbers),)
        return self._call(kernel, program, arrays, size, launches)

    def _call(
        self,
        kernel: Kernel,
        program: RowProgram,
        arrays: list[jax.Array],
        size: int,
        launches: tuple[tuple[int, ...], ...],
        lists: Sequence[Any] = (),
    ) -> tuple[Tables, Any]:
        """With `arrays` as its first parameters, and `lists` as scratch memory."""
        tables, results = program.tables, list(lists)
        if kernel.out is not None:
            shape = size, kernel.columns
            results.append(jax.ShapeDtypeStruct(shape, kernel.out))
        text, shared = source_of(kernel, program.program, self.tuning)
        operands = [*arrays, *shared, *tables, *program.read]
        first = len(arrays) + len(shared)
        # Of the results the tables come first; they have the memory of the operands.
        pointers = [
            *range(len(arrays)),
            *(-1 - len(tables) - i for i in range(len(results))),
            *range(len(arrays), first),
            *(-1 - i for i in range(len(tables))),
            *range(first + len(tables), len(operands)),
        ]
        options = self.tuning.options
        call = _cuda.Call(text, "rows_kernel", options, tuple(pointers), launches)
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tables]
        aliases = {first + i: i for i in range(len(tables))}
        made = self.launch(call, operands, [*like, *results], aliases)
        return made[: len(tables)], None if kernel.out is None else made[-1]


def _launches(
    size: int, columns: int, rows: int, tuning: Tuning
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The launches for so many entries, and how many slots the lists between have.

    1,048,576 entries in chunks of 32 leave two slots a chunk, 65,536; by blocks of 512
    these become 256, by blocks of 128 four, and a single block is the last launch.
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
