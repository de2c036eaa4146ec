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
import itertools
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._ids import Batch, RowIds, inside, target_of
from ._journal import Journal
from ._plan import Plan, place
from ._table import Memory


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
      loss: The user's.
      params: The user's, with a `HostTable` in the place of each table.
      plan: Which parts of parameters and state are rows.
      others: What is none: the other parameters, then the rest of the state.
      storages: Of each table.
      steps: How many steps have been done.
      version: Grows whenever rows change by other means than `run`: what it has
        fetched before is old then.
      journal: Of the last checkpoint, or `None`.
      checkpoint: Its name, or none.
      own_checkpoints: All of this run, in any folder.
      is_open: Whether steps may still be done.
    """

    def __init__(self, loss: Any, tx: Any, params: Any, **options: Any):
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"HostTrainer runs in one process, and here are {jax.process_count()}. "
                "The page on large tables names what there is for several."
            )
        self.loss, self.params, self.plan = loss, params, Plan(tx, params)
        # Steps donate the arrays, which are the caller's.
        self.others: list[Any] = [jnp.array(x) for x in self.plan.dense]
        self.storages: list[Any] = []
        self.steps = self.version = 0
        self.journal: Journal | None = None
        self.checkpoint = ""
        self.own_checkpoints = set[str]()
        self.is_open = True
        self._program = self.plan.step(loss, params, **options)
        self._ids = RowIds(loss, self.plan.tables, self.plan.treedef)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._is_drawing = False
        self._value: Any = None
        self._future: Future[Any] | None = None
        self._results: collections.deque[Any] = collections.deque()
        self._unstored: collections.deque[Rows] = collections.deque()

    @property
    def dense(self) -> list[Any]:
        """The parameters that are no tables."""
        return self.others[: self.plan.num_dense]

    # Between the caller's steps.

    def check(self, *, changes: bool = False) -> None:
        """Refuses what cannot be done now, such as changes while a batch is drawn."""
        if not self.is_open:
            raise ValueError("This HostTrainer is closed; restore a new one.")
        if self.is_of_another_process:
            raise RuntimeError(
                "This HostTrainer is of the process that forked this one, and both "
                "would write the same rows. Make it after the fork."
            )
        if changes and self._is_drawing:
            raise RuntimeError(
                "The batches of HostTrainer.run are drawn before the steps of those "
                "that come before, so they may read the trainer and make checkpoints, "
                "but not change it. Change it between two values of run; or draw a "
                "batch by yourself, and pass it to HostTrainer.step."
            )

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """Waits for what other threads do with this trainer, and then lets them wait.

        After a fork nothing: the thread that has the lock may not be there.
        """
        return contextlib.nullcontext() if self.is_of_another_process else self._lock

    @property
    def is_of_another_process(self) -> bool:
        return os.getpid() != self._process

    def settle(self) -> None:
        """Waits until all rows are where they belong."""
        if self.is_of_another_process:  # whose thread writes them
            return
        self._adopt()
        if self._future is not None:
            wait([self._future])  # what it has raised is for `run`
            self._future = None
        self._write([*self._unstored])

    def close_files(self) -> None:
        for x in (self.journal, *self.storages):
            if isinstance(x, Journal | Memory):
                x.close()

    def records(self, k: int, rows: np.ndarray, count: int) -> np.ndarray:
        """Records of rows of a table, and zeros after them, from the host."""
        storage = self.storages[k]
        records = np.empty((count, self.plan.layouts[k].words), np.uint32)
        records[len(rows) :] = 0
        if isinstance(storage, Memory):
            storage.take_into(rows, records)
        elif len(rows):
            records[: len(rows)] = storage.take(rows)
        return records

    def fetch(self, batch: Batch) -> Rows:
        """The rows of a batch, from the host."""
        unique, padded, words = batch.rows(), [], []
        for k, (table, own) in enumerate(zip(batch.tables, unique, strict=True)):
            # As many rows as ids: where a batch looks up more rows than a table has,
            # gradients take another way, and here they must as well.
            size = max(1, min(len(batch.ids[k]), table.shape[0]))
            numbers = np.full(size, table.shape[0], np.int32)
            numbers[: len(own)] = own
            padded.append(numbers)
            words.append(self.records(k, own, _count(len(own), size, batch.target)))
        padded, words = jax.device_put((padded, words), batch.target)
        return Rows(unique, padded, words, self.steps)

    def take(self, rows: Sequence[np.ndarray], size: int) -> list[Any]:
        """Records of rows, and after them zeros up to `size`, on the device."""
        records = [self.records(k, own, size) for k, own in enumerate(rows)]
        placed: list[Any] = jax.device_put(records, target_of(self.dense))
        return placed

    def store(self, unique: Sequence[np.ndarray], words: Sequence[jax.Array]) -> None:
        """Writes rows; before any of them, what the rows were at the checkpoint."""
        parts = []
        for storage, own, x in zip(self.storages, unique, words, strict=True):
            count = _count(len(own), len(x), x.sharding)
            x = x[:count] if count < len(x) else x
            parts.append((storage, own, np.asarray(x)[: len(own)]))
        if self.journal is not None:
            for k, (storage, own, _) in enumerate(parts):
                if type(storage) is not Memory and len(own):
                    self.journal.remember(k, own, storage)
            self.journal.commit()
        for storage, own, records in parts:
            if len(own):
                storage.put(own, records)

    # Steps.

    def step(self, args: Any, static: Mapping[str, Any]) -> Any:
        self.settle()
        self.version += 1
        batch = self._ids(self.dense, args, static, f"Batch {self.steps}")
        value = self._advance(batch, self.fetch(batch))
        self.settle()
        return value

    def run(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        """See `HostTrainer.run`. Between two values other threads have their turn."""
        values, end = self._run(batches, ahead), object()
        try:
            while True:
                with self.alone():
                    value = next(values, end)
                if value is end:
                    return
                yield value
        finally:
            with self.alone():
                values.close()

    def _run(self, batches: Iterable[Any], ahead: int) -> Generator[Any, None, None]:
        source, asked = iter(batches), collections.deque[Batch]()
        ended: list[Exception | None] = []  # what the iterator has raised
        fetched: Rows | None = None
        before: Rows | None = None

        def ask(count: int) -> None:
            while len(asked) < count and not ended:
                self._is_drawing = True
                # What the batches may do, other threads may, for which they may wait.
                self._lock.release()
                try:
                    batch = next(source)
                except StopIteration:
                    ended.append(None)
                    return
                except Exception as error:  # the user's, for when its turn comes
                    ended.append(error)
                    return
                finally:
                    self._lock.acquire()
                    self._is_drawing = False
                args = batch if isinstance(batch, tuple) else (batch,)
                name = f"Batch {self.steps + len(asked) + is_running}"
                asked.append(self._ids(self.dense, (args, {}), {}, name))

        self.check(changes=True)
        try:
            with ThreadPoolExecutor(1, "host_tables") as worker:
                self.settle()
                while True:
                    is_running = False
                    ask(1)
                    if not asked:
                        break
                    if fetched is None:
                        self.settle()
                        fetched, before = self.fetch(asked[0]), None
                    batch, is_running = asked.popleft(), True
                    known = len(asked)
                    # Ids that depend on parameters do not exist before the next step.
                    if not batch.needs_params:
                        ask(1 + ahead * any(map(_is_cold, self.storages)))
                    following = [*asked]
                    # Asked before the step, which a CPU may run in this thread.
                    future = self._future = worker.submit(
                        self._work, [*self._unstored], following, known
                    )
                    value = self._advance(batch, fetched, before)
                    known_as, before = self._state_of_rows, self._unstored[-1]
                    yield value
                    self.check(changes=True)
                    fetched = future.result()
                    if self._state_of_rows != known_as:  # changed by the caller
                        fetched = None
        finally:
            self.settle()
        if ended[0] is not None:
            raise ended[0]

    @property
    def _state_of_rows(self) -> tuple[int, int]:
        # Another run may be going on, step by step with this one.
        return self.version, self.steps

    def _work(
        self, results: Sequence[Rows], following: Sequence[Batch], known: int
    ) -> Rows | None:
        """What the thread does during a step."""
        self._write(results)
        for batch in following[max(1, known) :]:
            # What is wrong with a batch is said when its turn comes.
            for table, storage, own in zip(
                batch.tables, self.storages, batch.distinct, strict=True
            ):
                if _is_cold(storage):
                    storage.advise(inside(own, table.shape[0]))
        return self.fetch(following[0]) if following else None

    def _advance(self, batch: Batch, rows: Rows, before: Rows | None = None) -> Any:
        """A step on fetched rows, some of which the step before has changed since."""
        words = rows.words
        for k, own in enumerate(rows.padded):
            newer = None if before is None else (before.padded[k], before.words[k])
            if newer is not None or len(words[k]) < len(own):
                words[k] = place(words[k], own, newer)
        static = tuple(sorted(batch.static.items()))
        args = static, self.others, words, rows.padded, batch.args
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
            rows, (self.others, words, self._value) = self._results[0]
            self.steps = rows.step + 1
            if not any(x.words is words for x in [*self._unstored]):
                self._unstored.append(rows._replace(words=words))
            self._results.popleft()

    def _write(self, results: Sequence[Rows]) -> None:
        """Writes the oldest results; one that could not be written stays."""
        for rows in results:
            self.store(rows.unique, rows.words)
            self._unstored.popleft()


def _is_cold(storage: Any) -> bool:
    return bool(getattr(storage, "is_cold", False))


def _is_on_cpu(target: Any) -> bool:
    return next(iter(target.device_set)).platform == "cpu"


def _count(real: int, size: int, target: Any) -> int:
    """How many of `size` rows travel: on a CPU all, for which nothing is copied.

    To and from an accelerator the real ones, rounded up to eighths of all, as programs
    are compiled for each number.
    """
    part = max(1, size // 8)
    return size if _is_on_cpu(target) else min(size, -(-max(real, 1) // part) * part)
