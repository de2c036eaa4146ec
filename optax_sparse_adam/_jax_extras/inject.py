"""Rows with the derivative of `rows + delta`, without the addition."""

from typing import Any

import jax

from .sharding import mesh_of
from .varying_axes import vary_like


# `rows + delta` would do, but for an addition where XLA does not see that the delta is
# zero, as in loops, and for rows of -0.0. Symbolic zeros: a table is no argument of
# what JAX differentiates, so the tangent of its rows is one, and nothing is added.
@jax.custom_jvp
def with_derivative_of(rows: jax.Array, delta: jax.Array) -> jax.Array:
    """`rows`, whose tangent is the sum of both tangents."""
    return rows


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    present = [
        x for x in tangents if not isinstance(x, jax.custom_derivatives.SymbolicZero)
    ]
    return primals[0], sum(present[1:], start=present[0])


with_derivative_of.defjvp(_jvp, symbolic_zeros=True)


def inject(rows: jax.Array, delta: jax.Array) -> jax.Array:
    """`rows`, with the derivative of `rows + delta`.

    `delta` is zero. Nothing is added to the rows: whoever differentiates with respect
    to `delta` differentiates with respect to the rows at this place of the program.
    """
    mesh = mesh_of(rows)
    if mesh.explicit_axes:  # tangents of one sum have one layout
        delta = jax.reshard(delta, jax.typeof(rows).sharding)
    return with_derivative_of(rows, vary_like(delta, rows))
