"""A snapshot to serve: parameters as they are now, in files that nobody changes.

    table0.npy, table1.npy  the rows of each table, in NumPy's format: mapped, not read
    snapshot.npz            other parameters, what is `stateful`, what all of it is

It is written by `evaluate` in parts, under another name until it is whole.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ._access import transfers
from ._archive import alone_in, read_archive, write_archive
from ._arguments import begun
from ._between import evaluated
from ._budget import register
from ._checkpoint import data_of, of_bytes, take_types, weak_types
from ._host_rows import HostRows
from ._plan import Plan
from ._records import CHUNK, naming, refuse_other, sync_folder, type_of_file
from ._spread import Spread
from ._stateful import Stateful, checked, restored
from ._store import Ascending, Store

_ARCHIVE, _VERSION = "snapshot.npz", 1


def write_snapshot(host: HostRows, folder: Path) -> None:
    """See `HostTrainer.snapshot`."""
    host.check()
    host.refuse_narrow()
    if host.plan.spread.processes > 1:
        raise NotImplementedError(
            "HostTrainer.snapshot is for one process; of several, each has a part of "
            "the rows: checkpoint, and restore in one process."
        )
    if os.path.lexists(folder):
        raise FileExistsError(
            f"HostTrainer.snapshot writes a new folder, as servers may read an old one;"
            f" {folder} is there. Take another name, such as one with the step."
        )
    host.settle()
    new = folder.with_name(folder.name + ".new")
    if os.path.lexists(new):
        _remove_unfinished(new)
    stateful, more = host.described()
    new.mkdir(parents=True)
    with alone_in(new, "HostTrainer.snapshot", _ARCHIVE):
        try:
            for k, i in enumerate(host.plan.tables):
                _write_table(host, i, new / f"table{k}.npy")
            dense = evaluated(
                host, lambda params: _split(host.plan, params)[1], is_alone=True
            )()
            names = {"name": "", "step": host.steps, "stateful": stateful}
            names["weak"] = weak_types(host)
            arrays = [data_of(x) for x in dense] + more
            write_archive(new, arrays, names | _expected(host), _ARCHIVE)
            os.replace(new, folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    sync_folder(folder.parent)


def _remove_unfinished(new: Path) -> None:
    """Removes what a process that was killed has begun, and nothing else."""
    is_folder = new.is_dir() and not new.is_symlink()
    for x in new.iterdir() if is_folder else [new]:
        # With an archive a snapshot is whole: somebody may have given it this name.
        if not re.fullmatch(r"table\d+\.npy|snapshot\.npz\.new", x.name):
            raise FileExistsError(
                f"HostTrainer.snapshot writes {new} first, and then gives it its name. "
                f"There is {x}, which is no part of a snapshot that was begun and not "
                "finished. Move it, or take another name."
            )
    with alone_in(new, "HostTrainer.snapshot", _ARCHIVE):
        shutil.rmtree(new)


def _split(plan: Plan, params: Any) -> tuple[list[Any], list[Any]]:
    """Tables, and other parameters."""
    leaves = plan.treedef.flatten_up_to(params)
    tables = [leaves[i] for i in plan.tables]
    return tables, [x for i, x in enumerate(leaves) if i not in plan.tables]


def _write_table(host: HostRows, i: int, path: Path) -> None:
    """The rows of a table as they are now, a part at a time."""
    table = host.plan.tables[i]
    rows_of = evaluated(
        host,
        lambda params, ids: host.plan.treedef.flatten_up_to(params)[i][ids],
        is_alone=True,
    )
    total, dtype = table.shape[0], np.dtype(table.dtype)
    size = max(1, min(total, CHUNK // max(1, dtype.itemsize * _width(table.shape))))
    with naming(path), path.open("wb") as file:
        descr = np.lib.format.dtype_to_descr(type_of_file(dtype))
        head = {"descr": descr, "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, head | {"shape": table.shape})
        for first in range(0, total, size):
            part = rows_of(_ids_of_part(first, size, total))
            rows = np.ascontiguousarray(part)[: total - first]
            file.write(rows.view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _ids_of_part(first: int, size: int, total: int) -> np.ndarray:
    """As many for each part, so that one program serves all: the last one ends with
    the same row again and again.
    """
    return np.minimum(first + np.arange(size), total - 1).astype(np.int32)


def _width(shape: Sequence[int]) -> int:
    return int(np.prod(shape[1:], dtype=np.int64))


def _expected(host: HostRows) -> dict[str, Any]:
    """What a snapshot of these parameters says of itself, in the types of JAX."""
    plan = host.plan
    tables = [[x.name, list(x.shape), str(x.dtype)] for x in plan.tables.values()]
    names = plan.names[: plan.num_dense]
    pairs = zip(names, host.dense, strict=True)
    arrays = [[name, list(np.shape(x)), str(x.dtype)] for name, x in pairs]
    return {"version": _VERSION, "tables": tables, "arrays": arrays}


def _mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The rows of a table, to read.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is not as `_write_table` has written it.
    """
    try:
        array = np.load(path, mmap_mode="r")
        if (array.shape, array.dtype) != (shape, type_of_file(dtype)):
            raise ValueError(f"it has {array.dtype}{list(array.shape)}")
    except (EOFError, ValueError) as error:  # NumPy raises both for files that were cut
        raise ValueError(
            f"{path} does not hold {dtype}{list(shape)}, or was damaged: {error}. Take "
            "another snapshot."
        ) from error
    mapping: Any = array.base
    register(mapping)  # a trainer in this process may have a budget
    rows: np.ndarray = array.view(dtype)
    return rows


class _Rows(Store):
    """The rows of a snapshot: to read."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def take_fields(self, rows: Ascending, out: Sequence[np.ndarray]) -> None:
        out[0][: len(rows)] = self.array[rows]


class Snapshot:
    """What `HostTrainer.snapshot` has written, to serve; in any number of processes.

    Tables are mapped: a server reads the rows that it is asked for, and those that all
    servers of a machine read are in memory once.

    Args:
      path: Of the folder.
      params: The parameters as the trainer had them, with a `HostTable` for each table;
        of `HostTable`s and arrays, which may be `jax.ShapeDtypeStruct`s, only shapes
        and types matter.
      stateful: Such as `{"keys": vocabulary}`: each is given what it was at this step.
        Of the names that the trainer had, any.

    Attributes:
      steps: How many steps had been done.
      params: The tree, with read-only arrays of NumPy; tables are mappings of files.

    Raises:
      FileNotFoundError: If there is no snapshot, or another one since it was begun to
        be opened.
      NotImplementedError: In one of several processes of `jax.distributed`.
      TypeError: If what is `stateful` is no dictionary of such things.
      ValueError: If it is one of other parameters, or was damaged; if a name of
        `stateful` is not in it, or one refuses what was saved: those before it have
        been restored then.
    """

    steps: int
    params: Any

    @transfers
    def __init__(
        self, path: Any, params: Any, *, stateful: Mapping[str, Stateful] | None = None
    ):
        # What a link leads to, for all files: it may be set to another one meanwhile.
        folder, parts = Path(path).resolve(), checked("Snapshot", stateful)
        if (count := jax.process_count()) > 1:
            raise NotImplementedError(
                f"Snapshot got one of {count} processes of jax.distributed. Each "
                "server reads a snapshot by itself: start it without "
                "jax.distributed.initialize."
            )
        if not (folder / _ARCHIVE).exists():
            raise FileNotFoundError(f"There is no snapshot in {folder}.")
        opened = folder.stat()
        params = jax.tree.map(begun, params)
        plan = Plan(optax.identity(), params, Spread())
        self._rows = HostRows(plan)
        about, held = read_archive(folder / _ARCHIVE)
        words = f"{folder} is a snapshot of other parameters"
        refuse_other(words, about, _expected(self._rows))
        take_types(self._rows, about)
        tables = []
        for k, table in enumerate(plan.tables.values()):
            tables.append(_mapped(folder / f"table{k}.npy", table.shape, table.dtype))
            self._rows.stores.append(_Rows(tables[-1]))
        if not os.path.samestat(opened, folder.stat()):
            raise FileNotFoundError(
                f"The snapshot in {folder} was replaced while it was opened: its files "
                "are of two times. Open it again. To be sure, give each a name of its "
                "own, and the newest a link, which is followed once."
            )
        self._rows.rest = [
            of_bytes(x, like) for x, like in zip(held, self._rows.rest, strict=False)
        ]
        self._rows.steps = self.steps = about["step"]
        dense = [np.asarray(data_of(x)) for x in self._rows.rest]
        leaves = iter(dense), iter(tables)
        self.params = plan.treedef.unflatten(
            next(leaves[i in plan.tables]) for i in range(plan.treedef.num_leaves)
        )
        restored(folder, parts, about["stateful"], held[len(dense) :], some=True)

    def evaluate(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun(params, *args)`, as `HostTrainer.evaluate`, on rows of the same bits.

        What is computed of rows of `exact_adam` may differ by their rounding: a trainer
        brings them up to date in the program of `fun`, where XLA may keep more bits of
        a row in bfloat16 than the files have.

        Args:
          fun: Any function that JAX can trace; what it returns may not hold a table.

        Returns:
          A function of the further arguments, of what `fun` returns. Keep it: it is
          compiled once, and what is no array of JAX is that of its first call.

        Raises:
          TypeError: If `fun` is no function.
        """
        return evaluated(self._rows, fun)
