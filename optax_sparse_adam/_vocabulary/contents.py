"""What a vocabulary holds, and what one batch does to it. Threads are the caller's.

The arrays are those of a checkpoint; see there.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .checkpoint import GONE, KIND, LOST, STEP
from .codes import as_array, codes_of
from .options import SCORES, Options, code_of_padding
from .order import Score, by_last
from .store import FIELDS, Changes, Store

_ANY_NUMBER = 2**62


class _Plan(NamedTuple):
    """What is to be done with the codes of a batch that have no row.

    Attributes:
      codes: `[n]`, each once, in the order in which they come.
      hits: How often each was there, earlier batches included.
      of: For each key that is asked for, which of the codes it is.
      waits: The place of each among those that wait, or 0.
      enters: Whether it gets a row now.
    """

    codes: np.ndarray
    hits: np.ndarray
    of: np.ndarray
    waits: np.ndarray
    enters: np.ndarray


class Contents:
    """Keys with rows, keys that wait, and tombstones."""

    def __init__(self, options: Options, arrays: dict[str, np.ndarray]):
        self.options, self.arrays = options, {**arrays}
        name = options.score
        score = SCORES[name] if isinstance(name, str) else name
        self.main = self._store("", score)
        waits = options.min_hits > 1
        self._waiting = self._store("waiting_", by_last) if waits else None
        self.changed, self.numbers = arrays["changed"], arrays["numbers"]
        self._ids, self._ids_step = 0, -1
        nothing = np.zeros(0, np.uint64), np.zeros(0, np.int32)
        self._gone = arrays.get("gone", nothing[0])
        self._gone_at = arrays.get("gone_at", nothing[1])

    def _store(self, prefix: str, score: Score) -> Store:
        keys, last, hits = (self.arrays[prefix + name] for name, _ in FIELDS)
        store = Store(keys, last, hits, score)
        for name, _ in FIELDS:
            self.arrays[prefix + name] = getattr(store, name)
        return store

    def read(self, function: str, keys: Any, mask: Any) -> tuple[Any, ...]:
        """Codes of keys, the kind, and where they stand in an array of which shape."""
        array, at, kind = as_array(function, keys), None, int(self.numbers[KIND])
        shape = array.shape
        if mask is not None:
            mask = as_array(function, mask)
            if mask.shape != shape or mask.dtype != bool:
                raise ValueError(
                    f"{function} needs a mask of bool in the shape of the keys, "
                    f"{shape}; got {mask.dtype} of shape {mask.shape}."
                )
            at = np.flatnonzero(mask)
            array = array.reshape(-1)[at]
        codes, kind = codes_of(function, array, kind)
        if self.options.padding is not None and len(codes):
            padding, _ = code_of_padding(self.options.padding, kind)
            meant = np.flatnonzero(codes != padding)
            if len(meant) < len(codes):
                codes, at = codes[meant], meant if at is None else at[meant]
        return codes, kind, at, shape

    def find(self, keys: Any, mask: Any) -> np.ndarray:
        codes, _, at, shape = self.read("find", keys, mask)
        return spread(self.main.find(codes), at, shape)

    def count_ids(self, number: int, step: int) -> None:
        """Counts the ids of a step: of so many keys there can be no more than that.

        For where that is less than the rows, and nothing has to be counted exactly.
        """
        if step != self._ids_step:  # a step that was begun elsewhere has had any number
            self._ids = 0 if step > self.numbers[STEP] else _ANY_NUMBER
        self._ids, self._ids_step = self._ids + number, step

    def plan(
        self, new: tuple[np.ndarray, ...], touched: np.ndarray, step: int
    ) -> _Plan:
        """Plans what to do with codes without a row; raises where it cannot be done.

        Args:
          new: These codes, as `Index.look_up` has them.
          touched: The rows of the others.
          step: The step.
        """
        codes, hits, of = new
        waiting, options = self._waiting, self.options
        waits = np.zeros(len(codes), np.int32)
        if waiting is not None:
            waits = waiting.find(codes)
            counts = waits > 0
            if options.ttl is not None:
                counts &= waiting.last[waits] >= step - options.ttl
            hits = hits + np.where(counts, waiting.hits[waits], 0)
        enters = hits >= options.min_hits
        number = int(np.count_nonzero(enters))
        rows = len(self.main.keys) - 1
        if number > self.main.room and self._ids > rows:
            touched = np.unique(touched)
            number += len(touched) + self.main.number_at(step, touched)
            if number > rows:
                raise ValueError(
                    f"assign needs a row for each different key of a step: {number:,} "
                    f"keys for {rows:,} rows, beside that of unknown keys. Nothing has "
                    "changed. Make the vocabulary larger, or the batch smaller."
                )
        if waiting is not None and not enters.all():
            number, places = int(np.count_nonzero(~enters)), len(waiting.keys) - 1
            if number > waiting.room and self._ids > places:
                number += waiting.number_at(step, waits[waits > 0])
            if number > places:
                raise ValueError(
                    f"assign counts keys that have less than {options.min_hits} hits: "
                    f"{number:,} keys of this step, for which there are {places:,} "
                    "places. Nothing has changed. Make the vocabulary with a larger "
                    "waiting=, or the batch smaller."
                )
        return _Plan(codes, hits.astype(np.int32), of, waits, enters)

    def admit(
        self, changes: Changes, plan: _Plan, step: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of what was asked for, the fresh ones, and codes that had to go."""
        codes, hits, of, waits, enters = plan
        fresh, gone = self.main.place(changes, codes[enters], hits[enters], step)
        changes.write(self.changed, fresh, step)
        waiting = self._waiting
        if waiting is None:
            return fresh[of], fresh, gone
        waiting.free(changes, waits[enters & (waits > 0)])
        stays, comes = ~enters & (waits > 0), ~enters & (waits == 0)
        old = waits[stays]
        changes.write(waiting.last, old, step)
        changes.write(waiting.hits, old, hits[stays])
        new, _ = waiting.place(changes, codes[comes], hits[comes], step)
        waiting.order.add(np.append(old, new), step)
        rows = np.zeros(len(codes), np.int32)
        rows[enters] = fresh
        return rows[of], fresh, gone

    def expire(self, changes: Changes, before: int, step: int) -> np.ndarray:
        """Codes that go, as they were not there for `ttl` steps.

        They are looked for eight times in `ttl` steps, as all rows are looked at. When,
        depends on the steps alone, so a resumed run does it then, too.
        """
        ttl, main = self.options.ttl, self.main
        if ttl is None or step // (period := max(1, ttl // 8)) == before // period:
            return main.keys[:0]
        old = np.flatnonzero((main.hits > 0) & (main.last < step - ttl))
        return main.free(changes, old.astype(np.int32))

    def bury(self, changes: Changes, codes: np.ndarray, step: int) -> None:
        """Keeps tombstones of codes that have gone. The caller has noted `numbers`."""
        if not len(codes):
            return
        size, before = len(self._gone), int(self.numbers[GONE])
        count = before + len(codes)
        if count > size:
            last = count - size - 1  # the newest one that is lost
            lost = step if last >= before else self._gone_at[last % size]
            self.numbers[LOST] = lost
        kept = codes[max(0, len(codes) - size) :]
        places = np.arange(count - len(kept), count) % max(size, 1)
        changes.write(self._gone, places, kept)
        changes.write(self._gone_at, places, step)
        self.numbers[GONE] = count

    def changed_since(
        self, step: int, taken_back: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes that have got their row since then, the rows, and codes that have gone.

        Of codes that were `taken_back`, too, whenever that was.
        """
        main, there = self.main, self.main.find(taken_back)
        is_new = (main.hits > 0) & (self.changed >= step)
        is_new[there[there > 0]] = True
        rows = np.flatnonzero(is_new).astype(np.int32)
        size, count = len(self._gone), int(self.numbers[GONE])
        places = np.arange(max(0, count - size), count) % max(size, 1)
        gone = self._gone[places][self._gone_at[places] >= step]
        gone = np.append(gone, taken_back[there == 0])
        gone = gone[np.sort(np.unique(gone, return_index=True)[1])]
        return main.keys[rows], rows, gone[main.find(gone) == 0]

    def arrays_before(
        self, step: int, history: Iterable[Changes]
    ) -> tuple[dict[str, np.ndarray], int]:
        """Copies of the arrays, without batches of this step and later ones.

        Args:
          step: The step.
          history: What batches have changed, the last one first.

        Returns:
          The copies, and the step of the first batch that was left out, or `step`.
        """
        copies: dict[int, np.ndarray] = {}

        def copied(array: np.ndarray) -> np.ndarray:
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if id(owner) not in copies:
                copies[id(owner)] = owner.copy()
            copy = copies[id(owner)]
            places = [x.__array_interface__["data"][0] for x in (array, owner)]
            offset, strides = places[0] - places[1], array.strides
            return np.ndarray(array.shape, array.dtype, copy, offset, strides)

        arrays, first = {name: copied(x) for name, x in self.arrays.items()}, step
        for changes in history:
            if arrays["numbers"][STEP] < step:
                break
            first = int(arrays["numbers"][STEP])
            changes.undo_in(copied)
        return {name: x.copy() for name, x in arrays.items()}, first

    def take_back(self, changes: Changes, finished: bool) -> None:
        changes.undo(finished)
        self.main.find_free()
        if self._waiting is not None:
            self._waiting.find_free()


def spread(
    rows: np.ndarray, at: np.ndarray | None, shape: tuple[int, ...]
) -> np.ndarray:
    """Rows in the shape of their keys; 0 where there is no key."""
    if at is None:
        return rows.reshape(shape)
    result = np.zeros(shape, np.int32)
    result.reshape(-1)[at] = rows
    return result
