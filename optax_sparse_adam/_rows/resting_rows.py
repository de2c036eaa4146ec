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

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax_extras.sharding import mesh_of
from ..native import _calls as native
from .coalesce import accumulator_dtype
from .map_rows import Tables, map_all_rows
from .new_arrays import full_along
from .padding import expand_like
from .resting_state import ExactAdamState, Held, RowState, TableState, table_states
from .ways import Constants, centre_of_way, polynomial, way_of

_TOGETHER = 1 << 22  # elements of the parameters that are brought up to date at once


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
    high, low = table.decay[..., 0], table.decay[..., 1]
    cast = high.astype(dtype)
    return cast, ((high - cast.astype(high.dtype)) + low).astype(dtype)


class Coefficients(NamedTuple):
    """What brings the rows of a table up to date; a last axis is that of many tables.

    Attributes:
      ways: Of the powers of `z`, `[2, nodes]`: of the ways behind and ahead.
      centres: Of both.
    """

    ways: Any
    centres: Any


def coefficients_of(table: TableState, constants: Constants, dtype: Any) -> Any:
    constants = cast_floats(constants, dtype)
    ways = jnp.moveaxis(polynomial(table.ways, dtype), (-2, -1), (0, 1))
    steps = table.step_since, table.step + jnp.zeros_like(table.since)
    centres = [centre_of_way(constants, step) for step in steps]
    return Coefficients(ways, jnp.stack(centres))


def move_rows(
    rows: RowState,
    table: TableState,
    constants: Constants,
    coefficients: Coefficients | None = None,
) -> Moved:
    """Where rows are now; computes in the type of the moments."""
    mu, nu, last, log_decay = rows
    dtype = mu.dtype
    if coefficients is None:
        coefficients = coefficients_of(table, constants, dtype)
    constants = cast_floats(constants, dtype)
    steps = (table.clock - last).astype(dtype)
    power1, power2 = jnp.exp(steps * constants.log_b1), jnp.exp(steps * constants.log_q)
    is_value = last <= table.since

    def pick(of_value: Any, of_resting_point: Any) -> jax.Array:
        return expand_like(jnp.where(is_value, of_value, of_resting_point), mu)

    one = jnp.ones_like(power1)
    behind, ahead = coefficients.ways
    by = way_of(
        [pick(*pair) for pair in zip(behind, ahead, strict=True)],
        mu * pick(-one, power1),
        jnp.sqrt(nu) * pick(one, power2),
        pick(*coefficients.centres),
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


def numbers_of_rows(table: TableState, constants: Constants) -> list[jax.Array]:
    """What the kernel needs to bring rows up to date, in float32; as two vectors."""
    single = cast_floats(constants, jnp.float32)
    decay = (jnp.float32(0), jnp.float32(0))
    if table.decay is not None:
        decay = decay_in(table, jnp.float32)
    ways, centres = coefficients_of(table, constants, jnp.float32)
    heads = single.log_b1, single.log_q, *centres, *decay
    return [jnp.stack(heads), ways.reshape(-1)]


def look_up_values(
    param: jax.Array,
    rows: RowState,
    table: TableState,
    constants: Constants,
    ids: jax.Array,
    fill: float | None,
) -> jax.Array:
    """`values_of_rows` of the rows with these ids, by the kernel."""
    numbers = jnp.concatenate(numbers_of_rows(table, constants))
    steps = jnp.stack([table.clock, table.since])
    tables = (*rows[:3], *rows.log_decay)
    return native.look_up_rows_now(param, tables, numbers, steps, ids, fill)


def values_of_rows(
    param: jax.Array, rows: RowState, table: TableState, constants: Constants
) -> jax.Array:
    """The values of rows, or of a whole parameter, as they are now."""
    mu, nu = (x.astype(compute_type(param, rows)) for x in (rows.mu, rows.nu))
    return rows_now(param, move_rows(rows._replace(mu=mu, nu=nu), table, constants))


class CatchUp(NamedTuple):
    """What brings a parameter up to date.

    Attributes:
      by: What is to be added to it, in the type that is computed in.
      power1: `b1^k` of each row, `k` steps after its last update.
      power2: `q^k` of each row.
    """

    by: jax.Array
    power1: jax.Array
    power2: jax.Array


class Whole(NamedTuple):
    """Parameters of one state that are read or updated as a whole.

    Attributes:
      params: The parameters.
      rows: What is known of their rows.
      tables: What is known of each of them, with an axis for them in front.
      constants: Of the optimiser; `eps` for each of them.
    """

    params: Sequence[jax.Array]
    rows: Sequence[RowState]
    tables: TableState
    constants: Constants

    @classmethod
    def of(
        cls,
        state: ExactAdamState,
        params: Sequence[jax.Array],
        held: Sequence[Held],
    ) -> "Whole":
        tables = table_states(state).at(np.array([x.place for x in held]))
        eps = jnp.broadcast_to(state.constants.eps, tables.since.shape)
        constants = state.constants._replace(eps=eps)
        return cls(params, [x.rows for x in held], tables, constants)

    def some(self, which: Sequence[int]) -> "Whole":
        params, rows = ([some[i] for i in which] for some in self[:2])
        places = np.array(which)
        constants = self.constants._replace(eps=self.constants.eps[places])
        return Whole(params, rows, self.tables.at(places), constants)

    def types(self) -> list[Any]:
        """The types to compute in."""
        return [compute_type(*pair) for pair in zip(*self[:2], strict=True)]

    @property
    def has_mesh(self) -> bool:
        return not mesh_of(*jax.tree.leaves(self[:2])).empty


def catch_up(whole: Whole) -> list[CatchUp]:
    """What brings parameters up to date that are read or updated as a whole.

    Nothing is computed in steps before which no row of them is stale, as where their
    gradients are always dense. The formula is compiled once for many parameters, laid
    end to end as one vector: for each of 40, it would take longer than all the rest of
    a training step (7.1 s in place of 2.1). Large ones, which would need memory, are
    for themselves, and so are those on a mesh, where they have layouts.
    """
    found: dict[int, CatchUp] = {}
    for group in _groups(whole):
        found |= zip(group, _catch_up(whole.some(group)), strict=True)
    return [found[i] for i in range(len(whole.params))]


def _groups(whole: Whole) -> Iterator[list[int]]:
    """Which parameters are laid end to end: those of one type, up to a size."""
    groups: dict[Any, tuple[list[int], int]] = {}
    for i, (param, dtype) in enumerate(zip(whole.params, whole.types(), strict=True)):
        if whole.has_mesh or param.size > _TOGETHER:
            yield [i]
            continue
        group, size = groups.get(dtype, ([], 0))
        if group and size + param.size > _TOGETHER:
            yield group
            group, size = [], 0
        groups[dtype] = [*group, i], size + param.size
    yield from (group for group, _ in groups.values())


def _catch_up(whole: Whole) -> list[CatchUp]:
    """That of some parameters together, or of a single one."""
    dtype = whole.types()[0]
    if whole.has_mesh:
        return [_catch_up_alone(whole)]
    pairs = zip(*whole[:2], strict=True)
    shapes = [(jnp.shape(param), jnp.shape(rows.last)) for param, rows in pairs]
    sizes = np.array([[*map(math.prod, pair)] for pair in shapes])
    ends = np.cumsum(sizes, 0)
    is_large = sizes[0][0] > _TOGETHER
    all_sizes: Any = shapes[0] if is_large else [(int(n),) for n in ends[-1]]

    def compute() -> CatchUp:
        return _catch_up_alone(whole) if is_large else _catch_up_joined(whole, sizes)

    def nothing() -> CatchUp:
        elements, rows = all_sizes
        ones = jnp.ones(rows, dtype)
        return CatchUp(jnp.zeros(elements, dtype), ones, ones)

    found = lax.cond(
        jnp.any(whole.tables.since != whole.tables.clock), compute, nothing
    )
    if is_large:
        return [found]
    return [
        CatchUp(
            *(
                x[end[k] - size[k] : end[k]].reshape(shape[k])
                for x, k in zip(found, (0, 1, 1), strict=True)
            )
        )
        for shape, size, end in zip(shapes, sizes, ends, strict=True)
    ]


def _catch_up_rows(
    param: jax.Array,
    rows: RowState,
    table: TableState,
    constants: Constants,
    coefficients: Coefficients | None = None,
) -> CatchUp:
    dtype = compute_type(param, rows)
    rows = rows._replace(mu=rows.mu.astype(dtype), nu=rows.nu.astype(dtype))
    moved = move_rows(rows, table, constants, coefficients)
    by = moved.by
    if moved.log_decay is not None:
        by = by + jnp.expm1(moved.log_decay) * param.astype(dtype)
    return CatchUp(by, *_powers(rows.last, table, constants, dtype))


def _powers(
    last: jax.Array, table: TableState, constants: Constants, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    steps = (table.clock - last).astype(dtype)
    constants = cast_floats(constants, dtype)
    return jnp.exp(steps * constants.log_b1), jnp.exp(steps * constants.log_q)


def _catch_up_alone(whole: Whole) -> CatchUp:
    """That of one parameter, in blocks of rows if it has no mesh."""
    (param,), (rows,), tables, constants = whole
    dtype = compute_type(param, rows)
    others = tables.at(0), constants._replace(eps=constants.eps[0])

    def function(_: Tables, read: Tables, *args: Any) -> Tables:
        param, mu, nu, last, *decays = read
        rows = RowState(mu, nu, last, tuple(decays))
        return tuple(_catch_up_rows(param, rows, *args))

    news = param, rows.last, rows.last
    zeros = tuple(full_along(x, dtype=dtype) for x in news)
    read = (param, *rows[:3], *rows.log_decay)
    return CatchUp(*map_all_rows(function, zeros, *others, read=read))


def _catch_up_joined(whole: Whole, sizes: np.ndarray) -> CatchUp:
    """That of parameters end to end; each element counts as a row with one column.

    With parameters of 2 x 3 and of 2 elements (a vector has as many rows as elements):
    element 0 1 2 3 4 5 6 7, parameter 0 0 0 0 0 0 1 1, row 0 0 0 1 1 1 2 3.
    """
    params, rows, table, constants = whole
    dtype = whole.types()[0]

    def join(arrays: Iterable[jax.Array]) -> jax.Array:
        return jnp.concatenate(cast_floats([x.ravel() for x in arrays], dtype))

    widths = jnp.asarray(sizes[:, 0] // np.maximum(1, sizes[:, 1]), jnp.int32)
    first_element, first_row = jnp.asarray((np.cumsum(sizes, 0) - sizes).T, jnp.int32)
    element = jnp.arange(sizes[:, 0].sum(), dtype=jnp.int32)
    is_behind = element[:, None] >= first_element[None, 1:]
    place = jnp.sum(is_behind, axis=1, dtype=jnp.int32)
    row = first_row[place] + (element - first_element[place]) // widths[place]

    last = join(x.last for x in rows)
    decays = zip(*(x.log_decay for x in rows), strict=True)
    joined = RowState(
        join(x.mu for x in rows),
        join(x.nu for x in rows),
        last[row],
        tuple(join(x)[row] for x in decays),
    )
    ways, centres = coefficients_of(table, constants, dtype)
    coefficients = Coefficients(
        [[x[place] for x in way] for way in ways], [x[place] for x in centres]
    )
    decay = None if table.decay is None else table.decay[place]
    table = table._replace(since=table.since[place], decay=decay)
    by, *_ = _catch_up_rows(join(params), joined, table, constants, coefficients)
    return CatchUp(by, *_powers(last, table, constants, dtype))


def whole_values(
    state: ExactAdamState, params: Sequence[jax.Array], held: Sequence[Held]
) -> list[jax.Array]:
    """The values of whole parameters."""
    pairs = zip(params, catch_up(Whole.of(state, params, held)), strict=True)
    return [(x + found.by).astype(x.dtype) for x, found in pairs]
