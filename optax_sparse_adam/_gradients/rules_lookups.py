"""Lookups and their transposes: which rows a gather reads and a scatter adds to.

A table is looked up by `gather`, by `dynamic_slice` and, one row at a constant index,
by `slice`; the transposes are `scatter-add`, `dynamic_update_slice` and `pad`. Here all
of them become a gather and a sum of rows: one kind of lookup.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, Var

from .._jax_extras.on_cpu import on_cpu
from .._jax_extras.sharding import mesh_of
from .._rows.gather_scatter import repeat_row
from .._rows.padding import row_bounds
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


def _with_batch(indices: jax.Array, batching_dims: tuple[int, ...]) -> jax.Array:
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


def _ids(indices: jax.Array, limits: list[int], *, clamps: bool) -> jax.Array:
    """Indices `[..., depth]` in a type in which an id beyond the limits is seen to be.

    Those that are clamped are so in their own type: as an int32, a uint32 of 2**31 or
    more is negative.
    """
    dtype = indices.dtype
    if dtype.itemsize < 4:
        return _ids(indices.astype(jnp.int32), limits, clamps=clamps)
    if clamps:
        largest = int(jnp.iinfo(dtype).max)
        last = np.asarray([min(limit, largest) for limit in limits], dtype)
        last = last.reshape((1,) * (indices.ndim - 1) + (-1,))
        indices = jnp.clip(indices, np.zeros_like(last), last)
    if dtype == jnp.uint32 and max(limits) >= jnp.iinfo(jnp.int32).max:
        return indices
    return indices.astype(jnp.int64 if dtype.itemsize == 8 else jnp.int32)


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
    axes, window, inner = _scatter_numbers(eqn)
    depth = _depth(window, axes, shape)
    number = math.prod(indices.shape[:-1])
    indices = _with_batch(indices, numbers.scatter_indices_batching_dims)
    limits = [shape[axis] - window[axis] for axis in axes]
    indices = indices.reshape(number, len(axes))
    indices = _ids(indices, limits, clamps=mode == _Mode.CLIP)
    inside = _starts_inside(indices, limits)[:, None]
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


def _constants(starts: Iterable[int]) -> list[np.ndarray]:
    places = [*map(int, starts)]
    dtype = jnp.int32 if max(places) <= jnp.iinfo(jnp.int32).max else jnp.uint32
    return [np.asarray(place, dtype) for place in places]


def _first(starts: Any, shape: Any, window: Any) -> list[jax.Array]:
    """Where a slice starts along each axis; as `dynamic_slice` does, it is clamped."""
    limits = [size - part for size, part in zip(shape, window, strict=True)]
    first = [
        _ids(jnp.asarray(start)[None], [limit], clamps=True)[0]
        for start, limit in zip(starts, limits, strict=True)
    ]
    dtype = max((start.dtype for start in first), key=lambda d: d.itemsize)
    return [start.astype(dtype) for start in first]


def update_part(shape: tuple[int, ...], update: jax.Array, starts: Any) -> Part:
    """The rows that a dynamic_update_slice of zeros holds; starts are clamped."""
    window = update.shape
    depth = max(1, _depth(window, range(len(shape)), shape))
    number = window[0] if depth == 1 else 1
    first = _first(starts, shape, window)
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
    return update_part(shape, row, _constants(low for low, _, _ in config))


def slice_reader(
    eqn: Any, shape: tuple[int, ...], starts: Any
) -> Callable[[jax.Array], jax.Array] | None:
    """A slice of rows of arrays of this shape by a gather; `None` if it is no lookup.

    XLA would copy a table of which rows are sliced: see `_rows.gather_scatter`'s
    `repeat_row`.
    """
    window = eqn.outvars[0].aval.shape
    if not shape or window[0] in (0, shape[0]):
        return None
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"] or (1,) * len(shape)
        if window[0] != 1 or set(strides[1:]) - {1}:
            return None
        starts = _constants(eqn.params["start_indices"])
    row, *columns = _first(starts, shape, window)
    rows = row + jnp.arange(window[0], dtype=row.dtype)
    indices = jnp.stack([jnp.broadcast_to(x, rows.shape) for x in (rows, *columns)], 1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, len(shape))),
        collapsed_slice_dims=(0,),
        start_index_map=tuple(range(len(shape))),
    )

    def gather(array: jax.Array, indices: jax.Array) -> jax.Array:
        # An axis of length 1 stands for all columns; XLA clamps indices into it.
        sizes = (1, *map(min, window[1:], array.shape[1:]))
        mode = _Mode.PROMISE_IN_BOUNDS
        return lax.gather(array, indices, numbers, slice_sizes=sizes, mode=mode)

    def read(array: jax.Array) -> jax.Array:
        if eqn.primitive.name == "dynamic_slice":
            _show_bounds(eqn.primitive, array, starts, eqn.params)
        if len(indices) == 1:
            return gather(array, repeat_row(indices))[:1]
        return gather(array, indices)

    return read


def _show_bounds(
    read: Primitive,
    table: jax.Array,
    indices: Sequence[jax.Array],
    params: dict[str, Any],
) -> None:
    """Reads nothing at these indices, for `checkify.index_checks` to check them.

    checkify has a rule for a gather and for a dynamic_slice, and sees neither what the
    kernel reads nor that an index has been clamped. A slice without columns has the
    same bounds, and XLA drops it. (tests/gradients/test_checkify.py)
    """
    collapsed = range(1, 1)
    if "dimension_numbers" in params:
        collapsed = params["dimension_numbers"].collapsed_slice_dims
    sizes = params["slice_sizes"]
    sizes = tuple(
        size if axis == 0 or axis in collapsed else 0 for axis, size in enumerate(sizes)
    )
    read.bind(table, *indices, **params | {"slice_sizes": sizes})


def look_up(eqn: Any, table: Deferred, indices: jax.Array) -> jax.Array | None:
    """A gather from a table, or `None` where XLA's gather is as good."""
    rows = _rows_by_kernel(eqn, table.dense, indices)
    if rows is None and math.prod(indices.shape[:-1]) == 1:
        rows = _gather(eqn.primitive, table.dense, indices, eqn.params)
    return rows


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
    return _kernel_rows(eqn.primitive, items, out.shape, table, indices)


def _gather(
    gather: Primitive, array: jax.Array, indices: jax.Array, params: dict[str, Any]
) -> jax.Array:
    """A gather that reads at least two rows: see `_rows.gather_scatter.repeat_row`.

    An axis of length 1 stands for all columns; XLA clamps indices into it.
    """
    numbers = params["dimension_numbers"]
    sizes = tuple(map(min, params["slice_sizes"], array.shape))
    params = params | {"slice_sizes": sizes}
    if math.prod(indices.shape[:-1]) != 1 or mesh_of(array, indices).explicit_axes:
        return gather.bind(array, indices, **params)
    batch = numbers.operand_batching_dims
    index = _with_batch(indices, numbers.start_indices_batching_dims)
    dropped = tuple(sorted((*numbers.collapsed_slice_dims, *batch)))
    shape = [1] * (indices.ndim - 1 + len(numbers.offset_dims))
    kept = (size for axis, size in enumerate(sizes) if axis not in dropped)
    for axis, size in zip(numbers.offset_dims, kept, strict=True):
        shape[axis] = size
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, 1 + len(numbers.offset_dims))),
        collapsed_slice_dims=dropped,
        start_index_map=(*batch, *numbers.start_index_map),
    )
    params = params | {"dimension_numbers": numbers, "unique_indices": False}
    rows = gather.bind(array, repeat_row(index.reshape(1, -1)), **params)
    return rows[:1].reshape(shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _kernel_rows(
    gather: Primitive,
    items: Any,
    shape: tuple[int, ...],
    table: jax.Array,
    indices: jax.Array,
) -> jax.Array:
    params = dict(items)
    _show_bounds(gather, table, [indices], params)
    column = params["dimension_numbers"].start_index_map.index(0)
    fill = None
    if params["mode"] == _Mode.FILL_OR_DROP:
        fill = math.nan if params["fill_value"] is None else params["fill_value"]

    def by_kernel(table: jax.Array, indices: jax.Array) -> jax.Array:
        return native.look_up_rows(table, indices[..., column], fill).reshape(shape)

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
        return _gather(eqn.primitive, array, indices, params)

    result = table.select(take, out.shape)
    if not filled:
        return result
    numbers = params["dimension_numbers"]
    axes = numbers.start_index_map
    limits = [table.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    inside = _starts_inside(_ids(indices, limits, clamps=False), limits)
    batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    inside = lax.broadcast_in_dim(inside, out.shape, batch)
    return jnp.where(
        inside, result, jnp.asarray(jnp.nan if value is None else value, out.dtype)
    )
