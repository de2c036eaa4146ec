"""Any optax transformation on low-precision parameters, rounded without bias."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._rows.checks import check_dense, is_leaf, leaves_like
from .._rows.stale import refuse_stale_states
from .hyperparameters import (
    check_state_class,
    check_state_shapes,
    check_transformation,
    floating_type,
)
from .rounding import random_bits, round_update, round_value


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      key: Random key of the next step.
      inner_state: State of the inner transformation. Arrays of a low-precision type are
        rounded stochastically at each step.
    """

    key: jax.Array
    inner_state: optax.OptState


def _is_low(x: Any) -> bool:
    dtype = jnp.dtype(float) if x is None else jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _widened(x: Any, dtype: DTypeLike = jnp.float32) -> Any:
    return jnp.asarray(x, dtype) if _is_low(x) else x


def stochastic_rounding(
    inner: optax.GradientTransformation,
    key: jax.Array | int,
    *,
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Lets low-precision parameters learn as float32 ones do, on average.

    A parameter rounded to nearest does not change while its updates are below half of
    the distance to the next value. For bfloat16 that is 1/256 to 1/512 of its value: a
    parameter of 1.0 never notices steps of 0.001. Here `inner` computes in float32, and
    the new value, between the adjacent low-precision values `a` and `b`, is
    rounded to one of them at random, so that it is right on average:

    .. math::

      x = p + u, \qquad
      p \leftarrow \begin{cases} b & \text{with probability } (x - a) / (b - a) \\
        a & \text{otherwise} \end{cases}

    `inner` sees gradient, parameter and state of the types below 32 bits (bfloat16,
    float16, the float8 types) in float32. Its new state is rounded in the same way to
    the type it had: a bfloat16 second moment with `b2 = 0.999` moves, too, where
    rounding to nearest would hold it. `state_dtype=jnp.float32` keeps the moments in
    float32 instead, for twice the memory; float8 tables need it, as second moments of
    8 bits become zero or leave the type. Leave `mu_dtype` and similar options of
    `inner` unset then: `inner` would round to nearest by itself. Scalars of the state
    stay in float32. Parameters of 32 bits or more, and `None`, are handed through.

    This is an ordinary transformation for dense gradients, and `lazy` lifts it to
    row-sparse ones: rows that the gradient does not hold keep all their bits, and
    random bits are drawn for the others only. The updates have the type of the
    gradient, and round the parameter when they are added to it, by `apply_updates`,
    `optax.apply_updates`, Flax's `TrainState` or `nnx.Optimizer`. It belongs around all
    that changes the update: an update that is scaled afterwards leads to another value.
    It belongs around `per_row`, too; inside, all rows would share their random bits.
    And around `inject_hyperparams`, which otherwise keeps the hyper-parameters in the
    type of the parameters: in bfloat16, 0.999 is 1.

    .. note::

      `x` is `p + u` in float32 arithmetic. Where updates of the gradient's type cannot
      reach the values adjacent to `x` (`p` is far larger than `x`, or their sum is a
      tie, rounded to even), the nearest values that they reach, below and above `x`,
      take their place. Finite values beyond the largest one of the type become that
      one; infinities and NaN stay what they are (float8 types without infinities have
      NaN for both).

    On a CPU the random bits and the rounding take longer than the update of the rows.

    Args:
      inner: The transformation, or a chain of them; learning rate included.
      key: A key of `jax.random.key` or `jax.random.PRNGKey`, or a seed. The state holds
        it and splits it at each update: the same key gives the same bits again.
      state_dtype: The floating-point type for which `inner` is initialised, in place of
        that of the low-precision parameters.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `StochasticRoundingState`.
      Its `update` needs `params`; without, or for other trees, it raises `ValueError`,
      for row-sparse gradients outside of `lazy` `TypeError`.

    Raises:
      TypeError: If `state_dtype` is not a floating-point type.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_sparse_adam as osa
      >>> table = jnp.ones((1000, 512), jnp.bfloat16)
      >>> ids, adam = jnp.array([3, 3, 7]), optax.adam(1e-3)
      >>> grad = osa.grad(lambda t: jnp.sum(t[ids]).astype(jnp.float32))(table)
      >>> for tx in (adam, osa.stochastic_rounding(adam, jax.random.key(0))):
      ...     tx = osa.lazy(tx)
      ...     new, state, update = table, tx.init(table), jax.jit(tx.update)
      ...     for _ in range(10):
      ...         updates, state = update(grad, state, new)
      ...         new = osa.apply_updates(new, updates)
      ...     print([round(float(new[i].astype(float).mean()), 3) for i in (2, 3)])
      [1.0, 1.0]
      [1.0, 0.99]

    References:
      Gupta et al., `Deep Learning with Limited Numerical Precision
      <https://arxiv.org/abs/1502.02551>`_, 2015; Zamirai et al., `Revisiting BFloat16
      Training <https://arxiv.org/abs/2010.06192>`_, 2020; `FBGEMM
      <https://docs.pytorch.org/FBGEMM>`_, which does so to tables of low precision
      unless configured otherwise (`stochastic_rounding`).
    """
    check_transformation(inner, "stochastic_rounding")
    inner = optax.with_extra_args_support(inner)
    state_dtype = floating_type(state_dtype, "state_dtype")

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        is_seed = not jnp.shape(key) and jnp.issubdtype(
            jnp.result_type(key), jnp.integer
        )
        start = jax.random.key(key) if is_seed else jnp.copy(key)
        refuse_stale_states(jax.eval_shape(inner.init, params), "stochastic_rounding")
        return StochasticRoundingState(start, _init(inner.init, params, state_dtype))

    def update_fn(
        updates: optax.Updates,
        state: StochasticRoundingState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        treedef: Any
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        if params is None:
            raise ValueError(
                "stochastic_rounding needs the parameters, which it rounds. Call "
                "update(updates, state, params)."
            )
        check_dense(grads, "stochastic_rounding", "stochastic_rounding(inner, key)")
        olds = leaves_like(treedef, params, "Parameters", "gradients")
        check_state_class(state, StochasticRoundingState, "stochastic_rounding")
        check_state_shapes(inner.init, params, state.inner_state, "stochastic_rounding")
        update = functools.partial(inner.update, **extra_args)
        if any(map(_is_low, olds)):
            return _rounded_update(update, treedef, grads, olds, state)
        updates, inner_state = update(updates, state.inner_state, params)
        return updates, state._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(
    init: Callable[[Any], Any], params: optax.Params, state_dtype: Any
) -> optax.OptState:
    """A new state of the inner transformation."""

    def init_state(params: optax.Params) -> optax.OptState:
        def widened(dtype: DTypeLike) -> optax.OptState:
            return init(jax.tree.map(lambda x: _widened(x, dtype), params))

        state = init(params) if state_dtype is None else widened(state_dtype)
        if all(jnp.ndim(x) or not _is_low(x) for x in jax.tree.leaves(state)):
            return state
        # Hyper-parameters, such as those of inject_hyperparams: b2 would be 1.
        wide = widened(jnp.float32)
        return jax.tree.map(lambda x, y: x if jnp.ndim(x) else y, state, wide)

    leaves = jax.tree.leaves(params)
    if not any(map(_is_low, leaves)):
        return init(params)
    # Under `jit`, the widened parameters, of which only the shapes are used, are never
    # allocated; but zeros would not be spread over the parameters' devices.
    is_spread = any(
        isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
        for leaf in leaves
        if not isinstance(leaf, jax.core.Tracer)
    )
    return init_state(params) if is_spread else jax.jit(init_state)(params)


def _rounded_update(
    update: Callable[..., Any],
    treedef: Any,
    grads: list[Any],
    params: list[Any],
    state: StochasticRoundingState,
) -> tuple[optax.Updates, StochasticRoundingState]:
    """The update of the inner transformation in float32, rounded."""
    # One key for each array that may be rounded, whether or not it is: so the bits of a
    # leaf do not depend on the types of the others.
    structure: Any
    leaves, structure = jax.tree.flatten(state.inner_state)
    key, *keys = jax.random.split(state.key, 1 + len(grads) + len(leaves))
    draw = random_bits(iter(keys))
    pairs = list(zip(grads, params, strict=True))
    wide = [_widened(g) if _is_low(p) else g for g, p in pairs]
    updates, inner_state = update(
        treedef.unflatten(wide),
        structure.unflatten(map(_widened, leaves)),
        treedef.unflatten(map(_widened, params)),
    )
    # The update is rounded such that parameter + update is one of the two adjacent
    # values; the state is stored, so it is rounded itself.
    results = treedef.flatten_up_to(updates)
    for i, (grad, param) in enumerate(pairs):
        if grad is not None and _is_low(param):
            bits = draw(param.shape)
            results[i] = round_update(bits, param, results[i], grad.dtype)
    arrays = structure.flatten_up_to(inner_state)
    for i, leaf in enumerate(leaves):
        if arrays[i] is not None and _is_low(leaf):
            arrays[i] = round_value(draw(leaf.shape), arrays[i], leaf.dtype)
    new_state = StochasticRoundingState(key, structure.unflatten(arrays))
    return treedef.unflatten(results), new_state
