"""The formula of Adam, on whole arrays and on touched rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.on_cpu import on_cpu
from .._rows.coalesce import Rows, touched_rows, widened, with_rows
from .._rows.map_rows import map_rows
from ..native import _calls as native

Moments = tuple[jax.Array, ...]
Weights = tuple[float, float]


class Factors(NamedTuple):
    """The scalars of one step, all of the type in which the step computes."""

    sign: jax.Array  # -1 to maximize
    one_minus_b1: jax.Array
    one_minus_b2: jax.Array
    eps: jax.Array
    scale: jax.Array  # of the update: step size and bias corrections


def _adam(
    grad: jax.Array,
    moments: Moments,
    factors: Factors,
    weights: Weights | None = None,
) -> tuple[jax.Array, Moments]:
    """The formula: pure arithmetic on rows, or on a whole dense array.

    `weights` are `1 - b1` and `1 - b2` where they are known while tracing.
    """
    weight1, weight2 = weights or (factors.one_minus_b1, factors.one_minus_b2)
    grad = factors.sign * grad
    mu, nu = (moment.astype(grad.dtype) for moment in moments)
    mu = mu + weight1 * (grad - mu)
    nu = nu + weight2 * (grad * grad - nu)
    return factors.scale * mu / (jnp.sqrt(nu) + factors.eps), (mu, nu)


@functools.partial(jax.jit, static_argnames="weights")
def update_sparse(
    grad: BCOO, moments: Moments, factors: Factors, *, weights: Weights | None = None
) -> tuple[BCOO, Moments]:
    """One leaf with a row-sparse gradient; reads and writes its touched rows."""

    def by_rows(grad: BCOO, moments: Moments, factors: Factors) -> tuple[Rows, Moments]:
        rows = touched_rows(grad, grad.dtype)
        formula = functools.partial(_adam, weights=weights)
        data, moments = map_rows(formula, rows, moments, factors)
        return rows._replace(data=data), moments

    wide = widened(grad, factors.scale.dtype)
    if native.fits(wide, *moments):
        rows, moments = on_cpu(_by_kernel, by_rows, wide, moments, factors)
    else:
        rows, moments = by_rows(wide, moments, factors)
    return with_rows(grad, rows, rows.data), moments


def _by_kernel(grad: BCOO, moments: Moments, factors: Factors) -> tuple[Rows, Moments]:
    rows, moments = native.adam_rows(grad, moments, factors)
    return Rows(*rows), moments


@jax.jit
def update_dense(
    grad: jax.Array, moments: Moments, factors: Factors
) -> tuple[jax.Array, Moments]:
    update, new = _adam(grad.astype(factors.scale.dtype), moments, factors)
    mu, nu = (n.astype(m.dtype) for n, m in zip(new, moments, strict=True))
    return update.astype(grad.dtype), (mu, nu)
