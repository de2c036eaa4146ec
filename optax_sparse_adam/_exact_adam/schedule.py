"""The remaining updates of each step, from the schedules of the steps to come.

See `remaining_update` for what they are, and why a few numbers hold them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._jax_extras.compiled import compiled
from .._optimizers.hyperparameters import one_minus_power
from .remaining_update import (
    Constants,
    ConstantsOfRoots,
    centre_after,
    chebyshev_coefficients,
    later,
    nodes,
    sum_at_nodes,
)
from .rows import TableState
from .step import Betas, Step

Schedule = Callable[[jax.Array], Any]

# What may be missing of a remaining update, relative to it, by the bytes of the type.
_TOLERANCE = {4: 5e-8, 8: 1e-13}
# As powers of `z`, a rounding error in the coefficient of the Chebyshev polynomial `n`
# is `(1 + sqrt(2))^n` times as large: with more nodes they would be all that is left.
_MOST_NODES = {4: 25, 8: 49}
_NODES_OF_A_FIT = 128  # far more: with few, what is left out comes back in others
_LARGEST = 1e3  # of an update to come, in the larger of 1 and the next one
_PAST = 16  # steps of the past that tell how large a schedule is


class Outlook(NamedTuple):
    """What the schedules say.

    Attributes:
      now: The next step.
      before: The remaining update before it, at the nodes: `[2, nodes]`, of parameters
        that do not decay and of those that do.
      after: The remaining update after it, likewise.
      largest: The largest learning rate, of past steps too.
    """

    now: Step
    before: jax.Array
    after: jax.Array
    largest: jax.Array


def mean_ahead(b1: float, b2: float) -> float:
    """How many steps ahead the updates lie on average, weighted by their size."""
    return 1 / (1 - b1 / math.sqrt(b2))


def horizon(b1: float, b2: float, dtype: Any) -> int:
    """After how many steps nothing is left of a remaining update.

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
def fit(b1: float, b2: float, dtype: Any) -> tuple[int, int, bool]:
    """How remaining updates are approximated with the fewest nodes.

    After the first step of a warm-up: there the poles are farthest apart, and all steps
    after it need fewer.

    Returns:
      How many steps ahead the centre is taken, the number of nodes, odd for roots and
      else even, and whether `z` is that of roots.
    """
    most_ahead = horizon(b1, b2, dtype)
    # The default betas have a mean of 10; the best is 10 steps ahead, with 10 nodes.
    leads = (round(mean_ahead(b1, b2) * factor) for factor in (0.5, 1, 1.5, 2, 3, 4, 6))
    fits = [
        (lead, degree, uses_roots)
        for lead in sorted({min(max(1, lead), most_ahead) for lead in leads})
        for uses_roots in (False, True)
        if (degree := _degree(b1, b2, lead, uses_roots, dtype))
    ]
    if not fits:
        raise ValueError(
            "exact_adam cannot sum up the updates of a row without gradients to full "
            f"precision with b1={b1} and b2={b2}: 1 - b2 may be about 0.7 of 1 - b1, "
            "in float64 half of it. Choose a smaller b1 or a larger b2."
        )
    return min(fits, key=lambda each: each[1])


def _degree(b1: float, b2: float, lead: int, uses_roots: bool, dtype: Any) -> int:
    """How many nodes are needed, odd for roots and else even; 0 if it is too many."""
    count, length = _NODES_OF_A_FIT, horizon(b1, b2, dtype)
    # From step 2 on, for a learning rate that grows as `t`.
    t = np.arange(2, 2 + length)
    rho = np.sqrt(1 - b2**t)
    values = sum_at_nodes(
        t * rho / (1 - b1**t),
        rho / np.sqrt(1 - b2 ** (1 + lead)),
        _powers(b1, b2, length),
        nodes(count),
        uses_roots=uses_roots,
    )
    sizes = np.abs(chebyshev_coefficients(count) @ values)
    sizes[sizes < 1e-14 * sizes[0]] = 0  # rounding errors, of which there are many
    left_out = np.cumsum(sizes[::-1])[::-1]  # by a polynomial with so many coefficients
    enough = left_out <= _TOLERANCE[np.dtype(dtype).itemsize] * sizes[0]
    degree = max(2, int(np.argmax(enough))) if enough.any() else count
    degree += degree % 2 != uses_roots
    return degree if degree <= _MOST_NODES[np.dtype(dtype).itemsize] else 0


def _powers(b1: float, b2: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    j = np.arange(1, 1 + count)
    with np.errstate(under="ignore"):
        return b1**j, b2 ** (j / 2)


def outlook(
    count: jax.Array,
    learning_rate: Schedule,
    weight_decay: Schedule | None,
    betas: Betas,
    dtype: Any,
) -> Outlook:
    """The steps after step `count`; schedules are called with the steps before."""
    counts = _counts(count, length=horizon(*betas[:2], dtype))
    are_constant = []

    def values(schedule: Schedule) -> jax.Array:
        def one(count: jax.Array) -> jax.Array:
            value = schedule(count)
            # Under `vmap` the count is traced, in a program and outside of one.
            are_constant.append(not isinstance(value, jax.core.Tracer))
            return jnp.asarray(value, dtype).reshape(())

        return jax.vmap(one)(counts)

    rates = values(learning_rate)
    decays = None if weight_decay is None else values(weight_decay)
    ends = all(are_constant)
    return _outlook(count, counts, rates, decays, betas=betas, ends=ends)


@functools.partial(compiled, static_argnames="length")
def _counts(count: jax.Array, *, length: int) -> jax.Array:
    """The steps that schedules are called with.

    The next step and those ahead, for the sums; then steps of the past for the largest
    rate, by which a rate near zero at the end of a schedule is compared.
    """
    # The next step is `ahead[0]`. After 35 steps, `past` is 0, 2, 4, ..., 30.
    ahead = later(count, jnp.arange(1 + length, dtype=count.dtype))
    past = count // _PAST * jnp.arange(_PAST, dtype=count.dtype)
    return jnp.concatenate([ahead, past])


@functools.partial(compiled, static_argnames=("betas", "ends"))
def _outlook(
    count: jax.Array,
    counts: jax.Array,
    rates: jax.Array,
    decays: jax.Array | None,
    *,
    betas: Betas,
    ends: bool,
) -> Outlook:
    """`outlook`, from what the schedules say at these counts."""
    (b1, b2), dtype = betas[:2], rates.dtype
    length = len(counts) - _PAST - 1

    def finite(numbers: jax.Array) -> jax.Array:
        # Schedules need not be defined after their last step, as `(1 - t / T) ** 0.9`.
        # Rows do not move there; if training does get there, it is the first value.
        return jnp.where(jnp.isfinite(numbers) | (counts == count), numbers, 0)

    t = later(counts[: 1 + length], 1)
    every_rate = finite(rates)
    rate = every_rate[: 1 + length]
    rho = jnp.sqrt(one_minus_power(b2, t, dtype))
    size, grad_size = rate * rho / one_minus_power(b1, t, dtype), None
    if betas.nesterov:  # optax corrects the moment as that of the step after
        grad_size = jnp.asarray(1 - b1, dtype) * size
        size = rate * rho / one_minus_power(b1, later(t, 1), dtype)
        size = jnp.asarray(b1, dtype) * size
    log_decay, decay = None, None
    log_products = jnp.zeros((2, 1, length), dtype)  # logarithms of the factors ahead
    if decays is not None:
        decay = finite(decays)[: 1 + length]
        product = rate * decay
        # Beyond, updates would be wrong without a sign of it.
        product = jnp.where(product <= largest_decay(b1, b2), product, jnp.nan)
        log_decay = jnp.log1p(-product)
        # The logarithms of `P(T, t)`. For factors p1, p2, p3 of the steps ahead: those
        # of p1, p1 p2 from the next step on, of p2, p2 p3 from the one after it on.
        sums = [jnp.cumsum(x) for x in (log_decay[:-1], log_decay[1:])]
        log_products = jnp.concatenate([log_products, jnp.stack(sums)[:, None]], axis=1)

    def both(x: jax.Array) -> jax.Array:
        """The steps from the next one on, and those from the one after it on."""
        return jnp.stack([x[:-1], x[1:]])

    # `size` and `rho` [2, length], `log_products` [2, 1 or 2, length], for parameters
    # without and with decay: sums of [2, 1 or 2, nodes].
    # Constant rates that do not exceed `largest_decay` have an end.
    sums_ahead = functools.partial(_sum_ahead, betas=betas, ends=ends)
    of_both = jax.vmap(jax.vmap(sums_ahead, (None, None, 0)))
    before, after = of_both(both(size), both(rho), log_products)
    steps = Step(size, grad_size, rho, log_decay, rate, decay)
    now = jax.tree.map(lambda x: x[0], steps)
    return Outlook(now, before, after, jnp.max(jnp.abs(every_rate)))


def _sum_ahead(
    size: jax.Array,
    rho: jax.Array,
    log_products: jax.Array,
    *,
    betas: Betas,
    ends: bool,
) -> jax.Array:
    """The remaining update of these steps, at the nodes; NaN if it has no end.

    `ends` says that it has one: there is no need to look at the terms.
    """
    dtype, (b1, b2) = size.dtype, betas[:2]
    lead, degree, uses_roots = fit(b1, b2, dtype)
    size = size * jnp.exp(-log_products)
    # In NumPy: what is known while tracing is no part of the step.
    powers = [x.astype(dtype)[::-1] for x in _powers(b1, b2, len(size))]
    z = nodes(degree).astype(dtype)
    poles = rho / rho[lead - 1]
    # The smallest terms first, which lose less in a sum.
    total = sum_at_nodes(size[::-1], poles[::-1], powers, z, uses_roots=uses_roots)
    if ends:
        return total
    # Without an end, the learning rate grows for all of these steps as fast as momentum
    # dies out, or until it overflows. What is smaller than 0.02 tolerances can be no
    # part of a parameter.
    r, tolerance = b1 / math.sqrt(b2), _TOLERANCE[dtype.itemsize]
    terms = abs(size) * jnp.asarray(r ** np.arange(1, 1 + len(size)), dtype)
    is_over = terms[-1] < tolerance * jnp.maximum(50 * jnp.sum(terms), 0.02)
    is_over &= jnp.max(terms) <= _LARGEST * jnp.maximum(1, terms[0])
    return jnp.where(is_over, total, jnp.nan)


def constants_of(betas: Betas, dtype: Any) -> Constants:
    b1 = max(betas.b1, 1e-30)  # whose square is 0 in float32
    lead, _, uses_roots = fit(betas.b1, betas.b2, dtype)
    make = ConstantsOfRoots if uses_roots else Constants
    return make(
        log_b1=jnp.full([], math.log(b1), dtype),
        log_q=jnp.full([], math.log(betas.b2) / 2, dtype),
        eps=jnp.full([], betas.eps, dtype),
        lead=jnp.full([], lead, jnp.int32),
    )


def take_step(
    tables: TableState, constants: Constants, view: Outlook, decays: np.ndarray
) -> TableState:
    """The state of tables after the next step, as for rows without a gradient."""
    now, dtype = view.now, view.now.size.dtype
    passed = (tables.clock - tables.values_until).astype(dtype) + 1
    centres = centre_after(constants, tables.values_until + tables.origin)
    poles = constants.eps * now.rho / centres
    z = jnp.asarray(nodes(tables.remaining.shape[-1]), dtype)

    def term(passed: jax.Array, pole: jax.Array) -> Any:
        powers = [jnp.exp(passed * log)[None] for log in constants[:2]]
        one, uses_roots = now.size[None], constants.uses_roots
        return sum_at_nodes(one, pole[None], powers, z, uses_roots=uses_roots)

    # The sum since `values_until` grows by a term in each step, at nodes that stay
    # where they were then: `passed` is the `j` of that term. The remaining update, at
    # nodes that move with the centre, is summed up again.
    behind, decay = tables.remaining[:, 0], tables.decay
    if decay is not None:
        log_decay = decay_of(now, decays)
        behind = behind * jnp.exp(log_decay)[:, None]
        # The sum in two numbers: the second is what the first rounds off (Knuth's
        # TwoSum).
        before, addend = decay[:, 0], log_decay + decay[:, 1]
        total = before + addend
        added = total - before
        lost = (before - (total - added)) + (addend - added)
        decay = jnp.stack([total, lost], axis=1)
    behind = behind + jax.vmap(term)(passed, poles)
    remaining = jnp.stack([behind, of_each(view.after, decays)], axis=1)
    clock = optax.safe_increment(tables.clock)
    return tables._replace(clock=clock, remaining=remaining, decay=decay)


def of_each(of_both: jax.Array, decays: np.ndarray) -> jax.Array:
    """Of parameters without decay and with it, those of each, `[parameters, nodes]`.

    Not by a gather, which XLA for CPUs compiles apart.
    """
    which: Any = jnp.asarray(decays)[:, None]
    return jnp.where(which, of_both[-1], of_both[0])


def decay_of(now: Step, decays: np.ndarray) -> jax.Array:
    """The logarithm of what is left of each parameter by this step's decay."""
    assert now.log_decay is not None
    return jnp.where(jnp.asarray(decays), now.log_decay, 0)


@compiled
def hold_values(tables: TableState, which: Any = True) -> TableState:
    """The state of tables after the rows of some, or all, have been stored as values.

    `which` says of which parameters. Their decay begins again, as after `init`.
    """
    # The sum of the updates since `values_until`, which is now, begins at zero.
    which = jnp.broadcast_to(jnp.asarray(which), tables.values_until.shape)[:, None]
    behind = jnp.where(which, 0, tables.remaining[:, 0])
    decay = tables.decay
    return tables._replace(
        values_until=jnp.where(which[:, 0], tables.clock, tables.values_until),
        remaining=jnp.stack([behind, tables.remaining[:, 1]], axis=1),
        decay=None if decay is None else jnp.where(which, 0, decay),
    )
