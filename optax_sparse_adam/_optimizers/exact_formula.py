"""The step of `exact_adam` on rows, or on a whole parameter."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.sparse import BCOO

from .._jax_extras.on_cpu import on_cpu
from .._rows.coalesce import (
    accumulator_dtype,
    bcoo_of,
    cast_entries,
    touched_rows,
)
from .._rows.map_rows import Tables, map_rows
from .._rows.padding import expand_like
from .._rows.resting_rows import (
    Whole,
    cast_floats,
    catch_up,
    decay_in,
    move_rows,
    numbers_of_rows,
    stamp,
)
from .._rows.resting_state import RowState, TableState
from .._rows.ways import Constants, centre_of_way, polynomial, way_of
from ..native import _calls as native
from .exact_schedule import Betas, Steps
from .rounding import nearest


class Step(NamedTuple):
    """The numbers of one step of one parameter, before it and after it."""

    before: TableState
    after: TableState
    constants: Constants
    now: Steps


def _rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` as the type of `like` holds it; XLA may drop a cast there and back."""
    if like.dtype.itemsize >= x.dtype.itemsize:
        return x
    info = jnp.finfo(like.dtype)
    if info.minexp > jnp.finfo(jnp.float32).minexp:  # whose small numbers would be 0
        return nearest(x.astype(jnp.float32), like.dtype).astype(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _update_rows(
    grad: jax.Array, rows: Tables, step: Step, betas: Betas
) -> tuple[jax.Array, Tables]:
    """The formula, for rows.

    `ExactAdam::Update` in `native/exact_adam.h` is the same formula for CPUs: change
    both. `tests/native/test_exact_adam.py` compares them.

    Args:
      grad: Their gradients.
      rows: Moments, last updates, decays until then; if they decay, parameters.
      step: The numbers of this step.
      betas: The constants.

    Returns:
      What to add to the stored parameters, and the new state of the rows.
    """
    dtype = grad.dtype
    mu, nu, last, *decays = rows
    param = decays.pop() if decays else None
    state = RowState(mu.astype(dtype), nu.astype(dtype), last, tuple(decays))
    moved = move_rows(state, step.before, step.constants)
    constants, now = cast_floats((step.constants, step.now), dtype)

    mu = moved.mu + jnp.asarray(1 - betas.b1, dtype) * (grad - moved.mu)
    nu = jnp.where(moved.nu < jnp.inf, grad * grad - moved.nu, 0)  # infinity stays
    nu = moved.nu + jnp.asarray(1 - betas.b2, dtype) * nu
    root = jnp.sqrt(nu)
    move = now.size * mu
    if now.grad_size is not None:
        move = move + now.grad_size * grad
    change = -move / (root + constants.eps * now.rho)
    # Of the moments as they are stored, since the way is read back from these.
    ahead, kept = polynomial(step.after.ways[1], dtype), _rounded(mu, rows[0])
    root = jnp.sqrt(_rounded(nu, rows[1]))
    centre = centre_of_way(constants, step.after.step)
    change = change - way_of([*ahead], kept, root, centre)
    if param is None:
        change = change + moved.by
    else:
        decay = now.log_decay
        change = change + jnp.exp(decay) * moved.by
        change = change + jnp.expm1(moved.log_decay + decay) * param.astype(dtype)
    last, log_decay = stamp(state, step.after)
    return change, (mu, nu, last, *log_decay)


@functools.partial(jax.jit, static_argnames="betas")
def update_sparse(
    grad: BCOO, read: Tables, tables: Tables, step: Step, *, betas: Betas
) -> tuple[BCOO, Tables]:
    """One leaf with a row-sparse gradient; reads and writes its touched rows."""
    if grad.n_sparse > tables[2].ndim:
        raise ValueError(
            "exact_adam updates rows, vectors along the last axis; got a gradient "
            f"with {grad.n_sparse} sparse axes for a table of shape {grad.shape}. Look "
            "whole rows up, not their elements."
        )
    dtype = accumulator_dtype(grad.dtype, *(x.dtype for x in (*read, *tables[:2])))
    mu, nu, last, *decays = tables
    wide = cast_entries(grad, dtype)

    def middle(grad: jax.Array, rows: Tables, step: Step) -> tuple[jax.Array, Tables]:
        return _update_rows(grad, rows, step, betas)

    def by_rows(grad: BCOO, read: Tables, tables: Tables, step: Step) -> Any:
        rows = touched_rows(grad, dtype)
        data, tables = map_rows(middle, rows, tables, step, read=read)
        return (rows.indices, data), tables

    def by_kernel(grad: BCOO, read: Tables, tables: Tables, step: Step) -> Any:
        before = numbers_of_rows(step.before, step.constants)
        numbers = jnp.concatenate([*before, *_numbers(step, betas)])
        steps = jnp.stack([step.before.clock, step.before.since])
        return native.exact_adam_rows(grad, tables, read, numbers, steps)

    floats = mu, nu, *decays, *read
    is_float32 = all(x.dtype == jnp.float32 for x in floats)
    if last.ndim == 1 and is_float32 and native.fits(wide, *floats):
        args = wide, read, tables, step
        rows, tables = on_cpu(by_kernel, by_rows, *args, keeps_order=False)
    else:
        rows, tables = by_rows(wide, read, tables, step)
    return bcoo_of(grad, *rows, is_sorted=False), tables


def _numbers(step: Step, betas: Betas) -> list[jax.Array]:
    """What the kernel needs for the step itself, in float32; as two vectors."""
    dtype = jnp.dtype("float32")
    constants, now = cast_floats((step.constants, step.now), dtype)
    zero = jnp.zeros([], dtype)
    decays = (zero, zero, zero)
    if step.after.decay is not None:
        decays = (now.log_decay, *decay_in(step.after, dtype))
    heads = [
        jnp.asarray(1 - betas.b1, dtype),
        jnp.asarray(1 - betas.b2, dtype),
        now.size,
        zero if now.grad_size is None else now.grad_size,
        constants.eps * now.rho,
        decays[0],
        centre_of_way(constants, step.after.step),
        *decays[1:],
    ]
    return [jnp.stack(heads), polynomial(step.after.ways[1], dtype)]


@functools.partial(jax.jit, static_argnames=("betas", "decays"))
def update_dense(
    grads: list[jax.Array],
    whole: Whole,
    count: jax.Array,
    clock: jax.Array,
    now: Steps,
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
      now: The step.
      betas: The constants.
      decays: Says for each parameter whether it decays.

    Returns:
      The updates and the new rows.
    """
    behind = catch_up(whole)
    wide, mus, nus = [], [], []
    for grad, rows, (by, power1, power2) in zip(grads, whole.rows, behind, strict=True):
        dtype = accumulator_dtype(grad.dtype, by.dtype)
        mu, nu = rows.mu.astype(dtype), rows.nu.astype(dtype)
        power2 = expand_like(power2, nu)
        wide.append(grad.astype(dtype))
        mus.append(expand_like(power1, mu) * mu)
        nus.append(power2 * (power2 * nu))
    b1, b2, eps, nesterov = betas
    adam = optax.scale_by_adam(b1, b2, eps, nesterov=nesterov)
    updates: Any
    updates, state = adam.update(wide, optax.ScaleByAdamState(count, mus, nus))
    news = []
    for i, ((by, *_), rows) in enumerate(zip(behind, whole.rows, strict=True)):
        rate, update = now.rate.astype(updates[i].dtype), updates[i]
        if decays[i]:
            assert now.weight_decay is not None
            param = whole.params[i].astype(update.dtype) + by
            update = update + now.weight_decay.astype(update.dtype) * param
        updates[i] = (by - rate * update).astype(grads[i].dtype)
        mu, nu = state.mu[i].astype(rows.mu.dtype), state.nu[i].astype(rows.nu.dtype)
        last = jnp.zeros_like(rows.last) + clock
        news.append(
            RowState(mu, nu, last, jax.tree.map(jnp.zeros_like, rows.log_decay))
        )
    return updates, news
