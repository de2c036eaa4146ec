"""Bags of ids under exact Adam: their gradients, too, know how they were made."""

import jax
import jax.numpy as jnp
import pytest

import optax_sparse_adam as osa

IDS = jnp.array([[3, 7], [7, -1]])


def loss(table):
    return jnp.sum(jnp.sin(osa.embedding_bag(table, IDS)))


@pytest.mark.parametrize("change", [lambda g: g, lambda g: 0.5 * g, osa.coalesce])
def test_without_read_it_raises(change):
    table, tx = jnp.ones((9, 4)), osa.exact_adam(0.1)
    state = tx.init(table)
    with pytest.raises(ValueError, match="read="):
        tx.update(change(jax.jit(osa.grad(loss))(table)), state, table)
    grad = change(jax.jit(osa.grad(loss, read=state))(table))
    update, _ = jax.jit(tx.update)(grad, state, table)
    assert jax.tree.leaves(update)
