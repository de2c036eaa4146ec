"""Many rows at a time on a mesh: updated in blocks and in place, as on one device."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam._rows import map_rows

from ..helpers.support import assert_same_on_devices, bcoo, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPE, NSE = (800, 64), 1600

OPTIMIZERS = {
    "adam": osa.lazy(optax.adam(0.01)),
    "rmsprop": osa.lazy(optax.rmsprop(0.01, momentum=0.9)),
    "per_row": osa.lazy(osa.per_row(optax.adam(0.01))),
    "rowwise_adam": osa.rowwise_adam(0.01),
    "sparse_adafactor": osa.sparse_adafactor(0.01),
}


@functools.cache
def problem():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, SHAPE[0], (2, NSE, 1)).astype(np.int32)
    values = rng.integers(-8, 8, (2, NSE, SHAPE[1])).astype(np.float32)  # exact sums
    return rng.standard_normal(SHAPE).astype(np.float32), values, ids


def train(tx, put):
    """Two steps; `put` says where the table and the entries lie."""
    table, values, ids = problem()
    table = put(table, True)
    state = tx.init(table)

    @jax.jit
    def step(table, state, values, ids):
        updates, state = tx.update(bcoo(values, ids, SHAPE), state, table)
        return osa.apply_updates(table, updates), state

    for entries in zip(values, ids, strict=True):
        table, state = step(table, state, *(put(x, False) for x in entries))
    return table, state


@functools.cache
def on_one_device(name):
    return train(OPTIMIZERS[name], lambda x, _: jnp.asarray(x))


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS, COLUMNS = P("x", None), P(None, "x")
CASES = [
    *itertools.product(("adam", "sparse_adafactor"), (ROWS, COLUMNS), (AUTO, EXPLICIT)),
    ("rmsprop", ROWS, AUTO),
    ("rmsprop", COLUMNS, EXPLICIT),
    ("per_row", ROWS, EXPLICIT),
    ("per_row", COLUMNS, AUTO),
    ("rowwise_adam", ROWS, AUTO),
    ("rowwise_adam", COLUMNS, EXPLICIT),
]


@pytest.mark.parametrize(
    ("name", "spec", "axis_type"), slow_but(CASES, *CASES[1::8]), ids=str
)
def test_as_on_one_device(name, spec, axis_type):
    expected = on_one_device(name)
    assert map_rows._block_rows(jnp.zeros((NSE, SHAPE[1]))) < NSE
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))

    def put(x, is_table):
        rows = P("x" if spec[0] and axis_type is AUTO else None)
        return jax.device_put(x, NamedSharding(mesh, spec if is_table else rows))

    with jax.set_mesh(mesh):
        table, state = train(OPTIMIZERS[name], put)
    assert table.sharding.spec == spec
    # Means over what several devices hold are added up over them.
    if name == "sparse_adafactor" or (name == "rowwise_adam" and spec[1]):
        actual = table, state
        chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-7)
    else:
        assert_same_on_devices((table, state), expected)
