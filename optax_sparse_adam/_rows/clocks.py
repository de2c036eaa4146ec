"""By which state of `exact_adam` the rows of a gradient were read.

A gradient made with `read=` of `exact_adam` has a second column beside its canary: the
clock of the state that its rows were read by; `ANY_CLOCK` if it stores nothing. An
update of `exact_adam` has `CLOCK_OF_UPDATE` there. What is made of such an update, as
`0.5 * update`, or of gradients of two clocks, has `CHANGED_CLOCK`, and is treated like
a changed canary.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from .._jax_extras.compiled import compiled
from .canary import CanaryBCOO
from .canary_arrays import ANY_CLOCK, CLOCK_OF_UPDATE, clocks_of, new_canary


def is_read_up_to_date(grad: Any) -> bool:
    """Whether rows were read up to date for it: its table may hold other numbers."""
    return isinstance(grad, CanaryBCOO) and grad.canary.shape[-1] == 2


def is_read_at(grad: BCOO, clock: jax.Array) -> Any:
    """Whether its rows were read at this clock; a BCOO made by hand is believed."""
    if not isinstance(grad, CanaryBCOO):
        return True
    return _are_at(grad.canary, clock)


@compiled
def _are_at(canary: jax.Array, clock: jax.Array) -> jax.Array:
    clocks = clocks_of(canary)
    return jnp.all((clocks == clock) | (clocks == ANY_CLOCK))


def keep_read_of(made: Any, grad: Any) -> None:
    """Gives what is made of a gradient its `read_of`, which a `jit` has dropped."""
    if isinstance(made, CanaryBCOO) and isinstance(grad, CanaryBCOO):
        made.read_of = grad.read_of


def without_clock(grad: BCOO) -> BCOO:
    """The gradient without the second column, which `is_read_at` has seen.

    XLA does not know that no clock is `CHANGED_CLOCK`, and would compare it for each
    entry.
    """
    if isinstance(grad, CanaryBCOO):
        grad = copy.copy(grad)
        grad.canary = grad.canary[..., :1]
    return grad


def as_update(update: Any) -> Any:
    """An update of `exact_adam`, of which nothing else can be made."""
    if isinstance(update, CanaryBCOO):
        update.canary = new_canary(update.stored_indices, CLOCK_OF_UPDATE)
        update.read_of = ()
    return update
