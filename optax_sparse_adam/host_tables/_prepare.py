"""What `prepare` makes of a batch for its step, and what vocabularies see of it.

Batches are drawn before the steps of those before them, and some are never trained.
What `prepare` has let a `Vocabulary` see of those is taken back, call by call:

    step        4      5      6
    prepared    a      b      c      marks: what the vocabularies were before each
    trained     a                    then `break`: back to the mark of 5

A mark is an object that a vocabulary has until the next call of `assign`, and again
when that is undone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .._vocabulary.results import FreshRows
from .._vocabulary.vocabulary import Vocabulary
from ._reset import BatchWithReset
from ._stateful import Stateful

Prepare = Callable[..., Any]
Mark = Mapping[str, object]


def as_batch(item: Any) -> Any:
    """What is neither a tuple nor rows and a batch is the one argument."""
    return item if isinstance(item, tuple | BatchWithReset) else (item,)


class Preparation:
    """Calls `prepare` for each batch, and its vocabularies follow the steps.

    Args:
      prepare: The user's, or `None`: then a batch is what was drawn.
      stateful: What is saved with a trainer, by name; of it the vocabularies.
    """

    def __init__(self, prepare: Prepare | None, stateful: Mapping[str, Stateful]):
        if prepare is not None and not callable(prepare):
            raise TypeError(
                "HostTrainer needs `prepare`, a function of the number of a step and "
                f"what was drawn for it, got {prepare!r}."
            )
        self._prepare, self._stateful = prepare, stateful
        self._vocabs: dict[str, Vocabulary] = {
            name: x for name, x in stateful.items() if isinstance(x, Vocabulary)
        }
        self._marks: dict[int, Mark] = {}
        # An exception may have come while they change.
        self._changes = False

    def begin(self, step: int) -> None:
        """Comes when the trainer and what is `stateful` are as they begin."""
        self._marks = {step: self._now()}
        self._keep(self._marks[step])

    def _keep(self, mark: Mark) -> None:
        for name, vocab in self._vocabs.items():
            vocab.history.keep(mark[name], self)

    @property
    def is_by_step(self) -> bool:
        """Whether a batch is another one for another step."""
        return self._prepare is not None

    def _now(self) -> Mark:
        return {name: x.history.now for name, x in self._vocabs.items()}

    def _mark(self, step: int) -> Mark:
        return self._marks[max(x for x in self._marks if x <= step)]

    def batch(
        self, step: int, item: Any, *, done: int, is_by_hand: bool = False
    ) -> Any:
        """The batch of a step, where that of the step before was the last call.

        Args:
          step: Its step.
          item: What was drawn.
          done: How many steps were done.
          is_by_hand: Whether the caller may have assigned its keys.

        Raises:
          ValueError: If a vocabulary has seen other keys than of the steps before; if
            rows are of one that is not saved, beside others that are.
        """
        later = {k: x for k, x in self._marks.items() if k > done}
        self._marks = {done: self._mark(done), **later}
        mark = self._mark(step)
        may_assign = is_by_hand and self._prepare is None
        for name, vocab in self._vocabs.items():
            if vocab.history.now is mark[name]:
                continue
            is_further = vocab.history.since(mark[name]) is not None
            if not (may_assign and is_further and vocab.last_step == step):
                raise ValueError(
                    f"stateful[{name!r}] has changed otherwise than by keys of the "
                    f"batch of step {step}: a checkpoint could not tell whose the rows "
                    "are. Call assign in the function that HostTrainer(..., prepare=) "
                    "gets, and leave undo to the trainer; or, without one, call assign "
                    "right before HostTrainer.step, with its number, trainer.steps. "
                    "Give keys that are known before the training before the trainer "
                    "is made. Take back what was done, by undo; or go on from a "
                    "checkpoint."
                )
        self._changes = True
        if self._prepare is not None:
            self._keep(self._marks[done])
            args = item if isinstance(item, tuple) else (item,)
            made = self._prepare(step, *args)
            if made is None:
                raise TypeError(
                    "`prepare` returns what the loss takes beside the parameters, a "
                    "tuple or the one argument, or a BatchWithReset; got None."
                )
            item = as_batch(made)
            for name, vocab in self._vocabs.items():
                if vocab.history.since(mark[name]) is None:
                    raise ValueError(
                        f"`prepare` has taken back what stateful[{name!r}] had seen of "
                        "batches before, by undo or restore, or has made it grow. Go "
                        "on from a checkpoint."
                    )
        self._refuse_others(item, is_seen=self._now() != mark)
        self._marks[step + 1] = self._now()
        self._changes = False
        return item

    def _refuse_others(self, item: Any, *, is_seen: bool) -> None:
        """Raises for rows of a vocabulary in the place of that which is saved.

        As where a notebook makes it again, and `prepare` takes the new one. Of what is
        `stateful` and no `Vocabulary`, it may be a part.
        """
        ids = item.ids if isinstance(item, BatchWithReset) else None
        fresh = (x for x in jax.tree.leaves(ids) if isinstance(x, FreshRows))
        others = [x.vocabulary for x in fresh if x.vocabulary is not None]
        known = {id(x) for x in self._vocabs.values()}
        may_be_part = is_seen and len(known) < len(self._stateful)
        if known and not may_be_part and any(id(x()) not in known for x in others):
            raise ValueError(
                "Rows that begin again are of a Vocabulary that is not in `stateful`, "
                f"which has {sorted(self._vocabs)}: a checkpoint would have the keys "
                "of another one. Was it made again? Give HostTrainer the one that "
                "assigns, or go on from a checkpoint."
            )

    def settle(self, step: int) -> None:
        """Vocabularies are what they were before this step, if `prepare` changes them.

        Where something else has changed them nothing is done: the next batch says so.
        """
        mark, now = self._mark(step), self._now()
        last = self._marks[max(self._marks)]
        if self._prepare is not None and now != mark:
            marked = [(x, mark[name]) for name, x in self._vocabs.items()]
            is_known = all(x.history.since(now) is not None for x, now in marked)
            if not (is_known and (self._changes or now == last)):
                return
            self._changes = True
            for vocab, before in marked:
                while vocab.history.now is not before:
                    vocab.undo()
        self._marks, self._changes = {step: mark}, False
        self._keep(mark)

    def end(self) -> None:
        """From now on vocabularies remember what `undo` takes back alone."""
        self._keep(dict.fromkeys(self._vocabs))

    def arrays(self, step: int) -> dict[str, Mapping[str, np.ndarray]]:
        """What all that is `stateful` was before this step.

        Raises:
          ValueError: If that is not known any more.
        """
        return {name: self._arrays(name, step) for name in self._stateful}

    def _arrays(self, name: str, step: int) -> Mapping[str, np.ndarray]:
        vocab = self._vocabs.get(name)
        # A subclass may have more to save, by its own method.
        if vocab is None or type(vocab).arrays_before is not Vocabulary.arrays_before:
            return self._stateful[name].arrays_before(step)
        if not self._marks:  # in the checkpoint that a restore makes before it begins
            return vocab.arrays
        arrays = vocab.arrays_at(self._mark(step)[name])
        if arrays is None:
            raise ValueError(
                f"stateful[{name!r}] does not know what it was before step {step}: it "
                "was restored, or taken back by undo, or it has grown while batches "
                "were drawn. Go on from the last checkpoint."
            )
        return arrays
