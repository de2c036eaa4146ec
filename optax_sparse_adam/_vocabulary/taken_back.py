"""Keys of batches that were taken back, for servers that have seen these batches."""

from collections import deque

import numpy as np

from .checkpoint import KIND, STEP


class TakenBack:
    """For `changed_since`: whose row has changed hands by `undo` or `restore`.

    A server that has fetched the rows of batches up to step 7 asks with step 7. Where
    these were taken back to step 5, it is told of the keys that they had brought or
    sent away, what they are now, and of all that has changed from step 5 on. Twice as
    many keys are kept as there are rows; `lost` is the last step without them. `kind`
    is that of the keys: a vocabulary that is empty again has none.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[int, int, np.ndarray]] = deque()
        self.lost, self.kind = -1, 0

    def note(
        self, before: np.ndarray, after: np.ndarray, codes: np.ndarray, most: int
    ) -> None:
        """Notes codes; `before` and `after` are the `numbers` of the vocabulary."""
        step, back_to = int(before[STEP]), int(after[STEP])
        self.kind = int(before[KIND]) or self.kind
        if len(codes):
            self._noted.append((step, back_to, codes))
        while sum(len(codes) for *_, codes in self._noted) > most:
            self.lost = max(self.lost, self._noted.popleft()[0])

    def since(self, step: int) -> tuple[int, np.ndarray]:
        """From which step on whoever has seen this one is told, and of which codes."""
        seen = [x for x in self._noted if x[0] >= step]
        codes = np.concatenate([np.zeros(0, np.uint64), *(x[2] for x in seen)])
        return min([step, *(x[1] for x in seen)]), np.unique(codes)


def changed_codes(
    before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Codes of rows that have another one, or none, after: of `(keys, hits)` each."""
    size = min(len(before[0]), len(after[0]))
    (old, was), (new, now) = (
        (x[:size], hits[:size] > 0) for x, hits in (before, after)
    )
    differ = (was | now) & ((was != now) | (old != new))
    return np.concatenate([old[differ & was], new[differ & now]])
