"""`apply_updates`: adds updates to parameters, a row-sparse one to its rows only."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .checks import check_bcoo, is_bcoo, is_leaf, leaves_like
from .coalesce import touched_rows
from .entries import accumulator_dtype, replicate_entries
from .row_ops import RowOps
from .stale import knows_stored_rows
from .with_ops import with_ops


@jax.jit
def add_update(param: jax.Array, update: Any) -> jax.Array:
    dtype = accumulator_dtype(param.dtype, update.dtype)
    rows, is_unique = replicate_entries(update), update.unique_indices
    indices, data = rows.indices, rows.data
    # A bfloat16 table: two updates of a row are added up first, and rounded once.
    if param.dtype != dtype and not is_unique:
        indices, data, _ = touched_rows(update, dtype)
        is_unique = True

    def added(ops: RowOps, *operands: Any) -> jax.Array:
        return ops.add(*operands, is_unique=is_unique)

    result: jax.Array = with_ops(added, param, indices, data)
    return result


def add_to_param(param: Any, update: Any) -> Any:
    """`apply_updates` of one leaf."""
    if param is None or update is None:
        return param
    if is_bcoo(update):
        with knows_stored_rows():
            return add_update(param, check_bcoo(update, jnp.shape(param)))
    if jnp.shape(param) != jnp.shape(update):
        raise ValueError(
            "An update must have the shape of its parameter, got an update of shape "
            f"{jnp.shape(update)} for a parameter of shape {jnp.shape(param)}."
        )
    return optax.apply_updates(param, update)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Adds updates to parameters; a row-sparse update touches only its rows.

    Like `optax.apply_updates`, which under `jit` takes BCOO updates as well, and
    besides: a `None` update leaves its parameter as it is, a BCOO is checked, and
    Explicit axes may split a table by columns. Under `jit` with the parameters donated,
    the addition is in place.

    Updates of gradients of `value_and_grad` notice when a transformation that does not
    know BCOO has changed their indices as well, such as `optax.sgd` of a schedule
    outside of `lazy`. That raises; but in a compiled program, where it is known only
    when it runs, the first rows of the table become NaN, one for each entry.

    XLA updates a table in place only where it knows that every read of the old rows
    comes before. It knows that of the loss and of what `value_and_grad` returns beside
    it. Where the same jitted step reads old rows elsewhere, as in `accuracy(params,
    batch)` or in a `jax.debug.print` next to `value_and_grad(loss)(params, batch)`, it
    copies the table at each step. Return the metric as an auxiliary output of the loss
    (`has_aux=True`), print inside the loss, or compute it of the new parameters. (An
    `optimization_barrier` does not help: XLA drops it on CPUs before it looks.)

    Args:
      params: Tree of arrays; `None` leaves stay `None`.
      updates: The same tree with dense, BCOO or `None` leaves. Duplicate indices of a
        BCOO add up, out-of-bounds indices are ignored.

    Returns:
      The parameters, each in its own type and shape.

    Raises:
      TypeError: If a BCOO has indices that are not integers.
      ValueError: If an update has another shape than its parameter, if its indices were
        changed, or if the trees have different structures.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> import optax_sparse_adam as osa
      >>> params = {"table": jnp.zeros((4, 1)), "bias": jnp.zeros(1)}
      >>> rows = BCOO((jnp.ones((2, 1)), jnp.array([[2], [2]])), shape=(4, 1))
      >>> params = osa.apply_updates(params, {"table": rows, "bias": None})
      >>> params["table"].ravel().tolist()
      [0.0, 0.0, 2.0, 0.0]
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_leaf)
    changes = leaves_like(treedef, updates, "Updates", "parameters")
    return treedef.unflatten(map(add_to_param, leaves, changes))
