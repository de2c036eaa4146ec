"""Finds the rows of keys: cuckoo hashing in one array, many keys at a time.

Each code has two slots of the array, by two hashes, and its row is in one of them
(Pagh and Rodler, 2004). So a lookup is two gathers for any code, whether it is there or
not, which suits NumPy: with probes along chains there would be as many calls as the
longest chain has slots. A slot that is free has row 0, whose code is nobody's. A code
is compared with that of the row, so a slot is four bytes. To insert, a key takes one of
its slots, and who was there goes to its other one; all keys of a batch at once.

    code 7 has slots 3 and 5; slot 3 has row 2, whose code is 9, so it is not 7's;
    slot 5 has row 4, whose code is 7: the row is 4

At a load below one half, keys find room but for one table in as many as it has slots
(the cycles of the graph of slots). Then all are inserted again, by another hash and at
last into more slots. Hashes begin at random in each index, so nobody can choose keys
that find no room; rows do not depend on them.

Where the package's library is there, `native/keys.h` does the same, a key at a time.
"""

import os
from typing import Any

import numpy as np

from ..native import _keys as native

_ROUNDS = 100  # of insertion; some 15 are used
_PART = 1 << 20  # rows that are inserted at once, so that rounds need little memory
_FREE = 2.5  # slots for each row, at least


def table_of(codes: np.ndarray, last: Any, hits: np.ndarray) -> np.ndarray:
    """Codes, and beside each its last step and hits: `[n, 2]`, uint64."""
    table = np.empty((len(codes), 2), np.uint64)
    table[:, 0] = codes
    words = table.view(np.int32)
    words[:, 2], words[:, 3] = last, hits
    return table


def _distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different codes as they come, their counts, and which each is."""
    different, first, of, counts = np.unique(
        codes, return_index=True, return_inverse=True, return_counts=True
    )
    by = np.argsort(first)
    place = np.empty_like(by)
    place[by] = np.arange(len(by))
    return different[by], counts[by], place[of]


class Index:
    """Where the rows of codes are.

    The arrays of an index are never replaced: who reads has slots, codes and hash that
    belong together. `rebuilt` makes another index.

    Attributes:
      codes: `[rows]`, the code of each row: the first column of the caller's table,
        `[rows, 2]`, uint64. The second one is the uses of each: its last step and its
        hits, side by side.
    """

    def __init__(self, table: np.ndarray, attempt: int = 0):
        self._table, self.codes = table, table[:, 0]
        self._attempt = attempt
        bits = int(np.ceil(np.log2(max(16, _FREE * len(table))))) + attempt // 2
        self._slots = np.zeros(1 << bits, np.int32)
        self._shift = np.uint64(64 - bits)
        odd = np.frombuffer(os.urandom(16), np.uint64) | np.uint64(1)
        self._multiplier, self._second_multiplier = odd
        self._place = native.Place(self._slots, table, 64 - bits, odd)

    def find(self, codes: np.ndarray) -> np.ndarray:
        """The rows `[n]`, int32, 0 for codes that are not there."""
        by_library = native.find(self._place, codes)
        if by_library is not None:
            return by_library
        mixed = self._mix(codes)
        rows = self._slots.take(self._first(mixed), mode="clip")
        misses = np.flatnonzero((self._codes_of(rows) != codes) | (rows == 0))
        if len(misses):
            second = self._slots.take(self._second(mixed[misses]), mode="clip")
            is_there = self._codes_of(second) == codes[misses]
            rows[misses] = np.where(is_there, second, 0)
        return rows

    def look_up(self, codes: np.ndarray) -> tuple[Any, ...]:
        """The rows as `find` has them, and what is known of them.

        Returns:
          The rows `[n]`; those that are not 0, and their uses, int64; in which places
          of `rows` a 0 is; and of the codes there the different ones as they come,
          their counts, and which of them each is. All are copies.
        """
        by_library = native.look_up(self._place, codes)
        if by_library is not None:
            return by_library
        rows = self.find(codes)
        is_there = rows != 0
        touched = rows[is_there]
        uses = self._table[touched, 1].view(np.int64)
        absent = np.flatnonzero(~is_there)
        return rows, touched, uses, absent, _distinct(codes[absent])

    def replace(
        self,
        rows: np.ndarray,
        free: int,
        codes: np.ndarray,
        step: int,
        hits: np.ndarray,
    ) -> bool:
        """Gives rows other codes, and what is known of them; as `insert`.

        Args:
          rows: Which, each once: first those that are not there, then others.
          free: How many are not there.
          codes: Their codes from now on.
          step: The last step of all of them.
          hits: Their hits, int32.
        """
        data = rows, free, codes, step, hits
        by_library = native.replace(self._place, *data, _ROUNDS)
        if by_library is not None:
            return by_library
        self.remove(rows[free:])
        self._table[rows] = table_of(codes, step, hits)
        return self.insert(rows)

    def insert(self, rows: np.ndarray) -> bool:
        """Inserts rows, whose codes are not there. False: the index is broken now."""
        by_library = native.insert(self._place, rows, _ROUNDS)
        if by_library is not None:
            return by_library
        if len(rows) > _PART:
            parts = range(0, len(rows), _PART)
            return all(self.insert(rows[i : i + _PART]) for i in parts)
        first, second = self._both(rows)
        slots = self._slots
        at = np.where((slots[first] != 0) & (slots[second] == 0), second, first)
        for _ in range(_ROUNDS):
            if not len(rows):
                return True
            there = slots[at]
            slots[at] = rows
            won = slots[at] == rows  # of several for one slot, one has got it
            pushed = won & (there != 0)
            rows = np.concatenate([rows[~won], there[pushed]])
            at = np.concatenate([at[~won], at[pushed]])
            first, second = self._both(rows)
            at = first ^ second ^ at  # the other one
        return False

    def remove(self, rows: np.ndarray) -> None:
        """Removes rows, those that are there; their codes must be as they were."""
        for at in self._both(rows):
            self._slots[at[self._slots[at] == rows]] = 0

    def rebuilt(self, rows: np.ndarray) -> "Index":
        """Another index, of these rows alone, by another hash."""
        index = Index(self._table)
        while not index.insert(rows):
            index = Index(self._table, index._attempt + 1)
        return index

    def _codes_of(self, rows: np.ndarray) -> np.ndarray:
        return self._table.take(rows, axis=0, mode="clip")[:, 0]

    def _mix(self, codes: np.ndarray) -> np.ndarray:
        mixed = codes >> np.uint64(32)
        mixed ^= codes
        mixed *= self._multiplier
        return mixed

    def _first(self, mixed: np.ndarray) -> np.ndarray:
        return (mixed >> self._shift).view(np.int64)

    def _second(self, mixed: np.ndarray) -> np.ndarray:
        mixed ^= mixed >> np.uint64(29)
        mixed *= self._second_multiplier
        return (mixed >> self._shift).view(np.int64)

    def _both(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mixed = self._mix(self.codes[rows])
        return self._first(mixed), self._second(mixed)
