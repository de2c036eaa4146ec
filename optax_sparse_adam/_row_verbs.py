"""Rows as things: taken out of tables, put back, begun again.

A row is its numbers and what the optimiser keeps of it. Only the optimiser knows what
that is, so `tx.init` is traced for tables of other sizes: an array of the state whose
first axis follows the number of rows of a table holds its rows (`find_owners`). All
other arrays belong to all rows. For a table `[1000, 8]`, a vector `w`, `sparse_adam`:

    ids      table [k], w None
    params   table [1000, 8], w [8]        taken: table [k, 8], w [8]
    state    count [], mu and nu likewise  taken: count [], mu and nu likewise

How rows are read, checked and written is in `_row_tables.py`. What has no rows, a
*whole* leaf, is copied when it is taken, and put back unless the tables are of a later
step (`_row_ages.py`).

Known limit: tables with one index for each row.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._exact_adam.state import begin_now, clocks_of, refuse_other_dates
from ._optimizers.row_owners import TableSize, find_owners
from ._row_ages import is_older, newer
from ._row_tables import (
    Table,
    check,
    copied,
    native_dtype,
    refuse_repeated,
    shape_of,
    tables_of,
    write,
)
from ._rows.checks import leaves_like, new_rows_like

Params = TypeVar("Params")
State = TypeVar("State")


class _Hashable:
    """A transformation as a key: by itself, or if it has no hash by its identity."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        try:
            self._key: Any = tx, hash(tx), x64
        except TypeError:  # a dataclass with `eq`
            self._key = id(tx), None, x64

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and bool(self._key == other._key)


@functools.lru_cache(maxsize=64)
def _owners(
    verb: str, key: _Hashable, treedef: Any, shapes: Any, places: tuple[int, ...]
) -> tuple[Any, list[tuple[int, ...]], list[int | None]]:
    """Structure and shapes of a state, and whose rows each of its arrays holds."""
    params = [jax.ShapeDtypeStruct(*x) for x in shapes]
    state = jax.eval_shape(key.tx.init, treedef.unflatten(params))
    leaves, structure = jax.tree.flatten(state)
    sizes = {i: TableSize(params[i].shape, 1, 0) for i in places}
    owners = find_owners(key.tx.init, treedef, sizes, params, leaves, verb)
    return structure, [x.shape for x in leaves], owners


def _of_state(
    tx: Any, params: Any, state: Any, tables: list[Table | None], verb: str
) -> list[Table | None]:
    """The table of which each leaf of a state has rows, if any.

    Raises:
      ValueError: If it is not a state of `tx` for these parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple(shape_of(verb, x) for x in leaves)
    places = tuple(i for i, table in enumerate(tables) if table is not None)
    key = _Hashable(tx)
    structure, expected, owners = _owners(verb, key, treedef, shapes, places)
    wanted: Any = structure
    held: Any = jax.tree.structure(state)
    if held == wanted:
        wanted, held = expected, [np.shape(x) for x in jax.tree.leaves(state)]
    if held != wanted:
        raise ValueError(
            f"{verb} needs the state that tx.init makes of these parameters, {wanted}, "
            f"got {held}. Pass the transformation and the parameters that the state "
            "belongs to. (What keeps the form of gradients in its state, as "
            "optax.zero_nans, is to be inside of lazy. Of Flax NNX give nnx.as_pure of "
            "both.)"
        )
    return [None if i is None else tables[i] for i in owners]


def take_rows(
    tx: optax.GradientTransformation, params: Params, state: State, ids: Any
) -> tuple[Params, State]:
    """Copies rows of tables, with the optimiser's state of these rows.

    The result is parameters and state of `tx` for tables of `len(ids)` rows: a training
    step on them, with ids from 0 to `len(ids) - 1`, does to these rows what a step on
    the whole tables does. `put_rows` writes them back. So a table may be larger than
    the memory of the device that trains it.

    Under `exact_adam` stale rows stay stale: they are not brought up to date. A mask or
    label that is a function of sizes sees those of the rows in a step on them: give the
    tree that it returns for the tables.

    Args:
      tx: The transformation that made the state: of this package, `lazy` of one of
        optax, or any whose state has the rows of a table along the first axis of some
        arrays; chains, `optax.partition` and `optax.inject_hyperparams` of them, too.
      params: Tree of arrays `[num_rows, ...]` and others, of JAX or of NumPy
        (`np.memmap` included). Those of NumPy are read by rows, where they are.
      state: The state of `tx` for these parameters, likewise.
      ids: `[k]` integers, for each table or for a subtree of tables that share them;
        `None` for leaves that are taken whole. Ids out of bounds, negative ones and
        those of NumPy that 32 bits do not hold included, are padding, whose rows have
        no meaning.

    Returns:
      Parameters and state with `[k, ...]` in place of `[num_rows, ...]`. What all rows
      share, such as a step count, is unchanged. All arrays are copies: a step that
      donates them leaves the tables, and other rows that were taken, as they are.

    Raises:
      TypeError: If ids are not integers, or are traced where a table is of NumPy; for
        arrays of a type that JAX has not.
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
    tables = tables_of("take_rows", params, ids)
    owners = _of_state(tx, params, state, tables, "take_rows")

    def taken(x: Any, table: Table | None) -> Any:
        return copied(x, x) if table is None else table.take(x)

    def each(tree: Any, tables: list[Table | None]) -> Any:
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

    *What all rows share* (a step count, a leaf without ids and its moments) is that of
    the later step. After a step on the rows it comes from them. Rows that are put back
    some steps after they were taken set no clock back: where a count of `row_state` is
    smaller than that of `state`, and none is larger, only the rows are written, and a
    row has rested meanwhile; under `exact_adam` it has moved on. Counts are what is
    called `count`, `clock`, `step`, `steps` or `t`, and where these do not differ other
    integers, which count up. A state without them, as that of `optax.trace`, cannot
    tell, and none tells that rows of another table have begun again since the last
    step: put `None` in the place of leaves of `rows` and `row_state` that shall stay as
    they are.

    Arrays of NumPy are written in place. Those of JAX are copied, unless `params` and
    `state` are donated under `jit`. All that can be refused is refused, and all rows
    are copied, before the first array of NumPy is written. What a write itself raises,
    such as an error of the disk under a file, leaves the rest unwritten; where the disk
    is full under a sparse file, the system ends the process.

    Args:
      tx: The transformation.
      params: Tree of arrays, as for `take_rows`.
      state: Its state.
      ids: As for `take_rows`. Padding is not written. Each row may be named once, which
        is checked; in a compiled program, which cannot raise, the last entry of a row
        is written, to all of its arrays.
      rows: Parameters `[k, ...]`; of leaves without ids, the new ones. They may be
        views of what is written.
      row_state: The state of `tx` for these.

    Returns:
      The parameters and the state.

    Raises:
      TypeError: As `take_rows`; for rows of another type than their table, or whole
        leaves of a type that theirs does not hold; and for traced values that go to
        arrays of NumPy.
      ValueError: As `take_rows`; for rows of another width or number; for ids that are
        seen to name a row twice; for arrays of NumPy that are read-only; and for rows
        of `exact_adam` that were taken before a `flush` of their table, or were flushed
        themselves, which in a compiled program become NaN.

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
    verb = "put_rows"
    tables = tables_of(verb, params, ids)
    refuse_repeated(tables)
    owners = _of_state(tx, params, state, tables, verb)

    new_params = leaves_like(jax.tree.structure(params), rows, "The rows", "parameters")
    kind: Any = jax.tree.structure(state)
    new_states = leaves_like(kind, row_state, "The state of the rows", "state")
    for tree, tables_of_leaves, new_leaves in (
        (params, tables, new_params),
        (state, owners, new_states),
    ):
        check(verb, tree, tables_of_leaves, new_leaves)
    has_rows = kind.unflatten([table is not None for table in owners])
    fits = refuse_other_dates(state, kind.unflatten(new_states), has_rows)
    if fits is not True:
        new_params = [
            _nan_unless(fits, x) if table is not None else x
            for x, table in zip(new_params, tables, strict=True)
        ]
    rests = is_older(state, new_states, owners, params)
    if fits is not True:  # then other rows keep what they mean
        rests = jnp.logical_or(rests, jnp.logical_not(fits))
    new_params = newer(rests, params, tables, new_params)
    new_states = newer(rests, state, owners, new_states)
    params, state = write([(params, tables, new_params), (state, owners, new_states)])
    return params, state


def _nan_unless(fits: Any, rows: Any) -> Any:
    rows = jnp.asarray(rows)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return rows
    return jnp.where(fits, rows, jnp.full_like(rows, jnp.nan))


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
      ValueError: As `put_rows`. Nothing has been written then.

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
    verb = "reset_rows"
    tables = tables_of(verb, params, ids)
    refuse_repeated(tables)
    owners = _of_state(tx, params, state, tables, verb)
    treedef: Any = jax.tree.structure(params)
    pairs = zip(tables, new_rows_like(params, ids, rows), strict=True)
    new_rows = [None if x is None else row for x, row in pairs]
    check(verb, params, tables, new_rows)
    after = _order_after(new_rows)
    shapes = tuple(shape_of(verb, x) for x in jax.tree.leaves(params))
    has_rows = tuple(x is not None for x in owners)
    init = _init_rows(_Hashable(tx), treedef, shapes, has_rows)
    native = [copied(x, None) if isinstance(x, np.ndarray) else x for x in new_rows]
    fresh = init(native, clocks_of(state))
    fresh = list(map(_in_type_of, jax.tree.leaves(state), fresh))
    check(verb, state, owners, fresh)
    params, state = write(
        [(params, tables, after(new_rows)), (state, owners, after(fresh))]
    )
    return params, state


def _in_type_of(x: Any, new: Any) -> Any:
    """New state in the type that steps have given to the old one."""
    if new is None or not jnp.issubdtype(new.dtype, jnp.floating):
        return new
    return new.astype(native_dtype(x))


def _order_after(new_rows: list[Any]) -> Callable[[list[Any]], list[Any]]:
    """Makes rows depend on all new values, without changing them.

    Problem: a program that computes new values from old rows and state copies every
    array that it has read. Cause: what begins, zeros for example, does not depend on
    what was read, so XLA does not know that the read comes first. Remedy: a select by a
    comparison of the new values that is never true. Safe, since no value is above
    infinity. Test: `tests/rows/test_row_verbs.py`.
    """
    arrays = [x for x in new_rows if isinstance(x, jax.core.Tracer) and x.size]
    floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        return lambda rows: rows
    never = jnp.stack([jnp.max(x).astype(jnp.float32) for x in floats]) > jnp.inf

    def after(x: Any) -> Any:
        return None if x is None else jnp.where(never.any(), jnp.ones_like(x), x)

    return lambda rows: [after(x) for x in rows]


@functools.lru_cache(maxsize=64)
def _init_rows(
    key: _Hashable, treedef: Any, shapes: Any, has_rows: tuple[bool, ...]
) -> Any:
    """`tx.init` of rows, compiled, without what all rows share."""

    @jax.jit
    def init(rows: list[Any], clocks: Any) -> list[Any]:
        # Of these zeros XLA makes nothing, as nothing of theirs is returned.
        pairs = zip(rows, shapes, strict=True)
        leaves = [jnp.zeros(*shape) if x is None else x for x, shape in pairs]
        state = begin_now(key.tx.init(treedef.unflatten(leaves)), clocks)
        each = zip(jax.tree.leaves(state), has_rows, strict=True)
        return [x if has_own else None for x, has_own in each]

    return init
