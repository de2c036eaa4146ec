"""`HostTrainer.reset_rows` does what `reset_rows` does in memory; also for keys."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_keys import by_key, in_memory, stream_of
from ..helpers.host_tables import (
    DIM,
    ROWS,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
)
from ..helpers.support import slow_but

OPTIMIZERS = {
    "sparse_adam": osa.sparse_adam(0.1),
    "exact_adamw": osa.exact_adamw(0.1),
    "rowwise_adagrad": osa.rowwise_adagrad(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_begun_as_in_memory(name, tmp_path):
    """Between steps and in a pipeline; what a checkpoint had comes back."""
    tx, step = OPTIMIZERS[name], osa.make_train_step(loss, OPTIMIZERS[name])
    rows, w = begin()
    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    state, expected = tx.init(params), []
    given = host_params(rows, w, file=tmp_path / "table.bin")
    ids = {"table": np.array([1, 7, -1, 250, ROWS]), "w": None}
    new = {"table": np.full((5, DIM), 0.5, np.float32), "w": None}
    with host.HostTrainer(loss, tx, given) as trainer:
        values = []
        for number, batch in enumerate(batches(0, 6)):
            if number == 3:
                trainer.checkpoint(tmp_path / "saved")
                saved = params, state
                saved = jax.tree.map(jnp.copy, saved)
                params, state = osa.reset_rows(tx, params, state, ids, new)
                trainer.reset_rows(ids, new)
            values.append(trainer.step(*batch))
            params, state, value = step(params, state, *batch)
            expected.append(np.asarray(value))
        assert_trained_alike(trainer, values, (params, state, expected))
        running = trainer.run(batches(6, 10))
        for number, batch in enumerate(batches(6, 10)):
            values.append(next(running))
            params, state, value = step(params, state, *batch)
            expected.append(np.asarray(value))
            if number == 1:
                params, state = osa.reset_rows(tx, params, state, ids, new)
                trainer.reset_rows(ids, new)
        assert_trained_alike(trainer, values, (params, state, expected))
    with host.HostTrainer.restore(tmp_path / "saved", loss, tx, given) as trainer:
        assert_trained_alike(trainer, [], (*saved, []))


@pytest.mark.parametrize("where", slow_but(["memory", "cold file"], "cold file"))
def test_keys_have_rows_of_a_host_table(where, tmp_path):
    """A vocabulary says which rows; in memory it is the same.

    It is full soon, and names fresh rows in the order of scores.
    """
    file = {"file": tmp_path / "x"} if where == "cold file" else {}
    tx, vocab, other = osa.sparse_adam(0.1), osa.Vocabulary(31), osa.Vocabulary(31)
    rows, w = begin((31, DIM))
    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    zeros = {"table": np.zeros((32, DIM), np.float32), "w": None}
    with host.HostTrainer(loss, tx, host_params(rows, w, **file)) as trainer:
        values, expected, gone = [], [], 0
        for number, (keys, y) in enumerate(batches(0, 8, rows=2**60, ids=24)):
            keys = keys.astype(np.int64) % 60 * 2**40
            at, fresh, evicted = vocab.assign(keys, number)
            if file:
                trainer._rows.stores[0]._cold_for = 9
            trainer.reset_rows({"table": fresh.padded(32), "w": None}, zeros)
            values.append(trainer.step(at, y))
            at, fresh, _ = other.assign(keys, number)
            ids = {"table": fresh.padded(32), "w": None}
            params, state = osa.reset_rows(tx, params, state, ids, zeros)
            params, state, value = step(params, state, at, y)
            expected.append(np.asarray(value))
            gone += len(evicted)
        assert gone > 10
        assert_trained_alike(trainer, values, (params, state, expected))


def test_what_cannot_be_begun_changes_nothing():
    rows, w = begin()
    new = {"table": np.zeros((2, DIM), np.float32), "w": None}
    wrong = [
        ({"table": np.array([1, 1]), "w": None}, new, "each row once"),
        ({"table": None, "w": np.array([1])}, new, "rows of HostTables, got ids for"),
        ([np.array([1, 2])], new, "a prefix of the parameters'"),
        ({"table": np.array([1, 2, 3]), "w": None}, new, "a row for each of the 3 ids"),
        ({"table": np.array([1, 2]), "w": None}, new["table"], "The rows .* structure"),
    ]
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(rows, w)) as trainer:
        for ids, values, words in wrong:
            with pytest.raises(ValueError, match=words):
                trainer.reset_rows(ids, values)
        with pytest.raises(TypeError, match=r"map_rows needs a function .* NoneType"):
            trainer.map_rows(None)
        with pytest.raises(TypeError, match=r"evaluate needs a function .* int"):
            trainer.evaluate(3)
        trainer.reset_rows({"table": np.array([-1, ROWS]), "w": None}, new)
        np.testing.assert_array_equal(trainer.params["table"], rows)


def with_resets(vocabs, stream, init):
    """As a user's loader: it assigns rows ahead of the steps."""
    for number, (keys, y) in enumerate(stream):
        rows, fresh, _ = assignment = vocabs.assign(keys, number)
        new = {"table": init(assignment.fresh_keys), "w": None}
        yield host.BatchWithReset((rows, y), {"table": fresh, "w": None}, new)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([*OPTIMIZERS], "sparse_adam"))
@pytest.mark.parametrize("where", slow_but(["memory", "file", "cold", "mesh"], "cold"))
def test_a_pipeline_begins_rows_of_keys(name, where, tmp_path):
    """A full vocabulary, whose keys come and go; left by `break`, and gone on with."""
    tx, options = OPTIMIZERS[name], {}
    if where == "mesh":
        axes = (jax.sharding.AxisType.Auto,)
        options["mesh"] = jax.make_mesh((jax.device_count(),), ("x",), axes)
    rows, w = begin((31, DIM))
    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    expected = in_memory(tx, params, stream_of(0, 20), osa.Vocabulary(31), by_key)
    file = {"file": tmp_path / "x"} if where in ("file", "cold") else {}
    given = host_params(rows, w, **file)
    with host.HostTrainer(loss, tx, given, **options) as trainer:
        iterator = with_resets(osa.Vocabulary(31), stream_of(0, 20), by_key)
        values = []
        for value in trainer.run(iterator):
            values.append(value)
            if where == "cold":
                trainer._rows.stores[0]._cold_for = 9
            if len(values) == 7:
                break
        assert len(trainer.drawn) > 0
        assert all(isinstance(x, host.BatchWithReset) for x in trainer.drawn)
        values += trainer.run(itertools.chain(trainer.drawn, iterator))
        if where == "mesh":  # sums of a mesh are in another order
            chex.assert_trees_all_close(values, expected[2], rtol=2e-5)
        else:
            assert_trained_alike(trainer, values, expected)


@pytest.mark.slow
def test_rows_that_nobody_looks_up_begin_as_well(tmp_path):
    """Also in steps that follow each other, of the same row; and more than are read."""
    tx, rng = osa.exact_adamw(0.1), np.random.default_rng(0)
    rows, w = begin()
    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    state, step, given, expected = (
        tx.init(params),
        osa.make_train_step(loss, tx),
        [],
        [],
    )
    for number, batch in enumerate(batches(0, 8, ids=5)):
        count = [0, 3, 70, 200][number % 4]
        ids = np.append(rng.permutation(ROWS)[:count], [-1, ROWS])
        new = rng.normal(size=(count + 2, DIM)).astype(np.float32)
        trees = {"table": ids, "w": None}, {"table": new, "w": None}
        given.append(host.BatchWithReset(batch, *trees) if count else batch)
        if count:
            params, state = osa.reset_rows(tx, params, state, *trees)
        params, state, value = step(params, state, *batch)
        expected.append(np.asarray(value))
    own = host_params(rows, w, file=tmp_path / "x")
    with host.HostTrainer(loss, tx, own) as trainer:
        values = [*trainer.run(given)]
        assert_trained_alike(trainer, values, (params, state, expected))
    with host.HostTrainer(loss, tx, host_params(rows, w)) as trainer:
        tuples = (x if isinstance(x, tuple) else (x,) for x in given)
        values = [trainer.step(*x) for x in tuples]
        assert_trained_alike(trainer, values, (params, state, expected))


@pytest.mark.slow
def test_a_reset_that_is_wrong_is_said_when_its_turn_comes():
    rows, w = begin()
    new = {"table": np.zeros((2, DIM), np.float32), "w": None}
    wrong = {"table": np.array([1, 1]), "w": None}
    first, second, third = batches(0, 3)
    batch = host.BatchWithReset(second, wrong, new)
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(rows, w)) as trainer:
        values = trainer.run([first, batch, third])
        next(values)
        with pytest.raises(ValueError, match="each row once"):
            next(values)
        assert trainer.steps == 1
        assert trainer.drawn[0].ids["table"].tolist() == [1, 1]
        assert [*trainer.run([third])]
