"""Checkpoints: a folder from which a run goes on, killed at whatever moment.

    checkpoint.npz      what has no rows: dense parameters, counts, their moments;
                        the rows of tables in memory, and what is `stateful`: see
                        `_archive`
    journal-<name>      what rows elsewhere were, and no longer are: see `_journal`

Of several processes each has a journal, and an archive of its rows beside that of what
all of them have, which comes to be when all else is there:

    checkpoint.npz      what has no rows
    rows-<name>-<k>     the rows in memory of process k, and what is `stateful` there
    journal-<name>-<k>  what its rows elsewhere were

Which checkpoint is there, and in what order all of it is written, knows `_ledger`.
"""

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ._archive import ARCHIVE, alone_in, name_in, part_name, read_archive, write_archive
from ._arguments import type_of
from ._host_rows import HostRows
from ._journal import Undo, read_journal
from ._records import refuse_other, sync_folder
from ._stateful import Described, restored
from ._store import Mark, Store
from ._together import new_name, together

_VERSION = 2
_SECONDS = 90  # NFS keeps names for 60
_PART = "rows"
# As `part_name` makes them: of one process there is a journal alone.
_OF_A_CHECKPOINT = re.compile(
    f"journal-([0-9a-f]{{32}})(?:-[0-9]+)?|{_PART}-([0-9a-f]{{32}})-[0-9]+"
)


def save(rows: HostRows, folder: Path, removes: str = "") -> None:
    """Makes a checkpoint of what has settled.

    Args:
      rows: Of all tables.
      folder: Of the checkpoint.
      removes: A checkpoint of another number of processes that this one takes over:
        its files are of no use when this one is there.

    Raises:
      BlockingIOError: If another trainer makes one there.
      FileExistsError: If the folder has a checkpoint of another run.
      FileNotFoundError: If another process has another folder.
    """
    ledger, spread, name = rows.ledger, rows.plan.spread, new_name()
    about: dict[str, Any] = {"name": name, "step": rows.steps, "removes": removes}
    about["weak"] = weak_types(rows)
    # A step of another number of rows is another program, and may round otherwise.
    about["sizes"] = [[*key, size] for key, size in rows.sizes.items()]
    shared, in_memory = _rest(rows), _in_memory(rows)
    arrays = [data_of(x) for _, x in shared]
    with contextlib.ExitStack() as end:
        with together("HostTrainer.checkpoint"):
            _make(folder)
            if spread.process == 0:
                end.enter_context(alone_in(folder, "HostTrainer.checkpoint"))
            _refuse_another_run(folder, rows)
            left = _parts_in(folder)
            stateful, more = rows.described()
            of_part: dict[str, Any] = {"stores": [x.id for x in rows.stores]}
            of_part["marked"] = [bool(x.marks) for x in rows.stores]
            of_part["stateful"] = stateful
            held = [*(x for _, x in in_memory), *more]
            end.enter_context(ledger.next(folder, name, rows.steps))
            for store in rows.stores:
                store.flush()
            if spread.processes == 1:
                shared, arrays = [*shared, *in_memory], [*arrays, *held]
                about |= of_part
            else:
                path = part_name(_PART, name, spread.process, spread.processes)
                of_part |= about | _described(rows, in_memory)
                write_archive(folder, held, of_part, path)
                about |= {"processes": spread.processes}
        with together("HostTrainer.checkpoint"):
            if spread.process == 0:
                write_archive(folder, arrays, about | _described(rows, shared))
        with together("HostTrainer.checkpoint"):
            if not _comes_to_be(folder, name):
                raise FileNotFoundError(
                    f"Process 0 has made a checkpoint in {folder}, which process "
                    f"{spread.process} does not see. Give a folder that is one for "
                    "all processes."
                )
            ledger.resolve()
    for old, its_name in left.items() if spread.process == 0 else ():
        # What a process that was killed has left, or others no longer need.
        if its_name != name:
            old.unlink(missing_ok=True)


def _comes_to_be(folder: Path, name: str) -> bool:
    """Whether a checkpoint is seen, on a file system that may show it later."""
    end = time.monotonic() + _SECONDS
    while name_in(folder) != name:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _make(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def _parts_in(folder: Path) -> dict[Path, str]:
    """What is of checkpoints beside archives, and of which."""
    found = ((x, _OF_A_CHECKPOINT.fullmatch(x.name)) for x in folder.iterdir())
    return {path: match[1] or match[2] for path, match in found if match}


def _refuse_another_run(folder: Path, rows: HostRows) -> None:
    rows.ledger.resolve()  # so that it knows all its names
    # Another run's journal would go with its checkpoint, and with it its files.
    if name_in(folder) not in {None, *rows.ledger.names}:
        raise FileExistsError(
            f"There is a checkpoint of another run in {folder}, or one that this run "
            "made before it was restored from another folder. Give it a folder of its "
            "own; or go on with the other one by HostTrainer.restore; or delete the "
            "folder, if it is of no use: the rows of this run do not need it."
        )


class Part(NamedTuple):
    """What a process has written of a checkpoint.

    Attributes:
      name: Of the checkpoint.
      step: Of the checkpoint.
      rest: What has no rows, in bytes.
      stores: What identifies each store, and whether it said of itself what it is.
      records: Of tables in memory, in their order, `[rows, words]`.
      stateful: What an archive says of what is saved with them, and the arrays.
      sizes: As those of `HostRows`.
    """

    name: str
    step: int
    rest: list[np.ndarray]
    stores: list[tuple[Any, bool]]
    records: list[np.ndarray]
    stateful: tuple[Described, list[np.ndarray]]
    sizes: dict[tuple[int, ...], int]


def processes_of(folder: Path) -> int | None:
    """How many have made the checkpoint of a folder, if there is one.

    Raises:
      ValueError: If it is damaged.
    """
    if not (folder / ARCHIVE).exists():
        return None
    return int(read_archive(folder / ARCHIVE, whole=False)[0].get("processes", 1))


def removed_by(folder: Path) -> str:
    """The checkpoint that the one of a folder has taken over, or "": see `save`."""
    return str(read_archive(folder / ARCHIVE, whole=False)[0].get("removes", ""))


def begun_in(folder: Path) -> set[str]:
    """The checkpoints that were begun in a folder and did not come to be."""
    return {*_parts_in(folder).values()} - {name_in(folder)}


def read_part(rows: HostRows, folder: Path, process: int, processes: int) -> Part:
    """What one of so many processes has written of a checkpoint.

    Raises:
      ValueError: If it is one of other parameters or of another state, or damaged.
      FileNotFoundError: If it is not there.
    """
    path = folder / ARCHIVE
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint of a HostTrainer in {folder}.")
    about, held = read_archive(path)
    take_types(rows, about)
    shared = _rest(rows)
    in_memory = [
        ("rows", jax.ShapeDtypeStruct((count, layout.words), np.uint32))
        for store, layout, count in zip(
            rows.stores,
            rows.plan.layouts,
            (
                x.partition.count_of(process, processes)
                for x in rows.plan.tables.values()
            ),
            strict=True,
        )
        if store.archived() is not None
    ]
    of_part = about
    if processes == 1:
        shared = [*shared, *in_memory]
    else:
        own_path = folder / part_name(_PART, about["name"], process, processes)
        of_part, records = read_archive(own_path)
        _refuse(
            own_path, of_part, {"name": about["name"]} | _described(rows, in_memory)
        )
        held = [*held, *records]
    _refuse(path, about, _described(rows, shared))
    count = len(rows.rest)
    records = [
        x.view(np.uint32).reshape(like.shape)
        for x, (_, like) in zip(held[count:], in_memory, strict=False)
    ]
    more = held[count + len(in_memory) :]
    stores = of_part["stores"]
    marked = of_part.get("marked", [False] * len(stores))  # archives have not always it
    stores = [*zip(stores, marked, strict=True)]
    return Part(
        *(about["name"], about["step"], held[:count], stores, records),
        stateful=(of_part.get("stateful", {}), more),
        sizes={(*key,): size for *key, size in about.get("sizes", [])},
    )


def _refuse(path: Path, about: Any, expected: Any) -> None:
    words = "of other parameters, another optimiser, another place of tables (memory, "
    words += "`file=`, `storage=`), or another jax_enable_x64"
    refuse_other(f"{path} is {words}", about, expected)


def load(rows: HostRows, folder: Path) -> None:
    """Takes a trainer whose stores are open back to a checkpoint."""
    spread = rows.plan.spread
    with together("HostTrainer.restore"):
        part = read_part(rows, folder, spread.process, spread.processes)
        undo = undo_of(
            rows, folder, part, rows.stores, spread.process, spread.processes
        )
        restored(folder, rows.stateful, *part.stateful)
    rest = rest_of(rows, part)
    # All that is read is in order: from here on rows are changed.
    rows.ledger.go_on_from(part.name, part.step, undo)
    for k, ascending, records in undo.rows(rows.plan.layouts):
        rows.stores[k].put(ascending, records)
    rows.rest, archived = rest, iter(part.records)
    for store in rows.stores:
        if store.archived() is not None:
            store.restore(next(archived))
    rows.steps, rows.sizes = part.step, part.sizes


def undo_of(
    rows: HostRows,
    folder: Path,
    part: Part,
    stores: Sequence[Store],
    process: int,
    processes: int,
) -> Undo:
    """The journal of a process, for stores that it had.

    Raises:
      ValueError: If it does not bring the rows back: it was damaged, or the rows have
        changed since, and that is in another journal.
    """
    path = folder / part_name("journal", part.name, process, processes)
    tables = rows.plan.tables.values()
    elsewhere = [
        (store, table.name, *of_store)
        for store, table, of_store in zip(stores, tables, part.stores, strict=True)
        if store.archived() is None
    ]
    if not elsewhere:
        return Undo(path, {0: 0}, [])
    undo = Undo(path, {}, [])
    if path.exists():
        undo = read_journal(path, rows.plan.layouts)
    for store, table, store_id, was_marked in elsewhere:
        if was_marked and not store.marks:
            raise ValueError(
                f"The storage of {table} has no mark, and that of the checkpoint in "
                f"{folder} had one: it is another one, which no HostTrainer has begun, "
                "or lacks a method. Give the storage that this checkpoint was made "
                "with, with `read_mark` and `write_mark`."
            )
        if store.id != store_id:
            raise ValueError(
                f"The file of {table} is another one than that of the checkpoint in "
                f"{folder}, and no copy of it: another HostTrainer has begun it. Give "
                "the path of the file that this checkpoint was made with."
            )
        marks = store.marks or (None,)
        if not all(_brings_back(undo, mark, part.name) for mark in marks):
            raise ValueError(
                f"What keeps the rows of {table} has changed since the checkpoint in "
                f"{folder}, by a run whose journal is elsewhere: restore the last "
                "checkpoint that was made with it. (A copy of a checkpoint's folder "
                "goes with a copy of the rows that was made at the same time.)"
            )
    return undo


def _brings_back(undo: Undo, mark: Mark | None, name: str) -> bool:
    if mark is None or mark.pending == name:
        return bool(undo.ends)
    length, checksum = mark.journal
    return mark.checkpoint == name and undo.ends.get(length) == checksum


def _rest(rows: HostRows) -> list[tuple[str, Any]]:
    """What has no rows, by name."""
    return [*zip(rows.plan.names, rows.rest, strict=True)]


def _in_memory(rows: HostRows) -> list[tuple[str, Any]]:
    """The records that an archive holds."""
    archived = (store.archived() for store in rows.stores)
    return [("rows", x) for x in archived if x is not None]


def _described(rows: HostRows, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What the archive of these arrays says of itself."""
    arrays = [[name, list(np.shape(x)), str(x.dtype)] for name, x in pairs]
    tables = [x.described for x in rows.plan.layouts]
    return {"version": _VERSION, "tables": tables, "arrays": arrays}


def weak_types(rows: HostRows) -> list[str]:
    """What has no rows and is of a weak type, as a Python number is, by name."""
    return [name for name, x in _rest(rows) if type_of(x)[2]]


def take_types(rows: HostRows, about: Mapping[str, Any]) -> None:
    """Takes what has no rows in the types that it was written in.

    A step may have changed those that `init` gives, as numbers that are arrays do; and
    a number that was weak, and times bfloat16 is bfloat16, is it no longer.
    """
    written = {name: dtype for name, _, dtype in about["arrays"]}
    for i, (name, x) in enumerate(_rest(rows)):
        dtype = written.get(name)
        is_float = name.startswith("state") and jnp.issubdtype(x.dtype, jnp.floating)
        if is_float and dtype in ("bfloat16", "float16", "float32", "float64"):
            rows.rest[i] = x.astype(jax.dtypes.canonicalize_dtype(dtype))
        is_weak = name in about.get("weak", ())  # archives have not always it
        if is_weak != type_of(rows.rest[i])[2]:
            rows.rest[i] = (_weak if is_weak else _strong)(rows.rest[i])


def _strong(x: Any) -> Any:
    return x.astype(x.dtype)


def _weak(x: Any) -> Any:
    """An array of its shape, and where it is; of no type that Python's numbers lack."""
    zeros = jnp.broadcast_to(np.zeros((), x.dtype).item(), x.shape)
    if zeros.dtype != x.dtype:
        return x
    return jax.device_put(zeros, x.sharding if x.committed else None)


def rest_of(rows: HostRows, part: Part) -> list[Any]:
    """What has no rows, where it is now."""
    pairs = zip(part.rest, rows.rest, strict=True)
    return [of_bytes(x, like) for x, like in pairs]


def of_bytes(held: np.ndarray, like: Any) -> Any:
    """An array like another one, and where that one is, if somebody has said so."""
    data = data_of(like)
    value: Any = held.view(data.dtype).reshape(data.shape)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    array = jax.device_put(value, like.sharding if like.committed else None)
    # What is written into an array of a weak type is of that.
    return like.at[...].set(array) if type_of(like)[2] else array


def data_of(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x = jax.random.key_data(x) if is_key else x
    if isinstance(x, jax.Array) and not (
        x.is_fully_addressable or x.is_fully_replicated
    ):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
