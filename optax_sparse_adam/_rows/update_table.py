"""The update of one table by a formula: sums, gather, formula, scatter.

The formula treats each row alone: `map_rows` goes through the rows, or the kernel in
its place. What it needs to know of all touched rows, such as their mean, is computed
before.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.on_cpu import on_cpu
from .._jax_extras.sharding import shard_columns_like
from ..native import _calls as native
from .coalesce import bcoo_of, cast_entries, touched_rows
from .map_rows import Tables, map_rows, reduce_rows
from .padding import in_bounds


class Formula(NamedTuple):
    """What an optimiser computes for the rows of a parameter.

    All arrays have one type, that of the scalars. The rows are those of the state and,
    if the optimiser reads them, of the parameter. In slots of padding the gradient is
    zero and the rows are any rows: the results there are dropped.

    Attributes:
      update: `update(grad, rows, scalars)` returns what to add to the parameter, and
        the new rows of the state. It treats each row alone.
      kernel: The same as a call of the kernel, `kernel(grad, tables, read, scalars)`,
        which is optional.
      prepare: What is known of all touched rows comes before the update:
        `prepare(reduce, shared, scalars, num_rows, row_shape)` returns the scalars that
        `update` gets, and new arrays of the state that all rows share.
        `reduce(terms, *args)` adds up `terms(grad, rows, *args)` over the rows.
      shared: How many arrays of the state, the last ones, all rows share, for a
        parameter of `ndim` axes.
    """

    update: Callable[..., tuple[jax.Array, Tables]]
    kernel: Callable[..., Any] | None = None
    prepare: Callable[..., tuple[Any, Tables]] | None = None
    shared: Callable[[int], int] = lambda ndim: 0

    def split(self, tables: Tables, ndim: int) -> tuple[Tables, Tables]:
        """The arrays of the state that have rows, and those that all rows share."""
        own = len(tables) - self.shared(ndim)
        return tables[:own], tables[own:]

    def compute(
        self, grad: jax.Array, rows: Tables, scalars: Any
    ) -> tuple[jax.Array, Tables]:
        return self.update(grad, _widen(rows, grad), scalars)


def update_dense(
    formula: Formula, grad: jax.Array, read: Tables, tables: Tables, scalars: Any
) -> tuple[jax.Array, Tables]:
    """The update of a whole parameter, of which every row counts as touched."""
    wide = grad.astype(jax.tree.leaves(scalars)[0].dtype)
    own, shared = formula.split(tables, grad.ndim)
    rows = (*own, *read)
    if formula.prepare is not None:
        # All rows are touched. A scalar is one row.
        num_rows = jnp.asarray(math.prod(grad.shape[:1]), wide.dtype)
        scalars, shared = formula.prepare(
            lambda terms, *args: terms(wide, _widen(rows, wide), *args),
            _widen(shared, wide),
            scalars,
            num_rows,
            grad.shape[1:],
        )
    update, news = formula.compute(wide, rows, scalars)
    return update.astype(grad.dtype), _cast_each((*news, *shared), tables)


def update_table(
    formula: Formula, grad: BCOO, read: Tables, tables: Tables, scalars: Any
) -> tuple[BCOO, Tables]:
    """The update of the touched rows, and the tables of the state with new ones."""
    wide = cast_entries(grad, jax.tree.leaves(scalars)[0].dtype)

    def by_rows(grad: BCOO, tables: Tables, read: Tables, scalars: Any) -> Any:
        rows = touched_rows(grad, grad.dtype)
        own, shared = formula.split(tables, grad.ndim)
        if formula.prepare is not None:
            # As in `map_rows`, which comes after the sums: columns lie as the table's.
            for table in read:
                rows = rows._replace(data=shard_columns_like(table, rows.data))

            def reduce(terms: Any, *args: Any) -> Any:
                def wide_terms(grad: jax.Array, rows: Tables, *args: Any) -> Any:
                    return terms(grad, _widen(rows, grad), *args)

                return reduce_rows(wide_terms, rows, (*own, *read), *args)

            num_rows = jnp.sum(in_bounds(rows.indices, grad.shape)).astype(grad.dtype)
            scalars, news = formula.prepare(
                reduce, _widen(shared, grad), scalars, num_rows, rows.data.shape[1:]
            )
            shared = _cast_each(news, shared)
        is_reduced = formula.prepare is not None
        data, own = map_rows(
            formula.compute, rows, own, scalars, read=read, is_reduced=is_reduced
        )
        return (rows.indices, data), (*own, *shared)

    args = wide, tables, read, scalars
    if formula.kernel is not None and native.supports_update(wide, *tables):
        rows, tables = on_cpu(formula.kernel, by_rows, *args, keeps_order=False)
    else:
        rows, tables = by_rows(*args)
    # The kernel leaves each row in the slot of its first entry.
    return bcoo_of(grad, *rows, is_sorted=formula.kernel is None), tables


def _cast_each(arrays: Tables, like: Tables) -> Tables:
    return tuple(x.astype(y.dtype) for x, y in zip(arrays, like, strict=True))


def _widen(arrays: Tables, like: Any) -> Tables:
    return tuple(x.astype(like.dtype) for x in arrays)
