r"""Rows that rest: where dense Adam has moved them since their last gradient.

After step `T` a row has the moments `m` and `v`. As long as no gradient follows, dense
Adam moves it at step `t = T + j` by `a_t b1^j m / (q^j sqrt(v) + eps rho_t)`, with
`q = sqrt(b2)`, `rho_t = sqrt(1 - b2^t)` and `a_t = lr_t rho_t / (1 - b1^t)`, after it
has multiplied it by `1 - lr_t wd`. With `P(a, b)` the product of these factors for the
steps after `a` up to `b`, let

    way(T, m, v) = sum over j >= 1 of a_t / P(T, t) * b1^j m / (q^j sqrt(v) + eps rho_t)

be the way that the row has still to go. In the next step `w` becomes `P w - a_t ...`
and the way `P way - a_t ...`, as it loses its first term and one factor of all others:
`w - way` is multiplied by `P`, whatever the moments are. So a table holds, in place of
the value `w` of a row after its last update, its *resting point* `w - way(T, m, v)`,
and `k = now - T` steps later

    w = P(T, now) * resting point + way(now, b1^k m, b2^k v).

All rows share the function `way(now)`, whenever they were updated: nothing is summed up
for a row, and after some hundred steps of rest its way is zero.

`ways` holds this function as a polynomial, `resting_state` what is known of the rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..native import _calls as native
from .coalesce import accumulator_dtype
from .padding import expand_like
from .resting_state import RowState, TableState
from .ways import Constants, centre_of_way, is_of_roots, polynomial, way_of


class Moved(NamedTuple):
    """Rows now: `exp(log_decay) * stored + by`, and their moments."""

    log_decay: jax.Array | None
    by: jax.Array
    mu: jax.Array
    nu: jax.Array


def cast_floats(tree: Any, dtype: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def decay_in(table: TableState, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Both parts; what the first loses in a smaller type goes to the second."""
    assert table.decay is not None  # where rows have one
    high, low = table.decay
    cast = high.astype(dtype)
    return cast, ((high - cast.astype(high.dtype)) + low).astype(dtype)


def move_rows(rows: RowState, table: TableState, constants: Constants) -> Moved:
    """Where rows are now; computes in the type of the moments."""
    mu, nu, last, log_decay = rows
    dtype = mu.dtype
    constants = cast_floats(constants, dtype)
    steps = (table.clock - last).astype(dtype)
    power1, power2 = jnp.exp(steps * constants.log_b1), jnp.exp(steps * constants.log_q)
    is_value = last <= table.since

    def pick(of_value: Any, of_resting_point: Any) -> jax.Array:
        return expand_like(jnp.where(is_value, of_value, of_resting_point), mu)

    one = jnp.ones_like(power1)
    behind, ahead = polynomial(table.ways, dtype)
    by = way_of(
        [pick(*pair) for pair in zip(behind, ahead, strict=True)],
        mu * pick(-one, power1),
        jnp.sqrt(nu) * pick(one, power2),
        pick(*_centres(table, constants)),
    )
    power1, power2 = expand_like(power1, mu), expand_like(power2, mu)
    decay = None
    if log_decay:
        # A single float would lose what a step adds to the sum of a long training.
        (old, old_rest), (new, new_rest) = log_decay, decay_in(table, dtype)
        decay = expand_like((new - old) + (new_rest - old_rest), mu)
    return Moved(decay, by, power1 * mu, power2 * (power2 * nu))


def compute_type(param: jax.Array, rows: RowState) -> Any:
    return accumulator_dtype(param.dtype, rows.mu.dtype, rows.nu.dtype)


def rows_now(param: jax.Array, moved: Moved) -> jax.Array:
    """The values of rows, in the type of the parameter."""
    value = param.astype(moved.by.dtype)
    if moved.log_decay is not None:
        value = jnp.exp(moved.log_decay) * value
    return (value + moved.by).astype(param.dtype)


def _centres(table: TableState, constants: Constants) -> list[jax.Array]:
    steps = table.step_since, table.step
    return [centre_of_way(constants, step) for step in steps]


def stamp(rows: RowState, table: TableState) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`last` and `log_decay` of rows that are brought up to date."""

    def stamped(old: jax.Array, new: jax.Array) -> jax.Array:
        # Problem: XLA for CPUs copies the table. Cause: it may scatter before it has
        # gathered, where new values do not depend on the old ones. Remedy: a select
        # that depends on them. Safe, because no row is later than now. Test:
        # `tests/optimizers/test_memory.py`.
        return jnp.where(rows.last > table.clock, old, new.astype(old.dtype))

    if not rows.log_decay:
        return stamped(rows.last, table.clock), ()
    decays = decay_in(table, rows.log_decay[0].dtype)
    pairs = zip(rows.log_decay, decays, strict=True)
    return stamped(rows.last, table.clock), tuple(stamped(*pair) for pair in pairs)


def stale_rows(rows: RowState, table: TableState, constants: Constants) -> native.Stale:
    """What the kernel needs to bring rows up to date, in float32."""
    single = cast_floats(constants, jnp.float32)
    decay = (jnp.float32(0), jnp.float32(0))
    if table.decay is not None:
        decay = decay_in(table, jnp.float32)
    behind, ahead = _centres(table, single)
    return native.Stale(
        tables=(*rows[:3], *rows.log_decay),
        scalars=native.StaleScalars(single.log_b1, single.log_q, behind, ahead, *decay),
        polynomials=polynomial(table.ways, jnp.float32),
        is_of_roots=is_of_roots(table.ways.shape[-1]),
        steps=jnp.stack([table.clock, table.since]),
    )


def look_up_values(
    param: jax.Array,
    rows: RowState,
    table: TableState,
    constants: Constants,
    ids: jax.Array,
    fill: float | None,
) -> jax.Array:
    """`values_of_rows` of the rows with these ids, by the kernel."""
    stale = stale_rows(rows, table, constants)
    return native.look_up_stale_rows(param, stale, ids, fill)


def values_of_rows(
    param: jax.Array, rows: RowState, table: TableState, constants: Constants
) -> jax.Array:
    """The values of rows, or of a whole parameter, as they are now."""
    mu, nu = (x.astype(compute_type(param, rows)) for x in (rows.mu, rows.nu))
    return rows_now(param, move_rows(rows._replace(mu=mu, nu=nu), table, constants))
