"""`exact_adam` outside of a program: few programs, with the bits of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.support import assert_identical, slow_but

IDS = np.array([3, 7, 3, 28])
MAKERS = slow_but([osa.exact_adam, osa.exact_adamw], osa.exact_adamw)


def loss(table, ids):
    return jnp.sum(table[ids] ** 2)


def read(table, state):
    return osa.evaluate(lambda table: table[IDS], read=state)(table)


def read_all(table, state):
    return osa.evaluate(lambda table: table + 0, read=state)(table)


def differentiate(table, state):
    return osa.value_and_grad(loss, read=state)(table, IDS)


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__)
def trained(request):
    """A table after two steps, and its state; made by programs of their own."""
    tx = request.param(0.1)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(30, 5)), "float32")
    state, step = tx.init(table), osa.make_train_step(loss, tx)
    for k in range(2):
        table, state, _ = step(table, state, IDS + k)
    return tx, table, state


@pytest.mark.slow
def test_few_programs(compilations, trained):
    """Operation by operation they were 81, 38, 137 and 12: 5 s of compiling."""
    tx, table, state = trained

    def compiled(call, *args):
        compilations.clear()
        result = call(*args)
        count = len(compilations)
        compilations.clear()
        call(*args)
        assert not compilations
        return result, count

    _, of_read = compiled(read, table, state)
    (_, grad), of_gradient = compiled(differentiate, table, state)
    (_, new_state), of_update = compiled(tx.update, grad, state, table)
    _, of_flush = compiled(osa.flush, table, new_state)
    assert of_read <= 14
    assert of_gradient <= 16
    assert of_update <= 18
    assert of_flush <= 4


@pytest.mark.slow
def test_values_of_a_program(optimized, trained):
    """Stale rows are those of a program; XLA may fuse two programs differently.

    A multiply and an add are one operation where they are fused, which rounds once.
    """
    _, table, state = trained
    both = jax.jit(lambda *args: (read(*args), read_all(*args)))
    eager = read(table, state), read_all(table, state)
    for x, y in zip(eager, both(table, state), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(y), 4)


@pytest.mark.slow
def test_on_another_device(trained):
    """Where arrays were put by hand, and nothing else is."""
    tx, table, state = trained
    device = jax.local_devices()[-1]

    def step(table, state):
        _, grad = differentiate(table, state)
        updates, state = tx.update(grad, state, table)
        return osa.flush(osa.apply_updates(table, updates), state)

    found = step(*jax.device_put((table, state), device))
    assert {x.device for x in jax.tree.leaves(found)} == {device}
    assert_identical(found, step(table, state))


@pytest.mark.slow
def test_arrays_are_left_alone(trained):
    """Nothing is donated, and no program holds a table."""
    tx, table, state = trained
    large = [x for x in jax.live_arrays() if x.size >= table.size]
    (_, grad) = differentiate(table, state)
    tx.update(grad, state, table)
    read_all(table, state)
    osa.flush(table, state)
    assert not any(x.is_deleted() for x in jax.tree.leaves((table, state, grad)))
    assert len([x for x in jax.live_arrays() if x.size >= table.size]) == len(large)
