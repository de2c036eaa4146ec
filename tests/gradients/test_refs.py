"""Mutable arrays that loops make, and what JAX does with them: `_gradients/refs.py`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.gradients import Case, assert_same
from ..helpers.support import assert_close, slow_but

PARAMS, IDS = Case(None).inputs()
TABLE, WEIGHTS = PARAMS["t"], PARAMS["w"]


@jax.jit
def cubes(table, ids):
    return jnp.sum(table[ids] ** 3)


gradient_of_cubes = jax.jit(jax.grad(cubes))


def test_empty_ref():
    """JAX has a rule for it inside of a program only."""

    @jax.jit
    def loss(table, ids):
        ref = jax.empty_ref(jax.ShapeDtypeStruct((3, 4), jnp.float32))
        ref[...] = table[ids]
        return jnp.sum(ref[...] ** 3)

    args = TABLE, jnp.array([3, 1, 3])
    for way in (lambda f: f, jax.jit):
        assert_same(way(osa.grad(loss))(*args), gradient_of_cubes(*args))
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
@pytest.mark.parametrize("is_in_jit", slow_but([False, True], True))
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
        gradient = way(osa.grad(jax.jit(loss)))
        assert_same(gradient(*args), gradient_of_cubes(*args))


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

    def same(table, weights):
        return jnp.sum((table[ids] * weights[None]) ** 2)

    expected = jax.jit(jax.grad(same, (0, 1)))(*args)
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
    expected = jax.jit(jax.grad(same, (0, 1)))(TABLE, WEIGHTS)
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
    expected = jax.jit(jax.grad(same, (0, 1)))(*args)
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


@pytest.mark.slow
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

        assert_same(osa.grad(loss)(table), jax.jit(jax.grad(same))(table), 16)


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
    expected = jax.jit(jax.grad(lambda t: jnp.sum(twice * t[pairs] ** 2)))(TABLE)
    assert_same(osa.grad(loss)(TABLE, ids), expected)


def test_refs_of_a_loop_are_wrong_in_jax():
    """Where this fails, `Walk._make_ref` can go."""
    loss = functools.partial(loop_with_ref, begin=BEGINS["zeros"])
    args = TABLE, jnp.array([[3, 1, 3], [0, 1, 2]])
    assert jnp.any(jax.grad(jax.jit(loss))(*args) != jax.grad(cubes)(*args))
