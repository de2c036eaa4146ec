"""One model, its batches, and its training in memory, for the tests of host tables."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from .support import assert_identical

ROWS, DIM, IDS = 300, 8, 48


def loss(params, ids, y):
    rows = params["table"][ids]
    return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)


def batches(first, last, rows=ROWS, ids=IDS):
    """Zipf ids: about a third of a batch's rows are in the next one, too."""
    for number in range(first, last):
        rng = np.random.default_rng(number)
        own = (rng.zipf(1.3, ids) % rows).astype(np.int32)
        yield own, rng.normal(size=ids).astype(np.float32)


def begin(shape=(ROWS, DIM), dtype=np.float32):
    """The rows of a table, and a matrix."""
    rng = np.random.default_rng(0)
    rows = (0.3 * rng.normal(size=shape)).astype(jnp.dtype(dtype))
    return rows, rng.normal(size=(shape[1], 4)).astype(np.float32)


def host_params(rows, w, **where):
    table = host.HostTable(
        rows.shape, rows.dtype, init=lambda first, last: rows[first:last], **where
    )
    return {"table": table, "w": jnp.asarray(w)}


class Dictionary:
    """A storage of one's own, that knows nothing of tables."""

    def __init__(self):
        self.rows = {}

    def take(self, rows):
        return np.stack([self.rows[row] for row in rows.tolist()])

    def put(self, rows, records):
        self.rows.update(zip(rows.tolist(), records.copy(), strict=True))


def train_in_memory(loss, tx, params, batches, **options):
    """Parameters, state and values; arrays of NumPy are copied to the device."""
    params = jax.tree.map(jnp.array, params)
    state, step = tx.init(params), osa.make_train_step(loss, tx, **options)
    values = []
    for batch in batches:
        params, state, value = step(params, state, *batch)
        values.append(jax.tree.map(np.asarray, value))
    return params, state, values


def assert_trained_alike(trainer, values, expected):
    params, state, expected_values = expected
    assert_identical([*map(np.asarray, values)], expected_values, "values")
    assert_identical(arrays(trainer.params), arrays(params), "parameters")
    assert_identical(arrays(trainer.state), arrays(state), "state")


def arrays(tree):
    def array(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(array, tree)
