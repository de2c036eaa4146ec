"""`make_train_step`: gradient, update and addition as one compiled, donated step."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import optax

from ._exact_adam.state import contains_exact
from ._gradients.value_and_grad import Sparse, value_and_grad
from ._optimizers.hyperparameters import check_transformation
from ._rows.apply_updates import apply_updates


def make_train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    sparse: Sparse | None = None,
) -> Callable[..., tuple[Any, Any, Any]]:
    """A training step: `params, state, value = step(params, state, *batch)`.

    It holds what belongs together: `value_and_grad`, with `read=state` where the state
    holds that of `exact_adam`; `tx.update`; `apply_updates`; `jax.jit`; and the
    donation of parameters and state, which are updated in place and must not be used
    again. The state is that of `tx.init(params)`.

    Optimisers of this package, alone, in chains or in `optax.partition`, get row-sparse
    gradients. One that is made of optax's alone, such as `optax.adam(1e-3)`, gets dense
    ones, as it takes no others, and costs what the tables cost: `exact_adam(1e-3)` has
    its numbers, and `lazy(optax.adam(1e-3))` updates the rows of the batch.

    Args:
      loss: `loss(params, *batch)`, a scalar, or a pair `(scalar, aux)` if `has_aux`.
      tx: The optimiser.
      has_aux: Whether `loss` returns a pair; `value` is that pair then.
      sparse: As in `value_and_grad`: which leaves are to be row-sparse. Left out, it is
        as said above.

    Returns:
      The step. Arguments by keyword go to `tx.update`, which also gets the loss as
      `value`, and beside dense gradients `grad` and `value_fn`, as the plateaus, Polyak
      steps and line searches of optax want them.

    Raises:
      TypeError: If `tx` is no transformation. The step raises what its parts raise.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> def loss(params, ids):
      ...     return jnp.mean((params["table"][ids] @ params["w"] - 1) ** 2)
      >>> params = {"table": jnp.zeros((1000, 4)), "w": jnp.ones(4)}
      >>> tx = osa.sparse_adam(0.1)
      >>> step, state = osa.make_train_step(loss, tx), tx.init(params)
      >>> for _ in range(3):
      ...     params, state, value = step(params, state, jnp.array([3, 7, 3]))
      >>> round(float(value), 4)
      0.0252
    """
    check_transformation(tx, "make_train_step")
    update = optax.with_extra_args_support(tx).update
    wanted = _is_ours(tx) if sparse is None else sparse

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, *batch: Any, **extra_args: Any) -> Any:
        read = state if contains_exact(state) else None
        both = value_and_grad(loss, has_aux=has_aux, sparse=wanted, read=read)
        value, grads = both(params, *batch)
        # What line searches and plateau schedules of optax take; others ignore it.
        extra = {"value": value[0] if has_aux else value}
        if wanted is False:

            def value_fn(params: Any, **_: Any) -> Any:
                value = loss(params, *batch)
                return value[0] if has_aux else value

            extra |= {"grad": grads, "value_fn": value_fn}
        updates, state = update(grads, state, params, **extra | extra_args)
        return apply_updates(params, updates), state, value

    return step


def _is_ours(tx: Any) -> bool:
    """Whether a transformation is one of this package, or made of one.

    optax's combinators are functions that close over the transformations that they
    combine; others may be objects that hold them.
    """
    # `optax.chain(clip, sparse_adam(0.1)).update` is a function of optax with a cell
    # that holds both updates, the second of which is one of this package.
    todo, seen = [tx], set[int]()
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if (getattr(x, "__module__", None) or "").startswith(__package__ + "."):
            return True
        if isinstance(x, tuple | list):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            todo += [x.__self__, x.__func__]
        elif isinstance(x, types.FunctionType):
            todo += [
                cell.cell_contents for cell in x.__closure__ or () if _is_set(cell)
            ]
        elif hasattr(x, "__wrapped__"):
            todo.append(x.__wrapped__)
        elif hasattr(x, "update") and hasattr(x, "__dict__"):
            todo += vars(x).values()
    return False


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
