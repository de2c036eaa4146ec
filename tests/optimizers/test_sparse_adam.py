"""`sparse_adam`: the formula, its state, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import (
    TOLERANCE,
    Magnitude,
    NumpyAdam,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
)

pytestmark = pytest.mark.usefixtures("backend")


def step(tx, table, state, grad):
    updates, state = tx.update(grad, state, table)
    return osa.apply_updates(table, updates), state


def test_state():
    params = {"table": jnp.ones((5, 2)), "bias": jnp.ones(3, jnp.bfloat16), "no": None}
    tx = osa.sparse_adam(0.1)
    state = tx.init(params)
    assert type(state) is osa.ScaleBySparseAdamState
    assert state._fields == ("count", "mu", "nu")
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert_identical(state, osa.ScaleBySparseAdamState(jnp.int32(0), zeros, zeros))
    assert_identical(jax.jit(tx.init)(params), state)
    assert_identical(osa.scale_by_sparse_adam().init(params), state)
    abstract = jax.eval_shape(tx.init, params)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (abstract, state))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16", "float32", jnp.float16])
def test_mu_dtype(mu_dtype):
    params = {"a": jnp.ones((5, 2)), "b": jnp.ones(3, jnp.bfloat16)}
    grads = {
        "a": bcoo(np.ones((2, 2), np.float32), np.array([[1], [1]]), (5, 2)),
        "b": jnp.ones(3, jnp.bfloat16),
    }
    tx = osa.sparse_adam(0.1, mu_dtype=mu_dtype)
    state = tx.init(params)
    for _ in range(2):
        for name, param in params.items():
            assert state.mu[name].dtype == (mu_dtype or param.dtype)
            assert state.nu[name].dtype == param.dtype
        updates, state = tx.update(grads, state, params)
    assert updates["a"].dtype == "float32"
    assert updates["b"].dtype == "bfloat16"
    # The moment is rounded where it is stored, and nowhere else: 0.2 after one step.
    one = tx.update(grads, tx.init(params))[1]
    expected = jnp.float32(0.1 * 2).astype(state.mu["a"].dtype)
    assert_identical(one.mu["a"][1], jnp.full(2, expected))


@pytest.mark.parametrize(
    "hyper", [{}, {"b1": 0.0, "b2": 0.9, "eps": 1e-3}, {"b2": 0.0}]
)
def test_formula(dtype, hyper):
    """Sparse and dense leaves of one tree follow the formula, against float64."""
    rng = np.random.default_rng(0)
    shape, nse = (9, 2, 3), 12
    start = {name: rng.normal(size=shape).astype(dtype) for name in ("rows", "dense")}
    expected = {name: NumpyAdam(start[name], lr=0.03, **hyper) for name in start}
    magnitude = {
        name: [Magnitude(start[name]), Magnitude(), Magnitude()] for name in start
    }
    tx = osa.sparse_adam(0.03, **hyper)
    params = jax.tree.map(jnp.asarray, start)
    state = tx.init(params)
    for _ in range(5):
        values, indices = random_entries(rng, shape, 1, nse, dtype, outside=True)
        dense = rng.integers(-31, 32, shape).astype(dtype) / 32
        grads = {"rows": bcoo(values, indices, shape), "dense": jnp.asarray(dense)}
        params, state = step(tx, params, state, grads)
        expected["rows"].step(row_sums(values, indices, shape))
        expected["dense"].step(dense.astype(np.float64))
        for name, e in expected.items():
            actual = params[name], state.mu[name], state.nu[name]
            results = e.table, e.mu, e.nu
            for a, x, m in zip(actual, results, magnitude[name], strict=True):
                assert a.dtype == dtype
                m.check(a, x, TOLERANCE[dtype].numpy, name)


def test_bias_correction(dtype):
    """`1 - b**t` cancels in the first steps; t may be large, b traced, b zero."""
    tol = TOLERANCE[dtype].numpy
    counts = np.array([0, 1, 2, 5, 30, 1000, 50_000, 2_000_000, 2**31 - 2])
    for b1, b2 in ((0.9, 0.999), (0.99, 0.99999), (0.0, 0.5), (0.9, 0.0)):
        # Traced numbers are exactly what a float32 holds, and so is the reference.
        traced = jnp.asarray([b1, b2], dtype)
        for b in ((b1, b2), traced):
            one, two = (np.float64(np.asarray(x)) for x in b)
            with np.errstate(divide="ignore"):
                t = counts + 1.0
                corrections = [-np.expm1(t * np.log(x)) for x in (one, two)]
            size = np.sqrt(corrections[1]) / corrections[0]
            expected = -size * (1 - one) / (np.sqrt(1 - two) + 1e-8)
            tx = osa.sparse_adam(1.0, b[0], b[1])
            state = tx.init(jnp.zeros([], dtype))
            grad = jnp.ones([], dtype)
            actual = [
                tx.update(grad, state._replace(count=jnp.int32(count)))[0]
                for count in counts
            ]
            assert_close(jnp.stack(actual), expected, 2 * tol, what=f"{b} at {counts}")


def test_count_does_not_overflow():
    tx = osa.sparse_adam(0.1)
    state = tx.init(jnp.zeros(2))._replace(count=jnp.int32(2**31 - 1))
    assert int(tx.update(jnp.ones(2), state)[1].count) == 2**31 - 1


def leaves(rng):
    values, indices = random_entries(rng, (9, 4), 1, 12)
    return {
        "rows": (jnp.ones((9, 4)), bcoo(values, indices, (9, 4))),
        "dense": (jnp.ones(3), jnp.arange(3.0)),
        "empty": (jnp.ones((4, 2)), bcoo(values[:0, :2], indices[:0], (4, 2))),
        "none": (jnp.ones(5), None),
        "scalar": (jnp.ones([]), jnp.float32(0.5)),
    }


def test_mixed_tree_equals_each_alone():
    tree = leaves(np.random.default_rng(0))
    params = {name: param for name, (param, _) in tree.items()}
    grads = {name: grad for name, (_, grad) in tree.items()}
    tx = osa.sparse_adam(0.1)
    state = tx.init(params)._replace(mu=params, nu=params)
    updates, new = tx.update(grads, state)
    assert int(new.count) == 1
    for name, (param, grad) in tree.items():
        alone = tx.init(param)._replace(mu=param, nu=param)
        update, alone = tx.update(grad, alone)
        result = updates[name], new.mu[name], new.nu[name]
        assert_identical(result, (update, alone.mu, alone.nu), name)
        if name in ("none", "empty"):
            applied = osa.apply_updates(param, update)
            assert_identical((applied, alone.mu, alone.nu), (param,) * 3, name)
            assert int(alone.count) == 1


def test_untouched_rows_are_the_same_bits():
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**32, (50, 3), np.uint32)  # NaNs with payloads, subnormals
    raw[:, 0] = 1 << 31  # -0.0
    table = jnp.asarray(raw.view(np.float32))
    values, indices = random_entries(rng, (25, 3), 1, 30, outside=True)
    untouched = np.setdiff1d(np.arange(50), indices)
    assert len(untouched) > 20
    grad = bcoo(values, indices, (50, 3))
    tx = osa.sparse_adam(0.1)
    state = tx.init(table)._replace(mu=table, nu=table)

    def one(apply, grad):
        updates, new = tx.update(grad, state, table)
        return apply(table, updates), new.mu, new.nu

    # optax adds a dense table of zeros outside of jit, and -0.0 + 0.0 is 0.0.
    for way, apply in (
        (one, osa.apply_updates),
        (jax.jit(one, static_argnums=0), osa.apply_updates),
        (jax.jit(one, static_argnums=0), optax.apply_updates),
    ):
        for result in way(apply, grad):
            kept = np.asarray(result)[untouched].view(np.uint32)
            assert_identical(kept, raw[untouched])
            assert np.any(np.asarray(result).view(np.uint32) != raw)


def test_nan_stays_in_its_row():
    values = np.ones((3, 2), np.float32)
    values[1, 1], values[2, 0] = np.nan, np.inf
    indices = np.array([[4], [1], [2]])
    tx = osa.sparse_adam(0.1)
    table = jnp.ones((5, 2))
    results = []
    for v in (values, np.ones_like(values)):
        table_after, state = step(tx, table, tx.init(table), bcoo(v, indices, (5, 2)))
        results.append((table_after, state.mu, state.nu))
    for bad, good in zip(*map(jax.tree.leaves, results), strict=True):
        bad, good = np.asarray(bad), np.asarray(good)
        other = [0, 3, 4]
        assert_identical(bad[other], good[other])
        assert not np.isfinite(bad[1, 1])
        assert not np.isfinite(bad[2, 0])
        assert_identical(bad[[1, 2], [0, 1]], good[[1, 2], [0, 1]])


def test_maximize_is_the_negated_gradient():
    values, indices = random_entries(np.random.default_rng(0), (9, 4), 1, 12)
    for ours, negated in (
        (bcoo(values, indices, (9, 4)), bcoo(-values, indices, (9, 4))),
        (jnp.asarray(values), jnp.asarray(-values)),
    ):
        up, down = osa.sparse_adam(0.1, maximize=True), osa.sparse_adam(0.1)
        state = up.init(jnp.zeros(ours.shape))
        assert_identical(up.update(ours, state), down.update(negated, state))


def test_schedule_sees_the_count_before_the_step():
    rates = jnp.array([0.5, 0.0, 0.25])
    values, indices = random_entries(np.random.default_rng(0), (9, 4), 1, 12)
    grad = bcoo(values, indices, (9, 4))
    tx = osa.sparse_adam(lambda count: rates[count])
    state = tx.init(jnp.zeros((9, 4)))
    for rate in (0.5, 0.0, 0.25):
        plain = osa.sparse_adam(rate) if rate else osa.sparse_adam(jnp.float32(0))
        expected = plain.update(grad, state)
        result = tx.update(grad, state)
        assert_identical(result, expected)
        state = result[1]


def test_scale_by_sparse_adam():
    """Times the learning rate and the sign, it is `sparse_adam`."""
    values, indices = random_entries(np.random.default_rng(0), (9, 4), 1, 12)
    grad = bcoo(values, indices, (9, 4))
    hyper = {"b1": 0.8, "b2": 0.99, "eps": 1e-4}
    transformations = osa.scale_by_sparse_adam(**hyper), osa.sparse_adam(0.25, **hyper)
    table = jnp.zeros((9, 4))
    one, two = (tx.update(grad, tx.init(table)) for tx in transformations)
    assert_identical(one[1], two[1])
    assert_identical(one[0].indices, two[0].indices)
    assert_close(-0.25 * one[0].data, two[0].data, 0.0)  # a power of two is exact
