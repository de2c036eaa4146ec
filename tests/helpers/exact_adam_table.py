"""One table under exact_adam and under dense Adam, for many steps in one program."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa

ROWS, WIDTH = 8, 3


def start(rows=ROWS, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, WIDTH)))


def loss(table, ids):
    return jnp.sum(jnp.sin(table[ids] + ids[:, None]))


def runner(tx, is_exact):
    """Trains on some batches; returns table, state, and the loss before each step."""

    def step(carry, ids):
        table, state = carry
        fun = osa.value_and_grad(loss, read=state) if is_exact else dense
        value, grad = fun(table, ids)
        updates, state = tx.update(grad, state, table)
        return (osa.apply_updates(table, updates), state), value

    dense = jax.value_and_grad(loss)
    return jax.jit(lambda table, state, ids: jax.lax.scan(step, (table, state), ids))


def batches(steps, rows=ROWS, seed=1):
    """Some rows are stale for long, the last one always."""
    ids = np.random.default_rng(seed).zipf(1.5, (steps, 4)) % (rows - 1)
    return jnp.asarray(ids, "int32")
