"""Stochastic rounding, number by number: which two results, and how often each.

The reference lists all numbers of a type and searches; the program computes in powers
of two. Probabilities are tested by statistics, with one key: `SAMPLES` of each case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._optimizers import rounding

from ..helpers.support import assert_identical, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SAMPLES = 4096
SMALLEST_STEP = 2.0**-102  # see rounding.py
# Parameters, gradients.
TYPES = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e5m2"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
]


def all_numbers(dtype):
    """Every finite number of a type of 16 bits or less, ascending, as float64."""
    dtype = jnp.dtype(dtype)
    bits = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaNs among them
        values = bits.view(dtype).astype(np.float64)
    values = values[np.isfinite(values)]
    return np.unique(values[np.mod(values, SMALLEST_STEP) == 0])


def below(x, dtype):
    """The largest number of a type that is at most `x`, but for the end of the type."""
    if jnp.dtype(dtype) == np.float32:
        near = x.astype(np.float32)
        return np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)
    values = all_numbers(dtype)
    return values[np.maximum(np.searchsorted(values, x, "right") - 1, 0)]


def two_results(old, x, dtype, update_dtype):
    """What updates make of a parameter: the nearest ones below and above `x`."""
    if jnp.dtype(update_dtype) == np.float32:
        down = below(below(x, dtype) - old, update_dtype)
        up = -below(old + below(-x, dtype), update_dtype)
        return [(old + u).astype(dtype).astype(np.float64) for u in (down, up)]
    updates, pairs = all_numbers(update_dtype), []
    for p, goal in zip(old, x, strict=True):
        with np.errstate(over="ignore"):
            sums = (p + updates).astype(dtype).astype(np.float64)
        sums = sums[np.isfinite(sums)]
        # Or, at the end of the updates' type, as near as they come.
        lo = sums[sums <= goal].max(initial=sums.min())
        pairs.append((lo, sums[sums >= goal].min(initial=sums.max())))
    return np.transpose(pairs)


def cases(dtype):
    """Pairs of a parameter and an update, as float32."""
    info = jnp.finfo(dtype)
    tiny = max(float(info.smallest_subnormal), SMALLEST_STEP)
    eps, largest = float(info.eps), float(info.max)
    normal = max(float(info.tiny), tiny / eps)
    olds = [0.0, 1.0, 1 - eps / 2, 1 + eps, 2 - eps, -1.0, -1.5, 0.25 + eps / 4]
    olds += [normal, -normal * (1 + eps), tiny, -3 * tiny, largest / 32]
    sizes = [eps * x for x in (1e-5, 0.01, 0.3, 0.5, 0.77, 1.0, 1.7, 13.3)]
    sizes += [0.4, 0.999, 1.0, 1.001, 1.9, 2.0, 2.9, 17.0]
    pairs = [(p, s * abs(p)) for p in olds for s in sizes]
    pairs += [(0.0, s * x) for x in (1.0, normal, tiny) for s in sizes]
    pairs += [(p, x) for p in olds for x in (0.4 * tiny, 0.3, 0.9 * normal)]
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-8, 3, (100, 2)))
    pairs += [(p * (-1) ** i, u) for i, (p, u) in enumerate(spread)]
    pairs = np.array(pairs + [(p, -u) for p, u in pairs])
    old, update = pairs[:, 0].astype(dtype).astype(np.float32), pairs[:, 1]
    update = update.astype(np.float32)
    usual = np.abs(old.astype(np.float64) + update) <= largest * (1 - eps)
    # A sum of float32 that devices take for 0 is none of ours.
    usual &= (np.abs(old + update) >= 2.0**-126) | (old == -update)
    usual &= np.abs(update) >= 2.0**-126
    return old[usual], update[usual]


def constant(updates):
    """The transformation that gives these updates, in float32."""
    return optax.stateless(lambda grads, params: updates)


def step(tx, params, grads, apply=osa.apply_updates):
    updates, _ = tx.update(grads, tx.init(params), params)
    return apply(params, updates), updates


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "update_dtype"), slow_but(TYPES, TYPES[2]))
def test_right_on_average(dtype, update_dtype):
    old, update = cases(dtype)
    x = old + update
    lo, hi = two_results(
        old.astype(np.float64), x.astype(np.float64), dtype, update_dtype
    )
    shape = (len(old), SAMPLES)
    params = jnp.broadcast_to(jnp.asarray(old, dtype)[:, None], shape)
    updates = jnp.broadcast_to(update[:, None], shape)
    tx = osa.stochastic_rounding(constant(updates), jax.random.key(0))
    new, changes = jax.jit(step, static_argnums=0)(
        tx, params, jnp.zeros(shape, update_dtype)
    )
    assert (new.dtype, changes.dtype) == (dtype, update_dtype)
    new = np.asarray(new).astype(np.float64)
    is_high = new == hi[:, None]
    bad = ~(is_high | (new == lo[:, None])).all(axis=1)
    rows = zip(old[bad], update[bad], lo[bad], hi[bad], new[bad, :3], strict=True)
    assert not bad.any(), list(rows)[:3]
    gap = np.where(hi > lo, hi - lo, 1)
    share = np.where(hi > lo, (x - lo) / gap, 1)
    assert ((share >= 0) & (share <= 1)).all()
    deviation = np.sqrt(share * (1 - share) / SAMPLES)
    error = is_high.mean(axis=1) - share
    # Five standard deviations, and one sample more for the rarest.
    bad = np.abs(error) > 5 * deviation + (deviation > 0) / SAMPLES
    assert not bad.any(), (old[bad], update[bad], share[bad], error[bad])
    random = (share > 0.01) & (share < 0.99)
    z = error[random] / deviation[random]
    assert len(z) > 100
    assert abs(z.mean()) < 5 / np.sqrt(len(z))
    assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / len(z))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but([t for t, u in TYPES if t == u], "bfloat16"))
def test_special_numbers(dtype):
    """Zero updates keep every bit; the type's end, infinities and NaN stay."""
    largest = float(jnp.finfo(dtype).max)
    every = jnp.asarray(np.append(all_numbers(dtype), -0.0).astype(dtype))
    beyond = 0.4 * float(jnp.finfo(dtype).eps) * largest  # rounded to nearest: inf
    old = jnp.asarray([largest, largest, -largest, 1.0, 1.0, 1.0], dtype)
    update = [beyond, 1e-9, -beyond, jnp.inf, -jnp.inf, jnp.nan]
    end = [largest, largest, -largest, jnp.inf, -jnp.inf, jnp.nan]
    expected = np.asarray(end).astype(dtype).astype(np.float64)
    n = len(every)
    # Updates just above what reaches the end: the sums must not go beyond.
    small = every[(np.abs(every) > largest / 512) & (np.abs(every) < largest / 2)]
    wide = small.astype(jnp.float32)
    far = jnp.copysign(largest * (1 - beyond / largest / 3), wide) - wide
    update = jnp.concatenate([jnp.asarray([0.0] * n + [-0.0] * n + update), far])
    params = jnp.concatenate([every, every, old, small])
    tx = osa.stochastic_rounding(constant(update), 0)

    @jax.jit
    def both(params):
        new, updates = step(tx, params, params)
        return new, optax.apply_updates(params, updates)

    for new in both(params):
        assert_identical(new[:n], every)
        assert_identical(new[n : 2 * n], every)
        actual = np.asarray(new[2 * n :]).astype(np.float64)
        np.testing.assert_array_equal(actual[: len(old)], expected)
        assert np.isfinite(actual[len(old) :]).all()
    state = jnp.asarray([largest + beyond, *end[1:]])
    actual = rounding.round_value(jnp.zeros(6, jnp.uint32), state, dtype)
    np.testing.assert_array_equal(np.asarray(actual).astype(np.float64), expected)


FLOAT8 = {
    "sparse_adam": osa.sparse_adam(0.5),
    "exact_adam": osa.exact_adam(0.5),
    "rowwise_adagrad": osa.rowwise_adagrad(0.5),
    "sparse_adafactor": osa.sparse_adafactor(0.5),
    "nearest": osa.lazy(optax.adam(0.5)),
    "stochastic": osa.lazy(
        osa.stochastic_rounding(
            optax.adam(0.5), jax.random.key(0), state_dtype=jnp.float32
        )
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_tables(name):
    """JAX promotes float8 to no other type. The first step is the learning rate."""
    tx, table = FLOAT8[name], jnp.ones((8, 4), "float8_e4m3fn")
    ids = jnp.array([3, 3, 5])

    @jax.jit
    def step(table, state):
        read = state if name == "exact_adam" else None
        grad = osa.grad(lambda t: jnp.sum(t[ids].astype("float32")), read=read)(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    new, _ = step(table, tx.init(table))
    assert new.dtype == table.dtype
    new = np.asarray(new, "float32")
    if name in ("exact_adam", "sparse_adafactor"):  # projected values; relative steps
        assert (new[[3, 5]] < 1).all()
    else:
        np.testing.assert_array_equal(new[[3, 5]], 0.5)
    np.testing.assert_array_equal(np.delete(new, [3, 5], axis=0), 1)
