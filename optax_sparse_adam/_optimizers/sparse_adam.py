"""Adam on the rows that a gradient holds, with the numbers of torch's SparseAdam."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._rows.map_rows import Tables
from .by_leaf import Moment, by_leaf, update_leaf
from .hyperparameters import (
    Scalar,
    check_betas,
    check_eps,
    floating_type,
    one_minus_power,
)
from .lazy import lazy


class AdamScalars(NamedTuple):
    """The scalars of one step, all of the type in which the step computes."""

    sign: Scalar  # -1 to maximize
    one_minus_b1: Scalar
    one_minus_b2: Scalar
    eps: Scalar
    scale: Scalar  # of the update: step size and bias corrections


def _adam(
    grad: jax.Array, moments: Tables, scalars: AdamScalars
) -> tuple[jax.Array, Tables]:
    """The formula, for rows or for a whole dense array.

    `Adam` in `native/update.h` is the same formula for CPUs: change both.
    `tests/native/test_native.py` compares them.
    """
    grad = scalars.sign * grad
    mu, nu = moments
    mu = mu + scalars.one_minus_b1 * (grad - mu)
    nu = nu + scalars.one_minus_b2 * (grad * grad - nu)
    return scalars.scale * mu / (jnp.sqrt(nu) + scalars.eps), (mu, nu)


update_leaf_by_adam = functools.partial(update_leaf, _adam, kernel="adam")


class ScaleBySparseAdamState(NamedTuple):
    """State of `scale_by_sparse_adam` and of `sparse_adam`.

    Attributes:
      count: Number of updates so far, an `int32` scalar. One clock for all rows.
      mu: Tree like the parameters: moving average of the gradient.
      nu: Tree like the parameters: moving average of the squared gradient.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    mu: optax.Updates
    nu: optax.Updates


def _sparse_adam(
    learning_rate: optax.ScalarOrSchedule | None,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    mu_dtype: DTypeLike | None,
    maximize: bool,
) -> optax.GradientTransformationExtraArgs:
    """Both public forms; `learning_rate` is `None` for the scaling alone."""
    check_betas(b1, b2)
    check_eps(eps)

    def scalars(scale: Any, count: Any, dtype: Any, _: Any) -> AdamScalars:
        correction1, correction2 = (one_minus_power(b, count, dtype) for b in (b1, b2))
        return AdamScalars(
            sign=-1 if maximize else 1,
            one_minus_b1=1 - b1,
            one_minus_b2=1 - b2,
            eps=eps,
            scale=scale * jnp.sqrt(correction2) / correction1,
        )

    moments = {"mu": Moment(dtype=floating_type(mu_dtype, "mu_dtype")), "nu": Moment()}
    update = update_leaf_by_adam
    return lazy(
        by_leaf(
            "scale_by_sparse_adam" if learning_rate is None else "sparse_adam",
            ScaleBySparseAdamState,
            moments,
            update,
            scalars,
            learning_rate,
        )
    )


def scale_by_sparse_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales row-sparse gradients by Adam, on the rows that they hold.

    `sparse_adam` without the learning rate and the sign; see there for the formula.
    A transformation of optax that follows this one in a chain sees BCOO updates, and
    those that scale or clip take the indices for values. That raises, or in a compiled
    program makes the first rows of the table NaN (see `apply_updates`). Use
    `sparse_adam`, which takes the learning rate itself, or put the chain inside `lazy`,
    where it sees plain rows:
    `lazy(optax.chain(scale_by_sparse_adam(), optax.scale_by_learning_rate(schedule)))`.

    Args:
      b1: Decay of the moving average of the gradient, in `[0, 1)`.
      b2: Decay of the moving average of the squared gradient, in `[0, 1)`.
      eps: Added to the root of the uncorrected second moment; above 0.
      mu_dtype: Type of `mu`; the parameter's own by default.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleBySparseAdamState`.

    Raises:
      ValueError: If `b1`, `b2` or `eps` is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> import optax_sparse_adam as osa
      >>> tx = osa.scale_by_sparse_adam()
      >>> state = tx.init(jnp.zeros((1000, 2)))
      >>> grad = BCOO((jnp.ones((1, 2)), jnp.array([[7]])), shape=(1000, 2))
      >>> update, state = tx.update(grad, state)
      >>> update.data.round(3).tolist(), int(state.count)
      ([[1.0, 1.0]], 1)
    """
    return _sparse_adam(None, b1, b2, eps, mu_dtype, maximize=False)


def sparse_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    mu_dtype: DTypeLike | None = None,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam that reads and writes only the rows that a row-sparse gradient holds.

    For each row in the gradient, duplicates added up, with `t` the number of this step
    (one clock for all rows):

    .. math::

      m &\leftarrow m + (1 - b_1)(g - m) \\
      v &\leftarrow v + (1 - b_2)(g^2 - v) \\
      u &= - \alpha_t \frac{\sqrt{1 - b_2^t}}{1 - b_1^t} \frac{m}{\sqrt{v} + \epsilon}

    Here `g` is the row of the gradient, `m` and `v` are those of the moments `mu` and
    `nu`, :math:`\alpha_t` is the learning rate, and `u` is added to the parameter.
    These are the numbers of `torch.optim.SparseAdam`. Rows that the gradient does not
    hold keep their parameters and their moments bit for bit: this is lazy Adam, not
    Adam, where the moments of every row decay at each step.

    .. warning::

      `eps` is added to the root of the *uncorrected* second moment (the form above
      section 2.1 of the paper), as in torch's SparseAdam, while `optax.adam` adds it to
      the corrected one. At `t = 1` the same `eps` acts `1 / sqrt(1 - b2)`, 31.6 times,
      as strongly here. `osa.lazy(optax.adam(learning_rate))` has optax's form.

    A gradient leaf may be a row-sparse BCOO (see `value_and_grad`); a dense array, for
    which every row counts as touched; or `None`, which leaves the parameter and its
    moments as they are. The update of a BCOO leaf is a BCOO that holds each touched row
    once, and zeros in its other slots (padding). If the gradient was coalesced, the
    update has its order and its pytree structure; otherwise the order is unspecified.
    `apply_updates` and `optax.apply_updates` take both. Under `jit` with the state and
    the parameters donated the step is in place.

    Arithmetic is in float32 at least; the moments are stored in the parameter's type,
    and an update has the type of its gradient. With `b2 = 0.999` a bfloat16 second
    moment soon stops moving, since a change of 0.1 % is below the precision of the
    type, and small updates vanish in the parameter: use
    `lazy(stochastic_rounding(sparse_adam(...), key))`.

    NaN and infinite gradients spread to their own rows only. Entries with an
    out-of-bounds index are ignored. An empty gradient changes nothing but `count`.

    Args:
      learning_rate: A number of at least 0, an array with one element, or a schedule,
        called with the number of steps before this one.
      b1: Decay of the moving average of the gradient, in `[0, 1)`.
      b2: Decay of the moving average of the squared gradient, in `[0, 1)`.
      eps: Added to the root of the uncorrected second moment; above 0.
      mu_dtype: Type of `mu`; the parameter's own by default.
      maximize: Ascend instead of descend.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleBySparseAdamState`.
      Its `update` raises `TypeError` for gradients with indices that are not integers
      or values that are not floating point, and for the state of another optimiser;
      `ValueError` for gradients and moments of another shape than the parameter's. Both
      are raised while tracing.

    Raises:
      ValueError: If a hyper-parameter is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 3, 7])
      >>> loss, grad = osa.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      >>> tx = osa.sparse_adam(1e-3)
      >>> update, state = tx.update(grad, tx.init(table))
      >>> table = osa.apply_updates(table, update)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.999, 0.999]

    References:
      Kingma and Ba, `Adam: A Method for Stochastic Optimization
      <https://arxiv.org/abs/1412.6980>`_, 2014; `torch.optim.SparseAdam
      <https://docs.pytorch.org/docs/stable/generated/torch.optim.SparseAdam.html>`_.
    """
    return _sparse_adam(learning_rate, b1, b2, eps, mu_dtype, maximize)
