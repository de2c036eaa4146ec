"""The lines of keys.md for tables on the host, beside a file and a full vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _file

from ..helpers.support import assert_identical, slow_but

ROWS, WIDTH = 40, 512  # of two pages each


def loss(params, rows, labels):
    logits = params["table"][rows].sum(axis=1) @ params["w"]
    return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)


def batches(steps=20):
    for step in range(steps):
        rng = np.random.default_rng(step)
        keys = (300 ** rng.random((6, 4))).astype(np.int64) * 2**40
        yield step, keys, rng.integers(0, 2, 6).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["memory", "file", "cold file"], "cold file"))
def test_fresh_rows_of_a_table_on_the_host(kind, tmp_path, monkeypatch):
    """`fresh` is in the order of the batch and of scores, and not ascending."""
    if kind == "cold file":  # as after a batch that has waited for the disk
        monkeypatch.setattr(_file.File, "is_cold", True)
    tx, vocab = osa.rowwise_adagrad(0.3), osa.Vocabulary(ROWS)
    params = {"table": jnp.zeros((ROWS, WIDTH)), "w": jnp.ones(WIDTH)}
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    expected, values, descends = [], [], 0
    where = {} if kind == "memory" else {"file": tmp_path / "table"}
    table, large = host.HostTable((ROWS, WIDTH), **where), osa.Vocabulary(ROWS)
    given = {"table": table, "w": jnp.ones(WIDTH)}
    with host.HostTrainer(loss, tx, given) as trainer:
        for number, keys, labels in batches():
            rows, fresh, _ = large.assign(keys, number)
            zeros = {"table": np.zeros((64, WIDTH), np.float32), "w": None}
            trainer.reset_rows({"table": fresh.padded(64), "w": None}, zeros)
            values.append(trainer.step(rows, labels))
            descends += bool((np.diff(fresh) < 0).any())
            rows, fresh, _ = vocab.assign(keys, number)
            zeros = {"table": jnp.zeros((64, WIDTH)), "w": None}
            ids = {"table": fresh.padded(64), "w": None}
            params, state = osa.reset_rows(tx, params, state, ids, zeros)
            params, state, value = step(params, state, rows, labels)
            expected.append(value)
        assert descends > 5
        assert_identical([*map(np.asarray, values)], [*map(np.asarray, expected)])
        own = jax.tree.map(np.asarray, trainer.params)
        assert_identical(own, jax.tree.map(np.asarray, params), "parameters")
