"""Tables, and elementwise functions of them, that are computed at looked-up rows only.

Elementwise functions commute with lookups, `f(table)[ids] == f(table[ids])`, so a
function of a table stays a lazy expression until rows of it are looked up. That is also
the place where the gradient is taken: see `inject`.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from .._jax_extras.inject import inject
from .._rows.source import Source, Take

_UNKNOWN: Any = None


def is_array(x: Any) -> bool:
    """Whether it is an array or a number, and no value of another type of JAX's.

    Such as one of `jax.experimental.hijax`, or a mutable array.
    """
    return isinstance(jax.typeof(x), ShapedArray)


def as_jax(x: Any) -> Any:
    return jnp.asarray(x) if is_array(x) else x


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
      leaves: Leaves with respect to which the loss has a derivative through this value.
      source: The table, for a table or a cast of one.
    """

    shape: tuple[int, ...]
    dtype: Any
    function: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    leaves: tuple[Leaf, ...] = ()
    source: Source | None = None

    @property
    def kind(self) -> Any:
        """The expression without its arrays, as a plan sees it; equal ones share plans.

        Of the function a plan sees only whether it is that of a table itself.
        """
        # `2 * t` and `tanh(t)` are of one kind: a loop that is entered with each of
        # them is planned once.
        source = None if self.source is None else Source(_UNKNOWN)
        function = _identity if self.function is _identity else None
        return self.shape, self.dtype, function, (), self.leaves, source

    @property
    def is_table(self) -> bool:
        """Whether this is a table itself, and no function of one."""
        return self.source is not None and self.function is _identity

    def without_derivative(self) -> "Expression":
        return dataclasses.replace(self, leaves=()) if self.leaves else self

    def select(
        self,
        take: Take,
        deltas: dict[Leaf, jax.Array] | None = None,
        memo: dict[Any, jax.Array] | None = None,
    ) -> jax.Array:
        """`take(self)` for a `take` that picks elements.

        Args:
          take: The function.
          deltas: What is injected into the rows of each leaf, of the result's shape.
          memo: What `take` has made of other expressions without deltas; is added to.
        """
        memo = {} if memo is None else memo

        def operand(x: Any) -> Any:
            if isinstance(x, Expression):
                return memo[x]
            return take(jnp.asarray(x)) if jnp.ndim(x) else x

        # For `tanh(2 * t)[ids]`, `take` being the gather: the memo of t is
        # `inject(t[ids], delta)`, that of 2 * t is twice that, and then comes tanh.
        for value in operands_first([self], memo):
            if value.source is not None:
                result = value.function(value.source.values(take))
                delta = (deltas or {}).get(value.leaves[0]) if value.leaves else None
                memo[value] = result if delta is None else inject(result, delta)
            else:
                memo[value] = value.function(*map(operand, value.operands))
        return memo[self]


def _identity(x: jax.Array) -> jax.Array:
    return x


def table(source: Source, leaf: int | None = None) -> Expression:
    """A table; without the index of a leaf it has no derivative."""
    shape, dtype = jnp.shape(source.array), jnp.result_type(source.array)
    leaves = () if leaf is None else (Leaf(leaf, dtype),)
    return Expression(shape, dtype, _identity, (), leaves, source)


def cast_table(value: Expression, dtype: Any) -> Expression:
    """A table in a wider type, in which its gradient is taken."""
    leaves = tuple(leaf._replace(dtype=jnp.dtype(dtype)) for leaf in value.leaves)

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype)

    return dataclasses.replace(value, dtype=dtype, function=cast, leaves=leaves)


def elementwise(out: Any, function: Callable[..., Any], *operands: Any) -> Expression:
    """A function of operands of one shape or scalars, one of them an expression."""
    expressions = [x for x in operands if isinstance(x, Expression)]
    leaves = {leaf for x in expressions for leaf in x.leaves}
    ordered = tuple(sorted(leaves, key=lambda leaf: (leaf.index, str(leaf.dtype))))
    return Expression(out.shape, out.dtype, function, operands, ordered)


def merge(args: Iterable[Any], arrays: Iterable[Any]) -> list[Any]:
    """The expressions among `args`, with other arrays between them."""
    # `merge([t, a, b], [x, y])` is `[t, x, y]`, if t is the one expression.
    rest = iter(arrays)
    return [x if isinstance(x, Expression) else next(rest) for x in args]


def arrays_among(args: Iterable[Any]) -> list[Any]:
    return [x for x in args if not isinstance(x, Expression)]


def operands_first(
    values: Iterable[Expression], stops: Container[Any] = ()
) -> list[Expression]:
    """These expressions and their operands, each once; none of those in `stops`.

    Not by recursion: a loss may apply thousands of functions, one to the other.
    """
    # The operand of two expressions may be in `todo` twice; it is in `done` once.
    done: dict[Expression, None] = {}
    todo = [x for x in values if x not in stops]
    while todo:
        inner = [x for x in todo[-1].operands if isinstance(x, Expression)]
        missing = [x for x in inner if x not in done and x not in stops]
        todo += missing
        if not missing:
            done[todo.pop()] = None
    return list(done)


def map_arrays(
    value: Expression,
    function: Callable[[Any, bool], Any],
    shape: tuple[int, ...] | None = None,
) -> Expression:
    """Applies `function(array, has_rows)` to all arrays that a value is computed from.

    It is called in the same order for each expression of the same form. An array has
    rows if it has the leading axes of the table. `shape` is the new one, if it changes.
    """
    new: dict[Expression, Expression] = {}

    def operand(x: Any) -> Any:
        if isinstance(x, Expression):
            return new[x]
        if jnp.ndim(x):  # may be a constant of NumPy
            return function(jnp.asarray(x), True)
        return function(x, False) if isinstance(x, jax.Array) else x

    for x in operands_first([value]):
        new[x] = dataclasses.replace(
            x,
            shape=x.shape if shape is None else shape,
            source=None if x.source is None else x.source.map(function),
            operands=tuple(map(operand, x.operands)),
        )
    return new[value]
