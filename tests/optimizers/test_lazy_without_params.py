"""`lazy` of transformations that do not read parameters: none, or others, are given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from tests.helpers.support import assert_identical, bcoo, slow_but

SHAPE = (10, 4)
INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "ema": optax.ema(0.9),
    "zero_nans": optax.zero_nans(),
    "per_row": osa.per_row(optax.scale_by_adam()),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
}
PARAMS = {
    "table": jnp.ones(SHAPE),
    "other": jnp.ones((6, 4)),
    "vector": jnp.ones(3),
    "scalar": jnp.ones(()),
}


@pytest.fixture(autouse=True)
def as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def gradient():
    return bcoo(np.ones((2, 4), np.float32), np.array([[3], [7]]), SHAPE)


@pytest.mark.parametrize("name", slow_but(INNER, "adam"))
@pytest.mark.parametrize("touched", slow_but([True, False], False))
def test_gradients_of_none_without_parameters(name, touched):
    """As with the parameters, of which only the shapes were wanted."""
    tx = osa.lazy(INNER[name])
    grads = {"table": gradient() if touched else None, "other": None}
    grads |= {"vector": None, "scalar": jnp.ones(())}
    state = tx.init(PARAMS)
    for update in tx.update, jax.jit(tx.update):
        expected = update(grads, state, PARAMS)
        assert_identical(update(grads, state), expected)


OTHERS = {
    "no parameters": None,
    "filtered": dict.fromkeys(["activation", "name", "steps", "table"]),
    "a whole module": {"activation": jnp.tanh, "name": "a", "steps": 3, "table": None},
    "arrays": {"activation": 0.5, "name": jnp.ones(2), "steps": np.arange(3)},
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("name", slow_but(INNER, "sgd", "adam"))
def test_parameters_that_the_state_does_not_know(name, others):
    """As optax does: a gradient of `None`, and a leaf that is not trained."""
    params = OTHERS[others] and OTHERS[others] | {"table": PARAMS["table"]}
    grads = dict.fromkeys(OTHERS["filtered"]) | {"table": gradient()}
    only = dict.fromkeys(grads) | {"table": PARAMS["table"]}
    tx = osa.lazy(INNER[name])
    updates, state = tx.update(grads, tx.init(only), params)
    alone, _ = tx.update(gradient(), tx.init(PARAMS["table"]), PARAMS["table"])
    assert_identical(updates["table"].todense(), alone.todense())
    assert [key for key in updates if updates[key] is not None] == ["table"]
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(only))


def test_a_state_that_does_not_tell():
    """Two leaves without a gradient, one of which the state does not know."""
    grads = {"table": gradient(), "other": None, "name": None}
    tx = osa.lazy(optax.adam(0.1))
    state = tx.init(PARAMS | {"name": None, "vector": None, "scalar": None})
    grads |= {"vector": None, "scalar": None}
    with pytest.raises(ValueError, match=r"Call update\(updates, state, params\)"):
        tx.update(grads, state)
