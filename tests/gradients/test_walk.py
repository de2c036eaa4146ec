"""What the walk over the forward program does beyond lookups in plain losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam._gradients.backward_slice import forwarded
from optax_sparse_adam._gradients.walk import Walk

from ..helpers.gradients import Case, assert_same, is_bcoo, square
from ..helpers.support import compile_for_users, slow_but
from ..helpers.transform_cases import UNDER

PARAMS, IDS = Case(None).inputs()
TABLE, WEIGHTS = PARAMS["t"], PARAMS["w"]


def test_whole_table_as_auxiliary_output():
    """Through calls and loops that also look rows up."""

    @jax.jit
    def inner(t, ids):
        def step(total, i):
            return total + square(t[i], WEIGHTS), jnp.sum(t)

        value, sums = lax.scan(step, 0.0, ids)
        return value, (2 * t, sums)

    grad, aux = jax.jit(osa.grad(inner, has_aux=True))(TABLE, IDS)
    expected, expected_aux = jax.jit(jax.grad(inner, has_aux=True))(TABLE, IDS)
    assert is_bcoo(grad)
    assert grad.nse == 6
    assert_same(grad, expected)
    for one, other in zip(aux, expected_aux, strict=True):
        assert_same(one, other, 4)


@pytest.mark.slow
def test_loops_that_look_up_more_rows_than_the_table_has():
    """Memory is that of `jax.grad`, however many steps the loop has."""

    def loss(t, ids):
        def step(total, i):
            return total + square(2 * t[i], WEIGHTS), None

        return lax.scan(step, 0.0, ids)[0]

    ids = jnp.arange(200_000, dtype=jnp.int32).reshape(2000, 100) % 13
    assert osa.grad(loss)(TABLE, ids[:20]).nse == 16
    temporary = [
        compile_for_users(jax.jit(lib.grad(loss)).lower(TABLE, ids))
        .memory_analysis()
        .temp_size_in_bytes
        for lib in (osa, jax)
    ]
    # Row ids are kept, and so are JAX's.
    assert temporary[0] <= temporary[1] + 3 * ids.size * 4, temporary


@pytest.mark.parametrize(
    "spec", slow_but([P(), P("x"), P(None, "x"), P("x", "y")], P("x", "y"))
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_function_of_a_table_into_shard_map(spec, check_vma):
    """Its operands are split as it is; columns may be split, too."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def loss(t, scale, ids):
        look_up = jax.shard_map(
            lambda t, ids: jnp.tanh(t)[ids],
            mesh=mesh,
            in_specs=(spec, P()),
            out_specs=P(*spec) if spec else P(),
            check_vma=check_vma,
        )
        constant = np.arange(t.size, dtype=t.dtype).reshape(t.shape) / 32
        return jnp.sum(look_up(t * scale + constant, ids) ** 2)

    ids = jnp.array([0, 3, 1, 3])
    args = TABLE, jnp.float32(0.5), ids
    grads = jax.jit(osa.grad(loss, (0, 1)))(*args)
    expected = jax.jit(jax.grad(loss, (0, 1)))(*args)
    assert is_bcoo(grads[0])
    assert_same(grads[0], expected[0], 16)
    assert_same(grads[1], expected[1], 64)


def test_evaluated_without_derivatives():
    """The same results, with nothing injected."""

    def function(t, ids):
        return jnp.sum(jnp.tanh(2 * t)[ids]), t[ids], jnp.sum(t)

    evaluated = osa.evaluate(function)
    results = evaluated(TABLE, IDS)
    for one, other in zip(results, jax.jit(function)(TABLE, IDS), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert "custom_jvp" not in str(jax.make_jaxpr(evaluated)(TABLE, IDS))


@pytest.mark.slow
def test_narrow_table():
    """Lookups in float32 of a bfloat16 table: entries add up before they are rounded.

    Each entry of 1/256 vanishes in a bfloat16 sum of one or more.
    """
    ids = jnp.full((257,), 3)
    weights = jnp.full((257, 1), 2.0**-8).at[0].set(1.0)

    def loss(t):
        return jnp.sum(t.astype(jnp.float32)[ids] * weights)

    for size in (5, 1000):
        table = jnp.zeros((size, 2), jnp.bfloat16)
        grad = jax.jit(osa.grad(loss))(table)
        assert grad.unique_indices
        assert grad.nse == min(size, 257)
        assert_same(grad, jax.jit(jax.grad(loss))(table))
        np.testing.assert_array_equal(grad.todense()[3], 2.0)


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


FUNCTIONS_OF_TABLES = {
    "nested uses": (12, lambda table: table + jnp.tanh(table)),
    "long chain": (1200, jnp.sin),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_TABLES)
def test_functions_are_traced_once(name):
    number, function = FUNCTIONS_OF_TABLES[name]

    def loss(p, ids):
        table = p["t"]
        for _ in range(number):
            table = function(table)
        return square(table[ids], p["w"])

    def lines(lib):
        return len(str(jax.make_jaxpr(lib.grad(loss))(PARAMS, IDS)).splitlines())

    assert lines(osa) < 2 * lines(jax) + 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branches of tanh", "scan of tanh"])
def test_nothing_leaks(name):
    """No value of a branch or a loop is held beyond it."""
    with jax.checking_leaks():
        jax.make_jaxpr(osa.grad(UNDER[name].loss))(PARAMS, IDS)


def kept(x, y):
    """Returns `x` as it came, which JAX does not see of a `checkpoint`."""
    return jax.checkpoint(lambda x, y: (x, y + 1))(x, y)


swapped = jax.checkpoint(lambda x, y: (y, x))


@jax.custom_jvp
def by_rule(x, y):
    return x, y


by_rule.defjvp(lambda xs, tangents: (by_rule(*xs), (2 * tangents[0], tangents[1])))
MESH = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))


def mapped(out):
    specs = {"mesh": MESH, "in_specs": (P("d"), P()), "out_specs": (out, P())}
    return jax.shard_map(kept, **specs, check_vma=False)


FORWARDED = {
    "checkpoint": (kept, [0, None]),
    "checkpoint of checkpoint": (jax.checkpoint(kept), [0, None]),
    "swap": (swapped, [1, 0]),
    "branches": (lambda x, y: lax.cond(x[0] > 0, kept, kept, x, y), [1, None]),
    "branches that differ": (
        lambda x, y: lax.cond(x[0] > 0, swapped, kept, x, y),
        [None, None],
    ),
    "carried": (
        lambda x, y: lax.scan(lambda c, _: (kept(*c), None), (x, y), length=3),
        [0, None],
    ),
    "carried and swapped": (
        lambda x, y: lax.scan(lambda c, _: (swapped(*c), None), (x, y), length=3),
        [None, None],
    ),
    "row by row": (
        lambda x, y: lax.scan(lambda c, x: kept(x, c)[::-1], y[0], x),
        [None, 1],
    ),
    "carried in place of a row": (
        lambda x, y: lax.scan(lambda c, x: swapped(c, x), y[0], x),
        [None, None],
    ),
    "while": (
        lambda x, y: lax.while_loop(lambda c: c[1][0] < 9, lambda c: kept(*c), (x, y)),
        [0, None],
    ),
    "shard_map": (mapped(P("d")), [0, None]),
    "shard_map, laid out otherwise": (mapped(P()), [None, None]),
    "jit": (jax.jit(kept), [0, None]),
    "jit, laid out otherwise": (
        jax.jit(kept, out_shardings=NamedSharding(MESH, P("d"))),
        [None, None],
    ),
    "rule": (by_rule, [None, None]),
}


@pytest.mark.parametrize("name", FORWARDED)
def test_forwarded(name):
    """Which results of an equation are operands of it."""
    program, expected = FORWARDED[name]
    jaxpr = jax.make_jaxpr(program)(jnp.zeros(2), jnp.zeros(2))
    assert forwarded(jaxpr.eqns[-1]) == expected
    as_values = [0, 1] if name == "rule" else expected
    assert forwarded(jaxpr.eqns[-1], as_values=True) == as_values
