"""exact_adam for some of the parameters, and in some of the steps; what it reads."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.exact_adam import (
    RATE,
    ROWS,
    WIDTH,
    assert_trees,
    batches,
    dense_step,
    exact_run,
    gradient,
    start,
    trained,
)
from ..helpers.support import assert_close, assert_identical, bcoo, slow_but

_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", slow_but([osa.exact_adam, osa.exact_adamw], osa.exact_adamw)
)
def test_parameters_without_an_array(make):
    """Such as Equinox and `optax.partition` leave in a tree."""
    tx, table = make(0.1), start()["table"]
    grad = bcoo(np.ones((1, WIDTH)), np.zeros((1, 1), np.int32), table.shape)
    params, grads = {"a": None, "table": table}, {"a": None, "table": grad}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    expected, _ = jax.jit(tx.update)(grad, tx.init(table), table)
    assert updates["a"] is None
    np.testing.assert_array_equal(updates["table"].data, expected.data)


@pytest.mark.slow
def test_a_state_of_other_containers():
    """It is that of the same names; without names it would be that of other tables."""
    tx = osa.exact_adam(RATE)
    params = {"user": start()["table"], "item": 1 + start()["table"]}
    state = tx.init(params)

    def loss(params, ids):
        return jnp.sum(jnp.sin(params["user"][ids]) * params["item"][ids + 1])

    for ids in batches(4):
        _, grads = osa.value_and_grad(loss, read=state)(params, ids % (ROWS - 1))
        updates, state = tx.update(grads, state, params)
        params = osa.apply_updates(params, updates)
    flushed, _ = osa.flush(params, state)
    others = collections.OrderedDict((x, params[x]) for x in ("user", "item"))
    assert_identical(dict(osa.flush(others, state)[0]), flushed)

    def rows(user, item):
        return user[ids], item[ids]

    read = osa.evaluate(lambda both: rows(both["user"], both["item"]), read=state)
    expected = flushed["user"][ids], flushed["item"][ids]
    for actual, value in zip(read(others), expected, strict=True):
        assert_close(actual, value, 1e-12)
    of_two = osa.evaluate(rows, argnums=(0, 1), read=state)
    with pytest.raises(ValueError, match="moments lie in another tree"):
        of_two(params["user"], params["item"])


@pytest.mark.parametrize("kind", ["partition", _SLOW("masked")])
def test_prefix_labels(kind):
    """One label for a branch of the parameters."""

    def nested():
        dense = {"w": jnp.ones(WIDTH), "more": [jnp.ones(2), jnp.ones(())]}
        return {"a": dense, "b": {"x": {"table": start()["table"]}}, "c": jnp.ones(2)}

    def loss(params, ids):
        rows = params["b"]["x"]["table"][ids] @ params["a"]["w"]
        extra = jnp.sum(params["c"]) + jnp.sum(params["a"]["more"][0])
        return jnp.mean(jnp.sin(rows + ids)) * extra * params["a"]["more"][1]

    def build(adam):
        if kind == "masked":
            return optax.masked(adam(RATE), {"a": True, "b": True, "c": False})
        parts = {
            "exact": adam(RATE),
            "sgd": optax.sgd(0.1),
            "none": optax.set_to_zero(),
        }
        return optax.partition(parts, {"a": "sgd", "b": "exact", "c": "none"})

    tx, reference = build(osa.exact_adam), build(optax.adam)
    params, wanted = nested(), nested()
    state, dense = tx.init(params), reference.init(wanted)
    step = osa.make_train_step(loss, tx)
    other = osa.make_train_step(loss, reference, sparse=False)
    for ids in batches(15):
        params, state, value = step(params, state, ids)
        wanted, dense, expected = other(wanted, dense, ids)
        assert_close(value, expected, 1e-11)
    assert_trees(osa.flush(params, state)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["conditionally_mask", "conditionally_transform"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_that_are_left_out(wrap, decay):
    """What is left out for both, and a gradient that is added as it is."""

    def around(tx):
        return getattr(optax, wrap)(tx, lambda step, **_: step % 2 == 0)

    own, theirs = osa.exact_adam(RATE), optax.adam(RATE)
    if decay:
        own = osa.exact_adamw(RATE, weight_decay=decay)
        theirs = optax.adamw(RATE, weight_decay=decay)
    tx, reference = around(own), around(theirs)
    if decay and wrap == "conditionally_transform":
        with pytest.raises(ValueError, match=r"Use optax\.conditionally_mask"):
            gradient(start(), read=tx.init(start()))
        return
    params, state, values = exact_run(tx, start(), tx.init(start()), batches(6))
    dense, other = start(), reference.init(start())
    for ids, value in zip(batches(6), values, strict=True):
        dense, other, expected = dense_step(reference)(dense, other, ids)
        assert_close(value, expected, 1e-8)
    assert_close(osa.flush(params, state)[0]["table"], dense["table"], 1e-7)


@pytest.mark.slow
def test_evaluation():
    """The rows as they are now, with and without a gradient, and by whole tables."""
    params, state = trained(osa.exact_adam(RATE))
    flushed, _ = jax.jit(osa.flush)(params, state)
    ids = jnp.arange(ROWS)

    def rows(params, ids):
        return {"rows": params["table"][ids], "sum": params["table"].sum(), "name": "x"}

    found = osa.evaluate(rows, read=state)(params, ids)
    assert_close(found["rows"], flushed["table"], 1e-13)
    assert_close(found["sum"], flushed["table"].sum(), 1e-12)
    assert found["name"] == "x"
    assert np.abs(rows(params, ids)["rows"] - found["rows"]).max() > 0.01
    plain = osa.evaluate(rows)(flushed, ids)
    assert_close(plain["rows"], flushed["table"], 0.0)
    second = osa.evaluate(lambda i, p: p["table"][i], argnums=1, read=state)
    assert_close(jax.jit(second)(ids, params), flushed["table"], 1e-13)


@pytest.mark.slow
def test_rows_of_a_table_that_is_not_trained_here():
    """As `docs/exact_adam.md` reads them, of a table with a state of its own."""
    tx, ids = osa.exact_adam(0.1), jnp.array([3, 7, 3])
    table = start()["table"]
    step = osa.make_train_step(lambda table, ids: jnp.sum(jnp.sin(table[ids])), tx)
    state = tx.init(table)
    for batch in batches(5):
        table, state, _ = step(table, state, batch)

    def look_up(table):
        return 0.0, table[ids]

    (_, rows), _ = osa.value_and_grad(look_up, has_aux=True, read=state)(table)
    assert_close(rows, osa.flush(table, state)[0][ids], 1e-14)
