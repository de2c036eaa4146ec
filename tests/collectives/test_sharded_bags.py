"""Bags of ids under `jit` of sharded tables: sums travel, and no rows."""

import functools
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.support import assert_close, program_environment, slow_but

TABLE = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
IDS = np.random.default_rng(1).integers(-9, 49, (8, 16)).astype(np.int32)
WEIGHTS = np.random.default_rng(2).normal(size=IDS.shape).astype(np.float32)
_COLLECTIVE = re.compile(r" = (\w+\[[\d,]*\]).* (?:all|collective|reduce)-[a-z-]+\(")

# How table and ids lie on a mesh of (4, 2) devices, and what is sent forwards.
LAYOUTS = {
    "rows": (P("x"), P(), {"f32[8,4]"}),
    "rows of all": (P(("x", "y")), P(), {"f32[8,4]"}),
    "rows, columns": (P("x", "y"), P(), {"f32[8,2]"}),
    "rows, bags": (P("x"), P("y"), {"f32[4,4]"}),
    "rows, bags of one axis": (P("x"), P("x"), {"f32[8,4]", "s32[8,16]"}),
    "bags": (P(), P("x"), set()),
}


def _expected(ids, weights):
    inside = (ids >= 0) & (ids < 40)
    rows = np.where(inside[..., None], TABLE[np.where(inside, ids, 0)], 0.0)
    return (rows.astype(np.float64) * weights[..., None]).sum(1)


def _put(mesh, *pairs):
    return [_put_one(mesh, *pair) for pair in pairs]


def _put_one(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent(layout):
    of_table, of_ids, sent = LAYOUTS[layout]
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Auto,) * 2)
    table, ids = _put(mesh, (TABLE, of_table), (IDS, of_ids))
    compiled = jax.jit(osa.embedding_bag).lower(table, ids).compile()
    assert set(_COLLECTIVE.findall(compiled.as_text())) == sent
    expected = _expected(IDS, np.ones(IDS.shape))
    assert_close(compiled(table, ids), expected, 1e-6, magnitude=10.0)  # of 16 rows


# The same over Explicit axes, where the bags go to all devices.
EXPLICIT = {
    "rows": {"f32[8,4]"},
    "rows of all": {"f32[8,4]"},
    "rows, columns": {"f32[8,2]"},
    "rows, bags": {"f32[4,4]", "f32[8,4]"},
    "rows, bags of one axis": {"f32[8,4]", "s32[8,16]"},
    "bags": {"f32[8,4]"},
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "rows", "rows, bags"))
def test_what_is_sent_over_explicit_axes(layout):
    """And the program can be exported: no operation in it is Python's."""
    of_table, of_ids, _ = LAYOUTS[layout]
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        table, ids = _put(mesh, (TABLE, of_table), (IDS, of_ids))
        program = jax.jit(osa.embedding_bag)
        compiled = program.lower(table, ids).compile()
        assert set(_COLLECTIVE.findall(compiled.as_text())) == EXPLICIT[layout]
        found = jax.export.export(program)(table, ids).call(table, ids)
    expected = _expected(IDS, np.ones(IDS.shape))
    for sums in (compiled(table, ids), found):
        assert_close(sums, expected, 1e-6, magnitude=10.0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_weights_of_a_batch_over_explicit_axes(mode):
    """Ids and weights lie on some devices each; both gradients, as on one device."""
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    ids, weights = IDS % 40, np.abs(WEIGHTS) + 0.1

    def loss(table, weights, ids):
        return jnp.sum(
            jnp.sin(osa.embedding_bag(table, ids, weights=weights, mode=mode))
        )

    expected = jax.jit(jax.grad(loss, (0, 1)))(TABLE, weights, ids)
    with jax.set_mesh(mesh):
        put = _put(mesh, (TABLE, P()), (weights, P("x")), (ids, P("x")))
        for gradient in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
            for actual, other in zip(gradient(*put), expected, strict=True):
                assert_close(actual, other, 1e-6, magnitude=10.0)
        rows = jax.jit(osa.grad(loss))(*put)
        assert_close(rows.todense(), expected[0], 1e-6, magnitude=10.0)


# How a table, ids and weights lie, each otherwise; all but the first raise in JAX.
OTHERWISE = {
    "all as ids": ("sum", P(), P("x"), P("x")),
    "weights everywhere": ("sum", P("x"), P("x"), P()),
    "ids everywhere": ("sqrtn", P(None, "y"), P(), P(("x", "y"))),
    "of two axes": ("mean", P(None, "y"), P("y"), P("x")),
    "along the bag": ("sum", P("x"), P(None, "y"), P("x")),
    "of all axes": ("mean", P(None, "y"), P(("x", "y")), P()),
}
OTHERWISE_TWICE = [(name, False) for name in OTHERWISE] + [
    (name, True) for name in OTHERWISE if name != "along the bag"
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_flat"),
    slow_but(OTHERWISE_TWICE, ("of two axes", True)),
)
def test_weights_that_lie_otherwise(name, is_flat):
    """They come to where the ids are; both gradients, as on one device."""
    mode, *specs = OTHERWISE[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit,) * 2)
    shape, bags = IDS.shape, {}
    if is_flat:
        shape, bags = (-1,), {"segment_ids": np.arange(128) // 16, "num_segments": 8}
    ids, weights = (x.reshape(shape) for x in (IDS, np.abs(WEIGHTS) + 0.1))

    def loss(table, weights, ids):
        pooled = osa.embedding_bag(table, ids, weights=weights, mode=mode, **bags)
        return jnp.sum(jnp.sin(pooled))

    expected = jax.jit(jax.grad(loss, (0, 1)))(TABLE, weights, ids)
    of_table, of_ids, of_weights = specs
    with jax.set_mesh(mesh):
        put = _put(mesh, (TABLE, of_table), (weights, of_weights), (ids, of_ids))
        for gradient in (jax.grad, osa.grad):
            table, other = jax.jit(gradient(loss, (0, 1)))(*put)
            if gradient is osa.grad:
                table = table.todense()
            assert_close(table, expected[0], 1e-6, magnitude=10.0)
            assert_close(other, expected[1], 1e-6, magnitude=10.0)
            assert other.sharding.spec == jax.typeof(put[1]).sharding.spec


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_lowered_for_a_tpu(axis_type):
    """XLA's compiler for TPUs knows no `custom_partitioning`."""
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))
    with jax.set_mesh(mesh):
        arguments = _put(mesh, (TABLE, P("x")), (IDS, P()))
        traced = jax.jit(osa.embedding_bag).trace(*arguments)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "SPMDPartitioning" not in text
    assert "tensor<40x4xf32>" in text


CACHED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import optax_sparse_adam as osa

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
with jax.set_mesh(mesh):
    table = jax.device_put(jnp.ones((40, 4)), NamedSharding(mesh, P("x", None)))
    ids = jnp.zeros((8, 16), jnp.int32)
    tx = osa.sparse_adam(0.1)
    loss = lambda table, ids: jnp.sum(osa.embedding_bag(table, ids) ** 2)
    step, state = osa.make_train_step(loss, tx), tx.init(table)
    events.clear()
    step(table, state, ids)
print(sum(name.endswith("/cache_hits") for name in events))
"""


@pytest.mark.slow
def test_compilation_cache(tmp_path):
    """A second process finds the step."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    settings = program_environment() | flags
    settings |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    command, hits = [sys.executable, "-c", CACHED], []
    for _ in range(2):
        found = subprocess.run(command, env=settings, check=True, capture_output=True)
        hits.append(int(found.stdout))
    assert hits == [0, 1]


@pytest.mark.parametrize(
    "axis_type", slow_but([AxisType.Auto, AxisType.Explicit], AxisType.Explicit)
)
@pytest.mark.parametrize("is_flat", slow_but([False, True], True))
def test_a_step(axis_type, is_flat):
    """As on one device, with weights and their gradients; nothing of N rows is sent."""
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))
    segments = np.repeat(np.arange(8, dtype=np.int32), 16)
    tx = osa.sparse_adam(0.1)

    def pool(table, ids, weights):
        if not is_flat:
            return osa.embedding_bag(table, ids, weights=weights)
        flat = {"segment_ids": segments, "num_segments": 8}
        return osa.embedding_bag(table, ids.ravel(), weights=weights.ravel(), **flat)

    def step(table, state, ids, weights):
        def loss(table, weights):
            return jnp.sum(pool(table, ids, weights) ** 2)

        loss, grads = osa.value_and_grad(loss, argnums=(0, 1))(table, weights)
        updates, state = tx.update(grads[0], state)
        return osa.apply_updates(table, updates), state, loss, grads[1]

    expected = jax.jit(step)(jnp.array(TABLE), tx.init(TABLE), IDS, WEIGHTS)
    pairs = (TABLE, P("x")), (IDS, P()), (WEIGHTS, P())
    with jax.set_mesh(mesh):
        table, *batch = _put(mesh, *pairs)
        compiled = jax.jit(step).lower(table, tx.init(table), *batch).compile()
        actual = compiled(table, tx.init(table), *batch)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_close(one, other, 1e-6, magnitude=max(1.0, np.abs(other).max()))
    assert_close(expected[2], (_expected(IDS, WEIGHTS) ** 2).sum(), 1e-6)


# How a stale table and the bags lie on a mesh of (4, 2) Explicit axes.
STALE = {
    "rows, columns": (P("x", "y"), P()),
    "rows, bags": (P("x", None), P("x", None)),
    "bags": (P(), P("x", None)),
}


def stale_step(tx, params, state, ids):
    """A step of exact Adam on bags of each kind."""

    def loss(params):
        table, weights = params["table"], params["weights"]
        flat = {"offsets": 16 * jnp.arange(8)}
        kinds = [(ids, weights, {}), (ids.ravel(), weights.ravel(), flat)]
        pools = []
        for of_bags, by, form in kinds:
            for mode in ("sum", "mean"):
                form |= {"mode": mode}
                pools.append(osa.embedding_bag(table, of_bags, **form))
                pools.append(osa.embedding_bag(table, of_bags, weights=by, **form))
            pools.append(osa.embedding_bag(table, of_bags, **form | {"mode": "max"}))
        pools.append(osa.embedding_bag(jnp.tanh(table), ids))
        return sum(jnp.sum(jnp.sin(pool)) for pool in pools), pools

    fun = osa.value_and_grad(loss, has_aux=True, read=state)
    (_, pools), grads = fun(params)
    updates, state = tx.update(grads, state, params)
    return osa.apply_updates(params, updates), state, pools


@pytest.mark.slow
@pytest.mark.parametrize("layout", STALE)
def test_stale_rows_over_explicit_axes(layout):
    """Those of one device, of rows that a step has passed over."""
    of_table, of_ids = STALE[layout]
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit,) * 2)
    groups = {
        "table": osa.exact_adam(0.1, eps=0.1),
        "weights": osa.lazy(optax.sgd(0.1)),
    }
    tx = optax.partition(groups, {name: name for name in groups})
    batches = IDS, np.full_like(IDS, 3), IDS[::-1].copy()

    def run(table, weights, put):
        params = {"table": table, "weights": weights}
        state, found = tx.init(params), []
        step = jax.jit(functools.partial(stale_step, tx))
        for ids in batches:
            params, state, pools = step(params, state, put(ids, of_ids))
            found.append(pools)
        return *params.values(), found

    positive = np.abs(WEIGHTS) + 1
    expected = run(jnp.array(TABLE), jnp.array(positive), lambda x, _: x)
    with jax.set_mesh(mesh):
        put = functools.partial(_put_one, mesh)
        actual = run(put(TABLE, of_table), put(positive, of_ids), put)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_close(one, other, 1e-5, magnitude=max(1.0, np.abs(other).max()))


@pytest.mark.parametrize("form", slow_but(["bags", "offsets"], "offsets"))
@pytest.mark.parametrize("mode", slow_but(["sum", "mean", "sqrtn", "max"], "sum"))
def test_many_fields_of_bags_over_explicit_axes(mode, form):
    """A `vmap` over fields of one table, whose bags, or entries, are split."""

    def pooled(table, ids):
        if form == "bags":
            return osa.embedding_bag(table, ids, mode=mode)
        offsets = jnp.array([0, 3, 8])
        return osa.embedding_bag(table, ids[:, 0], offsets=offsets, mode=mode)

    def loss(table, ids):
        sums = jax.vmap(pooled, (None, 0))(table, ids)
        return jnp.sum(jnp.sin(sums)), sums

    ids = np.random.default_rng(3).integers(0, 40, (3, 8, 2)).astype(np.int32)
    read = jax.value_and_grad(loss, has_aux=True)
    (_, sums), grad = read(jnp.asarray(TABLE), ids)
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        table, split = _put(mesh, (TABLE, P("x")), (ids, P(None, "x")))
        (_, many), rows = jax.jit(osa.value_and_grad(loss, has_aux=True))(table, split)
        whole = jax.jit(osa.evaluate(lambda t, i: loss(t, i)[1]))(table, split)
    for got in (many, whole):
        assert_close(got, sums, 1e-6, magnitude=10.0)
    indices, values = np.asarray(rows.indices)[:, 0], np.asarray(rows.data)
    added = np.zeros((50, 4), np.float32)
    np.add.at(added, np.minimum(indices, 49), values)  # out of bounds: padding
    assert_close(added[:40], grad, 1e-6, magnitude=10.0)
