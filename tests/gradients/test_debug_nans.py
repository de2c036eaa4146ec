"""`jax.debug_nans` and `jax.debug_infs` raise what they raise under `jax.grad`."""

import jax
import jax.numpy as jnp
import pytest

import optax_sparse_adam as osa

IDS = jnp.array([3, 7])
LOSSES = {
    "debug_nans": jax.jit(lambda rows: jnp.sum(jnp.log(rows - 1))),
    "debug_infs": jax.jit(lambda rows: jnp.sum(1 / rows)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_in_a_jit(name):
    def loss(table):
        return LOSSES[name](table[IDS])

    for grad in (jax.grad(loss), osa.grad(loss)):
        with getattr(jax, name)(True), pytest.raises(FloatingPointError):
            grad(jnp.zeros((10, 4)))
    assert osa.grad(loss)(jnp.ones((10, 4)) * 2).nse == 2
