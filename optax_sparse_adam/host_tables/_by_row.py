"""Whether a function treats each row alone, as one must that gets some rows at a time.

    lambda rows: rows - rows.mean(0)        depends on the others
    lambda rows: rows / max(1, norm(rows))  only where they are large
    lambda rows: rows + random(rows.shape)  begins again in each piece

Rows are given at once, and in pieces: the results must be the same. So it is tried with
numbers of several sizes, and with one row that is NaN, infinite, large or zero. As many
as it gets later see more: among five no row is more than five times their mean, and
none has the number 5000.

It is a trial, and no proof: what is so in none of these rows, such as a number of a row
above all that a chunk has, is not seen.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._jax_extras.jaxprs import FlatJaxpr, name_and_params
from ._callbacks import without_callbacks
from ._dead_code import kept_arguments

# Where pieces begin: of any period one of them begins at no multiple. None has one row,
# which a function may take for a vector.
_ROWS, _STARTS = 5, (0, 2, 5)
# Of sums that are added up in another order, where a row is an array; of its largest.
_CLOSE = 1e-4


def treats_rows_alone(
    function: Callable[[list[Any], Any], tuple[Any, Any]],
    like: list[Any],
    rest: Any,
    count: int = _ROWS,
) -> bool:
    """Whether it does.

    Args:
      function: `function(arrays, rest)` returns what has no rows, and arrays with rows.
      like: Of the shapes and types of the arrays, with any number of rows.
      rest: What has no rows, as it is.
      count: With how many rows it is tried, five at least.
    """
    count = max(_ROWS, count)
    starts = [x for x in _STARTS if x + 1 < count]
    rows = [_some_rows(count, x.shape[1:], x.dtype) for x in like]
    leaves = jax.tree.leaves(rest)
    treedef: Any = jax.tree.structure(rest)

    def without_rows(*args: Any) -> Any:
        arrays, others = [*args[: len(rows)]], treedef.unflatten(args[len(rows) :])
        return function(arrays, others)[0]

    if any(i < len(rows) for i in kept_arguments(without_rows, [*rows, *leaves])):
        return False

    @jax.jit
    def are_same(rows: list[Any], rest: Any) -> list[jax.Array]:
        ends = [*starts[1:], count]
        pieces = [[x[a:b] for x in rows] for a, b in zip(starts, ends, strict=True)]
        (whole, all_rows), *parts = (
            _in_silence(function, arrays, rest) for arrays in (rows, *pieces)
        )
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *(x[1] for x in parts))
        pairs = [(whole, x[0]) for x in parts] + [(all_rows, joined)]
        # XLA would compute what is constant, as the zeros of a state, in its compiler.
        pairs = lax.optimization_barrier(pairs)
        return jax.tree.leaves([jax.tree.map(_is_same, *pair) for pair in pairs])

    tried = zip(*(_tried(x) for x in rows), strict=True)
    return all(all(are_same([*each], rest)) for each in tried)


def names_rows(program: FlatJaxpr, rows: list[int], count: int) -> bool:
    """Whether it writes to rows by numbers of its own; absent ones JAX drops.

    Not so is what writes to an element of each row, whose numbers are as many.

    Args:
      program: The function.
      rows: Those of its results that have rows.
      count: How many rows they have.
    """
    for eqn, operands, _ in program.slice(rows)[0]:
        name, params = name_and_params(eqn)
        result: Any = eqn.outvars[0].aval
        if not name.startswith("scatter") or result.shape[:1] != (count,):
            continue
        numbers: Any = eqn.invars[1].aval
        is_of_each = numbers.shape[:1] == (count,)
        is_by_row = 0 in params["dimension_numbers"].scatter_dims_to_operand_dims
        if is_by_row and not is_of_each:
            _, starts = program.slice(operands[1:2])
            if not {*starts} & {*program.inputs}:
                return True
    return False


def _in_silence(function: Callable[..., Any], *args: Any) -> Any:
    """Its results, without what it shows."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = without_callbacks(closed.jaxpr)
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _some_rows(count: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    numbers = np.arange(count * math.prod(shape)).reshape(count, *shape)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.cos(1.7 * numbers).astype(dtype)
    return (numbers % (2 if np.dtype(dtype).kind == "b" else 97)).astype(dtype)


def _tried(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rows of several sizes, and some of which the first one is another."""
    is_inexact = jnp.issubdtype(rows.dtype, jnp.inexact)
    for scale in 1, 1e-4, 100:
        yield (rows * scale).astype(rows.dtype)
    for number in np.nan, np.inf, 1e4, 0:
        other = rows.copy()
        other[0] = number if is_inexact else np.array(-1).astype(rows.dtype)
        yield other


def _is_same(x: Any, y: Any) -> jax.Array:
    x, y = map(jnp.asarray, (x, y))  # a state may have numbers of Python
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = map(jax.random.key_data, (x, y))
    if x.shape != y.shape or not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.array_equal(x, y)
    # In few operations: to trace these is most of the time that all of it takes.
    size, of_row = abs(x), tuple(range(1, x.ndim))
    finite = {"initial": 0, "where": jnp.isfinite(size)}
    largest = size.max(of_row, keepdims=True, **finite)
    close = 2 * max(_CLOSE, 4 * float(jnp.finfo(x.dtype).eps))
    is_same = (x == y) | (x != x) & (y != y) | (abs(x - y) <= close * largest)
    return is_same.all()
