"""Rows come from the host, are trained, and go back while the next ones come.

    device  | step 1           | step 2           | step 3
    thread  | read 2           | write 1, read 3  | write 2, read 4

What the thread reads for step 3 misses what step 2 changes, and nothing else: step 3
begins by taking the rows that are in both from the result of step 2, on the device. The
thread runs NumPy only; what JAX traces depends on settings of the caller's thread.

Nothing that a step has made is lost by an exception: results wait in `unstored` until
they are written, and every call begins by writing what is there.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ._ids import RowIds, mesh_around, unique_rows
from ._journal import Journal
from ._plan import Plan, place
from ._table import Memory


@dataclasses.dataclass
class Batch:
    """A batch whose ids are being computed.

    Attributes:
      args: The batch, and arguments by keyword that are traced.
      static: Arguments by keyword that are not.
      ids: Of each table.
      name: For errors.
      target: Where its rows go: a device, or all of the batch's mesh.
      lines: Where the tables are looked up.
    """

    args: tuple[tuple[Any, ...], dict[str, Any]]
    static: Mapping[str, Any]
    ids: list[jax.Array]
    name: str
    target: Any
    lines: Mapping[str, set[str]]
    unique: list[np.ndarray] | None = None  # rows of each table, once they are known


class Rows(NamedTuple):
    """Rows of a batch, as they were fetched or as a step has made them.

    Attributes:
      unique: Their numbers, of each table, on the host.
      padded: The same on the device, `[K]`.
      words: Their records on the device: fetched, `[k, words]`, or new, `[K, words]`.
      step: The number of steps before.
    """

    unique: list[np.ndarray]
    padded: list[jax.Array]
    words: list[jax.Array]
    step: int


class Pipeline:
    """Steps, and what they change.

    Attributes:
      dense: The parameters that are no tables.
      rest: What is no row in the state.
      storages: Of each table.
      steps: How many steps have been done.
      version: Grows whenever rows change by other means than `run`: what it has
        fetched before is old then.
      journal: Of the last checkpoint, or `None`.
      checkpoint: Its name, or none.
      is_open: Whether steps may still be done.
    """

    def __init__(self, plan: Plan, program: Any, ids: RowIds, dense: list[Any]):
        self.plan, self.dense = plan, dense
        self.rest: list[Any] = []
        self.storages: list[Any] = [None] * len(plan.layouts)
        self.steps = self.version = 0
        self.journal: Journal | None = None
        self.checkpoint = ""
        self.own_checkpoints = set[str]()  # of this run, in any folder
        self.is_open = True
        self._program, self._ids = program, ids
        self._value: Any = None
        self._future: Future[Any] | None = None
        self._results: collections.deque[Any] = collections.deque()
        self._unstored: collections.deque[Rows] = collections.deque()

    def ask(
        self, ids: RowIds, args: Any, static: Mapping[str, Any], name: str
    ) -> Batch:
        """Begins to compute the ids of a batch."""
        target = _target([*self.dense, *jax.tree.leaves(args)])
        found = ids(self.dense, args, static)
        return Batch(args, static, found, name, target, ids.lines)

    def fetch(self, batch: Batch) -> Rows:
        """The rows of a batch, from the host."""
        unique, padded, words = self._unique(batch), [], []
        on_cpu = _platform(batch.target) == "cpu"
        tables = zip(self.plan.tables.values(), self.plan.layouts, strict=True)
        for k, (table, layout) in enumerate(tables):
            own, storage = unique[k], self.storages[k]
            # As many rows as ids: where a batch looks up more rows than a table has,
            # gradients take another way, and here they must as well.
            size = max(1, min(len(batch.ids[k]), table.shape[0]))
            numbers = np.full(size, table.shape[0], np.int32)
            numbers[: len(own)] = own
            # To an accelerator only real rows travel, by eighths of all.
            count = size if on_cpu else _rounded(len(own), size)
            records = np.empty((count, layout.words), np.uint32)
            records[len(own) :] = 0
            if isinstance(storage, Memory):
                storage.take_into(own, records)
            elif len(own):
                records[: len(own)] = storage.take(own)
            padded.append(numbers)
            words.append(records)
        padded, words = jax.device_put((padded, words), batch.target)
        return Rows(unique, padded, words, self.steps)

    def _unique(self, batch: Batch) -> list[np.ndarray]:
        if batch.unique is None:
            tables = self.plan.tables.values()
            batch.unique = [
                unique_rows(np.asarray(x), table, batch.lines, batch.name)
                for x, table in zip(batch.ids, tables, strict=True)
            ]
        return batch.unique

    def padded_rows(self, batch: Batch) -> Rows:
        """The rows of a batch, `[K, words]`."""
        rows = self.fetch(batch)
        return rows._replace(words=place(rows.words, rows.padded, None))

    def take(self, rows: Sequence[np.ndarray], size: int) -> list[Any]:
        """Records of rows, and after them any up to `size`, on the device."""
        records = []
        for storage, layout, own in zip(
            self.storages, self.plan.layouts, rows, strict=True
        ):
            records.append(np.zeros((size, layout.words), np.uint32))
            if len(own):
                records[-1][: len(own)] = storage.take(own)
        placed: list[Any] = jax.device_put(records, _target(self.dense))
        return placed

    def advance(self, batch: Batch, rows: Rows, before: Rows | None = None) -> Any:
        """A step on fetched rows, some of which the step before has changed since."""
        words = rows.words
        pairs = zip(words, rows.padded, strict=True)
        if before is not None or any(len(x) < len(own) for x, own in pairs):
            newer = None
            if before is not None:
                newer = [*zip(before.padded, before.words, strict=True)]
            words = place(words, rows.padded, newer)
        static = tuple(sorted(batch.static.items()))
        args = static, self.dense, self.rest, words, rows.padded, batch.args
        rows = rows._replace(step=self.steps)
        # One call, without Python in between: a KeyboardInterrupt comes before the step
        # or when its result is kept, and not when the old parameters, which are
        # donated, are gone and the new ones have no name yet.
        self._results.extend(zip([rows], itertools.starmap(self._program, [args])))  # noqa: B905
        self._adopt()
        return self._value

    def _adopt(self) -> None:
        """Takes over the result of a step. May be interrupted and called again."""
        while self._results:
            rows, (dense, rest, words, value) = self._results[0]
            self.dense, self.rest, self._value = dense, rest, value
            self.steps = rows.step + 1
            if not any(x.words is words for x in [*self._unstored]):
                self._unstored.append(rows._replace(words=words))
            self._results.popleft()

    def check_open(self) -> None:
        if not self.is_open:
            raise ValueError("This HostTrainer is closed; restore a new one.")

    def settle(self) -> None:
        """Waits until all rows are where they belong."""
        self._adopt()
        if self._future is not None:
            wait([self._future])  # what it has raised is for `run`
            self._future = None
        self._write([*self._unstored])

    def _write(self, results: Sequence[Rows]) -> None:
        """Writes the oldest results; one that could not be written stays."""
        for rows in results:
            arrays = [
                np.asarray(x[: _rounded(len(own), len(x))])[: len(own)]
                if _platform(next(iter(x.devices()))) != "cpu"
                else np.asarray(x)[: len(own)]
                for x, own in zip(rows.words, rows.unique, strict=True)
            ]
            self.store(rows.unique, arrays)
            self._unstored.popleft()

    def store(self, unique: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> None:
        """Writes rows; before any of them, what the rows were at the checkpoint."""
        parts = [*zip(self.storages, unique, arrays, strict=True)]
        if self.journal is not None:
            for k, (storage, own, _) in enumerate(parts):
                if type(storage) is not Memory and len(own):
                    self.journal.remember(k, own, storage)
            self.journal.commit()
        for storage, own, records in parts:
            if len(own):
                storage.put(own, records)

    @property
    def _state_of_rows(self) -> tuple[int, int]:
        # Another run may be going on, step by step with this one.
        return self.version, self.steps

    def step(self, args: Any, static: Mapping[str, Any]) -> Any:
        self.settle()
        self.version += 1
        batch = self.ask(self._ids, args, static, f"Batch {self.steps}")
        value = self.advance(batch, self.fetch(batch))
        self.settle()
        return value

    def run(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        source, asked = _Source(batches), collections.deque[Batch]()
        fetched: Rows | None = None
        before: Rows | None = None

        def ask(count: int) -> None:
            while len(asked) < count and (batch := source.draw()) is not None:
                args = batch if isinstance(batch, tuple) else (batch,)
                name = f"Batch {self.steps + len(asked) + is_running}"
                asked.append(self.ask(self._ids, (args, {}), {}, name))

        with ThreadPoolExecutor(1, "host_tables") as worker:
            try:
                self.settle()
                while True:
                    is_running = False
                    ask(1)
                    if not asked:
                        return source.end()
                    if fetched is None:
                        self.settle()
                        fetched, before = self.fetch(asked[0]), None
                    batch, is_running = asked.popleft(), True
                    known = len(asked)
                    # Ids that depend on parameters do not exist before the next step.
                    if not self._ids.needs_params(self.dense, batch.args, batch.static):
                        ask(1 + ahead * any(map(_is_cold, self.storages)))
                    following = [*asked]
                    # Asked before the step, which a CPU may run in this thread.
                    future = self._future = worker.submit(
                        self._work, [*self._unstored], following, known
                    )
                    value = self.advance(batch, fetched, before)
                    known_as, before = self._state_of_rows, self._unstored[-1]
                    yield value
                    self.check_open()
                    fetched = future.result()
                    if self._state_of_rows != known_as:  # changed by the caller
                        fetched = None
            finally:
                self.settle()

    def _work(
        self, results: Sequence[Rows], following: Sequence[Batch], known: int
    ) -> Rows | None:
        """What the thread does during a step."""
        self._write(results)
        for batch in following[max(1, known) :]:
            # What is wrong with a batch is said when its turn comes.
            with contextlib.suppress(IndexError):
                pairs = zip(self.storages, self._unique(batch), strict=True)
                for storage, own in pairs:
                    if _is_cold(storage):
                        storage.advise(own)
        return self.fetch(following[0]) if following else None


class _Source:
    """Batches, and what their iterator raises, which is raised at the end."""

    def __init__(self, batches: Iterable[Any]):
        self._batches: Iterator[Any] | None = iter(batches)
        self._error: Exception | None = None

    def draw(self) -> Any:
        """The next batch, or `None`."""
        if self._batches is None:
            return None
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
        except Exception as error:
            self._batches, self._error = None, error
        return None

    def end(self) -> None:
        if self._error is not None:
            raise self._error


def _is_cold(storage: Any) -> bool:
    return bool(getattr(storage, "is_cold", False))


def _rounded(count: int, size: int) -> int:
    """A number of rows that a program is compiled for."""
    part = max(1, size // 8)
    return min(size, -(-max(count, 1) // part) * part)


def _target(leaves: Sequence[Any]) -> Any:
    """Where rows go: to all devices of a mesh, or to the device of the parameters."""
    if (mesh := mesh_around(leaves)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    one = arrays[0] if arrays else jnp.zeros(())
    return next(iter(one.devices()))


def _platform(target: Any) -> str:
    if isinstance(target, NamedSharding):
        target = target.mesh.devices.flat[0]
    return str(target.platform)
