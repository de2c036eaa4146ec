"""Rows as things: taken out of tables, put back, begun again.

A row is its numbers and what the optimiser keeps of it. Only the optimiser knows what
that is, so `tx.init` is traced for tables of other sizes: an array of the state whose
first axis follows the number of rows of a table holds its rows (`find_owners`). All
other arrays belong to all rows. For a table `[1000, 8]`, a vector `w`, `sparse_adam`:

    ids      table [k], w None
    params   table [1000, 8], w [8]        taken: table [k, 8], w [8]
    state    count [], mu and nu likewise  taken: count [], mu and nu likewise

Arrays of JAX are read by a gather and written by a scatter, those of NumPy by indexing.

Known limit: tables with one index for each row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

from ._exact_adam.state import begin_now, clocks_of
from ._optimizers.lazy_probe import TableSize, find_owners
from ._rows import gather_scatter
from ._rows.checks import leaves_like
from ._rows.coalesce import widen_indices
from ._rows.padding import in_bounds, pad_indices

Params = TypeVar("Params")
State = TypeVar("State")


class _Table(NamedTuple):
    """A parameter, `[num_rows, ...]`, of which some rows are meant.

    Attributes:
      verb: The public function, for errors.
      path: Where the parameter is, likewise.
      num_rows: How many rows it has.
      ids: `[k]`, integers. What is out of bounds is padding.
    """

    verb: str
    path: str
    num_rows: int
    ids: Any

    def take(self, x: Any) -> Any:
        """The rows of an array of the table; padding reads any of them."""
        if isinstance(x, np.ndarray):
            return np.asarray(x)[np.clip(self._known_ids(), 0, len(x) - 1)]
        return gather_scatter.take_rows(x, self._indices())

    def put(self, x: Any, rows: Any) -> Any:
        """The array with these rows; one of NumPy itself."""
        if isinstance(x, np.ndarray):
            ids = self._known_ids()
            inside = (ids >= 0) & (ids < len(x))
            x[ids[inside]] = np.asarray(rows)[inside]
            return x
        return gather_scatter.scatter_rows(x, self.distinct(), jnp.asarray(rows))

    def distinct(self) -> jax.Array:
        """The indices `[k, 1]`, with padding of which no index is there twice."""
        indices, shape = self._indices(), (self.num_rows,)
        slot = jnp.arange(len(indices), dtype=jnp.int32)
        return pad_indices(indices, in_bounds(indices, shape), slot, shape)

    def refuse_repeated(self) -> None:
        """Raises where a row is seen to be named twice."""
        if isinstance(self.ids, jax.core.Tracer):
            return
        rows, counts = np.unique(np.asarray(self.ids), return_counts=True)
        repeated = rows[(counts > 1) & (rows >= 0) & (rows < self.num_rows)]
        if len(repeated):
            raise ValueError(
                f"{self.verb} needs ids that name each row once, as nobody could say "
                f"which of its values is meant; got row {repeated[0]} of {self.path} "
                "several times. Call np.unique(ids), or under jit jnp.unique(ids, "
                "size=len(ids), fill_value=num_rows)."
            )

    def _indices(self) -> jax.Array:
        return widen_indices(jnp.asarray(self.ids)[:, None], (self.num_rows,))

    def _known_ids(self) -> np.ndarray:
        if isinstance(self.ids, jax.core.Tracer):
            raise TypeError(
                f"{self.verb} reads and writes arrays of NumPy when it is called, and "
                f"needs ids that are known then; got traced ones for {self.path}. Call "
                "it outside of jit, and compile the step on the rows."
            )
        return np.asarray(self.ids)

    def check_rows(self, x: Any, rows: Any) -> None:
        """Raises unless these are rows for an array of the table."""
        shape = (len(self.ids), *np.shape(x)[1:])
        if np.shape(rows) != shape:
            raise ValueError(
                f"{self.verb} needs a row for each of the {len(self.ids)} ids of "
                f"{self.path}: an array of shape {shape}, got {np.shape(rows)}."
            )
        dtype = getattr(rows, "dtype", None) or jnp.result_type(rows)
        if dtype != x.dtype:
            raise TypeError(
                f"{self.verb} needs rows of the type of their table, {x.dtype} for "
                f"{self.path}, got {dtype}. Cast them."
            )


def _tables(verb: str, params: Any, ids: Any) -> list[_Table | None]:
    """The tables among the leaves of the parameters, `None` for the others."""
    structure: Any
    given, structure = jax.tree.flatten(ids, is_leaf=lambda x: x is None)
    try:
        parts = structure.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"{verb} needs ids in a tree that is a prefix of the parameters': an array "
            "for each table, or for a subtree of tables that share it, and None for "
            f"what is left whole; got {structure}: {error}. (A list of ids is a tree "
            "of numbers: use np.array.)"
        ) from None
    pairs = zip(given, parts, strict=True)
    of_leaves = [x for x, part in pairs for _ in jax.tree.leaves(part)]
    each = zip(jax.tree_util.tree_leaves_with_path(params), of_leaves, strict=True)
    return [None if x is None else _table(verb, *found, x) for found, x in each]


def _table(verb: str, path: Any, param: Any, ids: Any) -> _Table:
    name, dtype = jax.tree_util.keystr(path) or "the table", jnp.result_type(ids)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{verb} needs integer ids, got {dtype} for {name}. For the rows of a mask "
            "call jnp.nonzero(mask, size=..., fill_value=num_rows)[0]."
        )
    if np.ndim(ids) != 1:
        raise ValueError(
            f"{verb} needs ids of one axis, got the shape {np.shape(ids)} for {name}. "
            "Call ids.ravel()."
        )
    if np.ndim(param) == 0:
        raise ValueError(
            f"{verb} needs tables with rows, got ids for the scalar {name}. Put None "
            "there: it is left whole."
        )
    return _Table(verb, name, np.shape(param)[0], ids)


@functools.lru_cache(maxsize=64)
def _owners(
    verb: str, tx: Any, treedef: Any, shapes: Any, places: tuple[int, ...]
) -> tuple[Any, list[tuple[int, ...]], list[int | None]]:
    """Structure and shapes of a state, and whose rows each of its arrays holds."""
    params = [jax.ShapeDtypeStruct(*x) for x in shapes]
    state = jax.eval_shape(tx.init, treedef.unflatten(params))
    leaves, structure = jax.tree.flatten(state)
    sizes = {i: TableSize(params[i].shape, 1, 0) for i in places}
    owners = find_owners(tx.init, treedef, sizes, params, leaves, verb)
    return structure, [x.shape for x in leaves], owners


def _of_state(
    tx: Any, params: Any, state: Any, tables: list[_Table | None], verb: str
) -> list[_Table | None]:
    """The table of which each leaf of a state has rows, if any.

    Raises:
      ValueError: If it is not a state of `tx` for these parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
    places = tuple(i for i, table in enumerate(tables) if table is not None)
    structure, expected, owners = _owners(verb, tx, treedef, shapes, places)
    own = jax.tree.structure(state)
    given = [np.shape(x) for x in jax.tree.leaves(state)]
    if own != structure or given != expected:
        is_other = own != structure
        raise ValueError(
            f"{verb} needs the state that tx.init makes of these parameters, "
            f"{structure if is_other else expected}, got {own if is_other else given}. "
            "Pass the transformation and the parameters that the state belongs to."
        )
    return [None if i is None else tables[i] for i in owners]


def _put_each(tree: Any, tables: list[_Table | None], news: list[Any]) -> Any:
    """The tree with new rows of tables; and other arrays where there are new ones."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)

    def put(x: Any, table: _Table | None, new: Any) -> Any:
        if table is not None:
            return table.put(x, new)
        if isinstance(x, np.ndarray) and new is not None:  # in its own memory, too
            x[...] = new
            return x
        return x if new is None else new

    return treedef.unflatten(map(put, leaves, tables, news))


def _check_each(tree: Any, tables: list[_Table | None], news: list[Any]) -> None:
    """Raises for what cannot be written, before anything is."""
    for x, table, new in zip(jax.tree.leaves(tree), tables, news, strict=True):
        if table is not None:
            table.check_rows(x, new)
        elif new is not None and np.shape(new) != np.shape(x):
            raise ValueError(
                "put_rows needs what has no ids whole: an array of shape "
                f"{np.shape(x)}, got {np.shape(new)}."
            )


def _refuse_repeated(tables: list[_Table | None]) -> None:
    each = [table for table in tables if table is not None]
    # Tables that share their ids are looked at once.
    for table in {(id(table.ids), table.num_rows): table for table in each}.values():
        table.refuse_repeated()


def take_rows(
    tx: optax.GradientTransformation, params: Params, state: State, ids: Any
) -> tuple[Params, State]:
    """Copies rows of tables, with the optimiser's state of these rows.

    The result is parameters and state of `tx` for tables of `len(ids)` rows: a training
    step on them, with ids from 0 to `len(ids) - 1`, does to these rows what a step on
    the whole tables does. `put_rows` writes them back. So a table may be larger than
    the memory of the device that trains it.

    Under `exact_adam` stale rows stay stale: they are not brought up to date.

    Args:
      tx: The transformation that made the state: of this package, `lazy` of one of
        optax, or any whose state has the rows of a table along the first axis of some
        arrays; chains, `optax.partition` and `optax.inject_hyperparams` of them, too.
      params: Tree of arrays `[num_rows, ...]` and others, of JAX or of NumPy
        (`np.memmap` included). Those of NumPy are read by rows, where they are.
      state: The state of `tx` for these parameters, likewise.
      ids: `[k]` integers, for each table or for a subtree of tables that share them;
        `None` for leaves that are taken whole. Ids out of bounds, negative ones
        included, are padding, whose rows have no meaning.

    Returns:
      Parameters and state with `[k, ...]` in place of `[num_rows, ...]`. What all rows
      share, such as a step count, is unchanged.

    Raises:
      TypeError: If ids are not integers, or are traced where a table is of NumPy.
      ValueError: If ids are no prefix of the parameters, or have not one axis; for ids
        of a scalar; if the state is not one of `tx` for these parameters, or holds rows
        along another axis.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> import optax_sparse_adam as osa
      >>> table, tx = np.ones((1000, 4), np.float32), osa.sparse_adam(0.1)
      >>> state, ids = tx.init(table), np.array([3, 7])
      >>> rows, row_state = osa.take_rows(tx, table, state, ids)
      >>> step = osa.make_train_step(lambda t, at: jnp.sum(t[at] ** 2), tx)
      >>> rows, row_state, _ = step(rows, row_state, jnp.array([1, 1]))
      >>> table, state = osa.put_rows(tx, table, state, ids, rows, row_state)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 1.0, 0.9]
    """
    tables = _tables("take_rows", params, ids)
    owners = _of_state(tx, params, state, tables, "take_rows")

    def taken(x: Any, table: _Table | None) -> Any:
        if table is not None:
            return table.take(x)
        return np.array(x) if isinstance(x, np.ndarray) else x

    def each(tree: Any, tables: list[_Table | None]) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(map(taken, leaves, tables))

    return each(params, tables), each(state, owners)


def put_rows(
    tx: optax.GradientTransformation,
    params: Params,
    state: State,
    ids: Any,
    rows: Params,
    row_state: State,
) -> tuple[Params, State]:
    """Writes rows into tables, with the optimiser's state of these rows.

    The inverse of `take_rows`. With other ids it clones rows: under every optimiser,
    `exact_adam` included, a clone has the value of its origin now and, with the same
    gradients, at every later step.

    Arrays of NumPy are written in place. Those of JAX are copied, unless `params` and
    `state` are donated under `jit`.

    Args:
      tx: The transformation.
      params: Tree of arrays, as for `take_rows`.
      state: Its state.
      ids: As for `take_rows`. Padding is not written. Each row may be named once: this
        is checked, but not in a compiled program, which writes one of the two.
      rows: Parameters `[k, ...]`; of leaves without ids, the new ones.
      row_state: The state of `tx` for these; what all rows share comes from it.

    Returns:
      The parameters and the state.

    Raises:
      TypeError: As `take_rows`, and for rows of another type than their table.
      ValueError: As `take_rows`; for rows of another width or number, and for ids that
        are seen to name a row twice.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, tx = jnp.arange(6.0).reshape(3, 2), osa.sparse_adam(0.1)
      >>> def clone(table, state, ids, places):
      ...     rows = osa.take_rows(tx, table, state, ids)
      ...     return osa.put_rows(tx, table, state, places, *rows)
      >>> clone = jax.jit(clone, donate_argnums=(0, 1))
      >>> table, state = clone(table, tx.init(table), jnp.array([2]), jnp.array([0]))
      >>> table.tolist()
      [[4.0, 5.0], [2.0, 3.0], [4.0, 5.0]]
    """
    tables = _tables("put_rows", params, ids)
    _refuse_repeated(tables)
    owners = _of_state(tx, params, state, tables, "put_rows")

    news = leaves_like(jax.tree.structure(params), rows, "The rows", "parameters")
    kind: Any = jax.tree.structure(state)
    states = leaves_like(kind, row_state, "The state of the rows", "state")
    _check_each(params, tables, news)
    _check_each(state, owners, states)
    return _put_each(params, tables, news), _put_each(state, owners, states)


def reset_rows(
    tx: optax.GradientTransformation, params: Params, state: State, ids: Any, rows: Any
) -> tuple[Params, State]:
    """Resets rows to new values, and their state to that of `tx.init`.

    For rows that are used again, such as a new item in the place of one that was
    removed. What all rows share, such as a step count, stays. Under `exact_adam` the
    rows have these values now, and under `exact_adamw` decay from now on.

    Args:
      tx: The transformation.
      params: Tree of arrays, as for `take_rows`.
      state: Its state.
      ids: As for `put_rows`.
      rows: The new values, `[k, ...]`, in the tree of the parameters. What is given
        where `ids` has `None` is ignored.

    Returns:
      The parameters and the state, as `put_rows`.

    Raises:
      TypeError: As `put_rows`.
      ValueError: As `put_rows`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> params, tx = {"items": jnp.ones((9, 4)), "w": jnp.ones(4)}, osa.exact_adam(1)
      >>> ids = {"items": jnp.array([3]), "w": None}
      >>> rows = {"items": jnp.zeros((1, 4)), "w": None}
      >>> params, state = osa.reset_rows(tx, params, tx.init(params), ids, rows)
      >>> float(params["items"][3, 0])
      0.0
    """
    tables = _tables("reset_rows", params, ids)
    _refuse_repeated(tables)
    owners = _of_state(tx, params, state, tables, "reset_rows")
    # In place of what is ignored, a subtree or a leaf, stands that of the parameters.
    rows = jax.tree.map(
        lambda x, own, new: own if x is None else new,
        *(ids, params, rows),
        is_leaf=lambda x: x is None,
    )
    given = leaves_like(jax.tree.structure(params), rows, "The rows", "parameters")
    news = [None if x is None else row for x, row in zip(tables, given, strict=True)]
    _check_each(params, tables, news)
    after = _order_after(news)
    params = _put_each(params, tables, after(news))
    shapes = tuple((np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params))
    treedef, has_rows = jax.tree.structure(params), tuple(x is not None for x in owners)
    init = _init_rows(tx, treedef, shapes, has_rows)
    fresh = init(news, clocks_of(state))
    return params, _put_each(state, owners, after(fresh))


def _order_after(news: list[Any]) -> Callable[[list[Any]], list[Any]]:
    """Makes rows depend on all new values, without changing them.

    Problem: a program that computes new values from old rows and state copies every
    array that it has read. Cause: what begins, zeros for example, does not depend on
    what was read, so XLA does not know that the read comes first. Remedy: a select by a
    comparison of the new values that is never true. Safe, since no value is above
    infinity. Test: `tests/rows/test_row_verbs.py`.
    """
    arrays = [x for x in news if isinstance(x, jax.core.Tracer) and x.size]
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        return lambda rows: rows
    never = jnp.stack([jnp.max(x).astype(jnp.float32) for x in floats]) > jnp.inf

    def after(x: Any) -> Any:
        return None if x is None else jnp.where(never.any(), jnp.ones_like(x), x)

    return lambda rows: [after(x) for x in rows]


@functools.lru_cache(maxsize=64)
def _init_rows(tx: Any, treedef: Any, shapes: Any, has_rows: tuple[bool, ...]) -> Any:
    """`tx.init` of rows, compiled, without what all rows share."""

    @jax.jit
    def init(rows: list[Any], clocks: Any) -> list[Any]:
        # Of these zeros XLA makes nothing, as nothing of theirs is returned.
        pairs = zip(rows, shapes, strict=True)
        leaves = [jnp.zeros(*shape) if x is None else x for x, shape in pairs]
        state = begin_now(tx.init(treedef.unflatten(leaves)), clocks)
        each = zip(jax.tree.leaves(state), has_rows, strict=True)
        return [x if has_own else None for x, has_own in each]

    return init


def rows_of(grads: Any, ids: Any) -> Any:
    """Makes row-sparse gradients of dense ones: the rows `ids`, and no others.

    For a gradient that no lookup has made, such as that of a renderer, which knows what
    is visible: the optimisers of this package then update these rows only. Given the
    dense gradient, they would update all rows, as dense Adam does.

    Args:
      grads: Tree of arrays `[num_rows, ...]` and others; `None` leaves stay `None`.
      ids: As for `take_rows`: `[k]` integers, `None` for gradients that stay dense. Ids
        out of bounds are padding. Each row may be named once, as for `put_rows`.

    Returns:
      The tree with BCOO leaves of `k` entries, whose flag `unique_indices` is set:
      optimisers need not sort them.

    Raises:
      TypeError: If ids are not integers.
      ValueError: If ids are no prefix of the gradients, have not one axis, belong to a
        scalar, or are seen to name a row twice.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> dense = jnp.arange(8.0).reshape(4, 2)
      >>> grad = osa.rows_of(dense, jnp.array([2, 1, 4]))
      >>> grad.data.tolist(), grad.nse
      ([[4.0, 5.0], [2.0, 3.0], [0.0, 0.0]], 3)
    """
    tables = _tables("rows_of", grads, ids)
    _refuse_repeated(tables)
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads)

    def row_sparse(x: Any, table: _Table | None) -> Any:
        if table is None:
            return x
        x, indices = jnp.asarray(x), table.distinct()
        rows = gather_scatter.gather_rows(x, indices)
        return BCOO((rows, indices), shape=x.shape, unique_indices=True)

    return treedef.unflatten(map(row_sparse, leaves, tables))
