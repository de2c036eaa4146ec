"""What all optimisers share: `1 - b**t`, and checks of their arguments."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._rows.checks import check_bcoo, is_bcoo, remedy_of
from .._rows.stale import class_names

Scalar = float | jax.Array
NUMBER = (int, float, np.number)  # what is known while tracing


def one_minus_power(b: Scalar, count: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`1 - b**count` without the cancellation, which costs 1e-4 in float32.

    The logarithm of a Python number is taken in double precision.
    """
    if isinstance(b, NUMBER):
        log_b: Scalar = math.log(b) if b > 0 else -math.inf
    else:
        log_b = jnp.log(jnp.asarray(b, dtype))
    return -jnp.expm1(count.astype(dtype) * jnp.asarray(log_b, dtype))


def check_at_least(name: str, value: Any, low: float, hint: str = "") -> None:
    """Raises for a Python number below `low`; traced values and schedules pass."""
    if isinstance(value, NUMBER) and not value >= low:
        raise ValueError(f"Invalid {name}: {value}. It must be at least {low}.{hint}")


def check_betas(b1: Scalar, b2: Scalar) -> None:
    for index, b in enumerate((b1, b2)):
        dtype = jnp.result_type(b)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant < 10:
            raise TypeError(
                f"b{index + 1} must be a number, or an array of a type in which "
                f"0.999 is not 1, got one of {dtype}. optax.inject_hyperparams casts "
                "hyper-parameters to the type of the parameters: give it "
                'static_args=("b1", "b2").'
            )
        if isinstance(b, NUMBER) and not 0.0 <= b < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {b}. "
                f"b{index + 1} must be at least 0 and below 1."
            )


def check_eps(eps: Scalar) -> None:
    if isinstance(eps, NUMBER) and not eps > 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}. eps must be above 0.")


def floating_type(dtype: DTypeLike | None, name: str) -> Any:
    """This type as JAX has it; raises for others, in which moments would be zeros."""
    if dtype is None:
        return None
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} must be a floating-point type, got {dtype}; leave it out for that "
            "of the parameters."
        )
    return dtype


def check_leaf(grad: Any, like: Any) -> None:
    """Raises unless this is a gradient of a parameter, or of its moments' shape."""
    if is_bcoo(grad):
        check_bcoo(grad, jnp.shape(like))
    elif not jnp.issubdtype(jnp.result_type(grad), jnp.floating):
        raise TypeError(
            "Gradients must be floating-point arrays, BCOO matrices or None, got "
            f"{jnp.result_type(grad)} of shape {jnp.shape(grad)}. Integer and complex "
            "parameters cannot be trained: "
            + remedy_of(jnp.result_type(grad), "give None for integers.")
        )
    elif jnp.shape(grad) != jnp.shape(like):
        raise ValueError(
            "A gradient must have the shape of its parameter, got a gradient of shape "
            f"{jnp.shape(grad)} for a parameter of shape {jnp.shape(like)}."
        )


def check_transformation(inner: Any, name: str) -> None:
    """Raises unless this is what optax makes of an optimiser's arguments."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        name_of_inner = getattr(inner, "__name__", repr(inner))
        raise TypeError(
            f"{name} takes an optax transformation, with `init` and `update`, got "
            f"{type(inner).__name__} {name_of_inner}. Call the function that makes "
            "one, as sparse_adam(1e-3) in place of sparse_adam."
        )


def check_state_class(state: Any, expected: type, name: str) -> None:
    """Raises unless this is a state of the optimiser of this name."""
    if not isinstance(state, expected):
        fields = ", ".join(getattr(expected, "_fields", ()))
        raise TypeError(
            f"{name} takes its own state, {expected.__name__}({fields}), got "
            f"{class_names(state)}. Create it with `init`, or copy the matching "
            "arrays of the other state into it."
        )


def check_moment(moment: Any, shape: tuple[int, ...] | None, name: str) -> None:
    """Raises unless a leaf of the state fits its parameter.

    A moment of a table with another number of rows would be used in silence: for rows
    that it lacks a gather reads zeros, and a scatter stores nothing.
    """
    moment_shape = None if moment is None else jnp.shape(moment)
    if moment_shape != shape:
        raise ValueError(
            f"`{name}` must have the shape {shape} for its parameter, got "
            f"{moment_shape}. A state fits the parameters that it was created for: "
            "create it with `init`, or grow and restore all its arrays like the "
            "parameter."
        )


def check_state_shapes(
    init: Callable[[Any], Any], params: Any, state: Any, name: str
) -> None:
    """Raises unless every array of a state has the shape that `init` would give it."""
    expected = jax.tree.leaves(jax.eval_shape(init, params))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if len(leaves) != len(expected):
        raise ValueError(
            f"{name} takes the state that its `init` returns for these parameters, of "
            f"{len(expected)} arrays, got {class_names(state)} of {len(leaves)} "
            "arrays."
        )
    for (path, leaf), like in zip(leaves, expected, strict=True):
        where = f"state{jax.tree_util.keystr(path)} of {name}"
        check_moment(leaf, like.shape, where)
