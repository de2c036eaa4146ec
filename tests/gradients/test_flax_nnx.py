"""`flax_nnx.value_and_grad` against `nnx.value_and_grad`, with all side effects."""

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

from ..helpers.gradients import assert_row_sparse, dense, is_bcoo
from ..helpers.native import needs_compiler
from ..helpers.support import (
    compile_for_users,
    slow_but,
)

IDS = jnp.array([[0, 3, 15], [3, 7, 0]])


@pytest.fixture(autouse=True)
def default_promotion(strict):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Model(nnx.Module):
    """A table, and one of each kind of state."""

    def __init__(self, rngs, rows=16, width=4):
        self.embed = nnx.Embed(rows, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.norm(self.dropout(self.embed(ids).mean(axis=1))))


def model(seed=0):
    return Model(nnx.Rngs(seed))


def tied():
    """The table of `again` is that of `embed`."""
    new = model()
    new.again = nnx.Embed(16, 4, rngs=nnx.Rngs(1))
    new.again.embedding = new.embed.embedding
    return new


def mean_square(model, ids):
    return jnp.mean(model(ids) ** 2)


def sum_of_two(a, b, ids):
    return mean_square(a, ids) + 2 * mean_square(b, ids)


def both_tables(model, ids):
    return mean_square(model, ids) * jnp.sum(model.again(ids[0]))


def additions(model, ids):
    model.sow(nnx.Intermediate, "ids", ids)
    model.extra = nnx.Variable(jnp.ones(2))
    model.itself = model
    model.name = "changed"
    return mean_square(model, ids)


def deletion(model, ids):
    value = mean_square(model, ids)
    del model.dropout
    return value


def overwritten(model, ids):
    model.out.bias[...] += 1
    return mean_square(model, ids)


def aux_of_all_kinds(model, ids):
    aux = {"model": model, "mean": model.norm.mean, "out": model(ids), "text": "x"}
    return mean_square(model, ids), aux


def inside(transform):
    def loss(model, ids):
        return jnp.mean(transform(lambda model, ids: model(ids))(model, ids) ** 2)

    return loss


def statistics(model, ids):
    return jnp.sum(model.embed(ids) * (model.norm.mean + model.norm.var))


DiffState = nnx.DiffState
# (function, keyword arguments, what makes its arguments, row-sparse gradients)
CASES = {
    "module": (mean_square, {}, lambda: (model(),), 1),
    "two modules": (sum_of_two, {"argnums": (1, 0)}, lambda: (model(), model(1)), 2),
    "second module": (sum_of_two, {"argnums": 1}, lambda: (model(), model(1)), 1),
    "one module twice": (sum_of_two, {"argnums": (0, 1)}, lambda: (model(),) * 2, 1),
    "shared keys": (
        sum_of_two,
        {"argnums": (0, 1)},
        lambda: tuple(map(Model, (nnx.Rngs(0),) * 2)),
        2,
    ),
    "tied tables": (both_tables, {}, lambda: (tied(),), 1),
    "dict of modules": (
        lambda models, ids: sum_of_two(*models.values(), ids),
        {},
        lambda: ({"a": model(), "b": model(1)},),
        2,
    ),
    "array, too": (
        lambda model, w, ids: mean_square(model, ids) * w,
        {"argnums": (0, 1)},
        lambda: (model(), jnp.float32(2)),
        1,
    ),
    "keys as argument": (
        lambda m, rngs, ids: jnp.sum(m.embed(ids) * rngs.normal((2, 3, 4))),
        {},
        lambda: (model(), nnx.Rngs(3)),
        1,
    ),
    "variable": (
        lambda table, ids: jnp.sum(table[ids] ** 2),
        {},
        lambda: (nnx.BatchStat(jnp.ones((16, 4))),),
        1,
    ),
    "state": (
        lambda state, ids: jnp.sum(state["embed"]["embedding"][ids] ** 2),
        {},
        lambda: (nnx.state(model(), nnx.Param),),
        1,
    ),
    "filter": (
        mean_square,
        {"argnums": DiffState(0, nnx.PathContains("embed"))},
        lambda: (model(),),
        1,
    ),
    "filter of statistics": (
        statistics,
        {"argnums": DiffState(0, (nnx.BatchStat, nnx.Param))},
        lambda: (model(),),
        1,
    ),
    "two filters": (
        sum_of_two,
        {"argnums": (DiffState(0, nnx.PathContains("out")), 1)},
        lambda: (model(), model(1)),
        1,
    ),
    "additions": (additions, {}, lambda: (model(),), 1),
    "deletion": (deletion, {}, lambda: (model(),), 1),
    "overwritten parameter": (overwritten, {}, lambda: (model(),), 1),
    "aux": (aux_of_all_kinds, {"has_aux": True}, lambda: (model(),), 1),
    "jit inside": (inside(nnx.jit), {}, lambda: (model(),), 1),
    "remat inside": (inside(nnx.remat), {}, lambda: (model(),), 1),
}


def assert_same(actual, expected):
    """Equal to 1e-6, keys and integers to the bit, and equal structures."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = map(jax.tree.leaves, (actual, expected))
    for a, b in zip(*leaves, strict=True):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jnp.inexact):
            # Sums over a batch are taken in other orders.
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("name", slow_but(CASES, *list(CASES)[::5]))
def test_same_as_nnx(name):
    """Value, gradients, `aux`, and all that the loss does to its arguments."""
    function, kwargs, make, tables = CASES[name]
    expected_args, args = make(), make()
    expected = nnx.value_and_grad(function, **kwargs)(*expected_args, IDS)
    actual = flax_nnx.value_and_grad(function, **kwargs)(*args, IDS)
    leaves = jax.tree.leaves(actual, is_leaf=is_bcoo)
    # What the loss does not use has a BCOO as well, with nothing stored.
    assert sum(is_bcoo(leaf) and leaf.nse > 0 for leaf in leaves) == tables
    # The graph holds what is static, and which objects are the same.
    graph, state = nnx.split((args, actual[0]))
    expected_graph, expected_state = nnx.split((expected_args, expected[0]))
    assert graph == expected_graph
    assert_same(state, expected_state)
    assert_same(dense(actual[1]), expected[1])


def test_identities_are_kept():
    new = model()
    variables = {path: x for path, x in nnx.iter_graph(new) if is_variable(x)}
    (_, aux), _ = flax_nnx.value_and_grad(aux_of_all_kinds, has_aux=True)(new, IDS)
    assert aux["model"] is new
    assert aux["mean"] is new.norm.mean
    for path, x in nnx.iter_graph(new):
        assert not is_variable(x) or x is variables[path]
    table = new.embed.embedding[...]
    flax_nnx.grad(mean_square)(new, IDS)
    assert new.embed.embedding[...] is table  # not an output of any program


def is_variable(x):
    return isinstance(x, nnx.Variable)


def test_sparse_names_leaves_of_the_gradient():
    def embed(path, leaf):
        return "embedding" in jax.tree_util.keystr(path)

    grads = flax_nnx.grad(mean_square, sparse=embed)(model(), IDS)
    assert_row_sparse(grads.embed.embedding[...], (16, 4), "float32", 6)
    grads = flax_nnx.grad(mean_square, sparse=False)(model(), IDS)
    assert not is_bcoo(grads.embed.embedding[...])
    with pytest.raises(ValueError, match=r"\['out'\]\['kernel'\]"):
        flax_nnx.grad(mean_square, sparse=lambda path, leaf: leaf.ndim == 2)(
            model(), IDS
        )


def test_module_as_keyword():
    value, grads = flax_nnx.value_and_grad(mean_square)(ids=IDS, model=model())
    expected = flax_nnx.value_and_grad(mean_square)(model(), IDS)
    assert_same((value, dense(grads)), dense(expected))


JITTED = nnx.jit(donate_argnums=(0, 1))
OUTSIDE = model()
# (function, keyword arguments, arguments, error, words)
REFUSED = {
    "argument missing": (
        mean_square,
        {"argnums": 2},
        (model(), IDS),
        TypeError,
        "got 2",
    ),
    "argument twice": (
        sum_of_two,
        {"argnums": (0, -3)},
        (model(), model(), IDS),
        ValueError,
        "0 is repeated",
    ),
    "integers": (mean_square, {"argnums": 1}, (model(), IDS), TypeError, "int32"),
    "no pair": (mean_square, {"has_aux": True}, (model(), IDS), TypeError, "pair"),
    "captured module": (
        lambda w, ids: mean_square(OUTSIDE, ids) * w,
        {},
        (1.0, IDS),
        Exception,
        "different trace level",
    ),
    "shared, one differentiated": (
        sum_of_two,
        {},
        (*(OUTSIDE,) * 2, IDS),
        ValueError,
        "aliasing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, kwargs, args, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        flax_nnx.value_and_grad(function, **kwargs)(*args)
    flax_nnx.value_and_grad(mean_square)(model(), IDS)  # leaves no context behind


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
