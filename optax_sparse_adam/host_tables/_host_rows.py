"""The rows of all tables: who may use them, and what is done with those of a batch.

    fetch    rows of a batch, from their stores to the device
    advance  a step, whose result is kept until it is written
    settle   writes it: first the journal, then the stores

Nothing that a step has made is lost by an exception: rows wait until they are written,
every call begins by writing what is there, and to write twice does no harm.
"""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._access import Access
from ._arguments import is_committed, target_of
from ._budget import give_back, keep
from ._ids import Batch
from ._ledger import Ledger
from ._plan import Plan
from ._prepare import Preparation
from ._program import Program
from ._records import NO_ROOM, WORD
from ._reset import program_of
from ._residuals import Number
from ._spread import local
from ._stateful import Described, Stateful, described
from ._store import Ascending, Store
from ._worker import Worker

NOT_FETCHED = (
    "{what} has looked up rows that were not fetched: it computes other ids than the "
    "small program that fetches them. Either when it is traced again, as by np.random, "
    "by a global that changes, or by a callback: give the numbers that ids are "
    "computed of as a part of the batch. Or because two programs round floats "
    "differently, of which ids are computed in the body of a loop or a branch: compute "
    "these before it, in NumPy, or by `prepare`"
)


class BatchRows(NamedTuple):
    """Rows of a batch, as they were fetched or as a step has made them.

    Attributes:
      unique: Of each table, and of each block of this process, their numbers in the
        store.
      padded: The positions of all rows of the batch on the device, `[K]`.
      arrays: The rows on the device, of each table an array `[K, *shape]` for each
        field: fetched, or new.
      step: The number of steps before.
      fingerprint: Of the ids that these are the rows of.
      residuals: Values of the program of these ids that a step takes, on the device.
      looked_up: That of the ids of the step that has made them.
      back: New `arrays` of each table, field and block on their way to the host: see
        `Spread.sent_back`.
      reset: Of rows that begin again before the step: where they are among `padded`,
        and their values, on the device.
      sizes: What `HostRows.sizes` has of this batch when it has been trained.
    """

    unique: list[list[Ascending]]
    padded: list[jax.Array]
    arrays: list[list[jax.Array]]
    step: int
    fingerprint: Any = 0
    residuals: Mapping[Number, jax.Array] = {}
    looked_up: Any = 0
    back: Sequence[Sequence[Sequence[jax.Array]]] = ()
    reset: Any = None
    sizes: Mapping[tuple[int, ...], int] = {}


_KEPT = "these are kept, and written by the next call for which there is room"
_NOTHING = "has changed nothing: make room, and call it again"


@contextlib.contextmanager
def _no_room(words: str) -> Iterator[None]:
    """Says of a full disk what has become of the rows."""
    try:
        yield
    except OSError as error:
        is_said = words == _KEPT and "are kept" in str(error.strerror)
        if error.errno not in NO_ROOM or is_said:
            raise
        reason = str(error.strerror).partition(";")[0]
        raise OSError(error.errno, f"{reason}; {words}", error.filename) from error


def _size(count: int, known: int, most: int, blocks: int) -> int:
    """How many rows a block gets for so many, of at most `most`.

    Programs are compiled for each number. So it never becomes less than what is
    `known`; a larger one is rounded up to eighths of what each of so many blocks has of
    as many rows, and has room for more rows in later batches: with 26 tables, 400
    batches of 256 ids take 3 programs in place of 9, and 5 % more rows.
    """
    if count <= known:
        return known
    part = max(1, -(-most // (8 * blocks)))
    count += 2 * math.isqrt(count)
    return max(1, min(most, -(-count // part) * part))


class HostRows:
    """Rows in their stores, and those that have not reached them yet.

    Attributes:
      plan: Which parts of parameters and state are rows.
      access: Who may use them.
      rest: What has no rows: the other parameters, then the rest of the state.
      stores: Of each table.
      stateful: What is saved with them.
      preparation: What `prepare` makes of batches.
      ledger: Knows which checkpoint they go back to.
      budget: Bytes that the process may hold, pages of files included, or `None`.
      steps: How many steps have been done.
      sizes: How many rows a block of a step gets, by the table, the most that it may
        get, and the number of blocks. Padding may count in a mean: they are those of
        steps that have been done, and no other batch has changed them.
      sizes_of_reads: Likewise, of what is read between steps.
      version: Grows whenever rows change by other means than steps.
      torn: Why what there is belongs to no step, or `None`.
      is_open: Whether steps may still be done.
      is_closed: Whether all files have been given back.
      work: The thread that uses the rows beside a step, or `None`.
      left: What ends a run that was left where nothing could be waited for, or `None`.
      reset_program: Begins rows again, on one device.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.rest: list[Any] = plan.spread.kept(plan.dense)
        self.stores: list[Store] = []
        self.stateful: Mapping[str, Stateful] = {}
        self.preparation = Preparation(None, {})
        self.ledger: Ledger
        self.budget: float | None = None
        self.steps = self.version = 0
        self.torn: str | None = None
        self._reason: BaseException | None = None  # what a step has raised
        self.is_open, self.is_closed = True, False
        self.work: Worker | None = None
        self.left: Callable[[], None] | None = None
        self.access = Access()
        self._results: collections.deque[Any] = collections.deque()
        self._value: Any = None
        self._unstored: collections.deque[BatchRows] = collections.deque()
        self.sizes: dict[tuple[int, ...], int] = {}
        self.sizes_of_reads: dict[tuple[int, ...], int] = {}
        fields = itertools.chain.from_iterable(x.fields for x in plan.layouts)
        self._wide_fields = [x for x in fields if x.dtype.itemsize > WORD]
        self.reset_program = Program(functools.partial(program_of, plan))

    def hold(self, stateful: Mapping[str, Stateful], prepare: Any) -> None:
        """Takes what is saved with them, and what is called for each batch."""
        self.stateful, self.preparation = stateful, Preparation(prepare, stateful)

    @property
    def dense(self) -> list[Any]:
        """The parameters that are no tables."""
        return self.rest[: self.plan.num_dense]

    @property
    def steps_done(self) -> int:
        """How many steps have been done, also where nobody has adopted the last one."""
        results = [*self._results]  # adopted in between, it is among the steps
        return results[-1][0].step + 1 if results else self.steps

    @property
    def state(self) -> tuple[int, int]:
        """Another one after each change: what was fetched before is old then."""
        return self.version, self.steps

    # Who may use them.

    def check(self, *, changes: bool = False) -> None:
        """Refuses what cannot be done now, such as changes while a batch is drawn."""
        if not self.is_open:
            raise ValueError("This HostTrainer is closed; restore a new one.")
        self.access.refuse_another_process()
        if self.torn is not None:
            raise RuntimeError(
                f"{self.torn}. Close this HostTrainer, and go on from its last "
                "checkpoint by HostTrainer.restore."
            ) from self._reason
        if changes:
            self.access.refuse_in_batches()
            self.refuse_narrow()

    def refuse_narrow(self) -> None:
        """Refuses to compute on rows of 64 bits where JAX would cut them to 32."""
        for x in self._wide_fields:
            narrow: Any = jax.dtypes.canonicalize_dtype(x.dtype)
            if narrow != x.dtype:
                raise TypeError(
                    f"This HostTrainer, or Snapshot, was made with jax_enable_x64, and "
                    f"without it JAX computes in {narrow} on {x.name}, which is "
                    f"{x.dtype}. Call jax.config.update('jax_enable_x64', True), which "
                    "is for all threads; `with jax.enable_x64(True)` is for one."
                )

    def described(self) -> tuple[Described, list[np.ndarray]]:
        """What is `stateful`, which may read the trainer, as all has settled.

        It may be large, and who copies it asks nobody: all pages of files go before.
        """
        if self.budget is not None:
            give_back(0)
        with self.access.settled():
            return described(self.preparation.arrays(self.steps))

    @property
    def looks_ahead(self) -> bool:
        """Whether ids of further batches are worth computing.

        Several processes compute them together: all or none, whosoever's file is cold.
        """
        if self.plan.spread.processes > 1:
            return any(host.file is not None for host in self.plan.hosts)
        return any(store.is_cold for store in self.stores)

    def close(self) -> None:
        """Gives back all files."""
        if hasattr(self, "ledger"):
            self.ledger.close()
        for store in self.stores:
            store.close()
        self.is_closed = True

    # From the stores.

    def fetch(self, batch: Batch, known: Mapping[tuple[int, ...], int]) -> BatchRows:
        """The rows of a batch, from the host; `known` are the sizes before it."""
        self._check_memory()
        sizes: dict[tuple[int, ...], int] = {}
        unique, padded, arrays = [], [], []
        for k, (table, rows) in enumerate(zip(batch.tables, batch.rows(), strict=True)):
            cut = table.partition.cut(rows)
            # Rows may begin again that are not looked up.
            ids = len(batch.ids[k])
            count = ids if len(rows) <= ids else 1 << (len(rows) - 1).bit_length()
            # At least two, if there are: a transformation may see that a table has one
            # row, as optax.adaptive_grad_clip, which takes it for a vector.
            most = min(max(2, count), table.partition.block_rows)
            key = k, most, len(cut)
            needed = max(2, *map(len, cut))
            sizes[key] = size = _size(needed, known.get(key, 0), most, len(cut))
            unique.append(table.partition.own(cut))
            padded.append(table.partition.padded(cut, size))
            arrays.append(self._read(k, unique[-1], size))
        reset = None
        if batch.reset is not None:
            parts = [table.partition.position for table in batch.tables]
            pairs = enumerate(zip(parts, padded, strict=True))
            places = [batch.reset.places(k, *pair) for k, pair in pairs]
            reset = self.plan.spread.sent((places, batch.reset.values), batch.target)
        residuals = self.plan.spread.sent_residuals(batch.residuals, batch.target)
        padded, arrays = self.plan.spread.place(padded, arrays, batch.target)
        return BatchRows(
            *(unique, padded, arrays, self.steps, batch.fingerprint, residuals),
            reset=reset,
            sizes=sizes,
        )

    def take(self, rows: Sequence[Sequence[Ascending]], size: int) -> list[list[Any]]:
        """Arrays of rows in blocks, each with zeros after them up to `size`."""
        arrays = [self._read(k, x, size) for k, x in enumerate(rows)]
        target = target_of(self.rest)
        is_free = not any(map(is_committed, self.rest))
        if is_free and isinstance(target, SingleDeviceSharding):
            target = None  # nor do results name a device: the first batch does
        return self.plan.spread.place([], arrays, target)[1]

    def _read(self, k: int, rows: Sequence[Ascending], size: int) -> list[np.ndarray]:
        arrays = self.plan.layouts[k].empty(size * len(rows))
        for number, block in enumerate(rows):
            parts = [x[number * size : (number + 1) * size] for x in arrays]
            for x in parts:
                x[len(block) :] = 0
            self.stores[k].take_fields(block, parts)
        return arrays

    def here(
        self, rows: Sequence[Ascending], size: int
    ) -> tuple[list[Any], list[list[Any]]]:
        """What has no rows, and rows of stores, on one device if there is a mesh."""
        if self.plan.spread.whole is None:
            return self.rest, self.take([[x] for x in rows], size)
        arrays = [self._read(k, [x], size) for k, x in enumerate(rows)]
        return [*map(local, self.rest)], jax.device_put(arrays)

    # To the stores.

    @property
    def unstored(self) -> list[BatchRows]:
        """Rows that were made and may not be written yet, the oldest first."""
        return [*self._unstored]

    def advance(self, program: Callable[..., Any], args: Any, rows: BatchRows) -> Any:
        """A step: the program's value, and its result as what there is now."""
        # One call, without Python in between: a KeyboardInterrupt comes before the step
        # or when its result is kept, and not when the old parameters, which are
        # donated, are gone and the new ones have no name yet. (The first call of a
        # program goes through Python of JAX; what comes there tears.)
        try:
            self._results.extend(zip([rows], itertools.starmap(program, [args])))  # noqa: B905
        except BaseException as error:  # or of a signal's handler, inside of JAX
            gone = (isinstance(x, jax.Array) and x.is_deleted() for x in self.rest)
            if not self._results and any(gone):
                self._tear(rows.step, error)
            raise
        self._adopt()
        return self._value

    def _tear(self, step: int, error: BaseException) -> None:
        self._reason = self._reason or error
        self.torn = self.torn or (
            f"The step of batch {step} has raised {type(error).__name__} while it ran, "
            "and the parameters that it was given are gone"
        )

    def _adopt(self) -> None:
        """Takes over the result of a step. May be interrupted and called again."""
        while self._results:
            rows, (self.rest, arrays, self._value, looked_up) = self._results[0]
            self.steps = rows.step + 1
            self.sizes.update(rows.sizes)
            back = self.plan.spread.sent_back(arrays)
            self._keep(rows._replace(arrays=arrays, back=back, looked_up=looked_up))
            self._results.popleft()

    def _keep(self, rows: BatchRows) -> None:
        if not any(x.arrays is rows.arrays for x in self.unstored):
            self._unstored.append(rows)

    def change(self, unique: list[Ascending], arrays: list[list[Any]]) -> None:
        """Rows that were made between two steps, by their numbers in stores."""
        self.version += 1
        blocks = [[rows] for rows in unique]
        back = [[[x] for x in fields] for fields in arrays]
        self._keep(BatchRows(blocks, [], arrays, self.steps, back=back))
        self.settle()

    def settle(self) -> None:
        """Waits until all rows are where they belong."""
        if self.access.is_of_another_process:  # whose thread writes them
            return
        self._adopt()
        if self.work is not None:
            self.work.wait()  # what it has raised is for `run`
            self.work = None
        self.write(self.unstored)
        left = self.left
        if left is not None:
            left()
            self.left = None if self.left is left else self.left

    def settle_before(self, function: str) -> None:
        """The same, for a function that has changed nothing where this raises."""
        with _no_room(f"they are of calls before. {function} {_NOTHING}"):
            self.settle()
        self._check_memory()

    def _check_memory(self) -> None:
        """Raises if the process holds more than its budget.

        For what begins: what it has made may be written and kept by the journal, else
        it would wait for memory that nobody may give.
        """
        if self.budget is not None:
            keep(self.budget)

    def write(self, results: Sequence[BatchRows]) -> None:
        """Writes the oldest results; one that could not be written stays."""
        for rows in results:
            if self.torn is not None:  # of a step after that which has failed
                self._unstored.clear()
                return
            try:
                is_another = int(rows.looked_up) != int(rows.fingerprint)
            except jax.errors.JaxRuntimeError as error:  # JAX says later what failed
                self._tear(rows.step, error)
                self._unstored.clear()
                raise
            if is_another:
                # Dense parameters are wrong by now; what the stores have is not.
                # The first one says why: the next may have been trained by then.
                self.torn = self.torn or NOT_FETCHED.format(what=f"Batch {rows.step}")
                self._unstored.clear()
                self.check()
            with _no_room(_KEPT):
                self._write_rows(rows.unique, rows.back, None)
            self._unstored.popleft()

    @contextlib.contextmanager
    def as_a_whole(self, what: str) -> Iterator[Any]:
        """A function that writes rows, all calls of which belong together.

        What ends between two of them leaves the rows torn.
        """
        torn = f"{what} has ended half way: some rows are changed, and others are not"
        self.version += 1

        def store(unique: Any, arrays: Any) -> None:
            half = f"{torn}; restore the last checkpoint"
            with _no_room(half if self.torn else f"{what} {_NOTHING}"):
                self._write_rows(unique, self.plan.spread.sent_back(arrays), torn)

        yield store
        self.torn = None

    def _write_rows(
        self,
        unique: Sequence[Sequence[Ascending]],
        arrays: Sequence[Sequence[Sequence[jax.Array]]],
        torn: str | None,
    ) -> None:
        """Writes rows; before any of them, what the rows were at the checkpoint."""
        changes = [
            (k, rows, [np.asarray(x[number])[: len(rows)] for x in arrays[k]])
            for k, blocks in enumerate(unique)
            for number, rows in enumerate(blocks)
        ]
        for store, blocks in zip(self.stores, unique, strict=True):
            store.make_room(sum(map(len, blocks)))
        self.ledger.remember([(k, rows) for k, rows, _ in changes])
        self.torn = torn or self.torn
        for k, rows, fields in changes:
            self.stores[k].put_fields(rows, fields)
