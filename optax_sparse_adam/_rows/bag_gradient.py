"""The gradient of a table that was read by bags, not yet expanded.

Entry `k` of such a gradient is `weights[k] * values[segments[k]]`: `values` are the
gradients of the bags, few, and `indices` say the row of each entry. Whoever asks for
`data` gets one row for each entry; the kernel adds the rows up without them.

    embedding_bag(table, [[0, 3], [3, -1]])   # with the gradients a and b of its bags
    indices [[0], [3], [3], [-1]]   segments [0, 0, 1, 1]   values [a, b]
    data [a, a, b, b]

What scales floats only, as the `x / scale if x.dtype == float` of a loss scale, scales
values and weights. `unit` is a 1 that it scales, too, and by which weights are divided.

Lookups of single rows are bags of one id. A segment out of bounds has NaN for a value:
what `canary` makes of an entry whose index was changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .canary import CanaryBCOO, find_intact, is_zero, new_canary
from .padding import expand_like


@jax.tree_util.register_pytree_node_class
class BagGradient(CanaryBCOO):
    """A gradient of bags.

    Attributes:
      values: `[*batch, bags, *row_shape]`, of at least the precision of `dtype`.
      indices: `[*batch, nse, 1]`.
      segments: `[*batch, nse]`, `int32`.
      weights: `[*batch, nse]` or `None`, of the type of `values`.
      unit: Ones, `[*batch]`, where there are weights.
    """

    values: jax.Array
    segments: jax.Array
    weights: jax.Array | None
    unit: jax.Array | None

    def __init__(
        self,
        args: Any,
        *,
        shape: Sequence[int],
        dtype: DTypeLike,
        read_at: Any = None,
    ):
        self.values, self.stored_indices, self.segments, self.weights = args
        self.unit = None if self.weights is None else jnp.ones([], self.values.dtype)
        self.canary = new_canary(self.stored_indices, read_at)
        self._dtype = jnp.dtype(dtype)
        self.indices_sorted = self.unique_indices = False
        self.shape = tuple(shape)

    @property
    def stored_data(self) -> jax.Array:  # type: ignore[override]  # on demand
        expand: Any = expand_bags
        for _ in range(self.n_batch):
            expand = jax.vmap(expand)

        def expanded(*args: Any) -> jax.Array:
            values, segments, *weights = args
            found: jax.Array = expand(values, segments, _weights_of_unit(*weights))
            return found.astype(self.dtype)

        args = self.values, self.segments, self.weights, self.unit
        is_abstract = isinstance(self.values, jax.ShapeDtypeStruct)
        return jax.eval_shape(expanded, *args) if is_abstract else expanded(*args)

    @property
    def shape_of_data(self) -> tuple[int, ...]:
        return (*self.stored_indices.shape[:-1], *self.values.shape[self.n_batch + 1 :])

    dtype = property(lambda self: self._dtype)
    n_dense = property(lambda self: self.values.ndim - 1 - self.n_batch)

    def factors(
        self, lay_out: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Values, indices, segments, weights of intact entries; see `entries`."""
        arrays, _ = self.tree_flatten()
        values, indices, canary, segments, *weights = jax.tree.map(lay_out, arrays)
        # An entry is empty if the gradient of its bag is zeros, or if it has no bag. If
        # it is neither intact nor empty, it gets a bag out of bounds, and so is NaN.
        empty = is_zero(values, 0, indices)
        empty = empty.at[segments].get(mode="fill", fill_value=True)
        valid, indices = find_intact(empty, indices, canary, 0)
        segments = jnp.where(valid[:, 0], segments, len(values))
        return values, indices, segments, _weights_of_unit(*weights)

    def tree_flatten(self) -> tuple[Any, Any]:
        arrays = self.values, self.stored_indices, self.canary, self.segments
        return (*arrays, self.weights, self.unit), (self._unbatched, self._dtype)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> "BagGradient":
        obj = object.__new__(cls)
        obj.values, obj.stored_indices, obj.canary, obj.segments, *rest = children
        obj._is_seen = False
        obj.weights, obj.unit = rest
        obj._unbatched, obj._dtype = aux_data
        obj.indices_sorted = obj.unique_indices = False
        return obj


def expand_bags(
    values: jax.Array, segments: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """One row for each entry."""
    rows = jnp.asarray(values).at[segments].get(mode="fill", fill_value=jnp.nan)
    return rows if weights is None else rows * expand_like(weights, rows)


def _weights_of_unit(
    weights: jax.Array | None, unit: jax.Array | None
) -> jax.Array | None:
    """The weights without the factor of `unit`; zeros if that is zero."""
    if weights is None or unit is None:
        return None
    inverse = jnp.where(unit == 0, 0, 1 / unit)
    return weights * expand_like(inverse, weights)
