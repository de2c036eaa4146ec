"""What all optimisers share: checks of hyper-parameters and gradients, `1 - b**t`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._rows.checks import check_bcoo, is_bcoo

Scalar = float | jax.Array
NUMBER = (int, float, np.number)  # what is known while tracing


def one_minus_power(b: Scalar, count: jax.Array, dtype: Any) -> jax.Array:
    """`1 - b**count` without the cancellation, which costs 1e-4 in float32.

    The logarithm of a Python number is taken in double precision.
    """
    if isinstance(b, NUMBER):
        log_b: Scalar = math.log(b) if b > 0 else -math.inf
    else:
        log_b = jnp.log(jnp.asarray(b, dtype))
    return -jnp.expm1(count.astype(dtype) * jnp.asarray(log_b, dtype))


def check_hyperparameters(b1: Scalar, b2: Scalar, eps: Scalar) -> None:
    for index, b in enumerate((b1, b2)):
        if isinstance(b, NUMBER) and not 0.0 <= b < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {b}. "
                f"b{index + 1} must be at least 0 and below 1."
            )
    if isinstance(eps, NUMBER) and not eps > 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}. eps must be above 0.")


def check_leaf(grad: Any, nu: Any) -> None:
    if is_bcoo(grad):
        check_bcoo(grad, jnp.shape(nu))
    elif not jnp.issubdtype(jnp.result_type(grad), jnp.floating):
        raise TypeError(
            "Gradients must be floating-point arrays, BCOO matrices or None, got "
            f"{jnp.result_type(grad)} of shape {jnp.shape(grad)}. Integer and complex "
            "parameters cannot be trained; give None for them."
        )
    elif jnp.shape(grad) != jnp.shape(nu):
        raise ValueError(
            "A gradient must have the shape of its parameter, got a gradient of shape "
            f"{jnp.shape(grad)} for a parameter of shape {jnp.shape(nu)}."
        )
