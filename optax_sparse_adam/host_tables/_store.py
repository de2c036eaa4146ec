"""Stores: where the records of a table are kept.

`HostRows` and all around it know one kind of object, a `Store`: rows in memory, in a
file (`_file`), or in a `Storage` of the user's, which is wrapped once. The bytes of
records move in `take_into` and `put` only, and in `take_fields` and `put_fields`, which
take them apart; rows come there `Ascending`.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np

from ..native import _records as native
from ._records import Layout

# Numbers of rows, int32, ascending, distinct and in bounds: as every store gets them.
Ascending = NewType("Ascending", np.ndarray)


def ascending(ids: np.ndarray, num_rows: int) -> Ascending:
    """Those of some ids that are rows, in order, each once."""
    ids = np.sort(ids)
    first, last = np.searchsorted(ids, [0, num_rows])
    ids = ids[first:last]
    is_new = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=is_new[1:])
    return Ascending(ids[is_new].astype(np.int32))


def rows_between(first: int, last: int) -> Ascending:
    return Ascending(np.arange(first, last, dtype=np.int32))


class Mark(NamedTuple):
    """What a store says of itself: to which checkpoint its rows can be brought back.

    Attributes:
      step: Of that checkpoint.
      checkpoint: Its name, or none before the first one.
      journal: How many bytes of its journal there were when rows were last changed, and
        their checksum: a shorter or another journal does not bring them back.
      pending: A checkpoint that may have been made. Then its rows are those of now, as
        none is changed before it is known.
    """

    step: int = 0
    checkpoint: str = ""
    journal: tuple[int, int] = (0, 0)
    pending: str = ""

    @property
    def text(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def read(cls, text: bytes) -> "Mark":
        """The inverse of `text`.

        Raises:
          ValueError: If it is no mark.
        """
        values = json.loads(text)
        kinds = {"step": int, "checkpoint": str, "journal": list, "pending": str}
        is_mark = isinstance(values, dict) and kinds == {
            name: type(x) for name, x in values.items()
        }
        if not is_mark or [*map(type, values["journal"])] != [int, int]:
            raise ValueError("no mark of a checkpoint")
        return cls(**values | {"journal": tuple(values["journal"])})


class Storage(Protocol):
    """Keeps the records of a table: any engine, by two methods.

    A record is a row of the parameter and the optimiser's state of that row, in words
    of 32 bits; how many words depends on the optimiser. Methods are called one at a
    time, but by `HostTrainer.run` in a thread of its own: see what the engine needs,
    such as `check_same_thread=False` of sqlite3. There may be more methods:

    - `flush()` is called by `checkpoint` before it says that a checkpoint is there.
    - `write_mark(mark)` keeps some bytes, and `read_mark()` returns the last ones, or
      `None`: by them `restore` finds out that the records, or the folder of the
      checkpoint, are a copy of another time, or that the storage is an empty one, as of
      a wrong path. Without both, nobody does.
    """

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Records `[k, words]`, uint32, of rows `[k]`, integers, ascending, distinct.

        Every row is put once before any is taken.
        """

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Keeps records `[k, words]`, of which it is the owner from now on."""


class Store:
    """What keeps the records of a table, as the trainer sees it.

    Attributes:
      id: Of this store, for checkpoints, or `None` where it has none.
      marks: What it says of itself: at the place that is read first and at the one that
        is read last, which differ in a copy that was made meanwhile. `()` where it
        cannot.
      begins_with_zeros: Whether rows that are never put are zeros.
      layout: The fields of a record.
    """

    layout: Layout
    id: str | None = None
    marks: tuple[Mark, ...] = ()
    begins_with_zeros = True

    @property
    def is_cold(self) -> bool:
        """Whether rows are waited for, so that `advise` is worth a call."""
        return False

    def begin(self, pieces: Iterable[tuple[int, np.ndarray]]) -> None:
        """Begins the rows: records, and the number of the first one, in pieces."""
        for first, records in pieces:
            self.put(rows_between(first, first + len(records)), records)

    def open(self) -> None:
        """Finds the rows as they were left."""

    def close(self) -> None: ...

    def discard(self) -> None:
        """Removes what it has begun, as another table could not be."""

    def take_into(self, rows: Ascending, out: np.ndarray) -> None:
        """Reads records into the first rows of `out`, `[k, words]`, contiguous."""
        raise NotImplementedError

    def put(self, rows: Ascending, records: np.ndarray) -> None:
        """Writes records `[k, words]`."""
        raise NotImplementedError

    def take_fields(self, rows: Ascending, out: Sequence[np.ndarray]) -> None:
        """Reads records into the first rows of an array for each of their fields."""
        records = np.empty((len(rows), self.layout.words), np.uint32)
        self.take_into(rows, records)
        self.layout.unpack(records, out)

    def put_fields(self, rows: Ascending, arrays: Sequence[np.ndarray]) -> None:
        """Writes records, given as an array `[k, *shape]` for each field."""
        self.put(rows, self.layout.pack(arrays, len(rows)))

    def make_room(self, count: int) -> None:
        """Raises if so many rows cannot be written, before any is."""

    def advise(self, rows: Ascending) -> None:
        """Says which rows will be taken soon."""

    def flush(self) -> None:
        """Waits until what was put is safe."""

    def set_mark(self, mark: Mark) -> None:
        """Keeps a mark, from now on that of `marks`, if it can."""

    def archived(self) -> np.ndarray | None:
        """The records that a checkpoint copies; `None` if the store keeps them."""
        return None

    def restore(self, archived: np.ndarray) -> None:
        """Takes the records back, of which it is the owner."""
        raise NotImplementedError

    def fields(self, layout: Layout) -> list[Any]:
        """What the user sees of each field: an array, or rows that are taken."""
        raise NotImplementedError


class Memory(Store):
    """Records in memory.

    Attributes:
      records: `[rows, words]`, uint32.
    """

    def __init__(self, rows: int, layout: Layout):
        self.records = np.zeros((rows, layout.words), np.uint32)
        self.layout = layout

    def take_into(self, rows: Ascending, out: np.ndarray) -> None:
        native.take(self.records, rows, out[: len(rows)])

    def put(self, rows: Ascending, records: np.ndarray) -> None:
        native.put(self.records, rows, np.ascontiguousarray(records))

    def take_fields(self, rows: Ascending, out: Sequence[np.ndarray]) -> None:
        arrays = [x[: len(rows)] for x in out]
        native.take_fields(self.records, rows, arrays, self.layout.offsets)

    def put_fields(self, rows: Ascending, arrays: Sequence[np.ndarray]) -> None:
        native.put_fields(self.records, rows, arrays, self.layout.offsets)

    def archived(self) -> np.ndarray | None:
        return self.records

    def restore(self, archived: np.ndarray) -> None:
        self.records = archived

    def fields(self, layout: Layout) -> list[Any]:
        views = [layout.view(self.records, n) for n in range(len(layout.fields))]
        for x in views:
            x.flags.writeable = False
        return views


class UserStore(Store):
    """A `Storage` of the user's."""

    begins_with_zeros = False

    def __init__(
        self,
        storage: Storage,
        name: str,
        rows: int,
        layout: Layout,
        numbers: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ):
        self._storage, self._name, self._num_rows = storage, name, rows
        self.layout, self._numbers = layout, numbers
        self._read_mark = getattr(storage, "read_mark", None)
        self._write_mark = getattr(storage, "write_mark", None)
        self.flush = getattr(storage, "flush", self.flush)  # type: ignore[method-assign]

    def begin(self, pieces: Iterable[tuple[int, np.ndarray]]) -> None:
        self.set_mark(Mark())  # that of rows which were here before is none of these
        super().begin(pieces)

    def open(self) -> None:
        if self._read_mark is None or (text := self._read_mark()) is None:
            return
        try:
            self.marks = (Mark.read(bytes(text)),)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"`read_mark` of the storage of {self._name} returned {text!r}, which "
                "is not what `write_mark` got."
            ) from error

    def set_mark(self, mark: Mark) -> None:
        if self._write_mark is not None and self._read_mark is not None:
            self._write_mark(mark.text)
            self.marks = (mark,)

    def take_into(self, rows: Ascending, out: np.ndarray) -> None:
        if len(rows) == 0:
            return
        records = np.asarray(self._storage.take(self._numbers(rows)))
        shape = len(rows), self.layout.words
        if records.shape != shape or records.dtype != np.uint32:
            raise ValueError(
                f"`take` of the storage of {self._name} returned "
                f"{records.dtype}{list(records.shape)} for {len(rows)} rows; it "
                f"returns what was put, uint32{list(shape)}."
            )
        out[: len(rows)] = records

    def put(self, rows: Ascending, records: np.ndarray) -> None:
        if len(rows):
            # Its own: it may keep them, and what is given here may be used again.
            self._storage.put(self._numbers(rows).copy(), np.array(records))

    def fields(self, layout: Layout) -> list[Any]:
        return [
            View(self, layout, n, self._num_rows) for n in range(len(layout.fields))
        ]


class View:
    """A field of a storage of the user's own; its rows are taken when asked for."""

    def __init__(self, store: Store, layout: Layout, number: int, rows: int):
        field = layout.fields[number]
        self.shape, self.dtype = (rows, *field.shape), field.dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self._store, self._layout, self._number = store, layout, number

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Any) -> np.ndarray:
        size = len(self)
        # Of a slice without an array of all rows.
        rows = np.asarray(range(size)[ids] if isinstance(ids, slice) else ids)
        rows = np.arange(size)[rows] if rows.dtype == bool else rows
        if not rows.size:
            return np.zeros((*rows.shape, *self.shape[1:]), self.dtype)
        is_integer = rows.dtype.kind in "iu" and not isinstance(ids, tuple)
        if not is_integer or rows.min() < -size or rows.max() >= size:
            raise IndexError(f"Rows are integers from 0 to {size - 1:,}, got {ids!r}.")
        unique, places = np.unique(rows.astype(int) % size, return_inverse=True)
        records = np.empty((len(unique), self._layout.words), np.uint32)
        self._store.take_into(Ascending(unique.astype(np.int32)), records)
        taken: np.ndarray = self._layout.view(records, self._number)
        return taken[places.reshape(rows.shape)]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self[:], dtype)
