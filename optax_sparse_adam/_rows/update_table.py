"""The update of one table: sums, gather, formula, scatter; or a kernel for all four."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from ..native import _calls as native
from ..native._on_cpu import on_cpu
from .apply_updates import Update, add_update
from .coalesce import Entries, bcoo_of, cast_entries, sum_entries
from .map_rows import RowFunction, Tables, map_rows


def update_table(
    row_fn: RowFunction,
    grad: BCOO,
    tables: Tables,
    *args: Any,
    dtype: Any,
    read: Tables = (),
    param: jax.Array | None = None,
    kernel: Callable[..., Any] | None = None,
) -> tuple[Update, Tables]:
    """The update of the touched rows of a table, and the tables with their new rows.

    `row_fn(data, rows, *args)` returns what to add to the rows of the parameter and the
    new rows of `tables`; see `map_rows`. In slots of padding `data` is zero and the
    rows are any rows: the results there are dropped.

    `kernel(grad, tables, read, targets, *args)` is the same in one call for a CPU, of a
    gradient of type `dtype`, duplicates included. It returns the indices and the values
    of the update, each row once, in any order, and the new tables. This is the place
    where it is chosen, by the platform and by `supports_update`.

    `param` is the parameter, if the update may be added to it. Where the kernel is
    used, it is: the rows of the update are never written. It has the bits of
    `apply_updates`.

    Raises:
      ValueError: If a row of the gradient is less than one of the tables.
    """
    if any(x.ndim < grad.n_sparse for x in (*tables, *read)):
        raise ValueError(
            "The state holds numbers of whole rows, vectors along the last axis; got a "
            f"gradient with {grad.n_sparse} sparse axes for a table of shape "
            f"{grad.shape}. Look whole rows up, not their elements."
        )
    wide = cast_entries(grad, dtype)

    def by_rows(
        entries: Entries, tables: Tables, read: Tables, targets: Tables, *args: Any
    ) -> Any:
        rows = sum_entries(entries)
        data, tables = map_rows(row_fn, rows, tables, *args, read=read)
        if not targets:
            return (rows.indices, data), tables
        update = bcoo_of(grad, rows.indices, data, is_sorted=True)
        return add_update(*targets, update), tables

    floats = [x for x in (*tables, *read) if jnp.issubdtype(x.dtype, jnp.floating)]
    targets: Tables = ()
    if kernel is not None and native.supports_update(wide, *floats):
        # Updates of a smaller type are rounded before they are added. For a parameter
        # of another shape `apply_updates` raises.
        like = grad.shape, jnp.float32, jnp.float32
        if param is not None and (param.shape, param.dtype, grad.dtype) == like:
            targets = (param,) if native.supports_update(wide, param) else ()
        operands = wide, tables, read, targets, *args
        rows, tables = on_cpu(kernel, by_rows, *operands, keeps_order=False)
    else:
        rows, tables = by_rows(wide, tables, read, (), *args)
    if targets:
        return Update(param=rows), tables
    # The kernel leaves each row in the slot of its first entry.
    return Update(bcoo_of(grad, *rows, is_sorted=kernel is None)), tables
