"""Stale rows: what brings them up to date, and the step on rows with a gradient."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import mesh_of
from .._optimizers.rounding import nearest
from .._rows.canary import as_update
from .._rows.coalesce import accumulator_dtype
from .._rows.map_rows import Tables, map_all_rows
from .._rows.new_arrays import full_along
from .._rows.padding import expand_like
from .._rows.update_table import update_table
from ..native import _calls as native
from .remaining_update import (
    Constants,
    centre_after,
    polynomial,
    remaining_update,
)
from .state import ExactAdamState, RowState, TableState, table_states

_MOST_JOINED = 1 << 22  # elements of parameters that are brought up to date as one


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


def _decay_in(table: TableState, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Both parts; what the first loses in a smaller type goes to the second."""
    assert table.decay is not None  # where rows have one
    # In float32, -0.1 is `-0.1 - 1.5e-9`: the second part becomes `1.5e-9 + low`.
    high, low = table.decay[..., 0], table.decay[..., 1]
    cast = high.astype(dtype)
    return cast, ((high - cast.astype(high.dtype)) + low).astype(dtype)


def _coefficients(
    table: TableState, constants: Constants, dtype: Any
) -> tuple[jax.Array, list[jax.Array]]:
    """Polynomials since `values_until` and from now on, `[2, nodes]`, their centres.

    Of several tables, a last axis is for them.
    """
    constants = cast_floats(constants, dtype)
    # From values at the nodes [2, nodes] to coefficients [2, nodes], behind and ahead;
    # of p tables from [p, 2, nodes] to [2, nodes, p]: p numbers for each coefficient.
    polynomials = polynomial(table.remaining, dtype)
    steps = table.values_until, table.clock + jnp.zeros_like(table.values_until)
    centres = [centre_after(constants, step + table.origin) for step in steps]
    return jnp.moveaxis(polynomials, (-2, -1), (0, 1)), centres


def _powers(
    last: jax.Array, table: TableState, constants: Constants, dtype: Any
) -> list[jax.Array]:
    steps = (table.clock - last).astype(dtype)
    # A row is later than its table only where a state was restored in part.
    steps = jnp.where(steps < 0, jnp.nan, steps)
    logs = cast_floats(constants[:2], dtype)
    return [jnp.exp(steps * log) for log in logs]


def compute_type(param: jax.Array, rows: RowState) -> Any:
    return accumulator_dtype(param.dtype, rows.mu.dtype, rows.nu.dtype)


def catch_up_rows(
    param: jax.Array,
    rows: RowState,
    table: TableState,
    constants: Constants,
    coefficients: tuple[Any, Any] | None = None,
    *,
    dtype: Any = None,
) -> CatchUp:
    """What brings rows, or a whole parameter, up to date.

    Args:
      param: As it is stored.
      rows: What is known of the rows.
      table: What is known of their table.
      constants: The constants.
      coefficients: Where they are known, `_coefficients`.
      dtype: The type to compute in; by default the parameter's and the moments'.
    """
    dtype = compute_type(param, rows) if dtype is None else dtype
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
    (behind, ahead), centres = coefficients or _coefficients(table, constants, dtype)
    by = remaining_update(
        [pick(*pair) for pair in zip(behind, ahead, strict=True)],
        mu * pick(-one, power1),
        jnp.sqrt(nu) * pick(one, power2),
        pick(*centres),
        uses_roots=constants.uses_roots,
    )
    return CatchUp(by, power1, power2)


def _log_decay(rows: RowState, table: TableState, like: jax.Array) -> Any:
    """The logarithm of the decay of rows since their last update; 0 without."""
    if not rows.log_decay:
        return 0
    # A single float would lose what a step adds to the sum of a long training.
    (old, old_rest), (new, new_rest) = rows.log_decay, _decay_in(table, like.dtype)
    return expand_like((new - old) + (new_rest - old_rest), like)


def _catch_up_with_decay(param: jax.Array, rows: RowState, *args: Any) -> CatchUp:
    """`catch_up_rows` with the decay of a parameter as a part of what is added."""
    found = catch_up_rows(param, rows, *args)
    by, (table, *_) = found.by, args
    decay = jnp.expm1(_log_decay(rows, table, by)) if rows.log_decay else 0
    return found._replace(by=by + decay * param.astype(by.dtype))


def value_of(
    param: jax.Array, rows: RowState, table: TableState, found: CatchUp
) -> jax.Array:
    """The values of rows, from what brings them up to date."""
    value, by = param.astype(found.by.dtype), found.by
    if rows.log_decay:
        value = jnp.exp(_log_decay(rows, table, by)) * value
    return (value + by).astype(param.dtype)


def values_of_rows(
    param: jax.Array, rows: RowState, table: TableState, constants: Constants
) -> jax.Array:
    """The values of rows, or of a whole parameter, as they are now."""
    found = catch_up_rows(param, rows, table, constants)
    return value_of(param, rows, table, found)


def mark_updated(rows: RowState, table: TableState) -> tuple[jax.Array, ...]:
    """The new `last` and `log_decay` of rows that have been brought up to date."""

    def marked(old: jax.Array, new: jax.Array) -> jax.Array:
        # Problem: XLA for CPUs copies the table. Cause: it may scatter before it has
        # gathered, where new values do not depend on the old ones. Remedy: a select
        # that depends on them. Safe, because no row is later than now. Test:
        # `tests/optimizers/test_memory.py`.
        return jnp.where(rows.last > table.clock, old, new.astype(old.dtype))

    news: list[jax.Array] = [table.clock]
    if rows.log_decay:
        news += _decay_in(table, rows.log_decay[0].dtype)
    pairs = zip((rows.last, *rows.log_decay), news, strict=True)
    return tuple(marked(*pair) for pair in pairs)


def _stale_rows(
    rows: RowState, table: TableState, constants: Constants
) -> native.Stale:
    """What the kernel needs to bring rows up to date, in float32."""
    single = cast_floats(constants, jnp.float32)
    decay = (jnp.float32(0), jnp.float32(0))
    if table.decay is not None:
        decay = _decay_in(table, jnp.float32)
    polynomials, (behind, ahead) = _coefficients(table, constants, jnp.float32)
    return native.Stale(
        tables=rows.arrays,
        scalars=native.StaleScalars(single.log_b1, single.log_q, behind, ahead, *decay),
        polynomials=polynomials,
        uses_roots=constants.uses_roots,
        steps=jnp.stack([table.clock, table.values_until]),
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
    stale = _stale_rows(rows, table, constants)
    return native.look_up_stale_rows(param, stale, ids, fill)


# Parameters that are read or updated as a whole.


class WholeTables(NamedTuple):
    """Parameters of one state, as they are stored.

    Attributes:
      params: The parameters.
      rows: What is known of their rows.
      tables: What is known of each of them.
      constants: Of the optimiser; `eps` has an axis for them.
    """

    params: Sequence[jax.Array]
    rows: Sequence[RowState]
    tables: TableState
    constants: Constants

    def some(self, which: Sequence[int]) -> "WholeTables":
        params, rows = [self.params[i] for i in which], [self.rows[i] for i in which]
        places = np.array(which)
        constants = self.constants._replace(eps=self.constants.eps[places])
        return WholeTables(params, rows, self.tables.at(places), constants)

    @property
    def types(self) -> list[Any]:
        """The types to compute in."""
        return [compute_type(*pair) for pair in zip(*self[:2], strict=True)]

    @property
    def has_mesh(self) -> bool:
        return not mesh_of(*jax.tree.leaves(self[:2])).empty


def catch_up_all(whole: WholeTables) -> list[CatchUp]:
    """What brings parameters up to date that are read or updated as a whole.

    Nothing is computed in steps before which no row of them is stale, as where their
    gradients are always dense. The formula is compiled once for many parameters, laid
    end to end as one vector: for each of 40, it would take longer than all the rest of
    a training step. Large ones, which would need memory, are for themselves, and so are
    those on a mesh, where they have layouts.
    """
    found: dict[int, CatchUp] = {}
    for group in _groups(whole):
        found |= zip(group, _catch_up_group(whole.some(group)), strict=True)
    return [found[i] for i in range(len(whole.params))]


def _groups(whole: WholeTables) -> Iterator[list[int]]:
    """Which parameters are laid end to end: those of one type, up to a size."""
    # For parameters of 3M, 2M, 1M and 5M elements and a limit of 4M: [0], [3], [1, 2].
    groups: dict[Any, tuple[list[int], int]] = {}
    for i, (param, dtype) in enumerate(zip(whole.params, whole.types, strict=True)):
        if whole.has_mesh or param.size > _MOST_JOINED:
            yield [i]
            continue
        group, size = groups.get(dtype, ([], 0))
        if group and size + param.size > _MOST_JOINED:
            yield group
            group, size = [], 0
        groups[dtype] = [*group, i], size + param.size
    yield from (group for group, _ in groups.values())


def _catch_up_group(whole: WholeTables) -> list[CatchUp]:
    if whole.has_mesh:
        return [_catch_up_alone(whole)]
    pairs = zip(*whole[:2], strict=True)
    shapes = [(param.shape, rows.last.shape) for param, rows in pairs]
    sizes = np.array([[*map(math.prod, pair)] for pair in shapes])
    ends = np.cumsum(sizes, 0)
    is_large = sizes[0][0] > _MOST_JOINED
    elements, rows = shapes[0] if is_large else ((int(n),) for n in ends[-1])

    def compute() -> CatchUp:
        return _catch_up_alone(whole) if is_large else _catch_up_joined(whole, sizes)

    def nothing() -> CatchUp:
        dtype = whole.types[0]
        ones = jnp.ones(rows, dtype)
        return CatchUp(jnp.zeros(elements, dtype), ones, ones)

    # Where all rows hold their present values, `by` is zero and nothing has decayed: a
    # language model whose parameters all have dense gradients never computes a
    # catch-up.
    is_stale = jnp.any(whole.tables.values_until != whole.tables.clock)
    found = lax.cond(is_stale, compute, nothing)
    if is_large:
        return [found]

    def part(x: jax.Array, i: int, axis: int) -> jax.Array:
        # Columns of `ends` and `sizes`: elements (axis 0) and rows (axis 1).
        end, size = ends[i, axis], sizes[i, axis]
        return x[end - size : end].reshape(shapes[i][axis])

    by, *powers = found
    return [
        CatchUp(part(by, i, 0), *(part(x, i, 1) for x in powers))
        for i in range(len(shapes))
    ]


def _catch_up_alone(whole: WholeTables) -> CatchUp:
    """What brings one parameter up to date, in blocks of rows if it is on no mesh."""
    (param,), (rows,), tables, constants = whole
    others = tables.at(0), constants._replace(eps=constants.eps[0])

    def function(_: Tables, read: Tables, *args: Any) -> Tables:
        param, *arrays = read
        return tuple(_catch_up_with_decay(param, RowState.of(*arrays), *args))

    dtype = compute_type(param, rows)
    news = tuple(full_along(x, dtype=dtype) for x in (param, rows.last, rows.last))
    return CatchUp(*map_all_rows(function, news, *others, read=(param, *rows.arrays)))


def _catch_up_joined(whole: WholeTables, sizes: np.ndarray) -> CatchUp:
    """The same for parameters end to end; each element counts as a row of one column.

    With parameters of 2 x 3 and of 2 elements (a vector has as many rows as elements):
    element 0 1 2 3 4 5 6 7, place 0 0 0 0 0 0 1 1, row 0 0 0 1 1 1 2 3.
    """
    params, rows, table, constants = whole
    dtype = whole.types[0]

    def join(arrays: Iterable[jax.Array]) -> jax.Array:
        return jnp.concatenate(cast_floats([x.ravel() for x in arrays], dtype))

    widths = jnp.asarray(sizes[:, 0] // np.maximum(1, sizes[:, 1]), jnp.int32)
    first_element, first_row = jnp.asarray((np.cumsum(sizes, 0) - sizes).T, jnp.int32)
    element = jnp.arange(sizes[:, 0].sum(), dtype=jnp.int32)
    # Zero, which XLA does not know: it would compute `place` while compiling, slowly.
    element = element + jnp.minimum(table.clock, 0)
    is_behind = element[:, None] >= first_element[None, 1:]
    place = jnp.sum(is_behind, axis=1, dtype=jnp.int32)
    row = first_row[place] + (element - first_element[place]) // widths[place]

    mu, nu, *others = map(join, zip(*(x.arrays for x in rows), strict=True))
    polynomials, centres = _coefficients(table, constants, dtype)
    table = table.at(place)
    # One of both for each element, as `catch_up_rows` would choose.
    which = place + len(params) * (others[0][row] > table.values_until)
    polynomial = [
        jnp.concatenate(pair)[which] for pair in zip(*polynomials, strict=True)
    ]
    centre = jnp.concatenate(centres)[which]
    by, *_ = _catch_up_with_decay(
        join(params),
        RowState.of(mu, nu, *(x[row] for x in others)),
        table,
        constants,
        ((polynomial, polynomial), (centre, centre)),
    )
    return CatchUp(by, *_powers(others[0], table, constants, dtype))


def whole_values(
    state: ExactAdamState, rows: dict[int, RowState], params: dict[int, jax.Array]
) -> list[jax.Array]:
    """The values of whole parameters, in the order of `params`."""
    if not params:
        return []
    places = np.array([place for place, i in enumerate(rows) if i in params])
    own_rows, tables = [rows[i] for i in params], table_states(state).at(places)
    eps = jnp.broadcast_to(state.constants.eps, places.shape)
    constants = state.constants._replace(eps=eps)
    whole = WholeTables([*params.values()], own_rows, tables, constants)
    pairs = zip(params.values(), catch_up_all(whole), strict=True)
    return [(x.astype(y.by.dtype) + y.by).astype(x.dtype) for x, y in pairs]


# The step on rows with a gradient.


class Step(NamedTuple):
    """One step of a parameter; `rate` and `weight_decay` are as given.

    Attributes:
      size: `a_t`: learning rate and bias corrections.
      grad_size: With `nesterov`, the same for the gradient of the step itself.
      rho: Root of the second moment's correction.
      log_decay: Logarithm of `1 - lr_t * weight_decay`; `None` without weight decay.
      rate: The learning rate.
      weight_decay: The weight decay, or `None`.
    """

    size: jax.Array
    grad_size: jax.Array | None
    rho: jax.Array
    log_decay: jax.Array | None
    rate: jax.Array
    weight_decay: jax.Array | None


class Betas(NamedTuple):
    """The hyper-parameters that a compiled step holds as constants."""

    b1: float
    b2: float
    eps: float
    nesterov: bool


def _rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` as the type of `like` holds it; XLA may drop a cast there and back."""
    if like.dtype.itemsize >= x.dtype.itemsize:
        return x
    # Only float16 has fewer exponents than float32: `reduce_precision` makes its
    # subnormal numbers, below 6e-5, zeros, and most second moments are such numbers.
    info = jnp.finfo(like.dtype)
    if info.minexp > jnp.finfo(jnp.float32).minexp:
        return nearest(x.astype(jnp.float32), like.dtype).astype(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _update_rows(
    grad: jax.Array,
    tables: Tables,
    before: TableState,
    after: TableState,
    constants: Constants,
    step: Step,
    *,
    betas: Betas,
) -> tuple[jax.Array, Tables]:
    """The formula.

    `ExactAdam` in `native/exact_adam.h` is the same formula for CPUs: change
    both. `tests/native/test_exact_adam.py` compares them.

    Args:
      grad: Gradients of rows.
      tables: The `RowState.arrays` of these rows; if they decay, the parameter last.
      before: The state of their table before the step.
      after: The state after it.
      constants: Arrays; their `eps` is NaN where the state is not of this optimiser.
      step: The scalars of the step.
      betas: Python numbers: `1 - b1` is taken in double precision.

    Returns:
      What to add to the stored parameters, and the new state of the rows.
    """
    dtype = grad.dtype
    count = 3 if before.decay is None else 5
    rows, params = RowState.of(*tables[:count]), tables[count:]
    param = params[0].astype(dtype) if params else grad
    found = catch_up_rows(param, rows, before, constants, dtype=dtype)
    mu, nu = found.moments(rows)
    constants, step = cast_floats((constants, step), dtype)

    mu = mu + jnp.asarray(1 - betas.b1, dtype) * (grad - mu)
    # Infinity stays, and is not subtracted from itself.
    change = grad * grad - jnp.minimum(nu, jnp.finfo(dtype).max)
    nu = nu + jnp.asarray(1 - betas.b2, dtype) * change
    # What is stored goes from the old projected final value to the new one: it is
    # brought up to date (`found.by`), moved by Adam's update, and moved on by the
    # remaining update of its new moments. In the worked example of `remaining_update`,
    # a first update by 0.1 of a row at 2.1 stores `2.1 - 0.1 - 0.1 = 1.9`.
    move = step.size * mu
    if step.grad_size is not None:
        move = move + step.grad_size * grad
    change = -move / (jnp.sqrt(nu) + constants.eps * step.rho)
    if step.log_decay is None:
        change = change + found.by
    else:
        log_decay = _log_decay(rows, before, grad) + step.log_decay
        change = change + jnp.exp(step.log_decay) * found.by
        change = change + jnp.expm1(log_decay) * param
    # Of the moments as they are stored, since it is read back from these.
    (_, ahead), (_, centre) = _coefficients(after, constants, dtype)
    kept, root = _rounded(mu, rows.mu), jnp.sqrt(_rounded(nu, rows.nu))
    change = change - remaining_update(
        [*ahead], kept, root, centre, uses_roots=constants.uses_roots
    )
    return change, (mu, nu, *mark_updated(rows, after))


@functools.partial(jax.jit, static_argnames="betas")
def update_touched_rows(
    grad: BCOO,
    read: Tables,
    rows: RowState,
    before: TableState,
    after: TableState,
    constants: Constants,
    step: Step,
    *,
    betas: Betas,
) -> tuple[BCOO, RowState]:
    """One leaf with a row-sparse gradient; reads and writes its touched rows."""
    dtype = accumulator_dtype(grad.dtype, *(x.dtype for x in (*read, *rows[:2])))

    def by_kernel(
        grad: BCOO,
        tables: Tables,
        read: Tables,
        before: TableState,
        after: TableState,
        constants: Constants,
        step: Step,
    ) -> Any:
        stale = _stale_rows(RowState.of(*tables), before, constants)
        scalars, polynomial = _step_scalars(after, constants, step, betas)
        polynomials = jnp.concatenate([stale.polynomials, polynomial[None]])
        # Behind, ahead, and ahead of the step after: `[3, nodes]`.
        stale = stale._replace(polynomials=polynomials)
        return native.exact_adam_rows(grad, stale, scalars, read)

    floats = rows.mu, rows.nu, *rows.log_decay, *read
    is_float32 = all(x.dtype == jnp.float32 for x in floats)
    update, tables = update_table(
        functools.partial(_update_rows, betas=betas),
        grad,
        rows.arrays,
        before,
        after,
        constants,
        step,
        dtype=dtype,
        read=read,
        kernel=by_kernel if rows.last.ndim == 1 and is_float32 else None,
    )
    return as_update(update), RowState.of(*tables)


@functools.partial(jax.jit, static_argnames=("betas", "decays"))
def update_all_rows(
    grads: list[jax.Array],
    whole: WholeTables,
    count: jax.Array,
    clock: jax.Array,
    step: Step,
    *,
    betas: Betas,
    decays: tuple[bool, ...],
) -> tuple[list[jax.Array], list[RowState]]:
    """`optax.adam` of the parameters with dense gradients, whose rows hold values.

    Args:
      grads: Their gradients.
      whole: The parameters.
      count: The number of updates before this one.
      clock: The clock after it.
      step: The scalars of the step.
      betas: The hyper-parameters.
      decays: Says for each parameter whether it decays.

    Returns:
      The updates and the new rows.
    """
    found = catch_up_all(whole)
    parts = [*zip(grads, whole.rows, found, strict=True)]
    types = [accumulator_dtype(grad.dtype, x.by.dtype) for grad, _, x in parts]
    wide = [grad.astype(dtype) for grad, dtype in zip(grads, types, strict=True)]
    moments = zip(*(x.moments(rows) for _, rows, x in parts), strict=True)
    mus, nus = (list(map(jnp.astype, some, types)) for some in moments)
    adam = optax.scale_by_adam(*betas[:3], nesterov=betas.nesterov)
    updates: Any
    with jax.numpy_dtype_promotion("standard"):  # optax has no other
        updates, state = adam.update(wide, optax.ScaleByAdamState(count, mus, nus))
    news = []
    for i, (grad, rows, (by, *_)) in enumerate(parts):
        # `by` makes the stored parameter the value before this step; the update follows
        # from there. Afterwards the rows hold values.
        dtype, update = types[i], updates[i]
        if decays[i]:
            assert step.weight_decay is not None
            param = whole.params[i].astype(dtype) + by
            update = update + step.weight_decay.astype(dtype) * param
        updates[i] = (by - step.rate.astype(dtype) * update).astype(grad.dtype)
        mu, nu = state.mu[i].astype(rows.mu.dtype), state.nu[i].astype(rows.nu.dtype)
        last = jnp.zeros_like(rows.last) + clock
        decay = jax.tree.map(jnp.zeros_like, rows.log_decay)
        news.append(RowState(mu, nu, last, decay))
    return updates, news


def _step_scalars(
    after: TableState, constants: Constants, step: Step, betas: Betas
) -> tuple[native.StepScalars, jax.Array]:
    """What the kernel needs for the step itself, in float32; the new polynomial."""
    dtype = jnp.dtype("float32")
    zero = jnp.zeros([], dtype)
    polynomials, (_, centre) = _coefficients(after, constants, dtype)
    constants, step = cast_floats((constants, step), dtype)
    decay = (zero, zero) if after.decay is None else _decay_in(after, dtype)
    scalars = native.StepScalars(
        one_minus_b1=jnp.asarray(1 - betas.b1, dtype),
        one_minus_b2=jnp.asarray(1 - betas.b2, dtype),
        size=step.size,
        grad_size=zero if step.grad_size is None else step.grad_size,
        eps=constants.eps * step.rho,
        log_decay=zero if step.log_decay is None else step.log_decay,
        centre=centre,
        decay_high=decay[0],
        decay_low=decay[1],
    )
    return scalars, polynomials[1]
