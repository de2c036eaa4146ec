"""A BCOO that notices when its indices were treated as values.

JAX and optax map over the arrays of a tree, and the indices of a BCOO are one of them:
`optax.scale` multiplies them, `jax.tree.map(jnp.add, g, g)` adds them up, and rows that
nobody looked up would be trained. Gradients of this package, and updates made of them,
therefore carry one more array, the canary: an odd constant `G` beside each index. What
is done to all arrays is done to the canary, too:

    g = osa.grad(lambda table: jnp.sum(table[ids]))(table)  # ids [3, 7]
    g.indices, g.canary  # [[3], [7]], [[G], [G]]
    h = jax.tree.map(lambda x: -2 * x, g)
    h.indices, h.canary  # [[-6], [-14]], [[-2G], [-2G]]

`k * G == G` holds for no other integer `k` than 1, overflow included, because `G` is
odd. A canary of another type or shape raises while tracing, one of other values raises
outside of a program. A program cannot raise for values: there the entries become NaN,
and go to the first rows of the table, as many as are stored, because their own rows are
lost. Zeros in place of everything, as `jax.tree.map(jnp.zeros_like, g)` and a skipped
step of `optax.apply_if_finite` make them, are padding.

Where gradient and update are in one program, XLA folds the comparison of the constants.

Known limits: what moves or exchanges entries moves their canary along. Functions of
all arrays at once, such as `optax.global_norm`, count indices and canary as values:
take that of `coalesce(g).data`. A BCOO made by hand has no canary and is believed.

An array of PRNG keys as the canary would make arithmetic raise while tracing, but in
JAX's words ("multiply does not accept dtypes float32, key<fry>"), also where the text
below names the remedy; and what is harmless would raise, too: `np.asarray` and
`np.testing` on the leaves, `flax.serialization`, `process_allgather`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .padding import last_indices

_CANARY = 1_618_033_989
_REMEDY = (
    "A transformation that does not know BCOO, such as optax.scale, has changed them "
    "together with the values. Put that chain inside lazy: "
    "optax_sparse_adam.lazy(optax.chain(...)). To map over trees of gradients, let "
    "each be one leaf: is_leaf=lambda x: isinstance(x, BCOO)."
)


def new_canary(indices: jax.Array) -> jax.Array:
    return jnp.full((*indices.shape[:-1], 1), _CANARY, jnp.int32)


@jax.tree_util.register_pytree_node_class
class CanaryBCOO(BCOO):
    """A BCOO with a canary, `int32` of shape `[*batch, nse, 1]`, behind its indices.

    Its shape is that of one matrix and, in front, the axes that its arrays have more:
    `jax.vmap`, `jax.pmap` and stacking make a batch of matrices of one.

    Attributes:
      canary: The canary.
      is_stale: Whether it is a gradient that was made without `read=`, which
        `exact_adam` refuses.
    """

    canary: jax.Array
    is_stale: bool = False

    def __init__(self, args: Any, *, shape: Any, **flags: bool):
        super().__init__(args, shape=shape, **flags)
        self.canary = new_canary(self.indices)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.indices.shape[:-2], *self._unbatched)

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self._unbatched = tuple(shape[self.n_batch :])

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, "BCOO")

    def tree_flatten(self) -> tuple[Any, Any]:
        flags = (self.indices_sorted, self.unique_indices)
        return (self.data, self.indices, self.canary), (self._unbatched, *flags)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> "CanaryBCOO":
        obj = object.__new__(cls)
        obj.data, obj.indices, obj.canary = children
        obj._unbatched, obj.indices_sorted, obj.unique_indices = aux_data
        return obj


@jax.tree_util.register_pytree_node_class
class StaleBCOO(CanaryBCOO):
    """A gradient that was made without `read=`."""

    is_stale = True


def _canary_operator(name: str) -> Callable[..., Any]:
    """An operator of BCOO on the entries that the canary lets through."""
    operator = getattr(BCOO, name)

    def method(self: CanaryBCOO, *args: Any) -> Any:
        check_indices(self)
        result = operator(entries(self), *args)
        if not isinstance(result, BCOO):
            return result
        return copy_with(class_of(self), result, result.data, result.indices)

    return method


# What scales a gradient, and what `optax.apply_updates` adds an update by.
for _operator in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg"]:
    setattr(CanaryBCOO, f"__{_operator}__", _canary_operator(f"__{_operator}__"))


def class_of(grad: BCOO) -> type[BCOO]:
    """The class of a gradient with a row for each index, with a canary or without."""
    if not isinstance(grad, CanaryBCOO):
        return BCOO
    return StaleBCOO if grad.is_stale else CanaryBCOO


def copy_with(cls: type[BCOO], mat: BCOO, data: jax.Array, indices: jax.Array) -> BCOO:
    """A BCOO of this class with the shape and the flags of `mat`, and a new canary."""
    return cls(
        (data, indices),
        shape=mat.shape,
        indices_sorted=mat.indices_sorted,
        unique_indices=mat.unique_indices,
    )


def check_indices(grad: BCOO) -> None:
    """Raises if the indices are known to have changed.

    Raises:
      TypeError: If the indices or the canary are not integers.
      ValueError: If the canary has another shape, or, outside of a program, other
        values.
    """
    canary = getattr(grad, "canary", None)
    for array in (grad.indices, canary):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                "A row-sparse gradient must have integer indices, got indices of type "
                f"{array.dtype} (shape {grad.shape}). {_REMEDY}"
            )
    if canary is None:
        return
    is_beside = canary.ndim >= 2 and canary.shape == (*grad.indices.shape[:-1], 1)
    if not is_beside or _is_seen_to_change(grad):
        raise ValueError(
            "A row-sparse gradient must have the indices that it was made with, got "
            f"others (shape {grad.shape}). {_REMEDY}"
        )


def _is_seen_to_change(grad: Any) -> bool:
    """Whether an entry was changed, as far as it is known while tracing."""
    for x in (grad.canary, grad.data):
        if isinstance(x, jax.core.Tracer) or not getattr(
            x, "is_fully_addressable", True
        ):
            return False
    # In NumPy: within a program JAX would trace even what is known.
    canary = np.asarray(grad.canary)[..., 0]
    if (canary == _CANARY).all():
        return False
    is_empty = (canary == 0) & is_zero(np.asarray(grad.data), grad.n_batch)
    return not ((canary == _CANARY) | is_empty).all()


def is_zero(values: Any, n_batch: int, indices: Any = None) -> Any:
    """Says for each row of values, `[*batch, rows, ...]`, whether all are zero.

    Problem: the gradient of `jnp.sum(table[ids])` takes seconds to compile. Cause: its
    values are constant, and XLA reduces constants while compiling, slowly. Remedy: a
    comparison of the indices, which XLA does not know. Safe, since the smallest integer
    is the index of no row. Test: `tests/rows/test_canary.py`.
    """
    empty = values == 0
    if indices is not None:
        empty |= (indices == jnp.iinfo(indices.dtype).min).any()
    return empty.all(axis=tuple(range(n_batch + 1, values.ndim)))


def entries(grad: BCOO, place: Callable[[jax.Array], jax.Array] = lambda x: x) -> BCOO:
    """The entries that the canary lets through, as a BCOO without a canary.

    Args:
      grad: The gradient; `check_indices` has seen no fault.
      place: Is called with each of its arrays first.
    """
    data, indices = place(grad.data), place(grad.indices)
    if isinstance(grad, CanaryBCOO):
        n_batch, empty = grad.n_batch, is_zero(data, grad.n_batch, indices)
        valid, indices = intact_entries(empty, indices, place(grad.canary), n_batch)
        shape = (*valid.shape[:-1], *(1,) * (data.ndim - n_batch - 1))
        data = jnp.where(valid.reshape(shape), data, jnp.nan)
    return copy_with(BCOO, grad, data, indices)


def intact_entries(
    empty: jax.Array, indices: jax.Array, canary: jax.Array, n_batch: int
) -> tuple[jax.Array, jax.Array]:
    """Says which entries are as they were made, `[*batch, nse, 1]`; and the indices."""
    is_intact, is_empty = canary == _CANARY, (canary == 0) & empty[..., None]
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    # Entries that were changed go to the rows 0, 1, ..., where their NaN is seen; those
    # that became zeros are padding. Both are distinct and ascending, as the flags say.
    slot = jax.lax.broadcasted_iota(indices.dtype, indices.shape, n_batch)
    outside = last_indices(slot, n_batch)
    indices = jnp.where(is_intact, indices, jnp.where(is_empty, outside, slot))
    return is_intact | is_empty, indices
