"""Stale rows: what brings them up to date, and the step on rows with a gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.sparse import BCOO

from .._optimizers.rounding import nearest
from .._rows.canary import as_update
from .._rows.entries import accumulator_dtype
from .._rows.jit_with_bags import jit_with_bags
from .._rows.map_rows import Tables
from .._rows.padding import expand_like
from .._rows.row_ops import Formula, Update
from .._rows.update_table import update_table
from ..native import _calls as native
from .remaining_update import (
    Constants,
    centre_after,
    polynomial,
    remaining_update,
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


class KernelArrays(NamedTuple):
    """What the kernel takes besides rows, of all parameters; see `native.Stale`.

    `step` are `native.StepScalars`, `[parameters, 9]`; `None` if rows are only read.
    """

    scalars: jax.Array
    polynomials: jax.Array
    steps: jax.Array
    place: jax.Array | None = None
    step: jax.Array | None = None

    def at(self, place: int) -> "KernelArrays":
        return self._replace(place=jnp.asarray(place, jnp.int32))


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


def _decay_in(table: TableState, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Both parts; what the first loses in a smaller type goes to the second."""
    if table.decay is None:
        return jnp.zeros([], dtype), jnp.zeros([], dtype)
    # In float32, -0.1 is `-0.1 - 1.5e-9`: the second part becomes `1.5e-9 + low`.
    high, low = table.decay[..., 0], table.decay[..., 1]
    cast = high.astype(dtype)
    return cast, ((high - cast.astype(high.dtype)) + low).astype(dtype)


def _coefficients(
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
    (behind, ahead), centres = _coefficients(table, constants, dtype)
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


def stale_arrays(table: TableState, constants: Constants) -> KernelArrays:
    """What brings rows up to date, for the kernel.

    Of all parameters at once, because XLA compiles every operation on a few numbers
    apart.
    """
    single = cast_floats(constants, jnp.float32)
    polynomials, (behind, ahead) = _coefficients(table, constants, jnp.float32)
    decay = _decay_in(table, jnp.float32)
    logs = single.log_b1, single.log_q
    scalars = native.StaleScalars(*logs, behind, ahead, *decay)
    steps = _stacked(table.clock, table.values_until)
    return KernelArrays(_stacked(*scalars), polynomials, steps)


def _stacked(*columns: Any) -> jax.Array:
    """Numbers of each parameter side by side along a last axis."""
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)


def _stale(rows: RowState, arrays: KernelArrays, constants: Constants) -> native.Stale:
    of_all: Any = arrays[:4]
    return native.Stale(rows.arrays, constants.uses_roots, *of_all)


class StaleTable(NamedTuple):
    """What brings the rows of a parameter up to date; `StaleRows` in `_rows` says how.

    `arrays` are `state` and `constants` for the kernel.
    """

    rows: RowState
    state: TableState
    constants: Constants
    arrays: KernelArrays

    @property
    def clock(self) -> jax.Array:
        return self.state.clock

    def values(
        self, rows: jax.Array, take: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        # A vector's state has an axis of length 1 in the place of the last one.
        own = jax.tree.map(lambda x: take(expand_like(x, self.rows.nu)), self.rows)
        return values_of_rows(rows, own, self.state, self.constants)

    def kernel(
        self, table: jax.Array, ids: jax.Array
    ) -> Callable[[jax.Array, jax.Array, float | None], jax.Array] | None:
        if not native.supports_stale_lookup(table, self.rows.arrays, ids):
            return None

        def look_up(table: jax.Array, ids: jax.Array, fill: float | None) -> jax.Array:
            stale = _stale(self.rows, self.arrays, self.constants)
            return native.look_up_stale_rows(table, stale, ids, fill)

        return look_up

    def map(self, function: Callable[[Any, bool], Any]) -> "StaleTable":
        rows = jax.tree.map(lambda x: function(x, True), self.rows)
        others = jax.tree.map(lambda x: function(x, False), self[1:])
        return StaleTable(rows, *others)


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
    arrays: KernelArrays,
    *,
    betas: Betas,
) -> tuple[jax.Array, Tables]:
    """The formula: what to add to the stored parameters, and the rows' new state.

    `tables` are the `RowState.arrays` of the rows, and if they decay, the parameter;
    `eps` is NaN where the state is not of this optimiser; `arrays` are the kernel's.

    `ExactAdam` in `native/exact_adam.h` is the same formula for CPUs: change
    both. `tests/native/test_exact_adam.py` compares them.
    """
    del arrays
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


@functools.partial(jit_with_bags, static_argnames="betas")
def update_touched_rows(
    grad: BCOO,
    read: Tables,
    rows: RowState,
    before: TableState,
    after: TableState,
    constants: Constants,
    step: Step,
    arrays: KernelArrays,
    adds_to: jax.Array | None,
    *,
    betas: Betas,
) -> tuple[Update, RowState]:
    """One leaf with a row-sparse gradient; reads and writes its touched rows."""
    dtype = accumulator_dtype(grad.dtype, *(x.dtype for x in (*read, *rows[:2])))

    def by_kernel(
        grad: Any, tables: Tables, read: Tables, targets: Tables, *args: Any
    ) -> Any:
        *_, constants, _, of_step = args
        stale = _stale(RowState.of(*tables), of_step, constants)
        return native.exact_adam_rows(grad, stale, of_step.step, read, targets)

    row_fn = functools.partial(_update_rows, betas=betas)
    update, tables = update_table(
        Formula(row_fn, "exact_adam", by_kernel),
        grad,
        rows.arrays,
        before,
        after,
        constants,
        step,
        arrays,
        dtype=dtype,
        read=read,
        adds_to=adds_to,
    )
    return update._replace(change=as_update(update.change)), RowState.of(*tables)


@functools.partial(jax.jit, static_argnames=("betas", "decays"))
def update_whole(
    grads: list[jax.Array],
    params: list[Any],
    rows: list[RowState],
    rate: jax.Array,
    count: jax.Array,
    clock: jax.Array,
    weight_decay: Any,
    *,
    betas: Betas,
    decays: tuple[bool, ...],
) -> tuple[list[jax.Array], list[RowState]]:
    """`optax.adam` of parameters with dense gradients, none of whose rows are stale.

    `count` is the number of updates before this one, `clock` that after it; of the
    parameters those that decay are read. Returns the updates and the new rows.
    """
    types = [
        accumulator_dtype(grad.dtype, *(x.dtype for x in own[:2]))
        for grad, own in zip(grads, rows, strict=True)
    ]
    columns = grads, *zip(*(own[:2] for own in rows), strict=True)
    wide, mus, nus = (list(map(jnp.astype, column, types)) for column in columns)
    adam = optax.scale_by_adam(*betas[:3], nesterov=betas.nesterov)
    updates: Any
    with jax.numpy_dtype_promotion("standard"):  # optax has no other
        updates, state = adam.update(wide, optax.ScaleByAdamState(count, mus, nus))
    news = []
    for i, (own, dtype) in enumerate(zip(rows, types, strict=True)):
        update = updates[i]
        if decays[i]:
            update = update + weight_decay.astype(dtype) * params[i].astype(dtype)
        updates[i] = (-rate.astype(dtype) * update).astype(grads[i].dtype)
        mu, nu = state.mu[i].astype(own.mu.dtype), state.nu[i].astype(own.nu.dtype)
        # The rows have not decayed since they held their values, just as before.
        news.append(RowState(mu, nu, jnp.full_like(own.last, clock), own.log_decay))
    return updates, news


def step_arrays(
    arrays: KernelArrays,
    after: TableState,
    constants: Constants,
    step: Step,
    betas: Betas,
) -> KernelArrays:
    """What a step needs, for the kernel, beside the arrays that it is read by."""
    dtype = jnp.dtype("float32")
    polynomials, (_, centre) = _coefficients(after, constants, dtype)
    constants, step = cast_floats((constants, step), dtype)
    decay_high, decay_low = _decay_in(after, dtype)
    zero = jnp.zeros([], dtype)
    scalars = native.StepScalars(
        one_minus_b1=jnp.asarray(1 - betas.b1, dtype),
        one_minus_b2=jnp.asarray(1 - betas.b2, dtype),
        size=step.size,
        grad_size=zero if step.grad_size is None else step.grad_size,
        eps=constants.eps * step.rho,
        log_decay=zero if step.log_decay is None else step.log_decay,
        centre=centre,
        decay_high=decay_high,
        decay_low=decay_low,
    )
    # Behind, ahead, and ahead of the step after: `[3, nodes]` of each.
    polynomials = jnp.concatenate([arrays.polynomials, polynomials[..., 1:, :]], -2)
    return arrays._replace(polynomials=polynomials, step=_stacked(*scalars))
