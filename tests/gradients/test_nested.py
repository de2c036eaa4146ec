"""Row-sparse gradients inside other transformations, of second order, on devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, PartitionSpec

import optax_sparse_adam as osa

from ..helpers.gradients import (
    Case,
    assert_row_sparse,
    assert_same,
    dense,
    is_bcoo,
    square,
)
from ..helpers.support import slow_but

PARAMS, IDS = Case(None).inputs()
SHAPE, DTYPE = PARAMS["t"].shape, PARAMS["t"].dtype


def loss(p, ids):
    return square(p["t"][ids], p["w"])


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (2 * g,))


def with_rules(p, ids):
    """Functions with rules of their own, in a loop too, of another array.

    At zero the rule of `max` would be one half, and that of relu is zero.
    """
    scale = jax.nn.relu(p["w"] - lax.stop_gradient(p["w"][0]))
    scale += lax.scan(lambda c, x: (c, rounded(x)), 0.0, p["w"])[1]
    return square(p["t"][ids] * scale[None, None], p["w"])


def squared_gradient(lib, loss):
    """The squared norm of the table's gradient."""

    def function(p, ids):
        grad = lib.grad(lambda t: loss({**p, "t": t}, ids))(p["t"])
        return jnp.sum(jnp.square(dense(grad)))

    return function


@pytest.mark.slow
@pytest.mark.parametrize("loss", slow_but([loss, with_rules], with_rules))
def test_gradient_of_gradient(loss):
    """Of either library over either; row-sparse where the outer one is ours."""
    expected = jax.jit(jax.grad(squared_gradient(jax, loss)))(PARAMS, IDS)
    for outer, inner, lift in (
        (jax, osa, jax.jit),
        (osa, jax, jax.jit),
        (osa, osa, jax.jit),
        (osa, osa, lambda f: f),
    ):
        grads = lift(outer.grad(squared_gradient(inner, loss)))(PARAMS, IDS)
        assert_same(grads["t"], expected["t"], 8)
        assert_same(grads["w"], expected["w"], 8)
        assert is_bcoo(grads["t"]) == (outer is osa)


def test_gradient_through_stored_rows():
    """`.data` is an array like any other: the rows' gradients, duplicates apart."""

    def ours(p, ids):
        return jnp.sum(jnp.square(osa.grad(loss)(p, ids)["t"].data))

    def theirs(p, ids):
        return jnp.sum(jnp.square(jax.grad(square)(p["t"][ids], p["w"])))

    expected = jax.jit(jax.grad(theirs))(PARAMS, IDS)
    for lib in (jax, osa):
        grads = jax.jit(lib.grad(ours))(PARAMS, IDS)
        assert_same(grads["t"], expected["t"])
        assert_same(grads["w"], expected["w"])
    # The gradient and the gradient of its rows look the same ids up, once each.
    assert_row_sparse(grads["t"], SHAPE, DTYPE, 6)


def test_forward_over_reverse():
    @partial(jax.jit, static_argnums=0)
    def derivative(lib, p):
        tangents = jax.tree.map(jnp.ones_like, p)
        return jax.jvp(lambda p: lib.grad(loss)(p, IDS), (p,), (tangents,))

    (actual, moved), (expected, expected_moved) = (
        derivative(lib, PARAMS) for lib in (osa, jax)
    )
    assert_row_sparse(actual["t"], SHAPE, DTYPE, 6)
    assert_same(actual["t"], expected["t"])
    assert_same(moved["w"], expected_moved["w"])
    # The tangent of a BCOO has tangents for indices; its rows are those of the primal.
    tangent = BCOO((moved["t"].data, actual["t"].indices), shape=SHAPE)
    assert_same(tangent, expected_moved["t"])


@pytest.mark.parametrize("rows", [16, 2], ids=["few ids", "more ids than rows"])
def test_vmap(rows):
    """One gradient an example, as a batched BCOO."""
    params = {**PARAMS, "t": np.asarray(PARAMS["t"])[:rows]}
    ids = IDS % rows
    values, grads = jax.jit(jax.vmap(osa.value_and_grad(loss), (None, 0)))(params, ids)
    expected = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, ids)
    assert_same(values, expected[0])
    assert_same(grads["w"], expected[1]["w"])
    assert_same(grads["t"], expected[1]["t"])
    layout = (grads["t"].shape, grads["t"].nse, grads["t"].n_batch)
    assert layout == ((2, rows, 4), min(3, rows), 1)
    # One row-sparse gradient of the batch.
    flat = BCOO(
        (
            np.asarray(grads["t"].data).reshape(-1, 4),
            np.asarray(grads["t"].indices).reshape(-1, 1),
        ),
        shape=params["t"].shape,
    )
    assert_same(flat, jax.jit(jax.grad(loss))(params, ids)["t"])


def test_vmap_over_parameters():
    params = jax.tree.map(lambda x: np.stack([x, 2 * x]), PARAMS)
    grads = jax.jit(jax.vmap(osa.grad(loss), (0, None)))(params, IDS)
    expected = jax.jit(jax.vmap(jax.grad(loss), (0, None)))(params, IDS)
    assert_same(grads["t"], expected["t"])
    assert_same(grads["w"], expected["w"])


# On devices.

MANY_IDS = jnp.asarray(np.arange(32, dtype=np.int32).reshape(8, 4) * 3 % 16)
EXPECTED = jax.jit(jax.value_and_grad(loss))(PARAMS, MANY_IDS)
ALONG, WHOLE = PartitionSpec("d"), PartitionSpec()


def mesh(axis_type):
    return jax.make_mesh((8,), ("d",), axis_types=(axis_type,))


@pytest.mark.parametrize("check_vma", slow_but([True, False], False))
def test_inside_shard_map(check_vma):
    """Each device's rows side by side are the rows of the batch."""

    def local(p, ids):
        if check_vma:  # no sum over devices in the gradient
            p = jax.tree.map(lambda x: lax.pcast(x, "d", to="varying"), p)
        value, grads = osa.value_and_grad(loss)(p, ids)
        return value[None], grads["t"], grads["w"][None]

    mapped = jax.shard_map(
        local,
        mesh=mesh(AxisType.Auto),
        in_specs=(WHOLE, ALONG),
        out_specs=ALONG,
        check_vma=check_vma,
    )
    value, grad, w = jax.jit(mapped)(PARAMS, MANY_IDS)
    assert_same(jnp.sum(value), EXPECTED[0])
    assert_same(jnp.sum(w, axis=0), EXPECTED[1]["w"])
    assert grad.data.shape == (32, 4)
    assert_same(BCOO((grad.data, grad.indices), shape=SHAPE), EXPECTED[1]["t"])


def long_loop(p, ids):
    """Looks up more rows than the table has."""
    ids = jnp.tile(ids, (5, 1))
    start = jnp.sum(0 * ids).astype(jnp.float32)  # of this device
    return lax.scan(lambda c, i: (c + loss(p, i), None), start, ids)[0]


@pytest.mark.parametrize(
    "local_loss", [loss, lambda p, ids: lax.psum(loss(p, ids), "d"), long_loop]
)
@pytest.mark.parametrize("check_vma", slow_but([True, False], True))
def test_whole_gradient_on_every_device(check_vma, local_loss):
    """As jax.grad has it: the gradient of a replicated table is summed over devices."""

    def gradient(lib, p, ids):
        grad = lib.grad(local_loss)(p, ids)["t"]
        return (grad.todense() if is_bcoo(grad) else grad)[None]

    def on_mesh(lib):
        mapped = jax.shard_map(
            partial(gradient, lib),
            mesh=mesh(AxisType.Auto),
            in_specs=(WHOLE, ALONG),
            out_specs=ALONG,
            check_vma=check_vma,
        )
        return jax.jit(mapped)(PARAMS, MANY_IDS)

    assert_same(on_mesh(osa), on_mesh(jax))


@pytest.mark.parametrize(
    ("ids_spec", "way"),
    [
        (WHOLE, jax.jit),
        (ALONG, jax.jit),
        # Each operation is compiled by itself, for eight devices.
        pytest.param(ALONG, lambda f: f, marks=pytest.mark.slow),
    ],
    ids=["whole", "along", "along, not compiled"],
)
def test_replicated_gradient_leaves_shard_map(ids_spec, way):
    """The value varies over devices, the gradient, summed over them, does not."""

    def local(p, ids, labels):
        return osa.grad(lambda p: loss(p, ids) + jnp.sum(labels))(p)["t"]

    mapped = jax.shard_map(
        local,
        mesh=mesh(AxisType.Auto),
        in_specs=(WHOLE, ids_spec, ALONG),
        out_specs=WHOLE,
    )
    grad = way(mapped)(PARAMS, MANY_IDS, jnp.ones(8))
    assert grad.nse == 16  # rows of the table; devices look up 32
    times = 8 if ids_spec == WHOLE else 1
    assert_same(grad.todense(), times * EXPECTED[1]["t"])
