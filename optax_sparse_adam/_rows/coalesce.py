"""Coalescing: the touched rows of a BCOO gradient, each once.

`touched_rows` returns them as `Rows` in the type that they are summed in, for the
optimisers; the public `coalesce` returns a BCOO. The CPU kernel sums where it is there
and knows the types, else `duplicates.sum_duplicates`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO
from jax.typing import DTypeLike

from .._jax_extras.sharding import mesh_of, replicate_rows
from ..native import _calls as native
from ..native._on_cpu import on_cpu
from .bag_gradient import BagEntries
from .canary import CanaryBCOO, copy_with, entries, maker_of
from .checks import check_bcoo, is_bcoo
from .duplicates import sum_duplicates
from .jit_with_bags import jit_with_bags
from .padding import expand_like, in_bounds, pad_indices

Entries = BCOO | BagEntries  # a gradient that is open: no canary is to be looked at


class Rows(NamedTuple):
    """The touched rows of a gradient, each once.

    Attributes:
      indices: `[nse, n_sparse]`, unique. Padding is out of bounds and distinct.
      data: `[nse, *row_shape]`. Zero where the index is padding.
      count: Scalar; all slots from this one on are padding. The number of touched rows,
        unless the gradient was believed to be unique and has padding between its rows.
    """

    indices: jax.Array
    data: jax.Array
    count: jax.Array  # type: ignore[assignment]  # tuple has a method count


def widen_indices(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Casts indices to a type that holds every row and `nse` padding indices."""
    # The largest padding index, `num_rows + nse - 1`, must fit: int8 ids of a table of
    # 100 rows and 64 entries become int32, as 163 is no int8.
    last = max(shape[: indices.shape[1]]) + indices.shape[0]
    own: list[Any] = [indices.dtype] if indices.dtype.itemsize >= 4 else []
    for dtype in (*own, jnp.int32, jnp.uint32):
        if last <= jnp.iinfo(dtype).max:
            if jnp.iinfo(indices.dtype).min < jnp.iinfo(dtype).min:
                # As a uint32, -2e9 is a row of a table of 3e9 rows; -1 is never a row.
                indices = jnp.maximum(indices, -1)
            return indices.astype(dtype)
    raise ValueError(
        f"Row ids of {indices.dtype} cannot index a table of shape {shape}. Enable "
        "64-bit types (jax_enable_x64) and pass int64 ids."
    )


def replicate_entries(grad: BCOO) -> BCOO:
    """The entries of a gradient, all of them on every device of a mesh."""
    mesh = mesh_of(*jax.tree.leaves(grad))
    return entries(grad, lambda x: replicate_rows(x, mesh))


def touched_rows(grad: Entries, dtype: DTypeLike) -> Rows:
    """The touched rows of a gradient, duplicates added up in `dtype`.

    A gradient with the flag `unique_indices` is not checked: nothing is summed or
    sorted, and its entries keep their order.
    """
    return sum_entries(cast_entries(grad, dtype))


def sum_entries(grad: Entries) -> Rows:
    """`touched_rows` of a gradient that is cast."""
    by_kernel = native.supports_update(grad) and not grad.unique_indices
    return _sums_by_kernel(grad) if by_kernel else _sums(grad)


def bags_of(grad: BCOO) -> BagEntries | None:
    """The entries of a gradient by bags, where they are there."""
    return grad.bags if isinstance(grad, CanaryBCOO) else None


def cast_entries(grad: Any, dtype: DTypeLike) -> Entries:
    """Casts the values to `dtype`, and the indices to a type that holds padding."""
    bags = grad if isinstance(grad, BagEntries) else bags_of(grad)
    if bags is not None:
        mesh = mesh_of(bags.values, bags.indices)
        bags = bags.laid_out(lambda x: replicate_rows(x, mesh))
        return bags.cast(dtype, widen_indices(bags.indices, bags.shape))
    grad = replicate_entries(grad)
    indices = widen_indices(grad.indices, grad.shape)
    return copy_with(BCOO, grad, grad.data.astype(dtype), indices)


def _sums(grad: Entries) -> Rows:
    indices, data = grad.indices, grad.data
    slot = jnp.arange(grad.nse, dtype=jnp.int32)
    if grad.unique_indices or grad.nse == 0:
        valid = in_bounds(indices, grad.shape)
        # Padding may lie between rows: of [7, -1, 3, -1], the first three slots count.
        count = jnp.max(jnp.where(valid, slot + 1, 0), initial=0)
        data = jnp.where(expand_like(valid, data), data, 0)
    else:
        indices, data, count = sum_duplicates(
            indices, data, grad.shape, is_sorted=grad.indices_sorted
        )
        valid = slot < count
    return Rows(pad_indices(indices, valid, slot, grad.shape), data, count)


@jax.jit
def _sums_by_kernel(grad: Entries) -> Rows:
    return on_cpu(lambda grad: Rows(*native.sum_rows(grad)), _sums, grad)


def bcoo_of(
    grad: BCOO, indices: jax.Array, data: jax.Array, *, is_sorted: bool
) -> BCOO:
    """A BCOO of these entries, each row once, of the shape and type of `grad`.

    `is_sorted` says whether they are in order where `grad` was not unique. The entries
    of a gradient that is unique keep their order.
    """
    if grad.unique_indices:
        is_sorted = grad.indices_sorted
    return coalesced_bcoo(grad, indices, data, grad.shape, is_sorted=is_sorted)


def coalesced_bcoo(
    grad: BCOO,
    indices: jax.Array,
    data: jax.Array,
    shape: tuple[int, ...],
    *,
    is_sorted: bool = True,
    is_same: bool = False,
) -> BCOO:
    """A BCOO of rows that occur once, of the type of `grad`; see `maker_of`."""
    flags = {"indices_sorted": is_sorted, "unique_indices": True}
    args = data.astype(grad.dtype), indices
    return maker_of(grad, is_same=is_same)(args, shape=shape, **flags)


def accumulator_dtype(*dtypes: DTypeLike) -> Any:
    """The type to compute in: at least float32."""

    def wide(dtype: DTypeLike) -> Any:  # JAX promotes the float8 types to no other
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
        return jnp.float32 if is_narrow else dtype

    with jax.numpy_dtype_promotion("standard"):  # the user's setting may be strict
        return jnp.result_type(*map(wide, dtypes), jnp.float32)


@jit_with_bags
def _coalesce(grad: BCOO) -> BCOO:
    found: Entries = grad
    if bags_of(grad) is None:
        # A gradient that is unique may still hold padding in front of rows.
        found, flags = entries(grad), {"indices_sorted": grad.indices_sorted}
        found = BCOO((found.data, found.indices), shape=grad.shape, **flags)
    rows = touched_rows(found, accumulator_dtype(grad.dtype))
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
    return _coalesce(check_bcoo(grad))
