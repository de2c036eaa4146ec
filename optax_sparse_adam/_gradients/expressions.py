"""Tables, and elementwise functions of them, that are computed at looked-up rows only.

Elementwise functions commute with lookups, `f(table)[ids] == f(table[ids])`, so a
function of a table waits, as an `Expression`, until rows of it are looked up. That is
also the place where the gradient is taken: see `inject`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._exact_adam.remaining_update import Constants
from .._exact_adam.rows import values_of_rows
from .._exact_adam.state import RowState, TableState
from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import vary, varying_axes
from .backward_slice import has_derivative

_UNKNOWN: Any = None
Take = Callable[[jax.Array], jax.Array]  # picks some elements of an array


@jax.custom_jvp
def _inject(rows: jax.Array, delta: jax.Array) -> jax.Array:
    return rows


def _inject_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    present = [
        x for x in tangents if not isinstance(x, jax.custom_derivatives.SymbolicZero)
    ]
    return primals[0], sum(present[1:], start=present[0])


_inject.defjvp(_inject_jvp, symbolic_zeros=True)


def inject(rows: jax.Array, delta: jax.Array) -> jax.Array:
    """`rows`, with the derivative of `rows + delta`.

    `delta` is zero. Nothing is added to the rows: whoever differentiates with respect
    to `delta` differentiates with respect to the rows at this place of the program.
    """
    mesh = mesh_of(rows)
    if mesh.explicit_axes:  # tangents of one sum have one layout
        delta = jax.reshard(delta, jax.typeof(rows).sharding)
    return _inject(rows, vary(delta, varying_axes(rows)))


class Table(NamedTuple):
    """A table whose rows are as they are stored."""

    array: jax.Array

    def values(self, take: Take) -> jax.Array:
        return take(jnp.asarray(self.array))


class StaleTable(NamedTuple):
    """A table of `exact_adam`: rows are brought up to date where they are read.

    Attributes:
      array: The table as it is stored.
      rows: What is known of each row.
      state: What is known of the table.
      constants: Of the optimiser.
    """

    array: jax.Array
    rows: RowState
    state: TableState
    constants: Constants

    def values(self, take: Take) -> jax.Array:
        # A vector's state has an axis of length 1 in the place of the last one.
        ndim = self.array.ndim
        rows = jax.tree.map(
            lambda x: take(x.reshape(x.shape + (1,) * (ndim - x.ndim))), self.rows
        )
        array = take(jnp.asarray(self.array))
        return values_of_rows(array, rows, self.state, self.constants)


class Leaf(NamedTuple):
    """A leaf of the differentiated argument, in the type that its gradient is taken in.

    A table that is cast to a wider type is differentiated there: the entries of a row
    then add up before the sum is rounded, as under `jax.grad`.
    """

    index: int  # type: ignore[assignment]  # tuple has a method index
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """A table, or an elementwise function of tables, arrays of its shape and scalars.

    The operands of an expression may be expressions, and one may be an operand of many.

    Attributes:
      shape: The table's shape.
      dtype: Type of the value.
      function: Of the values of `source` or of the operands; elementwise.
      operands: Expressions, arrays of this shape, and scalars.
      leaves: Leaves with respect to which the value has a derivative, ascending.
      source: The table, for a table or a cast of one.
      has_table: Whether a table is among what the value is computed from.
    """

    shape: tuple[int, ...]
    dtype: Any
    function: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    leaves: tuple[Leaf, ...] = ()
    source: Table | StaleTable | None = None
    has_table: bool = True

    @property
    def kind(self) -> Any:
        """The expression without its arrays, as a plan sees it."""
        source = None if self.source is None else Table(_UNKNOWN)
        function = _identity if self.is_table else None
        return self.shape, self.dtype, function, (), self.leaves, source, self.has_table

    @property
    def is_table(self) -> bool:
        """Whether this is a table itself, and no function of one."""
        return self.source is not None and self.function is _identity

    def select(
        self,
        take: Take,
        shape: tuple[int, ...],
        deltas: dict[Leaf, jax.Array] | None = None,
        memo: dict[Any, jax.Array] | None = None,
    ) -> jax.Array:
        """`take(self)` for a `take` that picks elements.

        Args:
          take: The function.
          shape: The shape of its result.
          deltas: What is injected into the rows of each leaf, of the result's shape.
          memo: What `take` has made of other expressions without deltas; is added to.
        """
        memo = {} if memo is None else memo

        def key(value: Expression, is_live: bool) -> tuple[Expression, bool]:
            return value, is_live and bool(value.leaves)

        # Not by recursion: a loss may apply thousands of functions, one to the other.
        todo = [key(self, deltas is not None)]
        while todo:
            value, is_live = todo[-1]
            inner = [x for x in value.operands if isinstance(x, Expression)]
            missing = [key(x, is_live) for x in inner if key(x, is_live) not in memo]
            todo += missing
            if missing:
                continue
            todo.pop()
            if (value, is_live) in memo:
                continue
            if value.source is not None:
                result = value.function(value.source.values(take))
                if is_live and deltas is not None:
                    result = inject(result, deltas[value.leaves[0]])
            elif value.function is _identity:  # a scalar that stands for a table
                result = jnp.broadcast_to(value.operands[0], shape)
            else:
                result = value.function(
                    *(
                        memo[key(x, is_live)]
                        if isinstance(x, Expression)
                        else take(jnp.asarray(x))
                        if jnp.ndim(x)
                        else x
                        for x in value.operands
                    )
                )
            memo[value, is_live] = result
        return memo[key(self, deltas is not None)]


def _identity(x: jax.Array) -> jax.Array:
    return x


def table(
    source: Table | StaleTable, shape: Any, dtype: Any, leaf: int | None = None
) -> Expression:
    """A table; without a number of the leaf it has no derivative."""
    leaves = () if leaf is None else (Leaf(leaf, jnp.dtype(dtype)),)
    return Expression(tuple(shape), jnp.dtype(dtype), _identity, (), leaves, source)


def cast_table(value: Expression, dtype: Any) -> Expression:
    """A table in a wider type, in which its gradient is taken."""
    leaves = tuple(leaf._replace(dtype=jnp.dtype(dtype)) for leaf in value.leaves)

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype)

    return dataclasses.replace(value, dtype=dtype, function=cast, leaves=leaves)


def fill(shape: tuple[int, ...], dtype: Any, scalar: Any) -> Expression:
    """A scalar broadcast to the shape of a table, which is left to be."""
    return Expression(shape, dtype, _identity, (scalar,), has_table=False)


def elementwise(
    shape: tuple[int, ...],
    dtype: Any,
    function: Callable[..., Any],
    *operands: Any,
    is_stopped: bool = False,
) -> Expression:
    """A function of operands of this shape or scalars, of which one is an expression.

    Args:
      shape: The shape of the result.
      dtype: The type of the result.
      function: The function.
      *operands: Its operands.
      is_stopped: Whether its derivative is zero.
    """
    expressions = [x for x in operands if isinstance(x, Expression)]
    leaves: set[Leaf] = set()
    if has_derivative(dtype) and not is_stopped:
        leaves = {leaf for x in expressions for leaf in x.leaves}
    has_table = any(x.has_table for x in expressions)
    ordered = tuple(sorted(leaves, key=lambda leaf: (leaf.index, str(leaf.dtype))))
    return Expression(shape, dtype, function, operands, ordered, None, has_table)


def expressions_below(values: Iterable[Expression]) -> list[Expression]:
    """These expressions and all their operands, each once, operands first."""
    done: dict[Expression, None] = {}
    todo = list(values)
    while todo:
        inner = [x for x in todo[-1].operands if isinstance(x, Expression)]
        missing = [x for x in inner if x not in done]
        todo += missing
        if not missing:
            done[todo.pop()] = None
    return list(done)


def arrays_of(value: Expression) -> Any:
    """The arrays of one expression without those of its operands: a tree."""
    if value.source is not None:
        return value.source
    return tuple(x for x in value.operands if isinstance(x, jax.Array))


def with_arrays(
    below: list[Expression],
    arrays: Iterable[Any],
    shape: Callable[[Expression], tuple[int, ...]] = lambda value: value.shape,
) -> dict[Expression, Expression]:
    """The expressions with other arrays in the place of `arrays_of` each."""
    new: dict[Expression, Expression] = {}
    for value, own in zip(below, arrays, strict=True):
        changes: dict[str, Any] = {"shape": shape(value)}
        if value.source is not None:
            changes["source"] = own
        else:
            rest = iter(own)
            changes["operands"] = tuple(
                new[x]
                if isinstance(x, Expression)
                else next(rest)
                if isinstance(x, jax.Array)
                else x
                for x in value.operands
            )
        new[value] = dataclasses.replace(value, **changes)
    return new
