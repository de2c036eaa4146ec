"""Rows that are frozen stay as they are, under every optimiser, whenever it begins."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.optimizers import FINAL, OPTIMIZERS
from ..helpers.support import assert_close, need_devices, slow_but, to_dense

pytestmark = pytest.mark.usefixtures("as_optax_expects")

ROWS = np.array([2, 5, 6, 9])  # 9 is a new one, behind the frozen table
NUM_ROWS, WIDTH, RATE = 8, 3, 0.1
BATCHES = np.random.default_rng(1).integers(-1, 10, size=(6, 5))


def frozen_table():
    values = np.random.default_rng(0).normal(size=(NUM_ROWS, WIDTH))
    return jnp.asarray(values, jnp.float32)


def trained_rows(seed=2):
    values = np.random.default_rng(seed).normal(size=(len(ROWS), WIDTH))
    return jnp.asarray(values, jnp.float32)


def of_rows(looked_up, w):
    return jnp.sum(jnp.sin(looked_up) @ w) + jnp.sum(looked_up[::-1] ** 2 * looked_up)


def loss(params, frozen, ids):
    looked_up = osa.frozen_lookup(params["table"], ids, frozen=frozen, rows=ROWS)
    return of_rows(looked_up, params["w"])


def loss_by_hand(params, frozen, ids):
    """Of a table with its trained rows in it; what is differentiated is these only."""
    whole = jnp.zeros((10, WIDTH)).at[: len(frozen)].set(frozen)
    whole = whole.at[ROWS].set(params["table"])
    is_new = jnp.any(ids[:, None] == ROWS[None], axis=1)
    is_padding = ~is_new & ((ids < 0) | (ids >= len(frozen)))
    return of_rows(jnp.where(is_padding[:, None], 0, whole[ids]), params["w"])


IDS = {
    "one id": np.int32(5),
    "matrix": np.array([[1, 2, 9], [5, 8, -1]]),
    "out of bounds": np.array([9, 10, 2**31 - 1, -(2**31)]),
    "64 bits": np.array([2**32 + 2, 2, -(2**40), 2**62 + 5]),
    "unsigned": np.array([2, 7, 2**64 - 1], np.uint64),
    "bytes": np.array([2, 7, 255], np.uint8),
    "none": np.zeros([0], np.int32),
}


@pytest.mark.parametrize("name", slow_but(IDS, "matrix", "64 bits"))
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "bfloat16"))
def test_values(name, dtype):
    ids, trained = IDS[name], trained_rows()
    frozen = frozen_table().astype(dtype)
    table = dict(enumerate(np.asarray(frozen, np.float32)))
    table |= dict(zip(ROWS.tolist(), np.asarray(trained), strict=True))
    zeros = np.zeros(WIDTH, np.float32)
    flat = [table.get(int(i), zeros) for i in np.ravel(ids)]
    expected = np.reshape(flat, (*np.shape(ids), WIDTH))
    found = osa.frozen_lookup(trained, ids, frozen=frozen, rows=ROWS)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.float32
    if np.asarray(ids).dtype.itemsize < 8:  # JAX itself wraps others
        found = jax.jit(osa.frozen_lookup)(trained, ids, frozen=frozen, rows=ROWS)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("sparse", slow_but([None, True], True))
def test_gradient(sparse):
    """Row-sparse, of trained rows only; frozen ids are padding in it."""
    params = {"table": trained_rows(), "w": jnp.ones(WIDTH)}
    frozen, ids = frozen_table(), jnp.asarray(BATCHES[0])
    only_table = {"table": True, "w": False} if sparse else None
    both = osa.value_and_grad(loss, sparse=only_table)
    value, grads = jax.jit(both)(params, frozen, ids)
    expected = jax.jit(jax.value_and_grad(loss_by_hand))(params, frozen, ids)
    assert grads["table"].nse == len(ROWS)  # at most: duplicates are added up
    assert_close(value, expected[0], 1e-6, magnitude=10.0)
    assert_close(to_dense(grads["table"]), expected[1]["table"], 1e-5, magnitude=10.0)
    touched = {int(i) for i in osa.coalesce(grads["table"]).indices.ravel()} & {
        *range(4)
    }
    assert touched == {i for i, row in enumerate(ROWS) if row in BATCHES[0]}
    # Also where the frozen table is differentiated, which holds nothing then.
    grad = jax.jit(osa.grad(lambda f: loss(params, f, ids)))(frozen)
    assert grad.nse == 0


def dense_of(name):
    decay = {"weight_decay": 0.1} if name == "exact_adamw" else {}
    return (optax.adamw if decay else optax.adam)(RATE, **decay)


def run(tx, params, state, frozen, batches):
    """By whole steps; the rows of exact Adam stay stale."""
    step = osa.make_train_step(loss, tx)
    for ids in batches:
        params, state, _ = step(params, state, frozen, jnp.asarray(ids))
    return params, state


# With the kernel, those that use it.
WITH_KERNEL = ("sparse_adam", "rowwise_adam", "rowwise_adagrad", "exact_adamw")
TWICE = [(name, "plain") for name in OPTIMIZERS if name not in WITH_KERNEL[1:]]
TWICE += [(name, "kernel") for name in WITH_KERNEL]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(TWICE, ("sparse_adam", "kernel")),
    indirect=["backend"],
)
def test_from_the_start(name, backend):
    """The numbers of the optimiser, or of dense Adam, on the table of trained rows."""
    params = {"table": trained_rows(), "w": jnp.ones(WIDTH)}
    tx, frozen = OPTIMIZERS[name].make(RATE), frozen_table()
    before = np.array(frozen)
    ours, state = run(
        tx, jax.tree.map(jnp.copy, params), tx.init(params), frozen, BATCHES
    )
    rows = {x.shape[0] for x in jax.tree.leaves(state) if x.shape[1:] == (WIDTH,)}
    assert rows <= {len(ROWS)}
    ours, state = osa.flush(ours, state)
    wanted = lazily(tx, name, params, frozen, BATCHES)[0]
    for key in params:
        assert_close(ours[key], wanted[key], 2e-5, magnitude=1.0, what=key)
    np.testing.assert_array_equal(frozen, before)
    seen = osa.evaluate(
        lambda p: osa.frozen_lookup(
            p["table"], jnp.arange(8), frozen=frozen, rows=ROWS
        ),
        read=state,
    )(ours)
    others = np.setdiff1d(np.arange(8), ROWS)
    np.testing.assert_array_equal(seen[others], before[others])
    np.testing.assert_array_equal(seen[ROWS[:3]], ours["table"][:3])


def lazily(tx, name, params, frozen, batches, state=None):
    """By steps whose gradients are made by hand, with the dense twin of exact Adam."""
    if name not in FINAL:
        tx = dense_of(name)
    state = tx.init(params) if state is None else state

    @jax.jit
    def step(params, state, ids):
        grads = jax.grad(loss_by_hand)(params, frozen, ids)
        if name in FINAL:
            is_used = jnp.any(ids[:, None] == ROWS[None], axis=0)
            at = jnp.where(is_used, jnp.arange(len(ROWS)), len(ROWS))
            grads = osa.rows_of(grads, {"table": at, "w": None})
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    for ids in batches:
        params, state = step(params, state, jnp.asarray(ids))
    return params, state


OTHERS = np.setdiff1d(np.arange(10), ROWS)
TABLE_ROWS = {"table": ROWS, "w": None}


def loss_of_all(params, ids):
    return of_rows(params["table"].at[ids].get(mode="fill", fill_value=0), params["w"])


def by_hand(params, state, change):
    """Both with the table, and that of each moment, that `change` makes."""

    def changed(tree):
        return tree | {"table": change(tree["table"])}

    adam = state[0]._replace(mu=changed(state[0].mu), nu=changed(state[0].nu))
    return changed(params), (adam, *state[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), TWICE, indirect=["backend"])
def test_in_mid_run_and_back(name, backend):
    """Frozen after some steps, and trained again later; at each time by hand as well.

    Rows that were frozen begin again with new moments.
    """
    tx = OPTIMIZERS[name].make(RATE)
    twin = tx if name in FINAL else dense_of(name)
    whole = jnp.zeros((10, WIDTH)).at[:NUM_ROWS].set(frozen_table())
    start = {"table": whole.at[8:].set(trained_rows()[:2]), "w": jnp.ones(WIDTH)}
    batches = [jnp.asarray(ids) for ids in np.clip(BATCHES, 0, None)]
    ours = jax.tree.map(jnp.copy, start)
    step, state = osa.make_train_step(loss_of_all, tx), tx.init(ours)
    for ids in batches:
        ours, state, _ = step(ours, state, ids)
    dense, dense_state = jax.tree.map(jnp.copy, start), twin.init(start)
    dense_step = osa.make_train_step(loss_of_all, twin, sparse=name in FINAL and None)
    for ids in batches:
        dense, dense_state, _ = dense_step(dense, dense_state, ids)

    # Freeze: what is trained is taken out, the others are the values of now.
    ours, state = osa.flush(ours, state)
    frozen, before = ours["table"], np.array(ours["table"])
    small, small_state = osa.take_rows(tx, ours, state, TABLE_ROWS)
    small, small_state = run(tx, small, small_state, frozen, BATCHES)
    if name in FINAL:
        own = osa.take_rows(tx, dense, dense_state, TABLE_ROWS)
    else:
        own = by_hand(dense, dense_state, lambda x: x[ROWS])
    own = lazily(tx, name, own[0], dense["table"], BATCHES, own[1])
    now, _ = osa.flush(small, small_state)
    for key in now:
        assert_close(now[key], own[0][key], 5e-5, magnitude=1.0, what=key)
    np.testing.assert_array_equal(frozen, before)

    # Train them all again.
    ours = {"table": frozen, "w": small["w"]}
    ours, state = osa.put_rows(tx, ours, tx.init(ours), TABLE_ROWS, small, small_state)
    others = {"table": OTHERS, "w": None}
    rows = {"table": before[OTHERS], "w": None}
    ours, state = osa.reset_rows(tx, ours, state, others, rows)
    held, _ = osa.flush(ours, state)
    np.testing.assert_array_equal(held["table"][OTHERS], before[OTHERS])
    assert_close(held["table"][ROWS], own[0]["table"], 5e-5, magnitude=1.0)
    ids = jnp.array([0, 2, 2, 9])
    for _ in range(4):
        ours, state, _ = step(ours, state, ids)
    ours, _ = osa.flush(ours, state)
    untouched = np.setdiff1d(OTHERS, [0])
    if name in FINAL:
        np.testing.assert_array_equal(ours["table"][untouched], before[untouched])
        return
    full = by_hand(
        {"table": own[0]["table"], "w": own[0]["w"]},
        own[1],
        lambda x: jnp.zeros((10, WIDTH)).at[ROWS].set(x),
    )
    table = dense["table"].at[ROWS].set(own[0]["table"])
    dense, dense_state = full[0] | {"table": table}, full[1]
    for _ in range(4):
        dense, dense_state, _ = dense_step(dense, dense_state, ids)
    assert_close(ours["table"], dense["table"], 1e-4, magnitude=1.0)


@pytest.mark.parametrize("is_last", slow_but([False, True], False))
def test_all_or_none_are_frozen(is_last):
    """A table without trained rows, and one whose rows are all trained."""
    rows = np.arange(NUM_ROWS) if is_last else np.zeros([0], int)
    frozen, ids = frozen_table(), jnp.array([3, 1, 3])
    trained = jnp.ones((len(rows), WIDTH))

    def loss(trained, frozen):
        looked_up = osa.frozen_lookup(trained, ids, frozen=frozen, rows=rows)
        return jnp.sum(looked_up**2), looked_up

    (_, found), _ = osa.value_and_grad(loss, has_aux=True)(trained, frozen)
    expected = jnp.ones((3, WIDTH)) if is_last else frozen[ids]
    np.testing.assert_array_equal(found, expected)
    tx = osa.exact_adamw(RATE, weight_decay=0.1)
    if is_last:
        read = osa.grad(lambda t: loss(t, frozen)[0], read=tx.init(trained))
        update, _ = tx.update(read(trained), tx.init(trained), trained)
        assert not np.array_equal(osa.apply_updates(trained, update), trained)


SPECS = [P(), P("x"), P(None, "y"), P("x", "y")]


OF_IDS = [P(), P("x"), P("y"), P("x", "y")]
# Each table with each ids, eagerly and under jit in turns.
LAID_OUT = [
    (table, ids, ("jit", "eager")[(i + j) % 2])
    for i, table in enumerate(SPECS)
    for j, ids in enumerate(OF_IDS)
]


@pytest.mark.parametrize(
    ("of_table", "of_ids", "way"),
    slow_but(LAID_OUT, LAID_OUT[0], LAID_OUT[-1]),
    ids=str,
)
def test_over_explicit_axes(of_table, of_ids, way):
    """The result lies as the ids do, and along columns as the trained table."""
    way = jax.jit if way == "jit" else lambda f: f
    need_devices(8)
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, 12, (8, 2))
    trained, frozen = rng.integers(1, 9, (4, 4)), rng.integers(1, 9, (NUM_ROWS, 4))
    args = trained.astype(np.float32), frozen.astype(np.float32), ids

    def look_up(trained, frozen, ids):
        return osa.frozen_lookup(trained, ids, frozen=frozen, rows=ROWS)

    def loss(*args):
        return jnp.sum(look_up(*args) ** 2)

    expected, gradient = jax.jit(look_up)(*args), jax.jit(osa.grad(loss))(*args)
    specs = of_table, of_table, of_ids
    with jax.set_mesh(mesh):
        put = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        found = way(look_up)(*put)
        rows, second = (*of_ids, None, None)[:2]
        column = None if "y" in of_ids else (*of_table, None, None)[1]
        assert found.sharding.spec == P(rows, second, column)
        np.testing.assert_array_equal(found, expected)
        grad = way(osa.grad(loss))(*put)
        np.testing.assert_array_equal(to_dense(grad), to_dense(gradient))


def test_rows_that_are_not_in_order():
    trained, frozen, ids = jnp.ones((2, 3)), jnp.zeros((5, 3)), jnp.arange(3)

    def look_up(rows):
        return osa.frozen_lookup(trained, ids, frozen=frozen, rows=rows)

    assert not np.isnan(jax.jit(look_up)(jnp.array([1, 2]))).any()
    for rows in ([2, 1], [2, 2], [-1, 2]):
        with pytest.raises(ValueError, match="`rows` in ascending order"):
            look_up(np.array(rows))
        assert np.isnan(jax.jit(look_up)(jnp.array(rows))).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ids": jnp.ones(3)}, TypeError, "`ids` that are integers, got float32"),
        ({"rows": jnp.ones(2, bool)}, TypeError, "`rows` that are integers.*np.flat"),
        ({"ids": np.ma.arange(3)}, TypeError, "frozen_lookup takes plain arrays"),
        ({"rows": jnp.arange(3)}, ValueError, r"shape \(3,\) for a table"),
        ({"frozen": jnp.ones((5, 2))}, ValueError, "rows have one shape"),
        ({"frozen": jnp.ones((5, 3), int)}, TypeError, "floating point, got int32"),
        ({"trained": jnp.ones(())}, ValueError, "rows have one shape"),
    ],
)
def test_refused(change, error, words):
    arguments = {
        "trained": jnp.ones((2, 3)),
        "ids": jnp.arange(3),
        "frozen": jnp.ones((5, 3)),
        "rows": np.array([1, 4]),
    }
    with pytest.raises(error, match=words):
        osa.frozen_lookup(**arguments | change)


TRAINED = {"table": "trained", "frozen": "frozen", "w": "trained"}
IS_FROZEN = jax.tree.map(lambda label: label == "frozen", TRAINED)


def of_parts(tx):
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, TRAINED)


def selective(tx):
    return optax.transforms.selective_transform(tx, freeze_mask=IS_FROZEN)


def one_after_the_other(tx):
    is_trained = jax.tree.map(lambda x: not x, IS_FROZEN)
    zero = optax.masked(optax.set_to_zero(), IS_FROZEN)
    return optax.chain(zero, optax.masked(tx, is_trained))


# Each optimiser with each gradient, and in each way.
GRADIENTS = ("none", "zeros", "its own")
FREEZING = (of_parts, selective, one_after_the_other)
WHOLE = [
    (name, gradient, FREEZING[(number + other) % 3])
    for number, name in enumerate(OPTIMIZERS)
    for other, gradient in enumerate(GRADIENTS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gradient", "way"), WHOLE)
def test_a_whole_table(way, name, gradient):
    """Frozen by optax: bit for bit, in steps, when it is read, and by `flush`."""
    tx = way(OPTIMIZERS[name].make(RATE))
    params = {"frozen": frozen_table(), "table": trained_rows(), "w": jnp.ones(WIDTH)}
    before, state = np.array(params["frozen"]), tx.init(params)
    shapes = [np.shape(x) for x in jax.tree.leaves(state)]
    assert (NUM_ROWS, WIDTH) not in shapes

    def loss_of_tables(params, ids):
        table = params["frozen"]
        if gradient != "its own":
            table = jax.lax.stop_gradient(table)
        return of_rows(table[ids] * params["table"][ids % 4], params["w"])

    @jax.jit
    def step(params, state, ids):
        grads = osa.grad(loss_of_tables, read=state)(params, ids)
        if gradient == "none":
            grads = grads | {"frozen": None}
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    for ids in jnp.asarray(BATCHES % NUM_ROWS):
        params, state = step(params, state, ids)
    seen = osa.evaluate(lambda p: p["frozen"][jnp.arange(8)], read=state)(params)
    for table in (params["frozen"], seen, osa.flush(params, state)[0]["frozen"]):
        np.testing.assert_array_equal(table, before)
    assert not np.array_equal(params["table"], trained_rows())
