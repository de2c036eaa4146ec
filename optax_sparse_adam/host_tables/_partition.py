"""Which rows are whose: of a table those of a process, of a batch those of a device.

    10 rows, two processes with two devices each
    row 7    of process 7 % 2 = 1, where it is row 7 // 2 = 3 of what that keeps;
             of its devices 3 % 2 = 1, which has the block 3 of an array over the mesh

Neighbours go to different devices, so that tables which are sorted by frequency are
spread as well as others. A step gets the rows of a batch as one array over the mesh, in
blocks of equal length, each padded at its end. A row's `position` orders the rows as
that array has them; with one device it is the row's number.

All processes compute from the same ids which rows each block has. So they agree without
a word, and each reads and writes only rows that are its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._spread import Spread
from ._store import Ascending

_LARGEST_POSITION = 2**31 - 1


class Partition:
    """The rows of a table.

    Attributes:
      num_rows: Of the table.
      count: How many of them are of this process.
      block_rows: How many are of a device, at most.
    """

    def __init__(self, num_rows: int, spread: Spread):
        self.num_rows, self._spread = num_rows, spread
        self._processes, self._devices = spread.blocks.shape
        self.count = self.count_of(spread.process, self._processes)
        self.block_rows = -(-num_rows // spread.blocks.size)
        # One more in each block, which is padding.
        self._stride = self.block_rows + 1
        if self._stride * spread.blocks.size > _LARGEST_POSITION + 1:
            raise ValueError(
                f"A HostTable over {spread.blocks.size} devices has at most "
                f"{_LARGEST_POSITION - 2 * spread.blocks.size:,} rows; got "
                f"{num_rows:,}. Make several tables of it."
            )

    @property
    def _is_whole(self) -> bool:
        return self._spread.blocks.size == 1

    def count_of(self, process: int, processes: int) -> int:
        """How many rows are of one of so many processes."""
        return len(range(process, self.num_rows, processes))

    def rows_of_table(self, stored: np.ndarray) -> np.ndarray:
        """The numbers in the table of rows of the store of this process."""
        return stored * self._processes + self._spread.process

    def position(self, rows: Any) -> Any:
        """Of rows, by their numbers, in arrays of NumPy or of JAX."""
        if self._is_whole:
            return rows
        process, stored = rows % self._processes, rows // self._processes
        blocks = self._spread.blocks.ravel()
        table = blocks if isinstance(rows, np.ndarray) else jnp.asarray(blocks)
        block = table[process * self._devices + stored % self._devices]
        return block * self._stride + stored // self._devices

    def rows_here(self, rows: np.ndarray) -> np.ndarray:
        """Their numbers in the store of this process; of others, -1."""
        if self._processes == 1:
            return rows
        is_here = rows % self._processes == self._spread.process
        return np.where(is_here, rows // self._processes, -1)

    def rows_at(self, positions: jax.Array) -> jax.Array:
        """The inverse of `position`; of padding, any number."""
        if self._is_whole:
            return positions
        place = jnp.asarray(np.argsort(self._spread.blocks.ravel()).astype(np.int32))
        device = place[positions // self._stride]
        stored = positions % self._stride * self._devices + device % self._devices
        return stored * self._processes + device // self._devices

    def cut(self, rows: Ascending) -> list[np.ndarray]:
        """Positions of rows, of each block, ascending."""
        if self._is_whole:
            return [rows]
        positions = np.sort(self.position(rows))
        bounds = np.arange(1, self._spread.blocks.size) * self._stride
        return np.split(positions, np.searchsorted(positions, bounds))

    def padded(self, cut: Sequence[np.ndarray], size: int) -> np.ndarray:
        """Positions of an array of blocks of this size, ascending."""
        ends = np.arange(1, len(cut) + 1) * self._stride - 1
        padded = np.repeat(ends.astype(np.int32), size)
        for number, block in enumerate(cut):
            padded[number * size : number * size + len(block)] = block
        return padded

    def own(self, cut: Sequence[np.ndarray]) -> list[Ascending]:
        """The rows of each block of this process, by their numbers in its store."""
        if self._is_whole:
            return [*map(Ascending, cut)]
        blocks = self._spread.blocks[self._spread.process]
        return [
            Ascending(cut[block] % self._stride * self._devices + number)
            for number, block in enumerate(blocks.tolist())
        ]

    def between(self, first: int, last: int) -> list[Ascending]:
        """The rows of each block of this process from the one to before the other."""
        return [
            Ascending(
                np.arange(
                    first * self._devices + number,
                    min(last * self._devices, self.count),
                    self._devices,
                    dtype=np.int32,
                )
            )
            for number in range(self._devices)
        ]

    def pieces(
        self, pieces: Iterable[tuple[int, np.ndarray]]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """What of pieces of a table is of this process, by its numbers there."""
        for first, records in pieces:
            skipped = (self._spread.process - first) % self._processes
            if skipped < len(records):
                stored = (first + skipped) // self._processes
                yield stored, records[skipped :: self._processes]
