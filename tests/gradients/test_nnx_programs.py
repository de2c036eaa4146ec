"""Programs of Flax inside of a loss, which return variables that they were given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.support import compile_for_users, slow_but


@pytest.fixture(autouse=True)
def default_promotion(strict):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Rows(nnx.Module):
    """A table whose lookups are in a program of Flax, which returns every variable."""

    def __init__(self, size=30, counts=True):
        self.embed = nnx.Embed(size, 4, rngs=nnx.Rngs(0))
        self.weights = nnx.Param(jnp.eye(4))
        if counts:
            self.calls = nnx.Variable(jnp.zeros(()))


def looked_up(rows, ids):
    if hasattr(rows, "calls"):
        rows.calls[...] += 1
    return jnp.tanh(rows.embed(ids).sum(1) @ rows.weights)


def both(fun):
    return nnx.jit(nnx.remat(fun))


def nested(fun):
    return nnx.remat(nnx.remat(fun))


def branches(fun):
    return lambda rows, ids: nnx.cond(ids[0, 0] > 9, nnx.jit(fun), fun, rows, ids)


PROGRAMS = [nnx.remat, nnx.jit, both, nested, branches]


def of_rows(lib, program, tx, counts):
    """Losses of six steps, with evaluations between them, which change no table."""
    rows, losses = Rows(counts=counts), []
    optimizer, call = nnx.Optimizer(rows, tx, wrt=nnx.Param), program(looked_up)
    read = {"read": optimizer} if lib is flax_nnx else {}

    def loss(rows, ids):
        return jnp.mean((call(rows, ids) - 1) ** 2)

    @nnx.jit
    def step(rows, optimizer, ids):
        read = {"read": optimizer} if lib is flax_nnx else {}
        value, grads = lib.value_and_grad(loss, **read)(rows, ids)
        optimizer.update(rows, grads)
        return value

    for ids in np.random.default_rng(0).integers(30, size=(6, 6, 3)):
        losses.append(float(step(rows, optimizer, jnp.asarray(ids))))
        if read:
            table = rows.embed.embedding.get_raw_value()
            value = flax_nnx.evaluate(loss, **read)(rows, ids)
            assert rows.embed.embedding.get_raw_value() is table
            assert np.isfinite(value)
    return losses, int(rows.calls[...]) if counts else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "graph_updates"),
    slow_but(
        [(program, updates) for program in PROGRAMS for updates in (True, False)],
        (branches, False),
    ),
)
def test_variables_that_come_back_from_a_program_of_flax(program, graph_updates):
    """A table that the loss has only read stays the one that is stored."""
    dense, _ = of_rows(nnx, program, optax.adam(0.05), graph_updates)
    # Without them, all variables of an argument are differentiated.
    with nnx.set_graph_updates(graph_updates):
        tx = osa.exact_adam(0.05)
        losses, calls = of_rows(flax_nnx, program, tx, graph_updates)
    np.testing.assert_allclose(losses, dense, rtol=1e-5)  # sums in another order
    assert calls == (12 if graph_updates else None)  # what it has changed is there


def by_rule(embed, ids):
    return jnp.tanh(embed(ids).sum(1))


def twice_its_derivative(residuals, cotangents):
    embed, ids = residuals
    (of_embed, _), of_rows = cotangents
    _, vjp = jax.vjp(lambda table: jnp.tanh(table[ids].sum(1)), embed.embedding[...])
    return jax.tree.map(lambda _: 2 * vjp(of_rows)[0], of_embed), None


@pytest.mark.slow
def test_variables_that_come_back_from_a_rule():
    """A result of a `custom_vjp` is its argument by value, not by derivative."""
    rule, all_losses = nnx.custom_vjp(by_rule), []
    rule.defvjp(lambda *args: (rule(*args), args), twice_its_derivative)

    def loss(embed, ids):
        return jnp.mean((rule(embed, ids) - 1) ** 2) + jnp.sum(embed(ids) ** 2)

    for lib, tx in (nnx, optax.adam(0.05)), (flax_nnx, osa.exact_adam(0.05)):
        embed = nnx.Embed(30, 4, rngs=nnx.Rngs(0))
        optimizer, losses = nnx.Optimizer(embed, tx, wrt=nnx.Param), []
        read = {"read": optimizer} if lib is flax_nnx else {}
        for ids in np.random.default_rng(0).integers(30, size=(3, 6, 3)):
            value, grads = lib.value_and_grad(loss, **read)(embed, ids)
            optimizer.update(embed, grads)
            now = flax_nnx.evaluate(loss, **read)(embed, ids)
            losses += [float(value), float(now)]
        all_losses.append(losses)
    np.testing.assert_allclose(*all_losses, rtol=1e-5)  # sums in another order


@pytest.mark.slow
@pytest.mark.parametrize("graph_updates", [True, False, "replaced"])
def test_a_loss_that_assigns_a_table_of_exact_adam(graph_updates):
    rows = Rows(counts=bool(graph_updates))
    optimizer = nnx.Optimizer(rows, osa.exact_adam(0.05), wrt=nnx.Param)
    before = rows.embed.embedding.get_raw_value()

    def loss(rows, ids):
        if graph_updates == "replaced":
            rows.embed.embedding = nnx.Param(rows.embed.embedding[...])
        else:
            rows.embed.embedding[...] *= 0.99
        return jnp.mean(looked_up(rows, ids))

    for lib in (flax_nnx.value_and_grad, flax_nnx.evaluate):
        with (
            nnx.set_graph_updates(bool(graph_updates)),
            pytest.raises(ValueError, match="assigns or replaces a variable that"),
        ):
            lib(loss, read=optimizer)(rows, jnp.zeros((2, 3), int))
        assert rows.embed.embedding.get_raw_value() is before


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_table_comes_out_of_a_program_of_flax(program):
    rows = Rows(100_000)

    def loss(rows, ids):
        return jnp.mean(program(looked_up)(rows, ids))

    @jax.jit
    def grads(state, ids):
        rows = nnx.merge(graph, state)
        return flax_nnx.value_and_grad(loss)(rows, ids)

    graph, state = nnx.split(rows)
    compiled = compile_for_users(grads.lower(state, jnp.zeros((2, 3), jnp.int32)))
    memory = compiled.memory_analysis()
    table = 100_000 * 4 * 4
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < table / 10
