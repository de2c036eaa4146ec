"""The last batches of a vocabulary, which can be taken back."""

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from .checkpoint import KIND, STEP
from .contents import Contents
from .store import Changes

_MOST = 8  # batches that `undo` can take back


class History:
    """What the last calls of `assign` have changed; of one set of arrays.

    Attributes:
      now: Another object after each call, and the one before when it is taken back.
    """

    def __init__(self, now: object = None) -> None:
        self.now = object() if now is None else now
        self._calls: deque[tuple[object, Changes]] = deque()
        self._kept: object = None
        self._keeper: Callable[[], object] = lambda: None

    def note(self, changes: Changes) -> None:
        self._calls.append((self.now, changes))
        self.now = object()
        kept = self._kept if self._keeper() is not None else None
        while len(self._calls) > _MOST and self._calls[0][0] is not kept:
            self._calls.popleft()

    def last(self) -> Changes:
        """The changes of the last batch, for `undo`."""
        if not self._calls:
            raise RuntimeError(
                f"undo takes back the last {_MOST} calls of assign since the "
                "vocabulary was made, restored or grown; there is none left."
            )
        return self._calls[-1][1]

    def forget(self, changes: Changes) -> None:
        """Drops changes that were taken back, if they are here."""
        if self._calls and self._calls[-1][1] is changes:
            self.now = self._calls[-1][0]
            self._calls.pop()

    def keep(self, now: object, keeper: object) -> None:
        """Remembers all calls since what was there then, also if they are many.

        Args:
          now: What `now` was.
          keeper: Who needs them: they are forgotten when it has gone.
        """
        self._kept, self._keeper = now, weakref.ref(keeper)

    def since(self, now: object) -> list[Changes] | None:
        """What was changed since, the last call first; `None` if that is not known."""
        changes: list[Changes] = []
        if now is self.now:
            return changes
        for before, x in reversed([*self._calls]):
            changes.append(x)
            if before is now:
                return changes
        return None

    def arrays_before(self, contents: Contents, step: int) -> dict[str, np.ndarray]:
        """Copies of the arrays as they were when `step - 1` was the last step."""
        arrays, first = contents.arrays_before(
            step, (x for _, x in reversed(self._calls))
        )
        last, kind = int(arrays["numbers"][STEP]), int(arrays["numbers"][KIND])
        # No call was before. (One without keys, of step 0, leaves the same numbers.)
        is_first = kind == 0 and last == 0 and step != 1
        if is_first and first == step and contents.numbers[KIND]:
            raise ValueError(
                f"arrays_before({step}) cannot tell keys that had rows before the "
                "training from those of a batch that is drawn ahead: both are of step "
                f"{step}. Give the former at the step before the first one; for the "
                "latter, make no checkpoint before the first step has ended."
            )
        if not (is_first or last == step - 1) or first != step:
            now = int(contents.numbers[STEP])
            raise ValueError(
                f"arrays_before({step}) needs a vocabulary whose last call of assign "
                f"before had the step {step - 1}, got one of the step {last}; the last "
                f"call of all had the step {now}. Call assign once for each batch that "
                "is trained, in order, with the number of steps before it, and at most "
                f"{_MOST} calls ahead of the steps. What it was before it was restored "
                "or grown it does not know: train first what is drawn. A new run of a "
                f"vocabulary that has keys counts from the step {now + 1}."
            )
        return arrays
