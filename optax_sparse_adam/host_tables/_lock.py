"""Who has a file: one trainer at a time, and no process that was forked of it.

Problem: a trainer that is killed could not be restored before its children end, as the
workers of a loader. Cause: a `flock` belongs to what was opened, which a child has as
well, until both have closed it. Remedy: the child closes it. Safe, as it may not use
the trainer, and closing takes no lock from its parent. (A mapping keeps a descriptor
that nobody can close: it is not to be of a file with a lock. Record locks of POSIX go
with any close of the file in the process.) Test: `tests/host_tables/test_stores.py`.
"""

import errno
import os
import sys
import weakref
from io import FileIO
from pathlib import Path

if sys.platform != "win32":  # where nobody has run it
    import fcntl

_LOCKED: "weakref.WeakSet[FileIO]" = weakref.WeakSet()


def lock(file: FileIO, path: Path, words: str, *, is_shared: bool = False) -> None:
    """Locks a file until it is closed.

    Args:
      file: Is closed where it cannot be locked.
      path: Of the file.
      words: For errors, what is done and that another one has it open.
      is_shared: Whether others may have it so, too.

    Raises:
      BlockingIOError: If another one has it.
    """
    if sys.platform == "win32":
        return
    _LOCKED.add(file)
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(
            errno.EWOULDBLOCK, f"{words} open; close it first", str(path)
        ) from None


def _close_all() -> None:
    for file in _LOCKED:
        file.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all)
