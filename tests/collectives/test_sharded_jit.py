"""Training on a mesh of eight devices, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam._rows import map_rows

from ..helpers.mesh import OPTIMIZERS, Case, specs_of, step_of
from ..helpers.support import (
    assert_close,
    assert_identical,
    assert_same_on_devices,
    bcoo,
    random_entries,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

ROWS, WIDTH, STEPS = 64, 16, 20
EXPLICIT = AxisType.Explicit

# Every optimiser, mesh, kind of axis, and way for the table and the batch to lie on the
# axes, with each other as far as they could matter to each other.
CASES = [
    Case("sparse_adam", (8,), P("x", None), P("x")),
    Case("sparse_adam", (4, 2), P("x", "y"), P("y")),
    Case("sparse_adam", (2, 2, 2), P(("x", "y"), "z"), P(("x", "z"))),
    Case("sparse_adam", (2, 2, 2), P("x", "y"), P(("z", "x")), EXPLICIT),
    Case("lazy", (4, 2), P("x", "y"), P(("x", "y"))),
    Case("lazy", (8,), P("x", None), P("x"), EXPLICIT),
    Case("per_row", (4, 2), P("y", "x"), P("y"), EXPLICIT),
    Case("sparse_adafactor", (4, 2), P("x", "y"), P("x")),
    Case("sparse_adafactor", (8,), P(None, "x"), P("x"), EXPLICIT),
    Case("rowwise_adam", (2, 2, 2), P("z", ("x", "y")), P("x")),
    Case("exact_adamw", (4, 2), P("x", "y"), P("y")),
    Case("exact_adamw", (8,), P("x", None), P("x")),
    Case("exact_adamw", (2, 2, 2), P("x", "y"), P(("z", "x")), EXPLICIT),
]


def start():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    ids = rng.zipf(1.3, (STEPS, 16, 4)).astype(np.int32) % ROWS
    return {"table": table, "w": np.ones(WIDTH, np.float32)}, ids


@functools.cache
def on_one_device(optimizer):
    params, batches = start()
    params = jax.tree.map(jnp.asarray, params)
    tx = OPTIMIZERS[optimizer]
    state = tx.init(params)
    step = step_of(tx, lambda table, ids: table[ids])
    for ids in batches:
        params, state, value = step(params, state, jnp.asarray(ids))
    return jax.device_get((params, state, value))


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(CASES, CASES[7]), ids=str)
def test_training(case):
    params, batches = start()
    specs = {"table": case.table, "w": P()}
    params = {name: case.put(x, specs[name]) for name, x in params.items()}
    state = case.tx.init(params)
    told = None  # in some cases, how the results are to lie on the mesh
    if case.shape == (8,):
        told = (*jax.tree.map(lambda x: x.sharding, (params, state)), None)
    step = step_of(case.tx, case.lookup, told)
    with jax.set_mesh(case.mesh):
        for ids in batches:
            params, state, value = step(params, state, case.put(ids, case.batch))
    # Sums over rows and columns are taken in another order: of the loss and of w, and
    # for the norm, the means and the moments of them; some roundings for each step.
    expected = on_one_device(case.optimizer)
    results = zip(
        jax.tree.leaves((params, state, value)), jax.tree.leaves(expected), strict=True
    )
    for a, e in results:
        largest = np.max(np.abs(e), initial=0)
        assert_close(a, e, 2e-6, magnitude=np.maximum(np.abs(e), 0.1 * largest))
    for x, spec in specs_of((params, state), (ROWS, WIDTH), case.table):
        kept = NamedSharding(case.mesh, spec)
        assert x.sharding.is_equivalent_to(kept, x.ndim), (x.shape, x.sharding)


# What is bit for bit: given the gradient, everything but sums over a sharded axis, that
# is the norm over columns, and the means over them.
EXACT = [
    Case("sparse_adam", (8,), P("x", None), P("x")),
    Case("sparse_adam", (4, 2), P("x", "y"), P("y")),
    Case("sparse_adam", (4, 2), P("x", "y"), P("x"), EXPLICIT),
    Case("per_row", (4, 2), P(None, "x"), P("y")),
    Case("rowwise_adam", (8,), P("x", None), P("x")),
    Case("rowwise_adagrad", (4, 2), P("x", None), P("y"), EXPLICIT),
]

# Many rows, which move in blocks; Explicit axes do not split the entries then.
BLOCKS = [
    Case("sparse_adam", (8,), P("x", None), P("x")),
    Case("sparse_adam", (8,), P(None, "x"), P(), EXPLICIT),
    Case("per_row", (8,), P("x", None), P(), EXPLICIT),
    Case("per_row", (8,), P(None, "x"), P()),
    Case("rowwise_adam", (8,), P("x", None), P("x")),
]
BIT_FOR_BIT = [
    *((case, "jit") for case in EXACT),
    *((case, "blocks") for case in BLOCKS),
    (EXACT[2], "eager"),
]


@pytest.mark.parametrize(
    ("case", "way"),
    slow_but(
        BIT_FOR_BIT,
        (EXACT[5], "jit"),
        (BLOCKS[0], "blocks"),
    ),
    ids=str,
)
def test_bit_for_bit(case, way):
    """One gradient with duplicates and padding, split over the batch's axis."""
    rng = np.random.default_rng(1)
    table, nse, eager = start()[0]["table"], 32, way == "eager"
    if way == "blocks":
        table, nse = rng.standard_normal((800, 64)).astype(np.float32), 1600
        assert map_rows._block_rows(jnp.zeros((nse, 64))) < nse

    def step(table, state, values, ids):
        grad = bcoo(values, ids, table.shape)
        update, state = case.tx.update(grad, state, table)
        return osa.apply_updates(table, update), state

    step = step if eager else jax.jit(step)
    one, many = jnp.asarray(table), case.put(table, case.table)
    one_state, many_state = case.tx.init(one), case.tx.init(many)
    for _ in range(1 if eager else 3):
        entries = random_entries(rng, table.shape, 1, nse, outside=True)
        one, one_state = step(one, one_state, *entries)
        entries = [case.put(x, case.batch) for x in entries]
        many, many_state = step(many, many_state, *entries)
    assert_same_on_devices((many, many_state), (one, one_state))


@pytest.mark.parametrize("axis_type", slow_but([AxisType.Auto, EXPLICIT], EXPLICIT))
@pytest.mark.parametrize("dtype", slow_but(["uint8", "int32"], "uint8"))
def test_one_stored_entry(axis_type, dtype):
    """To which padding is added on a mesh: as a uint8, its -1 would be row 255."""
    case = Case("sparse_adam", (8,), P("x"), P(), axis_type)
    table = np.random.default_rng(2).standard_normal((256, 3)).astype(np.float32)
    ids, values = np.full((1, 1), 255, dtype), np.ones((1, 3), np.float32)

    @jax.jit
    def step(table, state, values, ids):
        grad = bcoo(values, ids, table.shape, unique_indices=True)
        update, state = case.tx.update(grad, state, table)
        return osa.apply_updates(osa.apply_updates(table, update), grad), state

    one, many = jnp.asarray(table), case.put(table, case.table)
    expected = step(one, case.tx.init(one), values, ids)
    entries = [case.put(x, P()) for x in (values, ids)]
    assert_identical(step(many, case.tx.init(many), *entries), expected)
