"""`checkify.index_checks` sees lookups out of bounds, and no fault in right steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import optax_sparse_adam as osa

from ..helpers.optimizers import FINAL, OPTIMIZERS
from ..helpers.support import slow_but

ROWS, WIDTH = 50, 20
TABLE = jnp.ones((ROWS, WIDTH))

stack_of_tables = jax.vmap(lambda t, i: t[i])


@jax.vmap
def stack_of_windows(t, i):
    return jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 3))(i)


# What is read, ids in bounds, and ids out of bounds.
LOOKUPS = {
    "many": (lambda t, i: t[i], [3, 49, 3], [3, 50, 3]),
    "negative": (lambda t, i: t[i], [-1, -50], [-1, -51]),
    "clip": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), [1, 2], [1, -1]),
    "one": (lambda t, i: t[i], [49], [50]),
    "scalar": (lambda t, i: t[i], 49, 50),
    "scaled": (lambda t, i: (2 * t)[i], [3, 49], [3, 50]),
    "dynamic slice": (lambda t, i: lax.dynamic_slice_in_dim(t, i, 3), 47, 48),
    "windows": (
        lambda t, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 3))(i),
        [0, 47],
        [0, 48],
    ),
    "dynamic index": (lambda t, i: lax.dynamic_index_in_dim(t, i), 49, 50),
    "columns out of bounds": (
        lambda t, i: lax.dynamic_slice(t, (jnp.int32(2), i), (3, 2)),
        WIDTH - 2,
        WIDTH - 1,
    ),
    "stack of tables": (stack_of_tables, [[3, 3], [3, 49]], [[3, 3], [3, 50]]),
    "stack of windows": (stack_of_windows, [[3, 3], [3, 47]], [[3, 3], [3, 48]]),
    "columns": (lambda t, i: t[i, 1:3], [3, 49], [3, 50]),
    "slice of columns": (
        lambda t, i: lax.dynamic_slice(t, (i, jnp.int32(2)), (3, 2)),
        47,
        48,
    ),
    "scan": (
        lambda t, i: lax.scan(lambda c, j: (c + t[j], None), jnp.zeros(WIDTH), i)[0],
        [3, 49, 3],
        [3, 50, 3],
    ),
}


OFFSETS = jnp.array([0, 2, 3])  # the last bag is empty
FROZEN = np.array([2, 5, 60])
MANY = np.arange(-9, 57).reshape(-1, 3)


def bags(**options):
    return functools.partial(osa.embedding_bag, **options)


# Ids out of bounds are padding here, and none of the user's.
PADDED = {
    "bags": (bags(), [[3, -1], [50, 7]]),
    "one id": (bags(mode="max"), [[-1]]),
    "max": (bags(mode="max"), [[3, -1], [50, 7], [-1, 50]]),
    "offsets": (bags(offsets=OFFSETS), [3, -1, 49]),
    "max by offsets": (bags(offsets=OFFSETS, mode="max"), [3, -1, 49]),
    "last offset": (bags(offsets=OFFSETS, include_last_offset=True), [3, 7, 50]),
    "segments": (
        bags(segment_ids=jnp.array([0, 3, -1]), num_segments=3, mode="mean"),
        [3, 4, 50],
    ),
    "sorted segments": (
        bags(segment_ids=jnp.array([0, 1, 3]), num_segments=3, indices_are_sorted=True),
        [3, 49, 49],
    ),
    # More ids than rows: the gradient has a row for each row of the table.
    "many bags": (bags(), MANY),
    "many of max": (bags(mode="max"), MANY),
    "many by offsets": (bags(offsets=OFFSETS, mode="mean"), MANY.ravel()),
    "many trained": (
        lambda t, i: osa.frozen_lookup(
            t, i, frozen=jnp.ones((9, WIDTH)), rows=np.arange(4, 4 + ROWS)
        ),
        MANY,
    ),
    "unique": (bags(unique_indices=True), [[3, -1], [-2, 7]]),
    "of a function": (lambda t, i: bags(mode="max")(jnp.tanh(t), i), [[3, -1]]),
    "trained": (
        lambda t, i: osa.frozen_lookup(
            t, i, frozen=jnp.ones((9, WIDTH)), rows=np.arange(4, 4 + ROWS)
        ),
        [1, 5, 53, 54, -1],
    ),
    "frozen": (
        lambda t, i: osa.frozen_lookup(
            jnp.ones((3, WIDTH)), i, frozen=t, rows=FROZEN
        ) * jnp.sum(t[i % ROWS]),
        [1, 5, 60, 61, -1],
    ),
}  # fmt: skip


def checked(read, optimizer, *, is_stale=False):
    is_stack = read in (stack_of_tables, stack_of_windows)
    table = jnp.stack([TABLE, TABLE]) if is_stack else TABLE

    def step(table, state, ids):
        def loss(table):
            return jnp.sum(jnp.square(read(table, ids))), read(table, ids)

        source = {"read": state} if is_stale else {}
        (value, rows), grad = osa.value_and_grad(loss, has_aux=True, **source)(table)
        updates, state = optimizer.update(grad, state, table)
        total = osa.coalesce(grad)
        return osa.apply_updates(table, updates), state, value, rows, total

    run = jax.jit(checkify.checkify(step, errors=checkify.index_checks))
    state = optimizer.init(table)
    return lambda ids: run(table, state, jnp.asarray(ids, jnp.int32))[0].get()


LOOKUPS_TWICE = [
    *((name, "plain") for name in LOOKUPS),
    *((name, "kernel") for name in ("many", "scalar", "scan")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(LOOKUPS_TWICE, ("scan", "plain"), ("many", "kernel")),
    indirect=["backend"],
)
@pytest.mark.parametrize("is_stale", [False, True])
def test_lookups(name, backend, is_stale):
    read, inside, outside = LOOKUPS[name]
    optimizer = OPTIMIZERS["exact_adam" if is_stale else "sparse_adam"].make(0.1)
    step = checked(read, optimizer, is_stale=is_stale)
    assert step(inside) is None
    assert "out-of-bounds indexing" in (step(outside) or "no error")


@pytest.mark.parametrize("name", slow_but(FINAL, "lazy"))
@pytest.mark.usefixtures("as_optax_expects")
def test_right_steps(name, backend):
    """With padding: duplicate ids make some."""
    assert checked(LOOKUPS["many"][0], FINAL[name].make(0.1))([3, 3, 7, 3]) is None


PADDED_TWICE = [(name, "plain") for name in PADDED]
PADDED_TWICE += [("max", "kernel"), ("trained", "kernel")]


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(
        PADDED_TWICE,
        ("max by offsets", "plain"),
        ("trained", "plain"),
    ),
    indirect=["backend"],
)
@pytest.mark.parametrize("is_stale", slow_but([False, True], False))
def test_padding(name, backend, is_stale):
    """Of bags and of `frozen_lookup`: what we mean is not reported."""
    read, ids = PADDED[name]
    optimizer = OPTIMIZERS["exact_adam" if is_stale else "sparse_adam"].make(0.1)
    assert checked(read, optimizer, is_stale=is_stale)(ids) is None
    run = jax.jit(checkify.checkify(read, errors=checkify.index_checks))
    assert run(TABLE, jnp.asarray(ids))[0].get() is None


def test_weights_of_padded_bags():
    """Their gradient reads the rows as well."""
    ids, weights = jnp.array([[3, -1], [ROWS, 7]]), jnp.ones((2, 2))

    def grads(table, weights):
        def loss(table, weights):
            return jnp.sum(osa.embedding_bag(table, ids, weights=weights) ** 2)

        return osa.grad(loss, argnums=(0, 1))(table, weights)[1]

    run = jax.jit(checkify.checkify(grads, errors=checkify.index_checks))
    error, found = run(TABLE, weights)
    assert error.get() is None
    np.testing.assert_array_equal(found, 2 * WIDTH * jnp.eye(2))


def test_without_ids():
    """checkify itself fails on a gather without ids; there is none in such a step."""
    assert checked(lambda t, i: t[i], FINAL["sparse_adam"].make(0.1))([]) is None
