"""What servers are told: keys that came and went, and batches that were taken back."""

import itertools
from collections import deque
from typing import NamedTuple

import numpy as np

from .checkpoint import KIND, LOST, STEP
from .contents import Contents

_MOST_ENTRIES = 64  # of the oldest, two become one: servers are told more, not less


class _Note(NamedTuple):
    """Batches that were taken back.

    Attributes:
      before: The last step before.
      after: The last step after.
      codes: Whose row has changed hands by it.
      lost: The last step of which tombstones were not kept, of arrays that are gone.
    """

    before: int
    after: int
    codes: np.ndarray
    lost: int


class Servers:
    """For `changed_since`: also whose row has changed hands by `undo` or `restore`.

    A server that has fetched the rows of batches up to step 7 asks with step 7. Where
    these were taken back to step 5, it is told of the keys that they had brought or
    sent away, what they are now, and of all that has changed from step 5 on. So it is
    of what was taken back later: from 5 to 3, say. Some keys are kept, `most`.

    Attributes:
      lost: The last step of which some notes are not kept.
      kind: That of the keys: a vocabulary that is empty again has none.
      is_copy: The vocabulary was restored or copied: its steps may have been those of
        others, too.
    """

    def __init__(self) -> None:
        self._noted: deque[_Note] = deque()
        self.lost, self.kind, self.is_copy = -1, 0, False

    def note(
        self,
        before: np.ndarray,
        after: np.ndarray,
        codes: np.ndarray,
        most: int,
        lost: int = -1,
    ) -> None:
        """Notes codes; `before` and `after` are the `numbers` of the vocabulary."""
        noted = self._noted
        self.kind = int(before[KIND]) or self.kind
        noted.append(_Note(int(before[STEP]), int(after[STEP]), codes, lost))
        if len(noted) > _MOST_ENTRIES:
            a, b = noted.popleft(), noted.popleft()
            first, codes = max(a.before, b.before), np.append(a.codes, b.codes)
            # Who was taken back by the one misses what the other has lost.
            lost = first if a.after <= b.lost else max(a.lost, b.lost)
            noted.appendleft(_Note(first, min(a.after, b.after), codes, lost))
        while sum(len(x.codes) for x in noted) > most:
            self.lost = max(self.lost, noted.popleft().before)

    def changed_since(self, contents: Contents, step: int) -> tuple[np.ndarray, ...]:
        """Codes that have got their row, the rows, and codes that have gone."""
        numbers = contents.numbers
        first, codes, is_taken_back, lost = self._since(step)
        if first <= numbers[LOST] or lost >= 0:
            lost = max(int(numbers[LOST]), lost)
            size = len(contents.arrays.get("gone", ()))
            raise ValueError(
                f"changed_since knows what has gone after step {lost}, as {size} "
                "tombstones are kept, and of batches that were taken back twice as "
                f"many keys as there are rows; got step {step}. Fetch everything from "
                "`arrays`; then ask more often, or make the vocabulary with more "
                "tombstones, where nothing was taken back."
            )
        if self.is_copy and step > numbers[STEP] and not is_taken_back:
            raise ValueError(
                "changed_since needs a step that this vocabulary has seen: it was "
                f"restored or copied, and its last one is {numbers[STEP]}; got {step}. "
                "Of batches that were made elsewhere it knows nothing. Fetch "
                "everything from `arrays`, and ask with its steps from then on."
            )
        return contents.changed_since(first, codes)

    def _since(self, step: int) -> tuple[int, np.ndarray, bool, int]:
        """What whoever has seen this step is told.

        Returns: from which step on, of which codes, whether this step is one of those
        that were taken back, and until which step something is lost that it is not
        told; -1 if nothing is.
        """
        # Whoever has seen it was there before the first one that began at it or later.
        seen = [*itertools.dropwhile(lambda x: x.before < step, self._noted)]
        codes = np.concatenate([np.zeros(0, np.uint64), *(x.codes for x in seen)])
        first, lost = step, self.lost if step <= self.lost else -1
        for note in seen:
            lost = max(lost, note.lost) if first <= note.lost else lost
            first = min(first, note.after)
        return first, np.unique(codes), bool(seen), lost


def changed_codes(
    before: tuple[np.ndarray, ...], after: tuple[np.ndarray, ...]
) -> np.ndarray:
    """Codes of rows that have another one, or none, after.

    Of each `(keys, hits)`, and if given when the keys came to their rows: the same key
    may have gone and come back.
    """
    size = min(len(before[0]), len(after[0]))
    (old, was, *since), (new, now, *again) = (
        (keys[:size], hits[:size] > 0, *(x[:size] for x in times))
        for keys, hits, *times in (before, after)
    )
    differ = (was != now) | (old != new)
    for a, b in zip(since, again, strict=True):
        differ |= a != b
    return np.concatenate([old[differ & was], new[differ & now]])
