"""Steps of one table, and rows of one table, by the operations of a platform."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import mesh_of
from .entries import Entries, Rows, SummedEntries, bcoo_of, open_gradient
from .map_rows import Tables
from .row_ops import Formula, RowOps, Update
from .with_ops import with_ops


def update_table(
    formula: Formula,
    grad: BCOO,
    tables: Tables,
    *args: Any,
    dtype: Any,
    read: Tables = (),
    adds_to: jax.Array | None = None,
    rows: Rows | None = None,
    update_dtype: Any = None,
) -> tuple[Update, Tables]:
    """The update of the touched rows of a table, and the tables with their new rows.

    In slots of padding the formula gets zeros and any rows: its results are dropped.

    Args:
      formula: What is computed of each row.
      grad: The gradient.
      tables: The arrays of the state.
      *args: What the formula takes besides.
      dtype: The type that is computed in.
      read: The parameter, if the formula reads it; its rows are behind those of the
        tables.
      adds_to: The parameter, if the update may be added to it at once, with the bits of
        `apply_updates`.
      rows: The touched rows of the gradient, if it was added up before.
      update_dtype: The type of the update, if it is not the gradient's.

    Raises:
      ValueError: If a row of the gradient is less than one of the tables.
    """
    if any(x.ndim < grad.n_sparse for x in (*tables, *read)):
        raise ValueError(
            "The state holds numbers of whole rows, vectors along the last axis; got a "
            f"gradient with {grad.n_sparse} sparse axes for a table of shape "
            f"{grad.shape}. Look whole rows up, not their elements."
        )
    entries: Entries
    if rows is None:
        entries = open_gradient(grad, dtype)
    else:
        rows = rows._replace(data=rows.data.astype(dtype))
        entries = SummedEntries(rows, grad.shape)
    targets = _targets(adds_to, grad)
    step = functools.partial(_step_with_ops, formula)
    operands = entries, tables, read, targets, *args
    update, tables = with_ops(step, *operands, sums=True, maps=True, keeps_order=False)
    if targets:
        return update, tables
    is_sorted = formula.name is None
    change = bcoo_of(grad, *update.change, is_sorted=is_sorted, dtype=update_dtype)
    return Update(change), tables


def _step_with_ops(
    formula: Formula, ops: RowOps, *operands: Any
) -> tuple[Update, Tables]:
    return ops.step(formula, *operands)


def _targets(param: jax.Array | None, grad: BCOO) -> Tables:
    """The parameter, if an update of float32 may be added to it in the step.

    Updates of a smaller type are rounded before they are added, and on a mesh they are
    laid out. For a parameter of another shape `apply_updates` raises.
    """
    if param is None or not mesh_of(param, *jax.tree.leaves(grad)).empty:
        return ()
    like = grad.shape, jnp.float32, jnp.float32
    return (param,) if (param.shape, param.dtype, grad.dtype) == like else ()


def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """`RowOps.take`."""
    rows: jax.Array = with_ops(_take, table, indices)
    return rows


def _take(ops: RowOps, table: jax.Array, indices: jax.Array) -> jax.Array:
    return ops.take(table, indices)


def put_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`RowOps.put`."""
    new: jax.Array = with_ops(_put, table, indices, rows)
    return new


def _put(
    ops: RowOps, table: jax.Array, indices: jax.Array, rows: jax.Array
) -> jax.Array:
    return ops.put(table, indices, rows)


def map_all_rows(function: Callable[..., Tables], tables: Tables, *args: Any) -> Tables:
    """`RowOps.map_all`."""

    def mapped(ops: RowOps, *operands: Any) -> Tables:
        return ops.map_all(function, *operands)

    new_tables: Tables = with_ops(mapped, tables, *args, maps=True)
    return new_tables
