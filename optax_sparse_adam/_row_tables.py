"""Tables of which some rows are meant: rows read, checked, and written all together.

What the row verbs (`_row_verbs.py`) share. Arrays of JAX are read by a gather and
written by a scatter, those of NumPy by indexing, in place:

    tables = tables_of("take_rows", params, ids)  # of each leaf of the parameters
    table.take(x)                               # rows [k, ...] of an array of the table
    write([(tree, of_leaves, rows), ...])       # checks all, then writes all

A fault is raised before the first array of NumPy is written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._rows import update_table
from ._rows.checks import refuse_masked
from ._rows.entries import widen_indices
from ._rows.padding import in_bounds, pad_indices, padding_key
from ._rows.segments import segment_rows

# A tree, the table of each of its leaves, and new rows or leaves; `None`: as it is.
Writes = Sequence[tuple[Any, list["Table | None"], list[Any]]]


class Table(NamedTuple):
    """A parameter, `[num_rows, ...]`, of which some rows are meant.

    Attributes:
      verb: The public function, for errors.
      path: Where the parameter is, likewise.
      num_rows: How many rows it has.
      ids: `[k]`, integers. What is out of bounds is padding. Those of NumPy are in a
        type that JAX holds, and their padding is `num_rows`.
    """

    verb: str
    path: str
    num_rows: int
    ids: Any

    def take(self, x: Any) -> Any:
        """The rows of an array of the table; padding reads any of them."""
        if not isinstance(x, np.ndarray):
            return update_table.take_rows(x, self._indices())
        if len(x) == 0:
            return np.zeros((len(self.ids), *x.shape[1:]), native_dtype(x))
        rows = np.asarray(x)[np.clip(self._known_ids(), 0, len(x) - 1)]
        return rows.astype(native_dtype(x), copy=False)

    def put(self, x: jax.Array, rows: Any) -> jax.Array:
        """The array of JAX with these rows."""
        return update_table.put_rows(x, self.distinct(), jnp.asarray(rows))

    def place(self, x: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Where in an array of NumPy which rows go; copies that share no memory."""
        ids = self._known_ids()
        inside = (ids >= 0) & (ids < len(x))
        return ids[inside], np.asarray(rows)[inside]

    def distinct(self) -> jax.Array:
        """The indices `[k, 1]`, with padding of which no index is there twice.

        Of ids that nobody knows yet the last one of each row counts, and the others are
        padding: so an entry's values and its state are written together, or not at all.
        """
        indices, shape = self._indices(), (self.num_rows,)
        slot = jnp.arange(len(indices), dtype=jnp.int32)
        valid = in_bounds(indices, shape)
        if isinstance(self.ids, jax.core.Tracer):
            valid &= _is_last(indices, valid, self.num_rows)
        return pad_indices(indices, valid, slot, shape)

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
        _refuse_others(self.verb, rows)
        shape = (len(self.ids), *np.shape(x)[1:])
        if np.shape(rows) != shape:
            raise ValueError(
                f"{self.verb} needs a row for each of the {len(self.ids)} ids of "
                f"{self.path}: an array of shape {shape}, got {np.shape(rows)}."
            )
        dtype = getattr(rows, "dtype", None) or jnp.result_type(rows)
        if native_dtype(rows, dtype) != native_dtype(x):
            raise TypeError(
                f"{self.verb} needs rows of the type of their table, {x.dtype} for "
                f"{self.path}, got {dtype}. Cast them."
            )


def _is_last(indices: jax.Array, valid: jax.Array, num_rows: int) -> jax.Array:
    """Whether an entry is the last one of its row; of padding it says nothing."""
    ids = indices[:, 0]
    if len(ids) < 2:
        return jnp.ones(ids.shape, bool)
    ids = jnp.where(valid, ids, padding_key(ids.dtype))

    def in_order(ids: jax.Array) -> jax.Array:
        return jnp.append(ids[1:] != ids[:-1], True)

    def by_segments(ids: jax.Array) -> jax.Array:
        slot = jnp.arange(len(ids), dtype=jnp.int32)
        segment = segment_rows(ids[:, None], (num_rows,))[1]
        last = jax.ops.segment_max(slot, segment, len(ids))
        return last.at[segment].get(mode="clip") == slot

    # Ids of `jnp.nonzero` and of `jnp.unique` are in order: a sort would take longer
    # than to write their rows.
    is_sorted = jnp.all(ids[1:] >= ids[:-1])
    is_last: jax.Array = lax.cond(is_sorted, in_order, by_segments, ids)
    return is_last


def native_dtype(x: Any, dtype: Any = None) -> Any:
    """The type of an array, in this machine's order of bytes, which JAX needs."""
    dtype = x.dtype if dtype is None else dtype
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _refuse_others(verb: str, x: Any) -> None:
    refuse_masked(x, verb)
    if hasattr(x, "detach"):
        raise TypeError(
            f"{verb} takes arrays of NumPy and JAX, got a {type(x).__module__}."
            f"{type(x).__qualname__}. Give x.numpy(), which shares its memory."
        )


def shape_of(verb: str, x: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and type of an array as JAX has it.

    Raises:
      TypeError: For what JAX has no type for; its own error prints the array.
    """
    _refuse_others(verb, x)
    if not isinstance(x, np.ndarray | np.generic):
        return np.shape(x), jnp.result_type(x)
    dtype = native_dtype(x)
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise TypeError(
            f"{verb} takes arrays of types that JAX has, got {dtype} of shape "
            f"{np.shape(x)}."
        )
    return np.shape(x), jax.dtypes.canonicalize_dtype(dtype)


def tables_of(verb: str, params: Any, ids: Any) -> list[Table | None]:
    """The tables among the leaves of the parameters, `None` for the others."""
    structure: Any
    ids_of_parts, structure = jax.tree.flatten(ids, is_leaf=lambda x: x is None)
    try:
        parts = structure.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"{verb} needs ids in a tree that is a prefix of the parameters': an array "
            "for each table, or for a subtree of tables that share it, and None for "
            f"what is left whole; got {structure}: {error}. (A list of ids is a tree "
            "of numbers: use np.array.)"
        ) from None
    pairs = zip(ids_of_parts, parts, strict=True)
    of_leaves = [x for x, part in pairs for _ in jax.tree.leaves(part)]
    each = zip(jax.tree_util.tree_leaves_with_path(params), of_leaves, strict=True)
    shared_ids: dict[Any, Any] = {}  # tables of one height that share their ids
    return [
        None if x is None else _table(verb, *path_and_param, x, shared_ids)
        for path_and_param, x in each
    ]


def _table(
    verb: str, path: Any, param: Any, ids: Any, shared_ids: dict[Any, Any]
) -> Table:
    name, (_, dtype) = jax.tree_util.keystr(path) or "the table", shape_of(verb, ids)
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
    num_rows = np.shape(param)[0]
    if not isinstance(ids, jax.Array):
        key = id(ids), num_rows
        if key not in shared_ids:
            shared_ids[key] = _as_held(ids, num_rows)
        ids = shared_ids[key]
    return Table(verb, name, num_rows, ids)


def _as_held(ids: Any, num_rows: int) -> np.ndarray:
    """Ids of NumPy in the smallest type of JAX that holds them, padding as `num_rows`.

    Without 64-bit types JAX makes row 3 of NumPy's `2**32 + 3`.
    """
    ids = np.asarray(ids)
    inside = (ids >= 0) & (ids < num_rows)
    last = num_rows + len(ids)  # as `widen_indices` has it
    types = [x for x in (np.int32, np.uint32) if last <= np.iinfo(x).max]
    held = np.where(inside, ids, 0).astype([*types, np.int64][0])
    held[~inside] = num_rows
    return held


def refuse_repeated(tables: list[Table | None]) -> None:
    each = [table for table in tables if table is not None]
    # Tables that share their ids are looked at once.
    for table in {(id(table.ids), table.num_rows): table for table in each}.values():
        table.refuse_repeated()


def check(verb: str, tree: Any, tables: list[Table | None], rows: list[Any]) -> None:
    """Raises for what cannot be written, before anything is.

    Raises:
      TypeError: For rows of another type than what they are written to, and for traced
        ones where that is an array of NumPy.
      ValueError: For rows of another shape, and for arrays that are read-only.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), table, new in zip(leaves, tables, rows, strict=True):
        if table is not None or new is not None:
            name = jax.tree_util.keystr(path) or "the table"
            _check(verb, name, x, table, new)


def write(writes: Writes) -> list[Any]:
    """The trees with new rows of tables, and other arrays where there are new ones.

    They have passed `check`. All is computed, and what goes to arrays of NumPy is
    copied, before the first of these is written: nothing is written by halves, and rows
    may be views of what is written.
    """
    pending: list[tuple[np.ndarray, Any, np.ndarray]] = []

    def prepared(x: Any, table: Table | None, new: Any) -> Any:
        if table is None and new is None:
            # As a table: a step that donates the new tree leaves the old one.
            is_traced = isinstance(x, jax.core.Tracer)
            return copied(x, x) if isinstance(x, jax.Array) and not is_traced else x
        if isinstance(x, np.ndarray):
            place = (..., np.array(new)) if table is None else table.place(x, new)
            pending.append((x, *place))
            return x
        if table is not None:
            return table.put(x, new)
        return copied(new, x)

    results = []
    for tree, tables, rows in writes:
        treedef: Any
        leaves, treedef = jax.tree.flatten(tree)
        results.append(treedef.unflatten(map(prepared, leaves, tables, rows)))
    for x, at, values in pending:
        x[at] = values
    return results


def copied(x: Any, like: Any) -> Any:
    """A copy, in the type of another array: a step that donates it leaves `x`."""
    if not isinstance(like, jax.Array):
        return np.array(x, native_dtype(x)) if isinstance(x, np.ndarray) else x
    if isinstance(x, jax.Array) and x.dtype == like.dtype:
        return jnp.copy(x)
    return jnp.array(x, like.dtype)


def _check(verb: str, name: str, x: Any, table: Table | None, new: Any) -> None:
    """Raises for what cannot be written."""
    if isinstance(x, np.ndarray):
        if not x.flags.writeable:
            raise ValueError(
                f"{verb} writes arrays of NumPy in place, got one for {name} that is "
                "read-only, as those of jax.device_get and of np.asarray are, and "
                'files that are opened with "r". Copy it by np.array(x), or open the '
                'file with "r+".'
            )
        if isinstance(new, jax.core.Tracer):
            raise TypeError(
                f"{verb} writes arrays of NumPy when it is called, and needs values "
                f"that are known then; got traced ones for {name}. Call it outside of "
                "jit, and compile the step on the rows."
            )
    if table is not None:
        table.check_rows(x, new)
        return
    if np.shape(new) != np.shape(x):
        raise ValueError(
            f"{verb} needs what has no ids whole: an array of shape {np.shape(x)} for "
            f"{name}, got {np.shape(new)}."
        )
    dtype, new_dtype = (getattr(y, "dtype", None) for y in (x, new))
    if dtype is None or new_dtype is None or dtype == new_dtype:
        return
    are_numbers = isinstance(dtype, np.dtype) and isinstance(new_dtype, np.dtype)
    if not (are_numbers and np.can_cast(new_dtype, dtype, "safe")):
        raise TypeError(
            f"{verb} needs what has no ids in its own type, {dtype} for {name}, got "
            f"{new_dtype}. Cast it."
        )
