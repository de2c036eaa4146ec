"""Adagrad and Adam with one second moment for each row.

A scaling and its optimiser are one transformation: the learning rate is among the
scalars of a step, 1 in a scaling, and so is the weight decay, if there is one.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._rows.entries import accumulator_dtype
from .._rows.map_rows import Tables
from ..native import _calls as native
from .by_leaf import Moment, all_but_last, by_leaf, update_leaf
from .hyperparameters import (
    NUMBER,
    Scalar,
    check_at_least,
    check_betas,
    check_eps,
    floating_type,
    one_minus_power,
)
from .lazy import lazy


def _mean_square(grad: jax.Array) -> jax.Array:
    square = jnp.square(grad)
    return jnp.mean(square, axis=-1) if grad.ndim > 1 else square


def _divide(update: jax.Array, moment: jax.Array, eps: jax.Array) -> jax.Array:
    divisor = jnp.sqrt(moment) + eps
    return update / (divisor[..., None] if update.ndim > 1 else divisor)


def _update(scaled: jax.Array, read: Tables, scalars: Any) -> jax.Array:
    """The update; with weight decay, of the parameter that is read."""
    decayed = [scaled + scalars.decay * x for x in read] or [scaled]
    return scalars.scale * decayed[0]


def _rss(
    grad: jax.Array, rows: Tables, scalars: native.RowwiseAdagradScalars
) -> tuple[jax.Array, Tables]:
    """The formula; `RowwiseAdagrad` in `native/update.h` is the same: change both."""
    total = rows[0] + _mean_square(grad)
    return _update(_divide(grad, total, scalars.eps), rows[1:], scalars), (total,)


def _average(
    old: jax.Array, new: jax.Array, weight: jax.Array, is_old: jax.Array
) -> jax.Array:
    """With the weight of the new value, or that of the old one; see `_by_adam`."""
    return jnp.where(
        is_old == 1, new + weight * (old - new), old + weight * (new - old)
    )


def _adam(
    grad: jax.Array, rows: Tables, scalars: native.RowwiseAdamScalars
) -> tuple[jax.Array, Tables]:
    """The formula; `RowwiseAdam` in `native/update.h` is the same: change both."""
    mu = _average(rows[0], grad, scalars.weight1, scalars.is_old1)
    nu = _average(rows[1], _mean_square(grad), scalars.weight2, scalars.is_old2)
    corrected = mu / scalars.correction1, nu / scalars.correction2
    scaled = _divide(*corrected, scalars.eps)
    return _update(scaled, rows[2:], scalars), (mu, nu)


def _reads_params(eps: Scalar, weight_decay: Scalar) -> str:
    """Why the parameters are read, if they are, for `by_leaf`; checks both numbers."""
    # Rows without a gradient, padding among them, would be zero over zero.
    check_eps(eps)
    check_at_least("weight_decay", weight_decay, 0)
    decays = not isinstance(weight_decay, NUMBER) or weight_decay != 0
    return "Weight decay reads the parameters" if decays else ""


class ScaleByRowwiseRssState(NamedTuple):
    """State of `scale_by_rowwise_rss` and of `rowwise_adagrad`.

    Attributes:
      count: Number of updates so far, an `int32` scalar.
      sum_of_squares: Tree like the parameters, without their last axis: sum of the
        squared gradient's means over that axis.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    sum_of_squares: optax.Updates


def scale_by_rowwise_rss(
    initial_accumulator_value: Scalar = 0.0, eps: Scalar = 1e-8
) -> optax.GradientTransformation:
    """Rescales gradients by the root of the sum of each row's squares to date.

    `rowwise_adagrad` without laziness, weight decay and learning rate; see there. An
    ordinary transformation for dense gradients; `lazy` lifts it to row-sparse ones.
    A gradient of `None` changes nothing.

    Args:
      initial_accumulator_value: Starting value of the sums, at least 0.
      eps: Added to the root of the sum; above 0.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByRowwiseRssState`.

    Raises:
      ValueError: If a hyper-parameter is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> tx = osa.scale_by_rowwise_rss()
      >>> grad = jnp.array([[3.0, 1.0], [0.0, 0.0]])
      >>> update, state = tx.update(grad, tx.init(grad))
      >>> state.sum_of_squares.tolist()
      [5.0, 0.0]
      >>> [round(float(u), 3) for u in update[0]]
      [1.342, 0.447]
    """
    return _by_rss(None, initial_accumulator_value, eps)


def _by_rss(
    learning_rate: optax.ScalarOrSchedule | None,
    initial: Scalar,
    eps: Scalar,
    weight_decay: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    check_at_least("initial_accumulator_value", initial, 0)
    numbers: Any = eps, weight_decay
    return by_leaf(
        "scale_by_rowwise_rss" if learning_rate is None else "rowwise_adagrad",
        ScaleByRowwiseRssState,
        {"sum_of_squares": Moment(all_but_last, accumulator_dtype, initial)},
        functools.partial(update_leaf, _rss, kernel="rowwise_adagrad"),
        lambda scale, *_: native.RowwiseAdagradScalars(scale, *numbers),
        learning_rate,
        _reads_params(*numbers),
    )


class ScaleByRowwiseAdamState(NamedTuple):
    """State of `scale_by_rowwise_adam` and of `rowwise_adam`.

    Attributes:
      count: Number of updates so far, an `int32` scalar.
      mu: Tree like the parameters: moving average of the gradient.
      nu: Tree like the parameters, without their last axis: moving average of the
        squared gradient's mean over that axis.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    mu: optax.Updates
    nu: optax.Updates


def scale_by_rowwise_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Rescales gradients by Adam with one second moment for each row.

    `rowwise_adam` without laziness, weight decay and learning rate; see there. An
    ordinary transformation for dense gradients; `lazy` lifts it to row-sparse ones.
    A gradient of `None` changes nothing.

    Args:
      b1: Decay of the moving average of the gradient, in `[0, 1)`.
      b2: Decay of the moving average of the squared gradient, in `[0, 1)`.
      eps: Added to the root of the bias-corrected second moment; above 0.
      mu_dtype: Type of `mu`; the parameter's own by default.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByRowwiseAdamState`.

    Raises:
      ValueError: If a hyper-parameter is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> tx = osa.scale_by_rowwise_adam()
      >>> grad = jnp.array([[3.0, 1.0], [0.0, 0.0]])
      >>> update, state = tx.update(grad, tx.init(grad))
      >>> state.mu.shape, state.nu.shape
      ((2, 2), (2,))
      >>> [round(float(u), 3) for u in update[0]]
      [1.342, 0.447]
    """
    return _by_adam(None, b1, b2, eps, mu_dtype)


def _by_adam(
    learning_rate: optax.ScalarOrSchedule | None,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    mu_dtype: DTypeLike | None,
    weight_decay: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    check_betas(b1, b2)
    # Of `b` and `1 - b` the smaller one is passed on, as rounding it costs less.
    # In float32, 0.001 is exact to 6e-8 of itself, and `1 - 0.999` to 1e-5.
    is_old = [isinstance(b, NUMBER) and b < 0.5 for b in (b1, b2)]
    weights = [b if old else 1 - b for b, old in zip((b1, b2), is_old, strict=True)]

    numbers: Any = eps, weight_decay, *weights, *is_old

    def scalars(scale: Any, count: Any, dtype: Any, _: Any) -> Any:
        corrections = (one_minus_power(b, count, dtype) for b in (b1, b2))
        return native.RowwiseAdamScalars(scale, *numbers, *corrections)

    return by_leaf(
        "scale_by_rowwise_adam" if learning_rate is None else "rowwise_adam",
        ScaleByRowwiseAdamState,
        {
            "mu": Moment(dtype=floating_type(mu_dtype, "mu_dtype")),
            "nu": Moment(all_but_last, accumulator_dtype),
        },
        functools.partial(update_leaf, _adam, kernel="rowwise_adam"),
        scalars,
        learning_rate,
        _reads_params(eps, weight_decay),
    )


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with one accumulator for each row, on the rows that a gradient holds.

    For each touched row of `D` elements, duplicates added up:

    .. math::

      s &\leftarrow s + \tfrac1D \textstyle\sum_j g_j^2 \\
      p &\leftarrow p - \gamma \left( \frac{g}{\sqrt{s} + \epsilon}
        + \lambda p \right)

    The state of a `[num_rows, D]` table is `num_rows` scalars. A row is a vector along
    the last axis; parameters of one axis have a scalar for each element, as in
    Adagrad. The sums are stored in float32 at least.

    .. warning::

      `eps` stands outside of the root and the sums start at 0, as in FBGEMM's
      `EXACT_ROWWISE_ADAGRAD`; `optax.adagrad` adds `eps` to the sum and starts at 0.1.

    Weight decay is decoupled and acts on touched rows. For the coupled one (FBGEMM's
    `WeightDecayMode.L2`), put `optax.add_decayed_weights` first::

      osa.lazy(optax.chain(
          optax.add_decayed_weights(1e-4),
          osa.scale_by_rowwise_rss(),
          optax.scale_by_learning_rate(0.1)))

    Args:
      learning_rate: :math:`\gamma`, at least 0: a number, an array, or a schedule of
        the step count.
      initial_accumulator_value: Starting value of the sums, at least 0.
      eps: Added to the root of the sum; above 0.
      weight_decay: :math:`\lambda`; unless it is 0, `update` needs `params`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleByRowwiseRssState`.
      Row-sparse gradients have one sparse axis, or more if the table has further ones.

    Raises:
      ValueError: If a hyper-parameter is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 3, 7])
      >>> grad = osa.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      >>> tx = osa.rowwise_adagrad(0.1)
      >>> update, state = tx.update(grad, tx.init(table))
      >>> table = osa.apply_updates(table, update)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.9, 0.9]

    References:
      Naumov et al., `Deep Learning Recommendation Model
      <https://arxiv.org/abs/1906.00091>`_, 2019; `FBGEMM
      <https://docs.pytorch.org/FBGEMM>`_, `EmbOptimType.EXACT_ROWWISE_ADAGRAD`.
    """
    return lazy(_by_rss(learning_rate, initial_accumulator_value, eps, weight_decay))


def rowwise_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    mu_dtype: DTypeLike | None = None,
    weight_decay: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with one second moment for each row, on the rows that a gradient holds.

    For each touched row of `D` elements, duplicates added up, with `t` the number of
    this step (one clock for all rows):

    .. math::

      m &\leftarrow m + (1 - b_1)(g - m), \qquad
      v \leftarrow v + (1 - b_2)(\tfrac1D \textstyle\sum_j g_j^2 - v) \\
      p &\leftarrow p - \gamma \left( \frac{m / (1 - b_1^t)}
        {\sqrt{v / (1 - b_2^t)} + \epsilon} + \lambda p \right)

    The state of a `[num_rows, D]` table is `num_rows * D + num_rows` scalars. A row is
    a vector along the last axis; parameters of one axis have a scalar for each element,
    as in Adam. `v` is stored in float32 at least: in bfloat16 a thousandth of it is
    lost.

    .. warning::

      `eps` is added to the root of the *corrected* second moment, as in FBGEMM's
      `PARTIAL_ROWWISE_ADAM` and in `optax.adam`; `sparse_adam` adds it to the
      uncorrected one, as torch.

    Weight decay is decoupled and acts on touched rows, as in FBGEMM. For the coupled
    one, put `optax.add_decayed_weights` before `scale_by_rowwise_adam` in a chain
    inside `lazy`.

    Args:
      learning_rate: :math:`\gamma`, at least 0: a number, an array, or a schedule of
        the step count.
      b1: Decay of the moving average of the gradient, in `[0, 1)`.
      b2: Decay of the moving average of the squared gradient, in `[0, 1)`.
      eps: Added to the root of the bias-corrected second moment; above 0.
      mu_dtype: Type of `mu`; the parameter's own by default.
      weight_decay: :math:`\lambda`; unless it is 0, `update` needs `params`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleByRowwiseAdamState`.
      Row-sparse gradients have one sparse axis, or more if the table has further ones.

    Raises:
      ValueError: If a hyper-parameter is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 3, 7])
      >>> grad = osa.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      >>> tx = osa.rowwise_adam(0.1)
      >>> update, state = tx.update(grad, tx.init(table))
      >>> table = osa.apply_updates(table, update)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.9, 0.9]

    References:
      `FBGEMM <https://docs.pytorch.org/FBGEMM>`_, `EmbOptimType.PARTIAL_ROWWISE_ADAM`;
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    return lazy(_by_adam(learning_rate, b1, b2, eps, mu_dtype, weight_decay))
