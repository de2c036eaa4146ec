"""Checkpoints: a folder from which a run goes on, killed at whatever moment.

    checkpoint.npz      what is no row: dense parameters, counts, their moments;
                        and the rows of tables in memory
    journal-<name>      what rows elsewhere were, and no longer are: see `_journal`

A new checkpoint exists from the moment at which `checkpoint.npz` is replaced: it names
the journal that belongs to it, which is there before, and empty. A file of rows names
the checkpoint that its journal goes back to, so that it is not taken for another one's.
"""

import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import jax
import jax.numpy as jnp
import numpy as np

from ._journal import Journal, entries
from ._pipeline import Pipeline
from ._records import refuse_other
from ._table import Memory

_ARCHIVE = "checkpoint.npz"


def save(steps: Pipeline, folder: Path, fsync: bool) -> None:
    """Makes a checkpoint of what has settled.

    Raises:
      FileExistsError: If the folder has a checkpoint of another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Another run's journal would go with its checkpoint, and with it its files.
    if _name_in(folder) not in {None, *steps.own_checkpoints}:
        raise FileExistsError(
            f"There is a checkpoint of another run in {folder}. Give this run a folder "
            "of its own; or go on with the other one by HostTrainer.restore; or delete "
            "the folder, if it is of no use."
        )
    name = uuid.uuid4().hex
    for storage in steps.storages:
        if hasattr(storage, "flush"):
            storage.flush()
    sizes = [x.shape[0] for x in steps.plan.tables.values()]
    journal = Journal(folder / f"journal-{name}", sizes, fsync)
    about = {"name": name, "before": steps.checkpoint, "step": steps.steps}
    useless: Journal | None = journal
    try:
        _write_archive(folder, _arrays(steps), about | _expected(steps))
    finally:
        # It is the checkpoint if the archive is there, whatever has interrupted this.
        # The journal before goes, in whatever folder: what changes is no more in it.
        if _name_in(folder) == name:
            useless, steps.journal, steps.checkpoint = steps.journal, journal, name
            steps.own_checkpoints.add(name)
        if useless is not None:
            useless.remove()
    for storage in steps.storages:
        if hasattr(storage, "set_checkpoint"):
            storage.set_checkpoint(steps.steps, name)
    for old in folder.iterdir():  # what a process that was killed has left
        if old != journal.path and re.fullmatch("journal-[0-9a-f]{32}", old.name):
            old.unlink()


def load(steps: Pipeline, folder: Path) -> None:
    """Takes a trainer whose storages are open back to a checkpoint."""
    path = folder / _ARCHIVE
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint of a HostTrainer in {folder}.")
    with _read(path) as file:
        about = _about(file)
        refuse_other(
            f"{path} is of other parameters, or of another optimiser",
            *(about, _expected(steps)),
        )
        held = [file[f"array{k}"] for k in range(len(about["arrays"]))]
    name, journal = about["name"], folder / f"journal-{about['name']}"
    for storage, table in zip(steps.storages, steps.plan.tables.values(), strict=True):
        found = getattr(storage, "header", {}).get("checkpoint")
        # The one before, if the process was killed before the file said the new one.
        is_other = found not in (None, name, about["before"])
        if is_other or (type(storage) is not Memory and not journal.exists()):
            raise ValueError(
                f"What keeps the rows of {table.name} has changed since the checkpoint "
                f"in {folder}, by a run whose journal is elsewhere: restore the last "
                "checkpoint that was made with it."
            )
    if journal.exists():
        for k, rows, records in entries(journal, steps.plan.layouts):
            steps.storages[k].put(rows, records)
    likes = [x for _, x in _arrays(steps)]
    read = [_of_bytes(x, like) for x, like in zip(held, likes, strict=True)]
    steps.others = read[: len(steps.others)]
    for storage, records in zip(
        _memories(steps), read[len(steps.others) :], strict=True
    ):
        storage.records = records
    steps.steps, steps.checkpoint = about["step"], name
    steps.own_checkpoints = {name}


def _memories(steps: Pipeline) -> list[Memory]:
    return [x for x in steps.storages if type(x) is Memory]


def _arrays(steps: Pipeline) -> list[tuple[str, Any]]:
    """What the archive holds, by name."""
    names = [*steps.plan.names, *("rows" for _ in _memories(steps))]
    arrays = [*steps.others, *(x.records for x in _memories(steps))]
    return [*zip(names, arrays, strict=True)]


def _expected(steps: Pipeline) -> dict[str, Any]:
    """What the archive of a checkpoint of such a trainer says of itself."""
    arrays = [[name, list(np.shape(x)), str(x.dtype)] for name, x in _arrays(steps)]
    return {"tables": [x.described for x in steps.plan.layouts], "arrays": arrays}


def _name_in(folder: Path) -> str | None:
    """Of the checkpoint that a folder has, if there is one."""
    if not (folder / _ARCHIVE).exists():
        return None
    with _read(folder / _ARCHIVE) as file:
        name: str = _about(file)["name"]
    return name


@contextlib.contextmanager
def _read(path: Path) -> Iterator[Any]:
    """The arrays of an archive.

    Raises:
      ValueError: If it is none, or damaged.
    """
    try:
        if not is_zipfile(path):
            raise BadZipFile("File is not a zip file")
        with np.load(path) as file:
            yield file
    except (BadZipFile, EOFError, KeyError, zlib.error) as error:
        raise ValueError(
            f"{path} is no checkpoint of a HostTrainer, or was damaged: {error}. "
            "Delete the folder, if it is of no use, or take another one."
        ) from None


def _about(file: Any) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(file["about"].tobytes())
    return about


def _write_archive(
    folder: Path, arrays: Sequence[tuple[str, Any]], about: dict[str, Any]
) -> None:
    """Replaces the archive of a folder, at once."""
    new = folder / (_ARCHIVE + ".new")
    with new.open("wb") as file:
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        # Types that NumPy does not know, such as bfloat16, are bytes in a file.
        held = (np.ascontiguousarray(_data(x)).reshape(-1) for _, x in arrays)
        named: Any = {f"array{k}": x.view(np.uint8) for k, x in enumerate(held)}
        np.savez(file, about=text, **named)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, folder / _ARCHIVE)
    try:
        directory = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _of_bytes(held: np.ndarray, like: Any) -> Any:
    """An array like another one, and where that one is."""
    data = _data(like)
    value: Any = held.view(data.dtype).reshape(data.shape)
    if isinstance(like, np.ndarray):
        return value
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return jax.device_put(value, like.sharding)


def _data(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
