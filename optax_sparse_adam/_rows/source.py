"""What a lookup reads: a table, or one whose rows are brought up to date as it reads.

`RowOps.look_up` and `RowOps.look_up_bags` take a `Source`. Of a stale one, whose state
`exact_adam` keeps, a kernel that does both at once needs

    source.array            [num_rows, *row_shape], the table as it is stored
    source.stale.tables     arrays with a row, or a number, for each row of the table
    source.stale.shared     what all rows have in common: a tree of small arrays
    source.stale.value_of   the formula, traceable: a row as it is now, from
                            `value_of(row, rows_of_tables, shared)`
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jax_extras.sharding import reduced_like, without_reduced
from .padding import expand_like
from .stale import StaleRows

Mode = lax.GatherScatterMode
Take = Callable[[jax.Array], jax.Array]  # picks some elements of an array


def are_zeros(tangents: Any) -> bool:
    """Whether nothing of this is differentiated."""
    return all(isinstance(x, SymbolicZero) for x in jax.tree.leaves(tangents))


def tangent_of(function: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """That of `function(*primals)`; those that are given may be symbolic zeros."""
    zeros = jax.custom_derivatives.zero_from_primal
    present = jax.tree.map(
        lambda x, dx: zeros(x) if isinstance(dx, SymbolicZero) else dx,
        *(primals, tuple(tangents)),
    )
    return jax.jvp(function, primals, present)[1]


class Bounds(NamedTuple):
    """What `table[ids]` reads for an id out of bounds, and what is promised of ids.

    Attributes:
      mode: As `lax.gather` has it.
      fill: What such an id reads, in the mode "fill"; in others `None`, and it reads
        the row next to it.
      is_sorted: A promise that the ids ascend.
      is_unique: A promise that none is there twice.
      is_padded: Whether an id out of bounds is padding: `checkify` does not report it.
    """

    mode: Mode = Mode.PROMISE_IN_BOUNDS
    fill: float | None = None
    is_sorted: bool = False
    is_unique: bool = False
    is_padded: bool = False


ZEROS = Bounds(Mode.FILL_OR_DROP, 0, is_padded=True)


class Source(NamedTuple):
    """The arrays of a table. Rows of a stale one are brought up to date when read.

    Attributes:
      array: The table as it is stored.
      stale: What brings its rows up to date, if anything has to.
    """

    array: jax.Array
    stale: StaleRows | None = None

    @property
    def clock(self) -> jax.Array | None:
        return None if self.stale is None else self.stale.clock

    def values(self, take: Take) -> jax.Array:
        """`take` of the table as it is now; it picks the same elements of all arrays.

        An array that has a number for each row has axes of length 1 in the place of the
        others.
        """
        rows = take(jnp.asarray(self.array))
        if self.stale is None:
            return rows
        tables = tuple(take(expand_like(x, self.array)) for x in self.stale.tables)
        static = self.stale.value_of, self.stale.decays
        now: jax.Array = _now(static, rows, tables, self.stale.shared)
        return now

    def map(self, function: Callable[[Any, bool], Any]) -> "Source":
        """Applies `function(array, has_rows)` to all arrays."""
        array = function(self.array, True)
        return Source(array, None if self.stale is None else self.stale.map(function))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _now(static: Any, rows: jax.Array, tables: Any, shared: Any) -> jax.Array:
    """Rows as they are now.

    Derivatives by rows are those by these values, though what is stored may decay on
    the way to them. (Where JAX drops this rule, in second derivatives of a scan, they
    are those by what is stored.)
    """
    return _formula(static, rows, *lax.stop_gradient((tables, shared)))


def _formula(static: Any, rows: jax.Array, tables: Any, shared: Any) -> jax.Array:
    value_of, _ = static
    return reduced_like(value_of(without_reduced(rows), tables, shared), rows)


@functools.partial(_now.defjvp, symbolic_zeros=True)
def _now_jvp(static: Any, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    now = _now(static, *primals)
    d_rows, *d_state = tangents
    if are_zeros(d_state):
        return now, jnp.zeros_like(now) if are_zeros(d_rows) else d_rows
    if static[1]:
        raise NotImplementedError(
            "A table that exact_adamw trains, and its state, are differentiated "
            "together: as a whole training is, or inside of a function with a rule of "
            "its own, such as lax.custom_root. Derivatives by a row's value are not "
            "those by what is stored, which decays on the way to it. Take "
            "lazy(optax.adamw(...)), or exact_adam; or put osa.evaluate around that "
            "function."
        )
    return now, tangent_of(functools.partial(_formula, static), primals, tangents)
