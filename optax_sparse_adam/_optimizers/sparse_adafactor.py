"""Adafactor with the numbers of torch, on dense and on row-sparse gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import jit_on_mesh
from .._rows.checks import is_bcoo, is_leaf, leaves_like
from .._rows.coalesce import accumulator_dtype
from .._rows.new_arrays import full_along
from .adafactor_formula import step_numbers, update_dense, update_sparse
from .hyperparameters import (
    NUMBER,
    Scalar,
    check_at_least,
    check_leaf,
    check_learning_rate,
    check_moment,
    check_state_class,
)


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


def _check_hyperparameters(
    learning_rate: Any,
    beta2_decay: Scalar,
    eps: tuple[Scalar | None, Scalar],
    d: Scalar,
    weight_decay: Scalar,
) -> None:
    check_learning_rate(learning_rate)
    check_at_least("eps[0]", eps[0], 0, " None stands for the machine epsilon.")
    check_at_least("eps[1]", eps[1], 0)
    check_at_least("d", d, 1)
    check_at_least("weight_decay", weight_decay, 0)
    if isinstance(beta2_decay, NUMBER) and not beta2_decay <= 0:
        raise ValueError(f"Invalid beta2_decay: {beta2_decay}. It must be at most 0.")


def check_gradient(grad: Any, param: Any) -> None:
    check_leaf(grad, param)
    if is_bcoo(grad) and grad.n_sparse > max(1, grad.ndim - 2):
        raise ValueError(
            "sparse_adafactor needs rows that hold the last two axes of the table, or "
            f"one sparse axis; got n_sparse == {grad.n_sparse} for a table of shape "
            f"{grad.shape}. Reshape the table to two axes, [num_rows, row_size], and "
            "look rows up by one id."
        )


def _check_moments(row: Any, col: Any, v: Any, shape: tuple[int, ...]) -> None:
    is_factored = len(shape) > 1
    check_moment(row, shape[:-1] if is_factored else None, "v_row")
    check_moment(col, shape[:-2] + shape[-1:] if is_factored else None, "v_col")
    check_moment(v, None if is_factored else shape, "v")


def _init_moment(param: jax.Array, mean_over: int | None) -> jax.Array | None:
    """Zeros for a parameter that has this moment: `v` of vectors has no mean."""
    shape, dtype = jnp.shape(param), jnp.result_type(param)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"Adafactor does not support complex parameters, got {dtype} of shape "
            f"{shape}. Train the real and the imaginary part as two tables."
        )
    if (len(shape) > 1) == (mean_over is None):
        return None
    axes = list(range(len(shape)))
    if mean_over is not None:
        del axes[mean_over]
    return full_along(param, 0, accumulator_dtype(dtype), tuple(axes))


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

    The second moment of a `[num_rows, D]` table is kept as `num_rows + D` numbers, the
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
    _check_hyperparameters(learning_rate, beta2_decay, eps, d, weight_decay)
    # Parameters that do not decay are not read for it.
    decays = not isinstance(weight_decay, NUMBER) or weight_decay != 0
    numbers = functools.partial(
        step_numbers,
        beta2_decay=beta2_decay,
        eps=eps,
        d=d,
        weight_decay=weight_decay if decays else None,
        maximize=maximize,
    )

    def init_fn(params: optax.Params) -> SparseAdafactorState:
        row, col, v = (
            jax.tree.map(functools.partial(_init_moment, mean_over=axis), params)
            for axis in (-1, -2, None)
        )
        return SparseAdafactorState(jnp.zeros([], jnp.int32), row, col, v)

    def update_fn(
        updates: optax.Updates,
        state: SparseAdafactorState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SparseAdafactorState]:
        del extra_args
        if params is None:
            raise ValueError(
                "sparse_adafactor scales its steps by the parameters, got none. Call "
                "update(updates, state, params)."
            )
        check_state_class(state, SparseAdafactorState, "sparse_adafactor")
        check_moment(state.count, (), "count")
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def one(grad: Any, param: Any, row: Any, col: Any, v: Any) -> Any:
            if grad is None:
                return grad, row, col, v
            check_gradient(grad, param)
            param = jnp.asarray(param)  # may be a number
            dtype = accumulator_dtype(grad.dtype, param.dtype)
            step = numbers(count, rate, param.dtype, dtype)
            update = update_sparse if is_bcoo(grad) else update_dense
            _check_moments(row, col, v, param.shape)
            moments = (row, col) if v is None else (v,)
            new, moments = update(grad, param, moments, step)
            return (new, *moments, None) if v is None else (new, None, None, *moments)

        treedef: Any
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        olds = leaves_like(treedef, params, "Parameters", "gradients")
        trees = (
            leaves_like(treedef, moments, "The moments", "gradients")
            for moments in state[1:]
        )
        results = [one(*leaves) for leaves in zip(grads, olds, *trees, strict=True)]
        updates, row, col, v = (
            treedef.unflatten([result[i] for result in results]) for i in range(4)
        )
        return updates, SparseAdafactorState(count, row, col, v)

    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update_fn)
