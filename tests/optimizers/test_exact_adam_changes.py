"""exact_adam where a run changes: tables that grow, states of others, odd schedules."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.exact_adam_table import ROWS, batches, runner, start
from ..helpers.support import (
    assert_close,
    bcoo,
    slow_but,
)

ADAMW = {"weight_decay": 0.1, "b2": 0.95}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def grown(new, old):
    """The recipe of `docs/recipes.md`."""
    return old if new.shape == old.shape else new.at[: len(old)].set(old)


@pytest.mark.slow
def test_a_table_that_grows():
    """New rows decay from now on, not from the beginning."""
    ours, optaxs = osa.exact_adamw(0.05, **ADAMW), optax.adamw(0.05, **ADAMW)
    exact, dense = runner(ours, True), runner(optaxs, False)
    (table, state), _ = exact(start(), ours.init(start()), batches(50))
    (wanted, wanted_state), _ = dense(start(), optaxs.init(start()), batches(50))
    table, state = osa.flush(table, state)
    assert_close(table, wanted, 1e-12)
    tables = [jnp.concatenate([old, start(4, seed=2)]) for old in (table, wanted)]
    state = jax.tree.map(grown, ours.init(tables[0]), state)
    wanted_state = jax.tree.map(grown, optaxs.init(tables[1]), wanted_state)
    (table, state), values = exact(tables[0], state, batches(50, ROWS + 4))
    (wanted, _), expected = dense(tables[1], wanted_state, batches(50, ROWS + 4))
    assert_close(values, expected, 1e-12)
    assert_close(osa.flush(table, state)[0], wanted, 1e-12)


@pytest.mark.slow
def test_a_dense_run_goes_on_and_back():
    """As `docs/exact_adam.md` says, with optax's own state before and after."""
    ours, optaxs = osa.exact_adamw(0.05, **ADAMW), optax.adamw(0.05, **ADAMW)
    exact, dense = runner(ours, True), runner(optaxs, False)
    first, second, third = jnp.split(batches(90), 3)
    (wanted, wanted_state), _ = dense(start(), optaxs.init(start()), batches(90))
    (table, state), _ = dense(start(), optaxs.init(start()), first)
    adam, *others = state
    state = ours.init(table)
    state = state._replace(
        count=adam.count,
        mu=adam.mu,
        nu=adam.nu,
    )
    (table, state), _ = exact(table, state, second)
    table, state = osa.flush(table, state)
    state = optax.ScaleByAdamState(state.count, state.mu, state.nu), *others
    (table, state), _ = dense(table, state, third)
    actual, expected = (table, state), (wanted, wanted_state)
    chex.assert_trees_all_close(actual, expected, rtol=1e-11)


def test_overflow():
    """The element whose gradient's square overflows stops, as in dense Adam."""
    with jax.enable_x64(False):
        tx, table = osa.exact_adam(0.1), jnp.ones((2, 2))
        state, step = tx.init(table), jax.jit(tx.update)
        for size, expected in ((1e20, 0.9), (1.0, 0.8), (1.0, 0.7)):
            values = np.array([[size, 1.0]], np.float32)
            grad = bcoo(values, np.zeros((1, 1), np.int32), (2, 2))
            update, state = step(grad, state)
            table = osa.apply_updates(table, update)
            flushed, _ = osa.flush(table, state)
            assert_close(flushed, [[1.0, expected], [1.0, 1.0]], 1e-5)


MOST = 2**31 - 1
LATE = {
    "exact_adam": osa.exact_adam(0.1),
    "nesterov": osa.exact_adam(0.1, nesterov=True),
    "exact_adamw": osa.exact_adamw(lambda count: 1e-10 * (MOST - count / 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", slow_but([MOST - 3, MOST - 1, MOST], MOST - 1))
@pytest.mark.parametrize("name", slow_but(LATE, "exact_adam"))
def test_counts_that_32_bits_do_not_hold(name, start):
    """It stands still, as in optax; beside Adam in float64, whose corrections are 1."""
    tx, table = LATE[name], np.ones((6, 2))
    step = osa.make_train_step(lambda t, ids: jnp.sum(jnp.sin(t[ids])), tx)
    params = jnp.ones((6, 2))
    state = tx.init(params)._replace(count=jnp.int32(start))
    mu, nu, count = np.zeros_like(table), np.zeros_like(table), start
    for ids in ([0, 1], [2, 0], [3, 4], [1, 0], [5, 5], [2, 2]):
        params, state, _ = step(params, state, jnp.array(ids))
        grad = np.zeros_like(table)
        np.add.at(grad, ids, np.cos(table[ids]))
        mu += 0.1 * (grad - mu)
        nu += 0.001 * (grad**2 - nu)
        rate = 0.1 if name != "exact_adamw" else 1e-10 * (MOST - count / 2)
        moved = 0.9 * mu + 0.1 * grad if name == "nesterov" else mu
        decay = 1e-4 * table if name == "exact_adamw" else 0
        table -= rate * (moved / (np.sqrt(nu) + 1e-8) + decay)
        count = min(count + 1, MOST)
    values, state = jax.jit(osa.flush)(params, state)
    np.testing.assert_allclose(values, table, rtol=2e-6)
    assert int(state.count) == count


@pytest.mark.slow
def test_a_clock_that_has_no_room():
    """Rows cannot be dated any more: refused, or NaN in a program; and what to do."""
    tx, params, ids = osa.exact_adam(0.1), jnp.ones((6, 2)), jnp.array([1, 2])
    state = tx.init(params)
    times = dict.fromkeys(("count", "clock"), jnp.int32(MOST))
    full = state._replace(**times, values_until=jnp.full_like(state.values_until, MOST))
    full = full._replace(last=jnp.full_like(state.last, MOST))

    def step(params, state):
        grad = osa.grad(lambda t: jnp.sum(jnp.sin(t[ids])), read=state)(params)
        return tx.update(grad, state, params)

    with pytest.raises(ValueError, match="make a new state by init"):
        step(params, full)
    updates, _ = jax.jit(step)(params, full)
    assert np.isnan(updates.data[:2]).all()
    values, full = osa.flush(params, full)
    fresh = state._replace(mu=full.mu, nu=full.nu, count=full.count)
    updates, _ = jax.jit(step)(values, fresh)
    assert np.isfinite(updates.data).all()
