"""Derivatives of a whole training by exact_adam are those of one by dense Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

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


LOSSES = {"lookup": by_lookup, "bags": by_bags}


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", slow_but([False, True], True))
@pytest.mark.parametrize("name", slow_but(LOSSES, "lookup"))
def test_derivatives_of_a_training(name, is_wide):
    """By a number in the loss, by the first table and by a dense parameter.

    As far as float32 goes, and in float64, where the kernel does not read.
    """
    loss = LOSSES[name]
    with jax.enable_x64(is_wide):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)))
        params = {"table": table, "w": jnp.ones(4, table.dtype)}

        def derivatives(make, is_exact):
            both = jax.value_and_grad(trained, argnums=(1, 2))
            return jax.jit(both, static_argnums=(0, 3, 4))(
                loss, params, jnp.asarray(1.3, table.dtype), make, is_exact
            )

        known = derivatives(optax.adam, False)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(
                x, y, rtol=1e-9 if is_wide else 1e-4, atol=1e-9 if is_wide else 1e-4
            ),
            derivatives(osa.exact_adam, True),
            known,
        )


@pytest.mark.slow
def test_the_forward_mode():
    """Rows that had no gradient before are at a root of zero."""
    with jax.enable_x64():
        table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)))
        params = {"table": table, "w": jnp.ones(4, table.dtype)}

        def of(a, make, is_exact):
            return trained(by_lookup, params, a, make, is_exact)

        # optax.adam itself is NaN there, backward it is not.
        known = jax.jit(jax.grad(of), static_argnums=(1, 2))(1.3, optax.adam, False)
        forward = jax.jit(
            lambda a: jax.jvp(lambda a: of(a, osa.exact_adam, True), (a,), (1.0,))[1]
        )(1.3)
        np.testing.assert_allclose(forward, known, rtol=1e-9)


def test_decay_is_refused():
    """What is stored decays on the way to a value; either may be meant."""
    params = {"table": jnp.ones((10, 4)), "w": jnp.ones(4)}

    def of(a):
        return trained(by_lookup, params, a, osa.exact_adamw, True)

    with pytest.raises(NotImplementedError, match="exact_adamw trains, and its state"):
        jax.eval_shape(jax.grad(of), 1.3)


@pytest.mark.slow
def test_inside_of_a_function_with_a_rule_of_its_own():
    """There tangents of zero are arrays, of a state that nobody differentiates."""
    params = {"table": jnp.arange(40.0).reshape(10, 4) / 10, "w": jnp.ones(4)}
    tx = osa.exact_adam(0.1)
    state, step = tx.init(params), osa.make_train_step(by_lookup, tx)
    for ids in BATCHES:
        params, state, _ = step(params, state, ids, 1.3)
    now, _ = osa.flush(jax.tree.map(jnp.copy, params), state)

    def solved(c):
        """`x + 0.3 tanh x = c()`"""
        return lax.custom_root(
            lambda x: x + 0.3 * jnp.tanh(x) - c(),
            jnp.zeros(()),
            lambda f, x: lax.fori_loop(0, 40, lambda _, x: x - f(x) / 1.2, x),
            lambda g, y: y / g(jnp.ones(())),
        )

    def read(params):
        return jnp.sum(jnp.sin(params["table"][jnp.arange(6)]))

    def exact(params):
        return solved(lambda: osa.evaluate(read, read=state)(params))

    def dense(params):
        return solved(lambda: read(params))

    def derivatives(of, params):
        return jax.grad(of)(params)["table"], jax.jvp(of, (params,), (now,))[1]

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
        jax.jit(derivatives, static_argnums=0)(exact, params),
        jax.jit(derivatives, static_argnums=0)(dense, now),
    )
