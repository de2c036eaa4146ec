"""The update of `exact_adam`, in three parts.

`look_ahead` checks what is given, and computes what all leaves share of the step and of
the steps to come; `update_leaves` updates the touched rows of each leaf; `replaced`, in
`state`, makes the new state of both.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .._jax_extras.compiled import compiled
from .._rows.checks import is_bcoo
from .._rows.clocks import without_clock
from .._rows.row_ops import Update
from .checks import Findings, as_nan, check_step, checked_constants, later_as_nan
from .kernel_arrays import KernelArrays, stale_arrays
from .leaves import StepLeaves
from .remaining_update import Constants
from .rows import RowState, TableState
from .schedule import Outlook, Schedule, decay_of, hold_values, outlook, take_step
from .state import ExactAdamState, table_states
from .step import Betas, Step, step_arrays, update_touched_rows, update_whole


class Outset(NamedTuple):
    """What all leaves of a step share; what is wrong in it is NaN already.

    Attributes:
      before: The tables, brought up to date by it.
      after: The tables after the step.
      constants: Of the optimiser; `eps` of each parameter.
      step: The step, `log_decay` of each parameter.
      arrays: The same for the kernel.
      rate: The learning rate of parameters with dense gradients.
      count: The number of steps before this one, which schedules are called with.
      next_count: The number after it.
    """

    before: TableState
    after: TableState
    constants: Constants
    step: Step
    arrays: KernelArrays
    rate: jax.Array
    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    next_count: jax.Array


def look_ahead(
    leaves: StepLeaves,
    state: ExactAdamState,
    learning_rate: Schedule,
    weight_decay: Schedule | None,
    betas: Betas,
) -> Outset:
    """Checks a step, and looks at the steps that follow from the schedules.

    Raises:
      TypeError: If a gradient is none of its parameter.
      ValueError: If something is known to be wrong; see `checks`.
    """
    constants = checked_constants(state, betas)
    schedules = learning_rate, weight_decay
    view = outlook(state.count, *schedules, betas, constants.eps.dtype)
    findings = check_step(leaves, state, constants, view, betas)
    args = table_states(state), state.count, state.constants, constants, view, findings
    of_leaves = leaves.decays, leaves.is_dense
    return _set_out(*args, *of_leaves, betas=betas)


@functools.partial(compiled, static_argnames="betas")
def _set_out(
    before: TableState,
    count: jax.Array,
    stored: Constants,
    constants: Constants,
    view: Outlook,
    findings: Findings,
    decays: np.ndarray,
    is_dense: np.ndarray,
    *,
    betas: Betas,
) -> Outset:
    """What follows from the findings and from a state, of the constants `stored`."""
    step = view.now
    # After `flush`, `count` may have been set by hand, and `origin` follows it.
    tables = before._replace(origin=count - before.clock)
    of_tables, constants, rate = as_nan(findings, constants, step.rate)
    after = take_step(tables, of_tables, view, decays)
    after = later_as_nan(findings, after)
    next_count = optax.safe_increment(count)  # which may stand still
    # Rows of a parameter with a dense gradient hold their value, before and after.
    after = hold_values(after._replace(origin=next_count - after.clock), is_dense)
    if step.log_decay is not None:
        step = step._replace(log_decay=decay_of(step, decays))
    before, after = before.with_polynomials(), after.with_polynomials()
    # As the lookups have it, so that XLA computes it once. What is not of this
    # optimiser is NaN by what `step_arrays` adds.
    arrays = stale_arrays(before, stored)
    arrays = step_arrays(arrays, after, constants, step, betas)
    return Outset(before, after, constants, step, arrays, rate, count, next_count)


@compiled
def _of_parameter(outset: Outset, place: Any) -> tuple[Any, ...]:
    """The tables before and after, the constants and the step of one parameter."""
    step, constants = outset.step, outset.constants
    if step.log_decay is not None:
        step = step._replace(log_decay=step.log_decay[place])
    constants = constants._replace(eps=constants.eps[place])
    return outset.before.at(place), outset.after.at(place), constants, step


def update_leaves(
    leaves: StepLeaves, outset: Outset, betas: Betas, *, adds_to_params: bool
) -> tuple[list[Update], list[RowState]]:
    """The update of each gradient, and the new rows of each parameter of the state."""
    made, rows = [*map(Update, leaves.grads)], dict(leaves.rows)
    for place, (i, row_state) in enumerate(rows.items()):
        grad, param = leaves.grads[i], leaves.params[i]
        if not is_bcoo(grad):
            continue
        made[i], rows[i] = update_touched_rows(
            without_clock(grad),
            () if outset.step.log_decay is None else (param,),
            row_state,
            *_of_parameter(outset, place),
            outset.arrays.at(place),
            param if adds_to_params else None,
            betas=betas,
        )
    places = np.flatnonzero(leaves.is_dense).tolist()
    if not places:
        return made, [*rows.values()]
    # All at once: XLA would compute the rates of all in the fusion of each.
    keys = [*rows]
    whole = [keys[place] for place in places]
    updates_and_rows = update_whole(
        [leaves.grads[i] for i in whole],
        [leaves.params[i] for i in whole],
        [rows[i] for i in whole],
        outset.rate,
        outset.count,
        outset.after.clock,
        outset.step.weight_decay,
        betas=betas,
        decays=tuple(leaves.decays[places].tolist()),
    )
    for i, change, new in zip(whole, *updates_and_rows, strict=True):
        made[i], rows[i] = Update(change), new
    return made, [*rows.values()]
