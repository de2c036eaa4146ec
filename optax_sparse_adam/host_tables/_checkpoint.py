"""Checkpoints: a folder from which a run goes on, killed at whatever moment.

    checkpoint.npz      what is no row: dense parameters, counts, their moments;
                        the rows of tables in memory, and what is `stateful`: see
                        `_archive`
    journal-<name>      what rows elsewhere were, and no longer are: see `_journal`

Which checkpoint is there, and in what order all of it is written, knows `_ledger`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._archive import ARCHIVE, name_in, read_archive, write_archive
from ._host_rows import HostRows
from ._journal import Undo, read_journal
from ._records import refuse_other, sync_folder
from ._stateful import described, restored
from ._store import Mark

_VERSION = 2


def save(rows: HostRows, folder: Path) -> None:
    """Makes a checkpoint of what has settled.

    Raises:
      FileExistsError: If the folder has a checkpoint of another run.
    """
    ledger = rows.ledger
    ledger.resolve()  # so that it knows all its names
    if not folder.exists():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    # Another run's journal would go with its checkpoint, and with it its files.
    if name_in(folder) not in {None, *ledger.names}:
        raise FileExistsError(
            f"There is a checkpoint of another run in {folder}, or one that this run "
            "made before it was restored from another folder. Give it a folder of its "
            "own; or go on with the other one by HostTrainer.restore; or delete the "
            "folder, if it is of no use: the rows of this run do not need it."
        )
    stateful, more = described(rows.stateful, rows.steps)
    with ledger.next(folder, rows.steps) as name:
        for store in rows.stores:
            store.flush()
        ids = [store.id for store in rows.stores]
        about = {"name": name, "step": rows.steps, "stores": ids, "stateful": stateful}
        arrays = [data_of(x) for _, x in _arrays(rows)] + more
        write_archive(folder, arrays, about | _expected(rows))
    for old in folder.iterdir():  # what a process that was killed has left
        is_journal = re.fullmatch("journal-[0-9a-f]{32}", old.name)
        if is_journal and old.name != f"journal-{name}":
            old.unlink()


def load(rows: HostRows, folder: Path) -> None:
    """Takes a trainer whose stores are open back to a checkpoint."""
    path = folder / ARCHIVE
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint of a HostTrainer in {folder}.")
    about, held = read_archive(path)
    refuse_other(
        f"{path} is of other parameters, or of another optimiser",
        *(about, _expected(rows)),
    )
    likes = [x for _, x in _arrays(rows)]
    read = [of_bytes(x, like) for x, like in zip(held, likes, strict=False)]
    undo = _undo(rows, folder, about["name"], about["stores"])
    more = about.get("stateful", {}), held[len(likes) :]
    restored(folder, rows.stateful, *more)
    # All that is read is in order: from here on rows are changed.
    rows.ledger.go_on_from(about["name"], about["step"], undo)
    for k, ascending, records in undo.rows(rows.plan.layouts):
        rows.stores[k].put(ascending, records)
    rows.others, archived = read[: len(rows.others)], iter(read[len(rows.others) :])
    for store in rows.stores:
        if store.archived() is not None:
            store.restore(next(archived))
    rows.steps = about["step"]


def _undo(rows: HostRows, folder: Path, name: str, ids: Sequence[Any]) -> Undo:
    """The journal of a checkpoint.

    Raises:
      ValueError: If it does not bring the rows back: it was damaged, or the rows have
        changed since, and that is in another journal.
    """
    path, tables = folder / f"journal-{name}", rows.plan.tables.values()
    stores = [
        (store, table.name, own)
        for store, table, own in zip(rows.stores, tables, ids, strict=True)
        if store.archived() is None
    ]
    if not stores:
        return Undo(path, {0: 0}, [])
    undo = Undo(path, {}, [])
    if path.exists():
        undo = read_journal(path, rows.plan.layouts)
    for store, table, own in stores:
        if store.id != own:
            raise ValueError(
                f"The file of {table} is another one than that of the checkpoint in "
                f"{folder}, and no copy of it: another HostTrainer has begun it. Give "
                "the path of the file that this checkpoint was made with."
            )
        if not _brings_back(undo, store.mark, name):
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


def _arrays(rows: HostRows) -> list[tuple[str, Any]]:
    """What the archive holds, by name."""
    archived = [x for store in rows.stores if (x := store.archived()) is not None]
    names = [*rows.plan.names, *("rows" for _ in archived)]
    return [*zip(names, [*rows.others, *archived], strict=True)]


def _expected(rows: HostRows) -> dict[str, Any]:
    """What the archive of a checkpoint of such a trainer says of itself."""
    arrays = [[name, list(np.shape(x)), str(x.dtype)] for name, x in _arrays(rows)]
    tables = [x.described for x in rows.plan.layouts]
    return {"version": _VERSION, "tables": tables, "arrays": arrays}


def of_bytes(held: np.ndarray, like: Any) -> Any:
    """An array like another one, and where that one is."""
    data = data_of(like)
    value: Any = held.view(data.dtype).reshape(data.shape)
    if isinstance(like, np.ndarray):
        return value
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jax.device_put(value, like.sharding)


def data_of(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
