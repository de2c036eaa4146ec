"""Locks of vocabularies in a process that is made by `os.fork`.

Problem: a child has the locks that other threads of its parent held, and nobody to give
them back: `find` in the child of a parent that was in `assign` would wait for ever.
Cause: `fork` copies memory, and one thread only. Remedy: a fork waits until no batch is
half done, by taking the lock of each vocabulary, and the child gets new locks. Safe, as
`logging` does so, too. Test: `tests/vocabulary/test_forks.py`.
"""

import os
import threading
import weakref
from typing import Any

_ALL: "weakref.WeakSet[Any]" = weakref.WeakSet()
_LOCK = threading.RLock()  # of `_ALL` and `_held`
_held: list[tuple[Any, Any]] = []  # vocabularies and their locks, while it forks


def survives_forks(vocabulary: Any) -> None:
    with _LOCK:
        _ALL.add(vocabulary)


def _before() -> None:
    _LOCK.acquire()
    for vocabulary in list(_ALL):
        lock = vocabulary._lock
        lock.acquire()
        _held.append((vocabulary, lock))


def _after_in_parent() -> None:
    while _held:
        _held.pop()[1].release()
    _LOCK.release()


def _after_in_child() -> None:
    global _LOCK
    for vocabulary, _ in _held:
        vocabulary._changing, vocabulary._lock = threading.Lock(), threading.RLock()
    _held.clear()
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
