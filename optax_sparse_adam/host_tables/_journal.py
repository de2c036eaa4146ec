"""An undo journal: what rows were at the last checkpoint.

A file of rows is written while the process trains. After a kill it holds rows of
several steps, the last of them perhaps in part. The journal brings it back: each row is
written there as it was, before its first change.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._records import WORD, Layout

_HEAD = struct.Struct("<4sIQI")  # mark, table, number of rows, checksum of what follows
_MARK = b"undo"


class Journal:
    """What rows were at the last checkpoint, once for each row that has changed.

    Args:
      path: Of a new file.
      sizes: How many rows each table has.
      fsync: Whether `commit` waits for the disk.

    Attributes:
      path: The file.
    """

    def __init__(self, path: Path, sizes: Sequence[int], fsync: bool):
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._fsync, self._end = fsync, 0
        # One bit a row: 37 MB for 300 million rows.
        self._saved = [np.zeros(-(-size // 8), np.uint8) for size in sizes]

    def remember(self, table: int, rows: np.ndarray, storage: Any) -> None:
        """Appends rows that have not changed before; they are in `storage` still."""
        saved = self._saved[table]
        byte, bit = rows >> 3, np.uint8(1) << (rows & 7).astype(np.uint8)
        is_new = (saved[byte] & bit) == 0
        if not is_new.any():
            return
        new = rows[is_new].astype(np.int32)
        body = new.tobytes() + storage.take(new).tobytes()
        head = _HEAD.pack(_MARK, table, len(new), zlib.crc32(body))
        try:
            _write(self._file, head + body)
        except BaseException:
            # Half an entry would end the journal for those after it.
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end += len(head) + len(body)
        np.bitwise_or.at(saved, byte[is_new], bit[is_new])

    def commit(self) -> None:
        """Comes before any of the rows are changed."""
        if self._fsync:
            os.fsync(self._file)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Ends the journal of a checkpoint to which rows can no longer go back."""
        self.close()
        self.path.unlink(missing_ok=True)


def entries(
    path: Path, layouts: Sequence[Layout]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """What a journal holds: `(table, rows, records)`.

    An entry that is not whole is the last: its rows have not been changed.
    """
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            mark, table, count, checksum = _HEAD.unpack(head)
            if mark != _MARK or table >= len(layouts):
                return
            words = layouts[table].words
            body = file.read(count * (1 + words) * WORD)
            if zlib.crc32(body) != checksum:
                return
            rows = np.frombuffer(body, np.int32, count)
            records = np.frombuffer(body, np.uint32, offset=count * WORD)
            yield table, rows, records.reshape(count, words)


def _write(file: Any, data: bytes) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]
