"""A scatter that combines what is there with what comes, by any formula.

XLA's scatter takes every combiner (https://openxla.org/stablehlo/spec#scatter), and
JAX's equation for it has one as a parameter; but its functions offer a few only: add,
multiply, minimum, maximum. So this is the equation of `lax.scatter` with another one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .varying_axes import vary, varying_axes

Formula = Callable[[jax.Array, jax.Array], jax.Array]

_COMBINER, _CONSTANTS = "update_jaxpr", "update_consts"


@functools.cache
def _equation() -> Any:
    """The equation that JAX makes of `lax.scatter`."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    scatter = functools.partial(lax.scatter, dimension_numbers=numbers)
    row = jax.ShapeDtypeStruct((1,), "float32")
    index = jax.ShapeDtypeStruct((1, 1), "int32")
    (equation,) = jax.make_jaxpr(scatter)(row, index, row).eqns
    return equation


def takes_combiners() -> bool:
    """Whether this version of JAX has the parameter."""
    return _equation().params.keys() >= {_COMBINER, _CONSTANTS}


def scatter_combining(
    formula: Formula,
    table: jax.Array,
    indices: jax.Array,
    rows: jax.Array,
    **params: Any,
) -> jax.Array:
    """`lax.scatter`, but for `formula(old, new)` of each number in place of `new`.

    A formula without arrays of its own; it has no derivative. Further arguments are
    parameters of the equation.
    """
    axes = varying_axes(table, indices, rows)
    arrays = [vary(x, axes) for x in (table, indices, rows)]
    number = jax.ShapeDtypeStruct((), table.dtype)
    combiner = jax.make_jaxpr(formula)(number, number)
    params |= {_COMBINER: combiner.jaxpr, _CONSTANTS: ()}
    return _equation().primitive.bind(*arrays, **_equation().params | params)
