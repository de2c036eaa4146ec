"""Ids that a loss computes of floats: those that were fetched, however a step rounds.

The step of these losses rounds otherwise than the program of ids, as two programs of
XLA may: from its second trace on a loss multiplies by a little more than 1, so that
some ids of each batch are the next row's. Equations and numbers are the same in both.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._host_rows import HostRows
from optax_sparse_adam.host_tables._ids import RowIds

from ..helpers.host_tables import DIM, ROWS, assert_trained_alike, begin, host_params
from ..helpers.host_tables import train_in_memory as train
from ..helpers.support import assert_identical, need_devices, slow_but

COUNT, OTHERS = 48, 3
TX = osa.sparse_adam(1e-2)
NOT_FETCHED = r"has looked up rows that were not fetched.*round floats"


def batches(count=3, size=COUNT, rows=ROWS):
    """Numbers of which `floor(x)` is an id, and x * 1.00001 another one in some."""
    for number in range(count):
        rng = np.random.default_rng(number)
        x = rng.zipf(1.3, size) % (rows - 2) + rng.uniform(0.2, 0.8, size)
        x[:: size // OTHERS] = np.ceil(x[:: size // OTHERS]) * (1 - 5e-6)
        yield x.astype(np.float32), rng.normal(size=size).astype(np.float32)


def number_of(bits, first, others):
    """The first one of few bits, the other one of many."""
    near = jnp.full((), 1 + 2**-20, jnp.float32)
    is_other = (jax.lax.reduce_precision(near, 8, bits) - 1) * 2**20
    return first + is_other * (others - first)


def numbers(first, others):
    """One for the first trace, which is that of ids, and one for all others."""
    bits = by_trace(10, 23)
    return lambda: number_of(bits(), first, others)


def by_trace(first, others):
    """The same as a number of the program, as one of `np.random` is."""
    return functools.partial(next, itertools.chain([first], itertools.repeat(others)))


def rounding(look_up, change=jnp.multiply, number=None):
    """A loss whose ids are those of the batch's numbers, when it is traced first."""
    number = number or numbers(1.0, 1.00001)

    def loss(params, x, y):
        ids = jnp.floor(change(x, number())).astype(jnp.int32)
        rows = look_up(params["table"], ids)
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    return loss


def exact(look_up):
    """The same, of ids of NumPy."""

    def loss(params, ids, y):
        rows = look_up(params["table"], ids)
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    return loss


def scanned(table, ids):
    def body(carry, part):
        return carry + 1, table[part] * carry

    rows = jax.lax.scan(body, 1.0, ids.reshape(4, -1), reverse=True)[1]
    return rows.reshape(len(ids), -1)


def by_elements(table, ids):
    columns = jnp.arange(DIM)
    return table[ids[:, None], columns[None, :]]


def by_slices(table, ids):
    rows = [jax.lax.dynamic_slice(table, (i, 0), (1, DIM)) for i in ids[:4]]
    return jnp.concatenate([*rows, table[ids[4:]]])


def filled(table, ids):
    # Those above a row are out of bounds.
    shifted = jnp.where(ids < 40, ids, ids + ROWS)
    return table.at[shifted].get(mode="fill", fill_value=0)


def unique(table, ids):
    """Its inverse belongs to it."""
    rows, inverse = jnp.unique(ids, size=COUNT, fill_value=0, return_inverse=True)
    return table[rows][inverse]


def branched(table, ids):
    def odd():
        return table[ids]

    return jax.lax.cond(jnp.sum(ids) % 2, odd, lambda: table[ids[::-1]] * 2)


def by_a_ref(table, ids):
    """A mutable array of the loss alone, which holds the ids and is written."""
    ref = jax.new_ref(ids)
    first = ref[...]
    ref[...] = first + 1
    return table[first]


LOOKUPS = {
    "gather": lambda table, ids: table[ids],
    "clipped": lambda table, ids: table.at[ids * 9].get(mode="clip"),
    "promised": lambda table, ids: table.at[ids].get(mode="promise_in_bounds"),
    "filled": filled,
    "of_a_function": lambda table, ids: jnp.tanh(2 * table)[ids],
    "by_elements": by_elements,
    "by_slices": by_slices,
    "scan": scanned,
    "jit": jax.jit(lambda table, ids: table[ids]),
    "checkpoint": jax.checkpoint(lambda table, ids: jnp.sin(table[ids])),
    "unique": unique,
    "ref": by_a_ref,
    "branch": branched,
    "platform": lambda table, ids: jax.lax.platform_dependent(
        cpu=lambda: table[ids], default=lambda: table[ids[::-1]]
    ),
    "twice": lambda table, ids: table[ids] + table[ids[::-1] + 1],
    "frozen": lambda table, ids: (
        table[ids] + jax.lax.stop_gradient(table)[ids[::-1] + 1]
    ),
    "bags": lambda table, ids: jnp.repeat(
        osa.embedding_bag(table, ids.reshape(-1, 4), mode="mean"), 4, axis=0
    ),
    "flat_bags": lambda table, ids: osa.embedding_bag(
        table, ids, segment_ids=jnp.arange(COUNT) // 2, num_segments=COUNT
    ),
    "bags_of_a_function": lambda table, ids: jnp.repeat(
        osa.embedding_bag(jnp.sin(table), ids.reshape(-1, 2)), 2, axis=0
    ),
}


def floors(made):
    return [(np.floor(x).astype(np.int32), y) for x, y in made]


@pytest.mark.parametrize("name", slow_but(LOOKUPS, "scan"))
def test_those_that_were_fetched_are_looked_up(name):
    made, (rows, w) = [*batches()], begin()
    other = [np.floor(x * np.float32(1.00001)) for x, _ in made]
    assert all(
        (x != ids).any() for x, (ids, _) in zip(other, floors(made), strict=True)
    )
    look_up = LOOKUPS[name]
    known = train(exact(look_up), TX, {"table": rows, "w": w}, floors(made))
    params = host_params(rows, w)
    with host.HostTrainer(rounding(look_up), TX, params) as trainer:
        values = list(trainer.run(made))
        assert_alike(trainer, values, known)
    with host.HostTrainer(rounding(look_up), TX, params) as trainer:
        assert_alike(trainer, [trainer.step(*batch) for batch in made], known)


def assert_alike(trainer, values, known, rtol=1e-6):
    """The program differs, so XLA may round a sum otherwise: by a few bits."""
    params, _, expected = known
    np.testing.assert_allclose(np.array(values), expected, rtol=rtol)
    table = trainer.params["table"][np.arange(ROWS)]
    # A row that is trained instead of its neighbour is off by a rate, 1e-2.
    np.testing.assert_allclose(table, params["table"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(trainer.params["w"], params["w"], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "bags"])
def test_over_a_mesh(name):
    need_devices(8)
    made, (rows, w) = [*batches(size=64)], begin()  # bags for all of them
    look_up = LOOKUPS[name]
    known = train(exact(look_up), TX, {"table": rows, "w": w}, floors(made))
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    split = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in made]
    parts = rounding(look_up), TX, host_params(rows, w)
    with host.HostTrainer(*parts, mesh=mesh) as trainer:
        assert_alike(trainer, list(trainer.run(split)), known)


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
def test_two_tables(function):
    """Each gets its own ids, in the order of its lookups."""

    def loss(params, ids, y):
        a, b = params["a"], params["b"]
        if function:
            rows = (a + b)[ids] + a[ids + 1]
        else:
            rows = a[ids] + b[ids[::-1] // 2] * a[ids + 1]
        return jnp.mean((rows.sum(1) * params["w"] - y) ** 2)

    factor = numbers(1.0, 1.00001)

    def of_floats(params, x, y):
        ids = jnp.floor(x * factor()).astype(jnp.int32)
        return loss(params, ids, y)

    made, (rows, _) = [*batches()], begin()
    w = np.float32(1)
    known = train(loss, TX, {"a": rows, "b": rows * 2, "w": w}, floors(made))
    tables = [host_params(x, w)["table"] for x in (rows, rows * 2)]
    params = {"a": tables[0], "b": tables[1], "w": w}
    with host.HostTrainer(of_floats, TX, params) as trainer:
        values = np.array(list(trainer.run(made)))
        np.testing.assert_allclose(values, known[2], rtol=1e-6)
        for name in "ab":
            table = trainer.params[name][np.arange(ROWS)]
            np.testing.assert_allclose(table, known[0][name], rtol=0, atol=2e-5)


OF_A_DEVICE = {
    "rows": lambda table, users: table[users[:, 0]],
    "bags": lambda table, users: osa.embedding_bag(table, users, mode="mean"),
}
STALE = [*itertools.product(OF_A_DEVICE, ("exact_adam", "partition", "sparse_adam"))]


def to_device_tables(name):
    moving = osa.exact_adam(0.05)
    labels = {"table": "lazy", "w": "moving", "feat": "moving"}
    return {
        "exact_adam": moving,
        "partition": optax.partition({"lazy": TX, "moving": moving}, labels),
        "sparse_adam": TX,
    }[name]


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.slow
@pytest.mark.parametrize(("read", "name"), STALE)
@pytest.mark.parametrize("backend", ["plain", "kernel"], indirect=True)
def test_ids_of_rows_of_a_table_on_the_device(read, name, backend):
    """They are those of now: under exact_adam, rows that rested move, too."""

    def loss(params, users, y):
        features = OF_A_DEVICE[read](params["feat"], users)
        expert = jnp.argmax(features @ params["w"], 1)
        gate = jnp.take_along_axis(jnp.tanh(features), expert[:, None], 1)[:, 0]
        return jnp.mean((params["table"][expert * 8].sum(1) * gate - y) ** 2)

    rng, (rows, _) = np.random.default_rng(0), begin()
    more = {"feat": rng.normal(size=(50, 8)), "w": 0.1 * np.eye(8)}
    more = {key: x.astype(np.float32) for key, x in more.items()}
    made = [
        (rng.integers(0, 50, (16, 3)), rng.normal(size=16).astype(np.float32))
        for _ in range(6)
    ]
    tx = to_device_tables(name)
    known = train(loss, tx, more | {"table": rows}, made)
    stored = train(loss, TX, more | {"table": rows}, made)
    assert name == "sparse_adam" or not np.array_equal(known[2][2], stored[2][2])
    params = {**host_params(rows, more["w"]), "feat": more["feat"]}
    with host.HostTrainer(loss, tx, params) as trainer:
        assert_alike(trainer, list(trainer.run(made)), known)
        now = trainer.evaluate(loss)(*made[0])
        expected = jax.jit(lambda p, s: osa.evaluate(loss, read=s)(p, *made[0]))
        np.testing.assert_allclose(now, expected(*known[:2]), rtol=1e-6)


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.slow
@pytest.mark.parametrize("read", ["rows", "matrix", "scale"])
def test_rounding_of_parameters_as_they_are_now(read):
    """What comes of them on the way is a residual, as of those that are stored."""

    def read_of(params, users):
        ways = {"rows": params["feat"][users][:, 0], "matrix": params["w"].sum()}
        return jnp.tanh((ways | {"scale": params["s"]})[read])

    def loss_of(power):
        def loss(params, users, x, y):
            number = jax.lax.integer_pow(jnp.float32(1 + 2**-18), power())
            z = x * read_of(params, users) * number
            ids, part = jnp.floor(z).astype(jnp.int32) % ROWS, z - jnp.floor(z)
            return jnp.mean((params["table"][ids].sum(1) * part - y) ** 2)

        return loss

    rng, (rows, w) = np.random.default_rng(0), begin()
    params = {"feat": np.full((50, 8), 0.25, np.float32), "w": w, "s": np.float32(0.3)}
    scale = np.asarray(read_of(params, np.zeros(1, int))).ravel()[0]
    made = [
        (rng.integers(0, 50, COUNT), np.float32(x / scale), y) for x, y in batches(4)
    ]
    tx = osa.exact_adam(1e-3)
    known = train(loss_of(lambda: 1), tx, params | {"table": rows}, made)
    other = train(loss_of(lambda: 2), tx, params | {"table": rows}, made)
    assert np.abs(known[0]["table"] - other[0]["table"]).max() > 1e-4
    host_tree = params | host_params(rows, w)
    with host.HostTrainer(loss_of(by_trace(1, 2)), tx, host_tree) as trainer:
        # The step's derivative is of its own number.
        assert_alike(trainer, list(trainer.run(made)), known, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_points_of_a_grid_that_are_parameters():
    """Where they are in a cell belongs to the cell, though each program has them."""

    def loss_of(power):
        def loss(params, y):
            number = jax.lax.integer_pow(jnp.float32(1 + 2**-18), power())
            z = params["points"] * number
            cell = jnp.floor(z)
            rows = params["table"][cell.astype(jnp.int32)[:, 0] % ROWS]
            return jnp.mean(((rows * (z - cell)).sum(1) - y) ** 2)

        return loss

    (rows, _), (x, y) = begin(), next(batches(1))
    params = {"points": x[:, None]}
    tx = osa.lazy(optax.sgd(1e-3))
    known = train(loss_of(lambda: 1), tx, params | {"table": rows}, [(y,)])
    other = train(loss_of(lambda: 2), tx, params | {"table": rows}, [(y,)])
    assert np.abs(known[0]["table"] - other[0]["table"]).max() > 1e-4
    host_tree = params | {"table": host_params(rows, rows)["table"]}
    with host.HostTrainer(loss_of(by_trace(1, 2)), tx, host_tree) as trainer:
        # A step's own numbers are off by 2**-18 of up to ROWS, 4e-4 of a cell.
        np.testing.assert_allclose(trainer.step(y), known[2][0], rtol=1e-3)
        trained = trainer.params["table"]
    np.testing.assert_allclose(trained, known[0]["table"], rtol=0, atol=2e-5)


def quantised(table, _):
    """Straight through, as a training that is aware of its later rounding does."""
    return table + jax.lax.stop_gradient(jnp.round(table * 16) / 16 - table)


FUNCTIONS = {
    "scaled": lambda table, _: table * 8.0,
    "temperature": lambda table, tau: jnp.tanh(table) / jnp.maximum(tau, 0.1),
    "cast": lambda table, _: jnp.tanh(table.astype(jnp.float32) + 1),
    "where": lambda table, _: jnp.where(table > 0, table, 0.1 * table),
    "quantised": quantised,
    "padded": lambda table, _: jnp.where(jnp.arange(300)[:, None] == 0, 0.0, table),
    "checkpoint": lambda table, _: jax.checkpoint(jnp.tanh)(table),
    "barrier": lambda table, _: jax.lax.optimization_barrier(table * 2),
    "rounded scale": lambda table, tau: table * jnp.exp2(jnp.round(jnp.log2(tau))),
    "two of a barrier": lambda table, tau: jax.lax.optimization_barrier((table, tau))[
        0
    ],
    "two of a checkpoint": lambda table, tau: math.prod(
        jax.checkpoint(lambda x, y: (2 * x, y * 3))(table, tau)
    ),
    "constraint": lambda table, _: jax.lax.with_sharding_constraint(
        table, SingleDeviceSharding(jax.devices()[0])
    ),
    "fraction": lambda table, _: table % 1,
    "angle": lambda table, tau: jnp.atan2(table, tau),
    "one axis": lambda biases, tau: biases * tau,
}


def cell(z, users, _):
    below = jnp.floor(z)
    return below[users, 0].astype(jnp.int32), (z - below)[users, 0]


def straight_through(z, users, _):
    hard = (z > 0.5).astype(jnp.float32)
    soft = z + jax.lax.stop_gradient(hard - z)
    return (hard[users] @ 2.0 ** jnp.arange(4)).astype(jnp.int32), soft[users].sum(1)


def of_all(z, users, _):
    hard = (z > 0.5).astype(jnp.float32)
    ids = (hard @ 2.0 ** jnp.arange(4)).astype(jnp.int32)
    return ids[users], hard.sum(1)[users]


def chosen(z, users, _):
    scale = jnp.where(z[0, 0] > 0.5, 5.0, 1.0)
    return jnp.floor(scale * users / 9).astype(jnp.int32), scale


def in_a_checkpoint(z, users, _):
    below = jax.checkpoint(jnp.floor)(z[:COUNT])
    return below[:, 0].astype(jnp.int32), (z[:COUNT] - below)[:, 0]


def period(z, users, learnt):
    part = (z % learnt)[users, 0]
    return jnp.floor(part * 8).astype(jnp.int32), part


def gate(z, users, learnt):
    over = jnp.maximum(z - learnt, 0)
    mask = (over > 0)[users]
    return mask.astype(jnp.int32) @ 2 ** jnp.arange(4), (1 + over[users]).sum(1)


DECIDED = cell, straight_through, of_all, chosen, in_a_checkpoint, period, gate


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.slow
@pytest.mark.parametrize("decide", DECIDED)
def test_what_jumps_of_a_table_belongs_to_the_ids(decide):
    """Ids and what is computed beside are of one side of each jump."""

    def loss_of(power):
        def loss(params, users, y):
            near = params["feat"] * 0 + jnp.float32(1 + 2**-18)  # of each row
            z = params["feat"] * jax.lax.integer_pow(near, power())
            ids, weight = decide(z, users, params["s"])
            return jnp.mean((params["table"][ids].sum(1) * weight - y) ** 2)

        return loss

    rng, (rows, w) = np.random.default_rng(0), begin()
    unit = 1 if decide in (cell, in_a_checkpoint, period) else 0.5
    feat = rng.uniform(0.2, 0.8, (96, 4)) * unit + unit * rng.integers(0, 2, (96, 4))
    feat[::4] = np.maximum(1, np.round(feat[::4] / unit)) * unit
    # Just below a border at the first number, and just above at the other one.
    feat[::4] *= 1 / (1 + 1.5 * 2**-18)
    params = {"feat": feat.astype(np.float32), "w": w, "s": np.float32(unit)}
    made = [
        (rng.integers(0, 96, COUNT), rng.normal(size=COUNT).astype(np.float32))
        for _ in range(2)
    ]
    tx = osa.lazy(optax.sgd(1e-3, momentum=0.9))
    known = train(loss_of(lambda: 1), tx, params | {"table": rows}, made)
    other = train(loss_of(lambda: 2), tx, params | {"table": rows}, made)
    assert abs(known[2][0] - other[2][0]) > 1e-3
    host_tree = params | host_params(rows, w)
    with host.HostTrainer(loss_of(by_trace(1, 2)), tx, host_tree) as trainer:
        # A step's own numbers are off by 2**-18.
        assert_alike(trainer, list(trainer.run(made)), known, rtol=1e-3)
        for name in ("feat", "s"):
            trained, expected = trainer.params[name], known[0][name]
            np.testing.assert_allclose(trained, expected, rtol=0, atol=2e-5)


ROUTERS = {
    "product": lambda params, users: params["feat"][users] @ params["w"],
    "scaled": lambda params, users: params["feat"][users] * params["s"],
    "scaled table": lambda params, users: (params["feat"] * params["s"])[users],
    "pruned table": lambda params, users: jnp.where(
        jnp.abs(params["feat"]) > 0.1, params["feat"] * params["s"], 0
    )[users],
    "scaled table in a loop": lambda params, users: scaled_in_a_loop(
        params["feat"] * params["s"], users
    ),
    "scaled table in a branch": lambda params, users: jax.lax.cond(
        users[0] < 9, lambda t: t[users], lambda t: t[users] * 2, params["feat"] * 0.5
    ),
}


def scaled_in_a_loop(table, users):
    return jax.lax.map(lambda user: jnp.tanh(table * 2)[user], users)


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", slow_but(["sparse_adam", "exact_adam"], "sparse_adam"))
@pytest.mark.parametrize("router", slow_but(ROUTERS, "product"))
def test_neither_program_copies_a_table_on_the_device(router, name, monkeypatch):
    """The small one reads rows; the step reads some of them for a derivative alone.

    Their values come from the small program: XLA must still read them first.
    """

    def loss(params, users, y):
        logits = ROUTERS[router](params, users)
        rows = params["table"][jnp.argmax(logits, 1)]
        return jnp.mean((rows.sum(1) * logits.sum(1) - y) ** 2)

    sizes, advance, trace = [], HostRows.advance, RowIds._trace

    def measure(program, args):
        memory = program.lower(*args).compile().memory_analysis()
        sizes.append(memory.temp_size_in_bytes)

    def measured(self, program, args, rows):
        measure(program, args)
        return advance(self, program, args, rows)

    def measured_when_called(self, *asked):
        program, *rest = trace(self, *asked)

        def small(*args):
            measure(program, args)
            return program(*args)

        return small, *rest

    monkeypatch.setattr(HostRows, "advance", measured)
    monkeypatch.setattr(RowIds, "_trace", measured_when_called)
    rng, (rows, w) = np.random.default_rng(0), begin()
    feat = rng.normal(size=(50_000, DIM)).astype(np.float32)
    batch = rng.integers(0, 50_000, COUNT), np.zeros(COUNT, np.float32)
    params = host_params(rows, w) | {"feat": feat, "s": np.float32(0.7)}
    tx = {"exact_adam": osa.exact_adam(1e-2), "sparse_adam": TX}[name]
    with host.HostTrainer(loss, tx, params) as trainer:
        trainer.step(*batch)
    assert len(sizes) == 2
    assert max(sizes) < feat.nbytes / 8


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("are_ids", [False, True])
def test_what_is_looked_up_of_a_mask_belongs_to_the_ids(are_ids):
    """The mask is a function of a parameter alone: its rows are of one program."""

    def loss_of(power):
        def loss(params, users, x, y):
            number = jax.lax.integer_pow(jnp.float32(1 + 2**-18), power())
            mask = (jnp.tanh(params["feat"] * number) > 0.5)[users]
            if are_ids:
                ids = mask.astype(jnp.int32) @ (2 ** jnp.arange(4))
            else:
                ids = (
                    jnp.floor(jnp.where(mask[:, 0], x, x + 5)).astype(jnp.int32) % ROWS
                )
            weight = jnp.where(mask[:, 0], 2.0, -1.0)
            return jnp.mean((params["table"][ids].sum(1) * weight - y) ** 2)

        return loss

    rng, (rows, _) = np.random.default_rng(0), begin()
    feat = rng.normal(size=(300, 4)).astype(np.float32)
    near = np.float32(np.arctanh(0.5) * (1 - 4e-6))
    feat = np.where(rng.random(feat.shape) < 0.3, near, feat)
    made = [(rng.integers(0, 300, COUNT), *batch) for batch in batches()]
    tx = osa.lazy(optax.sgd(1e-3))
    known = train(loss_of(lambda: 1), tx, {"feat": feat, "table": rows}, made)
    other = train(loss_of(lambda: 2), tx, {"feat": feat, "table": rows}, made)
    assert abs(known[2][0] - other[2][0]) > 1e-3
    params = {"table": host_params(rows, rows)["table"], "feat": feat}
    with host.HostTrainer(loss_of(by_trace(1, 2)), tx, params) as trainer:
        values = list(trainer.run(made))
        np.testing.assert_allclose(values, known[2], rtol=1e-5)
        trained = trainer.params["table"]
    np.testing.assert_allclose(trained, known[0]["table"], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_a_table_keeps_its_gradient_row_sparse(function):
    """It is looked up for ids and beside: rows of the batch before have no momentum."""

    def loss(params, users, items, tau, y):
        features = FUNCTIONS[function](params["feat"], tau)
        of_users, of_items = (
            jnp.broadcast_to(features[x].reshape(16, -1), (16, DIM))
            for x in (users, items)
        )
        expert = jnp.argmax(of_users @ params["w"], 1)
        return jnp.mean(((params["table"][expert] * of_items).sum(1) - y) ** 2)

    rng, (rows, w) = np.random.default_rng(0), begin()
    shape = (300,) if function == "one axis" else (300, DIM)
    feat = rng.normal(size=shape).astype(np.float32)
    made = [
        (*rng.integers(0, 300, (2, 16)), tau, rng.normal(size=16).astype(np.float32))
        for tau in np.float32([1.5, 1, 0.7])
    ]
    tx = osa.lazy(optax.sgd(0.01, momentum=0.9))
    known = train(loss, tx, {"table": rows, "w": w, "feat": feat}, made)
    with host.HostTrainer(loss, tx, host_params(rows, w) | {"feat": feat}) as trainer:
        assert_alike(trainer, list(trainer.run(made)), known)
        trained, expected = trainer.params["feat"], known[0]["feat"]
    np.testing.assert_allclose(trained, expected, rtol=0, atol=2e-5)
    last = np.setdiff1d(np.arange(300), np.concatenate(made[-1][:2]))
    before = train(loss, tx, {"table": rows, "w": w, "feat": feat}, made[:-1])[0]
    np.testing.assert_allclose(trained[last], before["feat"][last], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact_adam", "sparse_adam"])
@pytest.mark.parametrize("axes", [(), ("x",)])
def test_ids_of_bags_over_a_mesh(axes, name):
    """A bag of a table that a mesh has is partitioned by a callback."""
    need_devices(8)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))

    def loss(params, users, y):
        features = OF_A_DEVICE["bags"](params["feat"], users)
        rows = params["table"][jnp.argmax(features, 1)]
        return jnp.mean((rows.sum(1) * features.sum(1) - y) ** 2)

    rng, (rows, w) = np.random.default_rng(0), begin()
    feat = rng.normal(size=(48, 8)).astype(np.float32)
    made = [
        (rng.integers(0, 48, (16, 3)), rng.normal(size=16).astype(np.float32))
        for _ in range(4)
    ]
    tx = to_device_tables(name)
    known = train(loss, tx, {"table": rows, "w": w, "feat": feat}, made)
    split = NamedSharding(mesh, PartitionSpec(*axes))
    params = host_params(rows, w) | {"feat": jax.device_put(feat, split)}
    with host.HostTrainer(loss, tx, params, mesh=mesh) as trainer:
        values = [trainer.step(*jax.device_put(batch, split)) for batch in made]
        assert_alike(trainer, values, known, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_a_random_key_in_the_state_is_no_parameter_of_ids():
    """Ids that need none are computed ahead, also where a state has stale rows."""
    labels = {"table": "a", "w": "b"}
    noise = optax.add_noise(0.01, 0.55, key=jax.random.key(0))
    parts = {"a": osa.exact_adam(1e-2), "b": noise}
    tx = optax.partition(parts, labels)
    rows, w = begin()
    with host.HostTrainer(
        exact(LOOKUPS["gather"]), tx, host_params(rows, w)
    ) as trainer:
        drawn = iter(floors([*batches()]))
        run = trainer.run(drawn)
        next(run)
        assert len(trainer.drawn) == 1
        run.close()


@pytest.mark.slow
def test_exact_adam_and_evaluate():
    """A loss reads rows up to date, and so does `evaluate`."""
    made, (rows, w) = [*batches(6)], begin()
    loss, tx = LOOKUPS["gather"], osa.exact_adam(1e-2)
    dense = optax.adam(1e-2)
    params = {"table": jnp.asarray(rows), "w": jnp.asarray(w)}
    state = dense.init(params)
    with host.HostTrainer(rounding(loss), tx, host_params(rows, w)) as trainer:
        values = list(trainer.run(made))
        seen = trainer.evaluate(rounding(loss))(*made[0])
        again = trainer.evaluate(exact(loss))(*floors(made)[0])
    for batch, value in zip(floors(made), values, strict=True):
        expected, grads = jax.value_and_grad(exact(loss))(params, *batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = dense.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(seen, again, rtol=1e-6)
    expected = exact(loss)(params, *floors(made)[0])
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


@pytest.mark.parametrize("name", slow_but(["sqrt", "log1p", "params"], "log1p"))
def test_where_both_round_alike_bits_are_those_in_memory(name):
    """As they were when a step computed its ids by itself."""

    def loss(params, x, y):
        if name == "params":
            ids = jnp.tanh(params["w"].sum() + x) * 100 + 150
        else:
            ids = getattr(jnp, name)(x) * 17
        rows = params["table"][ids.astype(jnp.int32)]
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    made, (rows, w) = [*batches(4)], begin()
    known = train(loss, TX, {"table": rows, "w": w}, made)
    with host.HostTrainer(loss, TX, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-5, 7])
@pytest.mark.parametrize("rule", ["step", "run", "static"])
def test_others_than_by_rounding_are_refused(rule, size):
    """Numbers of `np.random`: what a loss computes of them beside would be others."""
    made, (rows, w) = [*batches()], begin()
    plain = rounding(LOOKUPS["gather"], jnp.add, by_trace(0.0, size))

    def loss(params, x, y, mode="train"):
        return plain(params, x, y)

    static = {"mode": "noise"} if rule == "static" else {}
    with (
        host.HostTrainer(loss, TX, host_params(rows, w)) as trainer,
        pytest.raises(RuntimeError, match=NOT_FETCHED),
    ):
        list(trainer.run(made)) if rule == "run" else trainer.step(*made[0], **static)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("edge", ["first", "last"])
def test_one_that_would_be_padding_to_the_step(mode, edge):
    """By rounding over the first row, or the last: bags count what was fetched."""

    def look_up(table, ids):
        bags = osa.embedding_bag(table, ids.reshape(-1, 4), mode=mode)
        return jnp.repeat(bags, 4, axis=0)

    made, (rows, w) = [*batches()], begin()
    for x, _ in made:
        x[5] = ROWS * (1 - 5e-6) if edge == "last" else 1e-6
    others = {"first": -1e-5, "last": 1e-3}
    known = train(exact(look_up), TX, {"table": rows, "w": w}, floors(made))
    changed = rounding(look_up, jnp.add, numbers(0.0, others[edge]))
    parts = changed, TX, host_params(rows, w)
    with host.HostTrainer(*parts) as trainer:
        assert_alike(trainer, list(trainer.run(made)), known)


@pytest.mark.slow
@pytest.mark.parametrize("more", [-1, 1])
def test_another_number_of_lookups_is_refused(more):
    traces = []

    def look_up(table, ids):
        traces.append(1)
        return sum(table[ids] for _ in range(2 + more * (len(traces) > 1)))

    made, (rows, w) = [*batches()], begin()
    with (
        host.HostTrainer(rounding(look_up), TX, host_params(rows, w)) as trainer,
        pytest.raises(RuntimeError, match=NOT_FETCHED),
    ):
        trainer.step(*made[0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (3,), (COUNT,)])
def test_another_program_is_refused(shape):
    """Which computes more: what is given is of other numbers."""
    is_other = by_trace(False, True)

    def loss(params, x, y):
        if is_other():  # as by a global that changes
            y = y + jnp.sum(jnp.floor(jnp.resize(x, shape)).astype(jnp.int32) > 999)
        rows = params["table"][jnp.floor(x).astype(jnp.int32)]
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    made, (rows, w) = [*batches()], begin()
    with (
        jax.numpy_dtype_promotion("standard"),
        host.HostTrainer(loss, TX, host_params(rows, w)) as trainer,
        pytest.raises(RuntimeError, match=NOT_FETCHED),
    ):
        trainer.step(*made[0])


@pytest.mark.parametrize("name", slow_but(["loop", "branch"], "loop"))
def test_in_a_body_that_looks_rows_up_rounding_is_refused(name):
    """What is computed there is not followed."""

    bits = by_trace(10, 23)

    def look_up(table, x):
        now = bits()

        def of_body(x):
            x = x * number_of(now, 1.0, 1.00001)
            return table[jnp.floor(x).astype(jnp.int32)]

        if name == "loop":
            parts = x.reshape(4, -1)
            rows = jax.lax.scan(lambda n, x: (n, of_body(x)), 0, parts)[1]
            return rows.reshape(len(x), -1)
        return jax.lax.cond(len(x) > 0, of_body, lambda x: 2 * of_body(x), x)

    def loss(params, x, y):
        rows = look_up(params["table"], x)
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    made, (rows, w) = [*batches()], begin()
    with (
        host.HostTrainer(loss, TX, host_params(rows, w)) as trainer,
        pytest.raises(RuntimeError, match=NOT_FETCHED),
    ):
        list(trainer.run(made))


def masked(x, labels):
    """Padding is -1, which is a row to JAX."""
    is_id = x >= 1
    return jnp.where(is_id, x, -1.0).astype(jnp.int32), labels * is_id, is_id


def ordered(x, labels):
    """By a float: labels come with their ids."""
    ids = jnp.arange(COUNT, dtype=jnp.int32)
    ids, labels = jax.lax.sort((x, ids, labels))[1:]
    return ids, labels, 1 / (1 + ids[::-1])


def ordered_with_floats(x, labels):
    return ordered(x, labels / 4)


def between(x, labels):
    """A grid: the part that is left belongs to the row below."""
    low = jnp.floor(x)
    return low.astype(jnp.int32), labels, x - low


def remainder(x, labels):
    """A remainder of what rounds: both are of the one that was given."""
    y = jnp.exp(jnp.log(x))
    return jnp.floor(y).astype(jnp.int32), labels, y % 1


def parts(x):
    ids = jnp.floor(x).astype(jnp.int32)
    return ids, x - ids


def in_a_jit(x, labels):
    ids, part = jax.jit(parts)(x)
    return ids, labels, part


def in_a_scan(x, labels):
    """Which computes something else, too."""

    def body(count, now):
        return count + 1, (*parts(now[0]), now[1] * 2)

    ids, part, labels = jax.lax.scan(body, 0, (x, labels))[1]
    return ids, labels, part


def in_a_checkpoint(x, labels):
    ids, part = jax.checkpoint(parts)(x)
    return ids, labels, part


def in_a_branch(x, labels):
    ids, part = jax.lax.cond(labels[0] < 9, parts, lambda x: parts(-x), x)
    return ids, labels, part


def behind_a_barrier(x, labels):
    ids, part = parts(jax.lax.optimization_barrier(x))
    return ids, labels, part


def twice(x, labels):
    """A function that is called again for the mask."""

    def bucket(x):
        return jnp.floor(jnp.exp(jnp.log(x))).astype(jnp.int32)

    return bucket(x), labels, bucket(x) > 8


def twice_in_a_loop(x, labels):
    """Which is another one each time, as the body is."""

    def bucket(x):
        return jax.lax.map(lambda x: jnp.floor(x).astype(jnp.int32), x)

    return bucket(x), labels, bucket(x) > 8


def beside_a_label(x, labels):
    """A value and a result of labels, of one program; ids of the value behind it."""

    @jax.checkpoint
    def encode(x, labels):
        z = x * 2
        return z, jnp.mean((z - labels) ** 2)

    z, score = encode(x, labels)
    return jnp.floor(z).astype(jnp.int32), labels + score, z >= 18


def around(x, labels):
    """A function of jax.numpy that is a program of its own."""
    near = jnp.round(x + 0.5)
    return near.astype(jnp.int32), labels, x - near


def after_a_callback(x, labels):
    """Its integer is one of the step alone, and there are as many in both programs."""
    shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    one, zero = io_callback(lambda _: (np.float32(1), np.int32(0)), shapes, labels[0])
    labels = jnp.floor(labels * one + 0.25).astype(jnp.int32) + zero
    return jnp.floor(x).astype(jnp.int32), labels, True


BESIDE = (
    *(masked, ordered, ordered_with_floats, between, remainder, around, twice),
    *(
        twice_in_a_loop,
        beside_a_label,
        in_a_jit,
        in_a_scan,
        in_a_checkpoint,
        in_a_branch,
        behind_a_barrier,
    ),
    after_a_callback,
)


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("beside", slow_but(BESIDE, in_a_jit))
def test_what_is_computed_beside_ids_fits(beside):
    """To the value and the rows of the small program's rounding."""

    def loss_of(factor):
        def loss(params, x, labels):
            # Only the sixth number is rounded, by which it goes over a border.
            x = jnp.where(jnp.arange(COUNT) == 5, x * factor(), x)
            ids, labels, weight = beside(x, labels)
            rows = params["table"][ids] @ params["w"]
            return jnp.sum((rows.sum(1) - labels) ** 2 * weight)

        return loss

    x = np.arange(COUNT, dtype=np.float32) + 2.5
    border = {masked: 1, ordered: x[6], ordered_with_floats: x[6]}.get(beside, 9)
    x[5] = border * np.float32(1 - 5e-6)
    made, (rows, w) = [(x, np.arange(COUNT, dtype=np.int32) % 7)], begin()
    same = loss_of(lambda: 1.0)
    known = train(same, TX, {"table": rows, "w": w}, made)
    other = loss_of(numbers(1.0, 1.00001))
    with host.HostTrainer(other, TX, host_params(rows, w)) as trainer:
        assert_alike(trainer, list(trainer.run(made)), known)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", ["sign", "round"])
def test_floats_of_parameters_keep_their_derivatives(name):
    """As of hash codes, whose estimator passes the gradient straight through.

    It has the name of a function of `jax.numpy` that has no derivative.
    """

    def straight(x):
        return x + jax.lax.stop_gradient(getattr(jnp, name)(x) - x)

    straight.__name__ = name
    straight = jax.jit(straight)

    def loss(params, x, y):
        code = straight(jnp.outer(x, params["w"][0]))
        ids = (code > 0).astype(jnp.int32) @ jnp.arange(1, 5, dtype=jnp.int32)
        rows = params["table"][ids]
        return jnp.mean((rows @ params["w"] * code).sum(1) * y)

    made, (rows, w) = [*batches()], begin()
    known = train(loss, TX, {"table": rows, "w": w}, made)
    with host.HostTrainer(loss, TX, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)
    assert (np.asarray(known[0]["w"])[0] != w[0]).all()


@pytest.mark.slow
def test_a_parameter_of_a_weak_type():
    """Until the first update: bfloat16 times a Python number is a bfloat16."""

    def loss(params, x, y):
        ids = jnp.floor(x * params["s"]).astype(jnp.int32) % ROWS
        rows = params["table"][ids] @ params["w"]
        return jnp.mean((jnp.tanh(rows).sum(1) * params["s"] - y) ** 2)

    made = [(jnp.asarray(x, jnp.bfloat16), y) for x, y in batches()]
    rows, w = begin()
    with jax.numpy_dtype_promotion("standard"):
        params = {"table": jnp.asarray(rows), "w": jnp.asarray(w), "s": 1.3}
        state, step = TX.init(params), osa.make_train_step(loss, TX)
        for batch in made:
            params, state, known = step(params, state, *batch)
        with host.HostTrainer(loss, TX, host_params(rows, w) | {"s": 1.3}) as trainer:
            value = [*trainer.run(made)][-1]
    np.testing.assert_allclose(value, known, rtol=1e-6)


def routed(x, w, bits):
    """Two experts of five, of which two have nearly equal scores."""
    scores = jnp.outer(x, w.sum(0)) * 0.01
    # The first one again, as it is rounded.
    number = number_of(bits, 1 - 5e-6, 1 + 5e-6)
    scores = jnp.concatenate([scores, scores[:, :1] * number], axis=1)
    return jax.lax.top_k(scores, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_router(is_inside):
    """The derivative goes to what was chosen; inside of a checkpoint it is refused."""

    def loss_of(bits):
        def loss(params, x, y):
            route = functools.partial(routed, bits=bits())
            route = jax.checkpoint(route) if is_inside else route
            gates, ids = route(x, params["w"])
            rows = params["table"][ids].sum(2) * jnp.array([[1.0, 0.5]])
            return jnp.mean(((gates * rows).sum(1) - y) ** 2)

        return loss

    rows, w = begin()
    w[:, 0] = np.abs(w[:, 0]) * 3  # the two best are those of equal scores
    made, tx = [next(batches())], osa.lazy(optax.sgd(1e-3))
    known = train(loss_of(lambda: 10), tx, {"table": rows, "w": w}, made)
    others = loss_of(lambda: 23)
    other = train(others, tx, {"table": rows, "w": w}, made)
    assert np.abs(known[0]["w"] - other[0]["w"]).max() > 1e-4
    loss = loss_of(by_trace(10, 23))
    with host.HostTrainer(loss, tx, host_params(rows, w)) as trainer:
        if is_inside:
            with pytest.raises(RuntimeError, match=NOT_FETCHED):
                list(trainer.run(made))
        else:
            assert_alike(trainer, list(trainer.run(made)), known)


def piece(x, w, number):
    z = x * w.sum() * number
    value = jnp.where(z > 9, 5 * z, z)
    return value, value > 9


def largest(x, w, number):
    """Of two that are nearly equal: the first one, to the small program."""
    z = jnp.stack([x * w[0, 0], x * w[1, 1] * (number - 5e-6)])
    return jnp.tanh(z.max(0) / 9), jnp.argmax(z, axis=0)


def position(x, w, number):
    """In a grid whose width is a parameter."""
    count, part = jnp.divmod(x * number, 12 * w[0, 0])
    return part, count


def level(x, w, number):
    """A jump of the batch, by which the derivative of a parameter goes."""
    value = jnp.floor(x * number) * w.sum()
    return value, value


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("decided", [piece, largest, position, level])
def test_decisions_of_parameters_and_their_derivatives(decided):
    """A value, and the derivative of the side on which it was decided to be."""

    def loss_of(factor):
        def loss(params, x, y):
            value, decision = decided(x, params["w"], factor())
            ids = decision.astype(jnp.int32) + jnp.arange(COUNT, dtype=jnp.int32)
            rows = params["table"][ids] @ params["w"]
            return jnp.sum((rows.sum(1) - y) ** 2 * value)

        return loss

    rows, w = begin()
    w = np.float32(np.eye(*w.shape) / 4)
    x = np.arange(COUNT, dtype=np.float32) + 2.5
    x[5] = 9 * np.float32(1 - 5e-6)
    made = [(x, np.ones(COUNT, np.float32))]
    tx = osa.lazy(optax.sgd(1e-5))
    known = train(loss_of(lambda: 1.0), tx, {"table": rows, "w": w}, made)
    other = loss_of(numbers(1.0, 1.00001))
    with host.HostTrainer(other, tx, host_params(rows, w)) as trainer:
        assert_alike(trainer, list(trainer.run(made)), known)
        moved = np.asarray(known[0]["w"]) - w
        np.testing.assert_allclose(
            trainer.params["w"] - w, moved, rtol=1e-4, atol=1e-4 * np.abs(moved).max()
        )


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_integers_of_a_loop_that_computes_something_else_too():
    """Of rows, which ids may not depend on: these do not."""

    def loss(params, ids, y):
        rows = params["table"][ids]
        best = jnp.argmax(rows, axis=-1).astype(jnp.int32)

        def body(carry, now):
            mixed, hits = carry
            mixed = (mixed * 31 + now[0]) % ROWS
            return (mixed, hits + (now[1] == 3)), mixed

        (_, hits), others = jax.lax.scan(body, (0, 0), (ids, best))
        more = params["table"][others] @ params["w"]
        return jnp.mean((rows @ params["w"] + more).sum(1) * y), hits

    made, (rows, w) = floors(batches()), begin()
    known = train(loss, TX, {"table": rows, "w": w}, made, has_aux=True)
    parts = loss, TX, host_params(rows, w)
    with host.HostTrainer(*parts, has_aux=True) as trainer:
        values = list(trainer.run(made))
        for value, expected in zip(values, known[2], strict=True):
            assert_identical([*map(np.asarray, value)], [*expected])


def mapped(fun):
    return functools.partial(jax.lax.map, fun)


def looped(fun):
    return lambda x: jax.lax.scan(lambda c, x: (c, fun(x)), 0, x)[1]


def branching(fun):
    return lambda x: jax.lax.cond(jnp.sum(x) > -1, fun, lambda x: x, x)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, jax.vmap, mapped, looped, branching],
)
@pytest.mark.parametrize("make", [np.float32, jnp.array, float, "callback"])
def test_two_functions_of_other_constants(wrap, make):
    """Of one text otherwise: one scales ages, the other one incomes."""

    def scaled(mean, size):
        if make == "callback":

            def on_host(x):
                return ((np.asarray(x) - mean) / size).astype(np.float32)

            on_host.__qualname__ = "scaled"
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            return lambda x: jax.pure_callback(
                on_host, shape, x, vmap_method="expand_dims"
            )
        held = make(mean), make(size)
        return jax.jit(lambda x: (x - held[0]) / held[1])

    def loss(params, x, y):
        is_by_number = wrap in (jax.vmap, mapped, looped)
        ages, incomes = (
            wrap(fun if is_by_number else jax.vmap(fun))(x)
            for fun in (scaled(150.0, 90.0), scaled(90.0, 40.0))
        )
        ids = jnp.stack([jax.nn.sigmoid(z) * 255 for z in (ages, incomes)], axis=1)
        rows = params["table"][ids.astype(jnp.int32)].sum(1) @ params["w"]
        return jnp.mean((jnp.tanh(rows).sum(1) * ages - incomes * y) ** 2)

    made, (rows, w) = [*batches(2)], begin()
    known = train(loss, TX, {"table": rows, "w": w}, made)
    with host.HostTrainer(loss, TX, host_params(rows, w)) as trainer:
        assert_alike(trainer, list(trainer.run(made)), known)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("scale", [1.0, np.float32(1), np.ones(COUNT, np.float32)])
def test_arguments_that_are_numbers(is_eager, scale):
    """Without `jit` they are numbers of the program; and it shows what it computes."""
    noise = np.linspace(0, 1e-6, COUNT, dtype=np.float32)

    def loss_of(factor):
        def loss(params, x, y, scale):
            z = x * scale * factor() + noise
            jax.debug.print("{}", z.sum() * 2)
            jax.jit(lambda x: jax.debug.print("{}", x.sum() * 3))(z)
            ids = jnp.floor(z).astype(jnp.int32)
            rows = params["table"][ids] @ params["w"]
            return jnp.mean((jnp.tanh(rows).sum(1) - y) ** 2 * (z - ids))

        return loss

    made, (rows, w) = [next(batches())], begin()
    same = functools.partial(loss_of(lambda: 1.0), scale=scale)
    known = train(same, TX, {"table": rows, "w": w}, made)
    loss = loss_of(numbers(1.0, 1.00001))
    with (
        jax.disable_jit(is_eager),
        host.HostTrainer(loss, TX, host_params(rows, w)) as trainer,
    ):
        assert_alike(trainer, [trainer.step(*made[0], scale=scale)], known)


@pytest.mark.slow
def test_what_is_given_over_a_mesh_stays_split():
    need_devices(8)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("x"))
    seen = []

    def loss(params, x, y):
        z = jnp.log1p(x)
        jax.debug.inspect_array_sharding(z, callback=seen.append)
        rows = params["table"][(z * 9).astype(jnp.int32)] @ params["w"]
        return jnp.mean(rows.sum(1) * z)  # of no labels, which are split

    batch = jax.device_put(next(batches(size=64)), split)
    parts = loss, TX, host_params(*begin())
    with host.HostTrainer(*parts, mesh=mesh) as trainer:
        trainer.step(*batch)
    assert seen
    assert all(x.is_equivalent_to(split, 1) for x in seen)


@pytest.mark.slow
def test_only_what_ids_come_from_is_given(monkeypatch):
    """No floats that nothing else reads; nothing where ids are integers.

    Of comparisons their sum; no weights, which a cast does not round otherwise.
    """
    made, (rows, w) = [*batches()], begin()

    def loss(params, x, y):
        known = jnp.where(x > 3, x, x + 0.25)
        rows = params["table"][jnp.floor(known).astype(jnp.int32)]
        return jnp.mean(jnp.where(rows > 0, rows, 0.1 * rows).sum(1) * y)

    fetch, given = HostRows.fetch, []

    def noted(host, *args):
        result = fetch(host, *args)
        given.append([(x.dtype, x.size) for x in result.residuals.values()])
        return result

    monkeypatch.setattr(HostRows, "fetch", noted)

    def compared(params, x, y):
        ids = (x[:, None] > jnp.arange(ROWS - 1.0)[None]).sum(1)
        return loss(params, x, y) + params["table"][ids.astype(jnp.int32)].sum()

    def cast(params, x, y):
        w = params["w"].astype(jnp.bfloat16)
        ids = jnp.argmax(x[:, None] * w[:1].astype(jnp.float32), axis=1)
        rows = params["table"][ids.astype(jnp.int32)].astype(jnp.bfloat16)
        return jnp.mean((rows @ w).sum(1).astype(jnp.float32) * y)

    integers = exact(LOOKUPS["gather"]), floors(made)[0]
    cases = (loss, made[0]), (compared, made[0]), (cast, made[0]), integers
    for fun, batch in cases:
        with host.HostTrainer(fun, TX, host_params(rows, w)) as trainer:
            trainer.step(*batch)
    one = np.int32, COUNT
    assert given == [[one], [one, one], [one], []]
