"""What the documentation says in a sentence, against dense gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.optimizers import FINAL
from ..helpers.support import TOLERANCE, assert_close, assert_identical

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_optax_expects")]

SHAPE = (9, 4)
TOL = TOLERANCE["float32"].numpy


@pytest.fixture
def table():
    values = np.random.default_rng(0).normal(size=SHAPE)
    return jnp.asarray(values, jnp.float32)


def loss(params, ids):
    return jnp.sum(jnp.sin(params["table"][ids]) @ params["w"])


def test_one_norm_around_the_parts(table):
    """Snapshot and clipping see the sums of all rows and the dense parameters."""
    params, ids = {"table": table, "w": jnp.ones(4)}, jnp.array([3, 7, 3, 3])
    labels = {"table": "rows", "w": "dense"}

    def chain(rows):
        return optax.chain(
            optax.snapshot("norm", optax.tree.norm),
            optax.clip_by_global_norm(1.0),
            optax.partition({"rows": rows, "dense": optax.adamw(0.1)}, labels),
        )

    tx = osa.lazy(chain(osa.lazy(optax.sgd(0.1))))
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(
        jax.jit(osa.grad(loss))(params, ids), state, params
    )
    actual = osa.apply_updates(params, updates)
    reference = chain(optax.sgd(0.1))

    @jax.jit
    def dense_step(params, ids):
        dense = jax.grad(loss)(params, ids)
        updates, _ = reference.update(dense, reference.init(params), params)
        return optax.apply_updates(params, updates), optax.tree.norm(dense)

    expected, norm = dense_step(params, ids)
    assert norm > 1
    assert_close(optax.tree.get(state, "norm"), norm, TOL)
    for name in params:
        assert_close(actual[name], expected[name], TOL, magnitude=1.0)


@pytest.mark.parametrize("name", FINAL)
def test_a_table_that_grows(name, table):
    """The old rows go on as if nothing had happened, the new ones start."""
    tx = FINAL[name].make(0.1)

    @jax.jit
    def step(table, state, ids):
        grad = osa.grad(lambda table: jnp.sum(jnp.sin(table[ids])))(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    table, state = step(table, tx.init(table), jnp.array([3, 7, 3]))
    grown = jnp.concatenate([table, jnp.ones((2, 4))])
    new_state = jax.tree.map(
        lambda new, old: old if new.shape == old.shape else new.at[: len(old)].set(old),
        tx.init(grown),
        state,
    )
    with pytest.raises(ValueError, match="shape"):
        step(grown, state, jnp.array([3, 8]))
    expected, _ = step(table, state, jnp.array([3, 8]))
    actual, new_state = step(grown, new_state, jnp.array([3, 8]))
    assert_identical(actual[: len(table)], expected)
    actual, _ = step(actual, new_state, jnp.array([10]))
    assert_identical(actual[:-1], jnp.concatenate([expected, jnp.ones((1, 4))]))
    assert jnp.all(actual[-1] < 1)
