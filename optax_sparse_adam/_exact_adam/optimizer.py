"""Dense Adam's own numbers, at the cost of the rows that a gradient holds."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._jax_extras.sharding import jit_on_mesh
from .._optimizers.hyperparameters import (
    NUMBER,
    check_at_least,
    check_betas,
    check_eps,
    check_state_class,
    floating_type,
)
from .._optimizers.update_fn import RowUpdateFn, Updated
from .leaves import StepLeaves
from .new_state import new_state
from .schedule import Schedule, fit, largest_decay
from .state import ExactAdamState, replaced
from .step import Betas
from .update import look_ahead, update_leaves


def _schedule(value: Any, name: str) -> Schedule:
    """A number or a schedule as a schedule."""
    if callable(value):
        return value
    if not isinstance(value, NUMBER):
        raise TypeError(
            f"exact_adam needs a {name} that is known for all steps to come, since "
            "stale rows are advanced with it: a Python number, or a schedule of the "
            f"step count; got {type(value).__name__}. optax.inject_hyperparams gives "
            "arrays, which may change by hand. To change it by hand, call "
            "flush(params, state) and make a new exact_adam of the same b1, b2 and "
            "eps, which takes the state."
        )
    check_at_least(name, value, 0)
    return lambda count: value


def _check(b1: Any, b2: Any, eps: Any, eps_root: Any) -> None:
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps), ("eps_root", eps_root)):
        if not isinstance(value, NUMBER):
            raise TypeError(
                f"exact_adam needs {name} as a Python number, got "
                f"{type(value).__name__}: stale rows are advanced by a sum whose "
                "length follows from it."
            )
    check_betas(b1, b2)
    check_eps(eps)
    smallest = 1e-36 / math.sqrt(1 - b2)
    if eps < smallest:
        raise ValueError(
            f"exact_adam needs an eps of at least {smallest:.2g} for b2={b2}, got "
            f"{eps}: its inverse, and that of eps * sqrt(1 - b2), must be numbers of "
            "float32."
        )
    if eps_root != 0:
        raise ValueError(
            f"exact_adam supports eps_root=0.0 only, got {eps_root}: the updates "
            "of a stale row can be summed up without it only. Use eps, or optax.adam."
        )
    if not b1 * b1 < b2:
        raise ValueError(
            f"exact_adam needs b1 < sqrt(b2), got b1={b1} and b2={b2}: otherwise the "
            "moves of a row without gradients grow from step to step, and their sum "
            "does not end. Choose a smaller b1 or a larger b2."
        )


def _check_decay(state: ExactAdamState, name: str) -> None:
    maker = "exact_adamw" if state.log_decay else "exact_adam"
    if maker != name:
        raise ValueError(
            f"{name} needs a state that was made by {name}, got that of {maker}: "
            "only the state of exact_adamw knows how far each row has decayed. To "
            "change the weight decay between runs, use exact_adamw in all of them, "
            "with weight_decay=0 where nothing decays."
        )


def _decay_schedule(
    learning_rate: optax.ScalarOrSchedule, weight_decay: Any, limit: float
) -> Schedule | None:
    """The weight decay of each step, if anything decays."""
    if weight_decay is None:
        return None
    decay = _schedule(weight_decay, "weight decay")
    are_known = isinstance(learning_rate, NUMBER), isinstance(weight_decay, NUMBER)
    if all(are_known) and not learning_rate * weight_decay <= limit:
        raise ValueError(
            "exact_adamw needs learning_rate * weight_decay of at most "
            f"(1 - b1 / sqrt(b2)) / 2 = {limit:.3g}, got {learning_rate} * "
            f"{weight_decay}: a row must keep more in a step than its momentum "
            "does. Choose a smaller weight_decay."
        )
    return decay


def _decaying(params: optax.Params, mask: Any) -> Any:
    """Says of each parameter whether it decays."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    marks = mask(params) if callable(mask) else mask
    return jax.tree.map(
        lambda mark, part: jax.tree.map(lambda _: bool(mark), part), marks, params
    )


def _exact_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    mu_dtype: Any,
    nesterov: bool,
    weight_decay: Any,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """Both public forms; `weight_decay` is `None` where nothing decays."""
    name = "exact_adam" if weight_decay is None else "exact_adamw"
    rate = _schedule(learning_rate, "learning rate")
    _check(b1, b2, eps, eps_root)
    decay = _decay_schedule(learning_rate, weight_decay, largest_decay(b1, b2))
    mu_dtype = floating_type(mu_dtype, "mu_dtype")
    betas = Betas(float(b1), float(b2), float(eps), bool(nesterov))
    fit(betas.b1, betas.b2, np.dtype("float32"))  # raises where there is none

    def init_fn(params: optax.Params) -> ExactAdamState:
        return new_state(params, betas, mu_dtype, name)

    def update_fn(
        updates: optax.Updates,
        state: ExactAdamState,
        params: optax.Params | None,
        *,
        adds_to_params: bool,
        **extra_args: Any,
    ) -> Updated:
        del extra_args
        check_state_class(state, ExactAdamState, name)
        _check_decay(state, name)
        if decay is not None and params is None:
            raise ValueError(
                "exact_adamw needs the parameters, which decay. Call "
                "update(updates, state, params)."
            )
        state = state._replace(count=jnp.asarray(state.count, state.clock.dtype))
        marks = None if decay is None else _decaying(params, mask)
        leaves = StepLeaves.of(updates, state, params, marks)
        outset = look_ahead(leaves, state, rate, decay, betas)
        made, rows = update_leaves(leaves, outset, betas, adds_to_params=adds_to_params)
        new = replaced(state, rows, outset.after)
        return leaves.treedef, made, new._replace(count=outset.next_count)

    update = RowUpdateFn(update_fn)
    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update)


def exact_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The numbers of `optax.adam` on the dense gradient, at the cost of the batch.

    Dense Adam moves every row in every step: a row that the batch does not hold goes on
    with its momentum. `sparse_adam` and `lazy(optax.adam)` leave such a row alone.
    `exact_adam` moves it, but computes its value only when it is read. In a step `t`
    without a gradient for a row `p` with the moments `m` and `v`, at the learning rate
    :math:`\alpha_t`,

    .. math::

      m \leftarrow b_1 m, \quad v \leftarrow b_2 v, \quad
      p \leftarrow p - \alpha_t \frac{\sqrt{1 - b_2^t}}{1 - b_1^t}
        \frac{m}{\sqrt{v} + \epsilon \sqrt{1 - b_2^t}}

    While a row has no gradient, it is *stale*: its updates depend only on its moments
    and on the schedule, so the sum of those to come, the *remaining update*, can be
    computed in advance. After a row-sparse gradient the parameters hold the row's
    *projected final value*, to which its momentum will carry it. Its value at a later
    step is the projected final value minus the remaining update at that step, which
    vanishes after some hundred steps. A few numbers, computed once in each step from
    the schedule, give the remaining update of any row.

    `make_train_step` makes the whole step. By hand, it is::

      loss, grads = osa.value_and_grad(loss_fn, read=state)(params, batch)
      updates, state = tx.update(grads, state, params)
      params = osa.apply_updates(params, updates)

    With `read=state` (see `value_and_grad`) the loss looks rows up as dense Adam would
    have them now; without it, it would see projected final values, and `update` raises.
    For evaluation there is `evaluate(fun, read=state)`. `flush(params, state)` writes
    the values into the parameters: call it before an export, and before a change of the
    learning rate by hand. A change without it raises or, inside a compiled program,
    makes the rows NaN. Nothing may change the updates: what follows in a chain raises.
    Checkpoints of `(params, state)` for this optimiser need no flush.

    A gradient leaf may be a row-sparse BCOO; a dense array; or `None`, which is a
    gradient of zeros at no cost: to freeze a parameter use `optax.partition` or
    `optax.masked`. A parameter whose gradients are always dense takes the step of
    `optax.adam`, and holds its values. A dense gradient of a parameter with stale rows
    is refused, and in a compiled program becomes NaN: call `flush` before it. To clip
    by the norm of all gradients, put `lazy(optax.clip_by_global_norm(...))` before it
    in a chain. What is inside of that `lazy` and reads parameters, as
    `optax.add_decayed_weights`, gets the rows of the batch as dense Adam has them now.

    Beside the moments, the state takes 4 bytes for each row, and 12 in `exact_adamw`. A
    step costs what a step of `sparse_adam` costs and, for `read`, the lookups of the
    moments; the page on exact Adam of the documentation says how much that is.
    Arithmetic is in float32 at least, and closer to Adam in exact arithmetic than dense
    Adam in float32: a stale row is not rounded in each step.

    `sparse_adam` is better where stale rows should not move: in dense Adam rare rows
    go on moving for some ten steps after each gradient. When moving from dense to lazy
    Adam, mind the learning rate: a row that a share `f` of the batches hold is moved by
    dense Adam by about `lr / sqrt(f)` for each gradient (`f` above `1 - b2`), by lazy
    Adam by `lr`, which is less.

    Args:
      learning_rate: A Python number of at least 0, or a schedule, called with the
        numbers of steps before this one and before those to come, as traced scalars. It
        must be a function of that number alone. Where it is NaN or infinite in steps to
        come, rows do not move; where it grows in all of them as fast as momentum dies
        out, they become NaN.
      b1: Decay of the moving average of the gradient, in `[0, 1)`.
      b2: Decay of the moving average of the squared gradient, in `[0, 1)`; `1 - b2` may
        be about 0.7 of `1 - b1`, in float64 half of it.
      eps: Added to the root of the corrected second moment, as in `optax.adam`; at
        least `1e-36 / sqrt(1 - b2)`.
      eps_root: 0; anything else is refused.
      mu_dtype: Type of `mu`; the parameter's own by default.
      nesterov: As in `optax.adam`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ExactAdamState`. Its
      `update` raises `TypeError` and `ValueError` for gradients as that of
      `sparse_adam` does, and `ValueError` for a gradient of single elements, for one
      that was made without `read=`, and, outside of a compiled program, for a state
      of another schedule.

    Raises:
      TypeError: If a hyper-parameter is an array, such as those of
        `optax.inject_hyperparams`.
      ValueError: If one is out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> params, tx = {"table": jnp.ones((1000, 4))}, osa.exact_adam(0.1)
      >>> state = tx.init(params)
      >>> for ids in ([3, 3, 7], [5, 7, 9]):
      ...     loss = lambda p: jnp.sum(p["table"][jnp.array(ids)] ** 2)
      ...     grads = osa.grad(loss, read=state)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = osa.apply_updates(params, updates)
      >>> params, state = osa.flush(params, state)
      >>> [round(float(params["table"][i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.833, 0.8004]

    References:
      Kingma and Ba, `Adam: A Method for Stochastic Optimization
      <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    return _exact_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, None, None
    )


def exact_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The numbers of `optax.adamw` on the dense gradient, at the cost of the batch.

    `exact_adam` with decoupled weight decay; see there. Every row decays in every step,
    whether the batch holds it or not:

    .. math::

      p \leftarrow (1 - \alpha_t \lambda_t) \, p - \alpha_t
        \frac{m / (1 - b_1^t)}{\sqrt{v / (1 - b_2^t)} + \epsilon}

    `lr * weight_decay` must be at most `(1 - b1 / sqrt(b2)) / 2`: 0.0497 with the
    default betas. A product of numbers above it raises; where schedules exceed it, now
    or within the steps of a remaining update, the rows become NaN.

    Args:
      learning_rate: As in `exact_adam`.
      b1: As in `exact_adam`.
      b2: As in `exact_adam`.
      eps: As in `exact_adam`.
      eps_root: As in `exact_adam`.
      mu_dtype: As in `exact_adam`.
      weight_decay: A Python number of at least 0, or a schedule.
      mask: Which parameters decay: a tree of booleans, or a prefix of it, or a function
        of the parameters that returns one.
      nesterov: As in `optax.adamw`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ExactAdamState`, whose
      `update` needs the parameters.

    Raises:
      TypeError: If a hyper-parameter is an array.
      ValueError: If one is out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, tx = jnp.ones((1000, 4)), osa.exact_adamw(0.1, weight_decay=0.1)
      >>> step = osa.make_train_step(lambda t, ids: jnp.sum(t[ids] ** 2), tx)
      >>> table, state, _ = step(table, tx.init(table), jnp.array([3, 7]))
      >>> table, state = osa.flush(table, state)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [0.99, 0.89, 0.89]

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2017.
    """
    return _exact_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, weight_decay, mask
    )
