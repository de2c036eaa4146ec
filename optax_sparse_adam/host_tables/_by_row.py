"""Whether a function treats each row alone, as one must that gets some rows at a time.

    lambda rows: rows - rows.mean(0)        depends on the others
    lambda rows: rows / max(1, norm(rows))  only where they are large
    lambda rows: rows + random(rows.shape)  begins again in each piece

Rows are given at once, and in pieces: the results must be the same. So it is tried with
numbers of several sizes, and with one row that is NaN, infinite, large or zero; with a
`while_loop`, which may not end for these, with one that is large or small. As many as
it gets later see more: among five no row is more than five times their mean. Numbers of
rows, which no trial has all of, are looked for in the program.

It is no proof: a condition that none of these rows meets, such as a number above
100,000, is not seen, nor is the number of a row inside of a loop or a branch.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .._jax_extras.jaxprs import FlatJaxpr, name_and_params
from ._callbacks import without_callbacks
from ._dead_code import kept_arguments
from ._residuals import equations_in

# Where pieces begin: of any period one of them begins at no multiple. None has one row,
# which a function may take for a vector.
_ROWS, _STARTS = 5, (0, 2, 5)
# What all of a row is, without a loop and with one.
_NUMBERS, _IN_LOOPS = (np.nan, np.inf, 1e4, 0), (1e4, 1e-4)
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

    # Problem: factorisations of many matrices, one a row, wait for ever. Cause: XLA for
    # CPUs runs what is independent in a program at once, and each of them waits for a
    # thread to do its parts. Remedy: each piece is a program, and the next one waits
    # for it. Safe, as they do not depend on each other. Test:
    # `test_map_rows_of_factorisations`.
    run = jax.jit(functools.partial(_in_silence, function))

    def is_same(rows: list[np.ndarray]) -> bool:
        found = jax.block_until_ready(run(rows, rest))
        for a, b in itertools.pairwise([*starts, count]):
            part = jax.block_until_ready(run([x[a:b] for x in rows], rest))
            if not _are_same(found, part, a):
                return False
        return True

    program = jax.make_jaxpr(function)(rows, rest).jaxpr.eqns
    # A loop "until it is small" does not end for an infinite row, or for zeros.
    loops = any(name_and_params(x)[0] == "while" for x in equations_in(program))
    numbers = _IN_LOOPS if loops else _NUMBERS
    tried = zip(*(_tried(x, numbers) for x in rows), strict=True)
    return all(is_same([*x]) for x in tried)


def names_rows(program: FlatJaxpr, rows: int, counts: Collection[int] = ()) -> bool:
    """Whether its rows depend on numbers of rows, which are others in each piece.

        where(arange(len(rows)) > 600_000, 0, rows)    compares them
        rows.at[700].set(0), rows.at[600_000:].set(0)  a piece has another one, or none
        rows * mask[: len(rows)]                       reads an array of all rows

    `rows.at[arange(len(rows)), columns]` does not: it names an element of each row.
    What is done inside of a loop or a branch is not looked at.

    Args:
      program: The function.
      rows: How many arguments have rows, the first ones, and results, the last ones.
      counts: How many rows there are. No other axis has such a size, or a multiple.
        Without them only `rows[600_000:]` is seen, where there are no such rows.
    """
    inputs = {*program.inputs[:rows]}

    def has_rows(shape: tuple[int, ...]) -> bool:
        return any(size > 0 and size % n == 0 for size in shape for n in counts)

    def is_constant(value: int) -> bool:
        return not inputs & {*program.slice([value])[1]}

    indices = {x.operands[1] for x in program.equations if _indexed(x.eqn)} - inputs
    reached, starts = program.slice(program.outputs[-rows:], indices.__contains__)
    for eqn, operands, _ in reached:
        name, params = name_and_params(eqn)
        shape = _shape(eqn.outvars[0])
        if name == "iota":
            is_by_number = has_rows(shape[params["dimension"] :][:1])
        elif name == "slice":
            is_by_number = has_rows(shape[:1]) and is_constant(operands[0])
        elif has_rows(_indexed(eqn)):
            is_of_each = has_rows(_shape(eqn.invars[1])[:1])
            is_by_number = not is_of_each and is_constant(operands[1])
        else:
            is_by_number = False
        if is_by_number or shape[:1] == (0,):  # `rows[600_000:]` of a piece
            return True
    consts = [program.consts[x] for x in starts if x in program.consts]
    return any(bool((x != x[:1]).any()) for x in consts if has_rows(np.shape(x)[:1]))


def _indexed(eqn: JaxprEqn) -> tuple[int, ...]:
    """The sizes of the axes in which a gather or a scatter has indices."""
    name, params = name_and_params(eqn)
    if not name.startswith(("gather", "scatter")):
        return ()
    numbers = params["dimension_numbers"]
    if name == "gather":
        axes = numbers.start_index_map
    else:
        axes = numbers.scatter_dims_to_operand_dims
    return tuple(_shape(eqn.invars[0])[axis] for axis in axes)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


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


def _tried(rows: np.ndarray, numbers: Sequence[float]) -> Iterator[np.ndarray]:
    """Rows of several sizes, and some of which the first one has one of the numbers."""
    is_inexact = jnp.issubdtype(rows.dtype, jnp.inexact)
    for scale in 1, 1e-4, 100:
        yield (rows * scale).astype(rows.dtype)
    for number in numbers:
        other = rows.copy()
        other[0] = number if is_inexact else np.array(-1).astype(rows.dtype)
        yield other


@jax.jit
def _are_same(found: Any, part: Any, start: int) -> jax.Array:
    """Whether a part is what was found of rows from `start` on."""
    (whole, all_rows), (_, rows) = found, part
    there = jax.tree.map(
        lambda x, y: lax.dynamic_slice_in_dim(x, start, len(y)), all_rows, rows
    )
    pairs = jax.tree.map(_is_same, (whole, there), part)
    return jnp.all(jnp.array(jax.tree.leaves(pairs)))


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
