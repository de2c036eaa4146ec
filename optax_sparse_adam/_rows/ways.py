"""The way that a row at rest has still to go, as a polynomial.

See `resting_rows` for what it is; a few numbers hold it.

As a function of `s = sqrt(v)`, `(s + c) way / m` has its poles at `s = -eps rho_t q^-j`
only. The map `z = (s - c) / (s + c)` takes `s` from `[0, inf)` to `[-1, 1)` and the
poles away from there, so that a polynomial through the values at the Chebyshev nodes
converges, in the first steps, when `rho_t` changes fastest, as `3^-n`, and faster later
(Trefethen, Approximation Theory and Approximation Practice, chapter 8). Where `b2` is
so small that `q^-j` grows before the terms die out, as with the betas 0.9 and 0.95, the
poles come close to `z = 1`. There `z = (sqrt(s) - sqrt(c)) / (sqrt(s) + sqrt(c))` is
better, which has all of them on the unit circle.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Constants(NamedTuple):
    """The constants of one optimiser.

    Attributes:
      log_b1: Logarithm of `b1`.
      log_q: Logarithm of the root of `b2`.
      eps: As given.
      lead: The centre `c` of a way after step `t` is `eps rho_(t + lead)`.
    """

    log_b1: jax.Array
    log_q: jax.Array
    eps: jax.Array
    lead: jax.Array


def is_of_roots(degree: int) -> bool:
    """Whether `z` is that of `sqrt(s)`: an odd number of nodes says so, an even not.

    The number is all that is known while tracing of the betas that a state is for.
    """
    return degree % 2 == 1


def nodes(degree: int) -> np.ndarray:
    """The Chebyshev nodes."""
    z: np.ndarray = np.cos(np.pi * (np.arange(degree) + 0.5) / degree)
    return z


def chebyshev_coefficients(degree: int) -> np.ndarray:
    """The matrix from values at the nodes to coefficients of Chebyshev polynomials."""
    angles = np.outer(np.arange(degree), np.pi * (np.arange(degree) + 0.5) / degree)
    scales = np.where(np.arange(degree) > 0, 2 / degree, 1 / degree)
    matrix: np.ndarray = scales[:, None] * np.cos(angles)
    return matrix


def _monomials(degree: int) -> np.ndarray:
    """The matrix from coefficients of Chebyshev polynomials to those of powers."""
    matrix = np.zeros((degree, degree))
    for n, unit in enumerate(np.eye(degree)):
        matrix[: n + 1, n] = np.polynomial.chebyshev.cheb2poly(unit[: n + 1])
    return matrix


def sum_at_nodes(terms: Any, poles: Any, powers: tuple[Any, Any], z: Any) -> Any:
    """`(s + c) way / m`, a sum over steps, at each `z`.

    Args:
      terms: `a_t / P(T, t)` of each step.
      poles: `eps rho_t / c` of each step.
      powers: `b1^j` and `q^j` of each step.
      z: Where.
    """
    near, far = (1 - z[:, None]) / 2, (1 + z[:, None]) / 2
    if is_of_roots(len(z)):
        scale = near * near + far * far
        near, far = near * near / scale, far * far / scale
    # c / (s + c) and s / (s + c)
    decays = far * powers[1][None, :] + near * poles[None, :]
    return ((terms * powers[0])[None, :] / decays).sum(axis=1)


def polynomial(values: jax.Array, dtype: Any) -> jax.Array:
    """Coefficients of the powers of `z`, from the values at the nodes: `[..., nodes]`.

    Only the result may be cast to a smaller type, for which there are too many nodes.

    By way of coefficients of Chebyshev polynomials, which fall as fast as the entries
    of the second matrix grow: in a product of both matrices large numbers would cancel.
    """
    degree = values.shape[-1]

    def times(matrix: np.ndarray, values: jax.Array) -> jax.Array:
        # Not a matrix product, which some devices compute in lower precision.
        matrix = matrix.reshape((1,) * (values.ndim - 1) + matrix.shape)
        return jnp.sum(jnp.asarray(matrix, values.dtype) * values[..., None, :], -1)

    values = times(chebyshev_coefficients(degree), values)
    # The last ones are rounding errors, except in the first steps. The kernel computes
    # with those that are not zero.
    sizes = jnp.abs(values)
    largest = lax.cummax(sizes, axis=values.ndim - 1, reverse=True)
    is_noise = largest <= jnp.finfo(dtype).eps * sizes[..., :1]  # false for NaN
    values = times(_monomials(degree), jnp.where(is_noise, 0, values))
    return values.astype(dtype)


def way_of(coefficients: Sequence[Any], mu: Any, root: Any, centre: Any) -> jax.Array:
    """The way of rows with this first moment and this root of the second."""
    # `(root - centre) / (root + centre)`, and 1, not NaN, where a root is infinite.
    inverse = 1 / (root + centre)
    z = 1 - 2 * centre * inverse
    if is_of_roots(len(coefficients)):
        centre = jnp.sqrt(centre)
        z = 1 - 2 * centre / (jnp.sqrt(root) + centre)
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    way: jax.Array = mu * inverse * total
    return way


def centre_of_way(constants: Constants, count: jax.Array) -> jax.Array:
    """The centre of the way after step `count`."""
    steps = (count + constants.lead).astype(constants.log_q.dtype)
    return constants.eps * jnp.sqrt(-jnp.expm1(2 * constants.log_q * steps))
