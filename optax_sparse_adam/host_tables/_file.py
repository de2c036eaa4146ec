"""Records in a file, mapped into memory: the system's page cache is the engine.

    512 bytes       what it belongs to, a `Mark`, as JSON
    to a page end   what it holds, as JSON: fields, rows, its id
    from there on   the records, `[rows, words]`
    last 512 bytes  the mark once more

Both marks are written before rows change. A program that copies the file meanwhile
reads rows of a later time than the first mark, and then the second one, which says so.

Rows are read and written where they are; the system writes pages back by itself. A
process that is killed loses nothing that it wrote: see `_journal` for what is torn.

A mapped page that the system cannot provide ends the process (SIGBUS): where the disk
is full and the file has holes, and where another program has cut the file. Both are
looked for before rows are read or written. Known limits: it is no longer seen what
others do in between; file systems that need room to write where something is already
(btrfs, quotas, copies that share blocks) say nothing; and `fields` are views of the
mapping, which the user reads without any check.
"""

import errno
import json
import mmap
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._budget import give_back, register, rows_between_looks
from ._records import WORD, Layout, naming, refuse_other, sync_folder, write_at
from ._store import Ascending, Mark, Memory

try:
    import resource

    from ._lock import lock
except ImportError as error:  # Windows
    raise ImportError(
        "Tables in files need locks and mappings of POSIX, which this system lacks; "
        "HostTable without `file` keeps a table in memory."
    ) from error

_MAGIC = b"optax_sparse_adam host table 3\n"
_BEGUN = b"optax_sparse_adam begins a host table\n"
_VERSION = 3  # also of what follows
_MARK = 512  # bytes of it, with the first line: a disk writes so many at once
_PAGE = 4096
_DAMAGED = "{path} was damaged: what it says of its rows cannot be read."
# Rows come from the disk if more than one in 64 was waited for: asking for a page takes
# microseconds, waiting for one a tenth of a millisecond or more. A few may be of what
# else the process maps.
_WAITED, _FEW = 64, 8
# Batches that are asked for in advance until one is not, which shows how it is now.
_COLD_FOR = 16


class File(Memory):
    """Records in a file.

    Attributes:
      records: `[rows, words]`, a mapping.
      marks: To which checkpoint its rows can be brought back.
      id: Of the file; a copy has the same.
      budget: Bytes that the process may hold, pages of files included, or `None`.
    """

    id: str

    def __init__(
        self, path: Path, name: str, rows: int, layout: Layout, budget: float | None
    ):
        self.path, self.budget = path, budget
        self.layout, self._words = layout, layout.words
        about = {"version": _VERSION, "rows": rows, "fields": layout.described}
        self._expected: dict[str, Any] = about
        self._name, self._shape = name, (rows, layout.words)
        self._file: Any = None
        self._mmap: Any = None
        self.records: Any = None
        self._is_new = False
        self._cold_for = 0  # so many batches more

    # Begin and open.

    def begin(self, pieces: Iterable[tuple[int, np.ndarray]]) -> None:
        """Makes the file, which says that it is begun until it is whole."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        try:
            number = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"HostTrainer makes a file for {self._name}, but: {error.strerror}",
                str(self.path),
            ) from None
        self._file = os.fdopen(number, "r+b", buffering=0)
        self._lock()
        is_file = stat.S_ISREG(os.fstat(number).st_mode)  # not /dev/null
        if not (is_file and _is_begun(self._file.read(_MARK))):
            self._file.close()
            raise FileExistsError(
                f"HostTrainer begins the table {self._name} in the file {self.path}, "
                "which exists. HostTrainer.restore goes on from a checkpoint; remove "
                "the file to begin again."
            )
        self._is_new = True
        try:
            self.id = uuid.uuid4().hex
            text = json.dumps({"id": self.id} | self._expected).encode()
            self._set_size(text)
            with naming(self.path):
                self._file.truncate(0)  # what was begun and not finished
                write_at(self._file, 0, _BEGUN)
                self._file.truncate(self._size)
                write_at(self._file, _MARK, text)
            # Not by the mapping: where the disk is full, this raises.
            for first, records in pieces:
                place = self._start + first * self._words * WORD
                with naming(self.path):
                    write_at(self._file, place, np.ascontiguousarray(records))
            self.set_mark(Mark())
            sync_folder(self.path.parent)
        except BaseException:
            self.discard()
            raise
        self._map()

    def open(self, *, to_read: bool = False) -> None:
        """The file as it is; to be read only, others may read it as well.

        Raises:
          FileNotFoundError, PermissionError: If it cannot be opened to read and write.
          ValueError: If it is no such file, or another table's or optimiser's.
          BlockingIOError: If another trainer has it.
        """
        try:
            self._file = self.path.open("rb" if to_read else "r+b", buffering=0)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"HostTrainer opens the file of {self._name} to read and write it, "
                f"but: {error.strerror}",
                str(self.path),
            ) from None
        self._lock(is_shared=to_read)
        head = self._file.read(1 << 20)
        if not head.startswith(_MAGIC):
            is_older = head.startswith(_MAGIC[:-3])
            raise ValueError(
                f"{self.path} is "
                + (
                    f"of an earlier version; this one reads version {_VERSION}."
                    if is_older
                    else "no file of a HostTable, or was begun and not finished."
                )
            )
        try:
            first = Mark.read(head[len(_MAGIC) : _MARK])
            text = head[_MARK:].partition(b"\0")[0]
            about = json.loads(text)
            self.id = str(about["id"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(_DAMAGED.format(path=self.path)) from error
        refuse_other(
            f"{self.path} does not hold {self._name} with this optimiser",
            *(about, self._expected),
        )
        self._set_size(text)
        if os.fstat(self._file.fileno()).st_size != self._size:
            raise ValueError(
                f"{self.path} was cut: it should have {self._size:,} bytes."
            )
        self._file.seek(self._second_mark)
        try:
            last = Mark.read(self._file.read(_MARK)[len(_MAGIC) :])
        except ValueError as error:
            raise ValueError(_DAMAGED.format(path=self.path)) from error
        self.marks = first, last
        self._map(mmap.ACCESS_READ if to_read else mmap.ACCESS_DEFAULT)

    def _set_size(self, text: bytes) -> None:
        """Where the rows begin, where they end, and how long the file is."""
        self._start = -(-(_MARK + len(text) + 1) // _PAGE) * _PAGE
        end = self._start + self._shape[0] * self._words * WORD
        self._second_mark = -(-end // _MARK) * _MARK
        self._size = self._second_mark + _MARK

    def _lock(self, *, is_shared: bool = False) -> None:
        words = "Another HostTrainer, or another table of this one, has the file of "
        lock(self._file, self.path, words + self._name, is_shared=is_shared)

    def _map(self, access: int = mmap.ACCESS_DEFAULT) -> None:
        # Opened again: a mapping keeps a descriptor, which the lock is not to be of.
        with self.path.open("rb" if access == mmap.ACCESS_READ else "r+b") as file:
            opened = os.fstat(file.fileno())
            if not os.path.samestat(opened, os.fstat(self._file.fileno())):
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"The file of {self._name} was replaced while it was opened",
                    str(self.path),
                )
            try:
                self._mmap = mmap.mmap(file.fileno(), 0, access=access)
            except OSError as error:
                raise type(error)(
                    error.errno,
                    f"HostTrainer maps the file of {self._name}, which takes "
                    f"{self._size:,} bytes of address space (ulimit -v), but: "
                    f"{error.strerror}",
                    str(self.path),
                ) from None
        register(self._mmap)
        # Single rows are read: no page before or after them.
        self._mmap.madvise(mmap.MADV_RANDOM)
        count = self._shape[0] * self._words
        words = np.frombuffer(self._mmap, np.uint32, count, self._start)
        self.records = words.reshape(self._shape)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # and with it the lock
        # A mapping has the file open as well, and with it its room on the disk where it
        # was removed: it goes with the last view, such as one that the user has.
        self.records = self._mmap = None

    def discard(self) -> None:
        if self._is_new:
            self.path.unlink(missing_ok=True)

    def set_mark(self, mark: Mark) -> None:
        self._stat()  # the second mark would make a file that was cut longer again
        text = (_MAGIC + mark.text).ljust(_MARK)
        with naming(self.path):
            # First the second: what begins like a file of a table has both.
            for place in (self._second_mark, 0):
                write_at(self._file, place, text)
        self.marks = mark, mark

    def archived(self) -> None:
        return None

    # Rows.

    @property
    def is_cold(self) -> bool:
        """Whether rows come from the disk, as far as is known.

        Nobody waits for rows that were asked for in advance, so that waiting for none
        says nothing: it is measured again after some batches, by one not asked for.
        """
        return self._cold_for > 0

    def take_into(self, rows: Ascending, out: np.ndarray) -> None:
        if self._lacks_room(len(rows)):
            self._read(rows, out)
            return
        take = super().take_into
        self._take(rows, lambda rows, part: take(rows, out[part]))

    def take_fields(self, rows: Ascending, out: Sequence[np.ndarray]) -> None:
        if self._lacks_room(len(rows)):
            records = np.empty((len(rows), self._words), np.uint32)
            self._read(rows, records)
            self.layout.unpack(records, out)
            return
        take = super().take_fields
        self._take(rows, lambda rows, part: take(rows, [x[part] for x in out]))

    def _take(self, rows: Ascending, take: Callable[[Ascending, slice], None]) -> None:
        """Reads rows in parts, and sees whether the disk was waited for."""
        self.advise(rows)
        before = _disk_reads()
        for part in self._parts(len(rows)):
            take(Ascending(rows[part]), part)
        waited = _disk_reads() - before
        if waited > _FEW and waited * _WAITED > len(rows):
            self._cold_for = _COLD_FOR
        else:
            self._cold_for = max(0, self._cold_for - 1)

    def _read(self, rows: Ascending, out: np.ndarray) -> None:
        """Without the mapping, which needs room for a hole on some file systems."""
        size = self._words * WORD
        for row, record in zip(rows.tolist(), out, strict=False):
            self._file.seek(self._start + row * size)
            record[:] = np.frombuffer(self._file.read(size), np.uint32)

    def put(self, rows: Ascending, records: np.ndarray) -> None:
        self.make_room(len(rows))
        for part in self._parts(len(rows)):
            super().put(Ascending(rows[part]), records[part])

    def put_fields(self, rows: Ascending, arrays: Sequence[np.ndarray]) -> None:
        self.make_room(len(rows))
        for part in self._parts(len(rows)):
            super().put_fields(Ascending(rows[part]), [x[part] for x in arrays])

    def advise(self, rows: Ascending) -> None:
        """Lets the system read rows that will be taken soon, many at a time.

        Only where rows have come from the disk: for pages in memory a call is waste.
        """
        if not (self.is_cold and len(rows) and hasattr(os, "posix_fadvise")):
            return
        size, fd = self._words * WORD, self._file.fileno()
        first = (self._start + rows.astype(np.int64) * size) // _PAGE
        last = (self._start + (rows.astype(np.int64) + 1) * size - 1) // _PAGE
        # Rows that share pages, or lie in the next one, are one range.
        cuts = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
        starts = first[np.append(0, cuts)]
        ends = last[np.append(cuts - 1, len(last) - 1)]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            length = (end + 1 - start) * _PAGE
            os.posix_fadvise(fd, start * _PAGE, length, os.POSIX_FADV_WILLNEED)

    def flush(self) -> None:
        """Waits until the disk has all that was written.

        Raises:
          FileNotFoundError: If the file is not at its path, from where it is restored.
        """
        opened = os.fstat(self._file.fileno())
        if not self.path.exists() or not os.path.samestat(opened, self.path.stat()):
            raise FileNotFoundError(
                errno.ENOENT,
                f"HostTrainer cannot make a checkpoint: the file of {self._name} has "
                "been deleted, moved or replaced, and nobody could restore it. Its "
                "rows are there until this process ends: trainer.params has them",
                str(self.path),
            )
        self._stat()
        with naming(self.path):
            self._mmap.flush()

    def _parts(self, count: int) -> Iterator[slice]:
        """Slices of a batch, between which pages are given back over the budget."""
        if self.budget is None:
            yield slice(0, count)
            return
        # What the batch is copied to, for the device, has room as well.
        record = self._words * WORD
        budget, step = self.budget - count * record, rows_between_looks(record)
        for first in range(0, count, step):
            give_back(budget)
            yield slice(first, first + step)
        give_back(budget)

    def make_room(self, count: int) -> None:
        if self._lacks_room(count):
            raise OSError(
                errno.ENOSPC,
                f"The disk has no room for rows of {self._name}",
                str(self.path),
            )

    def _stat(self) -> os.stat_result:
        """What the system says of the file.

        Raises:
          OSError: If it was cut.
        """
        opened = os.fstat(self._file.fileno())
        if opened.st_size < self._size:
            raise OSError(
                errno.EIO,
                f"The file of {self._name} was cut by another program while it is "
                f"open: it has {opened.st_size:,} bytes, and had {self._size:,}. Close "
                "the trainer, and restore a copy of the file with that of its folder",
                str(self.path),
            )
        return opened

    def _lacks_room(self, count: int) -> bool:
        """Whether rows in holes of the file may find no room on the disk."""
        opened = self._stat()
        holes = opened.st_size - opened.st_blocks * 512
        if holes <= 0:
            return False
        disk = os.fstatvfs(self._file.fileno())
        needed = count * (2 + self._words * WORD // _PAGE) * _PAGE
        # The last page of the file may be whole on the disk.
        return disk.f_bavail * disk.f_frsize < min(needed, holes + _PAGE)


def remove_if(path: Path, is_left: Callable[[Mark | None], bool]) -> None:
    """Removes a file of a mark of which this is so; `None`: begun and not finished.

    Raises:
      BlockingIOError: If another trainer has it.
    """
    if not path.exists():
        return
    with path.open("rb", buffering=0) as file:
        head = file.read(_MARK)
        try:
            mark = None if _is_begun(head) else Mark.read(head.removeprefix(_MAGIC))
        except ValueError:  # another file, or a damaged one, of which `open` says so
            return
        if is_left(mark):
            lock(
                *(file, path),
                "HostTrainer.restore removes a file that an earlier one has left, and "
                "another HostTrainer has it",
            )
            path.unlink()


def _is_begun(head: bytes) -> bool:
    """Whether a file that begins so was begun and not finished."""
    return not head or head.startswith(_BEGUN)


def _disk_reads() -> int:
    """How many pages were waited for, by any thread: several read the rows."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
