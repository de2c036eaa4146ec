"""`HostTrainer`: `make_train_step` for parameters with tables on the host."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from .._gradients.marks import Sparse
from ._access import transfers
from ._arguments import begun, check_function, split_keywords
from ._between import evaluated, map_rows, read_all, reset
from ._checkpoint import save
from ._host_rows import HostRows
from ._opening import begin_run, go_on
from ._pipeline import Pipeline
from ._plan import Plan
from ._records import NO_ROOM
from ._reset import BatchWithReset
from ._snapshot import write_snapshot
from ._spread import Spread
from ._stateful import Stateful, checked
from ._together import together


class HostTrainer:
    """Trains parameters with `HostTable`s among them, with the bits of memory.

    A step computes which rows its batch looks up, fetches these and their state from
    the host, and runs `make_train_step(loss, tx)` on them alone; then they are written
    back. Loss, model and optimiser stay as they are, and so do all numbers.

    `step` does one step. `run` is a pipeline: while the device runs a step, a thread
    writes the rows of the step before and reads those of the next one; rows in both are
    taken from the result, on the device.

    A process that is killed at any moment goes on from its last `checkpoint`, to the
    same bits. After a failure of the machine that is so only with `fsync=True`, at the
    price of one wait for the disk in each step.

    Several threads may use it, each call after the other: one may make checkpoints, or
    evaluate, while another one trains. Close it, or use it by `with`, to give its files
    back. A KeyboardInterrupt loses no step that has been done, but in the
    moment in which a new program is called: then it is torn, and says so.

    Args:
      loss: `loss(params, *batch)`, a scalar, or a pair `(scalar, aux)` if `has_aux`.
      tx: The optimiser, any that `make_train_step` takes.
      params: Tree of arrays and `HostTable`s. Arrays are copied.
      has_aux: Whether `loss` returns a pair.
      state: The optimiser's state, if there is one, of a table in memory or of another
        trainer: in the tree of `tx.init`, with arrays of JAX or NumPy, which are
        copied. Where it has fewer rows than a table, the others begin now, as by
        `reset_rows`.
      steps: How many steps that state has seen: `HostTrainer.steps` counts from there.
      prepare: `prepare(step, *batch)`, called for each batch that `step` is given or
        `run` draws, in order, with the number of its step. It returns what the step
        takes: a tuple, the one argument, or a `BatchWithReset`. What it lets the
        vocabularies in `stateful` see of a batch that is not trained is taken back; it
        is called again if that is trained later. It does not use the trainer.
      stateful: What checkpoints hold beside the trainer, by name: a `Vocabulary`, or
        what has its methods `arrays_before` and `restore`: see `Stateful`.
      mesh: A mesh of Auto axes, over whose devices the rows of a batch are split, as
        a table in memory would be by its rows. Without, each device of a batch gets
        all of them. In one of several processes it has the devices of all, and row `r`
        of a table belongs to process `r % processes`; then all make the same calls.
      sparse: As in `value_and_grad`; a function is called with the shapes of whole
        tables, whose gradients are row-sparse.
      budget: Bytes that the process may hold, mapped pages of files included; when
        there are more, pages of all files of the process are given back to the system.
      fsync: Whether the journal of a step reaches the disk before rows are changed.
      progress: Wraps the iterator over the pieces of a new table, as `tqdm.tqdm`.

    Raises:
      TypeError: If `tx` is no transformation; if what is `stateful` is no dictionary of
        such things, the loss, `prepare` or `progress` no function or `mesh` no mesh; by
        steps, as those of `make_train_step`; by what computes on rows of 64 bits, where
        `jax_enable_x64` is not set.
      ValueError: If `steps` or `budget` is no such number; if there is no `HostTable`;
        if `progress` drops a piece, whose rows would be zeros;
        if two have one file or one storage; if the state of `tx` has rows along another
        axis, or begins with what is computed of all rows, such as a norm; if `tx` is
        another one for fewer rows, as by a mask that goes by size, or reads or changes
        rows without a gradient, as `optax.contrib.schedule_free`; or `sparse` says
        that a table's gradient is dense; in one of several processes without a
        `mesh`. By steps, with the user's line, for a loss
        that uses all of a table, or whose ids depend on rows; in one of several
        processes for ids that are computed of what is no global array. By steps, if a
        `Vocabulary` in `stateful` has changed otherwise than by `prepare`, or, without
        it, by `assign` for this very step.
      IndexError: By a step, before anything is changed, for an id out of bounds, or
        for an integer of NumPy that JAX would take for another one.
      FileExistsError: If a file is there already: `restore` opens it.
      BlockingIOError: If another trainer has the file.
      OSError: If a disk is full: what could not be written is kept, and written by the
        next call for which there is room. If another program has cut a file.
      MemoryError: If the process holds more than the budget without pages of files;
        when it is made, before anything is written, and by a step, an evaluation, a
        `map_rows` or a `reset_rows` before it begins.
      NotImplementedError: For a `BatchWithReset`, and by `snapshot`, in one of several
        processes.
      RuntimeError: By any use in a process that was forked, or by a signal's handler in
        the middle of a step, a checkpoint or the like. By a step or an evaluation that
        looks up other ids than those that were computed before it, as of `np.random`;
        after such a step, after one that has raised while it ran, as by a callback,
        and after a `map_rows` that has ended half way, by all but `close`: then
        `restore` goes on from the last checkpoint.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import host_tables as host
      >>> def loss(params, ids):
      ...     return jnp.mean((params["table"][ids] @ params["w"] - 1) ** 2)
      >>> params = {"table": host.HostTable((1_000_000, 4)), "w": jnp.ones(4)}
      >>> trainer = host.HostTrainer(loss, osa.sparse_adam(0.1), params)
      >>> batches = [np.array([3, 900_000, 3]), np.array([900_000, 7, 8])]
      >>> [round(float(value), 4) for value in trainer.run(batches)]
      [1.0, 0.7867]
      >>> trainer.params["table"][[3, 5], 0].round(4)
      array([0.1, 0. ], dtype=float32)
    """

    @transfers
    def __init__(
        self,
        loss: Callable[..., Any],
        tx: optax.GradientTransformation,
        params: Any,
        has_aux: bool = False,
        *,
        state: Any = None,
        steps: int = 0,
        prepare: Callable[..., Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        mesh: Mesh | None = None,
        sparse: Sparse = None,
        budget: float | None = None,
        fsync: bool = False,
        progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    ):
        if not hasattr(steps, "__index__") or operator.index(steps) < 0:
            raise ValueError(f"HostTrainer needs a count of steps, got {steps!r}.")
        parts = checked("HostTrainer", stateful)
        self._start(loss, tx, params, has_aux, sparse, mesh)
        self._rows.hold(parts, prepare)
        self._rows.steps = int(steps)
        begin_run(self._rows, state, budget, fsync, progress)
        self._rows.preparation.begin(self._rows.steps)

    def _start(
        self,
        loss: Any,
        tx: Any,
        params: Any,
        has_aux: bool,
        sparse: Sparse,
        mesh: Mesh | None,
    ) -> None:
        check_function(loss, "HostTrainer needs a loss, a function (params, *batch)")
        self._loss, self._params = loss, params
        self._rows = rows = HostRows(Plan(tx, params, Spread(mesh)))
        sparse = rows.plan.of_whole_tables(sparse)
        self._pipeline = Pipeline(*(rows, loss, params), has_aux=has_aux, sparse=sparse)

    def checkpoint(self, path: Any) -> None:
        """Makes a checkpoint, in place of an earlier one if there is one.

        A table in a file stays there; the folder gets the rest, and from now on a
        journal of what rows were. A table in memory is copied into the folder. What is
        `stateful` is of the same step, whatever a loader has drawn ahead.

        Args:
          path: Of a folder, which is made if it is not there.

        Raises:
          BlockingIOError: If another trainer makes one there.
          FileExistsError: If the folder has a checkpoint of another run.
          FileNotFoundError: If the file of a table is no more at its path.
          ValueError: If the folder has a checkpoint that cannot be read; if what is
            `stateful` does not know what it was at this step.
          OSError: If a disk is full; the last checkpoint is as it was.
        """
        with self._rows.access.alone():
            self._rows.check()
            with together("HostTrainer.checkpoint"):
                self._rows.settle()
            save(self._rows, Path(path).absolute())

    @classmethod
    @transfers
    def restore(
        cls,
        path: Any,
        loss: Callable[..., Any],
        tx: optax.GradientTransformation,
        params: Any,
        has_aux: bool = False,
        *,
        prepare: Callable[..., Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        mesh: Mesh | None = None,
        sparse: Sparse = None,
        budget: float | None = None,
        fsync: bool = False,
    ) -> "HostTrainer":
        """A trainer that goes on from a checkpoint, whatever has happened since.

        Args:
          path: Of the checkpoint, which may be of another number of processes.
          loss: As for the trainer that made it, and so on.
          tx: The optimiser.
          params: Its parameters. Of arrays only shapes, types and devices matter: they
            may be `jax.ShapeDtypeStruct`s. `init` of tables is not called.
          has_aux: Whether `loss` returns a pair.
          prepare: As for `HostTrainer`.
          stateful: Of the same names; each is given what was saved of it.
          mesh: As for `HostTrainer`; not necessarily the same one.
          sparse: As in `value_and_grad`.
          budget: As for `HostTrainer`.
          fsync: As for `HostTrainer`.

        Returns:
          The trainer; the checkpoint is written again.

        Raises:
          FileNotFoundError: If there is no checkpoint, or a file of it is missing.
          PermissionError: If a file cannot be written.
          ValueError: If it is one of other parameters, or of an optimiser whose state
            has other paths, shapes or types (of `lazy(adam)` and `lazy(adamw)` they are
            the same), or damaged, or if rows that are not in memory have changed
            otherwise than its journal says: of an older checkpoint, or a folder that
            was copied without them; if what is `stateful` has other names, or refuses
            what was saved. No row is changed then; of several that are `stateful`,
            those before it are restored.
          TypeError: If what is `stateful` is no dictionary of such things.
          BlockingIOError: If another trainer has a file, or makes a checkpoint there.
          NotImplementedError: With another number of processes, where a table is in a
            storage of the user's, or something is `stateful`.
        """
        parts = checked("HostTrainer.restore", stateful)
        params = jax.tree.map(begun, params)
        self = cls.__new__(cls)
        self._start(loss, tx, params, has_aux, sparse, mesh)
        self._rows.hold(parts, prepare)
        go_on(self._rows, Path(path).absolute(), budget, fsync)
        self._rows.preparation.begin(self._rows.steps)
        return self

    @property
    def steps(self) -> int:
        """How many steps have been done since the beginning, over restarts."""
        return self._rows.steps_done

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """One step. Its rows are in host memory, or in the file, when it returns.

        Args:
          *batch: What the loss takes beside the parameters, or `prepare`; or a
            `BatchWithReset`.
          **keywords: As for a step of `make_train_step`.

        Returns:
          The loss, or a pair of it and `aux`.
        """
        with self._rows.access.alone():
            self._rows.check(changes=True)
            split = split_keywords(self._loss, keywords)
            is_reset = len(batch) == 1 and isinstance(batch[0], BatchWithReset)
            return self._pipeline.step(batch[0] if is_reset else batch, *split)

    def run(self, batches: Iterable[Any], *, ahead: int = 4) -> Iterator[Any]:
        """Does a step for each batch, as a pipeline, and yields its value.

        A batch is drawn before the step of the one before it is done, and copied, as
        the iterable may use its arrays again. What the iterable
        raises, and what is wrong with a batch, is raised when all steps before are
        done. Between two values the trainer may be used for anything; by the iterable,
        to read it and to make checkpoints.

        Args:
          batches: Tuples of what the loss takes beside the parameters, or `prepare`;
            what is no tuple is the one argument. Each may be in a `BatchWithReset`.
          ahead: Where rows have come from a disk: of how many further batches pages are
            read in advance. So many more batches are drawn.

        Yields:
          The loss, or a pair of it and `aux`.

        Raises:
          RuntimeError: If the iterable changes the trainer.
          ValueError: If `ahead` is no number of batches.
        """
        self._rows.check()
        if not hasattr(ahead, "__index__") or operator.index(ahead) < 0:
            raise ValueError(
                "HostTrainer.run needs `ahead`, a number of batches from 0 on, got "
                f"{ahead!r}."
            )
        return self._pipeline.run(batches, ahead)

    @property
    def drawn(self) -> list[tuple[Any, ...] | BatchWithReset]:
        """Batches that the last `run` has drawn and not trained, the first one first.

        There are some where it was left by `break`, by an exception or by a
        KeyboardInterrupt, whether or not its iterator is closed: of a batch that has
        raised, that one, too. `iterator = itertools.chain(trainer.drawn, iterator)`, of
        the iterator that it was left with, and `run(iterator)` go on as if nothing had
        happened, also after another such end. They stay those of the run before until
        the new one has drawn: for a `run` that did not begin, do not chain them again.
        An iterator that begins at `trainer.steps` can do without. They are as they were
        before `prepare`.
        """
        return [*self._pipeline.drawn]

    def evaluate(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun(params, *args)` on the rows as they are now, without a gradient.

        As `optax_sparse_adam.evaluate`: rows of `exact_adam` are brought up to date.

        Args:
          fun: Any function that JAX can trace; what it returns may not hold a table.

        Returns:
          A function of the further arguments, of what `fun` returns. Keep it: it is
          compiled once, and what is no array of JAX is that of its first call.

        Raises:
          TypeError: If `fun` is no function.
        """
        return evaluated(self._rows, fun)

    @transfers
    def snapshot(self, path: Any) -> None:
        """Writes all parameters as they are now, for a `Snapshot` to serve.

        Nothing changes. Other threads wait. Rows are read by `evaluate` in parts,
        within the budget. A table takes as much of the disk as it would of memory; the
        optimiser's state is not there. What is `stateful` is of the same step.

        Args:
          path: Of a new folder, which is there when all of it is on the disk.

        Raises:
          BlockingIOError: If another trainer writes it.
          FileExistsError: If it is there already.
          OSError: If a disk is full; then there is no folder.
          ValueError: If what is `stateful` does not know what it was at this step.
        """
        with self._rows.access.alone():
            write_snapshot(self._rows, Path(path).absolute())

    @transfers
    def map_rows(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """`params, state = function(params, state)`, by chunks of rows.

        For functions that treat each row alone, as `optax_sparse_adam.flush` does, or a
        decay of all rows. If there has been a checkpoint, the journal takes what all
        rows were; make another one after it.

        Args:
          function: Gets parameters and state of as many rows as fit, of each table, and
            returns both in the same shapes and types, where a number of Python's is of
            the type of what it replaces. Jitted.

        Raises:
          TypeError: If it is no function.
          ValueError: Before anything is changed, if rows are seen to depend on other
            rows, in a trial with as many as a chunk has, or on their numbers; if what
            has no rows depends on rows, or has another shape or type. What is raised
            later, such as a KeyboardInterrupt, leaves some rows as they were: go on
            from a checkpoint.
        """
        with self._rows.access.alone():
            map_rows(self._rows, function)

    @transfers
    def reset_rows(self, ids: Any, rows: Any) -> None:
        """Resets rows to new values, and their state to that of `tx.init`.

        As `optax_sparse_adam.reset_rows` in memory, between steps. For keys that come
        and go, `ids` are the `fresh` rows of a `Vocabulary`.

        Args:
          ids: `[k]` integers for each `HostTable`, and `None` for what is left, in a
            tree that is a prefix of the parameters'. Ids out of bounds are padding.
          rows: The new values, `[k, ...]`, in the tree of the parameters. What is given
            where `ids` has `None` is ignored.

        Raises:
          TypeError: For rows of another type than their table.
          ValueError: For ids in another tree, of an array that is no `HostTable`, or
            that name a row twice; for rows of another shape.
        """
        with self._rows.access.alone():
            reset(self._rows, self._params, ids, rows)

    # What the user reads.

    @property
    def params(self) -> Any:
        """The parameters, with an array of NumPy for each leaf.

        Tables are read-only views of memory, or of the file; in one of several
        processes, of the rows that belong to it. Others are copies. Of a `storage` it
        is an object with rows, `view[ids]`, of which `np.asarray(view)` takes all.
        """
        return read_all(self._rows)[0]

    @property
    def state(self) -> Any:
        """The state of the optimiser, likewise."""
        return read_all(self._rows)[1]

    # The end.

    def close(self) -> None:
        """Writes what is pending, and gives files back. May be called twice.

        After a KeyboardInterrupt in it a second call gives back the rest.

        Raises:
          OSError: If the disk, or a quota, has no room for what is pending. The trainer
            stays open: make room, and call it again. After what else it raises, such as
            an error of a `Storage`, it is closed: go on from the last checkpoint.
        """
        rows = self._rows
        with rows.access.alone():
            if rows.is_closed or rows.access.is_of_another_process:
                return
            rows.access.refuse_in_batches()
            rows.is_open = False
            try:
                rows.settle()
                self._pipeline.close()
            except BaseException as error:
                rows.is_open = getattr(error, "errno", None) in NO_ROOM
                raise
            finally:
                if not rows.is_open:
                    rows.close()

    def __enter__(self) -> "HostTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
