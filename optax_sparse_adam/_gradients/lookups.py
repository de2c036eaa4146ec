"""What a lookup reads: which rows of a table, and how they lie in its result.

A table is looked up by `gather`, by `dynamic_slice` and, one row at a constant index,
by `slice`. Here all of them are windows of a table, each at an index of its own.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._rows.padding import in_bounds, row_bounds

_Mode = lax.GatherScatterMode


class Lookup(NamedTuple):
    """Windows of a table, one for each index.

    Attributes:
      shape: The table's.
      axes: The axis of the table that each column of the indices stands for.
      window: Size along each axis of the table of what one index reads.
      inner: Axes of the rows in the result.
      out: The shape of the result.
      count: How many indices there are.
      clamps: Whether an index out of bounds reads the nearest window.
      constant: The row, for a lookup of one at a constant index.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    window: tuple[int, ...]
    inner: tuple[int, ...]
    out: tuple[int, ...]
    count: int  # type: ignore[assignment]  # tuple has a method count
    clamps: bool
    constant: int | None = None

    @property
    def depth(self) -> int:
        """How many leading axes are indexed one element at a time.

        An axis of length one that is not the first counts as a part of the row.
        """
        depth = 0
        for axis, size in enumerate(self.window):
            is_part = axis and self.shape[axis] == 1
            if size != 1 or axis not in self.axes or is_part:
                break
            depth += 1
        return depth

    def limits(self) -> list[int]:
        return [self.shape[axis] - self.window[axis] for axis in self.axes]

    def _columns(self, indices: jax.Array, axes: Iterable[int]) -> jax.Array:
        return indices[:, np.asarray([self.axes.index(axis) for axis in axes], int)]

    def rows(self, indices: jax.Array, depth: int) -> jax.Array:
        """The rows `[count, depth]` that are read; out of bounds where none is.

        Args:
          indices: `[count, len(axes)]`, as the lookup gets them.
          depth: How many leading axes of the table count as the index of a row.
        """
        starts = start_ids(indices, self.limits(), clamps=self.clamps)
        inside = starts_inside(starts, self.limits())[:, None]
        rows = self._columns(starts, range(depth))
        return jnp.where(inside, rows, row_bounds(self.shape, rows))

    def windows(self, rows: jax.Array, indices: jax.Array, depth: int) -> jax.Array:
        """What the lookup reads, of whole rows `[count, *shape[depth:]]` one by one.

        Linear in the rows: its transpose puts the cotangent of the result into rows.
        """
        if self.window[depth:] != self.shape[depth:]:
            starts = start_ids(indices, self.limits(), clamps=self.clamps)
            rest = [axis for axis in range(depth, len(self.shape)) if axis in self.axes]
            slot = jnp.arange(self.count, dtype=starts.dtype)[:, None]
            numbers = lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, rows.ndim)),
                collapsed_slice_dims=(0,),
                start_index_map=(0, *(1 + axis - depth for axis in rest)),
            )
            place = jnp.concatenate([slot, self._columns(starts, rest)], axis=1)
            sizes = (1, *self.window[depth:])
            rows = lax.gather(rows, place, numbers, sizes, mode=_Mode.CLIP)
        batch = [axis for axis in range(len(self.out)) if axis not in self.inner]
        order = [*batch, *self.inner]
        rows = rows.reshape([self.out[axis] for axis in order])
        return jnp.transpose(rows, [order.index(axis) for axis in range(len(order))])


def lookup_of_gather(eqn: Any, shape: tuple[int, ...]) -> Lookup | None:
    """Which rows a gather reads; `None` if it reads no rows.

    With batching dimensions, rows and not single elements: these would be
    `take_along_axis` and `sort`, which read about as many as the table holds.
    """
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    batched = numbers.operand_batching_dims
    lookup = Lookup(
        shape,
        axes=(*batched, *numbers.start_index_map),
        window=tuple(eqn.params["slice_sizes"]),
        inner=tuple(numbers.offset_dims),
        out=eqn.outvars[0].aval.shape,
        count=math.prod(indices[:-1]),
        clamps=eqn.params["mode"] == _Mode.CLIP,
    )
    return lookup if 0 < lookup.depth < len(shape) + (not batched) else None


def lookup_of_slice(eqn: Any, shape: tuple[int, ...]) -> Lookup | None:
    """Which rows a slice reads; `None` if it reads all of them, or several constant."""
    window = eqn.outvars[0].aval.shape
    if not shape or window[0] == 0 or window[0] == shape[0] > 1:
        return None
    constant = None
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"] or (1,) * len(shape)
        if window[0] != 1 or set(strides[1:]) - {1}:
            return None
        constant = int(eqn.params["start_indices"][0])
    axes = tuple(range(len(shape)))
    single = (1, *window[1:])
    return Lookup(
        shape, axes, single, axes[1:], window, window[0], clamps=True, constant=constant
    )


def indices_of_gather(eqn: Any, indices: jax.Array) -> jax.Array:
    """`[count, len(axes)]`, with a column in front for each batching dimension.

    A `vmap` over tables and ids is a lookup of `tables[b, ids[b]]`.
    """
    shape = (*indices.shape[:-1], 1)
    batched = eqn.params["dimension_numbers"].start_indices_batching_dims
    columns = [lax.broadcasted_iota(indices.dtype, shape, d) for d in batched]
    return jnp.concatenate([*columns, indices], axis=-1).reshape(
        math.prod(shape), len(columns) + indices.shape[-1]
    )


def indices_of_slice(lookup: Lookup, starts: Iterable[Any]) -> jax.Array:
    """Where a slice reads, row by row; as `dynamic_slice` does, it is clamped."""
    pairs = zip(lookup.shape, lookup.out, strict=True)
    first = [
        start_ids(jnp.asarray(start)[None], [size - part], clamps=True)[0]
        for start, (size, part) in zip(starts, pairs, strict=True)
    ]
    dtype = max((start.dtype for start in first), key=lambda d: d.itemsize)
    row, *columns = (start.astype(dtype) for start in first)
    rows = row + jnp.arange(lookup.count, dtype=dtype)
    return jnp.stack([jnp.broadcast_to(x, rows.shape) for x in (rows, *columns)], 1)


def constants(starts: Iterable[int]) -> list[np.ndarray]:
    places = [*map(int, starts)]
    dtype = jnp.int32 if max(places) <= jnp.iinfo(jnp.int32).max else jnp.uint32
    return [np.asarray(place, dtype) for place in places]


def start_ids(indices: jax.Array, limits: list[int], *, clamps: bool) -> jax.Array:
    """Indices `[..., k]` in a type in which an id beyond the limits is seen to be.

    Those that are clamped are so in their own type: as an int32, a uint32 of 2**31 or
    more is negative.
    """
    dtype = indices.dtype
    if dtype.itemsize < 4:
        return start_ids(indices.astype(jnp.int32), limits, clamps=clamps)
    if clamps:
        largest = int(jnp.iinfo(dtype).max)
        last = np.asarray([min(limit, largest) for limit in limits], dtype)
        last = last.reshape((1,) * (indices.ndim - 1) + (-1,))
        indices = jnp.clip(indices, np.zeros_like(last), last)
    if dtype == jnp.uint32 and max(limits) >= jnp.iinfo(jnp.int32).max:
        return indices
    return indices.astype(jnp.int64 if dtype.itemsize == 8 else jnp.int32)


def starts_inside(starts: jax.Array, limits: list[int]) -> jax.Array:
    """Whether each index `[..., k]` starts a window that lies in the table."""
    last = np.asarray(limits, starts.dtype).reshape((1,) * (starts.ndim - 1) + (-1,))
    return jnp.all((starts >= 0) & (starts <= last), axis=-1)


def leading_columns(
    indices: jax.Array, depth: int, shape: tuple[int, ...]
) -> jax.Array:
    """The leading columns of indices; all out of bounds where one of them is."""
    rows = indices[:, :depth]
    if indices.shape[1] == depth:
        return rows
    valid = in_bounds(indices, shape)
    return jnp.where(valid[:, None], rows, row_bounds(shape, rows))
