"""Checkpoints: a folder from which a run goes on, killed at whatever moment.

    checkpoint.npz      what is no row: dense parameters, counts, their moments
    journal-<name>      what rows in files were, and no longer are: see `_journal`
    rows-<name>-<k>     the rows of table k, if it is in memory

A new checkpoint exists from the moment at which `checkpoint.npz` is replaced: it names
the journal that belongs to it, which is there before, and empty. A file of rows names
the checkpoint that its journal goes back to, so that it is not taken for another one's.
"""

import itertools
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._journal import Journal, entries
from ._pipeline import Pipeline
from ._table import Memory

_ARCHIVE = "checkpoint.npz"


def save(steps: Pipeline, folder: Path, fsync: bool) -> None:
    """Makes a checkpoint of what has settled.

    Raises:
      FileExistsError: If the folder has a checkpoint of another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_others(folder, steps.own_checkpoints)
    name = uuid.uuid4().hex
    for k, storage in enumerate(steps.storages):
        if type(storage) is Memory:
            _write_rows(_rows_path(folder, name, k), storage.records)
        elif hasattr(storage, "flush"):
            storage.flush()
    sizes = [x.shape[0] for x in steps.plan.tables.values()]
    journal = Journal(_journal_path(folder, name), sizes, fsync)
    about = {"name": name, "before": steps.checkpoint, "step": steps.steps}
    _write_archive(folder, _others(steps), about | {"tables": _fields(steps)})
    # From here on it is the checkpoint.
    if steps.journal is not None:
        steps.journal.close()
    steps.journal, steps.checkpoint = journal, name
    steps.own_checkpoints.add(name)
    for storage in steps.storages:
        if hasattr(storage, "set_checkpoint"):
            storage.set_checkpoint(steps.steps, name)
    for old in [*folder.glob("journal-*"), *folder.glob("rows-*")]:
        if name not in old.name:
            old.unlink()


def load(steps: Pipeline, folder: Path) -> None:
    """Takes a trainer whose storages are open back to a checkpoint."""
    arrays, about = _read_archive(folder, _others(steps), _fields(steps))
    name, tables = about["name"], steps.plan.tables.values()
    for k, (table, storage) in enumerate(zip(tables, steps.storages, strict=True)):
        if type(storage) is Memory:
            _read_rows(_rows_path(folder, name, k), storage.records)
        found = getattr(storage, "header", {}).get("checkpoint")
        # The one before, if the process was killed before the file said the new one.
        if found not in (None, name, about["before"]):
            raise ValueError(
                f"The file of {table.name} has changed since the checkpoint in "
                f"{folder}, by a run whose journal is elsewhere: restore the last "
                "checkpoint that was made with this file."
            )
    for k, rows, records in entries(_journal_path(folder, name), steps.plan.layouts):
        steps.storages[k].put(rows, records)
    steps.dense = arrays[: steps.plan.num_dense]
    steps.rest = arrays[steps.plan.num_dense :]
    steps.steps, steps.checkpoint = about["step"], name
    steps.own_checkpoints = {name}


def _refuse_others(folder: Path, own: set[str]) -> None:
    """Another run's journal would go with its checkpoint, and with it its files."""
    path = folder / _ARCHIVE
    if path.exists():
        with np.load(path) as file:
            name = json.loads(file["about"].tobytes())["name"]
        if name not in own:
            raise FileExistsError(
                f"There is a checkpoint of another run in {folder}. Give this run a "
                "folder of its own; or go on with the other one by "
                "HostTrainer.restore; or delete the folder, if it is of no use."
            )


def _others(steps: Pipeline) -> list[tuple[str, Any]]:
    """What is no row, by name."""
    return [*zip(steps.plan.names, [*steps.dense, *steps.rest], strict=True)]


def _fields(steps: Pipeline) -> list[Any]:
    return [[x.described() for x in layout.fields] for layout in steps.plan.layouts]


def _journal_path(folder: Path, checkpoint: str) -> Path:
    return folder / f"journal-{checkpoint}"


def _rows_path(folder: Path, checkpoint: str, table: int) -> Path:
    return folder / f"rows-{checkpoint}-{table}"


def _write_rows(path: Path, records: np.ndarray) -> None:
    with path.open("wb") as file:
        records.tofile(file)
        _to_disk(file)


def _read_rows(path: Path, records: np.ndarray) -> None:
    if path.stat().st_size != records.nbytes:
        raise ValueError(f"{path} does not hold {records.nbytes:,} bytes of rows.")
    with path.open("rb") as file:
        file.readinto(records.data.cast("B"))


def _write_archive(
    folder: Path, arrays: Sequence[tuple[str, Any]], about: dict[str, Any]
) -> None:
    """Replaces the archive of a folder, at once.

    Args:
      folder: Of the checkpoint.
      arrays: With their names.
      about: What else a checkpoint says of itself.
    """
    held = [_as_bytes(x) for _, x in arrays]
    about = about | {"arrays": _described(arrays)}
    new = folder / (_ARCHIVE + ".new")
    with new.open("wb") as file:
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        named: dict[str, Any] = {f"array{k}": x for k, x in enumerate(held)}
        np.savez(file, about=text, **named)
        _to_disk(file)
    os.replace(new, folder / _ARCHIVE)
    try:
        directory = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read_archive(
    folder: Path, expected: Sequence[tuple[str, Any]], fields: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arrays, like those expected and where these are, and what else is said.

    Raises:
      FileNotFoundError: If there is no checkpoint.
      ValueError: If it is another optimiser's, or another model's.
    """
    path = folder / _ARCHIVE
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint of a HostTrainer in {folder}.")
    with np.load(path) as file:
        about = json.loads(file["about"].tobytes())
        held = [file[f"array{k}"] for k in range(len(about["arrays"]))]
    found = [*about["arrays"], *itertools.chain(*about["tables"])]
    wanted = [*_described(expected), *itertools.chain(*fields)]
    for one, other in zip(found, wanted, strict=False):
        if one != other:
            raise ValueError(
                f"{path} is of other parameters, or of another optimiser: it holds "
                f"{one}, and expected is {other}."
            )
    if len(found) != len(wanted):
        more = (found[len(wanted) :] or wanted[len(found) :])[0]
        where = "is in it only" if len(found) > len(wanted) else "is not in it"
        raise ValueError(
            f"{path} is of other parameters, or of another optimiser: {more} {where}."
        )
    pairs = zip(held, expected, strict=True)
    return [_of_bytes(x, like) for x, (_, like) in pairs], about


def _described(arrays: Sequence[tuple[str, Any]]) -> list[Any]:
    return [[name, list(np.shape(x)), str(x.dtype)] for name, x in arrays]


def _as_bytes(x: Any) -> np.ndarray:
    # Types that NumPy does not know, such as bfloat16, are bytes in a file.
    array = np.ascontiguousarray(_data_of(x))
    return array.reshape(-1).view(np.uint8)


def _of_bytes(held: np.ndarray, like: Any) -> Any:
    data = _data_of(like)
    value: Any = held.view(data.dtype).reshape(data.shape)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jax.device_put(value, like.sharding)


def _data_of(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
