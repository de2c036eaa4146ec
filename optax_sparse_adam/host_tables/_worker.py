"""A thread beside the steps of a run, for which an interrupt lets nobody wait for ever.

Problem: where a KeyboardInterrupt came inside of `concurrent.futures`, the next call
waited for ever. Cause: its locks, as those of `threading.Condition`, are taken by
functions of Python, and an interrupt that comes before these return leaves them taken.
Remedy: a queue and a lock that are written in C, a flag, and a thread of `_thread`,
which waits for nobody when it starts. Safe: the flag is set before who waits is told,
so a word that an interrupt has lost is not missed; and who waits looks at the flag now
and then. Test:
`test_interrupts_inside_of_locks` in `tests/host_tables/test_loaders.py`.
"""

import _thread
import atexit
import os
import queue
from collections.abc import Callable
from typing import Any

_PATIENCE = 0.2  # seconds until a waiting thread looks at the flag


class Job:
    """What a thread is to do, and what has come of it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self._call: Any = function, args
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_done = False
        self._told = _thread.allocate_lock()
        self._told.acquire()

    def do(self) -> None:
        if self._is_done:  # it was given twice
            return
        function, args = self._call
        try:
            self._value = function(*args)
        except BaseException as error:  # for who asks for the result
            self._error = error
        self._call = None
        self._is_done = True
        self._told.release()

    def wait(self) -> None:
        while not self._is_done:
            self._told.acquire(timeout=_PATIENCE)

    def result(self) -> Any:
        """What the function has returned; raises what it has raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Worker:
    """A thread that does its jobs one after the other. It begins with the first one."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._end = Job(lambda: None, ())
        self._last: Job | None = None
        self._has_begun = False
        self._is_served = _thread.allocate_lock()

    def submit(self, function: Callable[..., Any], *args: Any) -> Job:
        job = self._last = Job(function, args)
        self._give(job)
        return job

    def _give(self, job: Job) -> None:
        self._jobs.put(job)
        if not self._has_begun:
            args = self._jobs, self._end, self._is_served
            _thread.start_new_thread(_work, args)
            self._has_begun = True

    def wait(self) -> None:
        """Until its last job is done, also where an interrupt has ended `submit`."""
        job = self._last
        if job is not None and not job._is_done:
            self._give(job)
            while not (job._is_done or self._end._is_done):
                job._told.acquire(timeout=_PATIENCE)

    def end(self, *, waits: bool = True) -> None:
        """Ends the thread when all is done. May be called twice."""
        self._jobs.put(None)
        if waits and self._has_begun:
            self._end.wait()


_Jobs = queue.SimpleQueue[Job | None]
_threads: dict[Job, _Jobs] = {}  # that have begun, by their ends


def _forget_all() -> None:
    """A child of `fork` has none of these threads, and waits for none."""
    for end in _threads:
        end._is_done = True
    _threads.clear()


if hasattr(os, "register_at_fork"):  # as on all systems that fork
    os.register_at_fork(after_in_child=_forget_all)


def _work(jobs: _Jobs, end: Job, is_served: _thread.LockType) -> None:
    if not is_served.acquire(blocking=False):
        return  # an interrupt at its beginning has made two
    _threads[end] = jobs
    while (job := jobs.get()) is not None:
        job.do()
        del job  # while it waits, it holds no rows
    _threads.pop(end, None)
    end.do()


@atexit.register
def _end_all() -> None:
    """Python ends a thread wherever it is: in the middle of a write, or of JAX."""
    for end, jobs in [*_threads.items()]:
        jobs.put(None)
        end.wait()
