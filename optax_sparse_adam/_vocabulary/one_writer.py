"""Vocabularies and threads: one changes them, and any number of them reads meanwhile.

Who changes one has its lock, and a second one who tries is refused. Who only finds keys
takes no lock: a number is odd while keys change their places, and another one after it,
so a reader sees that it has to look again. This is a seqlock (Boehm, 2012).

A change that an exception leaves half done is taken back at once. That may be left half
done, too, by a second Ctrl-C: so it is noted before the change begins, and who comes
next ends it first; the number stays odd until then.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from .forks import survives_forks

_TRIES = 4  # after so many a reader waits for its turn
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Writer = TypeVar("_Writer", bound="OneWriter")


class OneWriter:
    """Has locks, which no pickle holds; a fork of the process makes new ones."""

    _changing: threading.Lock
    _lock: threading.RLock
    _turn: int  # of those who change it
    _changer: int  # the thread whose turn it is, or was
    _version: int  # odd while keys change their places
    _take_back: Callable[[], None] | None  # what has been begun, and is not done

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        self._changing, self._lock = threading.Lock(), threading.RLock()
        self._version, self._turn, self._changer = 0, 0, 0
        self._take_back = None
        survives_forks(self)
        return self

    def _ready(self) -> None:
        """Called before a change, with the lock."""

    @contextlib.contextmanager
    def _move(self) -> Iterator[None]:
        """Keys change their places; who reads looks again then."""
        self._version |= 1
        try:
            yield
        finally:
            if self._take_back is None:
                self._version += self._version & 1

    def _end(self) -> None:
        """Takes back what an exception has left half done; not what is being done."""
        if self._take_back is None and self._version % 2 == 0:
            return
        with self._lock:
            mine = self._changer == threading.get_ident()
            if mine and self._changing.locked():  # called by a score, say
                return
            with self._move():
                if self._take_back is not None:
                    self._take_back()
                    self._take_back = None

    def _read(self, read: Callable[[], _Result]) -> _Result:
        """What `read` returns where no key changes its place meanwhile."""
        for _ in range(_TRIES):
            version = self._version
            if version % 2 == 0:
                result = read()
                if self._version == version:
                    return result
        with self._lock:
            self._end()
            return read()


def by_one_thread(
    method: Callable[Concatenate[_Writer, _Args], _Result],
) -> Callable[Concatenate[_Writer, _Args], _Result]:
    """One thread changes. A second one is refused: its turn would be by chance.

    The locks are taken by `with` alone: a KeyboardInterrupt may come after any call,
    and a lock that was taken by one would stay so
    (tests/vocabulary/test_interrupts.py).
    """

    @functools.wraps(method)
    def alone(self: _Writer, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        changing, turn = self._changing, self._turn  # a child of `fork` has others
        if not changing.locked():
            with changing:
                if self._turn == turn:  # else another thread was here in between
                    self._turn += 1
                    with self._lock:
                        self._changer = 0
                        self._end()
                        self._changer = threading.get_ident()
                        self._ready()
                        return method(self, *args, **kwargs)
        raise RuntimeError(
            f"{method.__name__} was called while another thread changes the "
            "vocabulary: which of them is first would be left to chance. Change it "
            "from one thread; find may be called by all."
        )

    return alone
