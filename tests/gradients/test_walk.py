"""What the walk over the forward program does beyond lookups in plain losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.gradients import FAR_IDS, Case, assert_same, is_bcoo, square
from ..helpers.support import compile_for_users, slow_but

PARAMS, IDS = Case(None).inputs()
TABLE, WEIGHTS = PARAMS["t"], PARAMS["w"]


def assert_row_sparse_like_jax(loss, *args, nse=None):
    grad = jax.jit(osa.grad(loss))(*args)
    assert is_bcoo(grad)
    assert nse in (None, grad.nse)
    assert_same(grad, jax.jit(jax.grad(loss))(*args), 32)


FUNCTIONS = {
    "checkpoint of a function": lambda t: jax.checkpoint(lambda t: jnp.tanh(t))(t),
    "stopped and not": lambda t: t * lax.stop_gradient(jnp.tanh(t)),
    "rounded and not": lambda t: t + jnp.round(t),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_table(name):
    assert_row_sparse_like_jax(
        lambda t, ids: square(FUNCTIONS[name](t)[ids], WEIGHTS), TABLE, IDS
    )


def test_integers_of_a_table_out_of_bounds():
    """Are the largest number, as in JAX, and not what NaN is cast to."""

    def loss(t, ids):
        number = jnp.take(abs(8 * t).astype(jnp.uint32), ids, axis=0)
        rows = t.at[ids].get(mode="clip")
        return square(jnp.where(number > 8, 2 * rows, rows), WEIGHTS)

    assert_row_sparse_like_jax(loss, TABLE, jnp.asarray(FAR_IDS), nse=6)


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
    assert_row_sparse_like_jax(loss, TABLE, ids[:20], nse=16)
    temporary = [
        compile_for_users(jax.jit(lib.grad(loss)).lower(TABLE, ids))
        .memory_analysis()
        .temp_size_in_bytes
        for lib in (osa, jax)
    ]
    # Row ids are kept, and so are JAX's.
    assert temporary[0] <= temporary[1] + 3 * ids.size * 4, temporary


def test_only_the_changed_carry_is_dense():
    def loss(p, ids):
        def step(carry, i):
            t, total = carry
            return (t / 2, total + square(t[i] * p["s"][i], WEIGHTS)), None

        return lax.scan(step, (p["t"], 0.0), ids)[0][1]

    params = {"t": TABLE, "s": TABLE + 1}
    grads, expected = (jax.jit(lib.grad(loss))(params, IDS) for lib in (osa, jax))
    assert [is_bcoo(grads[name]) for name in "ts"] == [False, True]
    for name in params:
        assert_same(grads[name], expected[name], 8)


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


def test_one_table_split_in_two_ways():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def loss(t, ids):
        return jax.shard_map(
            lambda part, t, ids: lax.psum(jnp.sum(part[ids] * t[ids]), "x"),
            mesh=mesh,
            in_specs=(P("x"), P(), P()),
            out_specs=P(),
        )(t, t, ids)

    ids = jnp.array([0, 3, 1, 3])
    grad, expected = (jax.jit(lib.grad(loss))(TABLE, ids) for lib in (osa, jax))
    assert_same(grad, expected, 8)


def test_evaluated_without_derivatives():
    """The same results, with nothing injected."""

    def function(t, ids):
        return jnp.sum(jnp.tanh(2 * t)[ids]), t[ids], jnp.sum(t)

    evaluated = osa.evaluate(function)
    results = evaluated(TABLE, IDS)
    for one, other in zip(results, jax.jit(function)(TABLE, IDS), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert "custom_jvp" not in str(jax.make_jaxpr(evaluated)(TABLE, IDS))


def test_loop_without_steps():
    def loss(t, ids):
        return lax.scan(lambda c, i: (c + square(t[i], WEIGHTS), None), 1.0, ids)[0]

    assert_row_sparse_like_jax(loss, TABLE, IDS[:0], nse=0)


def test_table_in_a_while_loop_without_derivative():
    def loss(t, ids):
        fixed = lax.stop_gradient(t)
        more = lax.while_loop(lambda c: c < 9.0, lambda c: c + fixed[0, 0] ** 2, 0.0)
        return more * square(t[ids], WEIGHTS)

    assert_row_sparse_like_jax(loss, TABLE, IDS, nse=6)


@pytest.mark.parametrize(
    "function", slow_but([lax.stop_gradient, jnp.floor, jnp.sign], jnp.floor)
)
def test_whole_tables_of_which_nothing_is_differentiated(function):
    def loss(t, ids):
        return square(t[ids], WEIGHTS) * function(jnp.sum(t))

    gradients = jax.jit(lambda *args: (osa.grad(loss)(*args), jax.grad(loss)(*args)))
    ours, theirs = gradients(TABLE, IDS)
    assert is_bcoo(ours)
    assert_same(ours, theirs, 32)


@pytest.mark.parametrize("check_vma", slow_but([True, False], True))
def test_long_loop_inside_shard_map(check_vma):
    """The gradient of a replicated table is summed over devices, as JAX does it."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    ids = jnp.arange(40).reshape(20, 2) % 7

    def loss(t, ids):
        step = lambda c, i: (c + square(t[i], WEIGHTS), None)  # noqa: E731
        return lax.scan(step, jnp.sum(0 * ids).astype(jnp.float32), ids)[0]

    def gradient(lib):
        def local(t, ids):
            grad = lib.grad(loss)(t, ids)
            return (grad.todense() if is_bcoo(grad) else grad)[None]

        specs = {"in_specs": (P(), P("d")), "out_specs": P("d")}
        return jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)

    actual, expected = (jax.jit(gradient(lib))(TABLE[:8], ids) for lib in (osa, jax))
    assert_same(actual, expected, 8)


@jax.custom_vjp
def tripled(x):
    return x


tripled.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


def test_rows_may_go_into_any_function_and_tables_may_not():
    assert_row_sparse_like_jax(
        lambda t, ids: square(tripled(t[ids]), WEIGHTS), TABLE, IDS, nse=6
    )
    with pytest.raises(ValueError, match=r"`custom_vjp_call` at .*test_walk\.py"):
        osa.grad(
            lambda t, ids: square(tripled(t)[ids], WEIGHTS), sparse=lambda *_: True
        )(TABLE, IDS)


def test_branches_for_other_platforms():
    """They are not compiled, as under JAX; here one could not be."""

    def elsewhere(t, ids):
        rows = lax.stop_gradient(t[ids])
        return jax.ffi.ffi_call("not_here", jax.typeof(rows))(rows)

    def loss(t, ids):
        rows = lax.platform_dependent(
            t, ids, tpu=elsewhere, default=lambda t, ids: t[ids]
        )
        return square(rows, WEIGHTS)

    assert_row_sparse_like_jax(loss, TABLE, IDS, nse=6)
