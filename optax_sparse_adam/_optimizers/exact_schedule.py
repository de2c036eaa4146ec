"""The way ahead of rows that rest, from the schedule of the steps to come.

See `_rows/resting_rows.py` for what it is, and `_rows/ways.py` for why a few numbers
hold it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._rows.resting_state import ExactAdamState, TableState, table_states
from .._rows.ways import (
    Constants,
    centre_of_way,
    chebyshev_coefficients,
    nodes,
    sum_at_nodes,
)
from .hyperparameters import one_minus_power

# What may be missing of a way, relative to it, by the bytes of the type.
_TOLERANCE = {4: 5e-8, 8: 1e-13}
_MOST_NODES = 64
_LARGEST = 1e3  # of a move to come, in the larger of 1 and the next one
_PAST = 16  # steps of the past that tell how large a schedule is
# By how much a way may differ from the stored one: relative to it, and to the largest
# learning rate, near whose zero a schedule in float32 has not the same bits in any
# two programs.
_SAME, _SAME_TO_LARGEST = 1e-4, 1e-5


class Betas(NamedTuple):
    """The constants, all Python's own."""

    b1: float
    b2: float
    eps: float
    nesterov: bool


class Steps(NamedTuple):
    """The next step and those after it, up to the horizon and one more.

    Attributes:
      number: The step's number, from 1.
      size: `a_t`: learning rate and bias corrections.
      grad_size: With `nesterov`, the same for the gradient of the step itself.
      rho: Root of the second moment's correction.
      log_decay: Logarithm of `1 - lr_t * weight_decay`; `None` without weight decay.
      rate: The learning rate.
      weight_decay: The weight decay, or `None`.
    """

    number: jax.Array
    size: jax.Array
    grad_size: jax.Array | None
    rho: jax.Array
    log_decay: jax.Array | None
    rate: jax.Array
    weight_decay: jax.Array | None


class Outlook(NamedTuple):
    """What the schedule says of the steps to come.

    Attributes:
      now: The next step, without an axis for steps.
      before: The way ahead before it: `[2, nodes]`, of parameters that do not decay and
        of those that do.
      after: The way ahead after it, likewise.
      largest: The largest learning rate, of past steps too.
    """

    now: Steps
    before: jax.Array
    after: jax.Array
    largest: jax.Array


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
    most_ahead = horizon(b1, b2, dtype)
    factors = (0.5, 1, 1.5, 2, 3, 4, 6)
    leads = {min(max(1, round(mean * factor)), most_ahead) for factor in factors}
    fits = [
        Fit(lead, degree)
        for lead in sorted(leads)
        for most in (_MOST_NODES, _MOST_NODES - 1)
        if (degree := _degree(b1, b2, lead, most, dtype)) < most
    ]
    if not fits:
        raise ValueError(
            f"exact_adam cannot sum up the moves of a row without gradients to full "
            f"precision with b1={b1} and b2={b2}. Choose a smaller b1 or a larger b2."
        )
    return min(fits, key=lambda found: found.degree)


def _degree(b1: float, b2: float, lead: int, most: int, dtype: Any) -> int:
    """How many nodes are needed, odd if `most` is odd, or `most`."""
    number = horizon(b1, b2, dtype)
    t = np.arange(2, 2 + number)
    rho = np.sqrt(1 - b2**t)
    values = sum_at_nodes(
        t * rho / (1 - b1**t),
        rho / np.sqrt(1 - b2 ** (1 + lead)),
        _powers(b1, b2, number),
        nodes(most),
    )
    sizes = np.abs(chebyshev_coefficients(most) @ values)
    rest = np.cumsum(sizes[::-1])[::-1]
    enough = rest <= _TOLERANCE[np.dtype(dtype).itemsize] * sizes[0]
    if not enough.any():
        return most
    degree = max(2, int(np.argmax(enough)))
    return degree + (most - degree) % 2


def _powers(b1: float, b2: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    j = np.arange(1, 1 + number)
    with np.errstate(under="ignore"):
        return b1**j, b2 ** (j / 2)


def outlook(
    count: jax.Array,
    learning_rate: Callable[[jax.Array], Any],
    weight_decay: Callable[[jax.Array], Any] | None,
    betas: Betas,
    dtype: Any,
) -> Outlook:
    """The steps after step `count`; schedules are called with the steps before."""
    b1, b2 = betas[:2]
    ahead = count + jnp.arange(1 + horizon(b1, b2, dtype), dtype=count.dtype)
    past = count // _PAST * jnp.arange(_PAST, dtype=count.dtype)
    counts = jnp.concatenate([ahead, past])
    number = ahead + 1

    def values(schedule: Callable[[jax.Array], Any]) -> jax.Array:
        def one(count: jax.Array) -> jax.Array:
            return jnp.asarray(schedule(count), dtype).reshape(())

        found = jax.vmap(one)(counts)
        # Schedules need not be defined after their last step, as `(1 - t / T) ** 0.9`.
        # Rows do not move there; if training does get there, it is the first value.
        return jnp.where(jnp.isfinite(found) | (counts == count), found, 0)

    every_rate = values(learning_rate)
    largest = jnp.max(jnp.abs(every_rate))
    rate = every_rate[: len(ahead)]
    rho = jnp.sqrt(one_minus_power(b2, number, dtype))
    size, grad_size = rate * rho / one_minus_power(b1, number, dtype), None
    if betas.nesterov:  # optax corrects the moment as that of the step after
        grad_size = jnp.asarray(1 - b1, dtype) * size
        size = rate * rho / one_minus_power(b1, number + 1, dtype)
        size = jnp.asarray(b1, dtype) * size
    log_decay = own_decay = None
    if weight_decay is not None:
        own_decay = values(weight_decay)[: len(ahead)]
        decay = rate * own_decay
        # Beyond, moves would be wrong without a sign of it.
        decay = jnp.where(decay <= largest_decay(b1, b2), decay, jnp.nan)
        log_decay = jnp.log1p(-decay)
    steps = Steps(number, size, grad_size, rho, log_decay, rate, own_decay)

    decays = jnp.zeros_like(rho)
    decays = jnp.stack([decays, decays if log_decay is None else log_decay])

    def cut(x: jax.Array) -> jax.Array:
        return jnp.stack([x[..., : len(ahead) - 1], x[..., 1:]])

    of_decays = jax.vmap(way_ahead, (None, None, 0, None))
    of_both = jax.vmap(of_decays, (0, 0, 0, None))
    before, after = of_both(cut(size), cut(rho), cut(decays), betas)
    now = jax.tree.map(lambda x: x[0], steps)
    return Outlook(now, before, after, largest)


def constants_of(betas: Betas, dtype: Any) -> Constants:
    b1 = max(betas.b1, 1e-30)  # whose square is 0 in float32
    return Constants(
        log_b1=jnp.full([], math.log(b1), dtype),
        log_q=jnp.full([], math.log(betas.b2) / 2, dtype),
        eps=jnp.full([], betas.eps, dtype),
        lead=jnp.full([], fit(betas.b1, betas.b2, dtype).lead, jnp.int32),
    )


def checked_constants(state: ExactAdamState, betas: Betas) -> Constants:
    """The constants of a state; NaN where they are not those of this optimiser.

    Raises:
      ValueError: If that is known at once: outside of `jit`, or by the shapes.
    """
    found = state.constants
    dtype = jax.dtypes.canonicalize_dtype(found.eps.dtype)
    own = constants_of(betas, dtype)
    pairs = zip(found[:3], own[:3], strict=True)
    # As close as two machines compute a logarithm.
    is_same = jnp.stack(
        [abs(a - b) <= jnp.asarray(1e-5, b.dtype) * abs(b) for a, b in pairs]
    ).all()
    is_same &= found.lead == own.lead
    degree = fit(betas.b1, betas.b2, dtype).degree
    degrees = {way.shape[-1] for way in jax.tree.leaves(state.ways)}
    is_traced = isinstance(is_same, jax.core.Tracer)
    if degrees - {degree} or not (is_traced or is_same):
        raise ValueError(
            "exact_adam needs a state that was made with its own b1, b2 and eps, by "
            "which resting rows have moved; got that of others. Only the learning "
            "rate and the weight decay may change, after flush(params, state), but "
            "not jax_enable_x64. Make a new state by init."
        )
    return found._replace(eps=jnp.where(is_same, found.eps, jnp.nan))


def way_ahead(
    size: jax.Array, rho: jax.Array, log_decay: jax.Array, betas: Betas
) -> jax.Array:
    """The way of these steps, at the nodes; NaN if it has no end."""
    dtype = size.dtype
    lead, degree = fit(betas.b1, betas.b2, dtype)
    size = size * jnp.exp(-jnp.cumsum(log_decay))
    power1, power2 = _powers(betas.b1, betas.b2, len(size))
    # Without an end, the learning rate grows for all of these steps as fast as momentum
    # dies out, or until it overflows. What is smaller than 0.02 tolerances can be no
    # part of a parameter.
    r, tolerance = betas.b1 / math.sqrt(betas.b2), _TOLERANCE[dtype.itemsize]
    terms = abs(size) * jnp.asarray(r ** np.arange(1, 1 + len(size)), dtype)
    is_over = terms[-1] < tolerance * jnp.maximum(50 * jnp.sum(terms), 0.02)
    is_over &= jnp.max(terms) <= _LARGEST * jnp.maximum(1, terms[0])
    way: jax.Array = sum_at_nodes(
        size,
        rho / rho[lead - 1],
        (jnp.asarray(power1, dtype), jnp.asarray(power2, dtype)),
        jnp.asarray(nodes(degree), dtype),
    )
    return jnp.where(is_over, way, jnp.nan)


def is_continued(
    state: ExactAdamState, view: Outlook, decays: np.ndarray, betas: Betas
) -> jax.Array:
    """For each parameter, whether its stale rows may be moved on by these schedules.

    They are stored by the way that they had ahead, which must be that of now. Nothing
    is asked of a parameter all of whose rows hold values, as after `flush`.
    """
    clock, origin, since, ways, _ = table_states(state)
    stored, now = ways[:, 1], view.before[decays.astype(int)]
    mean = 1 / (1 - betas.b1 / math.sqrt(betas.b2))  # of the steps ahead
    limit = (
        _SAME * jnp.max(jnp.abs(now), axis=1) + _SAME_TO_LARGEST * mean * view.largest
    )
    is_same = jnp.max(jnp.abs(stored - now), axis=1) <= limit
    is_same |= jnp.isnan(stored).any(axis=1)  # and shall stay so, without another word
    is_same &= state.count == clock + origin
    return (since <= clock) & (is_same | (since == clock))


def take_step(
    tables: TableState,
    constants: Constants,
    view: Outlook,
    decays: np.ndarray,
) -> TableState:
    """All parameters after the next step, their rows at rest.

    Args:
      tables: Before it.
      constants: The constants.
      view: What the schedule says.
      decays: Says for each parameter whether it decays.
    """
    now, dtype = view.now, view.now.size.dtype
    passed = (tables.clock + 1 - tables.since).astype(dtype)
    poles = constants.eps * now.rho / centre_of_way(constants, tables.step_since)
    z = jnp.asarray(nodes(tables.ways.shape[-1]), dtype)

    def move(passed: jax.Array, pole: jax.Array) -> jax.Array:
        powers = jnp.exp(passed * constants.log_b1), jnp.exp(passed * constants.log_q)
        power1, power2 = (x[None] for x in powers)
        found: jax.Array = sum_at_nodes(now.size[None], pole[None], (power1, power2), z)
        return found

    behind, decay = tables.ways[:, 0], tables.decay
    if decay is not None:
        log_decay = decay_of(now, decays)
        behind = behind * jnp.exp(log_decay)[:, None]
        # The sum in two numbers: the second is what the first rounds off (Knuth's
        # TwoSum).
        before, addend = decay[:, 0], log_decay + decay[:, 1]
        total = before + addend
        added = total - before
        rest = (before - (total - added)) + (addend - added)
        decay = jnp.stack([total, rest], axis=1)
    behind = behind + jax.vmap(move)(passed, poles)
    ways = jnp.stack([behind, view.after[decays.astype(int)]], axis=1)
    clock = optax.safe_increment(tables.clock)
    return TableState(clock, tables.origin, tables.since, ways, decay)


def decay_of(now: Steps, decays: np.ndarray) -> jax.Array:
    """The logarithm of what is left of each parameter by this step's decay."""
    assert now.log_decay is not None
    return jnp.where(jnp.asarray(decays), now.log_decay, 0)


def hold_values(tables: TableState, which: Any = True) -> TableState:
    """Parameters of which `which`, or all, hold the values of all their rows now.

    Their decay begins again, as that of rows whose state comes fresh from `init`.
    """

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        which_ = jnp.reshape(which, (-1,) + (1,) * (old.ndim - 1))
        return jnp.where(which_, new, old)

    zero = jnp.zeros([], tables.ways.dtype)
    behind = pick(zero, tables.ways[:, 0])
    decay = None if tables.decay is None else pick(zero, tables.decay)
    return tables._replace(
        since=pick(tables.clock, tables.since),
        ways=jnp.stack([behind, tables.ways[:, 1]], axis=1),
        decay=decay,
    )
