"""Training on row-sparse gradients, against training of the touched rows alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_sparse_adam as osa

from .support import assert_close, assert_identical, bcoo, row_sums


class Task(NamedTuple):
    """The same training twice: of a table, and of the rows that it touches.

    Each gradient holds the same rows, in another order, some twice, and padding.
    """

    rows: np.ndarray
    params: Any
    grads: list[Any]
    sub_params: Any
    sub_grads: list[Any]


def make_task(rows, shape=(13, 5), steps=3, dtype="float64"):
    rng = np.random.default_rng(0)
    rows = np.asarray(rows)
    table, bias = rng.normal(size=shape), rng.normal(size=4)
    grads, sub_grads = [], []
    for _ in range(steps):
        outside = [-1, shape[0], shape[0] + 7]
        ids = rng.permutation(np.concatenate([rows, rows[:2], outside]))
        ids = ids.astype(np.int32)[:, None]
        values = rng.normal(size=(len(ids), *shape[1:]))
        dense = rng.normal(size=bias.shape)
        sums = np.stack(list(row_sums(values, ids, shape).values()))
        grads.append({"table": bcoo(values.astype(dtype), ids, shape), "bias": dense})
        sub_grads.append({"table": sums, "bias": dense})
    trees = {"table": table, "bias": bias}, grads, {"table": table[rows], "bias": bias}

    def convert(x):
        return x if x.dtype == np.int32 else jnp.asarray(x, dtype)

    params, grads, sub_params, sub_grads = jax.tree.map(convert, (*trees, sub_grads))
    return Task(rows, params, grads, sub_params, sub_grads)


def train(tx, params, grads, *, compiled=True, **extra):
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grad):
        updates, state = tx.update(grad, state, params, **extra)
        return osa.apply_updates(params, updates), state

    step = jax.jit(step) if compiled else step
    state = tx.init(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def numbers(x):
    """Keys as numbers."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_rows_close(actual, expected, start, rows, tol):
    """`actual` is `expected` on the rows, and `start` bit for bit on all others."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = (jax.tree.leaves(tree) for tree in (actual, expected, start))
    for number, (new, sub, old) in enumerate(zip(*leaves, strict=True)):
        new, sub, old = numbers(new), numbers(sub), numbers(old)
        what = f"leaf {number}"
        assert new.dtype == sub.dtype == old.dtype, what
        if new.shape != sub.shape:
            others = np.setdiff1d(np.arange(len(new)), rows)
            assert_identical(new[others], old[others], what)
            new = new[rows]
        scale = np.max(np.abs(sub), initial=0.0)
        assert_close(new, sub, tol, magnitude=scale, what=what)


def assert_identity(tx, sub_tx, task, tol, **extra):
    """`tx` does to the touched rows of a table what `sub_tx` does to these rows."""
    starts = task.params, tx.init(task.params)
    actual = train(tx, task.params, task.grads, **extra)
    expected = train(sub_tx, task.sub_params, task.sub_grads, **extra)
    for a, e, s in zip(actual, expected, starts, strict=True):
        assert_rows_close(a, e, s, task.rows, tol)
