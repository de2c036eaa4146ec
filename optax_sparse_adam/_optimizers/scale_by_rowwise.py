"""The row-wise second moments, as ordinary transformations of dense gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import full_along, laid_out
from .._rows.checks import check_dense
from .._rows.coalesce import accumulator_dtype
from .sparse_adam import NUMBER, Scalar, check_hyperparameters, one_minus_power


def _init_moment(params: optax.Params, value: Scalar) -> optax.Updates:
    """One number for each vector along the last axis, of float32 at least."""

    def init(param: jax.Array) -> jax.Array:
        dtype = accumulator_dtype(jnp.result_type(param))
        axes = range(max(1, jnp.ndim(param) - 1)) if jnp.ndim(param) else ()
        return full_along(param, value, dtype, tuple(axes))

    return jax.tree.map(init, params)


def _mean_square(grad: jax.Array, moment: jax.Array) -> jax.Array:
    square = jnp.square(grad.astype(moment.dtype))
    return jnp.mean(square, axis=-1) if grad.ndim > 1 else square


def _divide(update: jax.Array, moment: jax.Array, eps: Scalar) -> jax.Array:
    divisor = jnp.sqrt(moment) + jnp.asarray(eps, moment.dtype)
    return update / (divisor[..., None] if update.ndim > 1 else divisor)


def _map_grads(
    function: Any, old: optax.Updates, grads: optax.Updates, *rest: optax.Updates
) -> Any:
    """`function(old, grad, *rest)` for each leaf; `old` where the gradient is None."""
    return jax.tree.map(
        lambda grad, old, *rest: old if grad is None else function(old, grad, *rest),
        grads,
        old,
        *rest,
        is_leaf=lambda grad: grad is None,
    )


def _average(old: jax.Array, new: jax.Array, b: Scalar) -> jax.Array:
    return old + jnp.asarray(1 - b, old.dtype) * (new - old)


class ScaleByRowwiseRssState(NamedTuple):
    """State of `scale_by_rowwise_rss`.

    Attributes:
      sum_of_squares: Tree like the parameters, without their last axis: sum of the
        squared gradient's means over that axis.
    """

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
    start = initial_accumulator_value
    if isinstance(start, NUMBER) and not start >= 0:
        raise ValueError(
            f"Invalid initial_accumulator_value: {start}. It must be at least 0."
        )
    if isinstance(eps, NUMBER) and not eps > 0:
        # Rows without a gradient, padding among them, would be zero over zero.
        raise ValueError(f"Invalid eps: {eps}. It must be above 0.")

    def init_fn(params: optax.Params) -> ScaleByRowwiseRssState:
        return ScaleByRowwiseRssState(_init_moment(params, initial_accumulator_value))

    def update_fn(
        updates: optax.Updates,
        state: ScaleByRowwiseRssState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ScaleByRowwiseRssState]:
        del params
        check_dense(updates, "scale_by_rowwise_rss", "scale_by_rowwise_rss()")
        sums = _map_grads(
            lambda s, g: s + _mean_square(g, s), state.sum_of_squares, updates
        )
        updates = _map_grads(
            lambda g, _, s: _divide(g.astype(s.dtype), s, eps).astype(g.dtype),
            updates,
            updates,
            sums,
        )
        return updates, ScaleByRowwiseRssState(sums)

    return optax.GradientTransformation(laid_out(init_fn), update_fn)


class ScaleByRowwiseAdamState(NamedTuple):
    """State of `scale_by_rowwise_adam`.

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
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Rescales gradients by Adam with one second moment for each row.

    `rowwise_adam` without laziness, weight decay and learning rate; see there. An
    ordinary transformation for dense gradients; `lazy` lifts it to row-sparse ones.
    A gradient of `None` changes nothing.

    Args:
      b1: Decay of the moving average of the gradient.
      b2: Decay of the moving average of the squared gradient.
      eps: Added to the root of the bias-corrected second moment.
      mu_dtype: Type of `mu`; the parameter's own by default.

    Returns:
      An `optax.GradientTransformation` with state `ScaleByRowwiseAdamState`.

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
    check_hyperparameters(b1, b2, eps)
    if mu_dtype is not None:
        mu_dtype = jax.dtypes.canonicalize_dtype(mu_dtype)

    def init_fn(params: optax.Params) -> ScaleByRowwiseAdamState:
        return ScaleByRowwiseAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(functools.partial(full_along, dtype=mu_dtype), params),
            nu=_init_moment(params, 0.0),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByRowwiseAdamState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ScaleByRowwiseAdamState]:
        del params
        check_dense(updates, "scale_by_rowwise_adam", "scale_by_rowwise_adam()")
        count = optax.safe_increment(state.count)

        def scale(g: jax.Array, _: Any, m: jax.Array, v: jax.Array) -> jax.Array:
            m = m / one_minus_power(b1, count, m.dtype)
            v = v / one_minus_power(b2, count, v.dtype)
            return _divide(m, v, eps).astype(g.dtype)

        mu = _map_grads(
            lambda m, g, v: _average(m.astype(v.dtype), g.astype(v.dtype), b1),
            state.mu,
            updates,
            state.nu,
        )
        nu = _map_grads(
            lambda v, g: _average(v, _mean_square(g, v), b2), state.nu, updates
        )
        updates = _map_grads(scale, updates, updates, mu, nu)
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)
        return updates, ScaleByRowwiseAdamState(count, mu, nu)

    return optax.GradientTransformation(laid_out(init_fn), update_fn)
