"""A gradient, opened once: plain entries, and the touched rows that they make.

`open_gradient` is the one reader of canaries, bags, meshes and types of indices. What
is below the optimisers knows `Entries` and `Rows`; `bcoo_of` makes an update of rows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO
from jax.typing import DTypeLike

from .._jax_extras.sharding import mesh_of, replicate_rows
from .bag_gradient import BagEntries
from .canary import CanaryBCOO, copy_with, entries, maker_of
from .duplicates import Sums, sum_duplicates
from .padding import expand_like, in_bounds, pad_indices


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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("shape",)
)
@dataclasses.dataclass(frozen=True)
class SummedEntries:
    """The entries of a gradient that were added up before: its touched rows.

    Attributes:
      rows: Those rows.
      shape: Of the table.
    """

    rows: Rows
    shape: tuple[int, ...]

    indices_sorted, unique_indices = False, True
    indices = property(lambda self: self.rows.indices)
    data = property(lambda self: self.rows.data)
    dtype = property(lambda self: self.rows.data.dtype)
    nse = property(lambda self: self.rows.indices.shape[0])
    n_sparse = property(lambda self: self.rows.indices.shape[1])


# A gradient that is open: no canary is to be looked at, all devices have all entries,
# the values are of the type that is computed in, and the indices hold padding.
Entries = BCOO | BagEntries | SummedEntries


def widen_indices(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Casts indices to a type that holds every row and `nse` padding indices."""
    # The largest padding index, `num_rows + nse - 1`, must fit: int8 ids of a table of
    # 100 rows and 64 entries become int32, as 163 is no int8.
    last = max(shape[: indices.shape[1]]) + indices.shape[0]
    types: list[Any] = [indices.dtype] if indices.dtype.itemsize >= 4 else []
    for dtype in (*types, jnp.int32, jnp.uint32):
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


def bags_of(grad: BCOO) -> BagEntries | None:
    """The entries of a gradient by bags, where they are there."""
    return grad.bags if isinstance(grad, CanaryBCOO) else None


def open_gradient(grad: Any, dtype: DTypeLike) -> Entries:
    """Casts the values to `dtype`, and the indices to a type that holds padding."""
    bags = grad if isinstance(grad, BagEntries) else bags_of(grad)
    if bags is not None:
        mesh = mesh_of(bags.values, bags.indices)
        bags = bags.laid_out(lambda x: replicate_rows(x, mesh))
        return bags.cast(dtype, widen_indices(bags.indices, bags.shape))
    grad = replicate_entries(grad)
    indices = widen_indices(grad.indices, grad.shape)
    return copy_with(BCOO, grad, grad.data.astype(dtype), indices)


def sum_entries(grad: Entries, by: Sums) -> Rows:
    """The touched rows, duplicates added up by a method of `duplicates`.

    A gradient with the flag `unique_indices` is not checked: nothing is summed or
    sorted, and its entries keep their order.
    """
    if isinstance(grad, SummedEntries):
        return grad.rows
    indices, data = grad.indices, grad.data
    slot = jnp.arange(grad.nse, dtype=jnp.int32)
    if grad.unique_indices or grad.nse == 0:
        valid = in_bounds(indices, grad.shape)
        # Padding may lie between rows: of [7, -1, 3, -1], the first three slots count.
        count = jnp.max(jnp.where(valid, slot + 1, 0), initial=0)
        data = jnp.where(expand_like(valid, data), data, 0)
    else:
        indices, data, count = sum_duplicates(
            indices, data, grad.shape, is_sorted=grad.indices_sorted, by=by
        )
        valid = slot < count
    return Rows(pad_indices(indices, valid, slot, grad.shape), data, count)


def bcoo_of(
    grad: BCOO,
    indices: jax.Array,
    data: jax.Array,
    *,
    is_sorted: bool,
    dtype: DTypeLike | None = None,
) -> BCOO:
    """A BCOO of these entries, each row once, of the shape and type of `grad`.

    `is_sorted` says whether they are in order where `grad` was not unique. The entries
    of a gradient that is unique keep their order. `dtype` is another type.
    """
    if grad.unique_indices:
        is_sorted = grad.indices_sorted
    args = indices, data, grad.shape
    return coalesced_bcoo(grad, *args, is_sorted=is_sorted, dtype=dtype)


def coalesced_bcoo(
    grad: BCOO,
    indices: jax.Array,
    data: jax.Array,
    shape: tuple[int, ...],
    *,
    is_sorted: bool = True,
    is_same: bool = False,
    dtype: DTypeLike | None = None,
) -> BCOO:
    """A BCOO of rows that occur once, of the type of `grad`; see `maker_of`."""
    flags = {"indices_sorted": is_sorted, "unique_indices": True}
    args = data.astype(grad.dtype if dtype is None else dtype), indices
    return maker_of(grad, is_same=is_same)(args, shape=shape, **flags)


def accumulator_dtype(*dtypes: DTypeLike) -> Any:
    """The type to compute in: at least float32.

    Raises:
      ValueError: For what are no numbers, such as random keys.
    """
    for dtype in dtypes:
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise ValueError(
                f"Optimisers train numbers, got a parameter of {dtype}. Leave it out "
                "with optax.masked or optax.partition."
            )

    def wide(dtype: DTypeLike) -> Any:  # JAX promotes the float8 types to no other
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
        return jnp.float32 if is_narrow else dtype

    with jax.numpy_dtype_promotion("standard"):  # the user's setting may be strict
        return jnp.result_type(*map(wide, dtypes), jnp.float32)
