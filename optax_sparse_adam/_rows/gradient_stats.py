"""What people log of gradients: their norms, and how many rows they touch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .checks import check_bcoo, is_bcoo, is_leaf
from .coalesce import touched_rows
from .entries import accumulator_dtype
from .jit_with_bags import jit_with_bags
from .padding import in_bounds
from .stale import knows_stored_rows


class GradientStats(NamedTuple):
    """Numbers of one gradient.

    Attributes:
      norm: The root of the sum of all squares, duplicate rows added up before.
      touched: The number of rows that an optimiser of rows updates, `int32`.
    """

    norm: jax.Array
    touched: jax.Array


def gradient_stats(grads: optax.Updates) -> Any:
    """The norm of each gradient of a tree, and the number of rows that it touches.

    `sqrt(sum(g * g))` for each leaf, of which no function that maps over arrays is
    right for a row-sparse one: it has indices among its arrays, and duplicates. Stored
    rows are touched, whatever their values; of a dense leaf all rows are. Costs what
    `coalesce` does; in one jitted step with the update, XLA shares that. Updates have
    norms, too.

    Args:
      grads: A tree with dense, BCOO or `None` leaves.

    Returns:
      The tree with a `GradientStats` for each leaf, of at least float32, and `None` for
      `None`. The norm of the whole tree is that of the norms.

    Raises:
      TypeError: If a BCOO has indices that are not integers, or other values than
        floating-point ones.
      ValueError: If the layout of a BCOO is not row-sparse.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_sparse_adam as osa
      >>> def loss(params, ids):
      ...     return jnp.sum(params["table"][ids] @ params["w"])
      >>> params = {"table": jnp.ones((1000, 4)), "w": jnp.ones(4)}
      >>> grads = osa.grad(loss)(params, jnp.array([3, 7, 3]))
      >>> stats = osa.gradient_stats(grads)
      >>> int(stats["table"].touched), round(float(stats["table"].norm), 3)
      (2, 4.472)
      >>> norms = [stats["table"].norm, stats["w"].norm]
      >>> round(float(optax.tree.norm(norms)), 3)
      7.483
    """

    def one(leaf: Any) -> GradientStats | None:
        if leaf is None:
            return None
        if not is_bcoo(leaf):  # it may be a table
            return _of_array(leaf)
        with knows_stored_rows():
            return _of_rows(check_bcoo(leaf))

    return jax.tree.map(one, grads, is_leaf=is_leaf)


@jit_with_bags
def _of_rows(grad: Any) -> GradientStats:
    rows = touched_rows(grad, accumulator_dtype(grad.dtype))
    touched = jnp.sum(in_bounds(rows.indices, grad.shape), dtype=jnp.int32)
    return GradientStats(jnp.sqrt(jnp.sum(jnp.square(rows.data))), touched)


def _of_array(grad: Any) -> GradientStats:
    grad = jnp.asarray(grad)
    wide = jnp.abs(grad.astype(accumulator_dtype(grad.dtype)))
    rows = grad.shape[0] if grad.ndim else 1
    return GradientStats(jnp.sqrt(jnp.sum(jnp.square(wide))), jnp.int32(rows))
