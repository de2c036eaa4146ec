"""Gradients summed over devices and divided among them, in shard_map and pmap."""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.gradients import dense
from ..helpers.identity import train
from ..helpers.mesh import MESHES
from ..helpers.support import (
    assert_identical,
    bcoo,
    need_devices,
    random_entries,
    row_sums,
    slow_but,
    to_dense,
)

SHAPE = (24, 3)


def mesh_of(shape):
    names = MESHES[shape]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names))


def entries(nse=5, seed=0, shape=SHAPE, n_sparse=1):
    """Those of eight devices, with duplicates, zeros and padding; sums are exact."""
    rng = np.random.default_rng(seed)
    return random_entries(rng, shape, n_sparse, 8 * nse, outside=True)


def dense_sum(values, indices, shape=SHAPE):
    total = np.zeros(shape)
    for row, value in row_sums(values, indices, shape).items():
        total[row] = value
    return total


def assert_coalesced(grad, rows, number):
    """The flags are true, and the padding is where it belongs."""
    assert grad.unique_indices
    assert grad.indices_sorted
    ids = [tuple(row) for row in np.asarray(grad.indices).tolist()]
    assert len(ids) == number
    assert ids[: len(rows)] == list(rows)
    assert all(a < b for a, b in itertools.pairwise(ids))
    bounds = np.asarray(grad.shape[: grad.n_sparse])
    assert np.all(np.asarray(grad.indices)[len(rows) :] >= bounds)
    assert not np.any(np.asarray(grad.data)[len(rows) :])


@pytest.mark.parametrize("check_vma", slow_but([True, False], False))
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((8,), "x"), ((4, 2), ("x", "y")), ((4, 2), ("y", "x")), ((2, 2, 2), ("z", "x"))],
)
def test_psum(shape, axes, check_vma):
    """On each device the same rows, those of all devices along the axes."""
    values, indices = entries()

    def function(values, indices):
        grads = {"t": bcoo(values, indices, SHAPE), "w": values[0], "n": None}
        return osa.psum(grads, axes), osa.pmean(grads, axes)

    names = MESHES[shape]
    other = tuple(name for name in names if name not in axes)
    specs = {"in_specs": P((*other, *axes) if other else axes), "out_specs": P()}
    if other:  # one sum for each device of the other axis; look at those of the first
        axes, half = tuple(axes), len(values) // 2
        values[half:], indices[half:] = values[:half], indices[:half]
        check_vma = False
    summed = jax.shard_map(function, mesh=mesh_of(shape), check_vma=check_vma, **specs)
    total, mean = jax.jit(summed)(values, indices)
    devices = 4 if other else 8
    values, indices = values[: 5 * devices], indices[: 5 * devices]
    rows = row_sums(values, indices, SHAPE)
    expected = dense_sum(values, indices)
    for grads, scale in ((total, 1), (mean, devices)):
        assert_coalesced(grads["t"], rows, min(5 * devices, SHAPE[0]))
        assert_identical(
            to_dense(grads["t"]), (expected / scale).astype(np.float32), "table"
        )
        assert_identical(grads["w"], values[::5].sum(0) / np.float32(scale), "dense")
        assert grads["n"] is None


@pytest.mark.parametrize(
    "way", slow_but([lambda f: f, jax.jit], jax.jit), ids=["eager", "jit"]
)
def test_along_an_axis_of_vmap(way):
    """As jax.lax.psum: eight shares of a batch on one device."""
    values, indices = (x.reshape(8, 5, -1) for x in entries())

    def function(values, indices):
        grads = {"t": bcoo(values, indices, SHAPE), "w": values[0], "n": None}
        total = osa.psum(grads, "x")
        return total, osa.pmean(grads, "x"), osa.local_rows(total, "x")

    total, mean, local = way(jax.vmap(function, axis_name="x"))(values, indices)
    expected = dense_sum(*(x.reshape(40, -1) for x in (values, indices)))
    whole = np.broadcast_to(expected, (8, *SHAPE)).astype(np.float32)
    shards = expected.reshape(8, 3, 3).astype(np.float32)
    for grads, tables in ((total, whole), (mean, whole / 8), (local, shards)):
        assert_identical(dense(grads["t"]), tables, "table")
        assert grads["n"] is None
    assert_identical(total["w"], np.broadcast_to(values[:, 0].sum(0), (8, 3)), "dense")


@pytest.mark.slow
@pytest.mark.parametrize("indices_dtype", slow_but(["int8", "int32"], "int8"))
@pytest.mark.parametrize("coalesced", slow_but([True, False], False))
@pytest.mark.parametrize(
    "axes", slow_but(["x", ("x", "y"), ("y", "x")], ("y", "x"), is_one_value=True)
)
def test_local_rows(axes, coalesced, indices_dtype):
    """The shards side by side are the table; more entries than rows, and fewer."""
    for nse, is_reversed in ((1, False), (5, False), (5, coalesced)):
        values, indices = entries(nse, nse)
        rows = row_sums(values, indices, SHAPE)
        grad = bcoo(values, indices.astype(indices_dtype), SHAPE)
        grad = osa.coalesce(grad) if coalesced else grad
        if is_reversed:  # each row once still
            last = grad.data[::-1], grad.indices[::-1]
            grad = bcoo(*last, SHAPE, unique_indices=True)
        shards = [a for a in MESHES[4, 2] if a in axes]
        number = {"x": 4, "y": 2}
        devices = int(np.prod([number[a] for a in shards]))
        local = SHAPE[0] // devices

        def function(grad, devices=devices, local=local):
            mine = osa.local_rows({"t": grad, "w": grad.data, "n": None}, axes)
            assert mine["n"] is None
            assert mine["w"] is grad.data
            assert mine["t"].shape == (local, SHAPE[1])
            assert mine["t"].nse == min(grad.nse, local)
            return jax.tree.map(lambda x: x[None], mine["t"])

        split = jax.shard_map(
            function, mesh=mesh_of((4, 2)), in_specs=P(), out_specs=P(axes)
        )
        stacked = jax.jit(split)(grad)
        for k in range(devices):
            one = jax.tree.map(lambda x, k=k: x[k], stacked)
            part = {r - k * local: v for (r,), v in rows.items() if r // local == k}
            assert_coalesced(one, [(r,) for r in part], min(grad.nse, local))
            for value, row in zip(one.data, part.values(), strict=False):
                assert_identical(np.asarray(value), row.astype(np.float32))


def test_local_rows_of_two_axes():
    """The first sparse axis is sharded; the second may be out of bounds alone."""
    shape = (16, 3, 2)
    indices = np.argwhere(np.ones((16, 4))).astype(np.int32)  # one in four outside
    values = np.arange(128, dtype=np.float32).reshape(64, 2)
    grad = bcoo(values, indices, shape, indices_sorted=True, unique_indices=True)

    def function(table, grad):
        mine = osa.local_rows(grad, "x")
        assert mine.nse == 6
        return osa.apply_updates(table, mine)

    mesh, specs = mesh_of((8,)), {"in_specs": (P("x"), P()), "out_specs": P("x")}
    add = jax.jit(jax.shard_map(function, mesh=mesh, **specs))
    expected = dense_sum(values, indices, shape).astype(np.float32)
    for same in (grad, bcoo(values, indices, shape)):
        assert_identical(add(jnp.zeros(shape), same), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_nothing_stored(check_vma):
    """As of a leaf named `sparse` that the loss does not use."""

    def function():
        grad = bcoo(np.zeros((0, 3), np.float32), np.zeros((0, 1), np.int32), SHAPE)
        total = osa.psum(grad, "x"), osa.pmean(grad, "x")
        parts = osa.local_rows(total[0], "x"), osa.psum_scatter(grad, "x")
        assert [x.nse for x in (*total, *parts)] == [0] * 4
        assert [len(x) for x in (*total, *parts)] == [24, 24, 3, 3]
        return total, parts

    mapped = jax.shard_map(
        function, mesh=mesh_of((8,)), in_specs=(), out_specs=P(), check_vma=check_vma
    )
    for grad in jax.tree.leaves(jax.jit(mapped)()):
        assert len(grad) == 0


@pytest.mark.slow
def test_indivisible():
    grad = bcoo(np.ones((1, 3), np.float32), [[0]], (10, 3))
    function = partial(osa.local_rows, axis_name="x")
    split = jax.shard_map(function, mesh=mesh_of((8,)), in_specs=P(), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"got 10 rows .* 8 devices.*Pad .* 16 rows"):
        split(grad)


# A step of training.

IDS = np.random.default_rng(3).integers(0, 64, (16, 4)).astype(np.int32)
TABLE = np.random.default_rng(4).standard_normal((64, 8)).astype(np.float32)


def loss(params, ids):
    return jnp.mean((params["t"][ids].sum(1) @ params["w"]) ** 2)


@pytest.mark.slow
def test_pmap():
    """Data-parallel training, the parameters on every device."""
    need_devices(8)
    tx = osa.sparse_adam(0.01)

    @partial(jax.pmap, axis_name="d")
    def step(params, state, ids):
        grads = osa.pmean(osa.grad(loss)(params, ids), "d")
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    params = {"t": jnp.asarray(TABLE), "w": jnp.ones(8)}
    expected = train(tx, params, [jax.jit(osa.grad(loss))(params, IDS)])
    params, state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (8, *x.shape)), (params, tx.init(params))
    )
    params, state = step(params, state, IDS.reshape(8, 2, 4))
    first = jax.tree.map(lambda x: x[0], (params, state))
    for k in range(1, 8):
        assert_identical(jax.tree.map(lambda x, k=k: x[k], (params, state)), first)
    # The batch's mean is taken in another order.
    chex.assert_trees_all_close(first, expected, rtol=1e-5, atol=1e-5)
