"""The two values that a table's gradient is made of, neither of them a table.

A `Deferred` is a table-shaped value on the way *to* a lookup, such as a table cast to
another type: it is computed at the rows that are looked up. A `RowSum` is a
table-shaped value on the way *back* from lookups: a sum of rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import partitioned
from .._rows.gather_scatter import in_bounds, row_bounds, scatter_add_rows


class Part(NamedTuple):
    """Some rows: `indices` `[n, k]`, `data` `[n, *shape[k:]]`; they add up."""

    indices: jax.Array
    data: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An elementwise function of table-shaped arrays, computed where it is needed.

    Elementwise functions commute with lookups: `f(table)[ids] == f(table[ids])`.

    Attributes:
      shape: The table's shape.
      dtype: Type of the value.
      apply: `apply(shape, *operands)`; elementwise, so `shape` may be that of rows.
      operands: Arrays of the table's shape, or of length 1 along the axes of its
        columns, or scalars, or values of this module.
      of_rows: Whether it is more than arithmetic that XLA computes while it gathers.
    """

    shape: tuple[int, ...]
    dtype: Any
    apply: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    of_rows: bool = False

    def select(self, take: Callable[[jax.Array], jax.Array], shape: Any) -> jax.Array:
        """`take(self)` for a `take` that picks elements; `shape` is the result's."""

        def one(operand: Any) -> Any:
            if isinstance(operand, Deferred):
                return operand.select(take, shape)
            if isinstance(operand, RowSum):  # zeros: no other sum is deferred
                return jnp.zeros(shape, operand.dtype)
            return take(operand) if jnp.ndim(operand) else operand

        return self.apply(shape, *map(one, self.operands))

    @functools.cached_property
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
    return Deferred(jnp.shape(array), jnp.result_type(array), _identity, (array,))


def fill(shape: tuple[int, ...], dtype: Any, scalar: jax.Array) -> Deferred:
    return Deferred(shape, dtype, _broadcast, (scalar,))


def outdated(
    array: jax.Array, state: Any, value: Callable[[jax.Array, Any], jax.Array]
) -> Deferred:
    """A table whose rows are brought up to date where they are looked up.

    Args:
      array: The table, as it is stored.
      state: Tree of arrays with the rows of the table, without columns or with them.
      value: `value(rows, state_of_rows)`, where the state of a row without columns has
        axes of length 1 in their place.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(state)
    full = [x.reshape(x.shape + (1,) * (array.ndim - x.ndim)) for x in leaves]

    def apply(shape: Any, rows: jax.Array, *leaves: jax.Array) -> jax.Array:
        return value(rows, treedef.unflatten(leaves))

    return Deferred(array.shape, array.dtype, apply, (array, *full), of_rows=True)


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
    """

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[Part, ...] = ()
    carry: Any = None
    axes: frozenset[str] = frozenset()

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
        return RowSum(self.shape, dtype, parts, axes=self.axes)

    @functools.cached_property
    def dense(self) -> jax.Array:
        if self.carry is not None:
            raise DenseCarry(self.carry)
        total = jnp.zeros(self.shape, self.dtype)
        for indices, data in self.parts:
            total = scatter_add_rows(total, indices, data, unique=False)
        return lax.psum(total, tuple(self.axes)) if self.axes else total


def is_deferred(value: Any) -> bool:
    return isinstance(value, Deferred | RowSum)


def dense(value: Any) -> Any:
    """The plain array of any value."""
    return value.dense if is_deferred(value) else value


def rows_of(value: Any, part: Part) -> Any:
    """The rows of any table-shaped value, or scalar, that a part holds."""

    def gather(array: jax.Array, indices: jax.Array) -> jax.Array:
        # Clipped, not filled: whatever the value at a row is, it is no new NaN.
        return array.at[tuple(indices.T)].get(mode="clip")

    def take(array: jax.Array) -> jax.Array:
        axes = range(part.data.ndim)
        return partitioned(gather, array, part.indices, like=part.data, axes=axes)

    if isinstance(value, Deferred):
        return value.select(take, part.data.shape)
    return take(dense(value)) if jnp.ndim(value) else value


def merged(total: RowSum, depth: int | None = None) -> Part:
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
    return partitioned(mark, touched, indices, like=touched, axes=range(touched.ndim))


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
    part = merged(total, depth)
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


def gathered(total: RowSum) -> RowSum:
    """The same sum inside of shard_map, every device with the rows of all."""
    if not total.axes:
        return total
    gather = functools.partial(
        lax.all_gather, axis_name=tuple(total.axes), tiled=True, to="invarying"
    )
    parts = tuple(Part(*map(gather, part)) for part in total.parts)
    return RowSum(total.shape, total.dtype, parts)


def to_bcoo(total: RowSum) -> BCOO:
    """The row-sparse gradient that a sum stands for."""
    total = gathered(total)
    stored = sum(part.indices.shape[0] for part in total.parts)
    part = merged(total)
    return BCOO(
        (part.data.astype(total.dtype), part.indices),
        shape=total.shape,
        unique_indices=stored > total.number,
    )
