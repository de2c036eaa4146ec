"""`HostTrainer.reset_rows` does what `reset_rows` does in memory; also for keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

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
    ]
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(rows, w)) as trainer:
        for ids, values, words in wrong:
            with pytest.raises(ValueError, match=words):
                trainer.reset_rows(ids, values)
        trainer.reset_rows({"table": np.array([-1, ROWS]), "w": None}, new)
        np.testing.assert_array_equal(trainer.params["table"], rows)
