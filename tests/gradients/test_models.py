"""Row-sparse gradients of the embedding layers of four libraries, as they are."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa

from ..helpers.gradients import (
    ROUNDED,
    THROUGH_BFLOAT16,
    assert_row_sparse,
    assert_same,
    dense,
    is_bcoo,
)
from ..helpers.support import assert_close, slow_but, to_dense

# The libraries promote types and ranks as JAX does by default.
pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.fixture
def default_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


KEY = jax.random.key(0)
IDS = jnp.asarray([[0, 3, 15], [3, 7, 0]])


def mean_square(x):
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


# Each function returns a loss of `(params, ids)` and its parameters, for a table of
# `rows` rows of four.


def of_linen(model):
    variables = model.init(KEY, IDS)
    return lambda v, ids: mean_square(model.apply(v, ids)), variables


def linen(rows, embed=nn.Embed, **kwargs):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(3)(embed(rows, 4, **kwargs)(ids))

    return of_linen(Model())


def linen_scan(rows):
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, ids):
            carry = jnp.tanh(carry + nn.Embed(rows, 4)(ids))
            return carry, carry

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            scan = nn.scan(
                Cell, variable_broadcast="params", split_rngs={"params": False}
            )
            return scan()(jnp.zeros((3, 4)), ids)[1]

    return of_linen(Model())


def linen_tied(rows):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(rows, 4)
            return embed.attend(embed(ids))

    return of_linen(Model())


class NnxModel(nnx.Module):
    def __init__(self, rngs, rows=16, **kwargs):
        self.embed = nnx.Embed(rows, 4, rngs=rngs, **kwargs)
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, ids):
        return self.dense(self.embed(ids))


def nnx_split(rows, **kwargs):
    graph, state = nnx.split(NnxModel(nnx.Rngs(0), rows, **kwargs))
    return lambda s, ids: mean_square(nnx.merge(graph, s)(ids)), state


def nnx_module(rows):
    return lambda model, ids: mean_square(model(ids)), NnxModel(nnx.Rngs(0), rows)


def nnx_pure_dict(rows):
    graph, state = nnx.split(NnxModel(nnx.Rngs(0), rows))
    state = nnx.to_pure_dict(state)
    return lambda s, ids: mean_square(nnx.merge(graph, s)(ids)), state


class EqxModel(eqx.Module):
    embed: eqx.nn.Embedding
    dense: eqx.nn.Linear
    activation: object

    def __init__(self, rows=16):
        self.embed = eqx.nn.Embedding(rows, 4, key=KEY)
        self.dense = eqx.nn.Linear(4, 3, key=KEY)
        self.activation = jax.nn.tanh

    def __call__(self, id_):
        return self.activation(self.dense(self.embed(id_)))


def equinox(rows, call=lambda model, ids: jax.vmap(jax.vmap(model))(ids)):
    params, static = eqx.partition(EqxModel(rows), eqx.is_inexact_array)
    return lambda p, ids: mean_square(call(eqx.combine(p, static), ids)), params


def haiku(rows, wrap=lambda f: f, **kwargs):
    def model(ids):
        return hk.Linear(3)(wrap(hk.Embed(rows, 4, **kwargs))(ids))

    model = hk.without_apply_rng(hk.transform(model))
    return lambda p, ids: mean_square(model.apply(p, ids)), model.init(KEY, IDS)


# (what makes the loss and its parameters, entries of the table or `None` where its
# gradient is dense)
MODELS = {
    "linen": (linen, 6),
    "linen, bfloat16": (lambda rows: linen(rows, dtype=jnp.bfloat16), 6),
    "linen, remat": (lambda rows: linen(rows, nn.remat(nn.Embed)), 6),
    "linen, partitioned": (
        lambda rows: linen(
            rows,
            embedding_init=nn.with_partitioning(nn.initializers.normal(), ("v", "d")),
        ),
        6,
    ),
    "linen, scan": (linen_scan, 6),
    "linen, tied": (linen_tied, None),
    "nnx, split and merge": (nnx_split, 6),
    "nnx, bfloat16": (lambda rows: nnx_split(rows, dtype=jnp.bfloat16), 6),
    "nnx, module as it is": (nnx_module, 6),
    "nnx, pure dict": (nnx_pure_dict, 6),
    "equinox, two vmaps": (equinox, 6),
    "equinox, one vmap": (
        lambda rows: equinox(rows, lambda m, ids: jax.vmap(m)(ids[0])),
        3,
    ),
    "equinox, filter_vmap": (
        lambda rows: equinox(rows, lambda m, ids: eqx.filter_vmap(m)(ids[0])),
        3,
    ),
    "equinox, filter_checkpoint": (
        lambda rows: equinox(
            rows, lambda m, ids: jax.vmap(eqx.filter_checkpoint(m))(ids[0])
        ),
        3,
    ),
    "haiku": (haiku, 6),
    "haiku, remat": (lambda rows: haiku(rows, hk.remat), 6),
    "haiku, one hot": (lambda rows: haiku(rows, lookup_style="ONE_HOT"), None),
}


CORE = ("linen, scan", "linen, tied", "nnx, split and merge", "haiku")


@pytest.mark.parametrize("name", slow_but(MODELS, *CORE, "equinox, filter_vmap"))
def test_same_as_jax(name):
    make, nse = MODELS[name]
    loss, params = make(16)
    ulps = THROUGH_BFLOAT16 if "bfloat16" in name else ROUNDED
    expected_value, expected = jax.jit(jax.value_and_grad(loss))(params, IDS)
    value, grads = jax.jit(osa.value_and_grad(loss))(params, IDS)
    assert_same(value, expected_value, ulps, "value")
    leaves = jax.tree.leaves(grads, is_leaf=is_bcoo)
    assert jax.tree.structure(dense(grads)) == jax.tree.structure(expected)
    for leaf, like in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert_same(leaf, like, ulps)
        if nse is not None and like.shape == (16, 4):
            assert_row_sparse(leaf, like.shape, like.dtype, nse)
        else:
            assert isinstance(leaf, jax.Array), f"{leaf} is not dense"
    assert sum(map(is_bcoo, leaves)) == (nse is not None)


def test_table_of_one_row_is_broadcast():
    """`nn.Embed` looks nothing up when it has one row: a dense gradient, as JAX's."""
    model = nn.Embed(1, 4)
    variables = model.init(KEY, 0 * IDS)
    grads = osa.grad(lambda v: mean_square(model.apply(v, 0 * IDS)))(variables)
    assert grads["params"]["embedding"].shape == (1, 4)
    assert not is_bcoo(grads["params"]["embedding"])


@pytest.mark.slow
def test_linen_batch_statistics():
    """`aux` carries what `apply` makes mutable; dropout gets a key for each step."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            rows = nn.Embed(16, 4, name="embed")(ids)
            rows = nn.Dropout(0.5, deterministic=False)(rows)
            return nn.BatchNorm(use_running_average=False)(rows)

    class State(TrainState):
        batch_stats: object

    def train(grad, tx):
        model = Model()
        variables = model.init({"params": KEY, "dropout": KEY}, IDS)
        state = State.create(apply_fn=model.apply, tx=tx, **variables)

        @jax.jit(donate_argnums=0)
        def step(state, ids, key):
            def loss(params):
                variables = {"params": params, "batch_stats": state.batch_stats}
                out, changed = state.apply_fn(
                    variables, ids, rngs={"dropout": key}, mutable=["batch_stats"]
                )
                return mean_square(out - 1), changed["batch_stats"]

            grads, batch_stats = grad(loss, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads, batch_stats=batch_stats)

        for key in jax.random.split(KEY, 3):
            state = step(state, IDS, key)
        return state.params, state.batch_stats

    # Rows that rest stay where they are in plain gradient descent.
    expected = train(jax.grad, optax.sgd(0.1))
    actual = train(osa.grad, osa.lazy(optax.sgd(0.1)))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_same(a, b, ROUNDED)


def pointer_of(params):
    return params.embed.weight.unsafe_buffer_pointer()


def test_equinox_training_step():
    params, static = eqx.partition(EqxModel(), eqx.is_inexact_array)
    optimizer = osa.sparse_adam(0.1)

    @eqx.filter_jit(donate="all")
    def step(params, state, ids):
        def loss(params):
            return mean_square(jax.vmap(jax.vmap(eqx.combine(params, static)))(ids))

        updates, state = optimizer.update(osa.grad(loss)(params), state, params)
        return osa.apply_updates(params, updates), state

    before, pointer = np.array(params.embed.weight), pointer_of(params)
    after, _ = step(params, optimizer.init(params), jnp.array(IDS))
    moved = np.any(before != np.asarray(after.embed.weight), axis=1)
    assert np.flatnonzero(moved).tolist() == [0, 3, 7, 15]
    assert pointer_of(after) == pointer


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_tree_that_can_be_called_is_a_tree(is_sparse):
    """`sparse=` of a model of Equinox, which has `__call__`."""
    loss, params = equinox(16)
    marks = jax.tree.map(lambda _: False, params)
    marks = eqx.tree_at(lambda m: m.embed.weight, marks, is_sparse)
    grads = osa.grad(loss, sparse=marks)(params, IDS)
    table = grads.embed.weight
    assert isinstance(table, BCOO) == is_sparse
    expected = jax.grad(loss)(params, IDS).embed.weight
    assert_close(to_dense(table) if is_sparse else table, expected, 1e-6)

    def predicate(path, leaf):
        return is_sparse and leaf.shape[0] == 16

    by_predicate = osa.grad(loss, sparse=predicate)(params, IDS)
    assert jax.tree.structure(by_predicate) == jax.tree.structure(grads)
