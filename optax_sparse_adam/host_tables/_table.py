"""`HostTable`, a leaf of the parameters, and where its rows are kept."""

import dataclasses
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ._compact import Whole
from ._records import Layout

_MOST_ROWS = 2**31 - 2


class Storage(Protocol):
    """Keeps the records of a table: any engine, by two methods.

    A record is a row of the parameter and the optimiser's state of that row, in words
    of 32 bits; how many words depends on the optimiser. If there is a method `flush()`,
    `checkpoint` calls it before it says that a checkpoint is there.
    """

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Records `[k, words]`, uint32, of rows `[k]`, integers, ascending, distinct.

        Every row is put once before any is taken.
        """

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Keeps records `[k, words]`, of which it may be the owner from now on."""


@dataclasses.dataclass(frozen=True, eq=False)
class HostTable:
    """A table in host memory, in a file, or in a storage of your own.

    It stands for an array among the parameters. Its rows, and the optimiser's state of
    these rows, are kept by the `HostTrainer` that gets it; it has no array itself.

    Args:
      shape: `(rows, *row)`.
      dtype: Of the parameter: a floating type.
      file: A path, for a table in a file, which `HostTrainer` makes and
        `HostTrainer.restore` opens. Without `file` and `storage` it is in memory.
      init: `init(first, last)` returns the rows from `first` to before `last` of a new
        table. Without, they are zeros, and a file takes no room on the disk until its
        rows are written.
      storage: An object with the methods of `Storage`.

    Raises:
      TypeError: For a type that is not floating, or that JAX would narrow.
      ValueError: For no rows, or 2,147,483,647 and more of them; for both `file`
        and `storage`.

    Examples:
      >>> from optax_sparse_adam import host_tables as host
      >>> host.HostTable((300_000_000, 64), "bfloat16", file="memory.bin").dtype
      dtype(bfloat16)
    """

    shape: tuple[int, ...]
    dtype: Any = "float32"
    file: str | PathLike[str] | None = None
    init: Callable[[int, int], Any] | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        if not shape or any(type(x) is bool or x != int(x) or x < 0 for x in shape):
            raise ValueError(
                f"HostTable needs a shape (rows, *row) of integers, got {self.shape!r}."
            )
        if 0 in shape[1:]:
            raise ValueError(f"HostTable has rows of at least one number, got {shape}.")
        if not 0 < shape[0] <= _MOST_ROWS:
            raise ValueError(
                f"HostTable has at least one row and at most {_MOST_ROWS:,}, as ids "
                f"are int32; got {int(shape[0]):,}. Make several tables of a larger "
                "one, and look up `table_k[id // k]`."
            )
        dtype = jnp.dtype(self.dtype)
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 8:
            raise TypeError(
                f"HostTable trains floating types of 8 bits or more, got {dtype}. "
                "Pass what is not trained to the loss as an argument."
            )
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(
                f"HostTable got {dtype}, which JAX computes in as "
                f"{jax.dtypes.canonicalize_dtype(dtype)}: pass that type, or call "
                "jax.config.update('jax_enable_x64', True)."
            )
        if self.file is not None and self.storage is not None:
            raise ValueError("HostTable takes `file` or `storage`, got both.")
        if self.file is not None and not Path(self.file).name:
            raise ValueError(f"HostTable needs the path of a file, got {self.file!r}.")
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "dtype", dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "A HostTable is no array: give it to HostTrainer among the parameters; "
            "its rows are then in trainer.params."
        )


def tables_among(params: Any) -> tuple[dict[int, HostTable], dict[int, Whole], Any]:
    """The tables by the index of their leaf, what is known of them, and the tree."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    tables = {i: x for i, (_, x) in enumerate(pairs) if isinstance(x, HostTable)}
    names = {i: jax.tree_util.keystr(pairs[i][0]) or "the table" for i in tables}
    whole = {i: Whole(names[i], x.shape, x.dtype) for i, x in tables.items()}
    return tables, whole, treedef


class Memory:
    """Records in memory.

    Attributes:
      records: `[rows, words]`, uint32.
    """

    def __init__(self, rows: int, layout: Layout):
        self.records = np.zeros((rows, layout.words), np.uint32)
        self._record = layout.record

    @property
    def _rows(self) -> np.ndarray:
        rows: np.ndarray = self.records.view(self._record)[:, 0]
        return rows

    def take(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), self.records.shape[1]), np.uint32)
        self.take_into(rows, out)
        return out

    def take_into(self, rows: np.ndarray, out: np.ndarray) -> None:
        """`take`, into the first rows of an array."""
        # With a mode other than "raise", `take` needs no buffer of its own.
        view = out.view(self._record)[: len(rows), 0]
        np.take(self._rows, rows, out=view, mode="clip")

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        values = np.ascontiguousarray(records).view(self._record)[:, 0]
        np.put(self._rows, rows, values, mode="clip")

    def begin(self, pieces: Iterable[tuple[int, np.ndarray]]) -> None:
        """Begins the rows: records, and the number of the first one, in pieces."""
        for first, records in pieces:
            self.records[first : first + len(records)] = records

    def close(self) -> None:
        pass


def new_storage(
    host: HostTable, name: str, layout: Layout, budget: float | None
) -> Any:
    """Where a table is kept, neither begun nor opened."""
    if host.storage is not None:
        return host.storage
    if host.file is None:
        return Memory(host.shape[0], layout)
    from ._file import File  # needs POSIX

    # Absolute, as the process may go to another folder.
    return File(Path(host.file).absolute(), name, host.shape[0], layout, budget)


def views_of(storage: Any, layout: Layout, whole: Whole) -> list[Any]:
    """What the user sees of each field: arrays that are read-only."""
    numbers = range(len(layout.fields))
    if not isinstance(storage, Memory):
        return [View(storage, layout, n, whole.shape[0]) for n in numbers]
    views = [layout.view(storage.records, n) for n in numbers]
    for x in views:
        x.flags.writeable = False
    return views


class View:
    """A field of a storage of the user's own; its rows are taken when asked for."""

    def __init__(self, storage: Storage, layout: Layout, number: int, rows: int):
        field = layout.fields[number]
        self.shape, self.dtype = (rows, *field.shape), field.dtype
        self._take = lambda ids: layout.view(storage.take(ids), number)

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
        taken: np.ndarray = self._take(unique)[places.reshape(rows.shape)]
        return taken

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self[:], dtype)
