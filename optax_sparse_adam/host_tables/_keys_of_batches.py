"""Whether the keys of batches were given to `Vocabulary.assign` as batches are counted.

A checkpoint tells keys of batches that are drawn and not trained by the steps that
`assign` was given. So a loader gives the keys of each batch once, by its number:

    batch          0  1  2  3
    steps          0  1  2  3   right; 0  2  4  6 (all are drawn ahead) as well
    trainer.steps  0  0  1  2   what a loader of `run` sees: too low at batch 1
    enumerate 1    1  2  3  4   too high at batch 0

Known limits: keys of a batch that the loader then skips, or gives in a thread of its
own, too high.
"""

import threading
from collections.abc import Mapping
from typing import Any

from .._vocabulary.history import LastCall
from .._vocabulary.vocabulary import Vocabulary


class KeysOfBatches:
    """Sees what is assigned from one batch to the next.

    Args:
      stateful: What is saved with a trainer, by name; of it the vocabularies.
    """

    def __init__(self, stateful: Mapping[str, Any]):
        vocabs = {k: x for k, x in stateful.items() if isinstance(x, Vocabulary)}
        self._vocabs: dict[str, Vocabulary] = vocabs
        self._before = self._calls()
        self._number = 0
        # The last batch whose keys were assigned while it was drawn.
        self._taken: dict[str, int] = {}

    def _calls(self) -> dict[str, LastCall]:
        return {name: x.last_call() for name, x in self._vocabs.items()}

    def begin(self, number: int) -> None:
        """Comes before a batch is drawn, also where the one before has raised."""
        calls = self._calls()
        self._note(calls, self._number)
        self._before, self._number = calls, number

    def check(self, number: int) -> None:
        """Comes when a batch was drawn, or is given.

        Raises:
          ValueError: If its keys were assigned by another number, or once more; or if
            those of batches before it were taken back.
        """
        calls, before, taken = self._calls(), self._before, {**self._taken}
        self._note(calls, number)
        self._before, self._number = calls, number
        for name, now in calls.items():
            if now != before[name]:
                _check(name, before[name], now, number, taken.get(name, -1))

    def _note(self, calls: dict[str, LastCall], number: int) -> None:
        for name, now in calls.items():
            if now != self._before[name] and now.step >= number:
                self._taken[name] = number


def _check(name: str, old: LastCall, now: LastCall, number: int, last: int) -> None:
    """Checks what was assigned for one batch.

    Args:
      name: Of the vocabulary.
      old: The last call before.
      now: The last one that there is now.
      number: Of the batch.
      last: The last batch whose keys were assigned while it was drawn, or -1.
    """
    is_same = now.history is old.history
    is_more = is_same and now.number > old.number
    is_here = now.thread == threading.get_ident()
    if is_more and now.step == old.step == number <= last:
        raise ValueError(
            f"stateful[{name!r}] was given the keys of the batch of step {number} "
            "before: that batch was drawn by a run that was left, or by an iterator "
            "that has raised. Its new keys are known now, and their rows would never "
            f"begin. {_remedy(number)}, and draw it again."
        )
    # Since the batch before, as many were taken back as were assigned; or, before this
    # one was drawn, the last one that was trained.
    is_back = is_same and now.number <= old.number and old.step < number
    is_back |= is_more and is_here and old.step < number - 1 <= last
    if is_back and now.step >= number:
        raise ValueError(
            f"stateful[{name!r}] has not the keys of the batch of step {number - 1} "
            "any more, which was trained: they were taken back, by undo or "
            "arrays_before, and would come as new ones, whose rows begin again. Take "
            "back what was drawn and not trained, to arrays_before(trainer.steps). "
            "Here it is too late: restore a checkpoint."
        )
    if is_more and is_here and now.step > number == last:
        raise ValueError(
            f"stateful[{name!r}] was given the keys of the batch of step {number} "
            "before, by a run that was left, and this is another batch: rows of its "
            f"new keys would never begin. {_remedy(number)}, and begin with that "
            "batch. (Or go on with itertools.chain(trainer.drawn, iterator).)"
        )
    is_one = is_more and now.number == old.number + 1 and is_here
    if now.step < number or (is_one and now.step > max(old.step + 1, number)):
        raise ValueError(
            f"stateful[{name!r}] was given the step {now.step} for the keys of the "
            f"batch of step {number}. A loader counts the batches that it gives, from "
            "trainer.steps when it begins (in the middle of run that is less, as "
            "batches are drawn ahead), and calls assign once for each, with [] for one "
            f"without keys. {_remedy(number)}."
        )


def _remedy(number: int) -> str:
    """How keys become those of before this batch."""
    if number == 0:
        return "Make another vocabulary, and another trainer"
    return f"Take keys as they were, vocab.restore(vocab.arrays_before({number}))"
