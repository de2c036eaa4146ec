"""A small model under exact_adam, and the same under dense Adam."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_sparse_adam as osa

from .support import assert_close

ROWS, WIDTH = 30, 3
RATE = 0.05


def start(rows=ROWS):
    rng = np.random.default_rng(0)
    return {"table": jnp.asarray(rng.normal(size=(rows, WIDTH))), "w": jnp.ones(WIDTH)}


def loss(params, ids):
    return jnp.mean(jnp.sin(params["table"][ids] @ params["w"] + ids))


def batches(steps, seed=1):
    ids = np.random.default_rng(seed).zipf(1.5, (steps, 4)) % ROWS
    return jnp.asarray(ids, "int32")


def gradient(params, **kwargs):
    return jax.jit(osa.grad(loss, **kwargs))(params, batches(1)[0])


def exact_run(tx, params, state, ids):
    """Parameters and state after these batches, and the losses."""
    step = osa.make_train_step(loss, tx)
    values = []
    params, state = jax.tree.map(jnp.copy, (params, state))
    for batch in ids:
        params, state, value = step(params, state, batch)
        values.append(value)
    return params, state, jnp.stack(values)


def trained(tx):
    params, state, _ = exact_run(tx, start(), tx.init(start()), batches(20))
    return params, state


@functools.cache
def dense_step(tx):
    @jax.jit
    def step(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def dense_run(tx, params, state, ids):
    values = []
    for batch in ids:
        params, state, value = dense_step(tx)(params, state, batch)
        values.append(value)
    return params, state, jnp.stack(values)


def assert_trees(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-11, magnitude=1.0)
