"""On a mesh a step costs what the batch costs: what XLA makes of it, for a large one.

Programs are compiled for shapes alone; nothing of the size of the tables is allocated.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam._rows import map_rows

from ..helpers.mesh import (
    Case,
    bytes_on_one_device,
    largest_collective,
    specs_of,
    step_of,
)
from ..helpers.support import bcoo, compile_for_users, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SMALL = 80_000
LARGE = 240_000_000  # of eight parts, each has just below 2**31 numbers
WIDTH, NSE = 64, 1024
EXPLICIT = AxisType.Explicit


def abstract(case, rows):
    """Parameters and state, sharded as `init` shards them."""
    params = {
        "table": case.struct((rows, WIDTH), "float32", case.table),
        "w": case.struct((WIDTH,), "float32", P()),
    }
    state = jax.eval_shape(case.tx.init, params)
    specs = iter(specs_of(state, (rows, WIDTH), case.table))

    def place(path, x):
        spec = next(specs)[1] if "table" in str(path) else P()
        return case.struct(x.shape, x.dtype, spec)

    return params, jax.tree_util.tree_map_with_path(place, state)


def whole_step(case, rows):
    params, state = abstract(case, rows)
    ids = case.struct((NSE // 8, 8), "int32", case.batch)
    with jax.set_mesh(case.mesh):
        return step_of(case.tx, case.lookup).lower(params, state, ids), (params, state)


def unique(case, rows):
    """A coalesced gradient that is split over the axes of the batch."""
    params, state = abstract(case, rows)

    def step(params, state, values, ids):
        flags = {"unique_indices": True, "indices_sorted": True}
        grads = {"table": bcoo(values, ids, (rows, WIDTH), **flags), "w": None}
        updates, state = case.tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    values = case.struct((NSE, WIDTH), "float32", case.batch)
    ids = case.struct((NSE, 1), "int32", case.batch)
    step = jax.jit(step, donate_argnums=(0, 1))  # no mesh in the context
    return step.lower(params, state, values, ids), (params, state)


COSTS = [
    (Case("sparse_adam", (8,), P("x", None), P("x")), whole_step),
    (Case("sparse_adam", (4, 2), P("x", "y"), P("x"), EXPLICIT), whole_step),
    # What a mesh axis splits must be gathered before it is scattered.
    (Case("sparse_adam", (4, 2), P("x", None), P("y")), unique),
    (Case("sparse_adam", (2, 2, 2), P(None, "x"), P(("y", "z"))), unique),
    (Case("sparse_adam", (8,), P(), P("x")), unique),
    (Case("sparse_adam", (4, 2), P("x", None), P("y"), EXPLICIT), unique),
    (Case("lazy", (4, 2), P(None, "x"), P("x")), unique),
    (Case("lazy", (2, 2, 2), P(("x", "y"), "z"), P("z")), whole_step),
    (Case("sparse_adafactor", (4, 2), P("x", "y"), P(("x", "y"))), whole_step),
    (Case("sparse_adafactor", (8,), P("x", None), P("x")), unique),
    (Case("rowwise_adam", (4, 2), P("y", None), P("x"), EXPLICIT), unique),
    (Case("rowwise_adagrad", (4, 2), P("x", "y"), P("x")), unique),
    (Case("exact_adamw", (8,), P("x", None), P("x")), whole_step),
    (Case("exact_adamw", (4, 2), P("x", "y"), P("x"), EXPLICIT), unique),
]


@pytest.mark.parametrize(
    ("case", "lower"),
    slow_but(COSTS, COSTS[8]),
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_cost(case, lower):
    """In place; and what is sent, and held for a moment, knows nothing of the rows."""
    lowered, old = lower(case, LARGE)
    program = compile_for_users(lowered)
    memory = program.memory_analysis()
    tables = [x for x, _ in specs_of(old, (LARGE, WIDTH), case.table)]
    in_place = memory.alias_size_in_bytes - bytes_on_one_device(tables)
    # The scalars; and the dense leaf, unless XLA lays that out in another way.
    others = bytes_on_one_device(jax.tree.leaves(old)) - bytes_on_one_device(tables)
    assert 0 <= in_place <= others
    # Where rows are sharded, the touched rows of a table and two moments travel as one.
    array = NSE * (WIDTH + 1) * 4
    sent = largest_collective(program.as_text())
    assert 0 < sent <= 3 * array, sent
    # Gradient, sums, parameter, two moments, update, results: some of each at a time.
    # A bit for each row on one device were more.
    assert 10 * array < LARGE // 8 / 8
    assert memory.temp_size_in_bytes <= 10 * array, memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("spec", slow_but([P(), P("x", None)], P()))
def test_checkpoint(spec):
    """Rows that are read again for the gradient are read before a table is written."""
    case = Case("sparse_adam", (8,), spec, P("x"))
    params = {x: case.struct((SMALL, WIDTH), "float32", spec) for x in ("t", "u")}
    state = jax.tree.map(
        lambda x: case.struct(x.shape, x.dtype, spec if x.ndim else P()),
        jax.eval_shape(case.tx.init, params),
    )

    @jax.checkpoint
    def product(params, ids):
        return jnp.sum(params["t"][ids] * params["u"][ids], axis=1)

    step = osa.make_train_step(lambda *args: jnp.sum(jnp.tanh(product(*args))), case.tx)
    program = compile_for_users(
        step.lower(params, state, case.struct((NSE,), "int32", case.batch))
    )
    held = program.memory_analysis().temp_size_in_bytes
    assert held <= 20 * NSE * (WIDTH + 1) * 4 < SMALL // 8 * WIDTH * 4 * 3, held


def test_shard_map():
    """Each device updates its rows; all that is sent is the gradient."""
    case = Case("sparse_adam", (8,), P("x", None), P("x"))

    def local(table, state, values, ids):
        grad = osa.psum(bcoo(values, ids, (LARGE, WIDTH)), "x")
        update, state = case.tx.update(osa.local_rows(grad, "x"), state)
        return osa.apply_updates(table, update), state

    table = case.struct((LARGE, WIDTH), "float32", case.table)
    count = case.struct((), "int32", P())
    state = osa.ScaleBySparseAdamState(count, table, table)
    specs = (case.table, osa.ScaleBySparseAdamState(P(), case.table, case.table))
    values = case.struct((NSE, WIDTH), "float32", case.batch)
    ids = case.struct((NSE, 1), "int32", case.batch)
    step = jax.shard_map(
        local, mesh=case.mesh, in_specs=(*specs, P("x"), P("x")), out_specs=specs
    )
    step = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, values, ids)
    program = compile_for_users(step)
    memory = program.memory_analysis()
    in_place = bytes_on_one_device(jax.tree.leaves((table, state)))
    assert memory.alias_size_in_bytes == in_place
    assert largest_collective(program.as_text()) == NSE * WIDTH * 4
    assert memory.temp_size_in_bytes <= 10 * NSE * (WIDTH + 1) * 4


def add_to_table(add):
    """Compiles the addition of rows that a mesh axis splits to a whole table."""
    case = Case("sparse_adam", (8,), P(), P("x"))
    table = case.struct((SMALL, WIDTH), "float32", P())
    values = case.struct((NSE, WIDTH), "float32", P("x"))
    ids = case.struct((NSE, 1), "int32", P("x"))
    program = jax.jit(add, donate_argnums=0).lower(table, values, ids)
    program = compile_for_users(program)
    temporary = program.memory_analysis().temp_size_in_bytes
    return largest_collective(program.as_text()), temporary


def test_apply_updates():
    def add(table, values, ids):
        update = bcoo(values, ids, table.shape, unique_indices=True)
        return osa.apply_updates(table, update)

    assert max(add_to_table(add)) <= 3 * NSE * (WIDTH + 1) * 4


def test_without_care():
    """What the numbers are where JAX is left alone: those of the table."""

    def add(table, values, ids):
        return table.at[ids[:, 0]].add(values, unique_indices=True)

    assert min(add_to_table(add)) >= SMALL * WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("sparse_adam", (8,), P("x", None), P("x")),
        Case("sparse_adam", (4, 2), P(None, "x"), P("x"), EXPLICIT),
    ],
    ids=str,
)
def test_blocks(case):
    """On CPUs the rows of a large batch move in blocks, on a mesh too."""
    rows, nse = SMALL, 8192
    table = case.struct((rows, WIDTH), "float32", case.table)
    state = osa.ScaleBySparseAdamState(case.struct((), "int32", P()), table, table)
    values = case.struct((nse, WIDTH), "float32", case.batch)
    ids = case.struct((nse, 1), "int32", case.batch)

    def step(state, values, ids):
        return case.tx.update(bcoo(values, ids, table.shape), state)

    program = jax.jit(step, donate_argnums=0).lower(state, values, ids)
    program = compile_for_users(program)
    text = program.as_text()
    block = map_rows._BLOCK_BYTES // (WIDTH * 4)
    assert f"s32[{block},1]" in text
    assert largest_collective(text) == nse * WIDTH * 4  # the gradient, gathered once
