"""Rows taken out of tables, put back and begun again, against steps on whole tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.optimizers import OPTIMIZERS
from ..helpers.support import slow_but

ROWS = {"a": 50, "b": 30}


def labels(params):
    return {name: "tables" if name in ROWS else "rest" for name in params}


TRANSFORMATIONS = {name: opt.make for name, opt in OPTIMIZERS.items()} | {
    "lazy adam": lambda rate: osa.lazy(optax.adam(rate)),
    "lazy sgd": lambda rate: osa.lazy(optax.sgd(rate, momentum=0.9)),
    "partition": lambda rate: optax.partition(
        {"tables": osa.exact_adam(rate), "rest": optax.adam(rate)}, labels
    ),
    "chain": lambda rate: optax.chain(
        osa.lazy(optax.clip_by_global_norm(1.0)), osa.exact_adam(rate)
    ),
    "inject": optax.inject_hyperparams(osa.sparse_adam, static_args=("b1", "b2")),
}
# A dense gradient moves rows that no batch names; its rows can be taken all the same.
EVERY = TRANSFORMATIONS | {"dense": optax.adam}


@pytest.fixture(autouse=True)
def _as_optax_expects(as_optax_expects):
    """Its transformations promote weak types."""


def begin(tx, dtype="float32"):
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((n, 4)) for name, n in ROWS.items()}
    params = jax.tree.map(lambda x: x.astype(dtype), params | {"w": np.ones(4)})
    params = jax.tree.map(jnp.asarray, params)
    return params, tx.init(params)


def by_name(a=None, b=None):
    return {"a": a, "b": b, "w": None}


def state_to_read(name, state):
    return state if "exact" in name else None


def loss(params, a, b):
    rows = params["a"].at[a].get(mode="fill", fill_value=0) + params["b"][b]
    return jnp.sum(jnp.tanh(rows @ params["w"] - 1) ** 2)


def make_step(tx, sparse=None):
    return osa.make_train_step(loss, tx, sparse=sparse)


def batches(count, repeats=False):
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield tuple(rng.choice(n, 12, replace=repeats) for n in ROWS.values())


def stored_in(kind, tree, folder):
    """The arrays of a tree as those of JAX, of NumPy, or of files."""

    def stored(path, x):
        if kind == "jax":
            return jnp.copy(x)
        if kind == "numpy" or x.ndim == 0:
            return np.array(x)
        file = folder / f"{jax.tree_util.keystr(path)}.npy".replace("/", "_")
        new = np.lib.format.open_memmap(file, "w+", x.dtype, x.shape)
        new[...] = x
        return new

    return jax.tree_util.tree_map_with_path(stored, tree)


def assert_equal(found, expected, **tolerances):
    def check(path, x, y):
        assert x.dtype == y.dtype
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, **({"rtol": 0} | tolerances), err_msg=name)

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree_util.tree_map_with_path(check, found, expected)


# Each optimiser with one kind of arrays, and each kind with several optimisers.
STORED = list(zip(TRANSFORMATIONS, ("jax", "numpy", "memmap") * 9, strict=False))
STORED += [("inject", "memmap"), ("exact_adamw", "memmap")]
STORED = list(dict.fromkeys(STORED))


@pytest.mark.parametrize(("name", "kind"), slow_but(STORED))
def test_steps_on_taken_rows_are_those_on_tables(name, kind, tmp_path):
    """Twelve steps on the rows of their batches: parameters, state, shared leaves."""
    tx = TRANSFORMATIONS[name](0.1)
    step = make_step(tx)
    params, state = begin(tx)
    whole = jax.tree.map(jnp.copy, (params, state))
    stored = stored_in(kind, (params, state), tmp_path)
    for a, b in batches(12):
        *whole, _ = step(*whole, a, b)
        rows = [np.unique(x) for x in (a, b)]
        at = [np.searchsorted(r, x) for r, x in zip(rows, (a, b), strict=True)]
        ids = by_name(*rows)
        compact = osa.take_rows(tx, *stored, ids)
        *compact, _ = step(*compact, *at)
        result = osa.put_rows(tx, *stored, ids, *compact)
        if kind != "jax":
            for x, y in zip(*map(jax.tree.leaves, (stored, result)), strict=True):
                assert x is y
        stored = result
    assert_equal(tuple(stored), tuple(whole))


@pytest.mark.parametrize("name", slow_but(TRANSFORMATIONS, "sparse_adam"))
def test_with_repeated_and_padding_ids(name):
    """Sums of duplicates are in another order: equal to rounding."""
    tx = TRANSFORMATIONS[name](0.1)
    step = make_step(tx)
    whole = begin(tx)
    stored = stored_in("numpy", whole, None)
    for number, (a, b) in enumerate(batches(12, repeats=True)):
        *whole, _ = step(*whole, a, b)
        # As many slots in each step, so that nothing is compiled again. In NumPy's own
        # arithmetic -1 is the last row: as an id it is padding, too.
        found = [np.unique(x, return_inverse=True) for x in (a, b)]
        each = zip(found, ROWS.values(), strict=True)
        padded = [(r, n if number % 2 else -1) for (r, _), n in each]
        rows = [np.pad(r, (0, 12 - len(r)), constant_values=x) for r, x in padded]
        ids = by_name(*rows)
        compact = osa.take_rows(tx, *stored, ids)
        *compact, _ = step(*compact, *(at for _, at in found))
        stored = osa.put_rows(tx, *stored, ids, *compact)
    assert_equal(tuple(stored), tuple(whole), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", slow_but(EVERY, "sparse_adam", "exact_adamw", "dense"))
def test_put_of_take_is_the_identity(name):
    tx = EVERY[name](0.1)
    params, state = begin(tx)
    ids = by_name(np.array([7, 49, 50, -1, 0, 2**31 - 1]))

    @jax.jit
    def there_and_back(*whole):
        return osa.put_rows(tx, *whole, ids, *osa.take_rows(tx, *whole, ids))

    assert_equal(there_and_back(params, state), (params, state))


CLONED = "sparse_adam", "exact_adam", "exact_adamw"


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(CLONED, "sparse_adam", "exact_adamw"))
def test_a_clone_stays_one(name):
    """It has its origin's values, now and after steps of other rows and of both."""
    tx = TRANSFORMATIONS[name](0.1)
    step = make_step(tx)
    params, state = begin(tx)
    for a, b in batches(3):
        params, state, _ = step(params, state, a, b)
    origins, places = np.array([3, 11]), np.array([20, 21])

    @jax.jit
    def clone(*whole):
        taken = osa.take_rows(tx, *whole, by_name(origins))
        return osa.put_rows(tx, *whole, by_name(places), *taken)

    @jax.jit
    def rows_of_a(params, state):
        read = state_to_read(name, state)
        return osa.evaluate(lambda p: p["a"], read=read)(params)

    params, state = clone(params, state)
    # Each step has both or none, and as many ids as the first ones.
    both = np.array([3, 11, 20, 21, *[5] * 8]), np.array([1, 2, 1, 2, *[3] * 8])
    none = np.array([5, 6] * 6), np.array([3] * 12)
    for _ in range(4):
        rows = np.asarray(rows_of_a(params, state))
        np.testing.assert_array_equal(rows[places], rows[origins])
        for ids in (both, none):
            params, state, _ = step(params, state, *ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "numpy"])
@jax.enable_x64(True)
def test_rows_that_begin_again_are_those_of_dense_adamw(kind):
    """optax.adamw, whose rows and moments are set by hand; decay goes on from there."""
    rate, decay = 0.05, 0.3
    tx = osa.exact_adamw(rate, weight_decay=decay)
    dense = optax.adamw(rate, weight_decay=decay)
    step = make_step(tx)
    params, state = begin(tx, "float64")
    expected, (adam, *rest) = begin(dense, "float64")
    given, new = jnp.array([4, 50, 9]), jnp.full((3, 4), 0.5)

    @jax.jit
    def dense_step(params, state, a, b):
        updates, state = dense.update(jax.grad(loss)(params, a, b), state, params)
        return optax.apply_updates(params, updates), state

    for number, (a, b) in enumerate(batches(9)):
        if number == 4:
            stored = stored_in(kind, (params, state), None)
            reset = functools.partial(osa.reset_rows, tx)
            reset = jax.jit(reset) if kind == "jax" else reset
            params, state = reset(*stored, by_name(given), by_name(new))
            evaluate = osa.evaluate(lambda p: p["a"][given[:2]], read=state)
            np.testing.assert_allclose(jax.jit(evaluate)(params)[0], new[0], rtol=1e-12)
            params, state = jax.tree.map(jnp.asarray, (params, state))
            at = given[jnp.array([0, 2])]
            expected["a"] = expected["a"].at[at].set(new[0])
            zero = {"mu": adam.mu, "nu": adam.nu}
            zero = {k: x | {"a": x["a"].at[at].set(0)} for k, x in zero.items()}
            adam = adam._replace(**zero)
        params, state, _ = step(params, state, a, b)
        expected, (adam, *rest) = dense_step(expected, (adam, *rest), a, b)
    values, _ = jax.jit(osa.flush)(params, state)
    for name in values:
        np.testing.assert_allclose(values[name], expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", slow_but(EVERY, "exact_adamw"))
def test_rows_begin_again_with_the_state_of_init(name):
    tx = EVERY[name](0.1)
    step = make_step(tx, sparse=None if name != "dense" else False)
    params, state = begin(tx)
    for a, b in batches(3):
        params, state, _ = step(params, state, a, b)
    ids, rows = by_name(np.array([3, 8])), by_name(jnp.full((2, 4), 2.0))
    news = jax.jit(functools.partial(osa.reset_rows, tx))(params, state, ids, rows)
    fresh = {name: x if name != "a" else x.at[:].set(2.0) for name, x in params.items()}
    olds, expected = (params, state), (fresh, tx.init(fresh))
    sizes = tx.init(fresh | {"a": jnp.ones((51, 4))})
    has_rows = jax.tree.map(lambda x, y: x.shape != y.shape, expected[1], sizes)

    def check(is_table, new, old, begun):
        if not is_table:
            np.testing.assert_array_equal(new, old)
            return
        others = np.delete(np.arange(len(new)), ids["a"])
        np.testing.assert_array_equal(new[others], old[others])
        if "exact" not in name and name not in ("partition", "chain"):  # dated
            np.testing.assert_array_equal(new[ids["a"]], begun[ids["a"]])

    jax.tree.map(check, has_rows, news[1], olds[1], expected[1])
    check(True, news[0]["a"], params["a"], fresh["a"])
    np.testing.assert_array_equal(news[0]["b"], params["b"])


@pytest.mark.parametrize(
    "name", slow_but(["sparse_adam", "exact_adamw"], "sparse_adam")
)
def test_nothing_of_the_tables_size(name):
    """Take, put, clone and reset in a donated program, at two heights."""
    tx = TRANSFORMATIONS[name](0.1)

    def all_of_them(params, state, ids, places):
        taken = osa.take_rows(tx, params, state, ids)
        params, state = osa.put_rows(tx, params, state, places, *taken)
        # As in a split: new values are computed from all that is known of old rows.
        read = state_to_read(name, state)
        rows = osa.evaluate(lambda table: table[ids] + 1, read=read)(params)
        return osa.reset_rows(tx, params, state, ids + 1, rows)

    def temporary(rows):
        table = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((100,), jnp.int32)
        args = table, jax.eval_shape(tx.init, table), ids, ids
        program = jax.jit(all_of_them, donate_argnums=(0, 1)).lower(*args).compile()
        memory = program.memory_analysis()
        made = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return made, memory.temp_size_in_bytes

    small, large = map(temporary, (200_000, 2_000_000))
    assert small == large
    assert sum(small) < 20 * 100 * 8 * 4


def test_ids_for_a_subtree():
    tx = osa.sparse_adam(0.1)
    params = {
        "points": {"mean": jnp.ones((9, 2)), "scale": jnp.ones(9)},
        "w": jnp.ones(3),
    }
    ids = {"points": np.array([2, 5]), "w": None}
    rows, state = osa.take_rows(tx, params, tx.init(params), ids)
    assert jax.tree.map(jnp.shape, rows) == {
        "points": {"mean": (2, 2), "scale": (2,)},
        "w": (3,),
    }
    assert jax.tree.map(jnp.shape, state.mu) == jax.tree.map(jnp.shape, rows)


def test_rows_of_a_dense_gradient():
    """One step of the rows that are named, and the bits of all others."""
    tx = osa.sparse_adam(0.1)
    table = jnp.arange(20.0).reshape(10, 2)
    mask = jnp.arange(10) % 3 == 1  # rows 1, 4, 7

    @jax.jit
    def step(table, state):
        grad = jax.grad(lambda t: jnp.sum(jnp.where(mask[:, None], t, 0) ** 2))(table)
        ids = jnp.nonzero(mask, size=5, fill_value=len(mask))[0]
        updates, state = tx.update(osa.rows_of(grad, ids), state, table)
        return osa.apply_updates(table, updates), state

    new, state = step(table, tx.init(table))
    expected = np.array(table)
    expected[[1, 4, 7]] -= 0.1  # the first step of Adam
    np.testing.assert_allclose(new, expected, rtol=1e-6)
    np.testing.assert_array_equal(new[~mask], table[~mask])
    assert np.count_nonzero(np.asarray(state.nu).any(axis=1)) == 3


def test_a_tree_of_dense_gradients():
    grads = {"a": np.ones((4, 2), np.float32), "w": jnp.ones(3), "none": None}
    found = osa.rows_of(grads, {"a": np.array([3, 9, 9]), "w": None, "none": None})
    assert found["w"] is grads["w"]
    assert found["a"].unique_indices
    np.testing.assert_array_equal(found["a"].todense(), np.eye(4)[3][:, None] * [1, 1])


TABLE, IDS = jnp.ones((10, 4)), np.array([1, 2])
SPARSE = osa.sparse_adam(0.1)


def take(params=TABLE, ids=IDS, tx=SPARSE, state=None):
    return osa.take_rows(tx, params, tx.init(params) if state is None else state, ids)


def put(ids=IDS, rows=None, **changes):
    taken = take(ids=IDS)
    rows = taken[0] if rows is None else rows
    return osa.put_rows(SPARSE, TABLE, SPARSE.init(TABLE), ids, rows, taken[1])


WRONG = {
    "floats": (lambda: take(ids=np.ones(2)), TypeError, "integer ids, got float32"),
    "a mask": (lambda: take(ids=np.ones(10, bool)), TypeError, "jnp.nonzero"),
    "masked ids": (lambda: take(ids=np.ma.array(IDS)), TypeError, "got a masked one"),
    "masked rows": (
        lambda: put(rows=np.ma.ones((2, 4), np.float32)),
        TypeError,
        "put_rows takes plain arrays",
    ),
    "two axes": (lambda: take(ids=IDS[None]), ValueError, "of one axis"),
    "a scalar": (lambda: take(params=jnp.ones([])), ValueError, "scalar the table"),
    "a list": (lambda: take(ids=[1, 2]), ValueError, "prefix of the parameters"),
    "no prefix": (lambda: take(ids={"a": IDS}), ValueError, "prefix of the parameters"),
    "another state": (
        lambda: take(state=optax.adam(0.1).init(TABLE)),
        ValueError,
        "the state that tx.init makes",
    ),
    "another height": (
        lambda: take(state=SPARSE.init(TABLE[:9])),
        ValueError,
        r"\(10, 4\).*got.*\(9, 4\)",
    ),
    "rows along another axis": (
        lambda: take(tx=optax.GradientTransformation(lambda p: p.T, SPARSE.update)),
        ValueError,
        "take_rows needs a state whose arrays hold the rows",
    ),
    "repeated": (lambda: put(ids=np.array([3, 3])), ValueError, "got row 3"),
    "width": (lambda: put(rows=jnp.ones((2, 5))), ValueError, r"shape \(2, 4\), got"),
    "number": (lambda: put(ids=np.arange(3)), ValueError, "for each of the 3 ids"),
    "type": (lambda: put(rows=jnp.ones((2, 4), int)), TypeError, "float32 for the tab"),
    "tree": (lambda: put(rows=(1, 2)), ValueError, "The rows must have the tree"),
    "repeated in rows_of": (
        lambda: osa.rows_of(TABLE, np.array([0, 0])),
        ValueError,
        "rows_of needs ids that name each row once",
    ),
    "traced for NumPy": (
        lambda: jax.jit(lambda i: take(params=np.ones((10, 4), np.float32), ids=i))(
            IDS
        ),
        TypeError,
        "outside of jit",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    call, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        call()


def test_repeated_padding_is_no_error():
    put(ids=np.array([10, 10]))
    put(ids=np.array([-1, -1]))


def test_a_fault_is_found_before_anything_is_written():
    params = {"a": np.ones((10, 4), np.float32), "w": np.ones(4, np.float32)}
    state = jax.tree.map(np.array, SPARSE.init(params))
    ids = {"a": IDS, "w": None}
    rows, row_state = osa.take_rows(SPARSE, params, state, ids)
    rows = jax.tree.map(lambda x: x + 1, rows)
    for wrong, words in (
        (rows | {"w": np.ones(1, np.float32)}, "whole"),  # NumPy would broadcast it
        (rows | {"a": rows["a"][:1]}, "for each of the 2 ids"),
    ):
        with pytest.raises(ValueError, match=words):
            osa.put_rows(SPARSE, params, state, ids, wrong, row_state)
    assert np.all(params["a"] == 1)
    assert np.all(params["w"] == 1)


def test_repeated_in_the_larger_of_two_tables():
    params = {"a": jnp.ones((20, 2)), "b": jnp.ones((10, 2))}
    with pytest.raises(ValueError, match="got row 15"):  # padding in the smaller one
        osa.rows_of(params, np.array([15, 15]))


def test_float64_of_numpy_without_64_bit_types():
    table = np.arange(8.0).reshape(4, 2)
    state = jax.tree.map(np.array, SPARSE.init(jnp.asarray(table)))
    rows = osa.take_rows(SPARSE, table, state, IDS)
    new, _ = osa.put_rows(SPARSE, table, state, IDS, *rows)
    np.testing.assert_array_equal(new, np.arange(8.0).reshape(4, 2))


@pytest.mark.parametrize("size", slow_but([1, 3], 3))
def test_a_count_that_begins_again_is_no_clock(size):
    """As that of `reduce_on_plateau`, where nothing else counts."""

    def loss(params, ids):
        return jnp.mean((params["table"][ids] @ params["w"] - 1) ** 2)

    plateau = optax.contrib.reduce_on_plateau(accumulation_size=size)
    tx = osa.lazy(optax.chain(optax.sgd(0.1, momentum=0.9), plateau))
    params, ids = {"table": jnp.ones((10, 2)), "w": jnp.ones(2)}, np.array([3, 7])
    step, where = osa.make_train_step(loss, tx), {"table": ids, "w": None}
    whole, by_rows = (jax.tree.map(jnp.copy, (params, tx.init(params))) for _ in "ab")
    for _ in range(5):
        *whole, _ = step(*whole, jnp.asarray(ids))
        rows = osa.take_rows(tx, *by_rows, where)
        *rows, _ = step(*rows, jnp.array([0, 1]))
        by_rows = osa.put_rows(tx, *by_rows, where, *rows)
    for x, y in zip(*map(jax.tree.leaves, (whole, by_rows)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)  # of another shape, fused otherwise


def test_arguments_of_other_places():
    tx, params = osa.exact_adam(0.1), {"table": jnp.ones((9, 4)), "w": jnp.ones(4)}
    state, ids = tx.init(params), {"table": np.array([3, 7]), "w": None}
    for swapped in osa.flush, jax.jit(osa.flush):
        with pytest.raises(ValueError, match=r"flush.*Pass the parameters first"):
            swapped(state, params)
    for rows in jnp.ones((2, 4)), {"table": jnp.ones((2, 4))}, (jnp.ones((2, 4)), None):
        with pytest.raises(ValueError, match="The rows must have the tree structure"):
            osa.reset_rows(tx, params, state, ids, rows)
