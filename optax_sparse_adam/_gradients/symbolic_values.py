"""The two values that a table's gradient is made of, neither of them a table.

A `Deferred` is a table-shaped value on the way *to* a lookup, such as a table cast to
another type: it is computed at the rows that are looked up. A `RowSum` is a
table-shaped value on the way *back* from lookups: a sum of rows. `Known` computes both
where they are needed, everything once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import call_with_auto_axes
from .._jax_extras.varying_axes import vary
from .._rows.coalesce import accumulator_dtype, cast_entries
from .._rows.duplicates import sum_duplicates
from .._rows.gather_scatter import scatter_add_rows
from .._rows.guarded import GuardedBCOO, StaleBCOO
from .._rows.padding import in_bounds, pad_indices, row_bounds
from .._rows.resting_rows import values_of_rows
from .._rows.resting_state import RowState, TableState
from .._rows.ways import Constants


class Part(NamedTuple):
    """Some rows: `indices` `[n, k]`, `data` `[n, *shape[k:]]`; they add up."""

    indices: jax.Array
    data: jax.Array


class Origin(NamedTuple):
    """A table, or one whose rows are behind; `make(*arrays)` is the value.

    The first of the arrays is the table as it is stored, the second, if any, a tree of
    what is known of its rows; all others are numbers.
    """

    make: "Callable[..., Deferred]"
    arrays: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An elementwise function of table-shaped arrays, computed where it is needed.

    Elementwise functions commute with lookups: `f(table)[ids] == f(table[ids])`. The
    operands of a value are values of this kind again, and one may be an operand of
    many: together they are a slice of the gradient's program.

    Attributes:
      shape: The table's shape.
      dtype: Type of the value.
      apply: `apply(shape, *operands)`; elementwise, so `shape` may be that of rows.
      operands: Arrays of the table's shape, or of length 1 along the axes of its
        columns, or scalars, or values of this class.
      has_table: Whether a table is among what the value is computed from.
      origin: Where the value comes from, if it is none of a function of the loss.
    """

    shape: tuple[int, ...]
    dtype: Any
    apply: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    has_table: bool
    origin: "Origin | None" = None

    def select(
        self,
        take: Callable[[jax.Array], jax.Array],
        shape: Any,
        known: "MutableMapping[Deferred, jax.Array] | None" = None,
    ) -> jax.Array:
        """`take(self)` for a `take` that picks elements.

        Args:
          take: The function.
          shape: The shape of its result.
          known: What it has made of other values already; is added to.
        """
        found = {} if known is None else known
        # Not by recursion: a loss may apply thousands of functions, one to the other.
        todo = [self]
        while todo:
            value = todo[-1]
            missing = [
                x for x in value.operands if isinstance(x, Deferred) and x not in found
            ]
            todo += missing
            if not missing:
                todo.pop()
                if value not in found:
                    found[value] = value._compute(take, shape, found)
        return found[self]

    def _compute(self, take: Any, shape: Any, found: Any) -> jax.Array:
        def one(operand: Any) -> Any:
            if isinstance(operand, Deferred):
                return found[operand]
            return take(jnp.asarray(operand)) if jnp.ndim(operand) else operand

        return self.apply(shape, *map(one, self.operands))

    @property
    def dense(self) -> jax.Array:
        return self.select(lambda x: x, self.shape)

    @property
    def is_table(self) -> bool:
        return self.apply is _identity


def _identity(shape: Any, table: jax.Array) -> jax.Array:
    return table


def _broadcast(shape: Any, scalar: jax.Array) -> jax.Array:
    return jnp.broadcast_to(scalar, shape)


def table(array: jax.Array) -> Deferred:
    shape, dtype = jnp.shape(array), jnp.result_type(array)
    origin = Origin(table, (array,))
    return Deferred(shape, dtype, _identity, (array,), has_table=True, origin=origin)


def fill(shape: tuple[int, ...], dtype: Any, scalar: Any) -> Deferred:
    return Deferred(shape, dtype, _broadcast, (scalar,), has_table=False)


def elementwise(
    shape: tuple[int, ...], dtype: Any, function: Callable[..., Any], *operands: Any
) -> Deferred:
    """A function of operands of this shape or scalars, of which one at least waits."""
    has_table = any(isinstance(x, Deferred) and x.has_table for x in operands)

    def apply(shape: Any, *args: Any) -> Any:
        return function(*args)

    return Deferred(shape, dtype, apply, operands, has_table)


def outdated(
    array: jax.Array, rows: RowState, state: TableState, constants: Constants
) -> Deferred:
    """A table whose rows are brought up to date where they are looked up.

    The state of a vector along the last axis has an axis of length 1 in its place.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(rows)
    full = [x.reshape(x.shape + (1,) * (array.ndim - x.ndim)) for x in leaves]

    def apply(shape: Any, array: jax.Array, *leaves: jax.Array) -> jax.Array:
        rows = treedef.unflatten(leaves)
        return values_of_rows(array, rows, state, constants)

    origin = Origin(outdated, (array, rows, state, constants))
    operands = (array, *full)
    return Deferred(array.shape, array.dtype, apply, operands, True, origin)


class DenseCarry(Exception):
    """Raised where the unfinished sum that a loop carries is used as an array."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowSum:
    """Zeros plus rows.

    Attributes:
      shape: The table's shape.
      dtype: Type of the value.
      parts: The rows; none for zeros.
      carry: In the body of a loop, the carried sum that the rows are added to.
      axes: Mesh axes over whose devices the rows are still to be summed.
      unique: Whether no row is stored twice.
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[Part, ...] = ()
    carry: Any = None
    axes: frozenset[str] = frozenset()
    unique: bool = False

    @property
    def is_zero(self) -> bool:
        return not self.parts and self.carry is None

    @property
    def is_plain(self) -> bool:
        """Whether the rows are all there is to it."""
        return self.carry is None and not self.axes

    @property
    def depth(self) -> int:
        """How many leading axes the indices cover.

        Where lookups of one table index a different number of axes, the smallest
        counts: `table[i, j]` beside `table[i]` stands for row `i`, zeros around `j`.
        """
        return min((part.indices.shape[1] for part in self.parts), default=1)

    @property
    def number(self) -> int:
        """How many rows are stored: at most as many as the table has."""
        rows = sum(part.indices.shape[0] for part in self.parts)
        return min(rows, math.prod(self.shape[: self.depth]))

    def map(self, function: Callable[[Part], jax.Array], dtype: Any) -> "RowSum":
        """Applies a function of a part's data that is linear in each row."""
        parts = tuple(Part(part.indices, function(part)) for part in self.parts)
        return RowSum(self.shape, dtype, parts, axes=self.axes, unique=self.unique)

    @property
    def dense(self) -> jax.Array:
        if self.carry is not None:
            raise DenseCarry(self.carry)
        # There is no scatter-add of flags; where they differ from zero, they are once.
        flags = self.dtype == jnp.bool_
        total = jnp.zeros(self.shape, jnp.int8 if flags else self.dtype)
        for indices, data in self.parts:
            data = data.astype(total.dtype)
            total = scatter_add_rows(total, indices, data, unique=self.unique)
        total = total.astype(self.dtype)
        return lax.psum(total, tuple(self.axes)) if self.axes else total


def is_symbolic(value: Any) -> bool:
    return isinstance(value, Deferred | RowSum)


def dense(value: Any) -> Any:
    """The plain array of any value."""
    return value.dense if is_symbolic(value) else value


class Known:
    """What one trace has computed of stand-ins: their arrays, rows, and unique rows.

    Nothing outlives the value that it was computed of.
    """

    def __init__(self) -> None:
        self._dense: MutableMapping[Any, jax.Array] = WeakKeyDictionary()
        self._coalesced: MutableMapping[RowSum, RowSum] = WeakKeyDictionary()
        self._rows: dict[int, tuple[jax.Array, Any]] = {}

    def dense(self, value: Any) -> Any:
        """The plain array of any value."""
        if isinstance(value, Deferred):
            return value.select(lambda x: x, value.shape, self._dense)
        if isinstance(value, RowSum):
            if value not in self._dense:
                self._dense[value] = value.dense
            return self._dense[value]
        return value

    def rows(self, value: Any, part: Part) -> Any:
        """The rows of any table-shaped value, or scalar, that a part holds."""

        def gather(array: jax.Array, indices: jax.Array) -> jax.Array:
            # Clipped, not filled: whatever the value at a row is, it is no new NaN.
            return array.at[tuple(indices.T)].get(mode="clip")

        def take(array: jax.Array) -> jax.Array:
            axes = range(part.data.ndim)
            return call_with_auto_axes(
                gather, array, part.indices, like=part.data, axes=axes
            )

        if isinstance(value, Deferred):
            # Of each function of the table once for each lookup.
            new = (part.indices, WeakKeyDictionary[Deferred, jax.Array]())
            _, known = self._rows.setdefault(id(part.indices), new)
            return value.select(take, part.data.shape, known)
        array = self.dense(value)
        return take(jnp.asarray(array)) if jnp.ndim(array) else array

    def coalesced(self, total: RowSum) -> RowSum:
        """The same sum with each row stored once."""
        if total.unique:
            return total
        if total not in self._coalesced:
            self._coalesced[total] = coalesced(all_gather_parts(total))
        return self._coalesced[total]


def coalesced(total: RowSum) -> RowSum:
    """The same sum with each row stored once; duplicates add up as in `coalesce`."""
    part = merge_parts(total)
    stored = sum(part.indices.shape[0] for part in total.parts)
    if stored <= total.number and stored > 1:
        exact = total.dtype
        if jnp.issubdtype(exact, jnp.floating):
            exact = accumulator_dtype(exact)
        elif exact == jnp.bool_:
            exact = jnp.int32
        grad = cast_entries(BCOO((part.data, part.indices), shape=total.shape), exact)
        indices, data, count = sum_duplicates(
            grad.indices, grad.data, total.shape, is_sorted=False
        )
        slot = jnp.arange(stored, dtype=jnp.int32)
        indices = pad_indices(indices, slot < count, slot, total.shape)
        part = Part(indices, data.astype(total.dtype))
    return RowSum(total.shape, total.dtype, (part,), unique=True)


def merge_parts(total: RowSum, depth: int | None = None) -> Part:
    """All rows of a sum in one part, at most as many as the table has rows."""
    depth = total.depth if depth is None else depth
    parts = [_whole_rows(part, depth, total.shape) for part in total.parts]
    if not parts:
        empty = jnp.zeros((0, *total.shape[depth:]), total.dtype)
        return Part(jnp.zeros((0, depth), jnp.int32), empty)
    dtype = jnp.result_type(*(part.indices.dtype for part in parts))
    part = Part(
        jnp.concatenate([part.indices.astype(dtype) for part in parts]),
        jnp.concatenate([part.data for part in parts]),
    )
    if part.indices.shape[0] <= math.prod(total.shape[:depth]):
        return part
    touched = touched_by(jnp.zeros(total.shape[:depth], bool), part, total.shape)
    return every_row(touched, RowSum(total.shape, total.dtype, (part,)).dense)


def touched_by(touched: jax.Array, part: Part, shape: tuple[int, ...]) -> jax.Array:
    """Marks the rows of a part in the flags `[*shape[:k]]`."""

    def mark(touched: jax.Array, indices: jax.Array) -> jax.Array:
        return touched.at[tuple(indices.T)].set(True, mode="drop")

    indices = _row_indices(part, touched.ndim, shape)
    return call_with_auto_axes(
        mark, touched, indices, like=touched, axes=range(touched.ndim)
    )


def _row_indices(part: Part, depth: int, shape: tuple[int, ...]) -> jax.Array:
    """The leading columns of the indices; all out of bounds where one of them is."""
    indices = part.indices[:, :depth]
    if part.indices.shape[1] == depth:
        return indices
    valid = in_bounds(part.indices, shape)
    return jnp.where(valid[:, None], indices, row_bounds(shape, indices))


def every_row(touched: jax.Array, total: jax.Array) -> Part:
    """All rows of a table as one part, those not touched as padding."""
    shape, size = touched.shape, touched.size
    ids = jnp.indices(shape, jnp.int32, sparse=False).reshape(len(shape), size).T
    slot = jnp.arange(size, dtype=jnp.int32)[:, None]
    outside = row_bounds(shape, ids) + slot
    indices = jnp.where(touched.reshape(size, 1), ids, outside)
    return Part(indices, total.reshape(size, *total.shape[len(shape) :]))


def padded(total: RowSum, number: int, depth: int) -> Part:
    """All rows of a sum in one part of at least this many rows."""
    part = merge_parts(total, depth)
    missing = number - part.indices.shape[0]
    if missing <= 0:  # jaxlib 0.11.2 crashes on empty constants inside of shard_map
        return part
    outside = row_bounds(total.shape, part.indices)
    return Part(
        jnp.concatenate([part.indices, np.tile(outside, (missing, 1))]),
        jnp.pad(part.data, [(0, missing)] + [(0, 0)] * (part.data.ndim - 1)),
    )


def _whole_rows(part: Part, depth: int, shape: tuple[int, ...]) -> Part:
    extra = part.indices.shape[1] - depth
    if extra == 0:
        return part
    nse = part.indices.shape[0]
    slot = jnp.arange(nse, dtype=part.indices.dtype)
    place = jnp.concatenate([slot[:, None], part.indices[:, depth:]], axis=1)
    zeros = jnp.zeros((nse, *shape[depth:]), part.data.dtype)
    data = scatter_add_rows(zeros, place, part.data, unique=True)
    return Part(_row_indices(part, depth, shape), data)


def vary_parts(total: RowSum, axes: tuple[str, ...]) -> RowSum:
    """The same sum inside of shard_map, of rows that vary over these axes as well."""
    parts = tuple(Part(*(vary(x, axes) for x in part)) for part in total.parts)
    return dataclasses.replace(total, parts=parts)


def all_gather_parts(total: RowSum, to: str = "invarying") -> RowSum:
    """The same sum inside of shard_map, every device with the rows of all."""
    if not total.axes:
        return total
    gather = functools.partial(
        lax.all_gather, axis_name=tuple(total.axes), tiled=True, to=to
    )
    parts = tuple(Part(*map(gather, part)) for part in total.parts)
    return RowSum(total.shape, total.dtype, parts)


def to_bcoo(total: RowSum, *, is_stale: bool) -> BCOO:
    """The row-sparse gradient that a sum stands for.

    `is_stale` says that rows were not read up to date, for `exact_adam` to know.
    """
    total = all_gather_parts(total)
    stored = sum(part.indices.shape[0] for part in total.parts)
    part = merge_parts(total)
    return (StaleBCOO if is_stale else GuardedBCOO)(
        (part.data.astype(total.dtype), part.indices),
        shape=total.shape,
        unique_indices=total.unique or stored > total.number,
    )
