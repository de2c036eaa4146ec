"""`sparse_adafactor` on rows: what its means run over, its state, its errors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.identity import train
from ..helpers.support import (
    TOLERANCE,
    Magnitude,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
    slow_but,
)

SHAPE = (9, 4)


class NumpyAdafactor:
    """The formula in float64, in loops over touched rows and over columns."""

    def __init__(self, table, lr=1e-2, decay=-0.8, eps=(1e-7, 1e-3), d=1.0, wd=0.0):
        self.table = np.array(table, np.float64)
        rows, columns = self.table.shape
        self.v_row, self.v_col = np.zeros(rows), np.zeros(columns)
        self.lr, self.decay, self.eps, self.d, self.wd = lr, decay, eps, d, wd
        self.count = 0

    def step(self, sums):
        self.count += 1
        if not sums:
            return
        rows = [row for (row,) in sums]
        grad = np.stack([sums[row,] for row in rows])
        weight = self.count**self.decay
        for row, g in zip(rows, grad, strict=True):
            self.v_row[row] += weight * (np.mean(g * g) - self.v_row[row])
        for j, g in enumerate(grad.T):
            self.v_col[j] += weight * (np.mean(g * g) - self.v_col[j])
        mean = max(np.mean(self.v_row[rows]), self.eps[0])
        update = grad.copy()
        for i, row in enumerate(rows):
            for j in range(len(self.v_col)):
                estimate = self.v_row[row] * self.v_col[j] / mean
                update[i, j] /= max(np.sqrt(estimate), self.eps[0])
        old = self.table[rows]
        size = max(self.eps[1], np.sqrt(np.mean(old**2)))
        size *= min(self.lr, self.count**-0.5)
        size /= max(1.0, np.sqrt(np.mean(update**2)) / self.d)
        self.table[rows] -= self.lr * self.wd * old + size * update


HYPERS = [
    {},
    {"lr": 0.5, "wd": 0.1},
    {"lr": 1.0, "eps": (0.1, 0.5), "d": 2.0},
    {"lr": 0.1, "decay": -0.4, "eps": (1e-3, 0.0)},
]


@pytest.mark.parametrize("dtype", ["float32", "float64-x64"], indirect=True)
@pytest.mark.parametrize("hyper", slow_but(HYPERS, *HYPERS[1:3]), ids=str)
def test_means_run_over_touched_rows(dtype, hyper):
    """Other rows in each step, duplicates, explicit zeros, padding, nothing at all."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=SHAPE).astype(dtype)
    names = {"decay": "beta2_decay", "wd": "weight_decay", "lr": "learning_rate"}
    ours = {names.get(name, name): value for name, value in hyper.items()}
    expected = NumpyAdafactor(start, **hyper)
    tx = osa.sparse_adafactor(**{"eps": (1e-7, 1e-3), **ours})
    table = jnp.asarray(start)
    state = tx.init(table)
    largest = Magnitude(start), Magnitude(), Magnitude()
    for inside in (12, 12, 1, 0, 5, 12):
        values, indices = random_entries(rng, SHAPE, 1, 12, dtype, outside=True)
        indices[inside:] = -1
        expected.step(row_sums(values, indices, SHAPE))
        updates, state = tx.update(bcoo(values, indices, SHAPE), state, table)
        table = osa.apply_updates(table, updates)
        pairs = zip(
            (table, state.v_row, state.v_col),
            (expected.table, expected.v_row, expected.v_col),
            strict=True,
        )
        for (actual, exact), magnitude in zip(pairs, largest, strict=True):
            # A few roundings more than in Adam: of the sums, and of two roots.
            tol = 5 * TOLERANCE[dtype].numpy
            magnitude.check(actual, exact, tol, f"after {expected.count} steps")


def test_state():
    shapes = {"scalar": (), "bias": (7,), "table": (1000, 64), "stack": (5, 3, 2)}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    params["none"] = None
    tx = osa.sparse_adafactor()
    state = tx.init(params)
    assert type(state) is osa.SparseAdafactorState
    assert state._fields == ("count", "v_row", "v_col", "v")
    assert_identical(state.count, jnp.int32(0))
    none = dict.fromkeys((*shapes, "none"))
    row = {"table": (1000,), "stack": (5, 3)}
    col = {"table": (64,), "stack": (5, 2)}
    whole = {"scalar": (), "bias": (7,)}
    trees = (state.v_row, row), (state.v_col, col), (state.v, whole)
    for tree, expected in trees:
        zeros = {name: jnp.zeros(s, jnp.float32) for name, s in expected.items()}
        assert_identical(tree, none | zeros)
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_squares_of_squares_do_not_overflow(scale):
    """The product of row and column averages would; torch's does."""
    values, indices = random_entries(np.random.default_rng(0), SHAPE, 1, 12)
    tx = osa.sparse_adafactor(eps=(0.0, 1e-3))
    table = jnp.ones(SHAPE)
    plain, scaled = (
        train(tx, table, [bcoo(values * np.float32(s), indices, SHAPE)])[0]
        for s in (1.0, scale)
    )
    assert np.any(np.asarray(plain) != 1)
    assert_close(scaled, plain, TOLERANCE["float32"].numpy)


def test_zero_gradients_without_epsilon():
    tx = osa.sparse_adafactor(eps=(0.0, 1e-3))
    grad = bcoo(np.zeros((3, 4), np.float32), np.array([[1], [2], [99]]), SHAPE)
    table, state = train(tx, jnp.ones(SHAPE), [grad, grad])
    assert_identical(table, jnp.ones(SHAPE))
    assert_identical(state, tx.init(table)._replace(count=jnp.int32(2)))


def test_low_precision():
    """bfloat16 parameters: computed and kept in float32; the update is rounded."""
    values, indices = random_entries(np.random.default_rng(0), SHAPE, 1, 12)
    start = np.random.default_rng(1).normal(size=SHAPE)
    results = []
    for dtype in ("bfloat16", "float32"):
        table = jnp.asarray(start, jnp.bfloat16).astype(dtype)
        grad = bcoo(jnp.asarray(values, dtype), indices, SHAPE)
        tx = osa.sparse_adafactor(eps=(1e-6, 1e-3))
        updates, state = tx.update(grad, tx.init(table), table)
        assert updates.dtype == table.dtype
        results.append((updates.data.astype(jnp.bfloat16), state))
    assert_identical(*results)


def test_epsilon_of_each_type():
    """By default that of the parameter, also beside one of another type."""
    tx = osa.sparse_adafactor()
    params = {dtype: jnp.ones((2, 3), dtype) for dtype in ("float32", "bfloat16")}
    grads = jax.tree.map(lambda x: x * jnp.asarray(2.0**-10, x.dtype), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, param in params.items():
        alone, _ = tx.update(grads[name], tx.init(param), param)
        assert_identical(updates[name], alone, name)


@pytest.mark.parametrize("dense", [False, True])
def test_gradients_wider_than_the_parameters(dense):
    """The moments keep their type, which a second step relies on."""
    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        table = jnp.ones(SHAPE, jnp.float32)
        values = np.full((2, SHAPE[1]), 0.5)
        grad = bcoo(values, np.int32([[3], [4]]), SHAPE)
        grad = grad.todense() if dense else grad
        assert grad.dtype == jnp.float64
        tx = osa.sparse_adafactor(weight_decay=0.1)
        state = tx.init(table)
        for _ in range(2):
            _, new = tx.update(grad, state, table)
            types = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (new, state)]
            assert types[0] == types[1]
            state = new


@pytest.mark.parametrize(("shape", "n_sparse"), [((5, 3), 2), ((5, 3, 2), 2)])
def test_rows_that_cannot_be_factored(shape, n_sparse):
    grad = bcoo(*random_entries(np.random.default_rng(0), shape, n_sparse, 4), shape)
    tx = osa.sparse_adafactor()
    table = jnp.ones(shape)
    with pytest.raises(ValueError, match=r"n_sparse == 2.*Reshape the table"):
        tx.update(grad, tx.init(table), table)


def test_numbers_as_parameters():
    """As in optax, which takes a Python number for an array."""
    tx = osa.sparse_adafactor()
    results = []
    for params in ({"scale": 2.0}, {"scale": jnp.float32(2.0)}):
        grads = osa.grad(lambda params: params["scale"] ** 2)(params)
        results.append(tx.update(grads, tx.init(params), params))
    chex.assert_trees_all_equal(*results)


def test_wrong_inputs():
    tx = osa.sparse_adafactor()
    table = jnp.ones(SHAPE)
    state = tx.init(table)
    with pytest.raises(ValueError, match=r"Call update\(updates, state, params\)"):
        tx.update(table, state)
    with pytest.raises(ValueError, match="shape of its parameter"):
        tx.update(jnp.ones((8, 4)), state, table)
    with pytest.raises(ValueError, match="complex parameters"):
        tx.init(jnp.ones(3, jnp.complex64))
