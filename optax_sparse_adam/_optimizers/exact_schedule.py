"""The way ahead of rows that rest, from the schedule of the steps to come.

See `_rows/resting_rows.py` for what it is and why a few numbers hold it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._rows.resting_rows import (
    Shared,
    Whole,
    centre_of_way,
    chebyshev_coefficients,
    nodes,
    sum_at_nodes,
)
from .hyperparameters import one_minus_power

# What may be missing of a way, relative to it, by the bytes of the type.
_TOLERANCE = {4: 5e-8, 8: 1e-13}
_MOST_NODES = 64


class Betas(NamedTuple):
    """The constants, all Python's own."""

    b1: float
    b2: float
    eps: float
    nesterov: bool


class Steps(NamedTuple):
    """The next step and those after it, up to the horizon.

    Attributes:
      number: The step's number, from 1.
      size: `a_t`: learning rate and bias corrections.
      grad_size: With `nesterov`, the same for the gradient of the step itself.
      rho: Root of the second moment's correction.
      log_decay: Logarithm of `1 - lr_t * weight_decay`; `None` without weight decay.
    """

    number: jax.Array
    size: jax.Array
    grad_size: jax.Array | None
    rho: jax.Array
    log_decay: jax.Array | None


class Fit(NamedTuple):
    """How a way is approximated.

    Attributes:
      lead: How many steps ahead its centre is taken.
      degree: Number of nodes.
    """

    lead: int
    degree: int


def horizon(b1: float, b2: float, dtype: Any) -> int:
    """After how many steps nothing is left of a way.

    The terms fall as `r = b1 / sqrt(b2)` to the power of the step, those of parameters
    that decay by `lr * weight_decay` as `r / (1 - lr * weight_decay)`. Twice the steps
    that the first needs are enough up to `largest_decay`.
    """
    tolerance = _TOLERANCE[np.dtype(dtype).itemsize]
    log_r = math.log(b1) - math.log(b2) / 2 if b1 else -math.inf
    return max(2, math.ceil(2 * math.log(tolerance) / log_r))


def largest_decay(b1: float, b2: float) -> float:
    """The largest `lr * weight_decay` for which the horizon is far enough."""
    return (1 - b1 / math.sqrt(b2)) / 2


@functools.cache
def fit(b1: float, b2: float, dtype: Any) -> Fit:
    """The centre that needs the fewest nodes, after the first step of a warm-up.

    There the poles are farthest apart; all steps after it need fewer.
    """
    mean = 1 / (1 - b1 / math.sqrt(b2))  # of the steps ahead, by the size of the move
    leads = {max(1, round(mean * factor)) for factor in (0.5, 1, 1.5, 2, 3, 4, 6)}
    return min(
        (Fit(lead, _degree(b1, b2, lead, dtype)) for lead in sorted(leads)),
        key=lambda found: found.degree,
    )


def _degree(b1: float, b2: float, lead: int, dtype: Any) -> int:
    number = horizon(b1, b2, dtype)
    t = np.arange(2, 2 + number)
    rho = np.sqrt(1 - b2**t)
    values = sum_at_nodes(
        t * rho / (1 - b1**t),
        rho / np.sqrt(1 - b2 ** (1 + lead)),
        _powers(b1, b2, number),
        nodes(_MOST_NODES),
    )
    sizes = np.abs(chebyshev_coefficients(_MOST_NODES) @ values)
    rest = np.cumsum(sizes[::-1])[::-1]
    enough = rest <= _TOLERANCE[np.dtype(dtype).itemsize] * sizes[0]
    return max(2, int(np.argmax(enough))) if enough.any() else _MOST_NODES


def _powers(b1: float, b2: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    j = np.arange(1, 1 + number)
    with np.errstate(under="ignore"):
        return b1**j, b2 ** (j / 2)


def steps_from(
    count: jax.Array,
    learning_rate: Callable[[jax.Array], Any],
    weight_decay: Callable[[jax.Array], Any] | None,
    betas: Betas,
    dtype: Any,
) -> Steps:
    """The steps after step `count`; schedules are called with the steps before."""
    b1, b2 = betas[:2]
    counts = count + jnp.arange(1 + horizon(b1, b2, dtype), dtype=count.dtype)
    number = counts + 1

    def values(schedule: Callable[[jax.Array], Any]) -> jax.Array:
        def one(count: jax.Array) -> jax.Array:
            return jnp.asarray(schedule(count), dtype).reshape(())

        return jax.vmap(one)(counts)

    rate = values(learning_rate)
    rho = jnp.sqrt(one_minus_power(b2, number, dtype))
    size, grad_size = rate * rho / one_minus_power(b1, number, dtype), None
    if betas.nesterov:  # optax corrects the moment as that of the step after
        grad_size = jnp.asarray(1 - b1, dtype) * size
        size = rate * rho / one_minus_power(b1, number + 1, dtype)
        size = jnp.asarray(b1, dtype) * size
    log_decay = None
    if weight_decay is not None:
        decay = rate * values(weight_decay)
        # Beyond, moves would be wrong without a sign of it.
        decay = jnp.where(decay <= largest_decay(b1, b2), decay, jnp.nan)
        log_decay = jnp.log1p(-decay)
    return Steps(number, size, grad_size, rho, log_decay)


def init_shared(betas: Betas, dtype: Any, decaying: set[bool]) -> Shared:
    """In the beginning; `decaying` tells whether parameters decay, and whether not."""
    lead, degree = fit(betas.b1, betas.b2, dtype)
    b1 = max(betas.b1, 1e-30)  # whose powers are 1, 0, 0, ... in float32

    def number(x: Any) -> jax.Array:
        return jnp.full([], x, dtype)

    return Shared(
        log_b1=number(math.log(b1)),
        log_q=number(math.log(betas.b2) / 2),
        eps=number(betas.eps),
        lead=jnp.full([], lead, jnp.int32),
        way=jnp.zeros(degree, dtype) if False in decaying else None,
        decayed_way=jnp.zeros(degree, dtype) if True in decaying else None,
        log_decay=(number(0), number(0)) if True in decaying else (),
    )


def next_shared(shared: Shared, steps: Steps, betas: Betas) -> Shared:
    """After the first of these steps."""
    dtype = steps.size.dtype
    lead, degree = fit(betas.b1, betas.b2, dtype)
    ahead = jax.tree.map(lambda x: x[1:], steps)
    power1, power2 = _powers(betas.b1, betas.b2, len(ahead.number))
    sum_of = functools.partial(
        sum_at_nodes,
        poles=ahead.rho / ahead.rho[lead - 1],
        powers=(jnp.asarray(power1, dtype), jnp.asarray(power2, dtype)),
        z=jnp.asarray(nodes(degree), dtype),
    )
    if shared.way is not None:
        shared = shared._replace(way=sum_of(ahead.size))
    if shared.decayed_way is None:
        return shared
    assert ahead.log_decay is not None
    assert steps.log_decay is not None
    kept = jnp.exp(jnp.cumsum(ahead.log_decay))
    # The sum in two numbers: the second is what the first rounds off (Knuth's TwoSum
    # for an addend that is the smaller one).
    old, rest = shared.log_decay
    addend = steps.log_decay[0] + rest
    new = old + addend
    return shared._replace(
        decayed_way=sum_of(ahead.size / kept),
        log_decay=(new, addend - (new - old)),
    )


def add_step(whole: Whole, shared: Shared, steps: Steps, *, decays: bool) -> Whole:
    """Adds the move of the first of these steps to the way behind."""
    dtype = steps.size.dtype
    number, size, rho = (x[:1] for x in (steps.number, steps.size, steps.rho))
    passed = (number - whole.since).astype(dtype)
    way = whole.way
    if decays:
        assert steps.log_decay is not None
        way = way * jnp.exp(steps.log_decay[0])
    move = sum_at_nodes(
        size,
        shared.eps * rho / centre_of_way(shared, whole.since),
        (jnp.exp(passed * shared.log_b1), jnp.exp(passed * shared.log_q)),
        jnp.asarray(nodes(len(way)), dtype),
    )
    return whole._replace(way=way + move)
