"""The last batches of a vocabulary, which can be taken back."""

from collections import deque
from typing import NamedTuple

import numpy as np

from .checkpoint import KIND, STEP
from .contents import Contents
from .store import Changes

_MOST = 8  # batches that `undo` can take back


class History:
    """What the last calls of `assign` have changed; of one set of arrays.

    Attributes:
      count: How many calls there were, without those that were taken back.
    """

    def __init__(self) -> None:
        self._batches: deque[Changes] = deque(maxlen=_MOST)
        self.count = 0

    def note(self, changes: Changes) -> None:
        self._batches.append(changes)
        self.count += 1

    def last(self) -> Changes:
        """The changes of the last batch, for `undo`."""
        if not self._batches:
            raise RuntimeError(
                f"undo takes back the last {_MOST} calls of assign since the "
                "vocabulary was made, restored or grown; there is none left."
            )
        return self._batches[-1]

    def forget(self, changes: Changes) -> None:
        """Drops changes that were taken back, if they are here."""
        if self._batches and self._batches[-1] is changes:
            self._batches.pop()
            self.count -= 1

    def arrays_before(self, contents: Contents, step: int) -> dict[str, np.ndarray]:
        """Copies of the arrays as they were when `step - 1` was the last step."""
        arrays, first = contents.arrays_before(step, reversed(self._batches))
        last, kind = int(arrays["numbers"][STEP]), int(arrays["numbers"][KIND])
        # No call was before. (One without keys, of step 0, leaves the same numbers.)
        is_first = kind == 0 and last == 0 and step != 1
        if is_first and first == step and contents.numbers[KIND]:
            raise ValueError(
                f"arrays_before({step}) cannot tell keys that had rows before the "
                "training from those of a batch that is drawn ahead: both are of step "
                f"{step}. Give the former at the step before, as step 0 of a "
                "HostTrainer(..., steps=1); for the latter, make no checkpoint before "
                "the first step has ended."
            )
        if not (is_first or last == step - 1) or first != step:
            now = int(contents.numbers[STEP])
            raise ValueError(
                f"arrays_before({step}) needs a vocabulary whose last call of assign "
                f"before had the step {step - 1}, got one of the step {last}; the last "
                f"call of all had the step {now}. Call assign once for each batch that "
                "is trained, in order, with the number of steps before it "
                f"(trainer.steps of a HostTrainer), and at most {_MOST} calls ahead of "
                "the steps. What it was before it was restored or grown it does not "
                "know: train first what is drawn. A new run of a vocabulary that has "
                f"keys goes on after its last step: HostTrainer(..., steps={now + 1})."
            )
        return arrays


class LastCall(NamedTuple):
    """The last call of `assign`.

    Attributes:
      history: Of the calls since the vocabulary was made, restored or grown.
      number: How many these are, without those that were taken back.
      step: Its step; -1 if there was none.
      thread: Who has called.
    """

    history: History
    number: int
    step: int
    thread: int
