"""The formula of Adafactor, on whole arrays and on touched rows."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from ._moves import apart, gather_rows, in_bounds, scatter_rows
from ._rows import keep_real, touched_rows, with_rows
from ._sparse_adam import Scalar

Moments = tuple[jax.Array, ...]


class Step(NamedTuple):
    """The numbers of one step of one leaf, all of the type in which it computes."""

    sign: jax.Array  # -1 to maximize
    weight: jax.Array  # of the new squares in their moving averages
    size: jax.Array  # of the step, relative to the parameter's
    decay: jax.Array  # of the parameter: learning rate times weight decay
    eps1: jax.Array
    eps2: jax.Array
    d: jax.Array


@functools.partial(jax.jit, static_argnames=("param_dtype", "dtype", "maximize"))
def step_numbers(
    count: jax.Array,
    learning_rate: Scalar,
    param_dtype: Any,
    dtype: Any,
    *,
    beta2_decay: Scalar,
    eps: tuple[Scalar | None, Scalar],
    d: Scalar,
    weight_decay: Scalar,
    maximize: bool,
) -> Step:
    """The numbers of step `count`, the first step being 1; all may be traced."""
    eps1 = jnp.finfo(param_dtype).eps if eps[0] is None else eps[0]
    count = count.astype(dtype)
    rate = jnp.asarray(learning_rate, dtype).reshape(())
    return Step(
        sign=jnp.asarray(-1 if maximize else 1, dtype),
        weight=count ** jnp.asarray(beta2_decay, dtype),
        size=jnp.minimum(rate, jax.lax.rsqrt(count)),
        decay=rate * jnp.asarray(weight_decay, dtype),
        eps1=jnp.asarray(eps1, dtype),
        eps2=jnp.asarray(eps[1], dtype),
        d=jnp.asarray(d, dtype),
    )


def _at_least(x: jax.Array, bound: jax.Array | float) -> jax.Array:
    """`max`, where a NaN is the bound, as Python's is and so torch's Adafactor."""
    return jnp.where(x > bound, x, bound)


def _average(old: jax.Array, new: jax.Array, weight: jax.Array) -> jax.Array:
    """Two positive terms, so that neither cancels where the other is far larger."""
    return (1 - weight) * old + weight * new


def _factored(
    square: jax.Array, moments: Moments, step: Step, height: Any
) -> tuple[jax.Array, Moments]:
    """Estimates the second moment from its means over the last two axes."""
    v_row, v_col = moments
    v_row = _average(v_row, jnp.mean(square, axis=-1), step.weight)
    v_col = _average(v_col, jnp.sum(square, axis=-2) / height, step.weight)
    mean = jnp.sum(v_row, axis=-1, keepdims=True) / height
    share = v_row / jnp.maximum(mean, step.eps1)
    return share[..., :, None] * v_col[..., None, :], (v_row, v_col)


def _adafactor_rows(
    grad: jax.Array, param: jax.Array, moments: Moments, step: Step, num_rows: Any
) -> tuple[jax.Array, Moments]:
    """The formula, on a whole array or on touched rows.

    Args:
      grad: `[rows, ...]`, zero in rows that are padding.
      param: The same rows of the parameter, zero in padding.
      moments: `(v_row, v_col)` or `(v,)`, zero in padding.
      step: The numbers of the step.
      num_rows: How many of the rows are not padding, at least 1.
    """
    size = num_rows * math.prod(grad.shape[1:])
    grad = step.sign * grad
    square = grad * grad
    if grad.ndim > 1:
        height = num_rows if grad.ndim == 2 else grad.shape[-2]
        estimate, moments = _factored(square, moments, step, height)
    else:
        estimate = _average(moments[0], square, step.weight)
        moments = (estimate,)
    root = jax.lax.rsqrt(jnp.maximum(estimate, step.eps1 * step.eps1))
    # Zero over zero is zero: in padding, and with eps1 = 0.
    update = jnp.where(grad == 0, 0, grad * root)
    relative = _at_least(jnp.sqrt(jnp.sum(param * param) / size), step.eps2)
    clip = _at_least(jnp.sqrt(jnp.sum(update * update) / size) / step.d, 1.0)
    return -relative * step.size / clip * update - step.decay * param, moments


@jax.jit
def update_sparse(
    grad: BCOO, param: jax.Array, moments: Moments, step: Step
) -> tuple[BCOO, Moments]:
    """One leaf with a row-sparse gradient; reads and writes its touched rows."""
    dtype = step.size.dtype
    rows = touched_rows(grad, dtype)
    # Only the columns of one matrix are shared by its rows.
    is_row = (True, grad.ndim > 2)

    def compact(table: jax.Array) -> jax.Array:
        return gather_rows(table, rows.indices).astype(dtype)

    num_rows = jnp.sum(in_bounds(rows.indices, grad.shape)).astype(dtype)
    # The columns' average does not move where no row was touched.
    step = step._replace(weight=jnp.where(num_rows > 0, step.weight, 0))
    small = tuple(
        compact(moment) if row else moment.astype(dtype)
        for moment, row in zip(moments, is_row, strict=False)
    )
    update, new = _adafactor_rows(
        rows.data, compact(param), small, step, jnp.maximum(num_rows, 1)
    )
    moments = tuple(
        scatter_rows(old, rows.indices, one) if row else one.astype(old.dtype)
        for old, one, row in zip(moments, new, is_row, strict=False)
    )
    update = apart(keep_real(rows, update, grad.shape))  # it comes from the parameter
    return with_rows(grad, rows, update), moments


@jax.jit
def update_dense(
    grad: jax.Array, param: jax.Array, moments: Moments, step: Step
) -> tuple[jax.Array, Moments]:
    """One leaf with a dense gradient: every row is touched."""
    dtype = step.size.dtype
    num_rows = jnp.asarray(max(1, math.prod(grad.shape[:1])), dtype)
    arrays = (grad, param, tuple(moments))
    grad_, param, old = jax.tree.map(lambda x: x.astype(dtype), arrays)
    update, new = _adafactor_rows(grad_, param, old, step, num_rows)
    new = tuple(n.astype(m.dtype) for n, m in zip(new, moments, strict=True))
    return update.astype(grad.dtype), new
