"""Tables of one shape, and what else has that shape: each is told apart by its leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam._gradients.walk import Walk

from ..helpers.gradients import (
    TABLES,
    Case,
    assert_same,
    dense,
    is_bcoo,
    square,
)
from ..helpers.support import slow_but

PARAMS, IDS = Case(None, params=TABLES).inputs()
OTHER = PARAMS["s"] * PARAMS["t"][::-1]
CLOSE = 64  # units of float32; the tests compare sums in another order


def base(p, ids):
    return square(p["t"][ids], p["w"]) + square(p["s"][ids[::-1] + 1], p["w"])


def shared(p, ids):
    """One cotangent for both tables."""
    return square((p["t"] + p["s"])[ids], p["w"])


def both(loss, params=PARAMS, **kwargs):
    """Our gradient and JAX's, compiled together."""
    ours, theirs = osa.grad(loss, **kwargs), jax.grad(loss)
    return jax.jit(lambda *args: (ours(*args), theirs(*args)))(params, IDS)


@pytest.mark.parametrize(("loss", "form"), [(base, "mask"), (shared, "predicate")])
@pytest.mark.parametrize(
    "kinds",
    slow_but(
        [(True, False), (False, True), (True, True)], (True, False), is_one_value=True
    ),
)
def test_masks(loss, form, kinds):
    """Exactly the leaves that `sparse` names are row-sparse."""
    mask = {**dict(zip("ts", kinds, strict=True)), "w": False}
    sparse = mask if form == "mask" else lambda path, leaf: mask[path[0].key]
    actual, expected = both(loss, sparse=sparse)
    assert {name: is_bcoo(grad) for name, grad in actual.items()} == mask
    for name in mask:
        assert_same(actual[name], expected[name])


def test_narrow_table():
    """Lookups in float32 of a bfloat16 table: entries add up before they are rounded.

    Each entry of 1/256 vanishes in a bfloat16 sum of one or more.
    """
    table, ids = jnp.zeros((5, 2), jnp.bfloat16), jnp.full((257,), 3)
    weights = jnp.full((257, 1), 2.0**-8).at[0].set(1.0)

    def loss(t):
        return jnp.sum(t.astype(jnp.float32)[ids] * weights)

    for size in (5, 1000):
        table = jnp.zeros((size, 2), jnp.bfloat16)
        grad = jax.jit(osa.grad(loss))(table)
        assert is_bcoo(grad)
        assert grad.unique_indices
        assert grad.nse == min(size, 257)
        assert_same(grad, jax.grad(loss)(table))
        np.testing.assert_array_equal(grad.todense()[3], 2.0)


# Functions with rules of their own, which an outer differentiation must see.


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (2 * g,))


RULES = {
    "straight through": straight_through,
    "relu": jax.nn.relu,  # at 0, where the rule of `max` would give one half
    "scan": lambda x: lax.scan(lambda c, row: (c, straight_through(row)), 0.0, x)[1],
}


@pytest.mark.parametrize("name", RULES)
def test_outer_differentiation_sees_rules(name):
    """Of functions of a table, of one whose gradient is stopped, of another array."""
    function = RULES[name]
    params = {**PARAMS, "c": OTHER.at[3].set(0.0), "t": PARAMS["t"].at[3].set(0.0)}
    tables = {name: params[name] for name in "ts"}

    def loss(p, rest):
        factor = jnp.mean(function(rest["c"]) * OTHER)
        first = base({**p, **rest, "t": function(p["t"])}, IDS)
        stopped = function(lax.stop_gradient(p["t"]))
        return first * factor + base({**p, **rest, "t": p["t"] * stopped}, IDS)

    def size(lib):
        def function(tables, rest):
            grads = dense(lib.grad(loss)(tables, rest))
            return sum(jnp.sum(jnp.square(g)) for g in grads.values())

        return jax.grad(function, (0, 1))

    rest = {name: params[name] for name in "wc"}
    actual, expected = jax.jit(lambda *args: (size(osa)(*args), size(jax)(*args)))(
        tables, rest
    )
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for leaf, like in pairs:
        assert_same(leaf, like, CLOSE)


# Arrays of the table's shape in the loss, of NumPy or written there.

NUMBERS = np.resize(np.asarray([0.5, -2, 1, 0.25, -1], np.float32), (16, 4))
USES = {
    "times": lambda t, c: t * c,
    "where": lambda t, c: jnp.where(c > 0, t, 2 * t),
    "clip": lambda t, c: jnp.clip(t, -abs(c), abs(c)),
}


@pytest.mark.parametrize("use", USES)
def test_constants(use):
    def loss(p, ids):
        return sum(
            base({**p, "t": USES[use](p["t"], constant())}, ids)
            for constant in (lambda: NUMBERS, lambda: jnp.array(NUMBERS.tolist()))
        )

    actual, expected = both(loss)
    assert is_bcoo(actual["t"])
    for leaf in actual:
        assert_same(actual[leaf], expected[leaf], CLOSE, leaf)


# Gradients inside the loss.


def inner(p, ids):
    return jax.grad(lambda t: square(t[ids], p["w"]))(p["t"])


def step(optimizer):
    def loss(p, ids):
        state = optimizer.init(p["t"])
        updates, _ = optimizer.update(inner(p, ids), state, p["t"])
        return base({**p, "t": p["t"] + updates}, ids)

    return loss


INNER = {
    "norm": lambda p, ids: base(p, ids) + jnp.linalg.norm(inner(p, ids)),
    "adam": step(optax.adam(0.125)),
}


@pytest.mark.parametrize("name", INNER)
def test_gradient_inside_loss(name):
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        actual, expected = both(INNER[name])
    assert is_bcoo(actual["t"])
    for leaf in actual:
        assert_same(actual[leaf], expected[leaf], 2048, leaf)


# How much is traced.


def lines(function):
    return len(str(jax.make_jaxpr(function)(PARAMS, IDS)).splitlines())


def test_nested_uses_are_computed_once():
    def loss(p, ids):
        table = p["t"]
        for _ in range(12):
            table = table + jnp.tanh(table)
        return square(table[ids], p["w"])

    assert lines(osa.grad(loss)) < 2 * lines(jax.grad(loss)) + 20


def test_long_chains():
    def loss(p, ids):
        table = p["t"]
        for _ in range(1200):
            table = jnp.sin(table)
        return square(table[ids], p["w"])

    assert lines(osa.grad(loss)) < 2 * lines(jax.grad(loss)) + 20


def test_nested_loops_and_branches(monkeypatch):
    """Each level evaluates as many equations as the one before, not a multiple."""

    def inside(loss):
        def step(p, ids, total, i):
            return total + lax.cond(i > 0, lambda: loss(p, ids), lambda: 0.0), None

        return lambda p, ids: lax.scan(
            lambda total, i: step(p, ids, total, i), 0.0, jnp.arange(2)
        )[0]

    def loss(p, ids):
        return square(p["t"][ids], p["w"])

    evaluate, calls, counts = Walk._evaluate_eqn, [], []

    def count(self, eqn, *args):
        calls.append(eqn)
        return evaluate(self, eqn, *args)

    monkeypatch.setattr(Walk, "_evaluate_eqn", count)
    for _ in range(5):
        loss = inside(loss)
        calls.clear()
        jax.make_jaxpr(osa.grad(loss))(PARAMS, IDS)
        counts.append(len(calls))
    growth = np.diff(counts)[1:]  # a first plan finds out which axes are indexed
    assert max(growth) < 1.5 * min(growth), counts


@pytest.mark.slow
def test_nothing_leaks():
    """No value of a branch or a loop is held beyond it."""

    def branches(p, ids):
        table = jnp.tanh(p["t"])
        return lax.cond(
            ids[0, 0] == 0,
            lambda: square(table[ids], p["w"]),
            lambda: square((2 * table)[ids[:1]], p["w"]),
        )

    def loop(p, ids):
        def step(total, i):
            return total + square(jnp.tanh(p["t"])[i], p["w"]), None

        return lax.scan(step, 0.0, ids)[0]

    with jax.checking_leaks():
        for loss in (branches, loop):
            jax.make_jaxpr(osa.grad(loss))(PARAMS, IDS)
