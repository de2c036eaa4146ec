"""Adafactor with the numbers of torch, on dense and on row-sparse gradients."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import shard_columns_like
from .._rows.checks import is_bcoo
from .._rows.entries import Entries, accumulator_dtype, bcoo_of, open_gradient
from .._rows.jit_with_bags import jit_with_bags
from .._rows.map_rows import Tables
from .._rows.padding import in_bounds, mask_padding
from .._rows.row_ops import RowOps, Update
from .._rows.with_ops import with_ops
from .by_leaf import Moment, by_leaf
from .hyperparameters import (
    NUMBER,
    Scalar,
    check_at_least,
)
from .lazy import lazy


class AdafactorScalars(NamedTuple):
    """The scalars of one step of one leaf, all of the type in which it computes."""

    sign: Scalar  # -1 to maximize
    weight: Scalar  # of the new squares in their moving averages
    size: jax.Array  # of the step, relative to the parameter's
    decay: Scalar | None  # of the parameter: learning rate times weight decay
    eps1: Scalar
    eps2: Scalar
    d: Scalar


def _at_least(x: jax.Array, bound: jax.Array | float) -> jax.Array:
    """`max`, where a NaN is the bound, as Python's is and so torch's Adafactor."""
    return jnp.where(x > bound, x, bound)


def _average(old: jax.Array, new: jax.Array, weight: jax.Array) -> jax.Array:
    """Two positive terms, so that neither cancels where the other is far larger."""
    return (1 - weight) * old + weight * new


def _adafactor(
    grad: jax.Array, rows: Tables, step: AdafactorScalars, num_rows: Any
) -> tuple[jax.Array, Tables]:
    """The update of all touched rows, and their new moments; the parameter is last.

    The second moment is estimated from its means over the last two axes. Those of a
    matrix run over its rows, `num_rows` of which are touched; the others are zeros.
    Those of further axes lie within a row.
    """
    *moments, param = rows
    # The columns' average does not move where no row was touched.
    weight = jnp.where(num_rows > 0, step.weight, 0)
    num_rows = jnp.maximum(num_rows, 1).astype(grad.dtype)

    def rms(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(x * x) / (num_rows * math.prod(grad.shape[1:])))

    relative = _at_least(rms(param), step.eps2)
    # Nothing is above infinity: a select that XLA does not see through, so that the
    # rows of the parameter are gone before the squares are there: 34 MB, not 51.
    grad = jnp.where(relative > jnp.inf, relative, grad)
    square = grad * grad
    new_moments: Tables
    if grad.ndim < 2:
        estimate = _average(moments[0], square, weight)
        new_moments = (estimate,)
    else:
        # For k rows of a matrix [N, D], `v_row` is [k] and `v_col` [D]. For k rows of
        # [N, R, D], each a matrix of its own, they are [k, R] and [k, D].
        v_row = _average(moments[0], jnp.mean(square, axis=-1), weight)
        if grad.ndim == 2:
            means = jnp.sum(square, axis=0) / num_rows
            mean = jnp.sum(v_row) / num_rows
        else:
            means = jnp.mean(square, axis=-2)
            mean = jnp.mean(v_row, axis=-1, keepdims=True)
        v_col = _average(moments[1], means, weight)
        new_moments = v_row, v_col
        # Of rank one, R C / mean(R), whose means over columns and rows are R and C.
        share = v_row / jnp.maximum(mean, step.eps1)
        estimate = share[..., :, None] * v_col[..., None, :]
    root = jax.lax.rsqrt(jnp.maximum(estimate, step.eps1 * step.eps1))
    # Zero over zero is zero: in padding, and with eps1 = 0.
    direction = jnp.where(grad == 0, 0, step.sign * grad * root)
    factor = -relative * step.size / _at_least(rms(direction) / step.d, 1.0)
    update = factor * direction
    if step.decay is not None:
        update = update - step.decay * param
    return update, new_moments


@jit_with_bags
def _update_leaf(
    grad: Any, param: jax.Array, moments: Tables, step: AdafactorScalars, _: Any
) -> tuple[Update, Tables]:
    """`by_leaf.update_leaf`, of all touched rows at once."""
    dtype, shape = step.size.dtype, grad.shape
    # JAX keeps `compute` with the program, so that it must hold no array of it.
    dtypes = [x.dtype for x in moments]

    def compute(
        grad: jax.Array, rows: Tables, step: AdafactorScalars, num_rows: Any
    ) -> tuple[Any, Tables]:
        rows = tuple(x.astype(dtype) for x in rows)
        update, new_moments = _adafactor(grad, rows, step, num_rows)
        pairs = zip(new_moments, dtypes, strict=True)
        return update, tuple(new.astype(low) for new, low in pairs)

    if not is_bcoo(grad):
        num_rows = jnp.asarray(math.prod(shape[:1]))
        update, new_moments = compute(
            grad.astype(dtype), (*moments, param), step, num_rows
        )
        return Update(update.astype(grad.dtype)), new_moments
    if grad.n_sparse > max(1, grad.ndim - 2):
        raise ValueError(
            "sparse_adafactor needs rows that hold the last two axes of the table, or "
            f"one sparse axis; got n_sparse == {grad.n_sparse} for a table of shape "
            f"{shape}. Reshape the table to two axes, [num_rows, row_size], and look "
            "rows up by one id."
        )
    # All rows share the columns' average of a matrix.
    tables, shared = (moments[:1], moments[1:]) if len(shape) == 2 else (moments, ())

    def update_rows(
        ops: RowOps,
        entries: Entries,
        tables: Tables,
        shared: Tables,
        param: jax.Array,
        step: AdafactorScalars,
    ) -> Any:
        indices, data, _ = ops.sum(entries)

        def of_rows(data: jax.Array, rows: Tables) -> tuple[Any, Tables]:
            *olds, old = (mask_padding(x, indices, shape) for x in rows)
            num_rows = jnp.sum(in_bounds(indices, shape))
            update, new_moments = compute(data, (*olds, *shared, old), step, num_rows)
            update = mask_padding(update, indices, shape)
            return (update, new_moments[len(olds) :]), new_moments[: len(olds)]

        data = shard_columns_like(param, data)
        return indices, *ops.update(of_rows, data, indices, tables, (param,))

    operands = open_gradient(grad, dtype), tables, shared, param, step
    indices, (update, means), new_rows = with_ops(update_rows, *operands, sums=True)
    return Update(bcoo_of(grad, indices, update, is_sorted=True)), (*new_rows, *means)


class SparseAdafactorState(NamedTuple):
    """State of `sparse_adafactor`.

    Attributes:
      count: Number of updates so far, an `int32` scalar. One clock for all rows.
      v_row: Tree like the parameters, of float32 at least: for those of two or more
        axes, moving average of the squared gradient's mean over the last axis,
        `shape[:-1]`; else `None`.
      v_col: The same for the mean over the last axis but one.
      v: For parameters of at most one axis, moving average of the squared gradient;
        else `None`.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    v_row: optax.Updates
    v_col: optax.Updates
    v: optax.Updates


def _mean_over(axis: int) -> Moment:
    """A moving average of the mean over one of the last two axes; else `None`."""

    def axes(ndim: int) -> list[int] | None:
        return [x for x in range(ndim) if x != ndim + axis] if ndim > 1 else None

    return Moment(axes, accumulator_dtype)


_MOMENTS = {
    "v_row": _mean_over(-1),
    "v_col": _mean_over(-2),
    "v": Moment(lambda ndim: range(ndim) if ndim < 2 else None, accumulator_dtype),
}


def sparse_adafactor(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    beta2_decay: Scalar = -0.8,
    eps: tuple[Scalar | None, Scalar] = (None, 1e-3),
    d: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Adafactor that reads and writes only the rows that a row-sparse gradient holds.

    The second moment of a `[num_rows, D]` table is kept as `num_rows + D` scalars, the
    averages of its rows and of its columns, in place of `num_rows * D`; there is no
    first moment. With `n` rows in the gradient `G`, duplicates added up, `P` these rows
    of the table, and `t` the number of this step (one clock for all rows):

    .. math::

      w &= t^{\tau}, \qquad
        \alpha = \max(\epsilon_2, \text{RMS}(P)) \min(\gamma, 1 / \sqrt{t}) \\
      R &\leftarrow R + w\,(\tfrac1D \textstyle\sum_j G_{ij}^2 - R), \qquad
      C \leftarrow C + w\,(\tfrac1n \textstyle\sum_i G_{ij}^2 - C) \\
      V &= R C \,/ \max(\tfrac1n \textstyle\sum_i R_i, \epsilon_1), \qquad
      U = G / \max(\sqrt{V}, \epsilon_1) \\
      P &\leftarrow P - \gamma \lambda P - \alpha\, U / \max(1, \text{RMS}(U) / d)

    On dense gradients, of which every row counts as touched, these are the numbers of
    `torch.optim.Adafactor`. On row-sparse ones each mean and each RMS runs over the
    touched rows: nothing is computed that grows with the table. The row averages of
    other rows, and their parameters, stay as they are bit for bit; the column averages
    are shared by all rows, and move at each step that touches a row.

    .. warning::

      The step is relative: `learning_rate` bounds it as a share of the size of the
      parameters, and falls with `1 / sqrt(t)` from step 10,000 on with the default.
      `eps[0]` is compared to roots, not added to squares. `optax.adafactor` differs in
      the step, the epsilons and the clipping.

    The averages are stored in float32 at least; in bfloat16, as torch keeps them for
    bfloat16 parameters, they would stand still after 1000 steps.

    A NaN or an infinity in a gradient spreads to all rows of the batch, and through the
    column averages to later ones.

    Parameters of one axis keep a whole second moment. Those of more than two have their
    last two axes factored, each such matrix alone, as in torch; for a row-sparse
    gradient these must lie within a row.

    Args:
      learning_rate: :math:`\gamma`, at least 0: largest relative step and factor of the
        weight decay; a number, an array with one element, or a schedule, called with
        the number of steps before this one.
      beta2_decay: :math:`\tau`, at most 0.
      eps: :math:`\epsilon_1, \epsilon_2`, at least 0. `None` stands for the machine
        epsilon of the parameter's type.
      d: Threshold of the update's RMS over touched elements, at least 1.
      weight_decay: :math:`\lambda`, at least 0; decays touched rows, decoupled.
      maximize: Ascend instead of descend.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `SparseAdafactorState`. Its
      `update` needs `params`; it returns and raises what that of `sparse_adam` does,
      and `ValueError` for row-sparse gradients whose rows cannot be factored.

    Raises:
      ValueError: If a hyper-parameter is a Python number out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 3, 7])
      >>> grad = osa.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      >>> tx = osa.sparse_adafactor()
      >>> state = tx.init(table)
      >>> state.v_row.shape, state.v_col.shape
      ((1000,), (4,))
      >>> update, state = tx.update(grad, state, table)
      >>> table = osa.apply_updates(table, update)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.99, 0.99]

    References:
      Shazeer and Stern, `Adafactor: Adaptive Learning Rates with Sublinear Memory Cost
      <https://arxiv.org/abs/1804.04235>`_, 2018; `torch.optim.Adafactor
      <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html>`_.
    """
    check_at_least("eps[0]", eps[0], 0, " None stands for the machine epsilon.")
    check_at_least("eps[1]", eps[1], 0)
    check_at_least("d", d, 1)
    check_at_least("weight_decay", weight_decay, 0)
    if isinstance(beta2_decay, NUMBER) and not beta2_decay <= 0:
        raise ValueError(f"Invalid beta2_decay: {beta2_decay}. It must be at most 0.")
    decays = not isinstance(weight_decay, NUMBER) or weight_decay != 0

    def scalars(scale: Any, count: Any, dtype: Any, of: Any) -> AdafactorScalars:
        rate, t = -scale, count.astype(dtype)
        return AdafactorScalars(
            sign=-1 if maximize else 1,
            weight=t ** jnp.asarray(beta2_decay, dtype),
            size=jnp.minimum(rate, jax.lax.rsqrt(t)),
            decay=rate * jnp.asarray(weight_decay, dtype) if decays else None,
            eps1=float(jnp.finfo(of).eps) if eps[0] is None else eps[0],
            eps2=eps[1],
            d=d,
        )

    return lazy(
        by_leaf(
            "sparse_adafactor",
            SparseAdafactorState,
            _MOMENTS,
            _update_leaf,
            scalars,
            learning_rate,
            reads_params="sparse_adafactor scales its steps by the parameters",
        )
    )
