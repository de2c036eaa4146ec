"""Coalescing: the touched rows of a BCOO gradient, each once."""

from jax.experimental.sparse import BCOO
from jax.typing import DTypeLike

from .canary import entries
from .checks import check_bcoo, is_bcoo
from .clocks import keep_read_of
from .entries import (
    Entries,
    Rows,
    accumulator_dtype,
    bags_of,
    coalesced_bcoo,
    open_gradient,
)
from .jit_with_bags import jit_with_bags
from .row_ops import RowOps
from .stale import knows_stored_rows
from .with_ops import with_ops


def touched_rows(grad: Entries, dtype: DTypeLike) -> Rows:
    """The touched rows of a gradient, duplicates added up in `dtype`."""
    rows: Rows = with_ops(_sum, open_gradient(grad, dtype), sums=True)
    return rows


def _sum(ops: RowOps, opened: Entries) -> Rows:
    return ops.sum(opened)


@jit_with_bags
def _coalesce(grad: BCOO) -> BCOO:
    opened: Entries = grad
    if bags_of(grad) is None:
        # A gradient that is unique may still hold padding in front of rows.
        opened, flags = entries(grad), {"indices_sorted": grad.indices_sorted}
        opened = BCOO((opened.data, opened.indices), shape=grad.shape, **flags)
    rows = touched_rows(opened, accumulator_dtype(grad.dtype))
    return coalesced_bcoo(grad, rows.indices, rows.data, grad.shape, is_same=True)


def coalesce(grad: BCOO) -> BCOO:
    """Adds up the duplicates of a row-sparse gradient.

    The number of stored entries stays as it is, so the result has a static shape: the
    touched rows come first, in ascending order, and padding fills the rest. Padding
    carries zero values and out-of-bounds indices, a different one in each slot, so that
    the flags `indices_sorted` and `unique_indices`, both set, are true. Explicit zeros
    stay: a row that is stored is touched, whatever its values, as in torch. Entries
    whose index is out of bounds (negative ones included) become padding.

    The optimisers of this package coalesce by themselves; call this to see or to keep
    the summed gradient, or to give the updates the gradient's own pytree structure,
    which `lax.cond` and with it `optax.apply_if_finite` ask for. The norm of a gradient
    is `optax.global_norm(coalesce(grad).data)`: that of a BCOO would count its indices,
    and duplicates apart. It costs one sort of the ids and one pass over the
    values.

    Args:
      grad: A BCOO with `n_batch == 0` and `n_sparse >= 1`; `data` of shape
        `[nse, *row_shape]`, floating point, `indices` of shape `[nse, n_sparse]`,
        integer.

    Returns:
      A BCOO of the same shape, type and `nse`. The index type becomes `int32` where it
      was narrower (`uint32` where `num_rows + nse` exceeds the `int32` range).

    Raises:
      TypeError: If this is not a BCOO, the indices are not integers or the values not
        floating point.
      ValueError: If the layout is not row-sparse.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> import optax_sparse_adam as osa
      >>> data = jnp.array([[1.0], [2.0], [4.0]])
      >>> indices = jnp.array([[7], [3], [7]])
      >>> grad = osa.coalesce(BCOO((data, indices), shape=(10, 1)))
      >>> grad.indices.ravel().tolist(), grad.data.ravel().tolist()
      ([3, 7, 12], [2.0, 5.0, 0.0])
    """
    if not is_bcoo(grad):
        raise TypeError(
            f"coalesce takes a BCOO, got {type(grad).__name__}. A dense gradient has "
            "no duplicates; of a tree, coalesce each BCOO."
        )
    with knows_stored_rows():
        sums: BCOO = _coalesce(check_bcoo(grad))
    keep_read_of(sums, grad)
    return sums
