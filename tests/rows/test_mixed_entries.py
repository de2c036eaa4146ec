"""Gradients of bags whose arrays are laid together, cut, turned, mixed or exchanged.

To a function of trees they are as those of lookups: all arrays have one row for each
entry, so that what it does to all of them, it does to entries.
"""

import ast
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.gradients import dense
from ..helpers.support import assert_close, need_devices, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

ROWS, DIM = 12, 2
ORDER = np.array([3, 0, 5, 1, 4, 2])
IDS = np.array([[[3, 7, 3], [-1, 2, 9]], [[0, 7, 7], [5, 3, 11]]])
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, DIM)), jnp.float32)


def loss(table, ids):
    scale = jnp.arange(1.0, 1.0 + len(ids))[:, None]
    return jnp.sum(jnp.tanh(osa.embedding_bag(table, ids) * scale))


def grad_of(table, ids):
    return osa.grad(loss)(table, ids)


def flat(grads):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grads)


def by_scan(table):
    def body(_, ids):
        return None, grad_of(table, ids)

    return flat(lax.scan(body, None, jnp.asarray(IDS))[1])


def by_vmap(table):
    return flat(jax.vmap(grad_of, (None, 0))(table, jnp.asarray(IDS)))


def by_pmap(table):
    need_devices(2)
    return flat(jax.pmap(grad_of, in_axes=(None, 0))(table, IDS))


def by_all_gather(table):
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))

    def local(table, ids):
        gather = functools.partial(lax.all_gather, axis_name="x", tiled=True)
        return jax.tree.map(gather, grad_of(table, ids[0]))

    specs = {"in_specs": (P(), P("x")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **specs)(table, jnp.asarray(IDS))


def first(function):
    return lambda table: jax.tree.map(function, grad_of(table, IDS[0]))


def both(function):
    return lambda table: jax.tree.map(function, *(grad_of(table, x) for x in IDS))


def swapped(a, b):
    return a.at[:2].set(b[:2])


def by_cond(table):
    one, other = (grad_of(table, x) for x in IDS)
    pick = lax.cond(table[0, 0] < 9, lambda a, b: a, lambda a, b: b, one, other)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), pick, other)


# What is done to all arrays, and which entries of the twelve are then there.
ALL = np.arange(12)
PROGRAMS = {
    "scan": (by_scan, ALL),
    "vmap": (by_vmap, ALL),
    "pmap": (by_pmap, ALL),
    "all_gather": (by_all_gather, ALL),
    "concatenate": (both(lambda a, b: jnp.concatenate([b, a])), ALL),
    "stack": (lambda table: flat(both(lambda a, b: jnp.stack([a, b]))(table)), ALL),
    "cond": (by_cond, ALL),
    "cut": (first(lambda x: x[:4]), ALL[:4]),
    "cut to bags": (first(lambda x: x[:2]), ALL[:2]),
    "every second": (first(lambda x: x[::2]), ALL[:6:2]),
    "one": (first(lambda x: x[4:5]), ALL[4:5]),
    "turned": (first(lambda x: x[::-1]), ALL[:6]),
    "permuted": (first(lambda x: x[ORDER]), ALL[:6]),
    "rolled": (first(lambda x: jnp.roll(x, 1, axis=0)), ALL[:6]),
    "twice": (first(lambda x: jnp.repeat(x, 2, axis=0)), np.repeat(ALL[:6], 2)),
    "padded": (first(lambda x: jnp.pad(x, [(0, 3), (0, 0)])), ALL[:6]),
    "picked": (first(lambda x: x[jnp.array([1, 5, 5])]), np.array([1, 5, 5])),
    "swapped": (both(swapped), np.array([6, 7, 2, 3, 4, 5])),
    "chosen": (
        both(lambda a, b: jnp.where((ORDER < 3)[:, None], a, b)),
        np.where(ORDER < 3, ALL[:6], ALL[6:]),
    ),
    "selected": (both(lambda a, b: jnp.where(True, b, a)), ALL[6:]),
    "split": (first(lambda x: jnp.concatenate(jnp.split(x, 3)[::-1])), ALL[:6]),
}
FEW = ("scan", "concatenate", "cut to bags", "turned", "permuted", "swapped", "chosen")


@functools.cache
def gradient_of_rows():
    """JAX's own gradient of each entry's row, a table of all entries' rows."""

    def loss_of_rows(rows):
        return sum(
            loss(part, np.where(ids < 0, -1, np.arange(6).reshape(2, 3)))
            for part, ids in zip(rows, IDS, strict=True)
        )

    return jax.jit(jax.grad(loss_of_rows))(TABLE[IDS.reshape(2, 6)])


def expected(kept):
    """The gradient of the table, of these entries."""
    rows = gradient_of_rows()
    found, rows = np.zeros((ROWS, DIM)), np.asarray(rows, np.float64).reshape(12, DIM)
    ids = IDS.ravel()[kept]
    np.add.at(found, ids[ids >= 0], rows[kept][ids >= 0])
    return found


BOTH_WAYS = [(name, way) for name in PROGRAMS for way in ("eager", "jit")]


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but(BOTH_WAYS, *((name, "jit") for name in FEW)),
)
def test_entries_stay_whole(name, way):
    program, kept = PROGRAMS[name]
    tx = osa.lazy(optax.sgd(1.0))

    def step(table):
        grad = program(table)
        updates, _ = tx.update(grad, tx.init(table), table)
        return grad, osa.apply_updates(table, updates)

    grad, table = (jax.jit(step) if way == "jit" else step)(TABLE)
    assert_close(dense(grad), expected(kept), 1e-6, magnitude=30.0)
    assert_close(TABLE - table, expected(kept), 1e-6, magnitude=30.0)


@pytest.mark.slow
def test_one_id_in_a_bag():
    """As many bags as entries: nothing says by its length which array is which."""
    ids = jnp.array([[3], [7], [3], [1]])
    found = jax.tree.map(lambda x: x[::-1], grad_of(TABLE, ids))
    assert_close(dense(found), jax.jit(jax.grad(loss))(TABLE, ids), 1e-6, magnitude=1.0)


def test_arrays_of_two_gradients():
    """The values of one at the rows of another, as of two gradients of lookups."""
    one, other = (grad_of(TABLE, x) for x in IDS)
    mixed = jax.tree.map(lambda a, b: a if a.dtype == "float32" else b, one, other)
    found = np.zeros((ROWS, DIM))
    np.add.at(found, other.indices[:, 0], np.asarray(one.data))
    assert_close(dense(mixed), found, 1e-6, magnitude=30.0)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["0", "(0, 1)"])
def test_a_batch_of_gradients(axes):
    """Refused, with what makes one gradient of it; which does."""
    ids, mapped = jnp.asarray(IDS), jax.vmap(grad_of, (None, 0))
    if axes != "0":
        ids, mapped = jnp.stack([ids, ids[::-1]]), jax.vmap(mapped, (None, 0))
    grads = mapped(TABLE, ids)
    words = re.escape(f"`g.sum({axes})` is one gradient")
    with pytest.raises(ValueError, match=words):
        osa.coalesce(grads)
    found = osa.coalesce(grads.sum(ast.literal_eval(axes)))
    expected = jax.jit(jax.grad(lambda t: sum(map(functools.partial(loss, t), IDS))))
    factor = 1 if axes == "0" else 2
    assert_close(dense(found), factor * expected(TABLE), 1e-6, magnitude=30.0)
