"""Sums of row-sparse gradients over devices, against sums in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.routed import P, exact, make_mesh, on_mesh
from ..helpers.support import bcoo, random_entries, row_sums, slow_but

SHAPE, NSE = (64, 3, 2), 24

# mesh, names, axis_name, n_sparse, check_vma, sizes, rows stored on each device
LAYOUTS = {
    "several rounds": ((8,), ("d",), "d", 1, True, {"capacity": 5}, 8),
    "pairs of indices": ((8,), ("d",), "d", 2, False, {"capacity": 7}, 24),
    "two axes": ((4, 2), ("d", "e"), ("d", "e"), 2, True, {"max_rounds": 1}, 24),
    "all gathered": ((4, 2), ("d", "e"), "d", 1, False, {"capacity": NSE}, 16),
}


def summed(mesh, axis_name, n_sparse, check_vma, **sizes):
    """Each device's leaves come in, and go out, with a leading axis for devices."""
    along = P(mesh.axis_names)

    @on_mesh(mesh, along, along, check_vma)
    def function(values, indices, dense):
        grad = bcoo(values[0], indices[0], SHAPE)
        tree = {"table": grad, "dense": dense[0], "none": None}
        result = osa.psum_scatter(tree, axis_name, **sizes)
        assert result["none"] is None
        grad = result["table"]
        assert grad.shape == result["dense"].shape
        assert grad.unique_indices
        assert grad.indices_sorted
        return grad.data[None], grad.indices[None], result["dense"][None]

    return function


def some_gradients(rng, devices, n_sparse, kind):
    """Entries of each device, with duplicates, zeros and indices out of bounds."""
    pairs = [random_entries(rng, SHAPE, n_sparse, NSE, outside=True)] * devices
    if kind != "equal":
        pairs = [
            random_entries(rng, SHAPE, n_sparse, NSE, outside=True)
            for _ in range(devices)
        ]
    values, indices = map(np.stack, zip(*pairs, strict=True))
    if kind == "one owner":
        indices[:, :, 0] %= 8
    if kind == "nothing":
        indices[:, :, 0] = -1
    return values, indices


@pytest.mark.parametrize("name", slow_but(LAYOUTS, *list(LAYOUTS)[::2]))
def test_each_owner_gets_the_sum(name):
    sizes, names, axis_name, n_sparse, check_vma, kwargs, stored = LAYOUTS[name]
    mesh = make_mesh(sizes, names)
    function = summed(mesh, axis_name, n_sparse, check_vma, **kwargs)
    rng = np.random.default_rng(0)
    devices = mesh.size
    # Devices that differ along the axes summed over, and are alike in the others.
    groups = np.arange(devices) % (devices // len_of(mesh, axis_name))
    for kind in ("random", "one owner", "equal", "nothing"):
        values, indices = some_gradients(rng, devices, n_sparse, kind)
        if name == "two axes" and kind == "one owner":
            continue  # too much for one round
        dense = exact(rng, (devices, *SHAPE))
        data, rows, out = jax.device_get(function(values, indices, dense))
        assert data.shape == (devices, stored, *SHAPE[n_sparse:])
        for device in range(devices):
            same = groups == groups[device]
            place = np.flatnonzero(np.flatnonzero(same) == device)[0]
            shard = slice(*(SHAPE[0] // same.sum() * (place + np.arange(2))))
            what = f"{kind}, device {device}"
            expected = np.sum(dense[same], axis=0)[shard]
            np.testing.assert_array_equal(out[device], expected, what)
            check_rows(
                *(data[device], rows[device]), *(values[same], indices[same]), shard
            )


def len_of(mesh, axis_name):
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    return int(np.prod([mesh.shape[axis] for axis in axes]))


def check_rows(data, rows, values, indices, shard):
    """The rows of this shard that were stored anywhere, ascending; then padding."""
    n_sparse = indices.shape[-1]
    sums = row_sums(np.concatenate(values), np.concatenate(indices), SHAPE)
    mine = {
        (row - shard.start, *rest): value
        for (row, *rest), value in sums.items()
        if shard.start <= row < shard.stop
    }
    number = len(mine)
    assert list(map(tuple, rows[:number])) == list(mine)
    padding, bound = rows[number:], (shard.stop - shard.start, *SHAPE[1:n_sparse])
    assert (padding >= np.array(bound)).all(), "padding is above the table"
    assert len(np.unique(padding, axis=0)) == len(padding)
    assert not data[number:].any()
    for value, expected in zip(data, mine.values(), strict=False):
        np.testing.assert_array_equal(value, expected)


def test_too_few_rounds():
    """NaN on all devices, if one of them could not send all."""
    mesh = make_mesh((8,), ("d",))
    function = summed(mesh, "d", 1, True, capacity=4, max_rounds=1)
    values, dense = np.ones((8, NSE, 3, 2), np.float32), np.ones((8, *SHAPE), "f4")
    indices = np.tile(np.arange(NSE) % 32, (8, 1))[..., None].astype(np.int32)
    data, rows, _ = jax.device_get(function(values, indices, dense))
    assert np.isnan(data[rows[..., 0] < 8]).all()
    assert (rows[:3, :4, 0] == np.arange(4)).all()


BAD = {
    "rows": ((15, 2), None, ValueError, "divide evenly .* got 15 rows for 8"),
    "indices": ((16, 2), jnp.float32, TypeError, "must have integer indices"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    shape, dtype, error, words = BAD[name]
    mesh = make_mesh((8,), ("d",))

    @on_mesh(mesh, P(), P("d"))
    def function(values):
        grad = bcoo(values, jnp.zeros((3, 1), jnp.int32), shape)
        if dtype is not None:  # as arithmetic that does not know BCOO leaves it
            grad = jax.tree.map(lambda x: x.astype(dtype), grad)
        return osa.psum_scatter(grad, "d").data

    with pytest.raises(error, match=words):
        function(jnp.ones((3, 2)))
