"""Ids that a lookup says are sorted, or unique: its gradient says so, too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.support import slow_but, to_dense

TABLE = jnp.asarray(np.arange(40, dtype=np.float32).reshape(20, 2))
IDS = np.array([2, 5, 11, 20, 20])  # with padding, as of `jnp.nonzero`


def look_up(table, ids, **others):
    flags = {"unique_indices": True, "indices_are_sorted": True} | others
    return table.at[ids].get(mode="fill", fill_value=0, **flags)


WEIGHTS = np.linspace(0.5, 1.5, 5, dtype=np.float32)


def bag(table, ids, **others):
    flags = {"unique_indices": True, "indices_are_sorted": True}
    return osa.embedding_bag(table, ids, **flags, **others)


def both(table, ids):
    return look_up(table, ids) * 2


HANDED_ON = {
    "plain": lambda t, ids: look_up(t, ids),
    "jit": lambda t, ids: jax.jit(both)(t, ids),
    "remat": lambda t, ids: jax.checkpoint(both)(t, ids),
    "of a cast": lambda t, ids: look_up(t.astype(jnp.float32), ids),
    "of a product": lambda t, ids: look_up(t * 3, ids),
    "of a shape": lambda t, ids: look_up(t, ids.reshape(5, 1)).sum(1),
    "bags": lambda t, ids: bag(t, ids[:, None]),
    "bags of offsets": lambda t, ids: bag(
        t, ids, offsets=jnp.array([0, 2]), mode="mean"
    ),
    "largest of bags": lambda t, ids: bag(t, ids[:, None], mode="max"),
    "bags of segments": lambda t, ids: bag(
        t,
        ids,
        segment_ids=jnp.array([0, 1, 0, 7, -1]),
        num_segments=2,
        weights=WEIGHTS,
    ),
}
# What may join two entries of one row, or another order.
DROPPED = {
    "two lookups": lambda t, ids: look_up(t, ids) + look_up(t, ids),
    "a loop": lambda t, ids: jax.lax.scan(
        lambda sum_, _: (sum_ + look_up(t, ids), None), jnp.zeros((5, 2)), None, 2
    )[0],
    "a branch": lambda t, ids: jax.lax.cond(
        ids[0] > 0, both, lambda t, ids: t[ids], t, ids
    ),
    "clamped": lambda t, ids: t.at[ids].get(mode="clip", unique_indices=True),
    "elements": lambda t, ids: t.at[ids, 0].get(unique_indices=True),
}


def gradient(look_up, dtype=jnp.float32):
    def loss(table, ids):
        return jnp.sum(look_up(table, ids).astype(jnp.float32) ** 3)

    table = TABLE.astype(dtype)
    return jax.jit(osa.grad(loss))(table, IDS), jax.jit(jax.grad(loss))(table, IDS)


CASES = [*((case, "float32") for case in HANDED_ON), ("of a cast", "bfloat16")]


@pytest.mark.parametrize(("case", "dtype"), slow_but(CASES, *CASES[::2]))
def test_handed_on(case, dtype):
    grad, expected = gradient(HANDED_ON[case], dtype)
    assert grad.dtype == dtype
    assert (grad.indices_sorted, grad.unique_indices) == (True, True)
    ids = np.ravel(grad.indices)
    assert np.all(np.diff(ids) > 0)  # padding, too
    np.testing.assert_array_equal(to_dense(osa.coalesce(grad)), expected)


@pytest.mark.parametrize("name", ["indices_are_sorted", "unique_indices"])
def test_one_of_them(name):
    grad, expected = gradient(lambda t, ids: look_up(t, ids, **{name: False}))
    assert grad.indices_sorted == (name != "indices_are_sorted")
    assert grad.unique_indices == (name != "unique_indices")
    np.testing.assert_array_equal(to_dense(osa.coalesce(grad)), expected)


@pytest.mark.parametrize("case", slow_but(DROPPED, *list(DROPPED)[::2]))
def test_dropped(case):
    grad, expected = gradient(DROPPED[case])
    assert (grad.indices_sorted, grad.unique_indices) == (False, False)
    np.testing.assert_allclose(to_dense(osa.coalesce(grad)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "make", slow_but([osa.sparse_adam, osa.exact_adam], osa.sparse_adam)
)
def test_nothing_changes_in_values(make):
    tx = make(0.1)

    def train(flags):
        step = osa.make_train_step(
            lambda t, ids: jnp.sum(jnp.sin(look_up(t, ids, **flags))), tx
        )
        table = jnp.copy(TABLE)
        state = tx.init(table)
        for ids in np.array([IDS, [0, 2, 3, 4, 19], [1, 2, 20, 20, 20]]):
            table, state, _ = step(table, state, ids)
        return osa.evaluate(
            lambda t: t[:], read=state if make is osa.exact_adam else None
        )(table)

    plain = {"unique_indices": False, "indices_are_sorted": False}
    np.testing.assert_array_equal(train({}), train(plain))


@pytest.mark.parametrize(
    "make", slow_but([osa.sparse_adam, osa.exact_adam], osa.sparse_adam)
)
def test_tables_that_share_their_ids_sort_them_once(make, backend):
    """XLA merges equal sorts, and equal calls of the kernel."""
    tx = make(0.1)
    params = {
        name: jnp.ones((1000, width))
        for name, width in zip("abc", (2, 3, 4), strict=True)
    }
    step = osa.make_train_step(
        lambda p, ids: sum(jnp.sum(jnp.sin(t[ids])) for t in p.values()), tx
    )
    ids = jnp.arange(100, dtype=jnp.int32)
    text = step.lower(params, tx.init(params), ids).compile().as_text()
    sorts = text.count('formula = "order"'), len(re.findall(r"= [^=]*\bsort\(", text))
    assert sorts == ((1, 0) if backend == "kernel" else (0, 1))
