"""How a run begins: with new tables, or with those of a checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .._exact_adam.state import clocks_of
from ._arguments import check_function
from ._budget import check_budget, keep
from ._checkpoint import load, processes_of, save
from ._host_rows import HostRows
from ._ledger import Ledger
from ._repartition import begin_again, move, remove_files
from ._store import Store
from ._table import new_store
from ._together import together


def _through(
    progress: Callable[[Iterable[Any]], Iterable[Any]], pieces: Iterable[Any]
) -> Iterator[Any]:
    """The pieces as `progress` passes them on: a row that it drops would be zeros."""
    rule = (
        "HostTrainer needs a `progress` such as tqdm.tqdm, which gets an iterator over "
        "the pieces of a table and returns one over all of them; "
    )
    given = taken = 0

    def counted() -> Iterator[Any]:
        nonlocal given
        for piece in pieces:
            given += 1
            yield piece

    source = counted()
    wrapped: Any = progress(source)
    if not isinstance(wrapped, Iterable):
        raise TypeError(f"{rule}it returned {type(wrapped).__name__}.")
    for piece in wrapped:
        taken += 1
        yield piece
    if taken != given or next(source, None) is not None:
        raise ValueError(f"{rule}it returned {taken} pieces, and there are more.")


def begin_run(
    rows: HostRows,
    state: Any,
    budget: float | None,
    fsync: bool,
    progress: Callable[[Iterable[Any]], Iterable[Any]] | None,
) -> None:
    """Begins a run of new tables, with a state if there is one."""
    if progress is not None:
        check_function(progress, "HostTrainer needs a `progress` such as tqdm.tqdm")
    plan, rest, clocks = rows.plan, None, None
    of_rows: list[list[Any]] = [[] for _ in plan.hosts]
    if state is not None:
        rest, of_rows = plan.split_state(state)
        clocks = clocks_of(state)
    partitions = [x.partition for x in plan.tables.values()]

    def begin(k: int, store: Store) -> None:
        pieces: Any = plan.init_records(
            *(k, rows.dense, of_rows[k], clocks),
            skips_zeros=store.begins_with_zeros,
        )
        pieces = pieces if progress is None else _through(progress, pieces)
        store.begin(partitions[k].pieces(pieces))

    function = "HostTrainer"
    with together(function):
        _set_budget(function, rows, budget)
        plan.check_begin(rows.dense)
    try:
        _open(function, rows, begin, rest, fsync)
    except BaseException:
        _give_up(rows)
        raise


def go_on(rows: HostRows, path: Path, budget: float | None, fsync: bool) -> None:
    """Goes on with the run of a checkpoint, which is made again."""
    function, processes = "HostTrainer.restore", rows.plan.spread.processes
    with together(function):
        _set_budget(function, rows, budget)
        before = processes_of(path) or processes
        remove_files(rows, path)  # of a restore that was killed

    def begin(k: int, store: Store) -> None:
        if before == processes:
            store.open()
        else:
            begin_again(rows, k, path)

    try:
        _open(function, rows, begin, None, fsync)
        if before == processes:
            load(rows, path)
        else:
            move(rows, path, before)
    except BaseException:
        _give_up(rows)
        raise
    # New files are part of what was restored of another number of processes.
    try:
        (name,) = rows.ledger.names
        save(rows, path, "" if before == processes else name)
        remove_files(rows, path)
    except BaseException:
        rows.close()
        raise


def _set_budget(function: str, rows: HostRows, budget: float | None) -> None:
    if budget is not None:
        check_budget(function, budget)
        keep(budget)
    rows.budget = budget


def _open(
    function: str,
    rows: HostRows,
    begin: Callable[[int, Store], None],
    rest: list[Any] | None,
    fsync: bool,
) -> None:
    """Makes and begins the store of each table, and the ledger of all."""
    plan, spread = rows.plan, rows.plan.spread
    # A training step donates it, and two arrays of a state may be one.
    rest = plan.begin_rest(rows.dense) if rest is None else rest
    rows.rest += spread.kept(rest)
    sizes = [x.partition.count for x in plan.tables.values()]
    numbers = spread.process, spread.processes
    rows.ledger = Ledger(rows.stores, plan.layouts, sizes, fsync, numbers)
    with together(function):
        pairs = zip(plan.hosts, plan.tables.values(), strict=True)
        for k, (host, table) in enumerate(pairs):
            store = new_store(host, table, plan.layouts[k], rows.budget, spread)
            rows.stores.append(store)
            begin(k, store)


def _give_up(rows: HostRows) -> None:
    rows.close()
    for store in rows.stores:
        store.discard()
