"""A checkpoint of some processes, restored by another number of them.

    row r    of process r % before, there row r // before
    now      of process r % now, there row r // now

Each process reads what others have left of the rows that are its own now, and writes it
to stores that are new. Nothing that was there is changed, so what is killed on the way
begins again. When the new checkpoint is made, which says so, the files of the one
before are removed. What is killed on the way leaves files, of this checkpoint or of one
that never came to be: the next restore, by however many processes, removes them.
"""

import errno
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ._archive import name_in
from ._checkpoint import Part, begun_in, read_part, removed_by, rest_of, undo_of
from ._host_rows import HostRows
from ._records import CHUNK, WORD
from ._store import Ascending, Mark, Memory, Store, rows_between
from ._table import file_of, files_of
from ._together import together

_MOVES = "rows of "  # in the place of a pending checkpoint: what is moved, from which


def begin_again(rows: HostRows, k: int, folder: Path) -> None:
    """Begins the store of a table, for rows of a checkpoint that are written later.

    Raises:
      FileExistsError: If there is a file that is of some checkpoint.
      NotImplementedError: For a storage of the user's.
    """
    spread, host = rows.plan.spread, rows.plan.hosts[k]
    name = [*rows.plan.tables.values()][k].name
    if host.storage is not None:
        raise NotImplementedError(
            f"The rows of {name} are in a storage, whose rows belong to the processes "
            "that put them there: restore with as many processes as have made the "
            "checkpoint."
        )
    path = file_of(host, spread.process, spread.processes)
    if path is not None:
        from ._file import remove_if  # needs POSIX

        remove_if(path, lambda mark: not mark or not (mark.checkpoint or mark.pending))
        if path.exists():
            raise FileExistsError(
                errno.EEXIST,
                f"HostTrainer.restore makes the file of {name} for {spread.processes} "
                "processes, of that of other processes, and there is one, of another "
                "checkpoint. Remove it, if no other run needs it",
                str(path),
            )
    rows.stores[k].begin(())
    if path is not None:
        rows.stores[k].set_mark(Mark(pending=f"{_MOVES}{name_in(folder)}"))


def move(rows: HostRows, folder: Path, before: int) -> None:
    """Reads the rows of stores that were begun from a checkpoint of other processes."""
    spread, plan = rows.plan.spread, rows.plan
    common = math.gcd(before, spread.processes)
    with together("HostTrainer.restore"):
        for process in range(before):
            # No row of another process is one of this one's; the first has the rest.
            if process and (process - spread.process) % common:
                continue
            part = read_part(rows, folder, process, before)
            if part.stateful[0] or rows.stateful:
                raise NotImplementedError(
                    "What is `stateful` belongs to the process that has saved it: "
                    "restore with as many processes as have made the checkpoint."
                )
            stores = _stores_of(rows, part, process, before)
            try:
                undo = undo_of(rows, folder, part, stores, process, before)
                for k, store in enumerate(stores):
                    for old in _chunks(store, plan.layouts[k].words):
                        _write(rows, k, old, store, process, before)
                for k, old, records in undo.rows(plan.layouts):
                    _write(rows, k, old, records, process, before)
            finally:
                for store in stores:
                    store.close()
    rows.rest = rest_of(rows, part)
    rows.ledger.names, rows.steps = {part.name}, part.step


def remove_files(rows: HostRows, folder: Path) -> None:
    """Removes files that no checkpoint needs, of any number of processes.

    Those of a checkpoint that the one of a folder has taken over; and those that were
    new in one that was begun there, of which there is a journal alone, or not even
    that, as rows were still moved.
    """
    name = name_in(folder)
    if rows.plan.spread.process or name is None:
        return
    taken_over = {removed_by(folder)} - {""}
    begun = {*begun_in(folder), f"{_MOVES}{name}"}

    def is_left(mark: Mark | None) -> bool:
        if mark is None:
            return False
        is_new = not mark.checkpoint and mark.pending in begun
        return is_new or not taken_over.isdisjoint({mark.checkpoint, mark.pending})

    for path in [path for host in rows.plan.hosts for path in files_of(host)]:
        from ._file import remove_if  # needs POSIX

        remove_if(path, is_left)


def _stores_of(rows: HostRows, part: Part, process: int, before: int) -> list[Store]:
    """What a process had, to be read only."""
    stores: list[Store] = []
    archived = iter(part.records)
    tables = rows.plan.tables.values()
    try:
        for host, table, layout in zip(
            rows.plan.hosts, tables, rows.plan.layouts, strict=True
        ):
            path = file_of(host, process, before)
            if path is None:
                store: Any = Memory(0, layout)
                store.restore(next(archived))
            else:
                from ._file import File  # needs POSIX

                count = table.partition.count_of(process, before)
                store = File(path, table.name, count, layout, None)
                store.open(to_read=True)
            stores.append(store)
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores


def _chunks(store: Any, words: int) -> Iterator[Ascending]:
    size, count = max(1, CHUNK // (words * WORD)), len(store.records)
    for first in range(0, count, size):
        yield rows_between(first, min(first + size, count))


def _write(
    rows: HostRows, k: int, old: Ascending, source: Any, process: int, before: int
) -> None:
    """Writes those rows that are of this process, from a store or from records."""
    part = [*rows.plan.tables.values()][k].partition
    here = part.rows_here(old.astype(np.int64) * before + process)
    is_here = here >= 0
    moved = Ascending(here[is_here].astype(np.int32))
    if not len(moved):
        return
    if isinstance(source, Store):
        records = np.empty((len(moved), source.layout.words), np.uint32)
        source.take_into(Ascending(old[is_here]), records)
    else:
        records = source[is_here]
    rows.stores[k].put(moved, records)
