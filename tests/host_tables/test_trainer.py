"""A trainer: what is between two steps, and what goes wrong in one."""

import _thread
import signal
import subprocess
import sys
import threading
from functools import partial

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _between

from ..helpers.host_tables import (
    DIM,
    ROWS,
    arrays,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_close, assert_identical, slow_but

TX = osa.sparse_adam(1e-2)


def new_trainer(tx=TX, fun=loss, **options):
    return host.HostTrainer(fun, tx, host_params(*begin()), **options)


@pytest.fixture(scope="module")
def expected():
    rows, w = begin()
    return train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 10))


def test_steps_and_pipelines_in_turn_and_what_is_wrong_between(expected):
    trainer = new_trainer()
    values = [trainer.step(*next(batches(0, 1)))]
    # A pipeline that is left, one that others go before, batches that raise.
    for value in trainer.run(batches(1, 9)):
        values.append(value)
        if len(values) == 3:
            break
    first = trainer.run(batches(3, 4))
    values.append(next(first))
    first.close()
    run = trainer.run(batch for k in (4, 6) for batch in batches(k, k + 1))
    values.append(next(run))
    values.append(trainer.step(*next(batches(5, 6))))
    values += list(run)

    def raising():
        yield from batches(7, 8)
        raise RuntimeError("no more")

    run = trainer.run(raising())
    values.append(next(run))  # the step before the error is done
    with pytest.raises(RuntimeError, match="no more"):
        next(run)
    assert trainer.steps == 8
    # An id out of bounds: the batch is named, and nothing is changed.
    before = arrays((trainer.params, trainer.state))
    ids, y = next(batches(8, 9))
    for row in (ROWS, -ROWS - 1, 2**31 - 2, 2**31 - 1):
        bad = np.array(ids)
        bad[5] = row
        with pytest.raises(IndexError, match=rf"Batch 8 .*row {row} of \['table'\]"):
            trainer.step(bad, y)
    with pytest.raises(IndexError, match=r"has 300 rows, at .*host_tables.py:\d+"):
        list(trainer.run([(bad, y)]))
    assert_identical(arrays((trainer.params, trainer.state)), before)
    run = trainer.run([(ids, y), (bad, y)])
    values.append(next(run))
    with pytest.raises(IndexError, match="Batch 9 "):
        next(run)
    values.append(trainer.step(*next(batches(9, 10))))
    assert_trained_alike(trainer, values, expected)
    assert list(trainer.run([])) == []
    threads = [x.name for x in threading.enumerate()]
    assert not any("host_tables" in name for name in threads)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["caller", "batches", "step"])
def test_a_keyboard_interrupt_loses_no_step(where, expected, request):
    # Python's own handler: an example that ran before in this process has left another.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    trainer = new_trainer()
    values, count = [], 0

    def drawn():
        for number, batch in enumerate(batches(0, 10)):
            if where == "batches" and number == 4 and count == 0:
                raise KeyboardInterrupt
            yield batch

    program = trainer._pipeline._program

    def interrupted(*args):
        _thread.interrupt_main()
        return program(*args)

    def train():
        for value in trainer.run(drawn()):
            values.append(value)
            if len(values) == 3 and where == "caller":
                raise KeyboardInterrupt
            if len(values) == 3 and where == "step":
                trainer._pipeline._program = interrupted

    with pytest.raises(KeyboardInterrupt):
        train()
    trainer._pipeline._program = program
    done = trainer.steps
    values = expected[2][:done]  # the value of an interrupted step is lost
    values += [trainer.step(*batch) for batch in batches(done, 10)]
    assert_trained_alike(trainer, values, expected)


@pytest.mark.slow
def test_two_pipelines_in_turn(expected):
    trainer = new_trainer()
    ones = trainer.run(x for k in range(0, 10, 2) for x in batches(k, k + 1))
    others = trainer.run(x for k in range(1, 10, 2) for x in batches(k, k + 1))
    values = [next(run) for _ in range(5) for run in (ones, others)]
    ones.close()
    others.close()
    assert_trained_alike(trainer, values, expected)


@pytest.mark.slow
def test_keywords_of_the_optimiser_are_nothing_to_the_loss():
    def update(updates, state, params=None, *, scale=1.0, **extra):
        del params, extra
        return jax.tree.map(lambda x: x * scale, updates), state

    init = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = optax.chain(osa.lazy(init), TX)
    params = jax.tree.map(jnp.array, dict(zip(("table", "w"), begin(), strict=True)))
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    trainer = new_trainer(tx)
    for batch in batches(0, 3):
        params, state, value = step(params, state, *batch, scale=0.5)
        assert_identical(trainer.step(*batch, scale=0.5), value)
    assert_trained_alike(trainer, [], (params, state, []))
    with pytest.raises(TypeError, match="neither reads"):
        trainer.step(*batch, nobody=1)


@pytest.mark.slow
def test_a_loss_that_raises_changes_nothing(expected):
    fails = []

    def fun(params, ids, y):
        if fails:
            raise RuntimeError("in the loss")
        return loss(params, ids, y)

    trainer = new_trainer(fun=fun)
    values = list(trainer.run(batches(0, 4)))
    fails.append(1)
    for make in (trainer.step, lambda *batch: list(trainer.run([batch]))):
        with pytest.raises(RuntimeError, match="in the loss"):
            make(*next(batches(0, 1, ids=7)))
    fails.clear()
    values += list(trainer.run(batches(4, 10)))
    assert_trained_alike(trainer, values, expected)


def _dense(params, ids):
    return jnp.sum(params["table"][ids]) + jnp.sum(params["table"] ** 2)


def _chained(params, ids):
    nearest = jnp.argmax(params["table"][ids], axis=1)
    return jnp.sum(params["table"][nearest])


def _while(params, ids):
    def body(state):
        return state[0] + 1, state[1] + params["table"][state[0]].sum()

    return lax.while_loop(lambda x: x[0] < 3, body, (0, jnp.float32(0)))[1]


def _batched(params, ids):
    table = params["table"].reshape(3, -1, DIM)
    return jax.vmap(lambda t, i: t[i])(table, ids[:3]).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "error", "words"),
    [
        (
            _dense,
            ValueError,
            r"only its rows can be looked up.*used by `reduce_sum` at .*\.py:",
        ),
        (_chained, ValueError, r"must not depend on rows, but some depend on \['table"),
        (_while, ValueError, r"\['table'\].*used by `while` at .*test_trainer.py:\d+"),
        (_batched, ValueError, r"used by `reshape` at .*test_trainer.py:\d+"),
        (lambda p, ids: p["table"], ValueError, r"returns all of \['table'\]"),
    ],
)
def test_what_a_loss_may_not_do(fun, error, words):
    trainer = host.HostTrainer(fun, TX, host_params(*begin()))
    ids = np.array([1, 2, 3])
    before = arrays(trainer.params)
    for _ in range(2):
        with pytest.raises(error, match=words):
            trainer.step(ids)
    with pytest.raises(error, match=words):
        list(trainer.run([ids]))
    assert_identical(arrays(trainer.params), before)


@pytest.mark.slow
def test_a_vmap_over_tables_and_ids_is_refused():
    table = host.HostTable((3, 5, DIM))

    def fun(params, ids):
        return jax.vmap(lambda t, i: t[i])(params["t"], ids).sum()

    trainer = host.HostTrainer(fun, TX, {"t": table})
    with pytest.raises(ValueError, match=r"vmap over tables and their ids at .*\.py:"):
        trainer.step(np.zeros((3, 2), np.int32))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: host.HostTable(()), ValueError, "shape"),
        (lambda: host.HostTable(1000), ValueError, r"integers, got 1000"),
        (lambda: host.HostTable((float("inf"), 4)), ValueError, "of integers, got"),
        (lambda: host.HostTable((None, 4)), ValueError, "of integers, got"),
        (lambda: host.HostTable((0, 3)), ValueError, "at least one row"),
        (lambda: host.HostTable((5, 0)), ValueError, "at least one number"),
        (lambda: host.HostTable((2**31 - 1, 3)), ValueError, "ids are int32"),
        (lambda: host.HostTable((2**31, 3)), ValueError, "2,147,483,648"),
        (lambda: host.HostTable((5, 3), np.int32), TypeError, "floating"),
        (lambda: host.HostTable((5, 3), np.float64), TypeError, "jax_enable_x64"),
        (lambda: host.HostTable((5,), file="x", storage=1), ValueError, "both"),
        (lambda: np.asarray(host.HostTable((5, 3))), TypeError, "is no array"),
        (lambda: host.HostTable((5, 3))[0], TypeError, "is no array"),
        (
            lambda: host.HostTable((5, 3), init=np.ones((5, 3))),
            TypeError,
            r"got ndarray\. .* lambda first, last: rows\[first:last\]",
        ),
        (
            lambda: host.HostTable((5, 3), storage={}),
            TypeError,
            "take.rows. .* got dict",
        ),
        (
            lambda: host.HostTrainer(None, TX, {"t": host.HostTable((5, 3))}),
            TypeError,
            "needs a loss, .* got NoneType",
        ),
        (
            lambda: host.HostTrainer(loss, TX, {"w": jnp.ones(3)}),
            ValueError,
            "make_train_step",
        ),
        (
            lambda: host.HostTrainer(loss, "adam", {"t": host.HostTable((5, 3))}),
            TypeError,
            "HostTrainer",
        ),
    ],
)
def test_what_is_no_table_and_no_trainer(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.slow
def test_a_table_of_two_billion_rows(tmp_path):
    rows = 2**31 - 2
    table = host.HostTable((rows, 1), "bfloat16", file=tmp_path / "x")
    params = {"table": table, "w": jnp.ones((1, 4))}

    def fun(params, ids, y):
        return loss(params | {"table": params["table"].astype(jnp.float32)}, ids, y)

    with host.HostTrainer(fun, osa.rowwise_adagrad(0.1), params) as trainer:
        ids = np.array([0, rows - 1, 2**30, rows - 1, -1])
        trainer.step(ids, np.ones(5, np.float32))
        taken = trainer.params["table"][[0, 1, 2**30, rows - 2, rows - 1], 0]
        assert (taken != 0).tolist() == [True, False, True, False, True]
        with pytest.raises(IndexError, match="row 2147483646"):
            trainer.step(np.array([rows]), np.ones(1, np.float32))
    os_size = (tmp_path / "x").stat().st_blocks * 512
    assert os_size < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact_adam", "exact_adamw", "sparse_adam"])
def test_evaluate_and_map_rows(name):
    tx = getattr(osa, name)(1e-2)
    rows, w = begin()
    params, state, _ = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 5))
    trainer = new_trainer(tx)

    def predict(params, ids, *, scale=1.0, name="x"):
        return {name: jnp.tanh(params["table"][ids] @ params["w"]) * scale}

    def in_memory(params, state, ids):
        return osa.evaluate(predict, read=state)(params, ids, scale=2.0)

    read = state if name != "sparse_adam" else None
    evaluate = trainer.evaluate(predict)
    run = trainer.run(batches(0, 5))
    for _ in range(4):
        next(run)
        evaluate(jnp.arange(20), scale=2.0)
    next(run)
    for ids in (np.arange(20), np.arange(20)[::-3], np.zeros(0, np.int32)):
        expected = jax.jit(in_memory)(params, read, ids)["x"]
        found = evaluate(ids, scale=2.0, name="y")
        assert_identical(np.asarray(found["y"]), np.asarray(expected))
    with pytest.raises(IndexError, match="The batch of evaluate looks up row 300"):
        evaluate(np.array([ROWS]))
    if name != "sparse_adam":
        params, state = osa.flush(params, state)
        trainer.map_rows(osa.flush)

    def halved(params, state):
        return jax.tree.map(lambda x: x / 2, params), state

    params, state = jax.jit(halved)(params, state)
    trainer.map_rows(halved)
    assert_trained_alike(trainer, [], (params, state, []))


ROWS_OF_OTHERS = {
    "a mean": lambda x: x - x.mean(0, keepdims=True),
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "how many": lambda x: x / len(x),
    "large ones": lambda x: x / jnp.maximum(1, jnp.max(jnp.abs(x))),
    "where it is large": lambda x: jnp.where(jnp.linalg.norm(x) > 50, 2 * x, x),
    "beyond five means": lambda x: jnp.where(abs(x) > 5 * abs(x).mean(), x / 2, x),
    "beyond ten deviations": lambda x: jnp.where(abs(x) > 10 * x.std(), 0, x),
    "infinite ones": lambda x: jnp.where(jnp.isinf(x).any(), 0, x),
    "a row of zeros": lambda x: jnp.where((x == 0).all(1).any(), 2 * x, x),
    "a mask": lambda x: x * np.ones((ROWS, 1), np.float32),
    "chosen ones": lambda x: jnp.where(np.ones((ROWS, 1), bool), x, 0),
}


IN_CORE = "a mean", "noise", "how many", "where it is large", "a mask"


@pytest.mark.parametrize("name", slow_but(ROWS_OF_OTHERS, *IN_CORE))
def test_map_rows_of_what_does_not_treat_rows_alone(name):
    trainer = host.HostTrainer(loss, TX, host_params(*begin()))
    change = ROWS_OF_OTHERS[name]
    before = arrays((trainer.params, trainer.state))
    with pytest.raises(ValueError, match="treats each row alone"):
        trainer.map_rows(lambda p, s: (p | {"table": change(p["table"])}, s))
    assert_identical(arrays((trainer.params, trainer.state)), before)


ROWS_BY_NUMBER = {
    "the number of a row": lambda x: x.at[700].set(0),
    "those of rows, of which one is in no chunk": lambda x: x.at[700:1700].set(0),
    "a number that is in no chunk": lambda x: x.at[1700].add(1),
    "numbers that are in no chunk": lambda x: x.at[np.array([1700, 1900])].set(0),
    "every second row": lambda x: x.at[::2].set(0),
    "every seventh row": lambda x: x.at[::7].set(0),
    "rows from a number on": lambda x: jnp.where(jnp.arange(len(x)) > 700, 0, x.T).T,
    "rows from a number on that no chunk has": lambda x: x.at[1700:].set(0),
    "the last rows, joined": lambda x: jnp.concatenate([x[:1700], 0 * x[1700:]]),
    "numbers among many": lambda x: jnp.where(
        jnp.isin(jnp.arange(len(x)), np.array([1700, 1900]))[:, None], 0, x
    ),
    "numbers that NumPy compares": lambda x: jnp.where(
        (np.arange(len(x)) > 1700)[:, None], 0, x
    ),
    "an array of all rows": lambda x: x * jnp.ones((2000, 1))[: len(x)],
    "a number of what is transposed": lambda x: x.T.at[:, 1700].set(0).T,
    "that of an element": lambda x: x.ravel().at[20_000].set(0).reshape(x.shape),
    "an absent one, read": lambda x: (
        x + x.at[jnp.array([1700])].get(mode="fill", fill_value=0)
    ),
    "the largest": lambda x: jnp.where(x < jax.lax.top_k(x[:, 0], 700)[0][-1], 0, x),
}


@pytest.mark.parametrize("name", slow_but(ROWS_BY_NUMBER, "the number of a row"))
def test_map_rows_of_what_names_rows_by_number(name, monkeypatch):
    """Each chunk would have such a row, or none."""
    trainer = host.HostTrainer(loss, TX, host_params(*begin((2000, DIM))))
    monkeypatch.setattr(_between, "CHUNK", 1000 * 3 * DIM * 4)
    change = ROWS_BY_NUMBER[name]
    before = arrays((trainer.params, trainer.state))
    with pytest.raises(ValueError, match="treats each row alone"):
        trainer.map_rows(lambda p, s: (p | {"table": change(p["table"])}, s))
    assert_identical(arrays((trainer.params, trainer.state)), before)


@pytest.mark.slow
def test_map_rows_that_names_elements():
    """Of each row, and of what has no rows."""
    trainer = host.HostTrainer(loss, TX, host_params(*begin()))
    before = jax.tree.map(jnp.array, trainer.params)

    def change(params):
        x = params["table"].at[:, 1].set(0)
        x = x.at[jnp.arange(len(x)), jnp.argmax(x, axis=1)].multiply(2)
        x = x.at[np.arange(len(x)), 0].set(1)
        x = x * jnp.ones((1, DIM)).at[0, 2].set(3)
        x = x + jax.nn.one_hot(jnp.argmin(x, axis=1), DIM)
        x = x + jnp.linspace(-1, 1, 64)[jnp.argmax(x, axis=1)][:, None]
        return {"table": x, "w": params["w"].at[0].set(0)}

    trainer.map_rows(lambda params, state: (change(params), state))
    assert_identical(trainer.params, change(before))


@pytest.mark.parametrize("sizes", [(20, 20), (20, 9), (9, 20), (20, 1), (2, 1)])
def test_map_rows_of_rows_of_two_tables(sizes):
    """It is what it is in memory: tables of different sizes have no such rows."""

    def fun(params, ids):
        return sum(jnp.sum(x[ids]) for x in params.values())

    def both(params, state):
        return params | {"a": params["a"] + params["b"]}, state

    ones = {
        name: np.full((size, 2), k + 1, np.float32)
        for k, (name, size) in enumerate(zip("ab", sizes, strict=True))
    }
    tables = {
        name: host.HostTable(x.shape, init=lambda first, last, x=x: x[first:last])
        for name, x in ones.items()
    }
    trainer = host.HostTrainer(fun, osa.rowwise_adagrad(0.1), tables)
    if sizes[0] == sizes[1]:
        trainer.map_rows(both)
        ones["a"] = ones["a"] + ones["b"]
    else:
        words = ("incompatible shapes", "treats each row alone")[1 in sizes]
        with pytest.raises((TypeError, ValueError), match=words):
            trainer.map_rows(both)
    assert_identical(arrays(trainer.params), ones)


def test_map_rows_of_a_loop_that_ends_for_finite_rows():
    """An infinite one is not tried; rows that depend on others are seen."""
    rows, w = begin()
    trainer = host.HostTrainer(loss, TX, host_params(rows, w))

    def halve(row):
        return lax.while_loop(lambda x: abs(x).max() > 0.5, lambda x: x / 2, row)

    def change(params, state):
        return params | {"table": jax.vmap(halve)(params["table"])}, state

    def change_all(params, state):
        return params | {"table": halve(params["table"])}, state

    with pytest.raises(ValueError, match="treats each row alone"):
        trainer.map_rows(change_all)
    trainer.map_rows(change)
    assert_identical(trainer.params["table"], np.array(jax.vmap(halve)(rows)))


def test_map_rows_of_few_large_rows(monkeypatch):
    """Chunks have fewer rows than there are of other axes, whose numbers are none."""
    table = host.HostTable((8, 64))
    trainer = host.HostTrainer(loss, TX, {"table": table, "w": jnp.zeros(64)})
    monkeypatch.setattr(_between, "CHUNK", 2 * 3 * 64 * 4)

    def hot(params, state):
        x = params["table"]
        x = x + jax.nn.one_hot(jnp.argmax(x, axis=1), 64)
        x = jax.lax.map(lambda row: row + 1, x, batch_size=5000)
        return params | {"table": x}, state

    trainer.map_rows(hot)
    expected = np.ones((8, 64), np.float32)
    expected[:, 0] = 2
    assert_identical(trainer.params["table"], expected)


@pytest.mark.slow
def test_map_rows_of_factorisations():
    """In a process of its own, as one that waits for ever ends with its time."""
    code = """
import jax, jax.numpy as jnp, numpy as np, optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

rows = np.random.default_rng(0).normal(size=(500, 4, 4)).astype(np.float32)
params = {"x": host.HostTable((70_000, 8)), "t": host.HostTable(rows.shape, init=(
    lambda first, last: rows[first:last]))}
loss = lambda params, ids: params["x"][ids].sum() + params["t"][ids].sum()
trainer = host.HostTrainer(loss, osa.sparse_adam(0.1), params)
orthogonal = lambda rows: jnp.linalg.qr(jnp.nan_to_num(rows))[0]
trainer.map_rows(lambda params, state: (params | {"t": orthogonal(params["t"])}, state))
np.testing.assert_array_equal(trainer.params["t"], jax.jit(orthogonal)(rows))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_note_says_how_init_was_called():
    init = jax.nn.initializers.normal()
    with pytest.raises(TypeError) as raised:
        host.HostTrainer(loss, TX, {"t": host.HostTable((5, 3), init=init)})
    assert "`init(0, 5)` of ['t'], a function" in raised.value.__notes__[0]


@pytest.mark.slow
def test_pieces_of_init_depend_on_the_shape_alone():
    """A seed of their first rows gives one table for all optimisers and types."""

    def pieces(tx, dtype):
        calls = []

        def init(first, last):
            calls.append((first, last))
            return np.zeros((last - first, 400), np.float32)

        table = host.HostTable((6_000, 400), dtype, init=init)
        with host.HostTrainer(lambda p, ids: jnp.sum(p[ids]), tx, table):
            return calls

    expected = pieces(osa.rowwise_adagrad(0.1), "float32")
    assert len(expected) == 3
    assert pieces(osa.exact_adam(0.1), "float32") == expected
    assert pieces(osa.rowwise_adagrad(0.1), "bfloat16") == expected


def test_map_rows_of_counts_that_depend_on_others():
    tx = osa.lazy(osa.per_row(optax.scale_by_adam()))
    trainer = host.HostTrainer(loss, tx, host_params(*begin()))

    def later(params, state, choose):
        count = state.count["table"]
        return params, state._replace(
            count=state.count | {"table": choose(count) - count}
        )

    for choose in jnp.max, jnp.min:
        with pytest.raises(ValueError, match="treats each row alone"):
            trainer.map_rows(partial(later, choose=choose))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, np.float32(0.3)])
def test_map_rows_that_sets_a_number_reads_no_row(rate, tmp_path, monkeypatch):
    """As large_tables.md has it, of a file whose rows are as they were."""
    tx = optax.inject_hyperparams(osa.sparse_adam, static_args=("b1", "b2"))(0.1)
    rows, w = begin()
    made = [*batches(0, 4)]

    def rates(params, state):
        numbers = state.hyperparams | {"learning_rate": rate}
        return params, state._replace(hyperparams=numbers)

    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    for number, batch in enumerate(made):
        if number == 2:
            params, state = rates(params, state)
        params, state, _ = step(params, state, *batch)
    with host.HostTrainer(
        loss, tx, host_params(rows, w, file=tmp_path / "x")
    ) as trainer:
        list(trainer.run(made[:2]))
        put = trainer._rows.stores[0].put_fields
        monkeypatch.setattr(trainer._rows.stores[0], "put_fields", None)
        trainer.map_rows(jax.jit(rates))
        monkeypatch.setattr(trainer._rows.stores[0], "put_fields", put)
        list(trainer.run(made[2:]))
        assert_trained_alike(trainer, [], (params, state, []))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, s: (p, s._replace(count=0.5)), r"count` is int32\[\].*float32\[\]"),
        (
            lambda p, s: ({**p, "w": p["w"][:2]}, s),
            r"params\['w'\]` is .* returns float",
        ),
        (lambda p, s: p, r"returns .*, \(params, state\), in the structure"),
    ],
    ids=["type", "shape", "structure"],
)
def test_map_rows_that_returns_something_else(change, words):
    with (
        host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(*begin())) as trainer,
        pytest.raises(ValueError, match=words),
    ):
        trainer.map_rows(change)


def test_a_state_with_a_key_for_each_row_is_refused():
    tx = osa.lazy(osa.per_row(optax.noisy_sgd(0.1, key=jax.random.key(0))))
    with pytest.raises(TypeError, match=r"are of the type key<fry>\. Take one key"):
        host.HostTrainer(loss, tx, host_params(*begin()))


@pytest.mark.slow
def test_map_rows_by_chunks_and_what_it_refuses(monkeypatch):
    monkeypatch.setattr(_between, "CHUNK", 7 * 3 * DIM * 4)  # 7 rows at once
    rows, w = begin()
    small = host.HostTable((5, 3), init=lambda a, b: np.ones((b - a, 3)))
    trainer = host.HostTrainer(loss, TX, host_params(rows, w) | {"small": small})
    before = arrays((trainer.params, trainer.state))
    bad = {
        "treats each row alone": lambda p, s: (p | {"w": p["w"] + p["table"].sum()}, s),
        "shapes and types": lambda p, s: (p | {"table": p["table"][:3]}, s),
    }
    for words, fun in bad.items():
        with pytest.raises(ValueError, match=words):
            trainer.map_rows(fun)
    assert_identical(arrays((trainer.params, trainer.state)), before)
    run = trainer.run(batches(0, 4))
    next(run)

    def doubled(params, state):
        return jax.tree.map(lambda x: 2 * x, params), state

    trainer.map_rows(doubled)
    list(run)  # goes on with the rows as they are now
    params = {"table": rows, "w": w, "small": np.ones((5, 3), np.float32)}
    params = jax.tree.map(jnp.array, params)
    state, step = TX.init(params), osa.make_train_step(loss, TX)
    for number, batch in enumerate(batches(0, 4)):
        params, state, _ = step(params, state, *batch)
        if number == 0:
            params, state = doubled(params, state)
    assert_trained_alike(trainer, [], (params, state, []))


@pytest.mark.parametrize("where", slow_but(["memory", "file"], "file"))
def test_rows_of_64_bits_are_not_cut_to_32(where, tmp_path, as_optax_expects):
    """As JAX does where x64 is off: elsewhere, or in a thread that has not set it."""
    file = {"file": tmp_path / "x"} if where == "file" else {}
    rows, w = begin(dtype=np.float64)
    ids, y = next(batches(0, 1))
    reset = {"table": np.arange(3), "w": None}, {"table": rows[:3], "w": None}
    with jax.enable_x64(True):
        trainer = host.HostTrainer(loss, TX, host_params(rows, w, **file))
        assert trainer.evaluate(loss)(ids, y).dtype == np.float64
        run = trainer.run(batches(0, 9))
        next(run)
    before = arrays((trainer.params, trainer.state))
    for use in (
        lambda: next(run),
        lambda: trainer.step(ids, y),
        lambda: trainer.step(host.BatchWithReset((ids, y), *reset)),
        lambda: list(trainer.run([(ids, y)])),
        lambda: trainer.reset_rows(*reset),
        lambda: trainer.map_rows(lambda params, state: (params, state)),
        lambda: trainer.evaluate(loss)(ids, y),
        lambda: trainer.snapshot(tmp_path / "snapshot"),
    ):
        with pytest.raises(TypeError, match=r"float32 on \['table'\], .* is float64"):
            use()
    trainer.checkpoint(tmp_path / "run")
    assert_identical(arrays((trainer.params, trainer.state)), before)
    with jax.enable_x64(True):
        trainer.step(*next(batches(1, 2)))
        trainer.snapshot(tmp_path / "snapshot")
        expected = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 2))
        assert_identical(np.array(trainer.params["table"]), expected[0]["table"])
        trainer.close()
        snapshot = host.Snapshot(tmp_path / "snapshot", host_params(rows, w))
    with pytest.raises(TypeError, match="Snapshot, was made with jax_enable_x64"):
        snapshot.evaluate(loss)(ids, y)


@pytest.mark.slow
def test_views_are_read_only_and_a_closed_trainer_says_so():
    trainer = new_trainer()
    with pytest.raises(ValueError, match="read-only"):
        trainer.params["table"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        trainer.state.mu["table"][0] = 1
    run = trainer.run(batches(0, 3))
    next(run)
    trainer.close()
    trainer.close()
    for use in (
        lambda: trainer.params,
        lambda: trainer.step(*next(batches(0, 1))),
        lambda: list(run),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam"])
def test_a_batch_over_a_mesh(name, kind):
    """Rows are on all devices, the batch is split; as tables in memory that are so."""
    axis = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("x",), (axis,), devices=jax.devices()[:4])
    split = jax.NamedSharding(mesh, jax.P("x"))
    whole = jax.NamedSharding(mesh, jax.P())
    tx = getattr(osa, name)(1e-2)
    rows, w = begin()

    def placed():
        return [jax.device_put(batch, split) for batch in batches(0, 8)]

    def fun(params, ids, y):
        out = whole if kind == "Auto" else jax.P("x")
        where = {"out_sharding": out} if kind == "Explicit" else {}
        x = params["table"].at[ids].get(**where)
        return jnp.mean((jnp.tanh(x @ params["w"]).sum(1) - y) ** 2)

    params = jax.device_put({"table": jnp.array(rows), "w": jnp.array(w)}, whole)
    with jax.set_mesh(mesh):
        state, step = tx.init(params), osa.make_train_step(fun, tx)
        state = jax.device_put(state, whole)
        values = []
        for batch in placed():
            params, state, value = step(params, state, *batch)
            values.append(np.asarray(value))
        own = host_params(rows, jax.device_put(w, whole))
        trainer = host.HostTrainer(fun, tx, own)
        found = list(trainer.run(placed()))
    assert_trained_alike(trainer, found, (params, state, values))


@pytest.mark.slow
def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="one of 2 processes, so it needs a `mesh`"):
        new_trainer()


@pytest.mark.slow
def test_nnx_tables_never_exist(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs, rows):
            self.embed = nnx.Embed(rows, DIM, rngs=rngs)
            self.out = nnx.Linear(DIM, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

        def __call__(self, ids):
            return self.norm(self.out(self.embed(ids)))

    def split(rows, **where):
        return host.nnx_tables(
            lambda: Model(nnx.Rngs(0), rows),
            lambda path, x: (
                host.HostTable(x.shape, x.dtype, **where)
                if x.shape[0] == rows
                else None
            ),
        )

    graph, params, rest = split(2_000_000_000, file=tmp_path / "huge")
    assert params.embed.embedding.get_value().shape == (2_000_000_000, DIM)
    model = Model(nnx.Rngs(0), ROWS)
    assert_identical(
        np.asarray(params.out.kernel.get_value()), np.asarray(model.out.kernel[...])
    )
    table = np.asarray(model.embed.embedding[...])
    graph, params, rest = split(ROWS, init=lambda a, b: table[a:b])

    def fun(params, ids, y):
        model = nnx.merge(graph, params, rest)
        return jnp.mean((model(ids).sum(1) - y) ** 2)

    trainer = host.HostTrainer(fun, TX, params)
    plain = nnx.split(model, nnx.Param, ...)[1]
    expected = train_in_memory(fun, TX, plain, batches(0, 5))
    assert_trained_alike(trainer, list(trainer.run(batches(0, 5))), expected)
    with pytest.raises(ValueError, match="no HostTable"):
        host.nnx_tables(lambda: Model(nnx.Rngs(0), 9), lambda path, x: None)
    with pytest.raises(ValueError, match=r"embed.*which is float32\[9, 8\]"):
        host.nnx_tables(
            lambda: Model(nnx.Rngs(0), 9),
            lambda path, x: host.HostTable((9, 7)) if x.shape[0] == 9 else None,
        )


@pytest.mark.slow
def test_nnx_variables_that_a_step_changes():
    """Counts of dropout, statistics of a norm: in with the batch, out as `aux`."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(ROWS, DIM, rngs=rngs)
            self.norm = nnx.BatchNorm(DIM, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    model = Model(nnx.Rngs(0))
    _, plain, first = nnx.split(model, nnx.Param, ...)
    table = np.asarray(model.embed.embedding[...])
    graph, params, rest = host.nnx_tables(
        lambda: Model(nnx.Rngs(0)),
        lambda path, x: (
            host.HostTable(x.shape, init=lambda a, b: table[a:b])
            if x.shape[0] == ROWS
            else None
        ),
    )

    def fun(params, rest, ids, y):
        model = nnx.merge(graph, params, rest, copy=True)
        rows = model.drop(model.norm(model.embed(ids))).sum(1)
        value = jnp.mean((rows - y) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    step = osa.make_train_step(fun, TX, has_aux=True)
    plain, state = jax.tree.map(jnp.array, plain), TX.init(plain)
    with host.HostTrainer(fun, TX, params, has_aux=True) as trainer:
        for batch in batches(0, 5):
            value, rest = trainer.step(rest, *batch)
            plain, state, (expected, first) = step(plain, state, first, *batch)
            assert_close(value, expected, 1e-6)
            for name in ("count", "key"):  # of the masks, to the bit
                x, y = (getattr(z.drop.rngs, name)[...] for z in (rest, first))
                assert jnp.array_equal(x, y)
            # XLA sums a batch up in another order beside other operations.
            x, y = (jax.tree.leaves(z.norm) for z in (rest, first))
            assert_close(x, y, 1e-6)
        x, y = (np.asarray(z.embed.embedding[...]) for z in (trainer.params, plain))
        assert_close(x, y, 1e-6)


@pytest.mark.slow
def test_keywords_of_any_name():
    def fun(params, ids, rows=1.0, params_=1.0, static=1.0):
        return jnp.mean(params["table"][ids] ** 2) / rows / params_ / static

    keywords = {"rows": 2.0, "params_": 3.0, "static": 5.0}
    rows, w = begin()
    step, ids = osa.make_train_step(fun, TX), np.arange(3)
    with new_trainer(fun=fun) as trainer:
        evaluate = trainer.evaluate(fun)
        expected = evaluate(ids, **keywords)
        params = jax.tree.map(jnp.array, {"table": rows, "w": w})
        value = step(params, TX.init(params), ids, **keywords)[2]
        assert_identical(trainer.step(ids, **keywords), value)
        assert_close(value, expected, 1e-7)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_traced_batches_are_refused(transform):
    """Nothing is trained, and the trainer goes on."""
    ids, y = np.arange(3), np.ones(3, np.float32)
    with new_trainer() as trainer:
        evaluate = trainer.evaluate(lambda params, ids: params["table"][ids])
        with pytest.raises(TypeError, match=r"evaluate has a traced .* outside of jit"):
            transform(evaluate)(ids)
        with pytest.raises(TypeError, match="Batch 0 has a traced array"):
            transform(trainer.step)(ids, y)
        assert trainer.steps == 0
        trainer.step(ids, y)


@pytest.mark.parametrize("leaf", [jax.nn.relu, "relu", object()], ids=type)
def test_leaves_that_are_no_arrays_are_refused(leaf):
    params = {**host_params(*begin()), "mlp": [leaf]}
    with pytest.raises(TypeError, match=r"\['mlp'\]\[0\] is of the type .* Equinox"):
        host.HostTrainer(loss, TX, params)


def test_masked_parameters_are_refused():
    """They would be trained with what is masked."""
    params = host_params(*begin()) | {"b": np.ma.array([1.0, 2.0], mask=[0, 1])}
    with pytest.raises(
        TypeError, match=r"\(\['b'\]\), takes plain arrays, got a masked"
    ):
        host.HostTrainer(loss, TX, params)


def loss_of_both(params, ids, y):
    return loss(params, ids, y) + jnp.mean(params["other"][ids] ** 2)


FROZEN = {
    "partition": optax.partition(
        {"rest": TX, "frozen": optax.set_to_zero()},
        {"table": "rest", "w": "rest", "other": "frozen"},
    ),
    "selective_transform": optax.transforms.selective_transform(
        TX, freeze_mask={"table": False, "w": False, "other": True}
    ),
}


@pytest.mark.parametrize("name", slow_but(FROZEN, "partition"))
def test_a_frozen_table(name):
    """As docs/frozen_rows.md names them: the others are trained as in memory."""
    rows, w = begin()
    other, plain = host_params(rows, w)["table"], {"table": rows, "w": w, "other": rows}
    params = host_params(rows, w) | {"other": other}
    trainer = host.HostTrainer(loss_of_both, FROZEN[name], params)
    values = [*trainer.run(batches(0, 3))]
    expected = train_in_memory(loss_of_both, FROZEN[name], plain, batches(0, 3))
    assert_trained_alike(trainer, values, expected)
    assert_identical(np.asarray(trainer.params["other"]), rows)
