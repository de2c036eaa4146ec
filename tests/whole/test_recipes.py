"""What the documentation says in a sentence, against dense gradients."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa

from ..helpers.support import TOLERANCE, assert_close, assert_identical, to_dense

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_optax_expects")]

SHAPE = (9, 4)
TOL = TOLERANCE["float32"].numpy


@pytest.fixture
def table():
    values = np.random.default_rng(0).normal(size=SHAPE)
    return jnp.asarray(values, jnp.float32)


def loss(params, ids):
    return jnp.sum(jnp.sin(params["table"][ids]) @ params["w"])


def test_one_norm_around_the_parts(table):
    """Snapshot and clipping see the sums of all rows and the dense parameters."""
    params, ids = {"table": table, "w": jnp.ones(4)}, jnp.array([3, 7, 3, 3])
    labels = {"table": "rows", "w": "dense"}

    def chain(rows):
        return optax.chain(
            optax.snapshot("norm", optax.tree.norm),
            optax.clip_by_global_norm(1.0),
            optax.partition({"rows": rows, "dense": optax.adamw(0.1)}, labels),
        )

    tx = osa.lazy(chain(osa.lazy(optax.sgd(0.1))))
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(
        jax.jit(osa.grad(loss))(params, ids), state, params
    )
    actual = osa.apply_updates(params, updates)
    reference = chain(optax.sgd(0.1))

    @jax.jit
    def dense_step(params, ids):
        dense = jax.grad(loss)(params, ids)
        updates, _ = reference.update(dense, reference.init(params), params)
        return optax.apply_updates(params, updates), optax.tree.norm(dense)

    expected, norm = dense_step(params, ids)
    assert norm > 1
    assert_close(optax.tree.get(state, "norm"), norm, TOL)
    for name in params:
        assert_close(actual[name], expected[name], TOL, magnitude=1.0)


def test_sums_and_multiples_of_whole_gradients(table):
    params = {"table": table, "w": jnp.ones(4)}
    batches = jnp.array([3, 7, 3]), jnp.array([7, 0])
    a, b = map(partial(jax.jit(osa.grad(loss)), params), batches)
    b["table"] = osa.coalesce(b["table"])  # padding, too

    def mean(*leaves):
        return 0.5 * operator.add(*leaves)

    tree = jax.tree.map(mean, a, b, is_leaf=lambda x: isinstance(x, BCOO))
    dense = jax.tree.map(mean, *map(partial(jax.jit(jax.grad(loss)), params), batches))
    assert_close(to_dense(tree["table"]), dense["table"], TOL, magnitude=1.0)
    assert_close(tree["w"], dense["w"], TOL, magnitude=1.0)


def test_padding_ids_touch_nothing(table):
    ids = jnp.array([3, -1, 9, 0, 3])
    ids = jnp.where(ids == 0, len(table), ids)

    def loss(table):
        rows = table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jnp.sum(jnp.cos(rows))

    value, grad = osa.value_and_grad(loss)(table)
    cosines = np.cos(np.asarray(table)[3].astype(np.float64))
    assert_close(value, 2 * cosines.sum() + 3 * SHAPE[1], TOL, magnitude=20.0)
    touched = osa.coalesce(grad).indices.ravel()
    assert [int(i) for i in touched if i < len(table)] == [3]


OPTIMIZERS = {
    "sparse_adam": osa.sparse_adam,
    "rowwise_adam": osa.rowwise_adam,
    "rowwise_adagrad": osa.rowwise_adagrad,
    "sparse_adafactor": osa.sparse_adafactor,
    "lazy": lambda rate: osa.lazy(optax.adamw(rate)),
    "per_row": lambda rate: osa.lazy(osa.per_row(optax.adam(rate))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_that_grows(name, table):
    """The old rows go on as if nothing had happened, the new ones start."""
    tx = OPTIMIZERS[name](0.1)

    @jax.jit
    def step(table, state, ids):
        grad = osa.grad(lambda table: jnp.sum(jnp.sin(table[ids])))(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    table, state = step(table, tx.init(table), jnp.array([3, 7, 3]))
    grown = jnp.concatenate([table, jnp.ones((2, 4))])
    new_state = jax.tree.map(
        lambda new, old: old if new.shape == old.shape else new.at[: len(old)].set(old),
        tx.init(grown),
        state,
    )
    with pytest.raises(ValueError, match="shape"):
        step(grown, state, jnp.array([3, 8]))
    expected, _ = step(table, state, jnp.array([3, 8]))
    actual, new_state = step(grown, new_state, jnp.array([3, 8]))
    assert_identical(actual[: len(table)], expected)
    actual, _ = step(actual, new_state, jnp.array([10]))
    assert_identical(actual[:-1], jnp.concatenate([expected, jnp.ones((1, 4))]))
    assert jnp.all(actual[-1] < 1)


def split(evaluate, model):
    graph, state = nnx.split(model)
    return jax.jit(lambda s, ids: evaluate(nnx.merge(graph, s), ids)), state


# (what compiles an evaluation, and its first argument; whether it copies the table)
EVALUATIONS = {
    "nnx.jit": (lambda f, model: (nnx.jit(f), model), True),
    "graph_updates=False": (
        lambda f, model: (nnx.jit(f, graph_updates=False), model),
        False,
    ),
    "jax.jit": (lambda f, model: (jax.jit(f), model), False),
    "split": (split, False),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_of_an_nnx_module(name):
    """Plain `nnx.jit` returns all variables of the module, and copies them for that."""
    compile_, copies = EVALUATIONS[name]
    model, ids = nnx.Embed(20_000, 4, rngs=nnx.Rngs(0)), jnp.array([3, 7, 3])

    def evaluate(model, ids):
        return jnp.sum(model(ids))

    compiled, argument = compile_(evaluate, model)
    value = compiled(argument, ids)
    assert_close(value, evaluate(model, ids), TOL, magnitude=1.0)
    memory = compiled.lower(argument, ids).compile().memory_analysis()
    table = model.embedding[...].nbytes
    assert (memory.output_size_in_bytes >= table) == copies
    assert memory.temp_size_in_bytes < table / 10
