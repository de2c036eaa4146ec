"""Records: a row of a table and all that the optimiser keeps of it, side by side.

    table [N, 64] float32, mu [N, 64] float32, last [N] int32

is one array of words, uint32 `[N, 129]`: one gather and one scatter for all of them,
and mostly one page of a file. 16-bit numbers lie two in a word; a field begins at a
word. Records are for stores; a step gets an array of rows for each field.
"""

import contextlib
import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CHUNK = 1 << 24  # bytes of rows that are mapped at once
WORD = 4  # bytes
# On a full disk, beyond a quota, beyond a limit of the process (ulimit -f).
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Field(NamedTuple):
    """What a record holds of one array.

    Attributes:
      name: The array's path: in the parameters, or in the optimiser's state.
      shape: Of a row.
      dtype: Its type.
      first: The word at which it begins.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    first: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        return -(-self.size * self.dtype.itemsize // WORD)

    @property
    def place(self) -> slice:
        return slice(self.first, self.first + self.words)


class Layout:
    """The fields of a record.

    Attributes:
      fields: The parameter's row, then those of the state.
      words: Length of a record.
    """

    def __init__(self, arrays: Iterable[tuple[str, tuple[int, ...], Any]]):
        self.fields: list[Field] = []
        self.words = 0
        for name, shape, dtype in arrays:
            field = Field(name, tuple(shape), np.dtype(dtype), self.words)
            self.fields.append(field)
            self.words += field.words

    @property
    def described(self) -> list[Any]:
        """The fields as a header says them."""
        return [[x.name, list(x.shape), str(x.dtype)] for x in self.fields]

    @property
    def offsets(self) -> list[int]:
        """Where in a record each field begins, in bytes."""
        return [x.first * WORD for x in self.fields]

    def empty(self, size: int) -> list[np.ndarray]:
        """Arrays `[size, *shape]` for the fields of so many records."""
        return [np.empty((size, *x.shape), x.dtype) for x in self.fields]

    def unpack(self, records: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """The inverse of `pack`, into the first rows of arrays."""
        for number, x in enumerate(out):
            x[: len(records)] = self.view(records, number)

    def view(self, records: np.ndarray, number: int) -> np.ndarray:
        """The array `[n, *shape]` of a field, in the memory of the records."""
        field = self.fields[number]
        values = records[:, field.place].view(field.dtype)[:, : field.size]
        return values.reshape(len(records), *field.shape)

    def pack(self, arrays: Sequence[Any], count: int) -> np.ndarray:
        """Records of the first rows of arrays."""
        records = np.zeros((count, self.words), np.uint32)
        for number, x in enumerate(arrays):
            self.view(records, number)[...] = np.asarray(x)[:count]
        return records


def refuse_other(
    words: str, header: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Raises if a header says something else, with the first difference."""
    for key, here in expected.items():
        there = header.get(key)
        if there == here:
            continue
        if isinstance(here, list) and isinstance(there, list):
            pairs = [*zip_longest(there, here)]
            there, here = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"{words}: {key} are {there!r} in the file, and {here!r} here. Give those "
            "that it was made with. (A table grows in a new HostTrainer, which gets "
            "the `state` of one that was restored.)"
        )


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the system cannot write is said with the file, and with what becomes of it.

    Raises:
      OSError: As the system's, of the same class and number.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(
            error.errno,
            f"{error.strerror}: rows of steps are kept, and written by the next call "
            "for which there is room, while the trainer is open; a table, checkpoint "
            "or snapshot that was begun is given up",
            str(path),
        ) from error


def write_at(file: Any, place: int, data: Any) -> None:
    """Writes all bytes of an array at a place of a file."""
    file.seek(place)
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)


def type_of_file(dtype: Any) -> np.dtype[Any]:
    """Of those types that NumPy does not know, such as bfloat16: that of their bits.

    Some of them say that they are of its kind of floating types, and are not.
    """
    dtype = np.dtype(dtype)
    is_of_numpy = dtype in (np.float16, np.float32, np.float64)
    return dtype if is_of_numpy else np.dtype(f"u{dtype.itemsize}")
