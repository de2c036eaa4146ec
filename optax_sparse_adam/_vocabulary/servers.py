"""What servers are told: keys that came and went, and batches that were taken back."""

import itertools
from collections import deque

import numpy as np

from .checkpoint import KIND, LOST, STEP
from .contents import Contents

_MOST_ENTRIES = 64  # of the oldest, two become one: servers are told more, not less


class Servers:
    """For `changed_since`: also whose row has changed hands by `undo` or `restore`.

    A server that has fetched the rows of batches up to step 7 asks with step 7. Where
    these were taken back to step 5, it is told of the keys that they had brought or
    sent away, what they are now, and of all that has changed from step 5 on. So it is
    of what was taken back later: from 5 to 3, say. Some keys are kept, `most`.

    Attributes:
      lost: The last step of which some are not kept.
      kind: That of the keys: a vocabulary that is empty again has none.
      is_copy: The vocabulary was restored or copied: its steps may have been those of
        others, too.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[int, int, np.ndarray]] = deque()
        self.lost, self.kind, self.is_copy = -1, 0, False

    def note(
        self, before: np.ndarray, after: np.ndarray, codes: np.ndarray, most: int
    ) -> None:
        """Notes codes; `before` and `after` are the `numbers` of the vocabulary."""
        noted = self._noted
        self.kind = int(before[KIND]) or self.kind
        noted.append((int(before[STEP]), int(after[STEP]), codes))
        if len(noted) > _MOST_ENTRIES:
            (a, to_a, of_a), (b, to_b, of_b) = noted.popleft(), noted.popleft()
            noted.appendleft((max(a, b), min(to_a, to_b), np.append(of_a, of_b)))
        while sum(len(codes) for *_, codes in noted) > most:
            self.lost = max(self.lost, noted.popleft()[0])

    def begin_again(self, lost: int) -> None:
        """Takes up arrays that were saved; here tombstones until `lost` are lost."""
        self.lost, self.is_copy = max(self.lost, lost), True

    def changed_since(self, contents: Contents, step: int) -> tuple[np.ndarray, ...]:
        """Codes that have got their row, the rows, and codes that have gone."""
        numbers = contents.numbers
        first, codes, is_taken_back = self._since(step)
        lost = max(int(numbers[LOST]), self.lost)
        if first <= numbers[LOST] or step <= self.lost:
            size = len(contents.arrays.get("gone", ()))
            raise ValueError(
                f"changed_since knows what has gone after step {lost}, as {size} "
                f"tombstones are kept; got step {step}. Fetch everything from "
                "`arrays`; then ask more often, or make the vocabulary with more "
                "tombstones."
            )
        if self.is_copy and step > numbers[STEP] and not is_taken_back:
            raise ValueError(
                "changed_since needs a step that this vocabulary has seen: it was "
                f"restored or copied, and its last one is {numbers[STEP]}; got {step}. "
                "Of batches that were made elsewhere it knows nothing. Fetch "
                "everything from `arrays`, and ask with its steps from then on."
            )
        return contents.changed_since(first, codes)

    def _since(self, step: int) -> tuple[int, np.ndarray, bool]:
        """What whoever has seen this step is told.

        Returns: from which step on, of which codes, and whether this step is one of
        those that were taken back.
        """
        # Whoever has seen it was there before the first one that began at it or later.
        seen = [*itertools.dropwhile(lambda x: x[0] < step, self._noted)]
        codes = np.concatenate([np.zeros(0, np.uint64), *(x[2] for x in seen)])
        return min([step, *(x[1] for x in seen)]), np.unique(codes), bool(seen)


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
