"""Coalescing, and rows gathered from and scattered to tables, against NumPy loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_sparse_adam as osa
from optax_sparse_adam._rows import coalesce, duplicates

from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    bcoo,
    jit_for_users,
    random_entries,
    row_sums,
    slow_but,
)


def check_coalesced(out, values, indices, shape):
    """`out` holds the sums of the entries and keeps every promise that it makes."""
    assert out.shape == shape
    assert out.indices_sorted
    assert out.unique_indices
    assert out.data.shape == values.shape
    assert out.dtype == values.dtype
    sums = row_sums(values, indices, shape)
    rows = np.asarray(out.indices).tolist()
    assert [tuple(row) for row in rows[: len(sums)]] == list(sums)
    assert rows == sorted(rows), "not sorted"
    assert len(set(map(tuple, rows))) == len(rows), "not unique"
    for row in rows[len(sums) :]:
        assert all(i >= n for i, n in zip(row, shape, strict=False)), "not padding"
    expected = np.zeros(values.shape)
    expected[: len(sums)] = list(sums.values()) if sums else 0
    assert_identical(np.asarray(out.data), expected.astype(values.dtype), "sums")


SHAPES = [
    (n_sparse, (7, 3, 2)[:n_sparse] + (5, 2)[:n_dense])
    for n_sparse in (1, 2, 3)
    for n_dense in (0, 1, 2)
]


@pytest.mark.parametrize(
    "dtype", slow_but(["float32", "float64-x64"], "float32"), indirect=True
)
@pytest.mark.parametrize(("n_sparse", "shape"), slow_but(SHAPES, *SHAPES[::3]))
def test_coalesce(dtype, n_sparse, shape):
    rng = np.random.default_rng(0)
    sizes = (0, 1, 40) if dtype == "float32" else (40,)
    for nse, outside in itertools.product(sizes, (False, True)):
        entries = random_entries(rng, shape, n_sparse, nse, dtype, outside)
        check_coalesced(osa.coalesce(bcoo(*entries, shape)), *entries, shape)


def test_tables_of_all_heights_are_traced_once(monkeypatch):
    """Many tables, as of a recommender, would take seconds."""
    search, traced = duplicates._segments_by_search, []

    def counted(*args):
        traced.append(args)
        return search(*args)

    monkeypatch.setattr(duplicates, "_segments_by_search", counted)
    values, indices = random_entries(np.random.default_rng(0), (50, 3), 1, 37)
    for rows in (50, 51, 1000):
        jax.make_jaxpr(osa.coalesce)(bcoo(values, indices, (rows, 3)))
    assert len(traced) == 1


near = st.integers(-3, 8) | st.sampled_from([-(2**31), 2**31 - 1])


@given(st.lists(st.tuples(near, near), min_size=12, max_size=12))
@pytest.mark.parametrize("n_sparse", [1, 2])
def test_coalesce_any_indices(n_sparse, indices):
    shape = (5, 4, 2)[-n_sparse - 1 :]
    indices = np.array(indices, np.int32)[:, :n_sparse]
    values = np.arange(24, dtype=np.float32).reshape(12, 2)[:, : shape[-1]]
    out = osa.coalesce(bcoo(values, indices, shape))
    check_coalesced(out, values, indices, shape)
    assert_identical(osa.coalesce(out), out, "coalesced twice")
    # Sorted on input: the order is believed, the result is the same.
    order = np.lexsort(indices.T[::-1])
    indices = indices[order]
    grad = bcoo(values[order], indices, shape, indices_sorted=True)
    assert_identical(osa.coalesce(grad), out, "sorted on input")


INDEX_TYPES = [
    # (type of the ids, type of the coalesced ids, numbers of rows)
    ("int8", "int32", (5, 127, 128, 1000)),
    ("uint8", "int32", (5, 128, 255, 256, 1000)),
    ("int16", "int32", (5, 1000)),
    ("uint16", "int32", (5, 1000)),
    ("int32", "int32", (5, 1000)),
    ("uint32", "uint32", (5, 1000)),
    ("int64", "int64", (5, 1000)),
    ("uint64", "uint64", (5, 1000)),
]


@jit_for_users
def coalesce_and_apply(grad):
    out = osa.coalesce(grad)
    zeros = jnp.zeros(grad.shape, grad.dtype)
    return [osa.apply_updates(zeros, one) for one in (grad, out)], out


@pytest.mark.parametrize(
    ("index_type", "result_type", "rows"),
    slow_but(
        [(one, two, rows) for one, two, numbers in INDEX_TYPES for rows in numbers],
        ("int8", "int32", 128),
        ("uint8", "int32", 255),
        ("uint32", "uint32", 1000),
    ),
)
def test_index_types(index_type, result_type, rows):
    types = np.iinfo(index_type)
    ids = [0, 2, types.min, types.max, rows, rows - 1, 127, 2, rows - 1, 3]
    ids = np.array([[i] for i in ids if types.min <= i <= types.max], object)
    values = np.arange(2.0 * len(ids), dtype=np.float32).reshape(-1, 2)
    dense = np.zeros((rows, 2), np.float32)
    for row, value in row_sums(values, ids, (rows,)).items():
        dense[row] = value
    with jax.enable_x64("64" in index_type):
        grad = bcoo(values, ids.astype(index_type), (rows, 2))
        tables, out = coalesce_and_apply(grad)
        check_coalesced(out, values, ids, grad.shape)
        assert out.indices.dtype == result_type
        for table in tables:
            assert_identical(np.asarray(table), dense, "table")


@pytest.mark.parametrize(
    "dtype", slow_but(["uint8", "int32", "uint32", "int64"], "uint8", "int32")
)
@pytest.mark.parametrize("size", [1, 2, 3, 31, 32, 33, 100])
def test_search(size, dtype):
    types = np.iinfo(dtype)
    rng = np.random.default_rng(size)
    ordered = rng.integers(0, 60, size).astype(dtype)
    ordered[size // 2 :] = types.max - ordered[size // 2 :]
    ordered.sort()
    keys = np.concatenate([ordered, ordered - 1, ordered + 1, [types.min, types.max]])
    with jax.enable_x64(dtype == "int64"):
        found = jax.jit(duplicates.search)(ordered, keys.astype(dtype))
    np.testing.assert_array_equal(found, np.searchsorted(ordered, keys))


LIMIT = 2**31 - 1


LARGE_SHAPES = [
    # The last row and the padding after it fit into int32, and just do not fit.
    ((LIMIT - 6, 1), 1, "int32", "int32"),
    ((LIMIT - 5, 1), 1, "int32", "uint32"),
    ((LIMIT, 1), 1, "int32", "uint32"),
    ((LIMIT + 1, 1), 1, "uint32", "uint32"),
    ((3_000_000_000, 1), 1, "int32", "uint32"),
    ((2**32 - 7, 1), 1, "uint32", "uint32"),
    # The flat number of a row does not fit into int32, or into uint32.
    ((70_000, 60_000), 2, "int32", "int32"),
    ((70_000, 60_000), 2, "uint32", "uint32"),
    ((70_000, 70_000), 2, "int32", "int32"),
    ((70_000, 70_000), 2, "uint32", "uint32"),
    ((100_000, 100_000, 3), 2, "int32", "int32"),
    ((100_000, 100_000, 3), 3, "int32", "int32"),
    ((LIMIT, LIMIT, 3), 3, "int32", "uint32"),
    ((3_000_000_000, 3_000_000_000), 2, "int32", "uint32"),
]
# With 64-bit types the first of each combination of types and `n_sparse`.
LARGE_SHAPES = [
    *((*case, False) for case in LARGE_SHAPES),
    *(
        (*case, True)
        for case in {case[1:]: case for case in LARGE_SHAPES[::-1]}.values()
    ),
    ((2**40, 1), 1, "int64", "int64", True),
]


@pytest.mark.parametrize(
    ("shape", "n_sparse", "index_type", "result_type", "is_x64"),
    slow_but(LARGE_SHAPES, *LARGE_SHAPES[:14:4], LARGE_SHAPES[-1]),
)
def test_large_shapes(shape, n_sparse, index_type, result_type, is_x64):
    """Tables that are too large to exist: row numbers must not wrap around."""
    with jax.enable_x64(is_x64):
        check_large_shape(shape, n_sparse, index_type, result_type)


def check_large_shape(shape, n_sparse, index_type, result_type):
    types = np.iinfo(index_type)
    last = [min(n - 1, types.max) for n in shape[:n_sparse]]
    first = [0] * n_sparse
    low = [max(types.min, -2_000_000_000)] * n_sparse
    high = [types.max] * n_sparse
    mixed = [last[0], *first[1:]]
    indices = np.array([last, mixed, low, high, last, first])
    values = np.array([1, 2, 4, 8, 16, 32], np.float32)
    if n_sparse < len(shape):
        values = np.tile(values[:, None], shape[-1])
    out = osa.coalesce(bcoo(values, indices.astype(index_type), shape))
    check_coalesced(out, values, indices, shape)
    assert out.indices.dtype == result_type
    order = np.lexsort(indices.T[::-1])
    ordered = indices[order].astype(index_type)
    grad = bcoo(values[order], ordered, shape, indices_sorted=True)
    assert_identical(osa.coalesce(grad), out, "sorted on input")


def test_table_beyond_the_index_type(x64):
    grad = bcoo(np.ones((2, 1), np.float32), np.zeros((2, 1), np.int32), (2**32, 1))
    with pytest.raises(ValueError, match=r"int32 cannot index .*pass int64 ids"):
        osa.coalesce(grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_sums_round_once(dtype):
    # One and 300 times 2**-8: each addition alone would round to one in bfloat16.
    values = np.full((301, 1), 2.0**-8)
    values[0] = 1
    grad = bcoo(values.astype(jnp.dtype(dtype)), np.zeros((301, 1), int), (3, 1))
    out = osa.coalesce(grad)
    check_coalesced(out, np.asarray(grad.data), np.zeros((301, 1), int), (3, 1))
    assert float(out.data[0, 0]) == np.float64(values.sum()).astype(jnp.dtype(dtype))


def test_hot_rows(dtype):
    """Sums of many random numbers err by no more than a rounding for each addition."""
    rng = np.random.default_rng(0)
    indices = np.minimum(rng.zipf(1.3, 3000), 500)[:, None] - 1
    values = rng.normal(size=(3000, 4)).astype(dtype)
    out = osa.coalesce(bcoo(values, indices, (500, 4)))
    sums = row_sums(values, indices, (500,))
    bound = row_sums(np.abs(values), indices, (500,))
    counts = row_sums(np.ones((3000, 1)), indices, (500,))
    assert max(counts.values()) > 500
    bound = np.stack(list(bound.values())) * np.stack(list(counts.values()))
    actual = out.data[: len(sums)]
    expected = np.stack(list(sums.values()))
    assert_close(actual, expected, TOLERANCE[dtype].sum, magnitude=bound)


def test_values_of_padding_are_ignored():
    values = np.array([[1], [2], [np.nan], [np.inf]], np.float32)
    ids = np.array([[1], [3], [5], [7]])
    every = ({}, {"unique_indices": True}, {"indices_sorted": True})
    for flags in (*every, {"unique_indices": True, "indices_sorted": True}):
        out = osa.coalesce(bcoo(values, ids, (5, 1), **flags))
        check_coalesced(out, np.nan_to_num(values, posinf=0), ids, (5, 1))
        rows = coalesce.touched_rows(bcoo(values, ids, (5, 1), **flags), jnp.float32)
        assert_identical(rows.data, jnp.array([[1.0], [2], [0], [0]]))


@pytest.mark.slow
def test_sum_duplicates_of_jax():
    """It fills up with repeated out-of-bounds indices and calls them unique."""
    rng = np.random.default_rng(0)
    values, indices = random_entries(rng, (9, 2), 1, 20)
    grad = bcoo(values, indices, (9, 2)).sum_duplicates(nse=20, remove_zeros=False)
    assert grad.unique_indices
    assert np.sum(np.asarray(grad.indices) >= 9) > 1
    check_coalesced(osa.coalesce(grad), values, indices, (9, 2))


def primitives(function, *args):
    return str(jax.make_jaxpr(function)(*args))


def test_flags_are_believed():
    values, indices = np.ones((3, 1), np.float32), np.array([[4], [0], [2]])
    grad = bcoo(values, indices, (5, 1), unique_indices=True)
    rows = coalesce.touched_rows(grad, jnp.float32)
    assert np.asarray(rows.indices).ravel().tolist() == [4, 0, 2]
    in_order = np.sort(indices, axis=0)
    flags = [
        {},
        {"indices_sorted": True},
        {"unique_indices": True, "indices_sorted": True},
    ]
    sorts = [
        " sort[" in primitives(osa.coalesce, bcoo(values, in_order, (5, 1), **flag))
        for flag in flags
    ]
    assert sorts == [True, False, False]


BAD = [
    # (change of a good gradient of shape (10, 2), error, words, shape of the table)
    (lambda g: jax.tree.map(lambda x: x * 0.5, g), TypeError, "inside lazy"),
    (lambda g: bcoo(g.data.astype(int), g.indices, g.shape), TypeError, "Integer"),
    (
        lambda g: bcoo(g.data.astype(complex), g.indices, g.shape),
        TypeError,
        "floating-point values, got complex64",
    ),
    (
        lambda g: bcoo(g.data[None], g.indices[None], (1, 10, 2)).update_layout(
            n_batch=1, n_dense=1
        ),
        ValueError,
        "n_batch == 1",
    ),
    (
        lambda g: bcoo(
            g.data[:, None] * jnp.ones((1, 10, 1)), g.indices[:, :0], g.shape
        ),
        ValueError,
        "n_sparse == 0",
    ),
]


def error_cases():
    table = jnp.zeros((10, 2))
    tx = osa.sparse_adam(0.1)
    return {
        "coalesce": osa.coalesce,
        "update": lambda grad: tx.update(grad, tx.init(table)),
        "apply_updates": lambda grad: osa.apply_updates(table, grad),
    }


@pytest.mark.parametrize("way", [lambda f: f, lambda f: jax.jit(f).eval_shape])
@pytest.mark.parametrize("name", ["coalesce", "update", "apply_updates"])
@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_gradients(name, way, change, error, words):
    good = bcoo(np.ones((3, 2), np.float32), np.array([[1], [2], [1]]), (10, 2))
    with jax.numpy_dtype_promotion("standard"):
        bad = change(good)
    with pytest.raises(error, match=words):
        way(error_cases()[name])(bad)


@pytest.mark.parametrize(
    "shape", slow_but([(0, 2), (5, 0), (0, 0)], (0, 2), (5, 0), is_one_value=True)
)
def test_empty_tables(shape):
    for ids in ([], [3, 0, 3]):
        values = np.ones((len(ids), shape[1]), np.float32)
        indices = np.array(ids, np.int32)[:, None]
        grad = bcoo(values, indices, shape)
        check_coalesced(osa.coalesce(grad), values, indices, shape)
        tx = osa.sparse_adam(0.1)
        table = jnp.zeros(shape)
        updates, state = tx.update(grad, tx.init(table))
        tree = osa.apply_updates(table, updates), state.mu, state.nu
        assert_identical(tree, (table,) * 3)


def test_coalesce_of_a_dense_gradient():
    with pytest.raises(TypeError, match="coalesce takes a BCOO, got ArrayImpl"):
        osa.coalesce(jnp.ones((10, 2)))


def test_errors_about_structures_show_no_values():
    tx = osa.sparse_adam(1e-3)
    state = tx.init(jnp.full((2, 2), 7.0))
    with pytest.raises(ValueError, match=r"got PyTreeDef\(\*\): Expected tuple$"):
        tx.update((jnp.ones(3), jnp.ones((2, 2))), state)
