"""Rows come from the host, are trained, and go back while the next ones come.

    device  | step 1           | step 2           | step 3
    thread  | read 2           | write 1, read 3  | write 2, read 4

What the thread reads for step 3 misses what step 2 changes, and nothing else: step 3
begins by taking the rows that are in both from the result of step 2, on the device. The
thread reads, writes and copies rows; it traces nothing, as what JAX traces depends on
settings of the caller's thread.
"""

import atexit
import collections
import functools
import inspect
import itertools
import os
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._host_rows import BatchRows, HostRows
from ._ids import Batch, RowIds
from ._prepare import as_batch
from ._program import Program
from ._reset import BatchWithReset, program_of, reset_of
from ._spread import overlay_on
from ._worker import Worker

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Source:
    """The batches of a run, drawn ahead.

    They are drawn while the trainer is free for other threads, for which their iterator
    may wait. What it raises, or the ids of a batch, is raised when its turn comes.

    A KeyboardInterrupt may come between any two operations of Python. So each batch
    has one place from the moment it is drawn until its step is done, a list

        [item]                  drawn
        [item, batch]           prepared, and its ids are computed
        [item, batch, steps]    its step is to be done after so many others; -1: is done
    """

    def __init__(
        self,
        rows: HostRows,
        ids: Callable[[Any, str], Batch],
        turn: Callable[["Source"], None],
    ):
        self.iterator: Iterator[Any] = iter(())
        self._rows, self._ids, self._turn = rows, ids, turn
        self._places: collections.deque[list[Any]] = collections.deque()
        self._end: Exception | None = None  # of the iterator
        self._error: Exception | None = None  # that, or of the next batch

    def peek(self, count: int) -> list[Batch]:
        """So many of the next batches at least, if there are; none at the end."""
        while len(batches := self._batches) < count and self._error is None:
            try:
                self._draw()
            except Exception as error:  # for when its turn comes
                self._error = error
        is_end = self._error is self._end and isinstance(self._end, StopIteration)
        if not batches and count and not is_end:
            raise self._error  # type: ignore[misc]
        return batches

    @property
    def _batches(self) -> list[Batch]:
        return [place[1] for place in [*self._places] if len(place) == 2]

    def _draw(self) -> None:
        if all(len(place) > 1 for place in [*self._places]):
            self._draw_one()
        with self._rows.access.alone():
            # Steps may have been done since, by another thread.
            self._turn(self)
            self._compute(next(place for place in self._places if len(place) == 1))

    def _draw_one(self) -> None:
        if self._end is not None:
            raise self._end
        count = len(self._places)
        self._rows.access.draws(Source._draw_one.__code__)
        try:
            # One call, without Python between the iterator and the place.
            self._places.extend(map(list, zip(itertools.islice(self.iterator, 1))))
        except Exception as error:
            self._end = error
            raise
        finally:
            self._rows.access.draws(None)
        if len(self._places) == count:
            self._end = StopIteration()
            raise self._end
        place = self._places[-1]
        # A loader may refill the array that it has given.
        place[0] = jax.tree.map(_kept, as_batch(place[0]))

    def _compute(self, place: list[Any]) -> None:
        done, preparation = self._rows.steps_done, self._rows.preparation
        number, item = done + len(self._batches), place[0]
        # `prepare` may write to what it gets, and later to what it has returned.
        kept = functools.partial(jax.tree.map, _kept)
        if preparation.is_by_step:
            item = kept(preparation.batch(number, kept(item), done=done))
        else:
            item = preparation.batch(number, item, done=done)
        place.append(self._ids(item, f"Batch {number}"))

    def settle(self) -> None:
        """Comes before any step, after which the number of steps says another thing."""
        for place in [*self._places]:
            place[2:] = [-1] if self._is_trained(place) else []

    def forget(self) -> None:
        """What was drawn is prepared again: another batch comes first."""
        self.settle()
        self._error = None
        for place in [*self._places]:
            if len(place) == 2:
                del place[1:]

    def take(self) -> Batch:
        """The next one, whose ids are those of now."""
        self._turn(self)
        self.settle()
        while self._is_trained(self._places[0]):
            self._places.popleft()
        place = next(place for place in self._places if len(place) < 3)
        if len(place) == 1:
            self._compute(place)
        batch: Batch = place[1]
        if batch.needs_params:
            batch = self._ids(batch.item, batch.name)
        place.append(self._rows.steps_done)
        return batch

    def _is_trained(self, place: list[Any]) -> bool:
        return len(place) == 3 and place[2] < self._rows.steps_done

    @property
    def left(self) -> list[Any]:
        """What was drawn and not trained."""
        places = [x for x in [*self._places] if not self._is_trained(x)]
        return [as_batch(place[0]) for place in places]


def _kept(x: Any) -> Any:
    """An argument that does not change when the caller writes to what it has given.

    On a CPU an array of JAX may be made of one of NumPy without a copy. JAX makes its
    own copy while Python goes on, so it is waited for.
    """
    if isinstance(x, np.ndarray):
        return np.array(x, subok=True)  # what is masked is refused, as it is by `step`
    if not isinstance(x, jax.Array):  # for `prepare`, such as a tensor of torch
        is_array = hasattr(x, "__array__")
        return x.clone() if is_array and hasattr(x, "clone") else x
    is_of_host = {device.platform for device in x.devices()} == {"cpu"}
    is_copied = is_of_host and x.is_fully_addressable
    return jnp.copy(x).block_until_ready() if is_copied else x


class Pipeline:
    """Steps on the rows of batches.

    Args:
      rows: Of all tables.
      loss: The user's.
      params: The user's, with a `HostTable` in the place of each table.
      **options: Of `make_train_step`.
    """

    def __init__(self, rows: HostRows, loss: Any, params: Any, **options: Any):
        spread, self._params = rows.plan.spread, params
        self._rows, self._overlay = rows, overlay_on(spread)
        layout = {} if spread.by_rows is None else {"out_shardings": spread.by_rows}
        self._reset = Program(functools.partial(program_of, rows.plan, **layout))
        self._program: Any = None
        make: Any = rows.plan.step
        self._compiled = functools.partial(make, loss, **options)
        self._row_ids = RowIds(loss, rows.plan)
        self._target: Any = None  # where rows go: the first batch says it
        self._source: Source | None = None  # of a run that has not ended
        self._ahead: Source | None = None  # whose batches are prepared
        self._left: list[Any] = []

    @property
    def drawn(self) -> list[Any]:
        """Batches that the last run has drawn and not trained."""
        source = self._source
        return [*self._left] if source is None else source.left

    def _ids(self, args: Any, static: Mapping[str, Any], name: str) -> Batch:
        batch = self._row_ids(self._rows.rest, args, static, name, self._target)
        if self._target is None:
            # Before the first step: what is where JAX puts arrays by default would be
            # of another type to `jit` than its results, and compiled for twice.
            self._rows.rest = self._rows.plan.spread.stay(self._rows.rest, batch.target)
        self._target = batch.target  # others are drawn before its step is done
        return batch

    def _drawn(self, item: Any, name: str, keywords: Any = ({}, {})) -> Batch:
        """A batch of `run`, or of `step` with its traced and its static keywords."""
        args, reset = item, None
        if isinstance(item, BatchWithReset):
            args = item.batch if isinstance(item.batch, tuple) else (item.batch,)
            plan = self._rows.plan
            if plan.spread.processes > 1:
                raise NotImplementedError(
                    "BatchWithReset is for one process. In several, call "
                    "HostTrainer.reset_rows in each, between two steps."
                )
            reset = reset_of(plan, self._params, item.ids, item.rows)
        traced, static = keywords
        batch = self._ids((args, traced), static, name)
        batch.item, batch.reset = item, reset
        return batch

    def _turn(self, source: Source | None) -> None:
        """Comes before a batch is prepared: of a run, or that of a step."""
        preparation, ahead = self._rows.preparation, self._ahead
        if not preparation.is_by_step or (source is not None and source is ahead):
            return
        if ahead is not None:
            ahead.forget()
        self._ahead = source
        preparation.settle(self._rows.steps_done)

    def _leave(self, source: Source) -> None:
        """What a run has prepared and not trained is taken back."""
        if self._ahead is source:
            self._turn(None)

    def close(self) -> None:
        """What any run has prepared and not trained is taken back."""
        self._turn(None)
        self._rows.preparation.end()

    def step(self, item: Any, *keywords: Any) -> Any:
        rows = self._rows
        rows.settle_before("step")
        if self._source is not None:
            self._source.settle()
        rows.version += 1
        self._turn(None)
        try:
            number = rows.steps
            item = rows.preparation.batch(number, item, done=number, is_by_hand=True)
            batch = self._drawn(item, f"Batch {number}", keywords)
            value = self._advance(batch, rows.fetch(batch, rows.sizes))
            rows.settle()
        finally:
            rows.preparation.settle(rows.steps_done)
        return value

    def run(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        """See `HostTrainer.run`. Between two values other threads have their turn."""
        worker = Worker()
        values = self._run(batches, ahead, worker)

        def end() -> None:
            try:
                values.close()
            finally:
                worker.end()

        # A run that is open when the process ends is closed while JAX still works. (At
        # that time this module has lost its names.)
        unregister = atexit.unregister
        try:
            atexit.register(end)
            yield from values
        finally:
            worker.end(waits=False)
            unregister(end)

    def _run(
        self, batches: Iterable[Any], ahead: int, worker: Worker
    ) -> Generator[Any, None, None]:
        rows, source = self._rows, Source(self._rows, self._drawn, self._turn)
        before: BatchRows | None = None  # of the last step, which that may lack
        state: Any = None  # of the rows after it
        work: Any = None  # beside it
        config: Any = jax.config  # not all of it has types in every version
        rows.check(changes=True)
        self._source = source  # what a run before it had drawn is no more of interest
        # One that was left is closed by who drops it: the collector, in the middle of
        # another call, or in the thread of another run. So it waits for nobody, and the
        # next call settles.
        is_closed = False
        try:
            source.iterator = iter(batches)
            try:
                while drawn := len(first := source.peek(1)):
                    # Ids that depend on parameters do not exist before the next step.
                    if not first[0].needs_params:
                        source.peek(2 + ahead * rows.looks_ahead)
                    with rows.access.alone():
                        rows.check()  # a child of `fork` has no thread to wait for
                        # What the loader does, `Vocabulary.assign` for example, is
                        # done beside the work, too.
                        fetched = None if work is None else work.result()
                        rows.check(changes=True)
                        if self._source is not None:  # of a run beside this one, say
                            self._source.settle()
                        batch = source.take()
                        if fetched is None or rows.state != state:
                            rows.settle()  # the first one, or the caller has changed it
                            fetched, before = rows.fetch(batch, rows.sizes), None
                        # Asked before the step, which a CPU may run in this thread.
                        following = source.peek(0)
                        x64: bool = config.jax_enable_x64
                        sizes = {**rows.sizes, **fetched.sizes}
                        rows.work = worker
                        work = worker.submit(
                            *(self._beside, x64, rows.unstored),
                            *(following, drawn - 1, sizes),
                        )
                        value = self._advance(batch, fetched, before)
                        state, kept = rows.state, rows.unstored
                        # None where the thread has seen that the last step has failed.
                        before = kept[-1] if kept else None
                    yield value
                    with rows.access.alone():
                        if rows.torn:
                            work.result()  # which raises what has failed, if it has
                        rows.check(changes=True)
                if work is not None:
                    with rows.access.alone():
                        work.result()  # where the step before the last one has failed
            except GeneratorExit:
                is_closed = True
                raise
            finally:
                worker.end(waits=not is_closed)
        finally:
            try:
                if self._ahead is source:  # for `settle`
                    rows.left = functools.partial(self._leave, source)
                if not is_closed:
                    with rows.access.alone():
                        rows.settle()
                elif self._ahead is source and _is_left_by_user():
                    with rows.access.alone():
                        self._leave(source)
            finally:
                if self._source is source:
                    self._left = source.left
                    self._source = None

    def _beside(self, x64: bool, *work: Any) -> BatchRows | None:
        """What the thread does during a step."""
        # The caller's setting may be that of its thread: rows would become float32.
        with jax.enable_x64(x64):
            return self._write_and_fetch(*work)

    def _write_and_fetch(
        self,
        results: Sequence[BatchRows],
        following: Sequence[Batch],
        num_advised: int,
        sizes: Mapping[tuple[int, ...], int],
    ) -> BatchRows | None:
        rows = self._rows
        rows.write(results)
        for batch in following[max(1, num_advised) :]:
            # What is wrong with a batch is said when its turn comes.
            for store, table, x in zip(
                rows.stores, batch.tables, batch.in_bounds, strict=True
            ):
                for block in table.partition.own(table.partition.cut(x)):
                    store.advise(block)
        if not following or following[0].needs_params:
            return None
        return rows.fetch(following[0], sizes)

    def _advance(
        self, batch: Batch, rows: BatchRows, before: BatchRows | None = None
    ) -> Any:
        """A step on fetched rows, some of which the step before has changed since."""
        arrays = rows.arrays
        if before is not None:
            fetched, made = (rows.arrays, rows.padded), (before.padded, before.arrays)
            arrays = [*map(self._overlay, *fetched, *made)]
        if rows.reset is not None:
            arrays = self._reset(self._rows.rest, arrays, *rows.reset)
        static = tuple(sorted(batch.static.items()))
        # As `Program` does, around which `advance` could not be one call.
        program = self._program or self._compiled(self._rows.rest)
        self._program = None
        positions = rows.padded, rows.residuals
        args = static, self._rows.rest, arrays, positions, batch.args
        rows = rows._replace(step=self._rows.steps, reset=None)
        value = self._rows.advance(program, args, rows)
        self._program = program
        return value


def _is_left_by_user() -> bool:
    """Whether code of the user's has dropped a run, and not the collector.

    That may come in the middle of any call, which has what this would wait for.
    """
    frames = [x for x, _ in traceback.walk_stack(inspect.currentframe())]
    # This function, `_run`, and `run` if Python resumes it to end what it waits for.
    is_resumed = len(frames) > 2 and frames[2].f_code is Pipeline.run.__code__
    names = [x.f_code.co_filename for x in frames[3 if is_resumed else 2 :]]
    return bool(names) and not any(x.startswith(_PACKAGE) for x in names)
