"""`sparse_adam`: what it takes (types, sizes, flags) and what it refuses."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._rows import coalesce, map_rows
from optax_sparse_adam._rows.with_ops import with_ops

from ..helpers.support import (
    TOLERANCE,
    NumpyAdam,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
    slow_but,
)

# Rows of 512 float32 make blocks of 128 on a CPU.
BLOCK = map_rows._block_rows(jnp.zeros([1, 512]))


@pytest.mark.parametrize(
    ("nse", "distinct"),
    slow_but(
        [
            *((nse, 1000) for nse in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)),
            # All rows in the first block with 3; nothing but padding with 0.
            *((5 * BLOCK + 7, distinct) for distinct in (1000, 3, 0)),
        ],
        *((5 * BLOCK + 7, distinct) for distinct in (1000, 3, 0)),
    ),
)
def test_blocks(nse, distinct):
    """More rows than the loop takes at once, with duplicates in different blocks."""
    assert BLOCK == 128
    rng = np.random.default_rng(nse)
    shape = (1000, 512)
    values, _ = random_entries(rng, shape, 1, nse)
    # A hot row, rows that come up once or twice, and padding, everywhere.
    indices = rng.integers(-1, max(distinct, 1) + 2, (nse, 1))
    indices[rng.permutation(nse)[: nse // 20]] = 1 if distinct else -1
    if not distinct:
        indices[:] = rng.choice([-1, 1000, 2000], (nse, 1))
    tx = osa.sparse_adam(0.1)
    table = jnp.ones(shape)
    state = tx.init(table)
    expected = NumpyAdam(table, lr=0.1)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(bcoo(values, indices, shape), state)
        table = osa.apply_updates(table, updates)
        expected.step(row_sums(values, indices, shape))
    assert updates.nse == nse
    ids = np.asarray(updates.indices).ravel()
    assert len(np.unique(ids)) == nse
    assert not np.asarray(updates.data)[ids >= 1000].any()
    tol = TOLERANCE["float32"].numpy
    for name in ("mu", "nu"):
        actual, exact = getattr(state, name), getattr(expected, name)
        assert_close(actual, exact, tol, what=name)
    assert_close(table, expected.table, tol, what="table")


def test_believed_order_in_blocks():
    """Unique rows keep their order, with padding anywhere between them."""
    rng = np.random.default_rng(0)
    shape = (1000, 512)
    indices = rng.permutation(1000)[: 3 * BLOCK + 5, None]
    indices[::7] = 1000
    values = rng.normal(size=(len(indices), 512)).astype(np.float32)
    grad = bcoo(values, indices, shape, unique_indices=True)
    tx = osa.sparse_adam(0.1)
    state = tx.init(jnp.zeros(shape))
    updates, new = tx.update(grad, state)
    assert jax.tree.structure(updates) == jax.tree.structure(grad)
    real = indices[:, 0] < 1000
    assert_identical(np.asarray(updates.indices)[real], indices[real].astype(np.int32))
    sorted_updates, sorted_new = tx.update(osa.coalesce(grad), state)
    assert_identical(new, sorted_new)
    tables = (osa.apply_updates(jnp.zeros(shape), u) for u in (updates, sorted_updates))
    assert_identical(*tables)


def mapped(row_fn, *args):
    """`RowOps.map` of the operations of this platform."""

    def function(ops, rows, tables):
        return ops.map(row_fn, rows, tables, ())

    return jax.jit(lambda *args: with_ops(function, *args, maps=True))(*args)


@pytest.mark.parametrize("nse", slow_but([10, 2 * BLOCK + 10], 2 * BLOCK + 10))
def test_padding_is_zero_whatever_the_formula_gives(nse):
    rng = np.random.default_rng(0)
    shape = (300, 512)
    values, indices = random_entries(rng, shape, 1, nse)
    indices[::3] = -1
    rows = coalesce.touched_rows(bcoo(values, indices, shape), jnp.float32)
    add_one = mapped(
        lambda data, tables: (data + 1, tuple(table + 1 for table in tables)),
        rows,
        (jnp.zeros(shape), jnp.ones(shape)),
    )
    sums = row_sums(values, indices, shape)
    expected = np.zeros(values.shape, np.float32)
    expected[: len(sums)] = np.stack(list(sums.values())) + 1
    touched = np.zeros(shape, np.float32)
    touched[[row for (row,) in sums]] = 1
    assert_identical(add_one, (expected, (touched, touched + 1)))


def test_padding_of_the_last_block_does_not_wrap_around(monkeypatch):
    """As it would near the 2**32 rows of uint32, here near the 256 of uint8."""
    monkeypatch.setattr(map_rows, "_BLOCK_BYTES", 16)
    num_rows, data = 250, np.ones(5, np.float32)
    for ids in ([7, 249, 100, 30, 9], [249, 251, 7, 253, 8]):
        indices = jnp.asarray(ids, jnp.uint8)[:, None]
        values = jnp.where(indices[:, 0] < num_rows, data, 0)
        _, (table,) = mapped(
            lambda data, tables: (data, (tables[0] + 1,)),
            coalesce.Rows(indices, values, jnp.int32(5)),
            (jnp.zeros(num_rows),),
        )
        touched = [row for row in sorted(ids) if row < num_rows]
        assert np.flatnonzero(table).tolist() == touched


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_low_precision(low, sparse):
    """Computed in float32 at least, rounded once, where it is stored."""
    half_ulp = float(jnp.finfo(low).eps) / 2
    tol = half_ulp + TOLERANCE["float32"].numpy
    rng = np.random.default_rng(0)
    shape = (9, 4)
    tx = osa.sparse_adam(0.5, eps=1e-4)
    table = jnp.asarray(rng.normal(size=shape).astype(low))
    state = tx.init(table)
    for _ in range(4):
        before = NumpyAdam(np.zeros(shape), lr=0.5, eps=1e-4)
        before.count = int(state.count)
        before.mu, before.nu = (np.array(x, np.float64) for x in (state.mu, state.nu))
        values, indices = random_entries(rng, shape, 1, 12, low)
        if sparse:
            grad = bcoo(values, indices, shape)
            before.step(row_sums(values, indices, shape))
        else:
            grad = jnp.asarray(rng.normal(size=shape).astype(low))
            before.step(np.asarray(grad, np.float64))
        updates, state = tx.update(grad, state)
        dense = osa.apply_updates(jnp.zeros(shape, low), updates)
        results = updates, state.mu, state.nu, dense
        assert [x.dtype for x in results] == [jnp.dtype(low)] * 4
        assert_close(dense, before.table, tol, what="update")
        assert_close(state.mu, before.mu, tol, what="mu")
        # Below the smallest normal float16 the unit in the last place is fixed.
        smallest = float(jnp.finfo(low).smallest_normal)
        magnitude = np.where(before.nu > 0, np.maximum(before.nu, smallest), 0)
        assert_close(state.nu, before.nu, tol, magnitude=magnitude, what="nu")


def test_mixed_precision():
    """The gradient's type is the update's, the moments keep their own."""
    table = jnp.ones((5, 2))
    values, indices = np.ones((3, 2), jnp.bfloat16), np.array([[1], [3], [1]])
    tx = osa.sparse_adam(0.1)
    for grad in (bcoo(values, indices, (5, 2)), jnp.ones((5, 2), jnp.bfloat16)):
        updates, state = tx.update(grad, tx.init(table))
        assert updates.dtype == "bfloat16"
        assert (state.mu.dtype, state.nu.dtype) == ("float32", "float32")
    low = jnp.ones((5, 2), jnp.bfloat16)
    grad = bcoo(values.astype(np.float32), indices, (5, 2))
    updates, state = tx.update(grad, tx.init(low))
    assert updates.dtype == "float32"
    assert (state.mu.dtype, state.nu.dtype) == ("bfloat16", "bfloat16")
    assert osa.apply_updates(low, updates).dtype == "bfloat16"


@pytest.mark.parametrize(
    "shape", slow_but([(), (1,), (1, 1)], (1, 1), is_one_value=True)
)
@pytest.mark.parametrize(
    "make", slow_but([osa.sparse_adam, osa.sparse_adafactor], osa.sparse_adam)
)
def test_learning_rates_of_one_element(make, shape):
    """As in torch, they are numbers, and change no shape."""
    params = {"table": jnp.ones((5, 2)), "bias": jnp.ones(3), "scalar": jnp.ones(())}
    grads = params | {"table": bcoo(np.ones((2, 2)), np.array([[1], [3]]), (5, 2))}

    def step(rate):
        tx = make(rate)
        return tx.update(grads, tx.init(params), params)

    with jax.numpy_rank_promotion("allow"):
        rate = jnp.full(shape, 0.1)
        expected = jax.tree.leaves(step(0.1))
        for result in (step(rate), step(lambda count: rate), jax.jit(step)(rate)):
            for pair in zip(jax.tree.leaves(result), expected, strict=True):
                assert_close(*pair, TOLERANCE["float32"].numpy)
        with pytest.raises(TypeError, match=r"reshape.*\(2,\)"):
            step(jnp.ones(2))


BAD_NUMBERS = [
    ({"lr": -1}, "Invalid learning rate: -1"),
    ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ({"eps": 0.0}, "Invalid epsilon value: 0.0"),
    ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    ({"b1": 1.0}, "Invalid beta parameter at index 0: 1.0"),
    ({"b1": -0.1}, "Invalid beta parameter at index 0: -0.1"),
    ({"b2": 1.0}, "Invalid beta parameter at index 1: 1.0"),
    ({"b2": float("nan")}, "Invalid beta parameter at index 1: nan"),
]


def numbers(change):
    return ({"lr": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8} | change).values()


@pytest.mark.parametrize(("change", "words"), BAD_NUMBERS)
def test_bad_numbers(change, words):
    lr, b1, b2, eps = numbers(change)
    with pytest.raises(ValueError, match="Invalid") as ours:
        osa.sparse_adam(lr, b1, b2, eps)
    assert str(ours.value).startswith(words + ".")
    if "lr" not in change:
        with pytest.raises(ValueError, match=words):
            osa.scale_by_sparse_adam(b1, b2, eps)


@pytest.mark.parametrize(
    "make", [osa.sparse_adam, osa.rowwise_adam, osa.exact_adam, osa.exact_adamw]
)
def test_moments_of_integers(make):
    """They would be zeros, and nothing would move."""
    with pytest.raises(TypeError, match="mu_dtype must be a floating-point type"):
        make(0.1, mu_dtype="int32")


@pytest.mark.torch
def test_the_words_of_torch():
    torch = pytest.importorskip("torch")
    for change, words in BAD_NUMBERS:
        lr, b1, b2, eps = numbers(change)
        with pytest.raises(ValueError, match=f"^{words}$"):
            torch.optim.SparseAdam([torch.zeros(1)], lr=lr, betas=(b1, b2), eps=eps)
    with pytest.raises(ValueError, match=f"{COMPLEX}$"):
        torch.optim.SparseAdam([torch.zeros(1, dtype=torch.complex64)])


COMPLEX = "SparseAdam does not support complex parameters"


def test_complex_parameters():
    """All say the same: one real table of twice the columns."""
    words = "does not support complex parameters.*one real table of twice the columns"
    names = ["sparse_adam", "rowwise_adam", "rowwise_adagrad", "sparse_adafactor"]
    for name in [*names, "exact_adam", "exact_adamw"]:
        tx = getattr(osa, name)(0.1)
        for init in (tx.init, jax.jit(tx.init)):
            with pytest.raises(ValueError, match=words):
                init({"a": jnp.zeros(2), "b": jnp.zeros(3, jnp.complex64)})
    grad, table = jnp.zeros((3, 2), jnp.complex64), jnp.zeros((3, 2))
    for wrong in (grad, bcoo(np.zeros((1, 2), complex), np.array([[0]]), (3, 2))):
        with pytest.raises(TypeError, match="one real table of twice the columns"):
            osa.sparse_adam(0.1).update(wrong, osa.sparse_adam(0.1).init(table))


def row_of(*shape):
    return bcoo(np.ones((1, *shape[1:]), np.float32), np.array([[0]]), shape)


BAD_GRADIENTS = [
    # (gradient of a parameter of shape (5, 2), error, words)
    (jnp.ones((5, 2), int), TypeError, r"got int32 of shape \(5, 2\).*give None"),
    (jnp.ones((5, 2), jnp.complex64), TypeError, "got complex64"),
    (jnp.ones((5, 3)), ValueError, r"shape \(5, 3\) for a parameter of shape \(5, 2\)"),
    (jnp.ones(2), ValueError, r"shape \(2,\) for a parameter of shape \(5, 2\)"),
    (row_of(6, 2), ValueError, r"shape \(6, 2\) for a table of shape \(5, 2\)"),
    (row_of(5), ValueError, r"shape \(5,\) for a table of shape \(5, 2\)"),
    (
        jax.tree.map(lambda x: x[:, :1], row_of(5, 2)),
        ValueError,
        r"values of shape \(1, 2\), got \(1, 1\)",
    ),
    ({"inner": jnp.ones((5, 2))}, ValueError, "Expected dict"),
]


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("grad", "error", "words"), BAD_GRADIENTS)
def test_bad_gradients(way, grad, error, words):
    tx = osa.sparse_adam(0.1)
    state = tx.init({"a": jnp.ones((5, 2)), "b": jnp.ones(3)})
    with pytest.raises(error, match=words):
        way(tx.update)({"a": grad, "b": jnp.ones(3)}, state)


# Inside of optax's wrappers.

SHAPE = (9, 4)
PARAMS = {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}
GRADS = {
    "table": bcoo(*random_entries(np.random.default_rng(0), SHAPE, 1, 12), SHAPE),
    "bias": jnp.arange(3.0),
}


def test_extra_arguments_are_ignored():
    tx = osa.sparse_adam(0.1)
    state = tx.init(PARAMS)
    result = tx.update(GRADS, state, PARAMS, value=jnp.float32(1), key=3)
    assert_identical(result, tx.update(GRADS, state))


def test_state_fields_by_name():
    tx = optax.chain(osa.sparse_adam(0.1))
    _, state = tx.update(GRADS, tx.init(PARAMS))
    for name in ("count", "mu", "nu"):
        assert_identical(optax.tree.get(state, name), getattr(state[0], name))
    assert int(optax.tree.get(optax.tree.set(state, count=jnp.int32(7)), "count")) == 7


def test_inject_hyperparams():
    """The numbers are arrays in the state; to change one does not compile again."""
    tx = optax.inject_hyperparams(osa.sparse_adam)(
        learning_rate=0.25, b1=0.5, b2=0.75, eps=2.0**-10, maximize=True
    )
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(PARAMS)
    assert set(state.hyperparams) >= {"learning_rate", "b1", "b2", "eps"}
    for rate, b1 in ((0.25, 0.5), (0.125, 0.0)):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        state.hyperparams["b1"] = jnp.float32(b1)
        plain = osa.sparse_adam(rate, b1, 0.75, 2.0**-10, maximize=True)
        expected, expected_state = plain.update(GRADS, state.inner_state)
        updates, state = update(GRADS, state)
        # All numbers here are exact in float32.
        results = (updates, state.inner_state), (expected, expected_state)
        chex.assert_trees_all_close(*results, rtol=TOLERANCE["float32"].numpy)


@pytest.mark.parametrize("nse", [0, 12])
@pytest.mark.parametrize("index_type", slow_but(["int8", "int32", "uint32"], "int8"))
@pytest.mark.parametrize("n_sparse", [1, 2])
def test_updates_of_a_coalesced_gradient_keep_its_structure(n_sparse, index_type, nse):
    values, indices = random_entries(np.random.default_rng(0), SHAPE, n_sparse, nse)
    grad = osa.coalesce(bcoo(values, indices.astype(index_type), SHAPE))
    tx = osa.sparse_adam(0.1)
    state = tx.init(jnp.ones(SHAPE))
    one = grad
    for _ in range(2):
        one, _ = tx.update(one, state)
        assert jax.tree.structure(one) == jax.tree.structure(grad)
        assert [x.dtype for x in (one.data, one.indices)] == [
            x.dtype for x in (grad.data, grad.indices)
        ]
        assert_identical(one.indices, grad.indices)
