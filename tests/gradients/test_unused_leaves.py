"""A table that a loss does not use, or looks up no rows of, rests and costs nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.gradients import assert_row_sparse
from ..helpers.optimizers import FINAL
from ..helpers.support import (
    assert_identical,
    compile_for_users,
    slow_but,
)

# But that whose rows count their own steps.
OPTIMIZERS = {n: opt.make(0.1) for n, opt in FINAL.items() if n != "per_row"}
OPTIMIZERS["partition"] = optax.partition(
    {"tables": osa.lazy(optax.adam(0.1)), "rest": osa.sparse_adam(0.1)},
    {"t": "tables", "used": "tables", "w": "rest"},
)


def loss(p, ids, no_ids):
    rows = p["used"][ids] @ p["w"]
    return jnp.sum(jnp.square(rows)) + jnp.sum(p["t"][no_ids])


def step_of(optimizer, apply):
    def step(params, state, ids, no_ids):
        grads = osa.grad(loss)(params, ids, no_ids)
        updates, state = optimizer.update(grads, state, params)
        return apply(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def counts(state):
    """The steps that an optimiser has counted."""
    leaves = jax.tree.leaves(state)
    return [int(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.integer)]


RESTS = [(name, way) for name in OPTIMIZERS for way in ("plain", "kernel")]
RESTS = [(name, osa.apply_updates, way) for name, way in RESTS]
RESTS.append(("sparse_adam", optax.apply_updates, "plain"))


@pytest.mark.parametrize(
    ("name", "apply", "backend"),
    slow_but(
        RESTS,
        ("sparse_adam", osa.apply_updates, "kernel"),
    ),
    indirect=["backend"],
)
def test_rests(name, apply, backend):
    optimizer, rows = OPTIMIZERS[name], 200_003
    step = step_of(optimizer, apply)
    ids, none = jnp.array([3, 7]), jnp.zeros(0, jnp.int32)
    rng = np.random.default_rng(0)

    def some(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = {"t": some(rows, 2), "used": some(9, 4), "w": some(4)}
        state = optimizer.init(params)
        params, state = step(params, state, ids, ids)  # moments that are not zero
        # Arrays of the table's height are the table and its moments.
        tall = [
            np.array(x) for x in jax.tree.leaves((params, state)) if rows in x.shape
        ]
        used, before = np.array(params["used"]), counts(state)
        compiled = compile_for_users(step.lower(params, state, ids, none))
        params, state = compiled(params, state, ids, none)
    assert compiled.memory_analysis().temp_size_in_bytes < rows
    rested = [x for x in jax.tree.leaves((params, state)) if rows in x.shape]
    assert_identical(rested, tall)
    assert all(
        after == old + 1 for after, old in zip(counts(state), before, strict=True)
    )
    assert np.any(np.asarray(params["used"]) != used)


def test_leaves_of_all_kinds():
    """Scalars and complex leaves get zeros, tables without rows a BCOO."""
    params = {
        "scalar": jnp.float32(2),
        "complex": jnp.ones((3, 2), "complex64"),
        "vector": jnp.ones(3, "bfloat16"),
        "no rows": jnp.ones((0, 4)),
    }
    grads = jax.jit(osa.grad(lambda p: jnp.float32(1)))(params)
    expected = jax.grad(lambda p: jnp.float32(1))(params)
    for name in ("scalar", "complex"):
        assert_identical(grads[name], expected[name], name)
    for name in ("vector", "no rows"):
        like = expected[name]
        assert_row_sparse(grads[name], like.shape, like.dtype, 0, what=name)
