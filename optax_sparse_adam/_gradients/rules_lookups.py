"""Lookups and their transposes: which rows a gather reads and a scatter adds to."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from .._jax_extras.on_cpu import on_cpu
from .._rows.gather_scatter import row_bounds
from ..native import _calls as native
from .symbolic_values import Deferred, Part

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


def _window(eqn: Any) -> tuple[int, ...]:
    """Size along each axis of the table of what one index of a scatter-add adds to."""
    operand, _, updates = (var.aval for var in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    sizes = iter(updates.shape[dim] for dim in numbers.update_window_dims)
    inserted = numbers.inserted_window_dims
    return tuple(1 if d in inserted else next(sizes) for d in range(operand.ndim))


def is_scatter_of_rows(eqn: Any) -> bool:
    """Whether a scatter-add adds to rows: the transpose of a row lookup."""
    numbers = eqn.params["dimension_numbers"]
    if numbers.operand_batching_dims or eqn.invars[0].aval.ndim == 0:
        return False
    indexed = numbers.scatter_dims_to_operand_dims
    return _depth(_window(eqn), indexed, eqn.invars[0].aval.shape) > 0


def is_update_of_rows(eqn: Any) -> bool:
    """Whether a dynamic_update_slice writes some, not all, rows of a table."""
    shape, window = (var.aval.shape for var in eqn.invars[:2])
    return bool(shape) and (window[0] < shape[0] or shape[0] == 1)


def _ids(indices: jax.Array) -> jax.Array:
    """Integers in a type that holds every row id and whatever is clamped to one."""
    wide = indices.dtype.itemsize == 8
    return indices.astype(jnp.int64 if wide else jnp.int32)


def _starts_inside(starts: jax.Array, limits: list[int]) -> jax.Array:
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
    window = _window(eqn)
    axes = numbers.scatter_dims_to_operand_dims
    depth = _depth(window, axes, shape)
    number = math.prod(indices.shape[:-1])
    indices = _ids(indices).reshape(number, len(axes))
    limits = [shape[axis] - window[axis] for axis in axes]
    if mode == _Mode.CLIP:
        indices = jnp.clip(indices, 0, np.asarray([limits], indices.dtype))
    inside = _starts_inside(indices, limits)[:, None]
    ids = indices[:, np.asarray([axes.index(axis) for axis in range(depth)])]
    ids = jnp.where(inside, ids, row_bounds(shape, ids))

    batch = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    rows = jnp.transpose(updates, (*batch, *numbers.update_window_dims))
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


def update_part(shape: tuple[int, ...], update: jax.Array, starts: Any) -> Part:
    """The rows that a dynamic_update_slice of zeros holds; starts are clamped."""
    window = update.shape
    depth = max(1, _depth(window, range(len(shape)), shape))
    number = window[0] if depth == 1 else 1
    limits = [size - part for size, part in zip(shape, window, strict=True)]
    starts = [_ids(jnp.asarray(start)) for start in starts]
    dtype = max((start.dtype for start in starts), key=lambda d: d.itemsize)
    first = [
        jnp.clip(start.astype(dtype), 0, np.asarray(limit, dtype))
        for start, limit in zip(starts, limits, strict=True)
    ]
    ids = jnp.stack(first[:depth])[None, :]
    ids = ids + jnp.arange(number, dtype=ids.dtype)[:, None]
    rows = update.reshape(number, *window[depth:])
    if rows.shape[1:] != shape[depth:]:
        zeros = jnp.zeros((number, *shape[depth:]), update.dtype)
        begin = (jnp.zeros([], ids.dtype), *first[depth:])
        rows = lax.dynamic_update_slice(zeros, rows, begin)
    return Part(ids, rows)


def look_up(eqn: Any, table: Deferred, indices: jax.Array) -> jax.Array | None:
    """A gather from a table by the kernel, or `None` where XLA's is as good."""
    return _rows_by_kernel(eqn, table.dense, indices)


def _rows_by_kernel(eqn: Any, table: jax.Array, indices: jax.Array) -> jax.Array | None:
    """A gather of whole rows by the kernel, or `None` where XLA's is as good."""
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    axes = numbers.start_index_map
    # A scalar id under `vmap` indexes all axes; clamped, the others begin at zero.
    rest_is_clamped = eqn.params["mode"] != _Mode.FILL_OR_DROP
    whole = 0 in axes and (len(axes) == 1 or rest_is_clamped)
    whole = whole and eqn.params["slice_sizes"] == (1, *table.shape[1:])
    last = numbers.offset_dims == tuple(range(indices.ndim - 1, out.ndim))
    if not (whole and last and native.reads(table, indices)):
        return None
    items = (*eqn.params.items(),)
    return _take_rows(eqn.primitive, items, out.shape, table, indices)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _take_rows(
    gather: Primitive,
    items: Any,
    shape: tuple[int, ...],
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array:
    params = dict(items)
    column = params["dimension_numbers"].start_index_map.index(0)
    fill = None
    if params["mode"] == _Mode.FILL_OR_DROP:
        fill = math.nan if params["fill_value"] is None else params["fill_value"]

    def by_kernel(table: jax.Array, indices: jax.Array) -> jax.Array:
        return native.take_rows(table, indices[..., column], fill).reshape(shape)

    def by_xla(table: jax.Array, indices: jax.Array) -> jax.Array:
        rows: jax.Array = gather.bind(table, indices, **params)
        return rows

    return on_cpu(by_kernel, by_xla, table, indices)


def gather_from(eqn: Any, table: Deferred, indices: jax.Array) -> jax.Array | None:
    """A gather of a value that is computed at the gathered elements only.

    Returns `None` where that would need a fill value that only the gather knows.
    """
    params = dict(eqn.params)
    out = eqn.outvars[0].aval
    filled = params["mode"] == _Mode.FILL_OR_DROP
    value = params["fill_value"]
    if filled:
        if value is None and not jnp.issubdtype(out.dtype, jnp.inexact):
            return None
        params.update(mode=_Mode.CLIP, fill_value=None)

    def take(array: jax.Array) -> jax.Array:
        if table.of_rows and array.shape == table.shape:
            rows = _rows_by_kernel(eqn, array, indices)
            if rows is not None:
                return rows
        # An axis of length 1 stands for all columns; indices into it are clamped.
        sizes = tuple(map(min, params["slice_sizes"], array.shape))
        return eqn.primitive.bind(array, indices, **params | {"slice_sizes": sizes})

    result = table.select(take, out.shape)
    if not filled:
        return result
    numbers = params["dimension_numbers"]
    axes = numbers.start_index_map
    limits = [table.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    inside = _starts_inside(_ids(indices), limits)
    batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    inside = lax.broadcast_in_dim(inside, out.shape, batch)
    return jnp.where(
        inside, result, jnp.asarray(jnp.nan if value is None else value, out.dtype)
    )
