"""An undo journal: what rows were at the last checkpoint.

A store of rows is written while the process trains. After a kill it holds rows of
several steps, the last of them perhaps in part. The journal brings it back: each row is
written there as it was, before its first change.

    512 bytes    the checkpoint's name; how many bytes rows rely on, and their checksum
    entries      table, number of rows, checksum | rows, int32 | records

The checksum of an entry goes on from that of the entry before, so that the last one is
that of the whole journal: nothing of it can be missing, or of another one, unseen.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._records import WORD, Layout, naming, write_at
from ._store import Ascending, Store

_MAGIC = b"optax_sparse_adam journal 2\n"
_START = 512
_ENTRY = struct.Struct("<4sIQ")  # mark, table, number of rows; then the checksum
_MARK = b"undo"
_HEAD_WORDS = _ENTRY.size // WORD + 1


def _first_checksum(name: str) -> int:
    return zlib.crc32(name.encode())


class Journal:
    """What rows were at a checkpoint, once for each row that has changed.

    Args:
      path: Of a new file, which has the checkpoint's name.
      layouts: The records of each table.
      sizes: How many rows each table has.
      fsync: Whether `commit` waits for the disk.

    Attributes:
      path: The file.
      name: Of the checkpoint.
      end: How many bytes it has, and the checksum of the last entry.
    """

    def __init__(
        self, path: Path, layouts: Sequence[Layout], sizes: Sequence[int], fsync: bool
    ):
        self.path, self.name = path, name_of(path)
        self._layouts, self._fsync = layouts, fsync
        # One bit a row: 37 MB for 300 million rows.
        self._saved = [np.zeros(-(-size // 8), np.uint8) for size in sizes]
        self.end = self._committed = _START, _first_checksum(self.name)
        self._file: Any = path.open("wb", buffering=0)
        try:
            self._write_head()
            self._sync()  # a checkpoint is on the disk as a whole
        except BaseException:
            self.remove()  # half of it keeps a full disk full
            raise

    def append(self, table: int, rows: Ascending, store: Store) -> None:
        """Appends rows that have not changed before; they are in the store still."""
        saved = self._saved[table]
        byte, bit = rows >> 3, np.uint8(1) << (rows & 7).astype(np.uint8)
        is_new = (saved[byte] & bit) == 0
        if not is_new.any():
            return
        new = Ascending(rows[is_new])
        count, words = len(new), self._layouts[table].words
        entry = np.empty(_HEAD_WORDS + count * (1 + words), np.uint32)
        body = entry[_HEAD_WORDS:]
        body[:count] = new.view(np.uint32)
        store.take_into(new, body[count:].reshape(count, words))
        head = _ENTRY.pack(_MARK, table, count)
        length, before = self.end
        checksum = zlib.crc32(body.data, zlib.crc32(head, before))
        entry[:_HEAD_WORDS] = np.frombuffer(
            head + checksum.to_bytes(WORD, "little"), np.uint32
        )
        with naming(self.path):
            write_at(self._file, length, entry)
        # In this order: what is interrupted here is written once more.
        self.end = length + entry.nbytes, checksum
        # Neighbours share a byte: one `or` for each byte.
        byte, bit = byte[is_new], bit[is_new]
        first = np.flatnonzero(np.diff(byte, prepend=-1))
        saved[byte[first]] |= np.bitwise_or.reduceat(bit, first)

    def commit(self) -> None:
        """Comes before any of the rows are changed."""
        if self._committed == self.end:
            return
        # In this order: a head that the disk has without what it speaks of is refused.
        # Entries without their head are brought back.
        if self._fsync:
            self._sync()
        self._write_head()
        self._committed = self.end

    def _write_head(self) -> None:
        text = json.dumps({"name": self.name, "end": self.end}).encode()
        with naming(self.path):
            write_at(self._file, 0, (_MAGIC + text).ljust(_START))

    def _sync(self) -> None:
        with naming(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Ends the journal of a checkpoint to which rows can no longer go back."""
        self.close()
        self.path.unlink(missing_ok=True)


class Undo(NamedTuple):
    """A journal that was found.

    Attributes:
      path: The file.
      ends: The checksum at the end of each entry, by the length up to there.
      entries: Where the rows of each are, the table, and how many.
    """

    path: Path
    ends: dict[int, int]
    entries: list[tuple[int, int, int]]

    @property
    def end(self) -> tuple[int, int]:
        return [*self.ends.items()][-1]

    def rows(self, layouts: Sequence[Layout]) -> Iterator[tuple[int, Any, np.ndarray]]:
        """`(table, rows, records)`, the oldest last."""
        if not self.entries:  # of tables in memory there is no journal
            return
        with self.path.open("rb") as file:
            for place, table, count in reversed(self.entries):
                file.seek(place)
                words = layouts[table].words
                body = np.fromfile(file, np.uint32, count * (1 + words))
                records = body[count:].reshape(count, words)
                yield table, Ascending(body[:count].view(np.int32)), records


def read_journal(path: Path, layouts: Sequence[Layout]) -> Undo:
    """Reads what a journal can bring back, and checks it.

    An entry at the end that is not whole was written when the process was killed: its
    rows have not been changed.

    Raises:
      FileNotFoundError: If there is none.
      ValueError: If it was damaged, or lacks its end.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_START)
        try:
            if not head.startswith(_MAGIC) or len(head) < _START:
                raise ValueError("no journal")
            about = json.loads(head[len(_MAGIC) :])
            if about["name"] != name_of(path):
                raise ValueError("another journal")
            length, checksum = about["end"]
        except (ValueError, TypeError, KeyError):
            length, checksum = -1, 0
        last = _first_checksum(name_of(path))
        undo = Undo(path, {_START: last}, [])
        while len(head := file.read(_HEAD_WORDS * WORD)) == _HEAD_WORDS * WORD:
            mark, table, count = _ENTRY.unpack(head[: _ENTRY.size])
            if mark != _MARK or table >= len(layouts):
                break
            place, row = file.tell(), (1 + layouts[table].words) * WORD
            if count * row > size - place:
                break
            body = file.read(count * row)
            last = zlib.crc32(body, zlib.crc32(head[: _ENTRY.size], last))
            if last != int.from_bytes(head[_ENTRY.size :], "little"):
                break
            undo.entries.append((place, table, count))
            undo.ends[file.tell()] = last
    if undo.ends.get(length) != checksum:
        raise ValueError(
            f"{path} was damaged, or lacks its end: rows that have changed since the "
            "checkpoint cannot be brought back. Restore a copy of the folder, with "
            "what keeps the rows as it was when the copy was made."
        )
    return undo


def name_of(path: Path) -> str:
    return path.name.removeprefix("journal-")
