"""Lookups: how the rows of a table, or of one whose rows are behind, are read.

By the kernel where it is there and takes the arrays, else by XLA's gather.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from .._jax_extras.on_cpu import on_cpu
from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import bind
from .._rows.gather_scatter import repeat_row
from .._rows.resting_rows import look_up_values
from .._rows.resting_state import RowState
from ..native import _calls as native
from .rules_lookups import (
    constants,
    first_of_window,
    start_ids,
    starts_inside,
    with_batch,
)
from .symbolic_values import Deferred, outdated
from .symbolic_values import table as make_table

_Mode = lax.GatherScatterMode


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
        starts = constants(eqn.params["start_indices"])
    row, *columns = first_of_window(starts, shape, window)
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
    collapsed: Sequence[int] = ()
    if "dimension_numbers" in params:
        collapsed = params["dimension_numbers"].collapsed_slice_dims
    sizes = params["slice_sizes"]
    sizes = tuple(
        size if axis == 0 or axis in collapsed else 0 for axis, size in enumerate(sizes)
    )
    bind(read, table, *indices, **params | {"slice_sizes": sizes})


def look_up(eqn: Any, table: Deferred, indices: jax.Array) -> jax.Array | None:
    """A gather from a table, or `None` where XLA's gather is as good."""
    rows = _rows_by_kernel(eqn, table, indices)
    if rows is None and math.prod(indices.shape[:-1]) == 1:
        rows = _gather(eqn.primitive, table.dense, indices, eqn.params)
    return rows


def _reads_values(table: jax.Array, rows: RowState, *args: Any, ids: jax.Array) -> bool:
    return native.reads_now(table, (*rows[:3], *rows.log_decay), ids)


# For what a value is made by: whether the kernel takes its arrays, and how it reads.
_BY_KERNEL: dict[Any, tuple[Callable[..., bool], Callable[..., jax.Array]]] = {
    make_table: (native.reads, native.look_up_rows),
    outdated: (_reads_values, look_up_values),
}


def _rows_by_kernel(eqn: Any, value: Deferred, indices: jax.Array) -> jax.Array | None:
    """A gather of whole rows by the kernel, or `None` where XLA's is as good."""
    if value.origin is None:
        return None
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    axes = numbers.start_index_map
    # A scalar id under `vmap` indexes all axes; clamped, the others begin at zero.
    rest_is_clamped = eqn.params["mode"] != _Mode.FILL_OR_DROP
    whole = 0 in axes and (len(axes) == 1 or rest_is_clamped)
    whole = whole and eqn.params["slice_sizes"] == (1, *value.shape[1:])
    last = numbers.offset_dims == tuple(range(indices.ndim - 1, out.ndim))
    make, arrays = value.origin
    reads, _ = _BY_KERNEL[make]
    if not (whole and last and reads(*arrays, ids=indices)):
        return None
    items = (*eqn.params.items(),)
    return _kernel_rows(eqn.primitive, items, out, make, arrays, indices)


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
        return bind(gather, array, indices, **params)
    batch = numbers.operand_batching_dims
    index = with_batch(indices, numbers.start_indices_batching_dims)
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
    rows = bind(gather, array, repeat_row(index.reshape(1, -1)), **params)
    return rows[:1].reshape(shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _kernel_rows(
    gather: Primitive,
    items: Any,
    out: Any,
    make: Callable[..., Deferred],
    arrays: tuple[Any, ...],
    indices: jax.Array,
) -> jax.Array:
    params = dict(items)
    _show_bounds(gather, arrays[0], [indices], params)
    column = params["dimension_numbers"].start_index_map.index(0)
    fill = None
    if params["mode"] == _Mode.FILL_OR_DROP:
        fill = math.nan if params["fill_value"] is None else params["fill_value"]
    _, look_up_by_kernel = _BY_KERNEL[make]

    def by_kernel(arrays: tuple[Any, ...], indices: jax.Array) -> jax.Array:
        rows = look_up_by_kernel(*arrays, indices[..., column], fill)
        return rows.reshape(out.shape)

    def by_xla(arrays: tuple[Any, ...], indices: jax.Array) -> jax.Array:
        value = make(*arrays)
        if value.is_table:
            rows: jax.Array = gather.bind(*arrays, indices, **params)
            return rows
        return _gather_elements(gather, params, out, value, indices)

    return on_cpu(by_kernel, by_xla, arrays, indices)


def gather_from(eqn: Any, value: Deferred, indices: jax.Array) -> jax.Array | None:
    """A gather of a value that is computed at the gathered elements only.

    Returns `None` where that would need a fill value that only the gather knows.
    """
    params, out = eqn.params, eqn.outvars[0].aval
    is_filled = params["mode"] == _Mode.FILL_OR_DROP
    has_nan = jnp.issubdtype(out.dtype, jnp.inexact)
    if is_filled and params["fill_value"] is None and not has_nan:
        return None
    rows = _rows_by_kernel(eqn, value, indices)
    if rows is None:
        rows = _gather_elements(eqn.primitive, params, out, value, indices)
    return rows


def _gather_elements(
    gather: Primitive,
    params: dict[str, Any],
    out: Any,
    value: Deferred,
    indices: jax.Array,
) -> jax.Array:
    fill, is_filled = params["fill_value"], params["mode"] == _Mode.FILL_OR_DROP
    if is_filled:
        params = params | {"mode": _Mode.CLIP, "fill_value": None}

    def take(array: jax.Array) -> jax.Array:
        return _gather(gather, array, indices, params)

    result = value.select(take, out.shape)
    if not is_filled:
        return result
    numbers = params["dimension_numbers"]
    axes = numbers.start_index_map
    limits = [value.shape[axis] - params["slice_sizes"][axis] for axis in axes]
    inside = starts_inside(start_ids(indices, limits, clamps=False), limits)
    batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    inside = lax.broadcast_in_dim(inside, out.shape, batch)
    return jnp.where(
        inside, result, jnp.asarray(jnp.nan if fill is None else fill, out.dtype)
    )
