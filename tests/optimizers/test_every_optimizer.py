"""What all optimisers do to the rows that a batch touches, and to all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.identity import assert_identity, make_task, train
from ..helpers.optimizers import FINAL, OPTIMIZERS
from ..helpers.support import (
    TOLERANCE,
    WEEKLY,
    assert_identical,
    bcoo,
    random_entries,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPES = [(13,), (13, 5), (13, 2, 5), (13, 2, 3, 5)]
SOME, ALL = (2, 5, 7, 11), range(13)
CASES = [(shape, rows) for shape in SHAPES for rows in (SOME, ALL)]


@pytest.mark.parametrize(
    ("shape", "rows"), slow_but(CASES, ((13, 2, 5), SOME)), ids=str
)
@pytest.mark.parametrize("name", slow_but(FINAL, "lazy", "rowwise_adam"))
def test_touched_rows_are_a_table(name, shape, rows):
    """With all rows touched: row-sparse gradients do what dense ones do."""
    tx = FINAL[name].make(0.1)
    with jax.enable_x64():
        task = make_task(rows, shape)
        # optax adds up norms in another order.
        tol = 10 * TOLERANCE["float64"].numpy
        assert_identity(tx, tx, task, tol)


@pytest.mark.parametrize("nse", slow_but([0, 3], 3))
@pytest.mark.parametrize("name", slow_but(FINAL, "sparse_adafactor"))
def test_nothing_touched(name, nse):
    """Only counts move on, whatever the values of padding are."""
    shape, rng, tx = (9, 4), np.random.default_rng(0), FINAL[name].make(0.1)
    grad = bcoo(*random_entries(rng, shape, 1, 6), shape)
    table, state = train(tx, jnp.ones(shape), [grad])
    nothing = np.full((nse, 4), np.nan, np.float32), np.full((nse, 1), 9, np.int32)
    for empty in (bcoo(*nothing, shape), None):
        updates, new = jax.jit(tx.update)(empty, state, table)
        assert_identical(osa.apply_updates(table, updates), table)
        for a, b in zip(*map(jax.tree.leaves, (new, state)), strict=True):
            if a.ndim:
                assert_identical(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_parameter(name):
    """As of a label of optax.partition that no leaf has."""
    tx = OPTIMIZERS[name].make(0.1)
    state = jax.eval_shape(tx.init, {})
    assert jax.eval_shape(tx.update, {}, state, {}) == ({}, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", FINAL)
def test_a_table_that_grows(name):
    """The old rows go on as if nothing had happened, the new ones start."""
    tx = FINAL[name].make(0.1)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(9, 4)), jnp.float32)

    @jax.jit
    def step(table, state, ids):
        grad = osa.grad(lambda table: jnp.sum(jnp.sin(table[ids])))(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    table, state = step(table, tx.init(table), jnp.array([3, 7, 3]))
    grown = jnp.concatenate([table, jnp.ones((2, 4))])
    new_state = jax.tree.map(
        lambda new, old: old if new.shape == old.shape else new.at[: len(old)].set(old),
        tx.init(grown),
        state,
    )
    with pytest.raises(ValueError, match="shape"):
        step(grown, state, jnp.array([3, 8]))
    expected, _ = step(table, state, jnp.array([3, 8]))
    actual, new_state = step(grown, new_state, jnp.array([3, 8]))
    assert_identical(actual[: len(table)], expected)
    actual, _ = step(actual, new_state, jnp.array([10]))
    assert_identical(actual[:-1], jnp.concatenate([expected, jnp.ones((1, 4))]))
    assert jnp.all(actual[-1] < 1)


@pytest.mark.parametrize(
    "name", slow_but(sorted({*FINAL} - {"per_row"}), "rowwise_adagrad")
)
def test_sparse_axes(name):
    """The rows of two axes are those of one axis with their numbers."""
    shape, flat = (4, 3, 2, 5), (12, 2, 5)
    rng, tx = np.random.default_rng(0), FINAL[name].make(0.1)
    values, indices = random_entries(rng, shape, 2, 7, outside=True)
    inside = np.all((indices >= 0) & (indices < shape[:2]), axis=1)
    ids = np.where(inside, indices @ np.array([3, 1]), -1).astype(np.int32)[:, None]
    table = jnp.asarray(rng.normal(size=shape), jnp.float32)
    actual = train(tx, table, [bcoo(values, indices, shape)] * 2)
    expected = train(tx, table.reshape(flat), [bcoo(values, ids, flat)] * 2)
    actual = jax.tree.map(lambda a, e: a.reshape(e.shape), actual, expected)
    assert_identical(actual, expected)


TURNS = [(x, ("plain", "kernel")[i % 2]) for i, x in enumerate(OPTIMIZERS)]
TURNS = [x for x in TURNS if WEEKLY or x[0] in ("sparse_adafactor", "exact_adamw")]


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but([*TURNS, ("lazy", "plain")]),
    indirect=["backend"],
)
def test_no_tracer_outlives_its_trace(name, backend):
    """Which JAX keeps with a program, if a function of it holds one."""
    params, ids = {"table": jnp.ones((11, 3)), "w": jnp.ones(3)}, jnp.array([3, 7, 3])
    tx = OPTIMIZERS[name].make(0.1)
    step = osa.make_train_step(lambda p, i: jnp.sum(p["table"][i] @ p["w"]), tx)
    with jax.checking_leaks():
        step.trace(params, tx.init(params), ids)


def row_of(*shape):
    return bcoo(np.ones((1, *shape[1:]), np.float32), np.zeros((1, 1), np.int32), shape)


WRONG = {
    "height": ({"in": {"table": row_of(8, 4)}}, ValueError, "must have the shape"),
    "indices": (
        {"in": {"table": jax.tree.map(jnp.float32, row_of(9, 4))}},
        TypeError,
        r"inside lazy: optax_sparse_adam\.lazy",
    ),
    # A model of Flax or Haiku keeps its table in a tree of its own.
    "rows for a subtree": (
        {"in": row_of(9, 4)},
        ValueError,
        "tree structure .* one leaf should",
    ),
    "None for a subtree": ({"in": None}, ValueError, "structure .* one leaf should"),
    "a part": ({}, ValueError, "tree structure .* mismatch"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_without_a_return(name):
    """It would climb at a rate of one, as what only scales does."""
    tx = OPTIMIZERS[name].make(lambda count: None)
    step = osa.make_train_step(lambda t: jnp.sum(t[jnp.array([3, 7])] ** 2), tx)
    table = jnp.ones((12, 5))
    with pytest.raises((TypeError, ValueError), match="None"):
        step.trace(table, tx.init(table))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrong_gradients(name, wrong):
    params = {"in": {"table": jnp.ones((9, 4))}, "bias": jnp.ones(3)}
    grads, error, words = WRONG[wrong]
    tx = OPTIMIZERS[name].make(0.1)
    state = tx.init(params)
    with pytest.raises(error, match=words):
        jax.eval_shape(tx.update, {"bias": params["bias"]} | grads, state, params)
