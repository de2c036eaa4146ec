"""Random compositions of lookups, functions and transformations, against `jax.grad`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import optax_sparse_adam as osa

from ..helpers.gradients import assert_same, is_bcoo

# A program is a nested tuple: the name of an entry below, and what it is applied to. It
# means a loss of `(params, ids)` with ids `[2, 3]`.

# Functions of a table or of rows, elementwise.
POINTWISE = {
    "double": lambda p, x: 2 * x,
    "negate": lambda p, x: -x,
    "scale": lambda p, x: x * lax.stop_gradient(p["w"][1]),
    "cast": lambda p, x: x.astype(jnp.bfloat16).astype(x.dtype),
    "tanh": lambda p, x: jnp.tanh(x),
    "relu": lambda p, x: jax.nn.relu(x),
    "square": lambda p, x: x * x,
    "affine": lambda p, x: 1 - x / 2,
    "where": lambda p, x: jnp.where(x > 0, x, x / 4),
    "jit": lambda p, x: jax.jit(jnp.sin)(x),
    "stopped": lambda p, x: x * lax.stop_gradient(x),
}

# Rows of the table.
LOOKUP = {
    "index": lambda t, ids: t[ids],
    "flat": lambda t, ids: t[ids.ravel()],
    "clip": lambda t, ids: jnp.take(t, 3 * ids, axis=0, mode="clip"),
    "fill": lambda t, ids: jnp.take(t, 3 * ids, axis=0, mode="fill", fill_value=0.5),
    "wrap": lambda t, ids: jnp.take(t, ids - 9, axis=0, mode="wrap"),
    "columns": lambda t, ids: t[ids, 1:3],
    "elements": lambda t, ids: t[ids, 2],
    "slice": lambda t, ids: lax.dynamic_slice_in_dim(t, ids[0, 0], 2),
    "vmap": lambda t, ids: jax.vmap(lambda i: t[i])(ids),
}

# Uses of the whole table.
DENSE = {
    "decay": lambda t: jnp.sum(t * t),
    "tied": lambda t: jnp.mean(t @ t.T),
    "rows": lambda t: jnp.sum(jnp.square(t[1:3])),
    "centre": lambda t: jnp.sum(jnp.square(t - jnp.mean(t))),
    "transpose": lambda t: jnp.sum(t.T[:2] * 0.5),
}

# Losses of one loss.
UNARY = {
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "checkpoint dots": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "scan": lambda f: (
        lambda p, ids: lax.scan(
            lambda c, i: (c / 2 + f(p, jnp.stack([i, i])), None), 0.0, ids
        )[0]
    ),
    "scan, carried": lambda f: (
        lambda p, ids: lax.scan(
            lambda c, i: ((c[0], c[1] + f({**p, "t": c[0]}, jnp.stack([i, i]))), None),
            (p["t"], 0.0),
            ids,
        )[0][1]
    ),
    "scan, reverse": lambda f: (
        lambda p, ids: jnp.sum(
            lax.scan(lambda c, i: (c, f(p, jnp.stack([i, i]))), 0.0, ids, reverse=True)[
                1
            ]
        )
    ),
    "vmap": lambda f: (
        lambda p, ids: jnp.sum(jax.vmap(lambda i: f(p, jnp.stack([i, i])))(ids))
    ),
    "log": lambda f: lambda p, ids: jnp.log1p(jnp.abs(f(p, ids))),
}

# Losses of two losses.
BINARY = {
    "sum": lambda f, g: lambda p, ids: f(p, ids) + g(p, ids),
    "product": lambda f, g: lambda p, ids: f(p, ids) * g(p, ids),
    "branches": lambda f, g: lambda p, ids: lax.cond(p["w"][0] > 0.5, f, g, p, ids),
    "switch": lambda f, g: (
        lambda p, ids: lax.switch(jnp.int32(2 * p["w"][1]), [g, f, g], p, ids)
    ),
}


def meaning(program):
    """The loss of a program."""
    name, *rest = program
    if name in BINARY:
        return BINARY[name](*map(meaning, rest))
    if name == "under":
        return UNARY[rest[0]](meaning(rest[1]))
    if name == "dense":
        return lambda p, ids: DENSE[rest[0]](p["t"]) / 8

    before, lookup, after = rest

    def loss(p, ids):
        table = p["t"]
        for function in before:
            table = POINTWISE[function](p, table)
        rows = LOOKUP[lookup](table, ids)
        for function in after:
            rows = POINTWISE[function](p, rows)
        return jnp.mean(jnp.square(rows + p["w"][2]))

    return loss


def words(program):
    """All names in a program."""
    for part in program:
        yield from [part] if isinstance(part, str) else words(part)


pointwise = st.lists(st.sampled_from(list(POINTWISE)), max_size=2).map(tuple)
lookups = st.tuples(
    st.just("lookup"), pointwise, st.sampled_from(list(LOOKUP)), pointwise
)
dense_uses = st.tuples(st.just("dense"), st.sampled_from(list(DENSE)))


def composed(losses):
    return st.recursive(
        losses,
        lambda inner: st.one_of(
            st.tuples(st.just("under"), st.sampled_from(list(UNARY)), inner),
            st.tuples(st.sampled_from(list(BINARY)), inner, inner),
        ),
        max_leaves=3,
    )


programs = composed(st.one_of(lookups, lookups, lookups, dense_uses))


def compare(program, rows):
    """Four rows make a square table, six the shape of what six ids look up."""
    rng = np.random.default_rng(rows)
    table = rng.integers(1, 17, (rows, 4)) * rng.choice([-1, 1], (rows, 4)) / 16
    params = {
        "t": jnp.asarray(table, jnp.float32),
        "w": jnp.asarray([0.75, 0.5, 0.25]),
    }
    ids = jnp.asarray([[0, 3, -1], [3, 2, 0]])
    loss = meaning(program)
    ours, theirs = osa.value_and_grad(loss), jax.value_and_grad(loss)
    (value, grads), (expected_value, expected) = jax.jit(
        lambda *inputs: (ours(*inputs), theirs(*inputs))
    )(params, ids)
    # Each of some ten operations rounds, in float32 or in bfloat16.
    ulps = 2.0**18 if "cast" in words(program) else 256
    assert_same(value, expected_value, ulps, "value")
    assert_same(grads["t"], expected["t"], ulps, "table")
    assert_same(grads["w"], expected["w"], ulps, "weights")
    # A batch of slices is one lookup of windows of several rows, which is not followed.
    names = set(words(program))
    if "dense" not in names and not {"vmap", "slice"} <= names:
        assert is_bcoo(grads["t"]), "lookups alone gave a dense gradient"
        most = math.prod(grads["t"].shape[: grads["t"].n_sparse])
        assert grads["t"].nse <= most, f"more entries than rows: {grads['t']}"


@pytest.mark.parametrize("rows", [4, 6, 16])
@given(program=programs)
@settings(max_examples=10)
def test_random_programs(rows, program):
    compare(program, rows)
