"""The step on the rows that have a gradient, and on parameters with a dense one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.sparse import BCOO

from .._optimizers.rounding import nearest
from .._rows.clocks import as_update
from .._rows.entries import accumulator_dtype
from .._rows.jit_with_bags import jit_with_bags
from .._rows.kernel_ops import CALLS, KernelFormula
from .._rows.map_rows import Tables
from .._rows.row_ops import Formula, Update
from .._rows.update_table import update_table
from ..native import _calls as native
from .kernel_arrays import KernelArrays, kernel_stale, stacked
from .remaining_update import Constants, remaining_update
from .rows import (
    RowState,
    TableState,
    cast_floats,
    catch_up_rows,
    coefficients_of,
    decay_in,
    log_decay_of,
    mark_updated,
)


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
    catch_up = catch_up_rows(param, rows, before, constants, dtype=dtype)
    mu, nu = catch_up.moments(rows)
    constants, step = cast_floats((constants, step), dtype)

    mu = mu + jnp.asarray(1 - betas.b1, dtype) * (grad - mu)
    # Infinity stays, and is not subtracted from itself.
    change = grad * grad - jnp.minimum(nu, jnp.finfo(dtype).max)
    nu = nu + jnp.asarray(1 - betas.b2, dtype) * change
    # What is stored goes from the old projected final value to the new one: it is
    # brought up to date (`catch_up.by`), moved by Adam's update, and moved on by the
    # remaining update of its new moments. In the worked example of `remaining_update`,
    # a first update by 0.1 of a row at 2.1 stores `2.1 - 0.1 - 0.1 = 1.9`.
    move = step.size * mu
    if step.grad_size is not None:
        move = move + step.grad_size * grad
    change = -move / (jnp.sqrt(nu) + constants.eps * step.rho)
    if step.log_decay is None:
        change = change + catch_up.by
    else:
        log_decay = log_decay_of(rows, before, grad) + step.log_decay
        change = change + jnp.exp(step.log_decay) * catch_up.by
        change = change + jnp.expm1(log_decay) * param
    # Of the moments as they are stored, since it is read back from these.
    (_, ahead), (_, centre) = coefficients_of(after, constants, dtype)
    kept, root = _rounded(mu, rows.mu), jnp.sqrt(_rounded(nu, rows.nu))
    change = change - remaining_update(
        [*ahead], kept, root, centre, uses_roots=constants.uses_roots
    )
    return change, (mu, nu, *mark_updated(rows, after))


def _by_kernel(
    entries: Any, tables: Tables, read: Tables, targets: Tables, *args: Any
) -> Any:
    *_, constants, _, arrays = args
    stale = kernel_stale(RowState.of(*tables), arrays, constants)
    return native.exact_adam_rows(entries, stale, arrays.step, read, targets)


CALLS["exact_adam"] = KernelFormula(_by_kernel, "float32")


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
    row_fn = functools.partial(_update_rows, betas=betas)
    update, tables = update_table(
        Formula(row_fn, "exact_adam"),
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
        accumulator_dtype(grad.dtype, *(x.dtype for x in old[:2]))
        for grad, old in zip(grads, rows, strict=True)
    ]
    columns = grads, *zip(*(old[:2] for old in rows), strict=True)
    wide, mus, nus = (list(map(jnp.astype, column, types)) for column in columns)
    adam = optax.scale_by_adam(*betas[:3], nesterov=betas.nesterov)
    updates: Any
    with jax.numpy_dtype_promotion("standard"):  # optax has no other
        updates, state = adam.update(wide, optax.ScaleByAdamState(count, mus, nus))
    new_rows = []
    for i, (old, dtype) in enumerate(zip(rows, types, strict=True)):
        update = updates[i]
        if decays[i]:
            update = update + weight_decay.astype(dtype) * params[i].astype(dtype)
        updates[i] = (-rate.astype(dtype) * update).astype(grads[i].dtype)
        mu, nu = state.mu[i].astype(old.mu.dtype), state.nu[i].astype(old.nu.dtype)
        # The rows have not decayed since they held their values, just as before.
        new_rows.append(RowState(mu, nu, jnp.full_like(old.last, clock), old.log_decay))
    return updates, new_rows


def step_arrays(
    arrays: KernelArrays,
    after: TableState,
    constants: Constants,
    step: Step,
    betas: Betas,
) -> KernelArrays:
    """What a step needs, for the kernel, beside the arrays that it is read by."""
    dtype = jnp.dtype("float32")
    polynomials, (_, centre) = coefficients_of(after, constants, dtype)
    constants, step = cast_floats((constants, step), dtype)
    decay_high, decay_low = decay_in(after, dtype)
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
    return arrays._replace(polynomials=polynomials, step=stacked(*scalars))
