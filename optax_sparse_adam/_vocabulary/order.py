"""Finds the rows of lowest score, in the order of (score, row), without sorting all.

A quarter of the rows, the lowest, are sorted once: a run, from the front of which rows
are taken for many batches. A score that has changed meanwhile is seen when its entry
comes to the front: the entry is passed over. Rows that have got a low score since then,
such as new ones where hits are the score, are runs of their own, and two runs become
one when the earlier is less than twice as long, as in a log-structured merge tree. When
all are used up, the lowest quarter is sorted again. What is taken is what a sort of all
rows would give each time (`tests/vocabulary` compares): no checkpoint has any of this.

    scores of rows 1 to 5: 5 1 4 1 3; the run is rows 2, 4 and the limit (1, 4)
    row 4 gets score 6: its entry (1, 4) is not its score now, and is passed over
    row 1 gets score 0: below the limit, so (0, 1) is another run, and taken first
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..native import _keys as native

Score: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]
_Run: TypeAlias = tuple[np.ndarray, np.ndarray]  # rows, and their scores then
_SHARE, _FEW = 4, 1024  # the part of the rows that is sorted, and so many at least


def by_last(last: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """The score "last": who was there longest ago goes first."""
    return last


def by_hits(last: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """The score "hits": who was there least often goes first."""
    return hits


def last_and_hits(uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both, int32, of numbers `[n, 1]` of 64 bits that hold them side by side."""
    last, hits = uses.view(np.int32).T
    return last, hits


class Order:
    """The order of rows by a score of their last step and their hits.

    Args:
      score: A function of both, `[n]` each; its scores `[n]` are numbers.
      table: `[rows, 2]`, uint64, whose second column is the last step of each row and
        its hits; it is the caller's array, which changes. A row without hits is free,
        and not in the order.
    """

    def __init__(self, score: Score, table: np.ndarray):
        self._score, self._table = score, table
        self.forget()

    def forget(self) -> None:
        """Sorts when it is next asked."""
        self._runs: list[_Run] = []
        self._limit: tuple[Any, Any] | None = None
        self._passed = 0  # entries that the last call of `take` has gone through

    def add(self, rows: np.ndarray, now: int) -> None:
        """Looks at rows whose score has changed, and at new ones; `last` is `now`."""
        if self._limit is None or (self._score is by_last and now > self._limit[0]):
            return
        scores, runs = self._scores_of(*self._uses_of(rows)), self._runs
        low = np.flatnonzero(_up_to((rows, scores), self._limit))
        if not len(low):
            return
        low = low[_sorting((rows[low], scores[low]))]
        runs.append((rows[low], scores[low]))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            rows, scores, _ = self._merged(runs[-2:])
            runs[-2:] = [(rows, scores)]
        if sum(len(x) for x, _ in runs) > _FEW + len(self._table) // 2:
            self.forget()

    def take(self, count: int, now: int) -> np.ndarray:
        """Takes the lowest rows whose last step is not `now`; there must be enough."""
        if len(self._runs) == 1 and self._score in (by_last, by_hits):
            rows, scores = run = self._runs[0]
            lowest = native.lowest(self._table, run, self._score is by_hits, now, count)
            if lowest is not None:
                taken, self._passed = lowest
                self._runs = [(rows[self._passed :], scores[self._passed :])]
                return taken
        stop = max(count, self._passed) * 5 // 4 + 64
        while True:
            rows, scores, last = self._merged(
                [(r[:stop], s[:stop]) for r, s in self._runs]
            )
            ends = [(s[stop], r[stop]) for r, s in self._runs if stop < len(r)]
            passed = last == now
            usable = ~passed
            if ends:  # what is beyond these has not been looked at
                usable &= _up_to((rows, scores), min(ends))
            usable = np.flatnonzero(usable)[:count]
            if len(usable) == count:
                end = scores[usable[-1]], rows[usable[-1]]
                passed &= _up_to((rows, scores), end)
                self._drop(*end)
                if passed.any():
                    self._runs.append((rows[passed], scores[passed]))
                return rows[usable]
            if ends:
                stop *= 4
            else:
                self._sort(count, now)

    def _merged(self, runs: Sequence[_Run]) -> tuple[np.ndarray, ...]:
        """The entries of runs whose score is as it was, sorted, each once.

        Returns: the rows, their scores, and the last step of each.
        """
        if not runs:
            return np.zeros(0, np.int32), np.zeros(0), np.zeros(0, np.int32)
        rows, scores = (np.concatenate(x) for x in zip(*runs, strict=True))
        last, hits = self._uses_of(rows)
        used = np.flatnonzero(hits)  # a free row has no score
        if len(used) < len(rows):
            rows, scores, last, hits = rows[used], scores[used], last[used], hits[used]
        by = np.flatnonzero(self._scores_of(last, hits) == scores)
        if len(runs) > 1:
            by = by[_sorting((rows[by], scores[by]))]
        return rows[by], scores[by], last[by]

    def _drop(self, score: Any, row: Any) -> None:
        """Drops what is up to an entry: it is taken, or not valid."""
        left, self._passed = [], 0
        for rows, scores in self._runs:
            low, high = (np.searchsorted(scores, score, x) for x in ("left", "right"))
            first = low + np.searchsorted(rows[low:high], row, "right")
            self._passed += first
            if first < len(rows):
                left.append((rows[first:], scores[first:]))
        self._runs = left

    def _sort(self, count: int, now: int) -> None:
        last, hits = last_and_hits(self._table[:, 1:])
        rows = np.flatnonzero(hits != 0).astype(np.int32)  # of bool it is twice as fast
        last = last[rows]
        scores = self._scores_of(last, hits[rows])
        movable = np.flatnonzero(last != now)
        low = scores[movable]
        assert len(movable) >= count
        size = max(count, len(movable) // _SHARE, _FEW)
        if size < len(movable):
            most = np.partition(low, size - 1)[size - 1]
            ties = rows[movable[low == most][: size - np.count_nonzero(low < most)]]
            kept = np.flatnonzero(_up_to((rows, scores), (most, ties[-1])))
            rows, scores = rows[kept], scores[kept]
        run = rows, scores = _sorted_by_row(rows, scores)
        self._runs, self._limit = [run], (scores[-1], rows[-1])

    def _uses_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last step of rows, and their hits."""
        return last_and_hits(self._table[rows, 1:])

    def _scores_of(self, last: np.ndarray, hits: np.ndarray) -> np.ndarray:
        if not len(last):  # which not every function takes
            return np.zeros(0)
        # Who asks reads `last` again, and a score may compute in place.
        scores = np.asarray(self._score(last.copy(), hits))
        if scores.shape != last.shape or scores.dtype.kind not in "iufb":
            raise ValueError(
                "Vocabulary needs a score that returns a number for each of its "
                f"{len(last)} rows, got an array of {scores.dtype} of shape "
                f"{scores.shape}. It gets arrays: use NumPy's functions."
            )
        if scores.dtype.kind == "f" and np.isnan(scores).any():
            raise ValueError(
                "Vocabulary needs scores that can be ordered, got NaN from score(last, "
                "hits). last is 0 or more, and hits are 1 or more."
            )
        return scores


def _sorted_by_row(rows: np.ndarray, scores: np.ndarray) -> _Run:
    """Entries, whose rows ascend, in their order."""
    if scores.dtype != np.int32:
        by = np.argsort(scores, kind="stable")
        return rows[by], scores[by]
    # As numbers of 64 bits, which NumPy sorts ten times as fast as it argsorts.
    entries = np.sort((scores.astype(np.int64) << 32) | rows)
    return entries.astype(np.int32), (entries >> 32).astype(np.int32)


def _sorting(run: _Run) -> np.ndarray:
    """The places of the entries in their order, each once."""
    by = np.lexsort(run)
    rows = run[0][by]
    return by[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]


def _up_to(run: _Run, entry: tuple[Any, Any]) -> np.ndarray:
    (rows, scores), (score, row) = run, entry
    return (scores < score) | ((scores == score) & (rows <= row))
