"""The step of `exact_adam` on rows, or on a whole parameter."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.sparse import BCOO

from .._jax_extras.on_cpu import on_cpu
from .._rows.coalesce import (
    accumulator_dtype,
    bcoo_of,
    cast_entries,
    touched_rows,
)
from .._rows.map_rows import Tables, map_all_rows, map_rows
from .._rows.resting_rows import (
    cast_floats,
    decay_in,
    move_rows,
    stale_rows,
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
    grad: jax.Array, rows: Tables, step: Step, betas: Betas, *, rest: bool
) -> tuple[jax.Array, Tables]:
    """The formula, for rows or for a whole dense array.

    `ExactAdam::Update` in `native/exact_adam.h` is the same formula for CPUs: change
    both. `tests/native/test_exact_adam.py` compares them.

    Args:
      grad: Their gradients.
      rows: Moments, last updates, decays until then; if they decay, parameters.
      step: The numbers of this step.
      betas: The constants.
      rest: Whether to store resting points, not values.

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
    if rest:
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
        return _update_rows(grad, rows, step, betas, rest=True)

    def by_rows(grad: BCOO, read: Tables, tables: Tables, step: Step) -> Any:
        rows = touched_rows(grad, dtype)
        data, tables = map_rows(middle, rows, tables, step, read=read)
        return (rows.indices, data), tables

    def by_kernel(grad: BCOO, read: Tables, tables: Tables, step: Step) -> Any:
        mu, nu, last, *decays = tables
        state = RowState(mu, nu, last, tuple(decays))
        stale = stale_rows(state, step.before, step.constants)
        scalars, after = _scalars(step, betas)
        polynomials = jnp.concatenate([stale.polynomials, after[None]])
        stale = stale._replace(polynomials=polynomials)
        return native.exact_adam_rows(grad, stale, scalars, read)

    floats = mu, nu, *decays, *read
    is_float32 = all(x.dtype == jnp.float32 for x in floats)
    if last.ndim == 1 and is_float32 and native.supports_update(wide, *floats):
        args = wide, read, tables, step
        rows, tables = on_cpu(by_kernel, by_rows, *args, keeps_order=False)
    else:
        rows, tables = by_rows(wide, read, tables, step)
    return bcoo_of(grad, *rows, is_sorted=False), tables


def _scalars(step: Step, betas: Betas) -> tuple[native.StepScalars, jax.Array]:
    """What the kernel needs for the step itself, in float32; the new polynomial."""
    dtype = jnp.dtype("float32")
    constants, now = cast_floats((step.constants, step.now), dtype)
    zero = jnp.zeros([], dtype)
    decays = (zero, zero, zero)
    if step.after.decay is not None:
        decays = (now.log_decay, *decay_in(step.after, dtype))
    scalars = native.StepScalars(
        one_minus_b1=jnp.asarray(1 - betas.b1, dtype),
        one_minus_b2=jnp.asarray(1 - betas.b2, dtype),
        size=now.size,
        grad_size=zero if now.grad_size is None else now.grad_size,
        eps=constants.eps * now.rho,
        log_decay=decays[0],
        centre=centre_of_way(constants, step.after.step),
        decay_high=decays[1],
        decay_low=decays[2],
    )
    return scalars, polynomial(step.after.ways[1], dtype)


@functools.partial(jax.jit, static_argnames="betas")
def update_dense(
    grad: jax.Array, read: Tables, tables: Tables, step: Step, *, betas: Betas
) -> tuple[jax.Array, Tables]:
    """One leaf with a dense gradient: every row is touched, and holds its value."""
    dtype = accumulator_dtype(grad.dtype, *(x.dtype for x in (*read, *tables[:2])))

    def function(tables: Tables, read: Tables, step: Step) -> Tables:
        grad, *state = tables
        rows = (*state, *read)
        change, news = _update_rows(grad.astype(dtype), rows, step, betas, rest=False)
        pairs = zip((change, *news), tables, strict=True)
        return tuple(new.astype(old.dtype) for new, old in pairs)

    update, *news = map_all_rows(function, (grad, *tables), step, read=read)
    return update, tuple(news)
