"""exact_adam and exact_adamw give the numbers of optax's Adam on dense gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import assert_close, assert_identical, bcoo

ROWS, WIDTH, BATCH, STEPS = 1000, 4, 16, 1000
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.01, 100, STEPS)


@pytest.fixture(autouse=True)
def as_optax_expects():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def problem():
    """A table, targets, and batches of Zipf ids; one row rests for 900 steps."""
    rng = np.random.default_rng(0)
    weights = 1 / (1 + np.arange(ROWS))
    ids = rng.choice(ROWS - 1, (STEPS, BATCH), p=weights[:-1] / weights[:-1].sum())
    ids[[50, 950], 0] = ROWS - 1
    table, targets = rng.normal(size=(2, ROWS, WIDTH)) * [[[0.1]], [[0.5]]]
    return table, targets, ids.astype(np.int32), rng.normal(size=(*ids.shape, WIDTH))


def loss(table, targets, ids, noise, size):
    """Its gradient, about as large as `size`, depends on what is read."""
    rows = table[ids]
    values = jnp.sin(rows - targets[ids]) ** 2 + noise * rows
    return size * jnp.sum(values), rows


def train(tx, value_and_grad, apply_updates, table, targets, ids, noise, size):
    """The table in the end, and the rows that each step has read."""

    def step(carry, batch):
        table, state = carry
        fun = functools.partial(value_and_grad, read=state) if is_exact else dense
        (_, rows), grad = fun(loss, has_aux=True)(table, targets, *batch, size)
        updates, state = tx.update(grad, state, table)
        return (apply_updates(table, updates), state), rows

    is_exact, dense = value_and_grad is osa.value_and_grad, value_and_grad
    carry, rows = jax.lax.scan(step, (table, tx.init(table)), (ids, noise))
    return osa.flush(*carry)[0] if is_exact else carry[0], rows


OURS = osa.value_and_grad, osa.apply_updates
OPTAX = jax.value_and_grad, optax.apply_updates
OPTIMIZERS = {
    "adam": (osa.exact_adam(SCHEDULE), optax.adam(SCHEDULE)),
    "adamw": (
        osa.exact_adamw(SCHEDULE, weight_decay=0.1),
        optax.adamw(SCHEDULE, weight_decay=0.1),
    ),
    "nadamw": (
        osa.exact_adamw(0.003, 0.8, 0.95, 1e-4, weight_decay=0.1, nesterov=True),
        optax.adamw(0.003, 0.8, 0.95, 1e-4, weight_decay=0.1, nesterov=True),
    ),
}


@functools.cache
def results(name, which, dtype, size):
    with jax.enable_x64(dtype == "float64"):
        run = compiled(name, which, dtype)
        table, targets, ids, noise = problem()
        arrays = (jnp.asarray(x, dtype) for x in (table, targets, noise))
        table, targets, noise = arrays
        out = run(table, targets, jnp.asarray(ids), noise, jnp.asarray(size, dtype))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), out)


@functools.cache
def compiled(name, which, dtype):
    ours, optaxs = OPTIMIZERS[name]
    tx, functions = (ours, OURS) if which == "exact" else (optaxs, OPTAX)
    return jax.jit(functools.partial(train, tx, *functions))


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_dense(name, size):
    """After 1,000 steps, and at each read in between.

    In float64 to 1e-10. In float32, the dense run's own rounding is measured against
    the dense run in float64, and allowed.
    """
    expected = results(name, "dense", "float64", size)
    for actual, wanted in zip(
        results(name, "exact", "float64", size), expected, strict=True
    ):
        assert_close(actual, wanted, 1e-10, magnitude=1.0)
    dense, exact = (
        [
            a - b
            for a, b in zip(results(name, kind, "float32", size), expected, strict=True)
        ]
        for kind in ("dense", "exact")
    )
    for a, b, what in zip(exact, dense, ("table", "reads"), strict=True):
        for measure in (lambda x: np.abs(x).max(), np.std):
            assert measure(a) <= 2 * measure(b), (what, measure(a), measure(b))
