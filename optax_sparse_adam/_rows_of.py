"""Row-sparse gradients of dense ones, for what knows its rows without a lookup."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from ._row_tables import Table, native_dtype, refuse_repeated, tables_of
from ._rows.gather_scatter import gather_rows


def rows_of(grads: Any, ids: Any) -> Any:
    """Makes row-sparse gradients of dense ones: the rows `ids`, and no others.

    For a gradient that no lookup has made, such as that of a renderer, which knows what
    is visible: the optimisers of this package then update these rows only. Given the
    dense gradient, they would update all rows, as dense Adam does.

    Args:
      grads: Tree of arrays `[num_rows, ...]` and others; `None` leaves stay `None`.
      ids: As for `take_rows`: `[k]` integers, `None` for gradients that stay dense. Ids
        out of bounds are padding. Each row may be named once, as for `put_rows`.

    Returns:
      The tree with BCOO leaves of `k` entries, whose flag `unique_indices` is set:
      optimisers need not sort them.

    Raises:
      TypeError: If ids are not integers.
      ValueError: If ids are no prefix of the gradients, have not one axis, belong to a
        scalar, or are seen to name a row twice.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> dense = jnp.arange(8.0).reshape(4, 2)
      >>> grad = osa.rows_of(dense, jnp.array([2, 1, 4]))
      >>> grad.data.tolist(), grad.nse
      ([[4.0, 5.0], [2.0, 3.0], [0.0, 0.0]], 3)
    """
    tables = tables_of("rows_of", grads, ids)
    refuse_repeated(tables)
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads)

    def row_sparse(x: Any, table: Table | None) -> Any:
        if table is None:
            return x
        if isinstance(x, np.ndarray):
            x = x.astype(native_dtype(x), copy=False)
        x, indices = jnp.asarray(x), table.distinct()
        rows = gather_rows(x, indices)
        return BCOO((rows, indices), shape=x.shape, unique_indices=True)

    return treedef.unflatten(map(row_sparse, leaves, tables))
