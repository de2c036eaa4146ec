"""What a lookup reads: a table, or one whose rows are brought up to date as it reads.

`RowOps.look_up` and `RowOps.look_up_bags` take a `Source`. Of a stale one, whose state
`exact_adam` keeps, a kernel that does both at once needs

    source.array            [num_rows, *row_shape], the table as it is stored
    source.stale.tables     arrays with a row, or a number, for each row of the table
    source.stale.shared     what all rows have in common: a tree of small arrays
    source.stale.value_of   the formula, traceable: a row as it is now, from
                            `value_of(row, rows_of_tables, shared)`
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._jax_extras.inject import with_derivative_of
from .._jax_extras.sharding import reduced_like, without_reduced
from .padding import expand_like
from .stale import StaleRows

Mode = lax.GatherScatterMode
Take = Callable[[jax.Array], jax.Array]  # picks some elements of an array


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
        tables = [take(expand_like(x, self.array)) for x in self.stale.tables]
        row = without_reduced(rows)
        values = self.stale.value_of(row, (*tables,), self.stale.shared)
        # Derivatives are those by the values; what is stored decays on the way to them.
        return with_derivative_of(lax.stop_gradient(reduced_like(values, rows)), rows)

    def map(self, function: Callable[[Any, bool], Any]) -> "Source":
        """Applies `function(array, has_rows)` to all arrays."""
        array = function(self.array, True)
        return Source(array, None if self.stale is None else self.stale.map(function))
