"""Keeps codes in rows, with their last step and hits; writes that can be taken back."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..native import _keys as native
from .index import Index, table_of
from .order import Order, Score, last_and_hits

FIELDS = ("keys", np.uint64), ("last", np.int32), ("hits", np.int32)
_MOST_HITS = 2**31 - 1


class Changes:
    """What has been written, so that `undo` can take it back, bit for bit."""

    def __init__(self) -> None:
        self._writes: list[tuple[np.ndarray, Any, np.ndarray]] = []
        self._moved: list[tuple[Store, np.ndarray]] = []

    def write(self, array: np.ndarray, at: Any, values: Any) -> None:
        self._writes.append((array, at, array[at]))
        array[at] = values

    def note(self, array: np.ndarray, at: Any, old: np.ndarray) -> None:
        """Notes values that the caller writes over."""
        self._writes.append((array, at, old))

    def move(self, store: "Store", rows: np.ndarray) -> None:
        """Notes that these rows get, or lose, their code."""
        self._moved.append((store, rows))

    def moved(self, store: "Store") -> np.ndarray:
        """The rows of a store that got, or lost, their code; some several times."""
        parts = [rows for other, rows in self._moved if other is store]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def undo_in(self, copied: Callable[[np.ndarray], np.ndarray]) -> None:
        """Takes all back in copies of the arrays, and leaves the arrays as they are."""
        for array, at, old in reversed(self._writes):
            copied(array)[at] = old

    def undo(self, finished: bool) -> None:
        """Takes all back. What was not finished may have left an index in pieces."""
        rows_of: dict[int, tuple[Store, list[np.ndarray]]] = {}
        for store, rows in self._moved:
            rows_of.setdefault(id(store), (store, []))[1].append(rows)
        moved = [(store, np.unique(np.concatenate(x))) for store, x in rows_of.values()]
        for store, rows in moved:
            store.index.remove(rows)
        for array, at, old in reversed(self._writes):
            array[at] = old
        for store, rows in moved:
            if not (finished and store.index.insert(rows[store.hits[rows] > 0])):
                store.rebuild()


def _refuse_twice(keys: np.ndarray, used: np.ndarray) -> None:
    """Raises if rows of a checkpoint have one key."""
    keys, counts = np.unique(keys[used], return_counts=True)
    if counts.max(initial=0) > 1:
        raise ValueError(
            "A vocabulary has each key in one row, got arrays that have the key "
            f"{keys[counts.argmax()]} (as uint64) in {counts.max()} rows. They are "
            "damaged; restore another checkpoint."
        )


class Store:
    """Codes in rows from 1 on; rows without hits are free.

    Attributes:
      keys: `[rows]`, uint64: the codes.
      last: `[rows]`, int32: the step at which each was last there.
      hits: `[rows]`, int32: how often it was there. All are views of one array, in
        which they are side by side: of a row that is not in a cache, one access.
    """

    def __init__(
        self, keys: np.ndarray, last: np.ndarray, hits: np.ndarray, score: Score
    ):
        self._table = table_of(keys, last, hits)
        # Each row as one thing, which NumPy gathers five times as fast as two.
        self._whole = self._table.view(np.dtype((np.void, 16)))[:, 0]
        self.keys, uses = self._table[:, 0], self._table[:, 1:]
        self.last, self.hits = last_and_hits(uses)
        self._score = score
        used = self.find_free()
        self.index = Index(self._table)
        if not self.index.insert(used):
            _refuse_twice(self.keys, used)
            self.rebuild()
        if (self.index.find(self.keys[used]) != used).any():
            _refuse_twice(self.keys, used)

    def find_free(self) -> np.ndarray:
        """Finds free rows, and forgets the order; after writes from elsewhere."""
        used = np.flatnonzero(self.hits).astype(np.int32)
        self._next = int(used[-1]) + 1 if len(used) else 1  # from here on all are free
        free = np.flatnonzero(self.hits[: self._next] == 0).astype(np.int32)
        self._free = free[1:]  # in front of it, ascending
        self.order = Order(self._score, self._table)
        return used

    @property
    def room(self) -> int:
        """How many rows are free."""
        return len(self.hits) - self._next + len(self._free)

    def touch(
        self, changes: Changes, rows: np.ndarray, old: np.ndarray, step: int
    ) -> None:
        """Counts codes that were there.

        Args:
          changes: Where it is noted.
          rows: Their rows, which may be named several times.
          old: Their uses, as `Index.look_up` has returned them.
          step: The step.
        """
        limit = _MOST_HITS - len(rows)
        changes.note(self._table[:, 1].view(np.int64), rows, old)
        if native.touch(self._table, rows, step, limit, old):
            return
        self.last[rows] = step
        hits = old.view(np.int32)[1::2]
        counted = rows if hits.max(initial=0) <= limit else rows[hits <= limit]
        np.add.at(self.hits, counted, np.int32(1))

    def place(
        self, changes: Changes, codes: np.ndarray, hits: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Puts new codes into free rows, then into those of lowest score.

        Rows of this step are not taken; the caller has seen that there are enough.

        Returns:
          The rows, and the codes that had to go.
        """
        missing = len(codes) - self.room
        gone = self.keys[:0]
        lowest = np.zeros(0, np.int32)
        if missing > 0:
            lowest = self.order.take(missing, step)
            gone = self.keys[lowest]
        fewer = len(codes) - len(lowest)
        free, self._free = self._free[:fewer], self._free[fewer:]
        more = fewer - len(free)
        fresh = np.arange(self._next, self._next + more, dtype=np.int32)
        self._next += more
        rows = np.concatenate([free, fresh, lowest])
        changes.move(self, rows)
        changes.note(self._whole, rows, self._whole[rows])
        if not self.index.replace(rows, fewer, codes, step, hits):
            self.rebuild()
        return rows, gone

    def free(self, changes: Changes, rows: np.ndarray) -> np.ndarray:
        """Frees rows, and returns their codes."""
        if not len(rows):
            return self.keys[:0]
        changes.move(self, rows)
        self.index.remove(rows)
        changes.write(self.hits, rows, 0)
        rows = np.sort(rows)
        self._free = np.insert(self._free, np.searchsorted(self._free, rows), rows)
        return self.keys[rows]

    def number_at(self, step: int, rows: np.ndarray) -> int:
        """How many codes were there at a step, beside those in these rows."""
        at_step = (self.last == step) & (self.hits > 0)
        return int(np.count_nonzero(at_step) - np.count_nonzero(at_step[rows]))

    def find(self, codes: np.ndarray) -> np.ndarray:
        """The rows of codes, 0 for those without."""
        return self.index.find(codes)

    def rebuild(self) -> None:
        """Makes another index, of all codes that are there."""
        self.index = self.index.rebuilt(np.flatnonzero(self.hits).astype(np.int32))
