"""The transposes of lookups: which rows a scatter adds to.

A table is looked up by `gather`, by `dynamic_slice` and, one row at a constant index,
by `slice`; the transposes are `scatter-add`, `dynamic_update_slice` and `pad`. Here all
of them become a gather and a sum of rows: one kind of lookup.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var

from .._rows.padding import row_bounds
from .symbolic_values import Part

_Mode = lax.GatherScatterMode


def _depth(window: tuple[int, ...], indexed: Any, shape: tuple[int, ...]) -> int:
    """How many leading axes a lookup indexes one element at a time.

    An axis of length one that is not the first counts as a part of the row.
    """
    depth = 0
    for axis, size in enumerate(window):
        if size != 1 or axis not in indexed or (axis and shape[axis] == 1):
            break
        depth += 1
    return depth


class _Numbers(NamedTuple):
    """Which axes of a table a gather or a scatter indexes, and by how much at once.

    Attributes:
      axes: The axis that each column of the indices stands for.
      window: Size along each axis of the table of what one index reads or adds to.
      inner: Axes of the rows in the result of a gather, in the updates of a scatter.
    """

    axes: tuple[int, ...]
    window: tuple[int, ...]
    inner: tuple[int, ...]


def _scatter_numbers(eqn: Any) -> _Numbers:
    operand, _, updates = (var.aval for var in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    sizes = iter(updates.shape[dim] for dim in numbers.update_window_dims)
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = tuple(1 if d in single else next(sizes) for d in range(operand.ndim))
    axes = (*numbers.operand_batching_dims, *numbers.scatter_dims_to_operand_dims)
    return _Numbers(axes, window, numbers.update_window_dims)


def with_batch(indices: jax.Array, batching_dims: tuple[int, ...]) -> jax.Array:
    """Indices with a column in front for each batching dimension.

    A `vmap` over tables and ids is a lookup of `tables[b, ids[b]]`.
    """
    shape = (*indices.shape[:-1], 1)
    columns = [lax.broadcasted_iota(indices.dtype, shape, d) for d in batching_dims]
    return jnp.concatenate([*columns, indices], axis=-1)


def is_scatter_of_rows(eqn: Any) -> bool:
    """Whether a scatter-add adds to rows: the transpose of a row lookup.

    With batching dimensions, of rows and not of single elements: these would be
    `take_along_axis` and `sort`, which read about as many as the table holds.
    """
    shape = eqn.invars[0].aval.shape
    axes, window, _ = _scatter_numbers(eqn)
    depth = _depth(window, axes, shape)
    is_batched = bool(eqn.params["dimension_numbers"].operand_batching_dims)
    return 0 < depth < len(shape) + (not is_batched)


def is_update_of_rows(eqn: Any) -> bool:
    """Whether a dynamic_update_slice writes some, not all, rows of a table."""
    shape, window = (var.aval.shape for var in eqn.invars[:2])
    return bool(shape) and (window[0] < shape[0] or shape[0] == 1)


def is_pad_of_row(eqn: Any) -> bool:
    """Whether a pad puts one row at a constant place: the transpose of `table[0]`."""
    row, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    config = eqn.params["padding_config"]
    places = all(
        low >= 0 and high >= 0 and (interior == 0 or size == 1)
        for (low, high, interior), size in zip(config, row, strict=True)
    )
    return places and bool(shape) and row[0] == 1


def is_every_row(jaxpr: Any, atom: Any) -> bool:
    """Whether a value is a sum of rows at constant indices that leave no row out.

    So is the gradient of stacked layers that a Python loop takes one by one. All rows
    of a table, each once, are the dense gradient already.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    num_rows, rows, atoms = atom.aval.shape[0], set[int](), [atom]
    while atoms:
        atom = atoms.pop()
        eqn = made_by.get(atom) if isinstance(atom, Var) else None
        if eqn is None:
            return False
        if eqn.primitive.name == "add_any":
            atoms.extend(eqn.invars)
        elif eqn.primitive.name == "pad" and is_pad_of_row(eqn):
            rows.add(int(eqn.params["padding_config"][0][0]))
        else:
            return False
    return len(rows) == num_rows


def start_ids(indices: jax.Array, limits: list[int], *, clamps: bool) -> jax.Array:
    """Indices `[..., depth]` in a type in which an id beyond the limits is seen to be.

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
    """Whether each index `[..., depth]` starts a slice that lies in the table."""
    last = np.asarray(limits, starts.dtype).reshape((1,) * (starts.ndim - 1) + (-1,))
    return jnp.all((starts >= 0) & (starts <= last), axis=-1)


def scatter_part(
    eqn: Any, shape: tuple[int, ...], indices: jax.Array, updates: jax.Array
) -> Part:
    """The rows that a scatter-add adds to zeros, with the scatter's own meaning.

    What mode "clip" clamps is clamped, what "drop" drops becomes padding.
    """
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    axes, window, inner = _scatter_numbers(eqn)
    depth = _depth(window, axes, shape)
    number = math.prod(indices.shape[:-1])
    indices = with_batch(indices, numbers.scatter_indices_batching_dims)
    limits = [shape[axis] - window[axis] for axis in axes]
    indices = indices.reshape(number, len(axes))
    indices = start_ids(indices, limits, clamps=mode == _Mode.CLIP)
    inside = starts_inside(indices, limits)[:, None]
    ids = indices[:, np.asarray([axes.index(axis) for axis in range(depth)])]
    ids = jnp.where(inside, ids, row_bounds(shape, ids))

    batch = [d for d in range(updates.ndim) if d not in inner]
    rows = jnp.transpose(updates, (*batch, *inner))
    rows = rows.reshape(number, *window[depth:])
    if window[depth:] == shape[depth:]:
        return Part(ids, rows)
    # Only a part of each row is added to: place it within the row.
    rest = [axis for axis in range(depth, len(shape)) if axis in axes]
    place = indices[:, np.asarray([axes.index(axis) for axis in rest], int)]
    slot = jnp.arange(number, dtype=indices.dtype)[:, None]
    placed = lax.scatter_add(
        jnp.zeros((number, *shape[depth:]), updates.dtype),
        jnp.concatenate([slot, place], axis=1),
        rows,
        lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(1, rows.ndim)),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, *(1 + axis - depth for axis in rest)),
        ),
        mode=_Mode.FILL_OR_DROP,
    )
    return Part(ids, placed)


def constants(starts: Iterable[int]) -> list[np.ndarray]:
    places = [*map(int, starts)]
    dtype = jnp.int32 if max(places) <= jnp.iinfo(jnp.int32).max else jnp.uint32
    return [np.asarray(place, dtype) for place in places]


def first_of_window(starts: Any, shape: Any, window: Any) -> list[jax.Array]:
    """Where a slice starts along each axis; as `dynamic_slice` does, it is clamped."""
    limits = [size - part for size, part in zip(shape, window, strict=True)]
    first = [
        start_ids(jnp.asarray(start)[None], [limit], clamps=True)[0]
        for start, limit in zip(starts, limits, strict=True)
    ]
    dtype = max((start.dtype for start in first), key=lambda d: d.itemsize)
    return [start.astype(dtype) for start in first]


def update_part(shape: tuple[int, ...], update: jax.Array, starts: Any) -> Part:
    """The rows that a dynamic_update_slice of zeros holds; starts are clamped."""
    window = update.shape
    depth = max(1, _depth(window, range(len(shape)), shape))
    number = window[0] if depth == 1 else 1
    first = first_of_window(starts, shape, window)
    ids = jnp.stack(first[:depth])[None, :]
    ids = ids + jnp.arange(number, dtype=ids.dtype)[:, None]
    rows = update.reshape(number, *window[depth:])
    if rows.shape[1:] != shape[depth:]:
        zeros = jnp.zeros((number, *shape[depth:]), update.dtype)
        begin = (jnp.zeros([], ids.dtype), *first[depth:])
        rows = lax.dynamic_update_slice(zeros, rows, begin)
    return Part(ids, rows)


def pad_part(eqn: Any, row: jax.Array) -> Part:
    """The row that a pad with zeros puts at a constant place."""
    shape, config = eqn.outvars[0].aval.shape, eqn.params["padding_config"]
    return update_part(shape, row, constants(low for low, _, _ in config))
