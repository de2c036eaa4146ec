"""Stale rows: their state, and what brings them up to date."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax_extras.compiled import compiled
from .._rows.entries import accumulator_dtype
from .._rows.padding import expand_like
from .remaining_update import (
    Constants,
    centre_after,
    polynomial,
    remaining_update,
    root_of,
)


class RowState(NamedTuple):
    """What is known of each row of one parameter, or of some; see `ExactAdamState`."""

    mu: jax.Array
    nu: jax.Array
    last: jax.Array
    log_decay: tuple[jax.Array, ...]

    @classmethod
    def of(cls, mu: Any, nu: Any, last: Any, *log_decay: Any) -> "RowState":
        return cls(mu, nu, last, log_decay)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (*self[:3], *self.log_decay)


class TableState(NamedTuple):
    """What is known of a parameter as a whole, or of all; see `ExactAdamState`.

    Of several, all but `clock` and `origin` have an axis for them in front. `single` is
    what follows from `remaining`, the polynomials in float32, computed for all at once.
    """

    clock: jax.Array
    origin: jax.Array
    values_until: jax.Array
    remaining: jax.Array
    decay: jax.Array | None
    single: jax.Array | None = None

    def with_polynomials(self) -> "TableState":
        return self._replace(single=polynomial(self.remaining, jnp.dtype("float32")))

    def at(self, place: Any) -> "TableState":
        """The state of one parameter."""
        of_one = jax.tree.map(lambda x: x[place], tuple(self[2:]))
        return TableState(self.clock, self.origin, *of_one)


class CatchUp(NamedTuple):
    """What brings rows up to date, or all those of a parameter.

    Attributes:
      by: What is to be added to them, in the type that is computed in.
      power1: `b1^k` of each row, `k` steps after its last update.
      power2: `q^k` of each row.
    """

    by: jax.Array
    power1: jax.Array
    power2: jax.Array

    def moments(self, rows: RowState) -> tuple[jax.Array, jax.Array]:
        # `b2^k` is `q^k` squared. In two steps: the square of a `q^k` of 1e-25 alone
        # would be zero in float32.
        mu, nu = (x.astype(self.by.dtype) for x in rows[:2])
        power1, power2 = (expand_like(x, self.by) for x in self[1:])
        return power1 * mu, power2 * (power2 * nu)


def cast_floats(tree: Any, dtype: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def decay_in(table: TableState, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Both parts; what the first loses in a smaller type goes to the second."""
    if table.decay is None:
        return jnp.zeros([], dtype), jnp.zeros([], dtype)
    # In float32, -0.1 is `-0.1 - 1.5e-9`: the second part becomes `1.5e-9 + low`.
    high, low = table.decay[..., 0], table.decay[..., 1]
    cast = high.astype(dtype)
    return cast, ((high - cast.astype(high.dtype)) + low).astype(dtype)


def coefficients_of(
    table: TableState, constants: Constants, dtype: Any
) -> tuple[jax.Array, list[jax.Array]]:
    """Polynomials since `values_until` and from now on, `[2, nodes]`, their centres."""
    constants = cast_floats(constants, dtype)
    steps = table.values_until, table.clock
    centres = [centre_after(constants, step + table.origin) for step in steps]
    if table.single is not None and dtype == table.single.dtype:
        return table.single, centres
    return polynomial(table.remaining, dtype), centres


def _powers(
    last: jax.Array, table: TableState, constants: Constants, dtype: Any
) -> list[jax.Array]:
    steps = (table.clock - last).astype(dtype)
    # A row is later than its table only where a state was restored in part.
    steps = jnp.where(steps < 0, jnp.nan, steps)
    logs = cast_floats(constants[:2], dtype)
    return [jnp.exp(steps * log) for log in logs]


def catch_up_rows(
    param: jax.Array,
    rows: RowState,
    table: TableState,
    constants: Constants,
    *,
    dtype: Any = None,
) -> CatchUp:
    """What brings rows, or a whole parameter, up to date.

    In a type that is by default the parameter's, as it is stored, and the moments'.
    """
    if dtype is None:
        dtype = accumulator_dtype(param.dtype, rows.mu.dtype, rows.nu.dtype)
    mu, nu = (x.astype(dtype) for x in rows[:2])
    power1, power2 = _powers(rows.last, table, constants, dtype)
    is_value = rows.last <= table.values_until

    def pick(of_value: Any, of_projected: Any) -> jax.Array:
        return expand_like(jnp.where(is_value, of_value, of_projected), mu)

    # In the worked example of `remaining_update`, two steps after the update: a row
    # that is stored by its value 2.0 has since been moved by 0.05 and 0.025, which is a
    # sum of its moments at that time, to be subtracted; one that is stored by its
    # projected final value 1.9 has 0.025 ahead, a sum of its present moments. Both are
    # at 1.925.
    one = jnp.ones_like(power1)
    (behind, ahead), centres = coefficients_of(table, constants, dtype)
    by = remaining_update(
        [pick(*pair) for pair in zip(behind, ahead, strict=True)],
        mu * pick(-one, power1),
        root_of(nu) * pick(one, power2),
        pick(*centres),
        uses_roots=constants.uses_roots,
    )
    return CatchUp(by, power1, power2)


def log_decay_of(rows: RowState, table: TableState, like: jax.Array) -> Any:
    """The logarithm of the decay of rows since their last update; 0 without."""
    if not rows.log_decay:
        return 0
    # A single float would lose what a step adds to the sum of a long training.
    (old, old_rest), (new, new_rest) = rows.log_decay, decay_in(table, like.dtype)
    return expand_like((new - old) + (new_rest - old_rest), like)


def value_of(
    param: jax.Array, rows: RowState, table: TableState, catch_up: CatchUp
) -> jax.Array:
    """The values of rows, from what brings them up to date."""
    value, by = param.astype(catch_up.by.dtype), catch_up.by
    if rows.log_decay:
        value = jnp.exp(log_decay_of(rows, table, by)) * value
    return (value + by).astype(param.dtype)


@compiled
def values_of_rows(
    param: jax.Array, rows: RowState, table: TableState, constants: Constants
) -> jax.Array:
    """The values of rows, or of a whole parameter, as they are now."""
    catch_up = catch_up_rows(param, rows, table, constants)
    return value_of(param, rows, table, catch_up)


def mark_updated(rows: RowState, table: TableState) -> tuple[jax.Array, ...]:
    """The new `last` and `log_decay` of rows that have been brought up to date."""

    def marked(old: jax.Array, new: jax.Array) -> jax.Array:
        # Problem: XLA for CPUs copies the table. Cause: it may scatter before it has
        # gathered, where new values do not depend on the old ones. Remedy: a select
        # that depends on them. Safe, because no row is later than now. Test:
        # `tests/optimizers/test_memory.py`.
        return jnp.where(rows.last > table.clock, old, new.astype(old.dtype))

    marks: list[jax.Array] = [table.clock]
    if rows.log_decay:
        marks += decay_in(table, rows.log_decay[0].dtype)
    pairs = zip((rows.last, *rows.log_decay), marks, strict=True)
    return tuple(marked(*pair) for pair in pairs)
