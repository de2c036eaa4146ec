"""A table in a step of `lazy`: its touched rows, looked up and written back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import mesh_of, shard_columns_like
from .._rows.checks import is_bcoo
from .._rows.clocks import keep_read_of
from .._rows.coalesce import touched_rows
from .._rows.entries import (
    Entries,
    Rows,
    accumulator_dtype,
    bags_of,
    bcoo_of,
    open_gradient,
)
from .._rows.gather_scatter import order_after_gather, prevent_fusion, take_rows
from .._rows.jit_with_bags import jit_with_bags
from .._rows.map_rows import Tables
from .._rows.padding import mask_padding
from .._rows.row_ops import Formula, RowOps, Update
from .._rows.update_table import update_table
from .._rows.with_ops import with_ops
from .lazy_leaves import OfTable
from .row_formula import RowFormula


def compact_shapes(table: OfTable[Any]) -> OfTable[Any] | None:
    """Shapes and types of its touched rows, if these may be treated alone.

    `None` where they are to be looked up: without a state of rows, and outside of a
    program, where each loop over blocks would be compiled again.
    """
    grad, state, param = table
    if not (is_bcoo(grad) and grad.nse and state):
        return None
    entries = jax.tree.leaves(bags_of(grad) or grad)
    if not any(isinstance(x, jax.core.Tracer) for x in entries):
        return None
    if not mesh_of(*entries, *jax.tree.leaves((state, param))).empty:
        # The types of arrays say how they lie.
        shapes: OfTable[Any] = jax.eval_shape(lambda: look_up(table)[1])
        return shapes

    def rows_of(x: Any) -> Any:
        whole = jax.typeof(jnp.asarray(x))
        shape = (grad.nse, *whole.shape[grad.n_sparse :])
        return jax.ShapeDtypeStruct(shape, whole.dtype, weak_type=whole.weak_type)

    return OfTable(
        jax.ShapeDtypeStruct((grad.nse, *grad.shape[grad.n_sparse :]), grad.dtype),
        [rows_of(x) for x in state],
        None if param is None else rows_of(param),
    )


def summed_data(table: OfTable[Any], rows: Rows) -> jax.Array:
    """The gradient of the touched rows, as the transformation gets it."""
    data = rows.data.astype(table.grad.dtype)
    return data if table.param is None else shard_columns_like(table.param, data)


@jit_with_bags
def sum_rows(grad: BCOO) -> Rows:
    """The touched rows of a gradient, in the type in which they are added up."""
    return touched_rows(grad, accumulator_dtype(grad.dtype))


def look_up(table: OfTable[Any]) -> tuple[Rows, OfTable[Any]]:
    """Its touched rows, which are zeros where they are padding.

    In the place of the gradient a parameter, or its shape, touches no row.
    """
    grad, state, param = table
    params = [] if param is None else [param]
    arrays = tuple(map(jnp.asarray, (*state, *params)))  # a parameter may be a number
    if is_bcoo(grad):
        entries = open_gradient(grad, accumulator_dtype(grad.dtype))
        rows, taken = with_ops(_look_up, entries, arrays, sums=True)
        data = summed_data(table, rows)
    else:
        indices = jnp.zeros([0, min(1, len(grad.shape))], jnp.int32)
        dtype = jax.dtypes.canonicalize_dtype(grad.dtype)
        data = jnp.zeros([0, *grad.shape[1:]], dtype)
        rows = Rows(indices, data, jnp.zeros([], jnp.int32))
        taken = [take_rows(x, indices) for x in arrays]
    count = len(state)
    return rows, OfTable(data, [*taken[:count]], *taken[count:])


def _look_up(ops: RowOps, entries: Entries, tables: Tables) -> tuple[Rows, Tables]:
    rows = ops.sum(entries)
    taken = (ops.take(table, rows.indices) for table in tables)
    pairs = zip(taken, tables, strict=True)
    masked = (mask_padding(x, rows.indices, table.shape) for x, table in pairs)
    return rows, tuple(masked)


def write(
    table: OfTable[Any], rows: Rows, looked_up: OfTable[Any], results: OfTable[Any]
) -> OfTable[Any]:
    """Its update, and the arrays of its state with new rows.

    Args:
      table: The gradient and the arrays.
      rows: The touched rows.
      looked_up: The rows of its arrays.
      results: What was computed of these.
    """
    pairs = zip(table.state, results.state, strict=True)
    state = tuple(_widened(jnp.asarray(x), new.dtype) for x, new in pairs)
    if not is_bcoo(table.grad):
        return OfTable(Update(), [*state])
    # Padding is zeros in an update, also where the inner transformation adds something
    # to every row, as noise.
    data = mask_padding(results.grad, rows.indices, table.grad.shape)
    data = prevent_fusion(data)
    if state:
        made = map(order_after_gather, looked_up.state, results.state)
        state = with_ops(_put, state, rows.indices, tuple(made))
    args = table.grad, rows.indices, data
    update = bcoo_of(*args, is_sorted=True, dtype=data.dtype)
    return OfTable(Update(update), [*state])


def _put(ops: RowOps, tables: Tables, indices: jax.Array, rows: Tables) -> Tables:
    pairs = zip(tables, rows, strict=True)
    return tuple(ops.put(table, indices, new) for table, new in pairs)


def step_rows(
    formula: RowFormula,
    table: OfTable[Any],
    rows: Rows | None,
    results: OfTable[Any],
    shared: list[jax.Array],
    *,
    adds_to_param: bool,
) -> OfTable[Any]:
    """`write`, of a table whose rows are treated alone.

    Args:
      formula: What is computed of each row.
      table: The gradient and the arrays.
      rows: The touched rows, if the gradient was added up.
      results: Shapes and types of the results.
      shared: What all rows share.
      adds_to_param: Whether the update may be added to the parameter.
    """
    pairs = zip(table.state, results.state, strict=True)
    update, state = _step_rows(
        formula,
        table.grad,
        rows,
        tuple(_widened(jnp.asarray(x), new.dtype) for x, new in pairs),
        (table.param,) if formula.reads_param else (),
        table.param if adds_to_param and results.grad.dtype == jnp.float32 else None,
        shared,
        update_dtype=results.grad.dtype,
    )
    keep_read_of(update.change, table.grad)
    return OfTable(update, [*state])


@functools.partial(jit_with_bags, static_argnames=("formula", "update_dtype"))
def _step_rows(
    formula: RowFormula,
    grad: Any,
    rows: Rows | None,
    tables: Tables,
    read: Tables,
    adds_to: jax.Array | None,
    shared: list[jax.Array],
    *,
    update_dtype: Any,
) -> tuple[Update, Tables]:
    return update_table(
        Formula(formula),
        grad,
        tables,
        shared,
        dtype=accumulator_dtype(grad.dtype, update_dtype),
        read=read,
        adds_to=adds_to,
        rows=rows,
        update_dtype=update_dtype,
    )


def _widened(table: jax.Array, dtype: Any) -> jax.Array:
    """An array of the state, in the type that the transformation makes it of.

    A float32 gradient widens the momentum of a float16 parameter in optax, once. What
    would be narrower stays as it is: other rows keep their bits.
    """
    if all(jnp.issubdtype(x, jnp.floating) for x in (dtype, table.dtype)):
        new, old = (jnp.finfo(x).bits for x in (dtype, table.dtype))
        return table.astype(dtype) if new > old else table
    return table
