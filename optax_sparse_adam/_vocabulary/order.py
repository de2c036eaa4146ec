"""Finds the rows of lowest score, in the order of (score, row), without sorting all.

An eighth of the rows, the lowest, are sorted once: a run, from the front of which rows
are taken for many batches. A score that has changed meanwhile is seen when its entry
comes to the front: the entry is passed over. Rows that have got a low score since then,
such as new ones where hits are the score, are runs of their own, and two runs become
one when the earlier is less than twice as long, as in a log-structured merge tree. When
all are used up, the lowest eighth is sorted again. What is taken is what a sort of all
rows would give each time (`tests/vocabulary` compares): no checkpoint has any of this.

    scores of rows 1 to 5: 5 1 4 1 3; the run is rows 2, 4 and the limit (1, 4)
    row 4 gets score 6: its entry (1, 4) is not its score now, and is passed over
    row 1 gets score 0: below the limit, so (0, 1) is another run, and taken first
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Score: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]
_Run: TypeAlias = tuple[np.ndarray, np.ndarray]  # rows, and their scores then
_SHARE, _FEW = 8, 1024  # the part of the rows that is sorted, and so many at least


def by_last(last: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """The score "last": who was there longest ago goes first."""
    return last


def by_hits(last: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """The score "hits": who was there least often goes first."""
    return hits


class Order:
    """The order of rows by a score of their last step and their hits.

    Args:
      score: A function of both, `[n]` each; its scores `[n]` are numbers.
      last: `[rows]`; it is the caller's array, which changes.
      hits: `[rows]`, likewise. A row without hits is free, and not in the order.
    """

    def __init__(self, score: Score, last: np.ndarray, hits: np.ndarray):
        self._score, self._last, self._hits = score, last, hits
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
        scores, runs = self._scores_of(rows), self._runs
        low = np.flatnonzero(_up_to((rows, scores), self._limit))
        if not len(low):
            return
        runs.append(_sorted((rows[low], scores[low])))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            runs[-2:] = [self._merged(runs[-2:])]
        if sum(len(x) for x, _ in runs) > _FEW + len(self._hits) // 2:
            self.forget()

    def take(self, count: int, now: int) -> np.ndarray:
        """Takes the lowest rows whose last step is not `now`; there must be enough."""
        stop = 2 * max(count, self._passed) + 64
        while True:
            run = rows, scores = self._merged(
                [(r[:stop], s[:stop]) for r, s in self._runs]
            )
            ends = [(s[stop], r[stop]) for r, s in self._runs if stop < len(r)]
            passed = self._last[rows] == now
            usable = ~passed
            if ends:  # what is beyond these has not been looked at
                usable &= _up_to(run, min(ends))
            usable = np.flatnonzero(usable)[:count]
            if len(usable) == count:
                end = scores[usable[-1]], rows[usable[-1]]
                passed &= _up_to(run, end)
                self._drop(*end)
                if passed.any():
                    self._runs.append((rows[passed], scores[passed]))
                return rows[usable]
            if ends:
                stop *= 4
            else:
                self._sort(count, now)

    def _merged(self, runs: Sequence[_Run]) -> _Run:
        """The entries of runs whose score is as it was, sorted, each once."""
        if not runs:
            return np.zeros(0, np.int32), np.zeros(0)
        rows, scores = (np.concatenate(x) for x in zip(*runs, strict=True))
        used = self._hits[rows] > 0  # a free row has no score
        rows, scores = rows[used], scores[used]
        valid = self._scores_of(rows) == scores
        rows, scores = rows[valid], scores[valid]
        return (rows, scores) if len(runs) == 1 else _sorted((rows, scores))

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
        rows = np.flatnonzero(self._hits).astype(np.int32)
        scores = self._scores_of(rows)
        usable = self._last[rows] != now
        movable, low = rows[usable], scores[usable]
        assert len(movable) >= count
        size = max(count, len(movable) // _SHARE, _FEW)
        if size < len(movable):
            most = np.partition(low, size - 1)[size - 1]
            ties = movable[low == most][: size - np.count_nonzero(low < most)]
            kept = _up_to((rows, scores), (most, ties[-1]))
            rows, scores = rows[kept], scores[kept]
        by = np.argsort(scores, kind="stable")
        self._runs = [(rows[by], scores[by])]
        self._limit = scores[by[-1]], rows[by[-1]]

    def _scores_of(self, rows: np.ndarray) -> np.ndarray:
        if not len(rows):  # which not every function takes
            return np.zeros(0)
        scores = np.asarray(self._score(self._last[rows], self._hits[rows]))
        if scores.shape != rows.shape or scores.dtype.kind not in "iufb":
            raise ValueError(
                "Vocabulary needs a score that returns a number for each of its "
                f"{len(rows)} rows, got an array of {scores.dtype} of shape "
                f"{scores.shape}. It gets arrays: use NumPy's functions."
            )
        if scores.dtype.kind == "f" and np.isnan(scores).any():
            raise ValueError(
                "Vocabulary needs scores that can be ordered, got NaN from score(last, "
                "hits). last is 0 or more, and hits are 1 or more."
            )
        return scores


def _sorted(run: _Run) -> _Run:
    """The entries in their order, each once."""
    rows, scores = run
    by = np.lexsort(run)
    rows, scores = rows[by], scores[by]
    once = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
    return rows[once], scores[once]


def _up_to(run: _Run, entry: tuple[Any, Any]) -> np.ndarray:
    (rows, scores), (score, row) = run, entry
    return (scores < score) | ((scores == score) & (rows <= row))
