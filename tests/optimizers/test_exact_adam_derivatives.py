"""Derivatives of a whole training by exact_adam are those of one by dense Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

BATCHES = np.array([[1, 2, 3], [2, 5, 5], [1, 7, 2]], np.int32)


def by_lookup(params, ids, a):
    return jnp.sum(params["w"][None] * (jnp.sin(params["table"][ids.ravel()]) - a) ** 2)


def by_bags(params, ids, a):
    sums = osa.embedding_bag(params["table"], jnp.stack([ids, ids], 1), mode="sum")
    return jnp.sum(params["w"][None] * (jnp.sin(sums) - a) ** 2)


def trained(loss, params, a, make, is_exact):
    """What the rows of now are, of which some rest for a step."""
    tx = make(0.1, eps=1e-2)
    state = tx.init(params)
    for ids in BATCHES:
        if is_exact:
            grads = osa.grad(loss, read=state)(params, ids, a)
        else:
            grads = jax.grad(loss)(params, ids, a)
        updates, state = tx.update(grads, state, params)
        params = osa.apply_updates(params, updates)
    if not is_exact:
        return jnp.sum(params["table"][1:6] ** 2)
    return osa.evaluate(
        lambda params: jnp.sum(params["table"][jnp.arange(1, 6)] ** 2), read=state
    )(params)


CASES = {
    "lookup": (by_lookup, osa.exact_adam, optax.adam),
    "bags": (by_bags, osa.exact_adam, optax.adam),
    "lookup, decay": (by_lookup, osa.exact_adamw, optax.adamw),
    "bags, decay": (by_bags, osa.exact_adamw, optax.adamw),
}


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("name", slow_but(CASES, "lookup", "bags, decay"))
def test_derivatives_of_a_training(name, is_wide):
    """By a number in the loss, by the first table and by a dense parameter.

    As far as float32 goes, and in float64, where the kernel does not read.
    """
    loss, exact, dense = CASES[name]
    with jax.enable_x64(is_wide):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)))
        params = {"table": table, "w": jnp.ones(4, table.dtype)}

        def derivatives(make, is_exact):
            both = jax.value_and_grad(trained, argnums=(1, 2))
            return jax.jit(both, static_argnums=(0, 3, 4))(
                loss, params, jnp.asarray(1.3, table.dtype), make, is_exact
            )

        known = derivatives(dense, False)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(
                x, y, rtol=1e-9 if is_wide else 1e-4, atol=1e-9 if is_wide else 1e-4
            ),
            derivatives(exact, True),
            known,
        )


def test_a_derivative_by_parameters_alone_is_one_by_the_values():
    """Not by what is stored, which decays on the way to the value."""
    params = {"table": jnp.ones((10, 4)), "w": jnp.ones(4)}
    tx = osa.exact_adamw(0.1, weight_decay=0.3)
    state, step = tx.init(params), osa.make_train_step(by_lookup, tx)
    for ids in BATCHES:
        params, state, _ = step(params, state, ids, 1.3)

    def read(params):
        rows = osa.evaluate(lambda p: p["table"][jnp.arange(10)], read=state)(params)
        return jnp.sum(3 * rows)

    assert (jax.grad(read)(params)["table"] == 3).all()
