"""What is wrong in a step of `exact_adam`: it raises, or in a program becomes NaN.

A compiled program cannot raise. Each check raises where its fault is known, and else
says what it has found; `as_nan` and `later_as_nan` make NaN of all that was found,
before any row is touched. (A rate that is no number makes NaN by itself.)

What each finds, what becomes NaN, and what is found elsewhere (rows that are put or
later than their table, changed updates, schedules without an end) is one table in
docs/exact_adam.md, "What becomes NaN". What shapes tell raises in a program, too: a
gradient made without `read=`, and a state with another number of nodes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._jax_extras.compiled import compiled
from .._optimizers.hyperparameters import check_leaf
from .._rows.canary import lacks_clock
from .._rows.checks import is_bcoo
from .._rows.clocks import is_read_at
from .._rows.gather_scatter import gather_rows
from .leaves import StepLeaves
from .remaining_update import Constants
from .rows import TableState
from .schedule import Outlook, constants_of, fit, mean_ahead, of_each
from .state import ExactAdamState, table_states
from .step import Betas, Step

# By how much a remaining update may differ from the stored one: relative to it, and to
# the largest learning rate, near whose zero a schedule in float32 has not the same bits
# in any two programs.
_SAME, _SAME_TO_LARGEST = 2e-5, 1e-5


class Findings(NamedTuple):
    """What is right and wrong in a step, as far as a program knows; see above.

    Attributes:
      eps: That of the state; NaN if it is not that of this optimiser.
      is_continued: Whether stale rows may be moved on, for each parameter.
      is_read: Whether a gradient is of now and of here, for each parameter: a list.
      is_stale: Whether a parameter with a dense gradient has stale rows, a scalar.
    """

    eps: jax.Array
    is_continued: jax.Array
    is_read: list[Any]
    is_stale: Any


def check_step(
    leaves: StepLeaves,
    state: ExactAdamState,
    constants: Constants,
    view: Outlook,
    betas: Betas,
) -> Findings:
    """All checks of a step but that of its constants.

    Raises:
      TypeError: If a gradient is none of its parameter.
      ValueError: If something is known to be wrong.
    """
    _refuse_rates(view.now, state.count)
    is_continued = _is_continued(state, view, leaves.decays, betas)
    is_continued &= _has_room(state.clock)
    is_read: list[Any] = [True] * len(leaves.rows)
    for place, (i, rows) in enumerate(leaves.rows.items()):
        grad, name = leaves.grads[i], leaves.names[i]
        if grad is not None:
            check_leaf(grad, rows.nu)
        if is_bcoo(grad):
            is_read[place] = _is_read(grad, name, state.clock)
            is_read[place] &= _is_at(grad, name, leaves.params[i])
    names = leaves.dense_names()
    return Findings(
        eps=constants.eps,
        is_continued=is_continued,
        is_read=is_read,
        is_stale=state.refuse_stale(names) if names else False,
    )


def as_nan(
    findings: Findings, constants: Constants, rate: jax.Array
) -> tuple[Constants, Constants, jax.Array]:
    """What a step computes with, NaN where it is wrong.

    Returns:
      The constants of what is read later, and those of the update, whose `eps` have one
      for each parameter; and the learning rate of parameters with dense gradients.
    """
    eps = jnp.where(findings.is_continued, constants.eps, jnp.nan)
    is_read = jnp.asarray(findings.is_read, bool)  # of no parameter, too
    eps_of_updates = jnp.where(is_read, eps, jnp.nan)
    rate = jnp.where(jnp.isfinite(findings.eps), rate, jnp.nan)
    rate = jnp.where(findings.is_stale, jnp.nan, rate)
    return constants._replace(eps=eps), constants._replace(eps=eps_of_updates), rate


def later_as_nan(findings: Findings, after: TableState) -> TableState:
    """The state after a step, of which comes all that is read later; NaN likewise."""
    is_right = findings.is_continued[:, None, None]
    return after._replace(remaining=jnp.where(is_right, after.remaining, jnp.nan))


def checked_constants(state: ExactAdamState, betas: Betas) -> Constants:
    """The constants of a state; NaN where they are not those of this optimiser.

    Raises:
      ValueError: If that is known at once: outside of `jit`, or by the shapes.
    """
    is_same, constants = _compared(state.constants, betas=betas)
    degree = fit(*betas[:2], constants.eps.dtype)[1]
    is_traced = isinstance(is_same, jax.core.Tracer)
    if state.remaining.shape[-1] != degree or not (is_traced or is_same):
        raise ValueError(
            "exact_adam needs a state that was made with its own b1, b2 and eps, by "
            "which stale rows have moved; got that of others. Only the learning rate "
            "and the weight decay may change, after flush(params, state), but not "
            "jax_enable_x64. Make a new state by init."
        )
    return constants


@functools.partial(compiled, static_argnames="betas")
def _compared(stored: Constants, *, betas: Betas) -> tuple[jax.Array, Constants]:
    """Whether constants are those of an optimiser; its own, NaN where they are not."""
    dtype = jax.dtypes.canonicalize_dtype(stored.eps.dtype)
    wanted = constants_of(betas, dtype)
    # As close as two machines compute a logarithm.
    numbers, expected = (jnp.stack(x[:3]).astype(dtype) for x in (stored, wanted))
    is_same = jnp.all(
        abs(numbers - expected) <= jnp.asarray(1e-5, dtype) * abs(expected)
    )
    is_same &= stored.lead == wanted.lead
    constants = type(wanted)(*stored)
    return is_same, constants._replace(eps=jnp.where(is_same, stored.eps, jnp.nan))


def _is_continued(
    state: ExactAdamState, view: Outlook, decays: np.ndarray, betas: Betas
) -> jax.Array:
    """For each parameter, whether its stale rows may be moved on by these schedules.

    Raises if that is known not to be so.
    """
    args = state.count, table_states(state), view.before, view.largest, decays
    is_right: jax.Array = _are_continued(*args, betas=betas)
    if not isinstance(is_right, jax.core.Tracer) and not is_right.all():
        raise ValueError(
            "exact_adam needs the schedule and the count by which its state has moved "
            "stale rows; got a state of another learning rate, weight decay, nesterov "
            "or count. Call params, state = flush(params, state) before any of them "
            "changes: after it, all of them may. (A schedule of bfloat16 numbers is "
            "another one in a compiled step: give it Python's.)"
        )
    return is_right


@functools.partial(compiled, static_argnames="betas")
def _are_continued(
    count: jax.Array,
    tables: TableState,
    before: jax.Array,
    largest: jax.Array,
    decays: np.ndarray,
    *,
    betas: Betas,
) -> jax.Array:
    """They are stored by the remaining update that they had, which must be that of now.

    It is true of a parameter all of whose rows hold values, as after `flush`.
    """
    clock, origin, until, remaining, *_ = tables
    stored, now = remaining[:, 1], of_each(before, decays)
    # `stored` and `now` are [parameters, nodes]. Their values are about the learning
    # rate times `mean_ahead`, to which the second limit is relative.
    limit = _SAME * jnp.max(jnp.abs(now), axis=1)
    limit += _SAME_TO_LARGEST * mean_ahead(betas.b1, betas.b2) * largest
    is_same = jnp.max(jnp.abs(stored - now), axis=1) <= limit
    is_same |= jnp.isnan(stored).any(axis=1)  # and shall stay so, without another word
    is_same &= count == clock + origin
    return (until <= clock) & (is_same | (until == clock))


def _refuse_rates(now: Step, count: jax.Array) -> None:
    """Says of what a schedule gives for this step that it is no number, if known."""
    values = {"learning_rate": now.rate, "weight_decay": now.weight_decay}
    for name, value in values.items():
        if value is None or isinstance(value, jax.core.Tracer) or np.isfinite(value):
            continue
        raise ValueError(
            f"exact_adam needs a finite {name} at each step that is made; got {value} "
            f"at step {count} (count of its state). Let the schedule be finite for all "
            "steps of the training; or call params, state = flush(params, state) and "
            "go on with another one."
        )


def _has_room(clock: jax.Array) -> jax.Array:
    """Whether the clock can count one more update."""
    has_room = clock < jnp.iinfo(clock.dtype).max
    if not isinstance(has_room, jax.core.Tracer) and not has_room:
        raise ValueError(
            "exact_adam dates rows by a clock of 32 bits, and this state has made "
            "2**31 - 1 updates. Call params, state = flush(params, state), make a new "
            "state by init, and give it mu, nu and count of the old one."
        )
    return has_room


def _is_read(grad: Any, name: str, clock: jax.Array) -> Any:
    """Whether a gradient was made with `read=` of this state."""
    is_read = is_read_at(grad, clock) if not lacks_clock(grad) else False
    if not isinstance(is_read, jax.core.Tracer) and not is_read:
        made = "without" if lacks_clock(grad) else "with the state of another step"
        raise ValueError(
            "exact_adam needs gradients that are made with read=, at the rows as dense "
            f"Adam has them; got one of {name or 'the table'} made {made}. Call "
            "value_and_grad(loss, read=state) with the state of the optimiser in "
            "each step, or let make_train_step do so."
        )
    return is_read


def _is_at(grad: Any, name: str, param: Any) -> Any:
    """Whether the rows of a gradient were read of these parameters.

    Those of a copy are brought up to date as if they were these: an average of stored
    rows is none of values, and what was added to a row decays with it.
    """
    is_right: Any = True
    for other, _ in getattr(grad, "read_of", ()):
        if other is param or param is None:
            continue
        if jnp.shape(other) != jnp.shape(param):
            continue  # the gradient is that of a shard, by `local_rows`
        if not isinstance(other, jax.core.Tracer) and jnp.asarray(other).is_deleted():
            continue  # it was donated, and nothing is known of it
        is_right &= _are_equal(jnp.asarray(other), jnp.asarray(param), grad.indices)
    if not isinstance(is_right, jax.core.Tracer) and not is_right:
        raise ValueError(
            "exact_adam needs gradients that are taken at the parameters that it "
            f"updates; got one of {name or 'the table'} taken at others, as of a "
            "perturbed copy or an average. Perturb the rows that the loss has looked "
            "up instead: see docs/exact_adam.md."
        )
    return is_right


@compiled
def _are_equal(table: jax.Array, other: jax.Array, indices: jax.Array) -> jax.Array:
    """Whether two tables hold the same rows at these indices."""
    old, new = (gather_rows(x, indices) for x in (table, other))
    new = new.astype(old.dtype)  # as those of a copy of lower precision
    return jnp.all((old == new) | (jnp.isnan(old) & jnp.isnan(new)))
