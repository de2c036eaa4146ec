"""`flax_nnx.evaluate`: modules under `exact_adam`, at the values of dense Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.support import assert_close, assert_identical, slow_but

ROWS, WIDTH, STEPS = 40, 4, 30


class Model(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(ROWS, WIDTH, param_dtype="float64", rngs=nnx.Rngs(0))
        self.out = nnx.Linear(WIDTH, 2, param_dtype="float64", rngs=nnx.Rngs(1))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, ids):
        self.calls[...] += 1
        return self.out(jnp.tanh(self.embed(ids)))


def loss(model, ids):
    return jnp.mean((model(ids) - 1) ** 2)


def batch(step):
    ids = np.random.default_rng(step).zipf(1.5, 5) % ROWS
    return jnp.asarray(ids, jnp.int32)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def trainer(tx, gradient):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, ids):
        value, grads = gradient(optimizer)(model, ids)
        flax_nnx.update(optimizer, model, grads)
        return value

    return model, optimizer, step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jit", "remat"])
def test_variables_that_a_program_inside_returns(name):
    """By default Flax returns all of them, and sets them: tables are as they were."""
    call = getattr(nnx, name)(Model.__call__)

    def inside(model, ids):
        return jnp.mean((call(model, ids) - 1) ** 2)

    own = osa.exact_adam(0.05)
    exact = trainer(own, lambda o: flax_nnx.value_and_grad(inside, read=o))
    dense = trainer(optax.adam(0.05), lambda _: nnx.value_and_grad(loss))
    for number in range(6):
        values = [
            step(model, optimizer, batch(number))
            for model, optimizer, step in (exact, dense)
        ]
        assert_close(*values, 1e-10)
    (model, optimizer, _), everything = exact, jnp.arange(ROWS)
    stored = jnp.copy(model.embed.embedding[...])

    @nnx.jit
    def now(model, optimizer, ids):
        return flax_nnx.evaluate(inside, read=optimizer)(model, ids)

    value = now(model, optimizer, everything)
    assert_close(value, loss(dense[0], everything), 1e-10)
    assert_identical(model.embed.embedding[...], stored)
    assert int(model.calls[...]) == 7


@pytest.mark.parametrize("name", slow_but(["adam", "adamw"], "adamw"))
def test_as_dense_adam_without_a_flush(name):
    """Thirty steps, evaluated at all rows after each; nothing is written."""
    own = getattr(osa, f"exact_{name}")(0.05)
    exact = trainer(own, lambda o: flax_nnx.value_and_grad(loss, read=o))
    dense = trainer(getattr(optax, name)(0.05), lambda _: nnx.value_and_grad(loss))

    @nnx.jit(graph_updates=False)
    def now(model, optimizer, ids):
        return flax_nnx.evaluate(loss, read=optimizer)(model, ids)

    everything, stale = jnp.arange(ROWS), []
    for number in range(STEPS):
        for model, optimizer, step in (exact, dense):
            step(model, optimizer, batch(number))
        before = nnx.to_pure_dict(nnx.state(exact[0], nnx.Param))
        value = now(*exact[:2], everything)
        expected = loss(dense[0], everything)
        assert_close(value, expected, 1e-10)
        after = nnx.to_pure_dict(nnx.state(exact[0], nnx.Param))
        assert_identical(after, before, "parameters")
        stale.append(abs(loss(exact[0], everything) - expected))
    assert max(stale) > 1e-3  # what it would be without


@pytest.mark.slow
def test_what_the_function_does_to_a_module():
    """It happens to it, as under `nnx`; results may be any tree."""
    model, optimizer, step = trainer(
        osa.exact_adam(0.1), lambda o: flax_nnx.value_and_grad(loss, read=o)
    )
    step(model, optimizer, batch(0))
    count = int(model.calls[...])

    @flax_nnx.evaluate(read=optimizer)
    def both(model, ids, scale=1.0):
        return {"out": scale * model(ids), "ids": ids}

    ids = batch(1)
    found = both(model, ids, scale=2.0)
    assert int(model.calls[...]) == count + 1
    flax_nnx.flush(model, optimizer)
    assert_close(found["out"], 2 * model(ids), 1e-12)
    assert found["ids"] is not None
    rest = flax_nnx.evaluate(loss, read=optimizer.opt_state)(model, ids)
    assert_close(rest, loss(model, ids), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [True, False])
def test_in_every_mode(graph):
    model, optimizer, step = trainer(
        osa.exact_adam(0.1), lambda o: flax_nnx.value_and_grad(loss, read=o)
    )
    step(model, optimizer, batch(0))
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(False):
        run = nnx.jit(lambda m, o: flax_nnx.evaluate(loss, read=o)(m, batch(1)))
        values = (
            run(model, optimizer),
            flax_nnx.evaluate(loss, read=optimizer)(model, batch(1)),
        )
    flax_nnx.flush(model, optimizer)
    for value in values:
        assert_close(value, loss(model, batch(1)), 1e-12)


def of_now(model, optimizer):
    """A copy of the model, after `flush` of it and its optimiser."""
    copies = nnx.clone((model, optimizer))
    flax_nnx.flush(*copies)
    return nnx.to_pure_dict(nnx.state(copies[0], nnx.Param))


RESULTS = {
    "array": lambda embed: embed.embedding[...],
    "new variable": lambda embed: nnx.Param(embed.embedding[...]),
    "program": lambda embed: jax.jit(lambda x: x)(embed.embedding[...]),
    "variable": lambda embed: embed.embedding,
    "module": lambda embed: embed,
    "state": lambda embed: nnx.state(embed, nnx.Param),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_a_table_that_is_a_result(name):
    """It is brought up to date, as by any use of all its rows; what is stored stays."""
    model, optimizer, step = trainer(
        osa.exact_adam(0.1), lambda o: flax_nnx.value_and_grad(loss, read=o)
    )
    for number in range(4):
        step(model, optimizer, batch(number))
    function, now = RESULTS[name], of_now(model, optimizer)["embed"]["embedding"]
    before = jnp.copy(model.embed.embedding[...])
    assert np.abs(before - now).max() > 1e-3

    def evaluated(model, optimizer):
        run = flax_nnx.evaluate(lambda m: function(m.embed), read=optimizer)
        return jax.tree.leaves(run(model))

    for run in (evaluated, nnx.jit(evaluated, graph_updates=False)):
        assert_close(*run(model, optimizer), now, 1e-12)
    assert_identical(model.embed.embedding[...], before)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RESULTS][:3])
@pytest.mark.parametrize("updates", [True, False])
def test_a_table_in_aux(name, updates):
    """Likewise; but a variable of an argument is that variable, as it is stored."""
    embed = nnx.Embed(ROWS, WIDTH, param_dtype="float64", rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(embed, osa.exact_adam(0.1), wrt=nnx.Param)

    def with_aux(embed, ids):
        aux = {"table": RESULTS[name](embed), "name": "table"}
        if updates:
            aux["variable"] = embed.embedding
        return jnp.mean((embed(ids) - 1) ** 2), aux

    options = {"has_aux": True, "read": optimizer, "graph_updates": updates}
    for number in range(3):
        now, before = of_now(embed, optimizer)["embedding"], embed.embedding[...]
        grads, aux = flax_nnx.grad(with_aux, **options)(embed, batch(number))
        assert_close(*jax.tree.leaves(aux["table"]), now, 1e-12)
        assert aux["name"] == "table"
        assert aux.get("variable") is (embed.embedding if updates else None)
        assert_identical(embed.embedding[...], before)
        flax_nnx.update(optimizer, embed, grads)
    assert np.abs(before - now).max() > 1e-3


class WithCopies(nnx.Module):
    def __init__(self):
        self.after = nnx.BatchStat(jnp.zeros((ROWS, WIDTH)))
        self.embed = nnx.Embed(ROWS, WIDTH, param_dtype="float64", rngs=nnx.Rngs(0))
        self.before = nnx.BatchStat(jnp.zeros((ROWS, WIDTH)))  # in the order of names


def set_value(model):
    for copy in (model.after, model.before):
        copy.set_value(model.embed.embedding[...])


def replace(model):
    model.after = nnx.BatchStat(model.embed.embedding[...])
    model.before = nnx.BatchStat(1.0 * model.embed.embedding[...])


def set_in_a_tree(model):
    model.after.set_value({"copy": model.embed.embedding[...]})
    model.before.set_value([model.embed.embedding[...]])


COPIES = {
    "in a tree": set_in_a_tree,
    "set_value": set_value,
    "in a program": lambda model: nnx.jit(set_value)(model),
    "new variables": replace,
}


@pytest.mark.parametrize("name", slow_but(COPIES, "set_value"))
@pytest.mark.parametrize("jit", slow_but([False, True], True))
def test_a_table_that_the_loss_copies(name, jit):
    """As of a target network: the copy has the values, whichever way it is made."""
    model = WithCopies()
    optimizer = nnx.Optimizer(model, osa.exact_adam(0.1), wrt=nnx.Param)

    def loss(model, ids):
        COPIES[name](model)
        return jnp.sum((model.embed(ids) - 1) ** 2)

    def step(model, optimizer, ids):
        grads = flax_nnx.grad(loss, read=optimizer)(model, ids)
        flax_nnx.update(optimizer, model, grads)

    step = nnx.jit(step) if jit else step
    for number in range(3):
        now, stored = of_now(model, optimizer), jnp.copy(model.embed.embedding[...])
        step(model, optimizer, batch(number))
        for variable in (model.after, model.before):
            (copy,) = jax.tree.leaves(variable.get_raw_value())
            assert_close(copy, now["embed"]["embedding"], 1e-12)
    assert np.abs(stored - now["embed"]["embedding"]).max() > 1e-3


@pytest.mark.slow
def test_another_optimizer_changes_nothing():
    model, optimizer, step = trainer(
        osa.sparse_adam(0.1), lambda _: flax_nnx.value_and_grad(loss)
    )
    step(model, optimizer, batch(0))
    for read in (optimizer, None):
        value = flax_nnx.evaluate(loss, read=read)(model, batch(1))
        assert_close(value, loss(model, batch(1)), 1e-14)
    other = nnx.Optimizer(
        nnx.Embed(5, 2, rngs=nnx.Rngs(0)), osa.exact_adam(0.1), wrt=nnx.Param
    )
    with pytest.raises(ValueError, match="must belong to the parameters"):
        flax_nnx.evaluate(loss, read=other)(model, batch(1))
    with pytest.raises(ValueError, match=r"flax_nnx\.evaluate does not support bound"):
        flax_nnx.evaluate(model.__call__)
