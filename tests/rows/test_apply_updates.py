"""`apply_updates`: dense, row-sparse and missing updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_sparse_adam as osa

from ..helpers.support import (
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
    slow_but,
    to_dense,
)

WAYS = pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
BACKENDS = [(way, name) for way in ("eager", "jit") for name in ("plain", "kernel")]


@pytest.mark.parametrize(
    "dtype", slow_but(["float32", "float64-x64"], "float32"), indirect=True
)
@pytest.mark.parametrize("n_dense", slow_but([0, 1, 2], 1))
@pytest.mark.parametrize("n_sparse", [1, 2, 3])
def test_equals_the_dense_sum(dtype, n_sparse, n_dense):
    rng = np.random.default_rng(n_sparse)
    shape = (7, 3, 2)[:n_sparse] + (5, 2)[:n_dense]
    # Multiples of 2**-5: every sum is exact, so the order of adding does not show.
    start = rng.integers(-99, 99, shape).astype(dtype) / 32
    for nse in (0, 20):
        update = bcoo(*random_entries(rng, shape, n_sparse, nse, dtype), shape)
        expected = start + to_dense(update)
        for apply in (osa.apply_updates, jax.jit(optax.apply_updates)):
            assert_identical(np.asarray(apply(jnp.asarray(start), update)), expected)


@pytest.mark.usefixtures("backend")
@given(st.lists(st.integers(-7, 9), min_size=8, max_size=8))
def test_any_indices(dtype, ids):
    """Duplicates add up; what is out of bounds, negative ids too, is ignored."""
    indices = np.array(ids, np.int32)[:, None]
    values = np.arange(1, 17).reshape(8, 2).astype(dtype)
    expected = np.full((5, 2), 100, dtype)
    for row, total in row_sums(values, indices, (5,)).items():
        expected[row] += total.astype(dtype)
    start = jnp.full((5, 2), 100, dtype)
    result = osa.apply_updates(start, bcoo(values, indices, (5, 2)))
    assert_identical(np.asarray(result), expected)
    order = np.argsort(ids, kind="stable")
    update = bcoo(values[order], indices[order], (5, 2), indices_sorted=True)
    assert_identical(osa.apply_updates(start, update), result, "sorted")


@WAYS
def test_trees(way):
    params = {
        "dense": jnp.arange(3.0),
        "rows": (jnp.ones((4, 2)), jnp.ones(5)),
        "frozen": jnp.full(2, -0.0),
        "absent": None,
        "scalar": jnp.float32(2),
    }
    rows = bcoo(np.ones((2, 2), np.float32), np.array([[1], [1]]), (4, 2))
    flat = bcoo(np.ones(2, np.float32), np.array([[4], [0]]), (5,))
    updates = dict.fromkeys(params) | {
        "dense": jnp.ones(3),
        "rows": (rows, flat),
        "scalar": jnp.float32(0.5),
    }
    tables = jnp.ones((4, 2)).at[1].set(3), jnp.array([2.0, 1, 1, 1, 2])
    expected = params | {
        "dense": jnp.arange(3.0) + 1,
        "rows": tables,
        "scalar": jnp.float32(2.5),
    }
    assert_identical(way(osa.apply_updates)(params, updates), expected)


@pytest.mark.parametrize(
    ("way", "backend"),
    slow_but(BACKENDS, ("eager", "kernel"), ("jit", "plain")),
    indirect=["backend"],
)
@pytest.mark.parametrize(
    ("param", "update", "roundings"),
    [
        # A wider type holds the sum, which is rounded once: no error at all.
        ("bfloat16", "float32", 1),
        ("float16", "float32", 1),
        ("float16", "bfloat16", 1),
        ("float32", "float64", 1),
        # Added to the table one by one; the last rounding is that of the reference.
        ("bfloat16", "bfloat16", 4),
        ("float32", "bfloat16", 4),
        ("float64", "float32", 4),
    ],
)
def test_types(param, update, roundings, way, backend):
    way = jax.jit if way == "jit" else lambda f: f
    with jax.enable_x64("float64" in (param, update)):
        rng = np.random.default_rng(0)
        eps = float(jnp.finfo(param).eps)
        start = rng.normal(size=(6, 3)).astype(jnp.dtype(param))
        start[2] = 1
        # Half a unit in the last place of 1 each: lost if they are added one by one.
        values = np.full((4, 3), eps / 2)
        values[3] = rng.normal(size=3)
        values = values.astype(jnp.dtype(update))
        indices = np.array([[2], [2], [2], [5]])
        expected = start.astype(np.float64)
        for row, total in row_sums(values, indices, (6,)).items():
            expected[row] += total
        rows = bcoo(values, indices, (6, 3))
        result = np.asarray(way(osa.apply_updates)(jnp.asarray(start), rows))
        assert result.dtype == param
        if roundings == 1:
            assert_identical(result, expected.astype(start.dtype))
        else:
            assert_close(result, expected, roundings * eps / 2)
            assert_identical(result[[0, 1, 3, 4]], start[[0, 1, 3, 4]])


def test_dense_updates_of_another_type():
    with jax.numpy_dtype_promotion("standard"):  # optax adds them as they are
        result = osa.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.full(2, 2.0**-9))
    assert_identical(result, jnp.ones(2, jnp.bfloat16))


@pytest.mark.usefixtures("backend")
@WAYS
@pytest.mark.parametrize(
    ("apply", "padding"),
    [
        (osa.apply_updates, (-1, -1)),  # JAX's takes -1 for the last row
        (osa.apply_updates, (7, 9)),
        (optax.apply_updates, (7, 9)),
    ],
)
def test_row_0_among_padding(apply, padding, way):
    """As `jnp.unique(ids, size=n, fill_value=-1)` makes ids: nothing to complain of."""
    indices = jnp.array([0, *padding])[:, None]
    rows = bcoo(np.ones((3, 2), np.float32), indices, (4, 2), unique_indices=True)
    assert_identical(
        way(apply)(jnp.zeros((4, 2)), rows), jnp.zeros((4, 2)).at[0].set(1)
    )


GOOD = bcoo(np.ones((2, 2), np.float32), np.array([[1], [1]]), (4, 2))
SLICED = jax.tree.map(lambda x: x[:, :1], GOOD)
BAD = [
    # (update of {"a": [4, 2], "b": [3]}, error, words)
    ({"a": jnp.ones((4, 3)), "b": None}, ValueError, r"\(4, 3\) for a parameter of"),
    ({"a": jnp.ones((1, 2)), "b": None}, ValueError, r"\(1, 2\) for a parameter of"),
    ({"a": jnp.float32(1), "b": None}, ValueError, r"\(\) for a parameter of shape"),
    ({"a": None, "b": GOOD}, ValueError, r"\(4, 2\) for a table of shape \(3,\)"),
    ({"a": SLICED, "b": None}, ValueError, r"shape \(2, 2\), got \(2, 1\)"),
    ({"a": GOOD}, ValueError, "[Mm]ismatch|different"),
    ({"a": GOOD, "b": {"c": None}}, ValueError, "tree structure of the parameters"),
    ([GOOD, None], ValueError, "[Ss]tructure|Expected|prefix"),
]


@WAYS
@pytest.mark.parametrize(("updates", "error", "words"), BAD)
def test_bad_updates(updates, error, words, way):
    params = {"a": jnp.ones((4, 2)), "b": jnp.ones(3)}
    with pytest.raises(error, match=words):
        way(osa.apply_updates)(params, updates)
