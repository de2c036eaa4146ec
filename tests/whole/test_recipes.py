"""Recipes of docs/recipes.md, as they stand there, against loops in NumPy."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa

from ..helpers.support import assert_identical

_PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
_TEXT = _PAGE.read_text(encoding="utf-8")
RATE, B1, B2, EPS = 0.1, 0.9, 0.999, 1e-8
ROWS, DIM = 40, 4


@pytest.fixture(autouse=True)
def defaults(strict):
    """JAX as a reader has it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def recipe(head):
    """The names that the page's first block and those of a section define."""
    names = {"__name__": "__main__"}
    start = _TEXT.index(f"## {head}\n")
    section = _TEXT[start : _TEXT.index("\n## ", start)]
    for text in (_TEXT[: _TEXT.index("\n## ")], section):
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
            exec(block, names)
    return names


def draw(seed=0, steps=12):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(ROWS, DIM))
    batches = rng.zipf(1.5, (steps, 6)) % ROWS
    return rng, table, batches


def gradient(table, w, ids):
    """That of `loss` on the page, for the table, as a loop."""
    grad = np.zeros_like(table)
    for i in ids:
        grad[i] += 2 / len(ids) * (table[i] @ w - 1) * w
    return grad


@pytest.mark.slow
def test_micro_batches_have_one_gradient():
    names = recipe("Micro-batches")
    params, many_ids = names["init"](), np.array([[3, 7, 3], [7, 0, 1]])
    table, w = (np.asarray(params[x], np.float64) for x in ("table", "w"))
    expected = gradient(table, w, many_ids.ravel())
    for loss, ids in (
        (names["loss"], many_ids.ravel()),
        (names["loss_of_all"], many_ids),
    ):
        grad = jax.jit(osa.grad(loss))(params, ids)["table"]
        assert grad.nse == 6
        np.testing.assert_allclose(grad.todense(), expected, atol=1e-6)


@pytest.mark.slow
def test_micro_batches_in_nnx_hand_statistics_on():
    names = recipe("Micro-batches")
    model = names["NormModel"](nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, osa.sparse_adam(RATE), wrt=nnx.Param)
    table = np.asarray(model.embed.embedding[...], np.float64)
    ids = np.array([[3, 7, 3], [7, 0, 1]])
    mean, var, value = np.zeros(8), np.ones(8), 0.0
    for rows in table[ids]:
        own_mean, own_var = rows.mean(axis=0), rows.var(axis=0)
        normal = (rows - own_mean) / np.sqrt(own_var + 1e-5)
        value += np.mean((normal - 1) ** 2) / len(ids)
        mean, var = 0.99 * mean + 0.01 * own_mean, 0.99 * var + 0.01 * own_var
    actual = names["micro_batch_step"](model, optimizer, ids)
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    np.testing.assert_allclose(model.norm.mean[...], mean, atol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], var, atol=1e-6)
    moved = np.any(np.asarray(model.embed.embedding[...]) != np.float32(table), axis=1)
    assert np.flatnonzero(moved).tolist() == [0, 1, 3, 7]


@pytest.mark.slow
def test_constraints_hold_on_touched_rows_only():
    names = recipe("Constraints on the touched rows")
    _, start, batches = draw()
    for constrain in names["constraints"].values():
        project = optax.masked(names["projected"](constrain), names["tables_only"])
        tx = osa.lazy(optax.chain(optax.adam(RATE), project))
        table, w = start.copy(), np.ones(DIM)
        params = {"table": jnp.asarray(table, jnp.float32), "w": jnp.ones(DIM)}
        state, step = tx.init(params), osa.make_train_step(names["loss"], tx)
        mu, nu = np.zeros_like(table), np.zeros_like(table)
        for count, ids in enumerate(batches, 1):
            w = np.asarray(params["w"], np.float64)
            grad, rows = gradient(table, w, ids), np.unique(ids)
            mu[rows] = B1 * mu[rows] + (1 - B1) * grad[rows]
            nu[rows] = B2 * nu[rows] + (1 - B2) * grad[rows] ** 2
            root = np.sqrt(nu[rows] / (1 - B2**count)) + EPS
            moved = table[rows] - RATE * mu[rows] / (1 - B1**count) / root
            table[rows] = constrain(moved)
            params, state, _ = step(params, state, ids)
        np.testing.assert_allclose(params["table"], table, atol=1e-4)
        untouched = np.setdiff1d(np.arange(ROWS), batches)
        assert untouched.size
        assert_identical(params["table"][untouched], np.float32(start[untouched]))


@pytest.mark.slow
def test_micro_gradients_in_a_carry():
    """The sum of all gradients, as a loop; NaN where rows do not fit."""
    names = recipe("Micro-batches")
    params, (_, _, batches) = names["init"](), draw()
    table, w = (np.asarray(params[x], np.float64) for x in ("table", "w"))
    grad = names["sum_of_gradients"](params, batches % 10)
    assert grad.nse == 20
    assert grad.unique_indices
    expected = sum(gradient(table, w, ids) for ids in batches % 10)
    np.testing.assert_allclose(grad.todense(), expected, atol=1e-5)
    more = names["sum_of_gradients"](params, np.arange(24).reshape(4, 6))
    assert np.isnan(more.data).all()


@pytest.mark.torch
@pytest.mark.parametrize("length", [1, 5])
def test_gradients_by_frequency(length):
    torch = pytest.importorskip("torch")
    look_up = recipe("Gradients by frequency")["look_up_by_freq"]
    rng, table, _ = draw()
    ids, weights = rng.zipf(1.5, (6, length)) % ROWS, rng.normal(size=(6, length, DIM))
    weight = torch.tensor(table, requires_grad=True)
    expected = torch.nn.functional.embedding(
        torch.tensor(ids), weight, scale_grad_by_freq=True
    )
    (torch.tanh(expected) * torch.tensor(weights)).sum().backward()
    with jax.enable_x64(True):

        def loss(table):
            return jnp.sum(jnp.tanh(look_up(table, jnp.asarray(ids))) * weights)

        grad = jax.jit(osa.grad(loss, sparse=True))(jnp.asarray(table))
        np.testing.assert_allclose(grad.todense(), weight.grad, rtol=1e-12, atol=1e-12)
