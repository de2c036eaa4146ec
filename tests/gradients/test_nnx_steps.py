"""Training steps of Flax NNX with row-sparse gradients: numbers, memory, `update`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx
from optax_sparse_adam.native import _calls

from ..helpers.native import needs_compiler
from ..helpers.nnx import IDS, Model, mean_square, model
from ..helpers.support import compile_for_users, slow_but

JITTED = nnx.jit(donate_argnums=(0, 1))


@pytest.fixture(autouse=True)
def default_promotion(strict):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def batches(count, rows=16):
    ids = np.random.default_rng(0).integers(rows, size=(count, 32, 3))
    return jnp.asarray(ids, jnp.int32), jnp.asarray(np.sin(ids).mean(axis=2))


def training_step(lib, model, optimizer, ids, labels):
    def loss(model):
        return jnp.mean((model(ids)[:, 0] - labels) ** 2)

    value, grads = lib.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def evaluation_loss(model, ids, labels):
    view = nnx.view(model, deterministic=True, use_running_average=True)
    return jnp.mean((view(ids)[:, 0] - labels) ** 2)


def nnx_jit(lib, model, optimizer, ids, labels, **kwargs):
    jit = nnx.jit(donate_argnums=(0, 1), **kwargs)
    step = jit(functools.partial(training_step, lib))
    for batch in zip(ids, labels, strict=True):
        step(model, optimizer, *batch)
    return model


def nnx_scan(lib, model, optimizer, ids, labels):
    @nnx.jit(donate_argnums=(0, 1))
    def steps(model, optimizer, ids, labels):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0))
        def scan(carry, ids, labels):
            return carry, training_step(lib, *carry, ids, labels)

        scan((model, optimizer), ids, labels)

    steps(model, optimizer, ids, labels)
    return model


def jax_jit(lib, model, optimizer, ids, labels):
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids, labels):
        model, optimizer = nnx.merge(graph, state)
        training_step(lib, model, optimizer, ids, labels)
        return nnx.state((model, optimizer))

    for batch in zip(ids, labels, strict=True):
        state = step(state, *batch)
    return nnx.merge(graph, state)[0]


LOOPS = {
    "nnx.jit": nnx_jit,
    "without graph updates": functools.partial(nnx_jit, graph_updates=False),
    "nnx.scan": nnx_scan,
    "jax.jit": jax_jit,
}


@pytest.fixture(scope="module")
def densely_trained():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        new = model()
        optimizer = nnx.Optimizer(new, optax.sgd(0.1), wrt=nnx.Param)
        return nnx_jit(nnx, new, optimizer, *batches(200))


@pytest.mark.slow
@pytest.mark.parametrize("loop", slow_but(LOOPS, "nnx.jit"))
def test_trained_as_with_dense_gradients(loop, densely_trained):
    """200 steps: the same statistics, keys and evaluation loss.

    Gradient descent without momentum moves no row that rests, so that the dense run
    is the same run. Sums of duplicate rows in another order differ by 1e-7 of their
    size a step, and training does not let that grow.
    """
    new, held_out = model(), [x[0] for x in batches(1)]
    start = evaluation_loss(new, *held_out)
    optimizer = nnx.Optimizer(new, osa.lazy(optax.sgd(0.1)), wrt=nnx.Param)
    new = LOOPS[loop](flax_nnx, new, optimizer, *batches(200))
    assert int(new.dropout.rngs.count[...]) == 200
    states = (nnx.state(x, nnx.Not(nnx.RngKey)) for x in (new, densely_trained))
    chex.assert_trees_all_close(*map(jax.tree.leaves, states), rtol=1e-5, atol=1e-6)
    loss = evaluation_loss(new, *held_out)
    expected = evaluation_loss(densely_trained, *held_out)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert loss < start / 2


def test_step_in_place():
    """Nothing of the table's size beside the table, which stays where it is."""
    rows = 200_000
    new = Model(nnx.Rngs(0), rows, 4)
    optimizer = nnx.Optimizer(new, osa.sparse_adam(0.1), wrt=nnx.Param)
    step = JITTED(functools.partial(training_step, flax_nnx))
    batch = IDS, jnp.ones(2)
    lowered = step.lower(new, optimizer, *batch)
    memory = compile_for_users(lowered).memory_analysis()
    assert memory.temp_size_in_bytes < rows / 8, memory.temp_size_in_bytes
    pointer = new.embed.embedding[...].unsafe_buffer_pointer()
    step(new, optimizer, *batch)
    assert new.embed.embedding[...].unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("wrap", slow_but([lambda f: f, JITTED], JITTED))
def test_update(wrap):
    """In place of `optimizer.update`: `nnx.Optimizer` on dense gradients agrees."""

    def train(tx, grad, update):
        new = model()
        optimizer = nnx.Optimizer(new, tx, wrt=nnx.Param)
        gradient = nnx.jit(grad(mean_square))
        for ids in batches(3)[0]:
            update(optimizer, new, gradient(new, ids))
        states = nnx.state((optimizer, new), nnx.Not(nnx.RngKey))
        return jax.tree.leaves(states)

    expected = train(optax.sgd(0.1), nnx.grad, nnx.jit(nnx.Optimizer.update))
    actual = train(osa.lazy(optax.sgd(0.1)), flax_nnx.grad, wrap(flax_nnx.update))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_kernel_adds_updates(cache, monkeypatch):
    monkeypatch.setattr(_calls, "available", lambda: True)
    jax.clear_caches()
    embed = nnx.Embed(50, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(embed, osa.sparse_adam(0.1), wrt=nnx.Param)

    def step(embed, optimizer):
        grads = flax_nnx.grad(lambda embed: jnp.sum(embed(jnp.arange(3))))(embed)
        flax_nnx.update(optimizer, embed, grads)

    assert "adds = true" in nnx.jit(step).lower(embed, optimizer).as_text()


@pytest.mark.slow
def test_update_of_a_partition():
    """Labels are those of the pure state; `exact_adam` reads the optimiser."""
    new = model()
    params = nnx.as_pure(nnx.state(new, nnx.Param))
    labels = jax.tree.map(lambda _: "rest", params)
    labels["embed"]["embedding"] = "tables"
    parts = {"tables": osa.exact_adam(0.1), "rest": optax.adam(0.1)}
    optimizer = nnx.Optimizer(new, optax.partition(parts, labels), wrt=nnx.Param)
    dense = model()
    reference = nnx.Optimizer(dense, optax.adam(0.1), wrt=nnx.Param)

    def is_table(path, _):  # all else is dense, also what the loss does not use
        return "embedding" in jax.tree_util.keystr(path)

    def loss(model, ids):
        return jnp.mean(jnp.sin(model.out(model.embed(ids))))

    for ids in jnp.array([[[0, 3, 15], [3, 7, 0]], [[1, 2, 15], [2, 4, 4]]]):
        grads = flax_nnx.grad(loss, sparse=is_table, read=optimizer)(new, ids)
        flax_nnx.update(optimizer, new, grads)
        reference.update(dense, nnx.grad(loss)(dense, ids))
    flax_nnx.flush(new, optimizer)
    states = (jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (new, dense))
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [osa.rowwise_adam(0.1), osa.exact_adam(0.1)])
def test_read_takes_every_optimizer(tx):
    """One program serves them all; where no row is stale, nothing happens."""
    new = nnx.Embed(6, 2, rngs=nnx.Rngs(0))
    optimizer, ids = nnx.Optimizer(new, tx, wrt=nnx.Param), jnp.array([1, 4, 1])

    def loss(embed):
        return jnp.sum(embed(ids) ** 2)

    for read in (optimizer, optimizer.opt_state):
        value, grads = flax_nnx.value_and_grad(loss, read=read)(new)
        table = osa.flush(new.embedding[...], _pure(optimizer))[0]
        assert value == jnp.sum(table[ids] ** 2)
        flax_nnx.update(optimizer, new, grads)
    before = new.embedding[...]
    flax_nnx.flush(new, optimizer)
    is_exact = isinstance(_pure(optimizer), osa.ExactAdamState)
    assert np.array_equal(new.embedding[...], before) == (not is_exact)


def _pure(optimizer):
    return nnx.as_pure(optimizer.opt_state)
