"""The formula of Adafactor, on whole arrays and on touched rows."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import shard_columns_like
from .._rows.coalesce import bcoo_like, touched_rows
from .._rows.map_rows import map_rows, reduce_rows
from .._rows.padding import in_bounds
from .hyperparameters import Scalar

Moments = tuple[jax.Array, ...]


class Step(NamedTuple):
    """The numbers of one step of one leaf, all of the type in which it computes."""

    sign: jax.Array  # -1 to maximize
    weight: jax.Array  # of the new squares in their moving averages
    size: jax.Array  # of the step, relative to the parameter's
    decay: jax.Array | None  # of the parameter: learning rate times weight decay
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
    weight_decay: Scalar | None,
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
        decay=None if weight_decay is None else rate * jnp.asarray(weight_decay, dtype),
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


def _first_sums(grad: jax.Array, rows: Moments, step: Step) -> Moments:
    """Sums over rows that the direction, or the size of the step, depends on."""
    *moments, param = rows
    squares = jnp.sum(param * param)
    if grad.ndim != 2:  # moments of other rows do not matter to a row
        return (squares,)
    square = grad * grad
    v_row = _average(moments[0], jnp.mean(square, axis=-1), step.weight)
    return squares, jnp.sum(square, axis=0), jnp.sum(v_row)


def _direction(
    grad: jax.Array, moments: Moments, shared: Moments, step: Step
) -> tuple[jax.Array, Moments]:
    """The gradient over the root of the second moment, and the new moments of rows.

    Estimates the second moment from its means over the last two axes, of which that
    over the rows of a table, and the mean of the others, are what all rows share.
    """
    square = grad * grad
    if grad.ndim < 2:
        estimate = _average(moments[0], square, step.weight)
        moments = (estimate,)
    else:
        v_row = _average(moments[0], jnp.mean(square, axis=-1), step.weight)
        if shared:
            v_col, mean = shared
            moments = (v_row,)
        else:
            v_col = _average(moments[1], jnp.mean(square, axis=-2), step.weight)
            mean = jnp.mean(v_row, axis=-1, keepdims=True)
            moments = v_row, v_col
        share = v_row / jnp.maximum(mean, step.eps1)
        estimate = share[..., :, None] * v_col[..., None, :]
    root = jax.lax.rsqrt(jnp.maximum(estimate, step.eps1 * step.eps1))
    # Zero over zero is zero: in padding, and with eps1 = 0.
    return jnp.where(grad == 0, 0, step.sign * grad * root), moments


def _squares(grad: jax.Array, rows: Moments, shared: Moments, step: Step) -> jax.Array:
    direction, _ = _direction(grad, rows, shared, step)
    return jnp.sum(direction * direction)


def _last(
    grad: jax.Array, rows: Moments, shared: Moments, step: Step, size: jax.Array
) -> tuple[jax.Array, Moments]:
    """The update and the new moments of rows."""
    direction, moments = _direction(grad, rows, shared, step)
    update = size * direction
    if step.decay is not None:
        update = update - step.decay * rows[-1]
    return update, moments


def _adafactor_rows(
    reduce: Callable[..., Any],
    change: Callable[..., Any],
    moments: Moments,
    step: Step,
    num_rows: jax.Array,
    row_size: int,
) -> tuple[jax.Array, Moments]:
    """The formula, on a whole array or on touched rows.

    Args:
      reduce: `reduce(terms, *args)` adds up `terms(grad, (*moments, param), *args)`
        over the rows.
      change: `change(function, *args)` returns what
        `function(grad, (*moments, param), *args)` returns, and the moments changed;
        the parameter is there if it decays.
      moments: What all rows share: `(v_col,)` of a table of vectors, else nothing.
      step: The numbers of the step.
      num_rows: How many rows there are, at least 1.
      row_size: Numbers in a row.
    """
    squares, *sums = reduce(_first_sums, step)
    shared: Moments = ()
    if sums:
        columns, v_row = sums
        v_col = _average(moments[0], columns / num_rows, step.weight)
        shared = v_col, v_row / num_rows
    size = num_rows * row_size
    relative = _at_least(jnp.sqrt(squares / size), step.eps2)
    root = jnp.sqrt(reduce(_squares, shared, step) / size)
    factor = -relative * step.size / _at_least(root / step.d, 1.0)
    update, new = change(_last, shared, step, factor)
    return update, (*new, *shared[:1])


def _cast(arrays: Moments, like: jax.Array | Moments) -> Moments:
    likes = like if isinstance(like, tuple) else (like,) * len(arrays)
    return tuple(x.astype(y.dtype) for x, y in zip(arrays, likes, strict=True))


def _on_cast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function with the rows of tables in the type in which it computes."""
    return lambda grad, rows, *args: function(grad, _cast(rows, grad), *args)


def _split(moments: Moments, grad: BCOO | jax.Array) -> tuple[Moments, Moments]:
    """Moments of rows; and what is shared by all: the columns of one matrix."""
    number = 1 if grad.ndim == 2 else len(moments)
    return moments[:number], moments[number:]


@jax.jit
def update_sparse(
    grad: BCOO, param: jax.Array, moments: Moments, step: Step
) -> tuple[BCOO, Moments]:
    """One leaf with a row-sparse gradient; reads and writes its touched rows."""
    rows = touched_rows(grad, step.size.dtype)
    rows = rows._replace(data=shard_columns_like(param, rows.data))
    num_rows = jnp.sum(in_bounds(rows.indices, grad.shape)).astype(step.size.dtype)
    # The columns' average does not move where no row was touched.
    step = step._replace(weight=jnp.where(num_rows > 0, step.weight, 0))
    tables, shared = _split(moments, grad)

    def reduce(terms: Any, *args: Any) -> Any:
        return reduce_rows(_on_cast(terms), rows, (*tables, param), *args)

    def change(function: Any, *args: Any) -> Any:
        read = () if step.decay is None else (param,)
        function = _on_cast(function)
        return map_rows(function, rows, tables, *args, read=read, is_reduced=True)

    update, new = _adafactor_rows(
        reduce,
        change,
        _cast(shared, step.size),
        step,
        jnp.maximum(num_rows, 1),
        math.prod(rows.data.shape[1:]),
    )
    return bcoo_like(grad, rows, update), _cast(new, moments)


@jax.jit
def update_dense(
    grad: jax.Array, param: jax.Array, moments: Moments, step: Step
) -> tuple[jax.Array, Moments]:
    """One leaf with a dense gradient: every row is touched."""
    array = grad.astype(step.size.dtype)
    of_rows, shared = _split(moments, grad)

    def whole(function: Any, *args: Any) -> Any:
        return _on_cast(function)(array, (*of_rows, param), *args)

    update, new = _adafactor_rows(
        whole,
        whole,
        _cast(shared, array),
        step,
        jnp.asarray(max(1, math.prod(grad.shape[:1])), array.dtype),
        math.prod(grad.shape[1:]),
    )
    return update.astype(grad.dtype), _cast(new, moments)
