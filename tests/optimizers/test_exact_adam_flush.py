"""exact_adam where something needs a flush before: with it, and without.

With it the numbers are those of dense Adam. Without it: an error outside of a program,
NaN in it; never in silence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.exact_adam import (
    RATE,
    assert_trees,
    batches,
    dense_run,
    exact_run,
    gradient,
    start,
    trained,
)
from ..helpers.support import assert_close, slow_but

_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


COSINE = optax.cosine_decay_schedule(RATE, 100)
# The new optimiser, what it is in optax, and the new count.
CHANGES = {
    "count": (osa.exact_adam(RATE), optax.adam(RATE), 0),
    "count, later": (osa.exact_adam(RATE), optax.adam(RATE), 100_000),
    "rate": (osa.exact_adam(0.3 * RATE), optax.adam(0.3 * RATE), 20),
    "one percent": (osa.exact_adam(1.01 * RATE), optax.adam(1.01 * RATE), 20),
    "schedule": (osa.exact_adam(COSINE), optax.adam(COSINE), 20),
    "nesterov": (
        osa.exact_adam(RATE, nesterov=True),
        optax.adam(RATE, nesterov=True),
        20,
    ),
    "decay": (
        osa.exact_adamw(RATE, weight_decay=0.3),
        optax.adamw(RATE, weight_decay=0.3),
        20,
    ),
}


def before_change(name):
    tx = osa.exact_adamw(RATE, weight_decay=0.1) if name == "decay" else None
    return trained(tx or osa.exact_adam(RATE))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(CHANGES, "count", "schedule", "nesterov"))
def test_changes_after_flush(name):
    tx, reference, count = CHANGES[name]
    params, state = osa.flush(*before_change(name))
    state = optax.tree.set(state, count=jnp.int32(count))
    adam = optax.ScaleByAdamState(state.count, state.mu, state.nu)
    dense = optax.tree.set(reference.init(params), count=state.count)
    dense = (adam, *dense[1:])
    ids = batches(25, seed=3)
    actual, state, values = exact_run(tx, params, state, ids)
    wanted, _, expected = dense_run(reference, params, dense, ids)
    assert_trees(values, expected)
    assert_trees(osa.flush(actual, state)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_changes_without_flush(name):
    """NaN in a program, for all to see; an error outside."""
    tx, _, count = CHANGES[name]
    params, state = before_change(name)
    changed = optax.tree.set(state, count=jnp.int32(count))
    after, changed_state, values = exact_run(tx, params, changed, batches(3, seed=3))
    assert np.isnan(values[1:]).all()
    flushed = osa.flush(after, changed_state)[0]["table"]
    assert np.isnan(flushed[batches(3, seed=3).reshape(-1)]).all()
    grads = jax.jit(lambda p, s: gradient(p, read=s))(params, changed)
    with pytest.raises(ValueError, match="Call params, state = flush"):
        tx.update(grads, changed, params)
    # The state as it is can still be flushed, and then all is well.
    params, state = osa.flush(params, changed)
    _, _, values = exact_run(tx, params, state, batches(3, seed=3))
    assert np.isfinite(values).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", _SLOW("float64")])
def test_rows_later_than_their_table(dtype):
    """A state restored in part has rows from after its clock; the kernel in float32."""
    tx, params, ids = osa.exact_adam(RATE), start(), batches(12)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    older = exact_run(tx, params, tx.init(params), ids[:6])[1]
    params, newer, _ = exact_run(tx, params, tx.init(params), ids)
    names = "count", "clock", "origin", "values_until", "remaining"
    state = newer._replace(**{name: getattr(older, name) for name in names})
    read = jax.jit(lambda p, s: osa.evaluate(lambda p: p["table"][ids[6:]], read=s)(p))
    assert np.isnan(read(params, state)).all()


def tied(table, ids):
    return jnp.sum(table[ids] @ table.T) + jnp.sum(table[ids] ** 2)


DENSE_GRADIENTS = {
    "tied weights": lambda loss, table, ids: osa.grad(tied)(table, ids),
    "jax.grad": lambda loss, table, ids: jax.grad(loss)(table, ids),
    "todense": lambda loss, table, ids: osa.grad(loss)(table, ids).todense(),
    "sparse": lambda loss, table, ids: osa.grad(loss, sparse=False)(table, ids),
}


# How a gradient is made dense is nothing to the optimiser: each way for one of them.
DENSE_CASES = [
    (osa.exact_adam, "jax.grad"),
    (osa.exact_adamw, "todense"),
    (osa.exact_adam, "sparse"),
    (osa.exact_adamw, "tied weights"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), DENSE_CASES)
def test_dense_gradient_of_a_stale_table(make, name):
    """Raises, and in a program is NaN; behind a flush it is that of dense Adam."""
    tx, reference = make(0.1), getattr(optax, make.__name__[6:])(0.1)

    def loss(table, ids):
        return jnp.sum(table[ids] ** 2)

    # Among 64-bit types, too, a table may be of float32.
    table, ids = jnp.ones((5, 2), "float32"), jnp.array([3, 1])
    wanted, wanted_state = table, reference.init(table)
    step = osa.make_train_step(loss, tx)
    table, state, _ = step(jnp.copy(table), tx.init(table), ids)

    @functools.partial(jax.jit, static_argnums=0)
    def dense(loss, table, state):
        grad = jax.grad(loss)(table, ids)
        updates, state = reference.update(grad, state, table)
        return optax.apply_updates(table, updates), state

    wanted, wanted_state = dense(loss, wanted, wanted_state)

    def update(table, state):
        grad = DENSE_GRADIENTS[name](loss, table, ids)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    with pytest.raises(ValueError, match=r"params, state = flush\(params, state\)"):
        update(table, state)
    assert np.isnan(jax.jit(update)(table, state)[0]).all()
    table, _ = jax.jit(update)(*osa.flush(table, state))
    wanted, _ = dense(tied if name == "tied weights" else loss, wanted, wanted_state)
    assert_close(table, wanted, 1e-6)
