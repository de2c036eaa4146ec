"""Tables in the memory of the host: what works, and what JAX does not do yet.

Two CPU devices stand for a host and an accelerator: this shows what moves between them,
not how fast.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa

from ..helpers.support import assert_identical, need_devices

pytestmark = pytest.mark.slow

ROWS, WIDTH = 1000, 8
TX = osa.sparse_adam(0.1)


def loss_of_rows(rows, w):
    return jnp.sum((rows.sum(axis=1) @ w) ** 2)


def apply(table, state, grad):
    update, state = TX.update(grad, state)
    return osa.apply_updates(table, update), state


def batch(step):
    rng = np.random.default_rng(step)
    return jnp.asarray(rng.integers(0, ROWS, (4, 3)).astype(np.int32))


def test_table_on_the_host_and_rows_on_the_accelerator():
    """The rows of the batch travel, nothing else, and the table stays in place."""
    need_devices(2)
    host, accelerator = jax.devices()[:2]
    lookup = jax.jit(lambda table, ids: table[ids])
    loss_and_grads = jax.jit(jax.value_and_grad(loss_of_rows, argnums=(0, 1)))
    update = jax.jit(apply, donate_argnums=(0, 1))
    start = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    table = jax.device_put(np.asarray(start), host)
    state = jax.device_put(TX.init(table), host)
    w = jax.device_put(jnp.ones(WIDTH), accelerator)
    moved, pointers = [], []

    def move(x, device):
        moved.append(x.size)
        return jax.device_put(x, device)

    for step in range(3):
        ids = jax.device_put(batch(step), host)
        rows = move(lookup(table, ids), accelerator)
        _, (row_grads, w_grad) = loss_and_grads(rows, w)
        row_grads = move(row_grads, host).reshape(-1, WIDTH)
        grad = BCOO((row_grads, ids.reshape(-1, 1)), shape=table.shape)
        table, state = update(table, state, grad)
        pointers.append(table.unsafe_buffer_pointer())
    assert w_grad.devices() == rows.devices() == {accelerator}
    assert {x.device for x in jax.tree.leaves((table, state))} == {host}
    assert set(moved) == {4 * 3 * WIDTH}
    assert pointers[1:] == pointers[:1] * 2

    # The same on one device, with the gradient that value_and_grad finds.
    @jax.jit
    def step_on_one(table, state, ids, w):
        grad = osa.grad(lambda table: loss_of_rows(table[ids], w))(table)
        return apply(table, state, grad)

    expected = start, TX.init(start)
    for step in range(3):
        expected = step_on_one(*expected, batch(step), jnp.ones(WIDTH))
    assert_identical((table, state), expected)
