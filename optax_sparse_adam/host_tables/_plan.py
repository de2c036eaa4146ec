"""A training step on the rows of a batch: what is known before the first batch.

    fetch    records [K, words] of the rows of a batch
    join     parameters and state of a table of K rows
    step     `make_train_step` of the compact loss
    split    records again, and what is no row

Which arrays of the state have rows is asked of `tx.init`, as the row verbs do.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._optimizers.hyperparameters import check_transformation
from .._optimizers.lazy_probe import TableSize, find_owners
from .._train_step import make_train_step
from ._compact import evaluate_compact
from ._ids import RowIds
from ._records import WORD, Layout
from ._table import tables_among

_CHUNK = 1 << 24  # bytes of rows that are begun or mapped at once


def compact(fun: Callable[..., Any], params: Any) -> Callable[..., Any]:
    """`fun` on K rows of each table: `compact_fun(params, rows, *args)`.

    Part of what `HostTrainer` does, for a loop of your own: `row_ids` says which rows a
    batch looks up, `compact` makes a loss of them, which `value_and_grad`,
    `make_train_step` and `evaluate` take as they take any other.

    Args:
      fun: `fun(params, *args)`, any function that JAX can trace.
      params: Parameters with `HostTable`s among them.

    Returns:
      The function. Its parameters have `[K, ...]` in the place of each table; `rows` is
      a sequence of int32 `[K]`, one for each table, in the order of
      `jax.tree.leaves(params)`: the numbers of these rows, ascending; where there are
      fewer rows than K, the table's number of rows for the rest.

    Raises:
      ValueError: By the returned function, if all of a table is used or returned, or
        if it is looked up under a `vmap` over tables and their ids.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import host_tables as host
      >>> params = {"table": host.HostTable((1000, 4)), "w": jnp.ones(4)}
      >>> def loss(params, ids):
      ...     return jnp.sum((params["table"][ids] @ params["w"] - 1) ** 2)
      >>> batch = jnp.array([900, 7, 900])
      >>> ids, = host.row_ids(loss, params)(params, batch)
      >>> rows = np.unique(ids)
      >>> few = {"table": jnp.zeros((2, 4)), "w": params["w"]}
      >>> float(host.compact(loss, params)(few, [jnp.asarray(rows)], batch))
      3.0
    """
    _, tables, _ = tables_among(params)

    @functools.wraps(fun)
    def compact_fun(
        params: Any, rows: Sequence[Any], *args: Any, **keywords: Any
    ) -> Any:
        bound = functools.partial(fun, **keywords)
        return evaluate_compact(bound, tables, params, list(rows), args)[0]

    return compact_fun


def row_ids(fun: Callable[..., Any], params: Any) -> Callable[..., list[jax.Array]]:
    """Which rows a function looks up: `ids(params, *args)`.

    Args:
      fun: `fun(params, *args)`, any function that JAX can trace.
      params: Parameters with `HostTable`s among them.

    Returns:
      A function that returns for each table int32 `[n]`: an id for each lookup, in any
      order, duplicates included. The table's number of rows stands for what reads no
      row, such as an id out of bounds of a lookup with `mode="fill"`; for an id out of
      bounds against a lookup's promise stands a negative or larger number.

    Raises:
      ValueError: By the returned function, as `compact`, and if ids depend on rows.
    """
    _, tables, treedef = tables_among(params)
    found = RowIds(fun, tables, treedef)

    def ids(params: Any, *args: Any, **keywords: Any) -> list[jax.Array]:
        leaves = treedef.flatten_up_to(params)
        dense = [x for i, x in enumerate(leaves) if i not in tables]
        static = static_keywords(fun, keywords)
        traced = {k: x for k, x in keywords.items() if k not in static}
        return found(dense, (args, traced), static)

    return ids


def static_keywords(
    fun: Callable[..., Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Those that `make_train_step` does not trace: see there."""
    try:
        known = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return {}
    defaults = {name: x.default for name, x in known.items()}
    flags = (name for name in keywords if isinstance(defaults.get(name), bool | str))
    return {name: keywords[name] for name in flags}


class Plan:
    """The parameters and the state of a trainer: which parts of them are rows.

    Attributes:
      hosts: The `HostTable`s, by the index of their leaf.
      tables: What is known of each, likewise.
      layouts: The records of each table, in the same order.
      names: Of what is no row: the dense parameters, and the rest of the state.
      fields: For each table and array of it a name, for the user's trees.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any):
        check_transformation(tx, "HostTrainer")
        self.tx = tx
        self.hosts, self.tables, self.treedef = tables_among(params)
        if not self.hosts:
            raise ValueError(
                "HostTrainer needs a HostTable among the parameters; for parameters "
                "on the device there is make_train_step."
            )
        pairs = jax.tree_util.tree_leaves_with_path(params)
        shapes = [jax.ShapeDtypeStruct(np.shape(x), _type_of(x)) for _, x in pairs]
        state = jax.eval_shape(tx.init, self.treedef.unflatten(shapes))
        self.state_treedef: Any = jax.tree.structure(state)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        sizes = {i: TableSize(x.shape, 1, 0) for i, x in self.tables.items()}
        # For each array of the state the table whose rows it holds, if any.
        self.owners = find_owners(
            *(tx.init, self.treedef, sizes, shapes, [x for _, x in leaves]),
            "HostTrainer",
        )
        names = [f"state{jax.tree_util.keystr(path)}" for path, _ in leaves]
        fields = {i: [(x.name, x.shape[1:], x.dtype)] for i, x in self.tables.items()}
        for (_, x), owner, name in zip(leaves, self.owners, names, strict=True):
            if owner is not None:
                fields[owner].append((name, x.shape[1:], x.dtype))
        self.layouts = [Layout(x) for x in fields.values()]
        dense = [
            f"params{jax.tree_util.keystr(path)}"
            for i, (path, _) in enumerate(pairs)
            if i not in self.tables
        ]
        self.num_dense = len(dense)
        owned = zip(names, self.owners, strict=True)
        self.names = [*dense, *(name for name, owner in owned if owner is None)]

    # Between the user's trees and lists: dense parameters, the rest of the state, and
    # for each table its arrays, as its layout says.

    def join(
        self, dense: Sequence[Any], rest: Sequence[Any], arrays: Sequence[Sequence[Any]]
    ) -> tuple[Any, Any]:
        """Parameters and state."""
        of_tables = dict(zip(self.tables, map(iter, arrays), strict=True))
        others, left = iter(dense), iter(rest)
        params = [
            next(of_tables[i]) if i in of_tables else next(others)
            for i in range(self.treedef.num_leaves)
        ]
        state = [next(left if i is None else of_tables[i]) for i in self.owners]
        return self.treedef.unflatten(params), self.state_treedef.unflatten(state)

    def split(self, params: Any, state: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """The inverse of `join`."""
        leaves = self.treedef.flatten_up_to(params)
        arrays = {i: [leaves[i]] for i in self.tables}
        rest: list[Any] = []
        own = self.state_treedef.flatten_up_to(state)
        for x, owner in zip(own, self.owners, strict=True):
            (rest if owner is None else arrays[owner]).append(x)
        dense = [x for i, x in enumerate(leaves) if i not in self.tables]
        return dense, rest, list(arrays.values())

    def of_records(
        self, dense: Sequence[Any], rest: Sequence[Any], words: Sequence[jax.Array]
    ) -> tuple[Any, Any]:
        pairs = zip(self.layouts, words, strict=True)
        return self.join(dense, rest, [layout.cut(x) for layout, x in pairs])

    def to_records(self, params: Any, state: Any) -> tuple[list[Any], list[Any], Any]:
        dense, rest, arrays = self.split(params, state)
        pairs = zip(self.layouts, arrays, strict=True)
        return dense, rest, [layout.join(x) for layout, x in pairs]

    # The beginning.

    def init_rest(self, dense: Sequence[Any]) -> list[Any]:
        """What is no row in the state of `tx.init`."""
        params = self._params(dense, {})
        # A training step donates it, and two arrays of a state may be one.
        return [jnp.array(x) for x in self.split(params, self.tx.init(params))[1]]

    def init_records(
        self, index: int, dense: Sequence[Any], *, skips_zeros: bool
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The records of a new table in pieces, each with its first row.

        Where all of them are zeros, nothing, if that may be skipped.
        """
        host, place = self.hosts[index], [*self.tables].index(index)
        layout, total = self.layouts[place], host.shape[0]
        size = max(2, min(total, _CHUNK // (layout.words * WORD)))

        @jax.jit
        def arrays(dense: Sequence[Any], rows: jax.Array) -> list[Any]:
            params = self._params(dense, {index: rows})
            return list(self.split(params, self.tx.init(params))[2][place])

        rows = np.zeros((size, *host.shape[1:]), host.dtype)
        if host.init is None:
            records = layout.pack(arrays(dense, rows), size)
            if skips_zeros and not records.any():
                return
        for first in range(0, total, size):
            count = min(size, total - first)
            if host.init is not None:
                given = np.asarray(host.init(first, first + count))
                if given.shape != (count, *host.shape[1:]):
                    raise ValueError(
                        f"`init` of {self.tables[index].name} returned the shape "
                        f"{given.shape} for the rows from {first} to before "
                        f"{first + count}, of the shape {(count, *host.shape[1:])}."
                    )
                rows[:count] = given.astype(host.dtype)
                records = layout.pack(arrays(dense, rows), count)
            yield first, records[:count]

    def _params(self, dense: Sequence[Any], rows: Mapping[int, Any]) -> Any:
        few = {i: jnp.zeros((2, *x.shape[1:]), x.dtype) for i, x in self.tables.items()}
        of_tables, others = few | dict(rows), iter(dense)
        return self.treedef.unflatten(
            of_tables[i] if i in of_tables else next(others)
            for i in range(self.treedef.num_leaves)
        )

    # Programs.

    def step(self, loss: Callable[..., Any], params: Any, **options: Any) -> Any:
        """`step(static, dense, rest, words, rows, args)`, compiled and donated."""
        inner = make_train_step(compact(loss, params), self.tx, **options)

        @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
        def step(static: Any, dense: Any, rest: Any, words: Any, rows: Any, args: Any):  # type: ignore[no-untyped-def]
            batch, keywords = args
            params, state = self.of_records(dense, rest, words)
            new = inner(params, state, rows, *batch, **keywords, **dict(static))
            return *self.to_records(*new[:2]), new[2]

        return step


@jax.jit
def place(
    words: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    before: Sequence[tuple[jax.Array, jax.Array]] | None,
) -> list[jax.Array]:
    """Records that came from the host, padded to K, and the newer ones among them.

    Args:
      words: `[k, words]` of each table.
      rows: `[K]`, their numbers, padded.
      before: Rows and records of the step before, which were not yet in host memory
        when these were fetched.
    """
    placed = []
    for i, (x, own) in enumerate(zip(words, rows, strict=True)):
        x = jnp.pad(x, ((0, len(own) - len(x)), (0, 0)))
        if before is not None:
            known, newer = before[i]
            at = jnp.minimum(jnp.searchsorted(known, own), len(known) - 1)
            is_newer = known[at] == own  # padding may take padding
            x = jnp.where(is_newer[:, None], newer[at], x)
        placed.append(x)
    return placed


def _type_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
