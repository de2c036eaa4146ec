"""What the walk over the forward program does beyond lookups in plain losses."""

import functools

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
from ..helpers.support import assert_close, compile_for_users, slow_but
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


@jax.jit
def cubes(table, ids):
    return jnp.sum(table[ids] ** 3)


def test_empty_ref():
    """JAX has a rule for it inside of a program only."""

    @jax.jit
    def loss(table, ids):
        ref = jax.empty_ref(jax.ShapeDtypeStruct((3, 4), jnp.float32))
        ref[...] = table[ids]
        return jnp.sum(ref[...] ** 3)

    args = TABLE, jnp.array([3, 1, 3])
    for way in (lambda f: f, jax.jit):
        assert_same(way(osa.grad(loss))(*args), jax.grad(cubes)(*args))
        assert_same(way(osa.evaluate(loss))(*args), cubes(*args))


def loop_with_ref(table, ids, begin):
    def step(total, i):
        ref = begin(table, i)
        ref[...] = table[i]
        return total + jnp.sum(ref[...] ** 3), None

    return lax.scan(step, 0.0, ids)[0]


# What a mutable array of a step of a loop holds at first.
BEGINS = {
    "empty": lambda t, i: jax.empty_ref(jax.ShapeDtypeStruct((3, 4), jnp.float32)),
    "zeros": lambda t, i: jax.new_ref(jnp.zeros((3, 4))),
    "of ids": lambda t, i: jax.new_ref(jnp.zeros((3, 4)) + i[0].astype(float)),
    "rows": lambda t, i: jax.new_ref(2 * t[i]),
}


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
@pytest.mark.parametrize("is_in_jit", [False, True])
def test_refs_of_a_loop(begin, is_in_jit):
    def loss(table, ids):
        loop = functools.partial(loop_with_ref, begin=begin)
        if not is_in_jit:
            return loop(table, ids)

        @jax.jit
        def of_rows(rows, i):
            ref = begin(rows, i)
            ref[...] = rows
            return jnp.sum(ref[...] ** 3)

        def step(total, i):
            # The ids of a row of three are 0, 1, 2 of the rows that it looks up.
            return total + of_rows(table[i], jnp.arange(3, dtype=i.dtype)), None

        return lax.scan(step, 0.0, ids)[0]

    args = TABLE, jnp.array([[3, 1, 3], [0, 1, 2]])
    assert_same(osa.evaluate(jax.jit(loss))(*args), cubes(*args))
    for way in (lambda f: f, jax.jit):
        assert_same(way(osa.grad(jax.jit(loss)))(*args), jax.grad(cubes)(*args))


def rows_in_a_loop(rows, w, dtype=jnp.float32):
    def step(total, row):
        ref = jax.new_ref(jnp.zeros(4, dtype))
        ref[...] = (row * w).astype(dtype)
        return total + jnp.abs(ref[...]) ** 2, None

    return lax.scan(step, jnp.zeros(4), rows)[0]


@pytest.mark.parametrize(
    "loop",
    [
        rows_in_a_loop,
        jax.jit(rows_in_a_loop),
        lambda *x: lax.cond(x[0][0, 0] < 9, rows_in_a_loop, lambda r, w: r[0], *x),
        functools.partial(rows_in_a_loop, dtype=jnp.complex64),
    ],
    ids=["alone", "jit", "branch", "complex"],
)
def test_refs_of_a_loop_without_tables(loop):
    """And the gradient of what is no table."""
    args, ids = (TABLE, WEIGHTS), jnp.array([1, 3, 1])
    _, (grad, of_weights) = osa.value_and_grad(
        lambda t, w: jnp.sum(loop(t[ids], w)), (0, 1)
    )(*args)
    expected = jax.grad(lambda t, w: jnp.sum((t[ids] * w[None]) ** 2), (0, 1))(*args)
    assert_same(grad, expected[0], 2)
    assert_same(of_weights, expected[1], 16)


@pytest.mark.parametrize("is_around", [True, False])
def test_refs_of_a_loop_and_shard_map(is_around):
    """Parts of a device stay its own, and what all have alike stays alike."""
    mesh = jax.make_mesh((4,), "x", axis_types=(AxisType.Auto,))
    map_of_devices = functools.partial(jax.shard_map, mesh=mesh)
    ids = jnp.array([1, 3, 1, 6])

    @functools.partial(map_of_devices, in_specs=P("x"), out_specs=P("x"))
    def squares(row):
        ref = jax.new_ref(row)
        ref[...] = ref[...] ** 2
        return ref[...]

    @functools.partial(map_of_devices, in_specs=(P(), P(), P("x")), out_specs=P())
    def of_device(t, w, ids):
        def step(total, i):
            ref = jax.new_ref(jnp.zeros(4))
            ref[...] = 2 * w
            return total + (t[i] * ref[...]) ** 2, None

        start = lax.pcast(jnp.zeros(4), "x", to="varying")
        return lax.psum(lax.scan(step, start, ids)[0], "x")

    def loss(t, w):
        if is_around:
            return jnp.sum(of_device(t, w, ids))
        steps = lax.scan(lambda c, i: (c + squares(2 * t[i] * w), None), 0 * w, ids)
        return jnp.sum(steps[0])

    def same(t, w):
        return jnp.sum((t[ids] * 2 * w[None]) ** 2)

    grad, of_weights = jax.jit(osa.grad(loss, (0, 1)))(TABLE, WEIGHTS)
    expected = jax.grad(same, (0, 1))(TABLE, WEIGHTS)
    assert_same(grad, expected[0], 2)
    assert_same(of_weights, expected[1], 16)


@pytest.mark.parametrize("is_of_step", [True, False])
def test_refs_of_a_loop_beside_others(is_of_step):
    """An inner loop in which nothing but such a one has a derivative."""

    def loss(t, w, ids):
        def step(total, i):
            ref = jax.new_ref(jnp.zeros(4) if is_of_step else t[i] * w)
            if is_of_step:
                ref[...] = t[i] * w

            def inner(k, _):
                own = jax.new_ref(jnp.zeros(4))
                own[...] = ref[...] * (k + 1).astype(float)
                ref[...] = own[...]

            lax.fori_loop(0, 2, inner, None)
            return total + ref[...], None

        return jnp.sum(lax.scan(step, 0.0 * w, ids)[0] ** 2)

    def same(t, w, ids):
        return jnp.sum((2 * jnp.sum(t[ids] * w[None], axis=0)) ** 2)

    args = TABLE, WEIGHTS, jnp.array([1, 3, 1])
    grads = osa.grad(loss, (0, 1))(*args)
    expected = jax.grad(same, (0, 1))(*args)
    assert_same(grads[0], expected[0], 16)
    assert_same(grads[1], expected[1], 16)


def test_refs_of_a_loop_of_a_free_size():
    def loss(t, ids):
        def step(total, i):
            ref = jax.new_ref(jnp.zeros(total.shape))
            ref[...] = t[i]
            return jnp.tanh(total + ref[...]), None

        return jnp.sum(lax.scan(step, jnp.zeros((ids.shape[1], 4)), ids)[0])

    def dense(t, ids):
        value, grad = osa.value_and_grad(loss)(t, ids)
        return value, grad.todense()

    (size,) = jax.export.symbolic_shape("b", constraints=["3*b <= 8"])
    like = jax.ShapeDtypeStruct
    shapes = like(TABLE.shape, TABLE.dtype), like((3, size), jnp.int32)
    ids = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    exported = jax.export.export(jax.jit(dense))(*shapes)
    expected = jax.jit(dense)(TABLE, ids)
    assert jnp.any(expected[1] != 0)
    for one, other in zip(exported.call(TABLE, ids), expected, strict=True):
        assert_close(one, other, 1e-6)


def test_loops_with_arrays_that_a_mesh_splits():
    """By their columns, over Explicit axes."""
    mesh = jax.make_mesh((2,), "x", axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        state = jax.device_put(jnp.ones((3, 8)), P(None, "x"))
        table, ids = jax.device_put((TABLE, jnp.array([1, 3, 1])), P())

        def loss(t):
            def step(state, i):
                ref = jax.new_ref(jnp.zeros(()))
                ref[...] = jnp.sum(t[i])
                return state * ref[...], None

            return jnp.sum(lax.scan(step, state, ids)[0])

        def same(t):
            return state.size * jnp.prod(jnp.sum(t[ids], axis=1))

        assert_same(osa.grad(loss)(table), jax.grad(same)(table), 16)


def test_ids_in_a_ref_of_a_loop():
    def loss(t, ids):
        def step(total, i):
            ref = jax.new_ref(jnp.zeros(2, i.dtype))
            ref[0], ref[1] = i, i + 1
            is_last = jax.new_ref(jnp.zeros((), bool))
            is_last[...] = i == ids[-1]
            rows = jnp.sum(t[ref[...]] ** 2)
            return total + jnp.where(is_last[...], 2 * rows, rows), None

        return lax.scan(step, 0.0, ids)[0]

    ids = jnp.array([1, 3, 5])
    twice = jnp.array([1, 1, 2])[:, None, None].astype(float)
    pairs = jnp.stack([ids, ids + 1], axis=1)
    expected = jax.grad(lambda t: jnp.sum(twice * t[pairs] ** 2))(TABLE)
    assert_same(osa.grad(loss)(TABLE, ids), expected)


def test_refs_of_a_loop_are_wrong_in_jax():
    """Where this fails, `Walk._make_ref` can go."""
    loss = functools.partial(loop_with_ref, begin=BEGINS["zeros"])
    args = TABLE, jnp.array([[3, 1, 3], [0, 1, 2]])
    assert jnp.any(jax.grad(jax.jit(loss))(*args) != jax.grad(cubes)(*args))


def test_evaluated_without_derivatives():
    """The same results, with nothing injected."""

    def function(t, ids):
        return jnp.sum(jnp.tanh(2 * t)[ids]), t[ids], jnp.sum(t)

    evaluated = osa.evaluate(function)
    results = evaluated(TABLE, IDS)
    for one, other in zip(results, jax.jit(function)(TABLE, IDS), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert "custom_jvp" not in str(jax.make_jaxpr(evaluated)(TABLE, IDS))


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
        assert_same(grad, jax.grad(loss)(table))
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
