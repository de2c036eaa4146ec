"""The remaining update of a row without gradients, as a polynomial.

After step `T` a row has the moments `m` and `v`. While no gradient follows, dense Adam
moves it at step `t = T + j` by `a_t b1^j m / (q^j sqrt(v) + eps rho_t)`, with
`q = sqrt(b2)`, `rho_t = sqrt(1 - b2^t)` and `a_t = lr_t rho_t / (1 - b1^t)`, after it
has multiplied it by `1 - lr_t wd`. With `P(a, b)` the product of these factors for the
steps after `a` up to `b`, the row's *remaining update* after step `T` is

    r(T, m, v) = sum over j >= 1 of a_t / P(T, t) * b1^j m / (q^j sqrt(v) + eps rho_t)

In the next step `w` becomes `P w - a_t ...` and `r` becomes `P r - a_t ...`, as it
loses its first term and one factor of all others: `w - r` is multiplied by `P`,
whatever the moments are. So a table stores, in place of the value `w` of a row after
its last update, its *projected final value* `w - r(T, m, v)`, and `k = now - T` steps
later

    w = P(T, now) * projected final value + r(now, b1^k m, b2^k v)

All rows share the function `r(now, ...)`, whenever they were updated: nothing is summed
up for a row, and after some hundred steps its remaining update is zero.

Worked example: `lr = 0.1`, `b1 = 0.5`, `b2` near 1, `m = v = 1` after a late step, so
that the updates to come are 0.05, 0.025, 0.0125, ...: `r = 0.1`. A row at 2.0 is stored
as 1.9. Two steps later `b1^2 m = 0.25`, so `r = 0.025`, and the row is at 1.925, as it
is after updates of 0.05 and 0.025.

The polynomial: as a function of `s = sqrt(v)`, `(s + c) r / m` has its poles at
`s = -eps rho_t q^-j` only. The map `z = (s - c) / (s + c)` takes `s` from `[0, inf)` to
`[-1, 1)` and the poles away from there, so that a polynomial through the values at the
Chebyshev nodes converges, in the first steps, when `rho_t` changes fastest, as `3^-n`,
and faster later (Trefethen, Approximation Theory and Approximation Practice, chapter
8). Where `b2` is so small that `q^-j` grows before the terms die out, as with the betas
0.9 and 0.95, the poles come close to `z = 1`. There the map of the roots,
`z = (sqrt(s) - sqrt(c)) / (sqrt(s) + sqrt(c))`, is better, which has all of them on the
unit circle: 17 nodes in place of 38, but 17 in place of 10 with 0.9 and 0.999.
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
      lead: The centre `c` of a remaining update after step `t` is `eps rho_(t + lead)`.
    """

    log_b1: jax.Array
    log_q: jax.Array
    eps: jax.Array
    lead: jax.Array

    @property
    def uses_roots(self) -> bool:
        """Whether `z` is that of roots; the type says so while tracing."""
        return False


class ConstantsOfRoots(Constants):
    """Constants of an optimiser whose `z` is that of roots."""

    @property
    def uses_roots(self) -> bool:
        return True


@jax.custom_jvp
def root_of(nu: jax.Array) -> jax.Array:
    """Of second moments. At zero, where there was no gradient yet, nothing moves it."""
    return jnp.sqrt(nu)


@root_of.defjvp
def _root_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    root = root_of(*primals)
    return root, 0.5 / jnp.where(root > 0, root, jnp.inf) * tangents[0]


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


def sum_at_nodes(
    terms: Any, poles: Any, powers: Sequence[Any], z: Any, *, uses_roots: bool
) -> Any:
    """`(s + c) r / m`, a sum over steps, at each `z`.

    Args:
      terms: `a_t / P(T, t)` of each step.
      poles: `eps rho_t / c` of each step.
      powers: `b1^j` and `q^j` of each step.
      z: Where.
      uses_roots: Whether `z` is that of roots.
    """
    # `(s + c) r / m` is the sum of `a_t / P * b1^j / (q^j far + eps rho_t / c * near)`,
    # with `far = s / (s + c)` and `near = c / (s + c)`. From `z = (s - c) / (s + c)`
    # they are `(1 + z) / 2` and `(1 - z) / 2`. From the z of roots these are the shares
    # of `sqrt(s)` and `sqrt(c)` in their sum, and their squares are as `s` to `c`.
    near, far = (1 - z[:, None]) / 2, (1 + z[:, None]) / 2
    if uses_roots:
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
    behind = np.triu(np.ones((degree, degree), bool)).reshape(
        (1,) * (values.ndim - 1) + (degree, degree)
    )
    # `largest[n]`: the largest of the coefficients n, n + 1, ...
    largest = jnp.max(jnp.where(behind, sizes[..., None, :], 0), axis=-1)
    is_noise = largest <= float(jnp.finfo(dtype).eps) * sizes[..., :1]  # false for NaN
    values = times(_monomials(degree), jnp.where(is_noise, 0, values))
    # Behind a barrier: where a GPU's program takes the result apart, into numbers that
    # all rows share, its fusion would compute the sums again for each of them.
    result: jax.Array = lax.optimization_barrier(values.astype(dtype))
    return result


def remaining_update(
    coefficients: Sequence[Any], mu: Any, root: Any, centre: Any, *, uses_roots: bool
) -> jax.Array:
    """The remaining update of rows, from `m` and `sqrt(v)`."""
    # `(root - centre) / (root + centre)`, and 1, not NaN, where a root is infinite.
    inverse = 1 / (root + centre)
    z = 1 - 2 * centre * inverse
    if uses_roots:
        centre = jnp.sqrt(centre)
        z = 1 - 2 * centre / (jnp.sqrt(root) + centre)
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    remaining: jax.Array = mu * inverse * total
    return remaining


def later(count: jax.Array, steps: jax.Array | int) -> jax.Array:
    """`count + steps`, or the largest number of its type, as `optax.safe_increment`."""
    return count + jnp.minimum(steps, jnp.iinfo(count.dtype).max - count)


def centre_after(constants: Constants, count: jax.Array) -> jax.Array:
    """The centre of the remaining updates after step `count`."""
    steps = later(count, constants.lead).astype(constants.log_q.dtype)
    return constants.eps * jnp.sqrt(-jnp.expm1(2 * constants.log_q * steps))
