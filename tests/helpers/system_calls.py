"""What a process leaves when it is killed, or interrupted, at any of its system calls.

Calls that put records are among them: into mapped memory, by the library or by NumPy.
`Snapshots` copies a folder before each call of a program, and in the middle of each
write: what a process that is killed there leaves on the disk, as pages that were
written stay. `interrupted` raises a KeyboardInterrupt at one of them.
"""

import contextlib
import hashlib
import os
import shutil
import sys

import jax

from optax_sparse_adam.host_tables import _file, _journal
from optax_sparse_adam.host_tables._store import Memory
from optax_sparse_adam.native import _records

# What they call is no function of C to the interpreter: a pointer, or an assignment.
_PUTS = {x.__code__ for x in (_records.put, _records.put_fields)}
_JAX = os.path.dirname(jax.__file__)
_MODULES = {"posix", "io", "_io", "mmap", "fcntl"}


def is_system_call(function):
    """Whether a C function reaches the system."""
    owner = getattr(function, "__self__", None)
    modules = {getattr(function, "__module__", None), type(owner).__module__}
    return bool(_MODULES & modules)


def _is_of_jax(frame):
    """Whether JAX calls it, whose C++ may end the process at what is raised there."""
    while frame is not None and not frame.f_code.co_filename.startswith(_JAX):
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def at_each_call(see):
    """Calls `see(is_put)` before each system call of a thread, and after each put."""

    def profile(frame, event, function):
        is_put = event in ("call", "return") and frame.f_code in _PUTS
        is_call = is_put or (event == "c_call" and is_system_call(function))
        if is_call and not _is_of_jax(frame):
            sys.setprofile(None)  # what `see` calls is not seen
            see(is_put)
            sys.setprofile(profile)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def interrupted(number):
    """Raises a KeyboardInterrupt at a system call; yields of each whether it puts."""
    calls = []

    def see(is_put):
        calls.append(is_put)
        if len(calls) == number:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), at_each_call(see):
        yield calls


@contextlib.contextmanager
def interrupted_at_line(number, *modules, error=KeyboardInterrupt):
    """Raises this error before a line of some modules, counted as they run.

    Yields a list: how many lines there were, and where it was raised, if it was.
    """
    lines, files = [0], {x.__file__ for x in modules}

    def in_frame(frame, event, _):
        if event == "line":
            lines[0] += 1
            if lines[0] == number:
                lines.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
                sys.settrace(None)
                raise error
        return in_frame

    def trace(frame, *_):
        return in_frame if frame.f_code.co_filename in files else None

    sys.settrace(trace)
    try:
        yield lines
    except error as raised:
        # For CPython some lines are in no `with`: what a trace function raises there
        # does not leave it. An interrupt comes at calls and jumps alone, which are in
        # it. What is open there is closed when the frames go.
        raised.__traceback__ = None
    finally:
        sys.settrace(None)


def content_of(folder):
    """A digest of the names and the bytes of the files of a folder."""
    content = hashlib.sha256()
    for x in sorted(x for x in folder.rglob("*") if x.is_file()):
        data = x.read_bytes()
        content.update(f"{x.relative_to(folder)} {len(data)} ".encode() + data)
    return content.digest()


class Snapshots:
    """All different contents that a folder has while something runs.

    Attributes:
      folders: Copies of it, each with another content.
      calls: How many system calls there were.
    """

    def __init__(self, folder, copies):
        self.folder, self.copies = folder, copies
        self.folders, self.calls, self._seen = [], 0, set()

    def take(self, is_put=False):
        self.calls += 1
        content = content_of(self.folder)
        if content not in self._seen:
            self._seen.add(content)
            self.folders.append(self.copies / str(len(self.folders)))
            shutil.copytree(self.folder, self.folders[-1])

    @contextlib.contextmanager
    def taken(self, monkeypatch):
        put, write_at = Memory.put, _journal.write_at
        put_fields = Memory.put_fields

        # Some threads of the library may be done: each second row, and then the first
        # half as well.
        def half_put(store, rows, records):
            for part in (slice(None, None, 2), slice(len(rows) // 2)):
                put(store, rows[part], records[part])
                self.take()
            put(store, rows, records)

        def half_put_fields(store, rows, arrays):
            for part in (slice(None, None, 2), slice(len(rows) // 2)):
                put_fields(store, rows[part], [x[part].copy() for x in arrays])
                self.take()
            put_fields(store, rows, arrays)

        def half_write(file, place, data):
            data = memoryview(data).cast("B")
            write_at(file, place, data[: len(data) // 2])
            self.take()
            write_at(file, place, data)

        with monkeypatch.context() as patch, at_each_call(self.take):
            patch.setattr(Memory, "put", half_put)
            patch.setattr(Memory, "put_fields", half_put_fields)
            patch.setattr(_journal, "write_at", half_write)
            yield self
        # A mark lies in one sector of a disk, and is written whole.
        assert _file.write_at is write_at
        self.take()
