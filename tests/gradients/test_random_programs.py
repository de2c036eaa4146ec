"""Random compositions of lookups, functions and transformations, against `jax.grad`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.gradients import assert_same, dense, is_bcoo
from ..helpers.support import (
    assert_identical,
    slow_but,
)

# A program is a nested tuple: the name of an entry below, and what it is applied to. It
# means a loss of `(params, ids)` with ids `[2, 3]`, and tables "t", "u" and "v" of one
# shape.


def like(x, kind):
    """Numbers of the shape of `x` that are no parameter."""
    numbers = np.resize(np.asarray([0.5, -2.0, 1.0, 0.25, -1.0], x.dtype), x.shape)
    return numbers if kind == "NumPy" else jnp.array(numbers.tolist(), x.dtype)


def with_gradient(function):
    """The identity, with a derivative of its own: not linear, but zero at zero."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (function(g),))
    return identity


@jax.custom_jvp
def twisted(x):
    return jnp.sin(x)


twisted.defjvps(lambda g, ans, x: g * (1 - x * ans))

# Functions of a table or of rows, elementwise.
POINTWISE = {
    "double": lambda p, x: 2 * x,
    "negate": lambda p, x: -x,
    "scale": lambda p, x: x * lax.stop_gradient(p["w"][1]),
    "times a parameter": lambda p, x: x * p["w"][1],
    "cast": lambda p, x: x.astype(jnp.bfloat16).astype(x.dtype),
    "tanh": lambda p, x: jnp.tanh(x),
    "relu": lambda p, x: jax.nn.relu(x),
    "square": lambda p, x: x * x,
    "affine": lambda p, x: 1 - x / 2,
    "where": lambda p, x: jnp.where(x > 0, x, x / 4),
    "jit": lambda p, x: jax.jit(jnp.sin)(x),
    "stopped": lambda p, x: x * lax.stop_gradient(x),
    "twice": lambda p, x: x + twisted(x) / 2,
    "custom_jvp": lambda p, x: twisted(x),
    "custom_jvp, stopped": lambda p, x: x * twisted(lax.stop_gradient(x)),
    "NumPy": lambda p, x: x * like(x, "NumPy"),
    "NumPy where": lambda p, x: jnp.where(like(x, "NumPy") > 0, x, like(x, "NumPy")),
    "literal": lambda p, x: x / like(x, "literal"),
    "literal clip": lambda p, x: jnp.clip(x, -2, 2 + abs(like(x, "literal"))),
    "gradient of tanh": lambda p, x: with_gradient(jnp.tanh)(x),
    "gradient over its norm": lambda p, x: with_gradient(
        lambda g: g / (1 + jnp.sum(g * g))
    )(x),
}

# Functions of two tables.
PAIRS = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y / 2,
    "product": lambda x, y: x * y,
    "where": lambda x, y: jnp.where(x > y, x, y),
}


def on_devices(f, in_specs, out_specs):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    mapped = jax.shard_map(f, mesh=mesh, check_vma=False, **specs)

    def on_all(*args):  # or on this one, where the program is on all already
        is_one = jax.sharding.get_abstract_mesh().manual_axes
        return f(*args) if is_one else mapped(*args)

    return on_all


# Rows of the table.
LOOKUP = {
    "index": lambda t, ids: t[ids],
    "flat": lambda t, ids: t[ids.ravel()],
    "unsigned": lambda t, ids: t[abs(ids).astype(jnp.uint8)],
    "none": lambda t, ids: jnp.concatenate([t[ids[0, :0]], t[ids[0]]]),
    "clip": lambda t, ids: jnp.take(t, 3 * ids, axis=0, mode="clip"),
    "fill": lambda t, ids: jnp.take(t, 3 * ids, axis=0, mode="fill", fill_value=0.5),
    "wrap": lambda t, ids: jnp.take(t, ids - 9, axis=0, mode="wrap"),
    "out of bounds": lambda t, ids: t[3 * ids],
    "columns": lambda t, ids: t[ids, 1:3],
    "elements": lambda t, ids: t[ids, 2],
    "slice": lambda t, ids: lax.dynamic_slice_in_dim(t, ids[0, 0], 2),
    "vmap": lambda t, ids: jax.vmap(lambda i: t[i])(ids),
    "split table": lambda t, ids: on_devices(
        lambda t, ids: t[ids % 2], (P("x"), P()), P("x")
    )(t, ids),
}

# Uses of the whole table.
DENSE = {
    "decay": lambda t: jnp.sum(t * t),
    "tied": lambda t: jnp.mean(t @ t.T),
    "rows": lambda t: jnp.sum(jnp.square(t[1:3])),
    "centre": lambda t: jnp.sum(jnp.square(t - jnp.mean(t))),
    "transpose": lambda t: jnp.sum(t.T[:2] * 0.5),
    "inner gradient": lambda t: jnp.sum(
        jnp.square(jax.grad(lambda t: jnp.sum(jnp.sin(t[jnp.asarray([1, 2, 1])])))(t))
    ),
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
    "shard_map": lambda f: on_devices(
        lambda p, ids: lax.psum(f(p, ids), "x"), (P(), P("x")), P()
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
        return lambda p, ids: DENSE[rest[1]](p[rest[0]]) / 8

    tables, before, lookup, after = rest

    def loss(p, ids):
        table = p[tables[0]]
        for function in before:
            table = POINTWISE[function](p, table)
        if len(tables) > 1:
            table = PAIRS[tables[1]](table, p[tables[2]])
        rows = LOOKUP[lookup](table, ids)
        for function in after:
            rows = POINTWISE[function](p, rows)
        return jnp.mean(jnp.square(rows + p["w"][2]))

    return loss


def words(program):
    """All names in a program."""
    for part in program:
        yield from [part] if isinstance(part, str) else words(part)


def leaves_of(program, kinds):
    """The tables with a use of one of these kinds."""
    name, *rest = program
    if name in ("lookup", "dense"):
        tables = rest[0] if name == "lookup" else (rest[0],)
        return set(tables) & set(NAMES) if name in kinds else set()
    programs = [part for part in rest if not isinstance(part, str)]
    return set().union(*(leaves_of(part, kinds) for part in programs))


NAMES = ("t", "u", "v")
one = st.sampled_from(NAMES)
one_or_two = st.one_of(
    st.tuples(one), st.tuples(one, st.sampled_from(list(PAIRS)), one)
)
pointwise = st.lists(st.sampled_from(list(POINTWISE)), max_size=2).map(tuple)
lookups = st.tuples(
    st.just("lookup"), one_or_two, pointwise, st.sampled_from(list(LOOKUP)), pointwise
)
dense_uses = st.tuples(st.just("dense"), one, st.sampled_from(list(DENSE)))


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
masks = st.one_of(
    st.just(None), st.fixed_dictionaries({name: st.booleans() for name in NAMES})
)
AUX = {
    "none": None,
    "arrays": lambda p, ids, value: {"rows": p["t"][ids], "whole": p["u"], "v": value},
    "anything": lambda p, ids, value: (3, "text", None, np.arange(2), [value, ids]),
}


def inputs(rows):
    """Four rows make a square table, six the shape of what six ids look up."""
    rng = np.random.default_rng(rows)
    params = {"w": jnp.asarray([0.75, 0.5, 0.25])}
    for name in NAMES:
        table = rng.integers(1, 17, (rows, 4)) * rng.choice([-1, 1], (rows, 4)) / 16
        params[name] = jnp.asarray(table, jnp.float32)
    return params, jnp.asarray([[0, 3, -1], [3, 2, 0]])


def rounds_to_few_bits(program):
    return {"cast", "gradient of half precision"} & set(words(program))


def follows_all_lookups(program):
    """Whether tables that are only looked up have a row-sparse gradient for certain."""
    names = set(words(program))
    # A batch of slices is one lookup of windows of several rows, which is not followed.
    # Functions with a rule of their own may be of a table.
    rules = "gradient ", "relu", "twice", "custom_jvp"
    has_rules = any(name.startswith(rules) for name in names)
    return not {"vmap", "slice"} <= names and not has_rules


def compare(program, rows, mask=None, aux="none"):
    """Value, gradient and the kind of each leaf."""
    params, ids = inputs(rows)
    loss = meaning(program)
    make_aux = AUX[aux]
    has_aux = make_aux is not None

    def function(p, ids):
        value = loss(p, ids)
        return (value, make_aux(p, ids, value)) if has_aux else value

    def arrays(tree):
        return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]

    seen = {}

    def by(lib, **kwargs):
        def run(*args):
            result, grads = lib.value_and_grad(function, has_aux=has_aux, **kwargs)(
                *args
            )
            seen[lib] = jax.tree.structure(result)
            return arrays(result), grads

        return run

    looked_up = leaves_of(program, {"lookup"})
    sure = looked_up - leaves_of(program, {"dense"})
    if not follows_all_lookups(program):
        sure = set()
    sparse = None
    if mask is not None:
        sparse = dict.fromkeys(params, False)
        sparse |= {name: mask[name] and name in sure for name in NAMES}
    (result, grads), (expected_result, expected) = jax.jit(
        lambda *args: (by(osa, sparse=sparse)(*args), by(jax)(*args))
    )(params, ids)
    assert seen[osa] == seen[jax]
    # Each of some ten operations rounds, in float32 or in bfloat16.
    ulps = 2.0**18 if rounds_to_few_bits(program) else 512
    for actual, like_jax in zip(result, expected_result, strict=True):
        is_float = jnp.issubdtype(like_jax.dtype, jnp.floating)
        if is_float:
            assert_same(actual, like_jax, ulps, "result")
        else:
            assert_identical(actual, like_jax, "result")
    for name in params:
        assert_same(grads[name], expected[name], ulps, name)
    for name in NAMES:
        if name in sure or mask is not None:
            kind = name in sure if sparse is None else sparse[name]
            assert is_bcoo(grads[name]) == kind, f"{name} is a {type(grads[name])}"
        if is_bcoo(grads[name]):
            most = math.prod(grads[name].shape[: grads[name].n_sparse])
            assert grads[name].nse <= most, f"more entries than rows: {grads[name]}"


def compare_second(program, rows):
    """The derivative of the gradient: custom rules are those of JAX there, too."""
    params, ids = inputs(rows)
    loss = meaning(program)

    def size(lib):
        def function(p):
            grads = dense(lib.grad(loss)(p, ids))
            return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(grads))

        return function

    actual, expected = jax.jit(
        lambda p: (jax.grad(size(osa))(p), jax.grad(size(jax))(p))
    )(params)
    ulps = 2.0**19 if rounds_to_few_bits(program) else 4096
    for name in params:
        assert_same(actual[name], expected[name], ulps, name)


@pytest.mark.parametrize("rows", slow_but([4, 6, 16], 6))
@given(program=programs, mask=masks, aux=st.sampled_from(list(AUX)))
@settings(max_examples=8)
def test_random_programs(rows, program, mask, aux):
    compare(program, rows, mask, aux)


@pytest.mark.slow
@given(program=programs)
@settings(max_examples=6)
def test_random_second_derivatives(program):
    compare_second(program, 6)
