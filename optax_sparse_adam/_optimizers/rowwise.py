"""Adagrad and Adam with one second moment for each row, on touched rows."""

from typing import Any

import optax

from .lazy import lazy
from .scale_by_rowwise import scale_by_rowwise_adam, scale_by_rowwise_rss
from .sparse_adam import NUMBER, Scalar


def _optimizer(
    scaling: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Scalar,
) -> optax.GradientTransformationExtraArgs:
    decays = not isinstance(weight_decay, NUMBER) or weight_decay != 0
    # Without weight decay, no parameters are needed; the states are the same.
    decay = optax.add_decayed_weights(weight_decay) if decays else optax.identity()
    rate = optax.scale_by_learning_rate(learning_rate)
    return lazy(optax.chain(scaling, decay, rate))


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with one accumulator for each row, on the rows that a gradient holds.

    For each touched row of `D` numbers, duplicates added up:

    .. math::

      s &\leftarrow s + \tfrac1D \textstyle\sum_j g_j^2 \\
      p &\leftarrow p - \gamma \left( \frac{g}{\sqrt{s} + \epsilon}
        + \lambda p \right)

    The state of a `[num_rows, D]` table is `num_rows` numbers. A row is a vector along
    the last axis; parameters of one axis have a number for each element, as in
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
      learning_rate: A number, an array, or a schedule of the step number.
      initial_accumulator_value: Starting value of the sums, at least 0.
      eps: Added to the root of the sum; above 0.
      weight_decay: :math:`\lambda`; unless it is 0, `update` needs `params`.

    Returns:
      An `optax.GradientTransformationExtraArgs`: `lazy` of a chain that begins with
      `scale_by_rowwise_rss`. Row-sparse gradients have one sparse axis, or more if the
      table has further ones.

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
    scaling = scale_by_rowwise_rss(initial_accumulator_value, eps)
    return _optimizer(scaling, learning_rate, weight_decay)


def rowwise_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    mu_dtype: Any = None,
    weight_decay: Scalar = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with one second moment for each row, on the rows that a gradient holds.

    For each touched row of `D` numbers, duplicates added up, with `t` the number of
    this step (one clock for all rows):

    .. math::

      m &\leftarrow m + (1 - b_1)(g - m), \qquad
      v \leftarrow v + (1 - b_2)(\tfrac1D \textstyle\sum_j g_j^2 - v) \\
      p &\leftarrow p - \gamma \left( \frac{m / (1 - b_1^t)}
        {\sqrt{v / (1 - b_2^t)} + \epsilon} + \lambda p \right)

    The state of a `[num_rows, D]` table is `num_rows * D + num_rows` numbers. A row is
    a vector along the last axis; parameters of one axis have a number for each element,
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
      learning_rate: A number, an array, or a schedule of the step number.
      b1: Decay of the moving average of the gradient.
      b2: Decay of the moving average of the squared gradient.
      eps: Added to the root of the bias-corrected second moment.
      mu_dtype: Type of `mu`; the parameter's own by default.
      weight_decay: :math:`\lambda`; unless it is 0, `update` needs `params`.

    Returns:
      An `optax.GradientTransformationExtraArgs`: `lazy` of a chain that begins with
      `scale_by_rowwise_adam`. Row-sparse gradients have one sparse axis, or more if the
      table has further ones.

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
    scaling = scale_by_rowwise_adam(b1, b2, eps, mu_dtype=mu_dtype)
    return _optimizer(scaling, learning_rate, weight_decay)
