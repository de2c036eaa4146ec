"""The entries of a gradient of bags, of which many share a row of values.

Entry `k` has the values `weights[k] * values[segments[k]]`: `values` are the gradients
of the bags, few, and `indices` say the row of each entry.

    embedding_bag(table, [[0, 3], [3, -1]])   # with the gradients a and b of its bags
    indices [[0], [3], [3], [-1]]   segments [0, 0, 1, 1]   values [a, b]
    data [a, a, b, b]

The kernel adds rows up without `data`, one row of values for each entry, and an
optimiser of this package finds the bags beside a gradient (`CanaryBCOO.bags`). No
function of trees does: to it that gradient is one of `data`, all arrays of which have
an entry in each row, so that it may cut, stack or mix them. What it makes has no bags.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .padding import expand_like


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "indices", "segments", "weights"),
    meta_fields=("shape", "dtype", "length"),
)
@dataclasses.dataclass(frozen=True)
class BagEntries:
    """What a BCOO of one sparse axis has, and its values by bags.

    Lookups of single rows are bags of one id.

    Attributes:
      values: `[bags, *row_shape]`, of at least the precision of `dtype`.
      indices: `[nse, 1]`.
      segments: `[nse]`, `int32`. All are in bounds.
      weights: `[nse]` or `None`, of the type of `values`.
      shape: Of the table.
      dtype: Of `data`.
      length: How many entries each bag has, if all have as many: entry `k` is then one
        of bag `k // length`. Else `None`.
    """

    values: jax.Array
    indices: jax.Array
    segments: jax.Array
    weights: jax.Array | None
    shape: tuple[int, ...]
    dtype: jnp.dtype
    length: int | None = None

    n_batch, n_sparse = 0, 1
    indices_sorted = unique_indices = False
    nse = property(lambda self: self.indices.shape[0])

    @property
    def shape_of_data(self) -> tuple[int, ...]:
        return (self.nse, *self.values.shape[1:])

    @property
    def data(self) -> jax.Array:
        """One row for each entry."""
        rows = self.values.at[self.segments].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )
        if self.weights is not None:
            rows = rows * expand_like(self.weights, rows)
        return rows.astype(self.dtype)

    def cast(self, dtype: DTypeLike, indices: jax.Array) -> "BagEntries":
        weights = None if self.weights is None else self.weights.astype(dtype)
        return dataclasses.replace(
            self,
            values=self.values.astype(dtype),
            indices=indices,
            weights=weights,
            dtype=jnp.dtype(dtype),
        )

    def laid_out(self, lay_out: Callable[[jax.Array], jax.Array]) -> "BagEntries":
        bags: BagEntries = jax.tree.map(lay_out, self)
        return bags
