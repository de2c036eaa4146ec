"""A scatter with any formula as its combiner: `table[i] = formula(table[i], row)`.

Problem: a moving average in place needs the combiner `old + weight * (new - old)`.
Cause: XLA's scatter takes any combiner (https://openxla.org/stablehlo/spec#scatter),
and the equation of `lax.scatter` holds it as the parameter `update_jaxpr`, but JAX's
functions offer set, add, multiply, minimum and maximum only. Remedy: bind the equation
that `lax.scatter` traces to, with another jaxpr in that parameter. Safe: JAX versions
without the parameter are noticed (`takes_combiners`), and rows are then gathered,
computed and scattered. Test: `tests/rows/test_scatter_combining.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .varying_axes import vary, varying_axes

Combiner = Callable[[jax.Array, jax.Array], jax.Array]

_COMBINER, _CONSTANTS = "update_jaxpr", "update_consts"


@functools.cache
def _equation() -> Any:
    """The equation that `lax.scatter` traces to."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    scatter = functools.partial(lax.scatter, dimension_numbers=numbers)
    row = jax.ShapeDtypeStruct((1,), "float32")
    index = jax.ShapeDtypeStruct((1, 1), "int32")
    (equation,) = jax.make_jaxpr(scatter)(row, index, row).eqns
    return equation


def takes_combiners() -> bool:
    """Whether the equation of this JAX version has the two parameters."""
    return _equation().params.keys() >= {_COMBINER, _CONSTANTS}


def scatter_combining(
    formula: Combiner,
    table: jax.Array,
    indices: jax.Array,
    rows: jax.Array,
    **params: Any,
) -> jax.Array:
    """`lax.scatter` that stores `formula(old, new)` of each element in place of `new`.

    The formula closes over no arrays. There is no derivative. `params` are parameters
    of the equation.
    """
    axes = varying_axes(table, indices, rows)
    arrays = [vary(x, axes) for x in (table, indices, rows)]
    scalar = jax.ShapeDtypeStruct((), table.dtype)
    combiner = jax.make_jaxpr(formula)(scalar, scalar)
    params |= {_COMBINER: combiner.jaxpr, _CONSTANTS: ()}
    return _equation().primitive.bind(*arrays, **_equation().params | params)
