"""A step is the same, and its gradient row-sparse, however a program is run."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.support import assert_close, assert_identical

pytestmark = pytest.mark.usefixtures("as_optax_expects")

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(30, 3)), jnp.float32)
IDS = np.array([[[3, 7], [0, 3]], [[7, 9], [9, 1]]], np.int32)
RATE = 0.1
bag = osa.embedding_bag


def scanned(table, ids):
    def body(carry, ids):
        return carry + jnp.sum(jnp.tanh(bag(table, ids[None]) * carry)), None

    return lax.scan(body, jnp.float32(1), ids)[0]


def branched(table, ids):
    return lax.cond(
        ids[0, 0] < 30,
        lambda t: jnp.sum(jnp.tanh(bag(t, ids))),
        lambda t: jnp.sum(t[ids]),
        table,
    )


def mapped(table, ids):
    return jnp.sum(jnp.tanh(jax.vmap(lambda ids: bag(table, ids[None]))(ids)))


def mean_of_offsets(table, ids):
    offsets = jnp.arange(0, ids.size, 2)
    return jnp.sum(jnp.tanh(bag(table, ids.ravel(), offsets=offsets, mode="mean")))


LOSSES = {
    "rows": lambda t, i: jnp.sum(jnp.tanh(t[i])),
    "take": lambda t, i: jnp.sum(jnp.tanh(jnp.take(t, i, axis=0, mode="fill"))),
    "bags": lambda t, i: jnp.sum(jnp.tanh(bag(t, i))),
    "bags, mean": mean_of_offsets,
    "bags, max": lambda t, i: jnp.sum(jnp.tanh(bag(t, i, mode="max"))),
    "bags, checkpoint": lambda t, i: jax.checkpoint(LOSSES["bags"])(t, i),
    "bags, scan": scanned,
    "bags, cond": branched,
    "bags, vmap": mapped,
}


def config(name):
    @contextlib.contextmanager
    def changed():
        before = getattr(jax.config, name)
        jax.config.update(name, True)
        try:
            yield
        finally:
            jax.config.update(name, before)

    return changed


SETTINGS = {
    "disable_jit": jax.disable_jit,
    "debug_nans": functools.partial(jax.debug_nans, True),
    "debug_infs": functools.partial(jax.debug_infs, True),
    "tracer leaks": jax.checking_leaks,
    "checks": config("jax_enable_checks"),
    "custom_prng": functools.partial(jax.enable_custom_prng, True),
}


def of_jaxpr(step, *example):
    closed = jax.make_jaxpr(step)(*example)
    return lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def first_of(mapped):
    def run(*args):
        found = mapped(*(jnp.asarray(x)[None] for x in args))
        return jax.tree.map(lambda x: x[0], found)

    return run


def on_mesh(step, *_, **options):
    mesh = jax.make_mesh((1,), ("x",))
    return jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), **options)


def converted(step, *example):
    function, constants = jax.closure_convert(step, *example)
    return lambda *args: function(*args, *constants)


def linearized(step, *_):
    return lambda table, ids: jax.linearize(lambda t: step(t, ids), table)[0]


WAYS = {
    "eager": lambda step, *_: step,
    "jit": lambda step, *_: jax.jit(step),
    "jit of jit": lambda step, *_: jax.jit(jax.jit(step)),
    "compiled ahead": lambda step, *args: jax.jit(step).lower(*args).compile(),
    "jaxpr": of_jaxpr,
    "closure_convert": converted,
    "checkpoint": lambda step, *_: jax.checkpoint(step),
    "linearize": linearized,
    "vmap": lambda step, *_: first_of(jax.vmap(step)),
    "pmap": lambda step, *_: first_of(jax.pmap(step)),
    "shard_map": lambda *args: jax.jit(on_mesh(*args)),
}
# Each loss in each way, and with each setting, eagerly or under jit in turns, so that
# each setting meets both.
TURNS = ("eager", "jit")
PAIRS = [
    (loss, TURNS[(number + other) % 2], setting)
    for number, loss in enumerate(LOSSES)
    for other, setting in enumerate(SETTINGS)
]
PAIRS += [(loss, way, None) for loss in LOSSES for way in WAYS]
PAIRS.remove(("bags, scan", "linearize", None))  # JAX cannot: see the last test


@functools.cache
def by_dense_gradients(loss):
    """Two steps in NumPy, with JAX's dense gradients."""
    gradient_of, expected = jax.jit(jax.grad(LOSSES[loss])), np.float64(TABLE)
    for ids in IDS:
        gradient = gradient_of(jnp.float32(expected), ids)
        rows = np.unique(ids)
        expected[rows] -= RATE * (0.9 + np.asarray(gradient, np.float64)[rows])
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "way", "setting"), PAIRS)
def test_a_step(loss, way, setting):
    """Against JAX's dense gradient, at the rows that were looked up."""
    function, tx = LOSSES[loss], osa.lazy(optax.sgd(RATE, momentum=0.9))

    def step(table, ids):
        grad = osa.grad(function)(table, ids)
        assert isinstance(grad, BCOO)
        momentum = jax.tree.map(jnp.ones_like, tx.init(table))
        updates, _ = tx.update(grad, momentum, table)
        return osa.apply_updates(table, updates)

    expected, found = by_dense_gradients(loss), TABLE
    with SETTINGS[setting]() if setting else contextlib.nullcontext():
        run = WAYS[way](step, TABLE, jnp.asarray(IDS[0]))
        for ids in IDS:
            found = run(found, jnp.asarray(ids))
            (found,) = found if isinstance(found, list) else (found,)
    assert_close(found, expected, 1e-6, magnitude=2.0)
    others = np.setdiff1d(np.arange(30), IDS)
    assert_identical(found[others], TABLE[others])


@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam", "evaluate"])
@pytest.mark.slow
def test_without_jit(name):
    """Optimisers and `evaluate` under `disable_jit`, as under `jit`."""
    read = name != "sparse_adam"
    tx = osa.exact_adam(RATE) if read else osa.sparse_adam(RATE)

    def run():
        table, state = TABLE, tx.init(TABLE)
        for ids in IDS[:1]:
            grad = osa.grad(LOSSES["bags"], read=state if read else None)(table, ids)
            updates, state = tx.update(grad, state, table)
            table = osa.apply_updates(table, updates)
        if name == "evaluate":
            return osa.evaluate(LOSSES["bags"], read=state)(table, IDS[1])
        return table

    with jax.disable_jit():
        found = run()
    assert_close(found, jax.jit(run)(), 1e-6, magnitude=2.0)


@pytest.mark.slow
def test_what_jax_cannot_linearize():
    """A `custom_vmap` in a scan, as a bag is one: an error of JAX, and of ours."""

    @jax.custom_batching.custom_vmap
    def double(x):
        return 2 * x

    @double.def_vmap
    def doubles(size, batched, x):
        return 2 * x, True

    def total(x):
        return jax.lax.scan(lambda c, k: (c + double(x[k]), None), 0.0, jnp.arange(3))[
            0
        ]

    ids, words = jnp.asarray(IDS[0]), "Linearization failed to produce known values"
    with pytest.raises(ValueError, match=words):
        jax.linearize(total, jnp.ones(30))
    with pytest.raises(ValueError, match=words):
        jax.linearize(lambda t: osa.grad(LOSSES["bags, scan"])(t, ids).data, TABLE)
