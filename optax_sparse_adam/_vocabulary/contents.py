"""What a vocabulary holds, and what one batch does to it. Threads are the caller's.

The arrays are those of a checkpoint. `keys`, `last` and `hits` are of the rows, with
`changed`, the step at which a row got its key. `waiting_...` are those of keys that
have less than `min_hits`, in places of their own. `gone` and `gone_at` are tombstones,
a ring: the newest ones take the place of the oldest. `numbers` are four counters.
"""

from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

import numpy as np

from .codes import as_array, codes_of
from .order import Score, by_hits, by_last
from .store import FIELDS, Changes, Store

SCORES: dict[str, Score] = {"last": by_last, "hits": by_hits}
# Places in `numbers`: the kind of keys, the last step, how many keys have gone so far,
# and the last step of which a tombstone was lost.
KIND, STEP, GONE, LOST = range(4)
_64_BITS = {"keys": np.uint64, "waiting_keys": np.uint64, "gone": np.uint64}
_TYPES = _64_BITS | {"numbers": np.int64}  # all others are int32


class Options(NamedTuple):
    """What a vocabulary was made with, but for its sizes; static in a pytree."""

    min_hits: int
    score: str | Score
    ttl: int | None
    padding: Any


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


def new_arrays(rows: int, waiting: int, tombstones: int) -> dict[str, np.ndarray]:
    """The arrays of a vocabulary without keys; `waiting` is 0 if none will wait."""
    sizes = {"": rows, "waiting_": waiting}
    new = {p + f: np.zeros(n, t) for p, n in sizes.items() for f, t in FIELDS if n}
    new["changed"] = np.full(rows, -1, np.int32)
    if tombstones:
        new["gone"] = np.zeros(tombstones, np.uint64)
        new["gone_at"] = np.zeros(tombstones, np.int32)
    return new | {"numbers": np.array([0, 0, 0, -1])}


def checked(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of arrays that a user gives, if they have the types of a checkpoint."""
    arrays = {name: np.array(given[name]) for name in given}
    for name, x in arrays.items():
        dtype = np.dtype(_TYPES.get(name, np.int32))
        if x.dtype != dtype or x.ndim != 1:
            raise TypeError(
                f"A vocabulary's {name} are {dtype} of one axis, got {x.dtype} of "
                f"shape {x.shape}. Arrays of JAX have no 64 bits unless it is told so: "
                "restore these as arrays of NumPy."
            )
    return arrays


def resized(
    given: dict[str, np.ndarray], like: Mapping[str, Sized]
) -> dict[str, np.ndarray]:
    """The same contents in arrays as long as others."""
    if {*given} != {*like}:
        raise ValueError(
            f"restore needs the arrays {', '.join(like)}; got {', '.join(given)}. Make "
            "the vocabulary with the options of the one that was saved."
        )
    new = {}
    for name, x in given.items():
        more = len(like[name]) - len(x)
        if more < 0:
            raise ValueError(
                f"restore needs arrays that are not larger than the vocabulary's: at "
                f"most {len(like[name])} entries for {name}, got {len(x)}. Make it as "
                "large as the one that was saved."
            )
        fill = -1 if name == "changed" else 0
        new[name] = np.pad(x, (0, more), constant_values=fill) if more else x
    size = len(given.get("gone", ()))
    if size != len(like.get("gone", ())):  # the ring begins again
        count = int(given["numbers"][GONE])
        places = np.arange(max(0, count - size), count) % size
        for name in ("gone", "gone_at"):
            new[name][: len(places)] = given[name][places]
        new["numbers"][GONE] = len(places)
    return new


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
            mask = np.asarray(mask)
            if mask.shape != shape or mask.dtype != bool:
                raise ValueError(
                    f"{function} needs a mask of bool in the shape of the keys, "
                    f"{shape}; got {mask.dtype} of shape {mask.shape}."
                )
            at = np.flatnonzero(mask)
            array = array.reshape(-1)[at]
        codes, kind = codes_of(function, array, kind)
        if self.options.padding is not None and len(codes):
            padding = as_array("Vocabulary(padding=...)", self.options.padding)
            padding, _ = codes_of("Vocabulary(padding=...)", padding, kind)
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
            self._ids = 0 if step > self.numbers[STEP] else len(self.main.keys)
        self._ids, self._ids_step = self._ids + number, step

    def plan(self, codes: np.ndarray, known: np.ndarray, step: int) -> _Plan:
        """Plans what to do with codes without a row; raises where it cannot be done.

        Args:
          codes: Those without a row, as the batch has them.
          known: The rows of the others.
          step: The step.
        """
        codes, first, of, hits = np.unique(
            codes, return_index=True, return_inverse=True, return_counts=True
        )
        by = np.argsort(first)
        place = np.empty_like(by)
        place[by] = np.arange(len(by))
        codes, hits, of = codes[by], hits[by], place[of]
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
            known = np.unique(known)
            number += len(known) + self.main.number_at(step, known)
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
        if waiting is not None:
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
        """Keeps tombstones of codes that have gone."""
        size, before = len(self._gone), int(self.numbers[GONE])
        count = before + len(codes)
        if len(codes) and count > size:
            last = count - size - 1  # the newest one that is lost
            lost = step if last >= before else self._gone_at[last % size]
            changes.write(self.numbers, [LOST], lost)
        kept = codes[max(0, len(codes) - size) :]
        places = np.arange(count - len(kept), count) % max(size, 1)
        changes.write(self._gone, places, kept)
        changes.write(self._gone_at, places, step)
        changes.write(self.numbers, [GONE], count)

    def gone_since(self, step: int) -> np.ndarray:
        """Codes that have gone at this step or later, and are not there."""
        size, count = len(self._gone), int(self.numbers[GONE])
        places = np.arange(max(0, count - size), count) % max(size, 1)
        codes = self._gone[places][self._gone_at[places] >= step]
        codes = codes[np.sort(np.unique(codes, return_index=True)[1])]
        return codes[self.main.find(codes) == 0]

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
