"""One second moment for each row: the formulas, on tables and on touched rows."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
    slow_but,
)

SHAPE = (9, 4)


class NumpyAdagrad:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD in float64, in a loop over rows.

    `decay` is (coupled, decoupled).
    """

    def __init__(self, table, lr=0.1, initial=0.0, eps=1e-8, decay=(0.0, 0.0)):
        self.table = np.array(table, np.float64)
        self.sums = np.full(len(table), initial, np.float64)
        self.lr, self.eps, self.decay = lr, eps, decay

    def step(self, sums):
        for (row,), g in sums.items():
            g = g + self.decay[0] * self.table[row]
            self.sums[row] += np.mean(g * g)
            update = g / (np.sqrt(self.sums[row]) + self.eps)
            self.table[row] -= self.lr * (update + self.decay[1] * self.table[row])

    def state(self):
        return [self.sums]


class NumpyAdam:
    """FBGEMM's PARTIAL_ROWWISE_ADAM in float64, in a loop over rows."""

    def __init__(self, table, lr=0.1, b1=0.9, b2=0.999, eps=1e-8, decay=(0.0, 0.0)):
        self.table = np.array(table, np.float64)
        self.mu, self.nu = np.zeros_like(self.table), np.zeros(len(table))
        self.b1, self.b2, self.eps, self.decay = b1, b2, eps, decay
        self.lr, self.count = lr, 0

    def step(self, sums):
        self.count += 1
        for (row,), g in sums.items():
            g = g + self.decay[0] * self.table[row]
            self.mu[row] += (1 - self.b1) * (g - self.mu[row])
            self.nu[row] += (1 - self.b2) * (np.mean(g * g) - self.nu[row])
            mean = self.mu[row] / (1 - self.b1**self.count)
            root = np.sqrt(self.nu[row] / (1 - self.b2**self.count))
            update = mean / (root + self.eps) + self.decay[1] * self.table[row]
            self.table[row] -= self.lr * update

    def state(self):
        return [self.mu, self.nu]


def coupled(weight_decay, scaling, rate=0.1):
    decay = optax.add_decayed_weights(weight_decay)
    return osa.lazy(optax.chain(decay, scaling, optax.scale_by_learning_rate(rate)))


CASES = {
    "adagrad": (osa.rowwise_adagrad(0.1), NumpyAdagrad, {}),
    "adagrad, numbers": (
        osa.rowwise_adagrad(0.5, 0.25, 1e-2, weight_decay=0.1),
        NumpyAdagrad,
        {"lr": 0.5, "initial": 0.25, "eps": 1e-2, "decay": (0.0, 0.1)},
    ),
    "adagrad, coupled decay": (
        coupled(0.1, osa.scale_by_rowwise_rss()),
        NumpyAdagrad,
        {"decay": (0.1, 0.0)},
    ),
    "adam": (osa.rowwise_adam(0.1), NumpyAdam, {}),
    "adam, numbers": (
        osa.rowwise_adam(0.5, 0.5, 0.9, 1e-2, weight_decay=0.1),
        NumpyAdam,
        {"lr": 0.5, "b1": 0.5, "b2": 0.9, "eps": 1e-2, "decay": (0.0, 0.1)},
    ),
    "adam, coupled decay": (
        coupled(0.1, osa.scale_by_rowwise_adam()),
        NumpyAdam,
        {"decay": (0.1, 0.0)},
    ),
}


@pytest.mark.parametrize(
    "dtype", slow_but(["float32", "float64-x64"], "float32"), indirect=True
)
@pytest.mark.parametrize("case", CASES)
def test_formula(dtype, case):
    tx, reference, hyper = CASES[case]
    rng = np.random.default_rng(0)
    start = rng.normal(size=SHAPE).astype(dtype)
    expected = reference(start, **hyper)
    table, update = jnp.asarray(start), jax.jit(tx.update)
    state = tx.init(table)
    for step in range(6):
        values, indices = random_entries(rng, SHAPE, 1, 12, dtype, outside=True)
        expected.step(row_sums(values, indices, SHAPE))
        updates, state = update(bcoo(values, indices, SHAPE), state, table)
        table = osa.apply_updates(table, updates)
        arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        pairs = zip([table, *arrays], [expected.table, *expected.state()], strict=True)
        for actual, exact in pairs:
            # Coupled decay may cancel the gradient, but not that of all elements.
            scale, what = np.max(np.abs(exact)), f"{case} after {step + 1} steps"
            tol = TOLERANCE[dtype].numpy
            assert_close(actual, exact, tol, magnitude=scale, what=what)


def test_elements_that_are_looked_up():
    shape, tx = (4, 3), osa.rowwise_adam(0.1)
    grad = bcoo(*random_entries(np.random.default_rng(0), shape, 2, 7), shape)
    with pytest.raises(ValueError, match="Look whole rows up"):
        tx.update(grad, tx.init(jnp.zeros(shape)))


@pytest.mark.parametrize("make", [osa.rowwise_adagrad, osa.sparse_adafactor])
def test_random_keys_are_no_parameters(make):
    params = {"table": jnp.ones((4, 3)), "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=r"train numbers, .*key<fry>.*optax.masked"):
        make(0.1).init(params)


@pytest.mark.slow
@pytest.mark.parametrize("mu_dtype", [None, "float32", "float16"])
def test_types(mu_dtype):
    """Second moments in float32: bfloat16 would lose a thousandth of them."""
    shapes = {"table": SHAPE, "bias": (3,), "scalar": ()}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    values, indices = random_entries(np.random.default_rng(0), SHAPE, 1, 12)
    grads = params | {"table": bcoo(jnp.asarray(values, jnp.bfloat16), indices, SHAPE)}
    adam = osa.rowwise_adam(0.1, mu_dtype=mu_dtype, weight_decay=0.1)
    for tx in (adam, osa.rowwise_adagrad(0.1, weight_decay=0.1)):
        start = tx.init(params)
        updates, state = tx.update(grads, start, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(start, state)
        updates["table"] = updates["table"].data
        assert {leaf.dtype.name for leaf in updates.values()} == {"bfloat16"}
        if isinstance(state, osa.ScaleByRowwiseRssState):
            moments = state.sum_of_squares
        else:
            moments = state.nu
            mus = {mu.dtype.name for mu in state.mu.values()}
            assert mus == {mu_dtype or "bfloat16"}
        assert {moment.dtype.name for moment in moments.values()} == {"float32"}
        expected = {"table": (9,), "bias": (3,), "scalar": ()}
        assert jax.tree.map(jnp.shape, moments) == expected


def test_parameters_are_needed_for_weight_decay_only():
    grad = bcoo(np.ones((1, 4), np.float32), [[3]], SHAPE)
    for make in (osa.rowwise_adagrad, osa.rowwise_adam):
        plain, decays = make(0.1), make(0.1, weight_decay=0.1)
        state = plain.init(jnp.ones(SHAPE))
        assert_identical(state, decays.init(jnp.ones(SHAPE)))
        plain.update(grad, state)
        with pytest.raises(ValueError, match="params"):
            decays.update(grad, state)


def test_no_memory_of_large_gradients():
    """With `b2 = 0` a small gradient after a large one is not lost to rounding."""
    tx, table = osa.rowwise_adam(0.1, b1=0, b2=0), jnp.ones((3, 2))
    state, step = tx.init(table), jax.jit(tx.update)
    sizes = (1.0, 1e-4, 1.0, 1e-6)
    for size in sizes:
        values = np.full((1, 2), size, np.float32)
        updates, state = step(bcoo(values, np.zeros((1, 1), np.int32), (3, 2)), state)
        table = osa.apply_updates(table, updates)
    expected = 1 - 0.1 * sum(size / (size + 1e-8) for size in sizes)
    np.testing.assert_allclose(table[0], expected, rtol=1e-6)


@pytest.mark.parametrize("make", [osa.sparse_adam, osa.rowwise_adam])
def test_decay_rates_that_bfloat16_rounds_to_one(make):
    params = jnp.ones((3, 2), "bfloat16")
    with pytest.raises(TypeError, match=r"0\.999 is not 1.*static_args"):
        optax.inject_hyperparams(make)(0.1).init(params)
    tx = optax.inject_hyperparams(make, static_args=("b1", "b2"))(0.1)
    grad = bcoo(jnp.ones((1, 2), "bfloat16"), np.zeros((1, 1), np.int32), (3, 2))
    updates, _ = tx.update(grad, tx.init(params), params)
    np.testing.assert_allclose(updates.data.astype("float32"), -0.1, rtol=2**-7)
