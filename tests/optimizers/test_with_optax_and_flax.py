"""`sparse_adam` as a part of optax and Flax programs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    slow_but,
)

SHAPE = (9, 4)


@pytest.fixture
def grad():
    values, indices = random_entries(np.random.default_rng(0), SHAPE, 1, 12)
    return bcoo(values, indices, SHAPE)


@pytest.fixture
def params(grad):
    return {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}


@pytest.fixture
def grads(grad):
    return {"table": grad, "bias": jnp.arange(3.0)}


def test_extra_arguments_are_ignored(params, grads):
    tx = osa.sparse_adam(0.1)
    state = tx.init(params)
    result = tx.update(grads, state, params, value=jnp.float32(1), key=3)
    assert_identical(result, tx.update(grads, state))


def test_state_fields_by_name(params, grads):
    tx = optax.chain(osa.sparse_adam(0.1))
    _, state = tx.update(grads, tx.init(params))
    for name in ("count", "mu", "nu"):
        assert_identical(optax.tree.get(state, name), getattr(state[0], name))
    assert int(optax.tree.get(optax.tree.set(state, count=jnp.int32(7)), "count")) == 7


def test_inject_hyperparams(params, grads):
    """The numbers are arrays in the state; to change one does not compile again."""
    tx = optax.inject_hyperparams(osa.sparse_adam)(
        learning_rate=0.25, b1=0.5, b2=0.75, eps=2.0**-10, maximize=True
    )
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(params)
    assert set(state.hyperparams) >= {"learning_rate", "b1", "b2", "eps"}
    for rate, b1 in ((0.25, 0.5), (0.125, 0.0)):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        state.hyperparams["b1"] = jnp.float32(b1)
        plain = osa.sparse_adam(rate, b1, 0.75, 2.0**-10, maximize=True)
        expected, expected_state = plain.update(grads, state.inner_state)
        updates, state = update(grads, state)
        # All numbers here are exact in float32.
        results = (updates, state.inner_state), (expected, expected_state)
        chex.assert_trees_all_close(*results, rtol=TOLERANCE["float32"].numpy)


@pytest.mark.parametrize("nse", [0, 12])
@pytest.mark.parametrize("index_type", slow_but(["int8", "int32", "uint32"], "int8"))
@pytest.mark.parametrize("n_sparse", [1, 2])
def test_updates_of_a_coalesced_gradient_keep_its_structure(n_sparse, index_type, nse):
    values, indices = random_entries(np.random.default_rng(0), SHAPE, n_sparse, nse)
    grad = osa.coalesce(bcoo(values, indices.astype(index_type), SHAPE))
    tx = osa.sparse_adam(0.1)
    state = tx.init(jnp.ones(SHAPE))
    one = grad
    for _ in range(2):
        one, new = tx.update(one, state)
        assert jax.tree.structure(one) == jax.tree.structure(grad)
        assert [x.dtype for x in (one.data, one.indices)] == [
            x.dtype for x in (grad.data, grad.indices)
        ]
        assert_identical(one.indices, grad.indices)

    def skip(grad, state):
        return grad, state

    for take in (True, False):
        expected = tx.update(grad, state) if take else (grad, state)
        actual = jax.lax.cond(jnp.bool(take), tx.update, skip, grad, state)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        assert_identical(actual[0].indices, expected[0].indices)
        assert_close(actual[0].data, expected[0].data, TOLERANCE["float32"].numpy)
    assert int(new.count) == 1
