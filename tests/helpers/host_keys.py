"""A stream of keys, and its training in memory, for the tests of host tables."""

import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa

from .host_tables import DIM, batches, loss


def by_key(keys):
    """Values that each key begins with."""
    column = np.arange(DIM, dtype=np.float32)
    return np.sin(np.asarray(keys % 89, np.float32)[:, None] + column)


def in_memory(tx, params, stream, vocab, init=by_key):
    state, step, values = tx.init(params), osa.make_train_step(loss, tx), []
    for number, (keys, y) in enumerate(stream):
        rows, fresh, _ = vocab.assign(keys, number)
        # One program for all batches: of 24 keys, not of those that are fresh.
        new = np.zeros((24, DIM), np.float32)
        new[: len(fresh)] = init(vocab.arrays["keys"].view(np.int64)[fresh])
        ids = {"table": jnp.asarray(fresh.padded(24)), "w": None}
        new = {"table": jnp.asarray(new), "w": None}
        params, state = osa.reset_rows(tx, params, state, ids, new)
        params, state, value = step(params, state, rows, y)
        values.append(np.asarray(value))
    return params, state, values


def stream_of(first, last):
    for keys, y in batches(first, last, rows=2**60, ids=24):
        yield keys.astype(np.int64) % 60 * 2**40 - 7, y
