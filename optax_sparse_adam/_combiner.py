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

from ._varying import vary, varying_axes

Formula = Callable[[jax.Array, jax.Array], jax.Array]

_COMBINER, _CONSTANTS = "update_jaxpr", "update_consts"


def _equation(*arrays: Any, **options: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    scatter = functools.partial(lax.scatter, **options)
    (equation,) = jax.make_jaxpr(scatter)(*shapes).eqns
    return equation


@functools.cache
def takes_combiners() -> bool:
    """Whether the equation of this version of JAX has the parameter."""
    shapes = [
        jax.ShapeDtypeStruct((1,), "float32"),
        jax.ShapeDtypeStruct((1, 1), "int32"),
    ]
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    known = _equation(shapes[0], shapes[1], shapes[0], dimension_numbers=numbers).params
    return _COMBINER in known and _CONSTANTS in known


def scatter_combining(
    formula: Formula,
    table: jax.Array,
    indices: jax.Array,
    rows: jax.Array,
    **options: Any,
) -> jax.Array:
    """`lax.scatter`, but for `formula(old, new)` of each number in place of `new`.

    A formula without arrays of its own; it has no derivative.
    """
    axes = varying_axes(table, indices, rows)
    arrays = [vary(x, axes) for x in (table, indices, rows)]
    number = jax.ShapeDtypeStruct((), table.dtype)
    combiner = jax.make_jaxpr(formula)(number, number)
    equation = _equation(*arrays, **options)
    params = equation.params | {_COMBINER: combiner.jaxpr, _CONSTANTS: ()}
    return equation.primitive.bind(*arrays, **params)
