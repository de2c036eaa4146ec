"""`HostTrainer`: `make_train_step` for parameters with tables on the host."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._gradients.evaluate import evaluate
from .._gradients.value_and_grad import Sparse
from .._rows.stale import contains_stale
from ._checkpoint import load, save
from ._ids import RowIds, kept_arguments
from ._pipeline import Pipeline
from ._plan import Plan, compact, static_keywords
from ._records import WORD
from ._reset import reset
from ._table import HostTable, Memory, View

_CHUNK = 1 << 24  # bytes of rows that `map_rows` has on the device


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

    A trainer is used by one thread. Close it, or use it by `with`, to give its files
    back. A KeyboardInterrupt loses no step that has been done.

    Args:
      loss: `loss(params, *batch)`, a scalar, or a pair `(scalar, aux)` if `has_aux`.
      tx: The optimiser, any that `make_train_step` takes.
      params: Tree of arrays and `HostTable`s. Arrays are copied.
      has_aux: Whether `loss` returns a pair.
      sparse: As in `value_and_grad`.
      budget: Bytes that the process may hold, mapped pages of files included; when
        there are more, pages are given back to the system.
      fsync: Whether the journal of a step reaches the disk before rows are changed.
      progress: Wraps the iterator over the pieces of a new table, as `tqdm.tqdm`.

    Raises:
      TypeError: If `tx` is no transformation; by steps, as those of `make_train_step`.
      ValueError: If there is no `HostTable`; if two have one file or one storage; if
        the state of `tx` has rows along another axis. By steps, with the user's line,
        for a loss that uses all of a table, or whose ids depend on rows.
      IndexError: By a step, for an id out of bounds, before anything is changed.
      FileExistsError: If a file is there already: `restore` opens it.
      BlockingIOError: If another trainer has the file.
      OSError: If a disk is full. What could not be written is kept, and written by the
        next call for which there is room.
      MemoryError: If the process holds more than the budget without pages of files.
      NotImplementedError: In one of several processes.

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

    def __init__(
        self,
        loss: Callable[..., Any],
        tx: optax.GradientTransformation,
        params: Any,
        has_aux: bool = False,
        *,
        sparse: Sparse = None,
        budget: float | None = None,
        fsync: bool = False,
        progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    ):
        self._begin(loss, tx, params, has_aux, sparse, budget, fsync)
        try:
            for k, index in enumerate(self._plan.tables):
                storage = self._new_storage(k)
                pieces: Any = self._plan.init_records(
                    index, self._steps.dense, skips_zeros=isinstance(storage, Memory)
                )
                for first, records in progress(pieces) if progress else pieces:
                    if isinstance(storage, Memory):
                        storage.append(first, records)
                    else:
                        storage.put(np.arange(first, first + len(records)), records)
                if hasattr(storage, "finish"):
                    storage.finish()
            self._steps.rest = self._plan.init_rest(self._steps.dense)
        except BaseException:
            self.close()
            raise

    def _begin(
        self,
        loss: Callable[..., Any],
        tx: Any,
        params: Any,
        has_aux: bool,
        sparse: Sparse,
        budget: float | None,
        fsync: bool,
    ) -> None:
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"HostTrainer runs in one process, and here are {jax.process_count()}. "
                "The page on large tables names what there is for several."
            )
        self._plan = plan = Plan(tx, params)
        _refuse_shared(plan)
        self._loss, self._params = loss, params
        self._budget, self._fsync = budget, fsync
        leaves = [x for x in jax.tree.leaves(params) if not isinstance(x, HostTable)]
        program = plan.step(loss, params, has_aux=has_aux, sparse=sparse)
        ids = RowIds(loss, plan.tables, plan.treedef)
        # Steps donate the arrays, which are the caller's.
        self._steps = Pipeline(plan, program, ids, [jnp.array(x) for x in leaves])

    def _new_storage(self, k: int, *, exists: bool = False) -> Any:
        """The storage of a table, begun or opened."""
        index = [*self._plan.tables][k]
        host, table = self._plan.hosts[index], self._plan.tables[index]
        layout = self._plan.layouts[k]
        storage: Any = host.storage
        if storage is None and host.file is None:
            storage = Memory(host.shape[0], layout)
        elif storage is None:
            from ._file import File  # needs POSIX

            storage = File(Path(host.file), table.name, host.shape[0], layout)  # type: ignore[arg-type]
            self._steps.storages[k] = storage  # to be closed
            storage.open() if exists else storage.create()
            storage.budget = self._budget
        self._steps.storages[k] = storage
        return storage

    def checkpoint(self, path: Any) -> None:
        """Makes a checkpoint, in place of an earlier one if there is one.

        A table in a file stays there; the folder gets the rest, and from now on a
        journal of what rows were. Of a table in memory the folder gets a copy.

        Args:
          path: Of a folder, which is made if it is not there.

        Raises:
          FileExistsError: If the folder has a checkpoint of another run.
          OSError: If a disk is full; the last checkpoint is as it was.
        """
        self._steps.check_open()
        self._steps.settle()
        save(self._steps, Path(path), self._fsync)

    @classmethod
    def restore(
        cls,
        path: Any,
        loss: Callable[..., Any],
        tx: optax.GradientTransformation,
        params: Any,
        has_aux: bool = False,
        *,
        sparse: Sparse = None,
        budget: float | None = None,
        fsync: bool = False,
    ) -> "HostTrainer":
        """A trainer that goes on from a checkpoint, whatever has happened since.

        Args:
          path: Of the checkpoint.
          loss: As for the trainer that made it, and so on.
          tx: The optimiser.
          params: Its parameters. Of arrays only shapes, types and devices matter, and
            `init` of tables is not called.
          has_aux: Whether `loss` returns a pair.
          sparse: As in `value_and_grad`.
          budget: As for `HostTrainer`.
          fsync: As for `HostTrainer`.

        Returns:
          The trainer; the checkpoint is made anew.

        Raises:
          FileNotFoundError: If there is no checkpoint, or a file of it is missing.
          PermissionError: If a file cannot be written.
          ValueError: If it is one of other parameters or of another optimiser, or a
            file of rows belongs to another checkpoint.
          BlockingIOError: If another trainer has a file.
        """
        self = cls.__new__(cls)
        self._begin(loss, tx, params, has_aux, sparse, budget, fsync)
        try:
            self._steps.rest = self._plan.init_rest(self._steps.dense)
            for k in range(len(self._plan.layouts)):
                self._new_storage(k, exists=True)
            load(self._steps, Path(path))
            save(self._steps, Path(path), fsync)
        except BaseException:
            self._close_files()
            raise
        return self

    @property
    def steps(self) -> int:
        """How many steps have been done since the beginning, over restarts."""
        return self._steps.steps

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """One step. Its rows are in host memory, or in the file, when it returns.

        Args:
          *batch: What the loss takes beside the parameters.
          **keywords: As for a step of `make_train_step`.

        Returns:
          The loss, or a pair of it and `aux`.
        """
        self._steps.check_open()
        return self._steps.step(*_with_static(self._loss, batch, keywords))

    def run(self, batches: Iterable[Any], *, ahead: int = 4) -> Iterator[Any]:
        """Does a step for each batch, as a pipeline, and yields its value.

        A batch is drawn while the step before it is running. What the iterable raises,
        and what is wrong with a batch, is raised when all steps before are done.
        Between two values the trainer may be used for anything, such as `checkpoint`.

        Args:
          batches: Tuples of what the loss takes beside the parameters; what is no tuple
            is the one argument.
          ahead: Where rows have come from a disk: of how many further batches pages are
            read in advance. So many more batches are drawn.

        Yields:
          The loss, or a pair of it and `aux`.
        """
        self._steps.check_open()
        return self._steps.run(batches, max(0, ahead))

    def evaluate(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun(params, *args)` on the rows as they are now, without a gradient.

        As `optax_sparse_adam.evaluate`: rows of `exact_adam` are brought up to date.

        Args:
          fun: Any function that JAX can trace; what it returns may not hold a table.

        Returns:
          A function of the further arguments. Keep it: it is compiled once.
        """
        tables, few = self._plan.tables, compact(fun, self._params)
        ids = RowIds(fun, tables, self._plan.treedef)

        def on_rows(
            static: Any, dense: Any, rest: Any, words: Any, rows: Any, args: Any
        ) -> Any:
            params, state = self._plan.of_records(dense, rest, words)
            read = state if contains_stale(state) else None
            batch, keywords = args
            bound = evaluate(few, read=read)
            return bound(params, rows, *batch, **keywords, **dict(static))

        program = jax.jit(on_rows, static_argnums=0)

        def evaluated(*args: Any, **keywords: Any) -> Any:
            self._steps.check_open()
            steps = self._steps
            steps.settle()
            traced, static = _with_static(fun, args, keywords)
            batch = steps.ask(ids, traced, static, "The batch of evaluate")
            rows = steps.padded_rows(batch)
            return program(
                tuple(sorted(static.items())),
                *(steps.dense, steps.rest, rows.words, rows.padded, traced),
            )

        return evaluated

    def map_rows(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """`params, state = function(params, state)`, by chunks of rows.

        For functions that treat each row alone, as `optax_sparse_adam.flush` does, or a
        decay of all rows. If there has been a checkpoint, the journal takes what all
        rows were; make another one after it.

        Args:
          function: Gets parameters and state of as many rows as fit, of each table, and
            returns both in the same shapes. Jitted.

        Raises:
          ValueError: Before anything is changed, if what is no row depends on rows in
            the result, or has another shape or type.
        """
        self._steps.check_open()
        steps, plan = self._steps, self._plan
        steps.settle()
        words = max(layout.words for layout in plan.layouts)
        most = max(x.shape[0] for x in plan.tables.values())
        size = min(most, max(1, _CHUNK // (words * WORD)))

        def mapped(words: Any, dense: Any, rest: Any) -> Any:
            return plan.to_records(*function(*plan.of_records(dense, rest, words)))

        shapes = [
            jax.ShapeDtypeStruct((size, x.words), jnp.uint32) for x in plan.layouts
        ]
        given = shapes, steps.dense, steps.rest
        trees = jax.eval_shape(
            lambda words, dense, rest: plan.of_records(dense, rest, words), *given
        )
        if jax.eval_shape(function, *trees) != trees:
            raise ValueError(
                "map_rows needs a function that returns parameters and state in the "
                "shapes and types that it gets."
            )
        flat, structure = jax.tree.flatten(given)

        def others(*leaves: Any) -> Any:
            return mapped(*jax.tree.unflatten(structure, leaves))[:2]

        if any(i < len(shapes) for i in kept_arguments(others, flat)):
            raise ValueError(
                "map_rows needs a function that treats each row alone; in the result "
                "of this one, arrays that are no rows depend on rows, of which it sees "
                "some at a time."
            )
        program, result = jax.jit(mapped), None
        steps.version += 1
        for first in range(0, most, size):
            rows = [
                np.arange(first, min(first + size, x.shape[0]))
                for x in plan.tables.values()
            ]
            records = steps.take(rows, size)
            result = program(records, steps.dense, steps.rest)
            arrays = zip(result[2], rows, strict=True)
            steps.store(rows, [np.asarray(x)[: len(own)] for x, own in arrays])
        assert result is not None
        steps.dense, steps.rest = result[:2]

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
        self._steps.check_open()
        reset(self._steps, ids, rows)

    # What the user reads.

    @property
    def params(self) -> Any:
        """The parameters, with an array of NumPy for each leaf.

        Tables are read-only views of memory, or of the file. Others are copies.
        """
        return self._trees()[0]

    @property
    def state(self) -> Any:
        """The state of the optimiser, likewise."""
        return self._trees()[1]

    def _trees(self) -> Any:
        self._steps.check_open()
        steps = self._steps
        steps.settle()

        def copied(x: Any) -> Any:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return jnp.array(x) if is_key else np.array(x)

        arrays = [self._views(k) for k in range(len(self._plan.layouts))]
        return self._plan.join(
            [copied(x) for x in steps.dense], [copied(x) for x in steps.rest], arrays
        )

    def _views(self, k: int) -> list[Any]:
        storage, layout = self._steps.storages[k], self._plan.layouts[k]
        numbers = range(len(layout.fields))
        if not isinstance(storage, Memory):
            rows = [*self._plan.tables.values()][k].shape[0]
            return [View(storage, layout, n, rows) for n in numbers]
        views = [layout.view(storage.records, n) for n in numbers]
        for x in views:
            x.flags.writeable = False
        return views

    # The end.

    def close(self) -> None:
        """Writes what is pending, and gives files back. May be called twice."""
        if self._steps.is_open:
            self._steps.is_open = False
            try:
                self._steps.settle()
            finally:
                self._close_files()

    def _close_files(self) -> None:
        if self._steps.journal is not None:
            self._steps.journal.close()
        for x in self._steps.storages:
            if isinstance(x, Memory):
                x.close()

    def __enter__(self) -> "HostTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_shared(plan: Plan) -> None:
    """Two tables in one file, or in one storage, would overwrite each other."""
    seen: dict[Any, str] = {}
    for i, host in plan.hosts.items():
        if host.file is not None:
            key: Any = Path(host.file).resolve()
        elif host.storage is not None:
            key = id(host.storage)
        else:
            continue
        if key in seen:
            raise ValueError(
                f"Each table needs a file or a storage of its own; {seen[key]} and "
                f"{plan.tables[i].name} have the same one."
            )
        seen[key] = plan.tables[i].name


def _with_static(
    fun: Callable[..., Any], batch: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    static = static_keywords(fun, keywords)
    traced = {name: x for name, x in keywords.items() if name not in static}
    return (batch, traced), static
