"""How the rows of a table, or of an elementwise function of tables, are read.

Whole rows of a table by `look_up` of `_rows`, where a kernel takes them or some are
padding; all else by XLA's gather, which reads any window.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._jax_extras.inject import inject
from .._rows.lookups import look_up as read_rows
from .._rows.lookups import reads_by_kernel
from .._rows.source import Mode, Source
from .expressions import Expression, Leaf, operands_first, table
from .lookups import Lookup


def look_up(
    value: Expression, lookup: Lookup, deltas: dict[Leaf, jax.Array] | None
) -> jax.Array:
    """A lookup in a table or in a function of one, with the deltas injected."""
    if not value.is_table or value.source is None:
        return _read_expression(value, lookup, deltas)
    rows = _read_table(value.source, lookup)
    return rows if deltas is None else inject(rows, deltas[value.leaves[0]])


def _read_table(source: Source, lookup: Lookup) -> jax.Array:
    bounds = lookup.bounds_of_rows
    # A gather, whose padding `checkify` would report.
    is_hidden = lookup.is_padded and source.stale is None and lookup.sharding is None
    if bounds is not None and (
        is_hidden or reads_by_kernel(source, lookup.row_ids, bounds)
    ):
        rows: jax.Array = read_rows(bounds, source, lookup.row_ids)
        return rows.reshape(lookup.out)
    if source.stale is None:
        return source.values(lookup.read)
    return _read_expression(table(source), lookup, None)


def _read_expression(
    value: Expression, lookup: Lookup, deltas: dict[Leaf, jax.Array] | None
) -> jax.Array:
    def read_clamped(clamped: Lookup) -> jax.Array:
        take = functools.partial(_read_array, clamped)
        return value.select(take, deltas)

    return without_derivative_outside(value, lookup, lookup.read_and_fill(read_clamped))


def without_derivative_outside(
    value: Expression, lookup: Lookup, rows: jax.Array
) -> jax.Array:
    """Rows of a function of tables, as the derivative of one is by its operands."""
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
    # OLD_JAX: 0.11.2
    if array.dtype == jnp.bfloat16 and array.shape == lookup.shape:
        return _read_table(Source(array), lookup)
    return lookup.read(array)
