"""Who may use the rows of a trainer: one thread after the other, of one process."""

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any

import jax

# Decorates what transfers rows by NumPy's arrays: a guard is for what nobody asked for.
transfers: contextlib.ContextDecorator = jax.transfer_guard("allow")
_FOLDER = os.path.dirname(__file__) + os.sep


class Access:
    """Of one trainer, or of one `Snapshot`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._is_settled = False
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._drawing = threading.local()

    @property
    def is_of_another_process(self) -> bool:
        return os.getpid() != self._process

    def refuse_another_process(self) -> None:
        if self.is_of_another_process:
            raise RuntimeError(
                "This HostTrainer, or Snapshot, is of the process that forked this "
                "one. Make it after the fork: both would write the same rows, and JAX "
                "cannot go on in a process that was forked."
            )

    def draws(self, code: CodeType | None) -> None:
        """Says that what this code calls in this thread belongs to batches of `run`."""
        self._drawing.code = code

    def refuse_in_batches(self) -> None:
        """Refuses changes while a batch is drawn."""
        code = getattr(self._drawing, "code", None)
        # Two interrupts may have come where one would have taken it back.
        if code and any(x.f_code is code for x, _ in traceback.walk_stack(None)):
            raise RuntimeError(
                "The batches of HostTrainer.run are drawn before the steps of those "
                "that come before, so they may read the trainer and make checkpoints, "
                "but not change it. Change it between two values of run; or draw a "
                "batch by yourself, and pass it to HostTrainer.step."
            )

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """What reads may be called in the middle of this, as all has settled."""
        self._is_settled = True
        try:
            yield
        finally:
            self._is_settled = False

    def alone(self, *, reads: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Waits for what other threads do with this trainer, and then lets them wait.

        After a fork nothing: the thread that has the lock may not be there. Only what
        `reads` may be called by what is `stateful`.

        Raises:
          RuntimeError: In the middle of what the same thread does.
        """
        if self.is_of_another_process:
            return contextlib.nullcontext()
        if self._is_in_use_here and not (reads and self._is_settled):
            raise RuntimeError(
                "A signal's handler, `prepare`, or what a step or a checkpoint has "
                "called, uses this HostTrainer in the middle of it, when rows and "
                "files are of two times. Let the handler say that it was called, as by "
                "a flag, and make the checkpoint between two steps; or let it raise: "
                "nothing is lost."
            )
        return self._lock

    @property
    def _is_in_use_here(self) -> bool:
        """Whether this thread is in the middle of something.

        Then it has the lock; but not only then, as what a debugger raises between two
        instructions leaves a `with` without its end.
        """
        try:
            self._condition.notify(0)  # which the one who has its lock may
        except RuntimeError:
            return False
        # What was called, the handler that has called it, what that has interrupted.
        frames = (x.f_code.co_filename for x, _ in traceback.walk_stack(None))
        is_ours = [name.startswith(_FOLDER) for name in frames]
        return False in is_ours and any(is_ours[is_ours.index(False) :])
