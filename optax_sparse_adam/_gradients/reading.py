"""How the rows of a table, or of an elementwise function of tables, are read.

By the kernel where it is there and takes the arrays, else by XLA's gather.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax_extras.jaxprs import named_in_jaxprs
from .._rows.kernel_reads import reader_of_rows
from ..native._on_cpu import on_cpu
from .expressions import Expression, Leaf, Table, inject, operands_first, table
from .lookups import Lookup, Mode


def look_up(
    value: Expression, lookup: Lookup, deltas: dict[Leaf, jax.Array] | None
) -> jax.Array:
    """A lookup in a table or in a function of one, with the deltas injected."""
    if not value.is_table or value.source is None:
        return _read_expression(value, lookup, deltas)
    rows = _read_by_kernel(value.source, lookup)
    if rows is None:
        rows = _read_table(value.source, lookup)
    return rows if deltas is None else inject(rows, deltas[value.leaves[0]])


def _read_table(source: Table, lookup: Lookup) -> jax.Array:
    if source.stale is None:
        return source.values(lookup.read)
    return _read_expression(table(source), lookup, None)


def _read_expression(
    value: Expression, lookup: Lookup, deltas: dict[Leaf, jax.Array] | None
) -> jax.Array:
    def read_clamped(clamped: Lookup) -> jax.Array:
        take = functools.partial(_read_array, clamped)
        return value.select(take, deltas)

    rows = lookup.read_and_fill(read_clamped)
    # The default of `[]` promises that no id is out of bounds. For one that is, JAX
    # reads the nearest row, and its derivative is zero: also that of `(table * w)[ids]`
    # with respect to `w`.
    operands = [y for x in operands_first([value]) for y in x.operands]
    if lookup.params["mode"] == Mode.PROMISE_IN_BOUNDS and any(
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
        for x in operands
    ):
        rows = lookup.where_inside(rows, lax.stop_gradient(rows))
    return rows


def _read_array(lookup: Lookup, array: jax.Array) -> jax.Array:
    """`lookup.read`, by the kernel where XLA may widen all of a bfloat16 table."""
    rows = None
    # OLD_JAX: 0.11.2
    if array.dtype == jnp.bfloat16 and array.shape == lookup.shape:
        rows = _read_by_kernel(Table(array), lookup)
    return lookup.read(array) if rows is None else rows


def show_bounds(
    gather: Callable[..., Any],
    table: Any,
    indices: Sequence[Any],
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
    sizes = tuple(
        size if axis == 0 or axis in collapsed else 0
        for axis, size in enumerate(params["slice_sizes"])
    )
    gather(table, *indices, **params | {"slice_sizes": sizes})


def _read_by_kernel(source: Table, lookup: Lookup) -> jax.Array | None:
    """A lookup of whole rows by the kernel, or `None` where XLA's is as good."""
    indices, axes = lookup.indices, lookup.dims.start_index_map
    # A scalar id under `vmap` indexes all axes; clamped, the others begin at zero.
    is_whole = lookup.window == (1, *lookup.shape[1:]) and 0 in axes
    is_whole = is_whole and (len(axes) == 1 or not lookup.is_filled)
    is_last = lookup.dims.offset_dims == tuple(range(indices.ndim - 1, len(lookup.out)))
    takes = _kernel(source, indices) is not None
    if not (is_whole and is_last and takes):
        return None
    items = (*lookup.params.items(),)
    result: jax.Array = look_up_by_kernel(items, lookup.out, source, indices)
    return result


@functools.partial(jax.jit, static_argnums=(0, 1))
@named_in_jaxprs
def look_up_by_kernel(
    items: Any, out: Any, source: Table, indices: jax.Array
) -> jax.Array:
    params = dict(items)
    show_bounds(lax.gather, source.array, [indices], params)
    column = params["dimension_numbers"].start_index_map.index(0)
    fill = params["fill_value"]  # `None` but for the mode "fill"

    def by_kernel(source: Table, indices: jax.Array) -> jax.Array:
        ids = indices[..., column]
        look_up: Any = _kernel(source, indices)
        rows: jax.Array = look_up(source.array, ids, fill)
        return rows.reshape(out)

    def by_xla(source: Table, indices: jax.Array) -> jax.Array:
        return _read_table(source, Lookup(source.array.shape, out, params, indices))

    result: jax.Array = on_cpu(by_kernel, by_xla, source, indices)
    return result


def _kernel(source: Table, indices: jax.Array) -> Callable[..., jax.Array] | None:
    """The kernel's lookup in this table, if it takes it."""
    stale = None if source.stale is None else source.stale.for_kernel()
    return reader_of_rows(source.array, indices, stale)
