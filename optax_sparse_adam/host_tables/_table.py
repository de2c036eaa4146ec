"""`HostTable`, a leaf of the parameters, and where its rows are kept."""

import dataclasses
import math
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._rows.checks import refuse_masked
from ._compact import Whole
from ._partition import Partition
from ._records import Layout, type_of_file
from ._spread import Spread
from ._store import Memory, Storage, Store, UserStore

_MOST_ROWS = 2**31 - 2


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
        table, for pieces of about a million numbers that depend on the shape alone:
        drawn with a seed of `first`, it is one table for all optimisers. Without, rows
        are zeros, and a file takes no room on the disk until its rows are written.
      storage: An object with the methods of `Storage`.

    Raises:
      TypeError: For a type that is not floating, or that JAX would narrow; for an
        `init` that is no function, or a `storage` without its methods.
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
        try:
            shape = tuple(self.shape)
            right = all(type(x) is not bool and int(x) == x >= 0 for x in shape)
        except (TypeError, ValueError, OverflowError):
            right = False
        if not right or not shape:
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
        if self.init is not None and not callable(self.init):
            raise TypeError(
                "HostTable needs a function `init(first, last)`, got "
                f"{type(self.init).__name__}. Of an array of all rows give "
                "lambda first, last: rows[first:last]."
            )
        methods = (getattr(self.storage, x, None) for x in ("take", "put"))
        if self.storage is not None and not all(map(callable, methods)):
            raise TypeError(
                "HostTable needs a `storage` with take(rows) and put(rows, records), "
                f"got {type(self.storage).__name__}. See Storage."
            )
        object.__setattr__(self, "shape", tuple(map(int, shape)))
        object.__setattr__(self, "dtype", dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "A HostTable is no array: give it to HostTrainer among the parameters, of "
            "which the loss looks rows up; they are then in trainer.params."
        )

    __getitem__ = __array__


def rows_of_init(table: HostTable, name: str, first: int, count: int) -> np.ndarray:
    """What `init` makes of some rows, in the type of the table.

    Raises:
      TypeError: For what are no numbers; for bits that look like numbers.
      ValueError: For rows of another shape.
    """
    assert table.init is not None
    try:
        made = table.init(first, first + count)
    except Exception as error:
        error.add_note(
            f"By `init({first}, {first + count})` of {name}, a function that returns "
            "the rows from the one to before the other."
        )
        raise
    refuse_masked(made, f"`init` of {name}")
    values, dtype = np.asarray(made), table.dtype
    if values.dtype.kind == "V" and values.itemsize == dtype.itemsize:
        values = values.view(dtype)  # as np.savez writes bfloat16
    if values.shape != (count, *table.shape[1:]):
        raise ValueError(
            f"`init` of {name} returned the shape {values.shape} for the rows from "
            f"{first} to before {first + count}, of the shape "
            f"{(count, *table.shape[1:])}."
        )
    if values.dtype.kind == "u" and values.dtype == type_of_file(dtype):
        raise TypeError(
            f"`init` of {name} returned {values.dtype}, which may be numbers, or the "
            f"bits of {dtype}, as a snapshot has them in files of NumPy. Return "
            f'values.view("{dtype}") of bits, values.astype(float) of numbers.'
        )
    is_floating = jnp.issubdtype(values.dtype, jnp.floating)
    if values.dtype.kind not in "biuf" and not is_floating:
        raise TypeError(
            f"`init` of {name} returned numbers of the type {values.dtype}; the table "
            f"has {dtype}."
        )
    return values.astype(dtype)


def tables_among(
    params: Any, spread: Spread
) -> tuple[dict[int, HostTable], dict[int, Whole], Any]:
    """The tables by the index of their leaf, what is known of them, and the tree."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    tables = {i: x for i, (_, x) in enumerate(pairs) if isinstance(x, HostTable)}
    names = {i: jax.tree_util.keystr(pairs[i][0]) or "the table" for i in tables}
    whole = {
        i: Whole(names[i], x.shape, x.dtype, Partition(x.shape[0], spread))
        for i, x in tables.items()
    }
    return tables, whole, treedef


def new_store(
    host: HostTable,
    table: Whole,
    layout: Layout,
    budget: float | None,
    spread: Spread,
) -> Store:
    """Where the rows of a process are kept, neither begun nor opened."""
    name, rows = table.name, table.partition.count
    if host.storage is not None:
        numbers = table.partition.rows_of_table
        return UserStore(host.storage, name, rows, layout, numbers)
    path = file_of(host, spread.process, spread.processes)
    if path is None:
        return Memory(rows, layout)
    from ._file import File  # needs POSIX

    return File(path, name, rows, layout, budget)


def file_of(host: HostTable, process: int, processes: int) -> Path | None:
    """The file of one of so many processes: `rows.bin`, or `rows.bin-0-of-4`."""
    if host.file is None:
        return None
    path = Path(host.file)
    if processes > 1:
        path = path.with_name(f"{path.name}-{process}-of-{processes}")
    # Absolute, as the process may go to another folder; and where a symbolic link
    # leads, which a new file would replace.
    return path.resolve()


def files_of(host: HostTable) -> list[Path]:
    """Those of any number of processes, as far as they are there."""
    if host.file is None:
        return []
    path = Path(host.file)
    parts = re.compile(re.escape(path.name) + "(-[0-9]+-of-[0-9]+)?")
    beside = path.parent.iterdir() if path.parent.exists() else ()
    return [x.resolve() for x in beside if parts.fullmatch(x.name) and x.is_file()]
