"""Lookups of sharded tables against the same lookups of the whole table."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam._collectives.routing import default_capacity
from optax_sparse_adam._jax_extras.sharding import first_row

from ..helpers.routed import (
    P,
    exact,
    lookup_and_gradient,
    make_mesh,
    on_mesh,
    weighted_loss,
)
from ..helpers.support import assert_identical, slow_but, to_dense

ROWS, WIDTH, SHARE = 8192, 3, 48  # of the table; ids on each of 8 devices
NUMBER = 8 * SHARE


def make_ids(rng):
    """For all devices, by name; all of one shape, so that one program serves them."""
    outside = np.array([-1, -ROWS, -ROWS - 1, ROWS - 1, ROWS, -(2**31), 2**31 - 1])
    evenly = (np.arange(8)[:, None] * (ROWS // 8) + np.arange(6)).ravel()
    return {
        "random": rng.integers(0, ROWS, NUMBER),
        "skewed": np.minimum(rng.zipf(1.3, NUMBER), ROWS) - 1,
        "all the same": np.full(NUMBER, ROWS - 1),
        "one owner": np.concatenate([rng.permutation(64)[:SHARE] for _ in range(8)]),
        "out of bounds": rng.choice(outside, NUMBER),
        "evenly": np.concatenate([rng.permutation(evenly) for _ in range(8)]),
    }


def dense_gradient(table, ids, weights):
    def loss(table):
        return jnp.sum(jnp.square(table[ids]) * weights)

    return np.asarray(jax.grad(loss)(table))


# mesh, axis_name, check_vma, sizes, rows that the gradient has in all
LAYOUTS = {
    "exact for even ids": ((8,), ("d",), "d", True, {"capacity": 6}, 8 * 8 * 48),
    "capacity 1": ((4, 2), ("d", "e"), "d", True, {"capacity": 1}, 8 * 4 * 48),
    "inner axis": ((4, 2), ("d", "e"), "e", False, {"capacity": 20}, 8 * 2 * 60),
    "gathered": ((4, 2), ("d", "e"), ("d", "e"), True, {"capacity": 99}, 8 * 8 * 48),
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, *list(LAYOUTS)[:1]))
def test_is_lookup_of_the_whole_table(name):
    """Rows bit for bit; the gradient to the last bit too, as its sums are exact."""
    sizes, names, axis_name, check_vma, kwargs, stored = LAYOUTS[name]
    mesh = make_mesh(sizes, names)
    function = lookup_and_gradient(mesh, axis_name, check_vma, **kwargs)
    rng = np.random.default_rng(0)
    table, weights = exact(rng, (ROWS, WIDTH)), exact(rng, (NUMBER, WIDTH))
    for kind, ids in make_ids(rng).items():
        ids = ids.astype(np.int32)
        rows, data, indices = jax.device_get(function(table, ids, weights))
        assert_identical(rows, np.asarray(jnp.asarray(table)[ids]), kind)
        assert data.shape == (stored, WIDTH), kind
        valid = indices[:, 0] >= 0
        total = np.zeros((ROWS, WIDTH), np.float32)
        np.add.at(total, indices[valid, 0], data[valid])
        np.testing.assert_array_equal(total, dense_gradient(table, ids, weights), kind)
        inside = ids[(ids >= -ROWS) & (ids < ROWS)] % ROWS
        assert set(indices[valid, 0]) == set(inside), f"{kind}: touched rows"
    assert function._cache_size() == 1


@pytest.mark.parametrize("check_vma", slow_but([True, False], True))
def test_gradient_outside(check_vma):
    """As of any function with `shard_map` inside; over the axis `e`, it is summed."""
    mesh = make_mesh((4, 2), ("d", "e"))
    along = P(("d", "e"))

    @partial(osa.grad, sparse=lambda path, leaf: True)
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("d"), along, along),
        out_specs=P(),
        check_vma=check_vma,
    )
    def gradient(table, ids, weights):
        loss, _ = weighted_loss(table, ids, weights, "d", capacity=18, max_rounds=1)
        return lax.psum(loss, ("d", "e"))

    rng = np.random.default_rng(0)
    table, weights = exact(rng, (ROWS, WIDTH)), exact(rng, (NUMBER, WIDTH))
    # Not more than 18 rows of an owner on any device: these fit into one round.
    ids = np.tile(np.arange(18) * 455, 22)[:NUMBER].astype(np.int32)
    grad = jax.jit(gradient)(table, ids, weights)
    assert grad.nse == 8 * 4 * 18
    expected = dense_gradient(table, ids, weights)
    np.testing.assert_array_equal(to_dense(grad), expected)


KINDS = ("uint32", "uint64", "int64", "empty", "gathered")


@pytest.mark.parametrize("kind", slow_but(KINDS, "uint64", "empty"))
def test_ids_of_any_shape_and_type(kind):
    dtype = kind if "int" in kind else "int32"
    shape = (8, 0, 2) if kind == "empty" else (8, 6, 2)
    mesh = make_mesh((8,), ("d",))
    capacity = 12 if kind == "gathered" else 9
    with jax.enable_x64("64" in kind):
        rng = np.random.default_rng(0)
        low = 0 if "uint" in kind else -100
        ids = rng.integers(low, 127, shape).astype(dtype)
        if kind == "uint32":
            ids[0, 0] = 2**31 - 1, 2**32 - 1
        if kind == "uint64":
            ids[0, 0] = 2**63 - 1, 2**64 - 1
        if kind == "int64":
            ids[0, 0] = 2**40, -(2**40)
        table = rng.normal(size=(120, 2, 2)).astype("bfloat16")

        @on_mesh(mesh, (P("d"), P("d")), P("d"))
        def both(table, ids):
            def loss(table):
                rows = osa.sharded_lookup(
                    table, ids, "d", capacity=capacity, max_rounds=1
                )
                return jnp.sum(rows.astype(jnp.float32)), rows

            grad, rows = jax.grad(loss, has_aux=True)(table)
            return rows, grad

        rows, grad = both(table, ids)
        wide = np.clip(ids.astype(np.float64), -(2.0**62), 2.0**62).astype(np.int64)
        wrapped = np.where(wide < 0, wide + 120, wide)
        assert_identical(rows, table[np.clip(wrapped, 0, 119)])
        counts = np.bincount(wrapped[(wrapped >= 0) & (wrapped < 120)], minlength=120)
        np.testing.assert_array_equal(grad.astype(np.float32)[:, 0, 0], counts)


@pytest.mark.slow
def test_low_precision():
    """Duplicates of a device add up in float32: in bfloat16 these would stay 1."""
    mesh = make_mesh((8,), ("d",))

    @on_mesh(mesh, (P("d"), P("d"), P("d")), P("d"))
    def gradient(table, ids, weights):
        def loss(table):
            return jnp.sum(osa.sharded_lookup(table, ids, "d", capacity=1) * weights)

        return jax.grad(loss)(table)

    weights = jnp.tile(jnp.array([1, *[2.0**-8] * 8], jnp.bfloat16), 8)
    grad = gradient(jnp.zeros(8, jnp.bfloat16), jnp.repeat(jnp.arange(8), 9), weights)
    np.testing.assert_array_equal(grad.astype(jnp.float32), 1 + 2.0**-5)


def test_all_that_an_owner_may_be_asked_for():
    """Its rows, and one below or above the table: one round for each."""
    mesh = make_mesh((8,), ("d",))

    @on_mesh(mesh, (P("d"), P("d")), P("d"))
    def lookup(table, ids):
        return osa.sharded_lookup(table, ids, "d", capacity=1)

    table = np.arange(16, dtype=np.float32)
    for ids in ([-17, 1, 0, 5], [14, 15, 16, 17]):
        rows = lookup(table, np.tile(np.int32(ids), 8))
        np.testing.assert_array_equal(rows, np.tile(np.clip(ids, 0, 15), 8))


@pytest.mark.slow
def test_too_few_rounds():
    """Rows that do not fit are NaN, and then the gradient; lookup_rounds tells."""
    mesh = make_mesh((8,), ("d",))
    function = lookup_and_gradient(mesh, "d", capacity=14, max_rounds=1)

    @on_mesh(mesh, P("d"), P())
    def rounds(ids):
        return osa.lookup_rounds(ids, ROWS, "d", capacity=14)

    rng = np.random.default_rng(0)
    table, weights = exact(rng, (ROWS, WIDTH)), exact(rng, (NUMBER, WIDTH))
    for kind, ids in make_ids(rng).items():
        wrapped = np.where(ids < 0, ids + ROWS, ids)
        wanted = np.clip(wrapped, -1, ROWS).reshape(8, SHARE)
        owners = [np.clip(np.unique(row) // (ROWS // 8), 0, 7) for row in wanted]
        fullest = max(np.bincount(owner).max() for owner in owners)
        ids = ids.astype(np.int32)
        assert rounds(ids) == -(-fullest // 14), kind
        rows, data, indices = jax.device_get(function(table, ids, weights))
        if fullest <= 14:
            assert_identical(rows, np.asarray(jnp.asarray(table)[ids]), kind)
            assert np.isfinite(data).all(), kind
        else:
            missing = np.isnan(rows)
            assert missing.any(), kind
            np.testing.assert_array_equal(rows[~missing], table[ids][~missing])
            assert np.isnan(data[indices[:, 0] >= 0]).all(), kind


def test_default_capacity():
    """Enough for random ids, at most what there is."""
    assert default_capacity(4096, 8) == 648  # 512 + 6 * 22.6
    assert default_capacity(10, 2) == 10
    assert default_capacity(0, 8) == 0
    rng = np.random.default_rng(0)
    for number, devices in ((4096, 8), (4096, 512), (512, 64), (100, 2)):
        owners = rng.integers(0, devices, (1000, number))
        keys = owners + np.arange(1000)[:, None] * devices
        counts = np.bincount(keys.ravel())
        assert counts.max() <= default_capacity(number, devices)


# Sizes, rows, type of the ids, error and words.
BAD = {
    "capacity": ({"capacity": 0}, 16, "int32", ValueError, "`capacity` must be at"),
    "rounds": ({"max_rounds": 0}, 16, "int32", ValueError, "`max_rounds` must be at"),
    "ids": ({}, 16, "float32", TypeError, "Row ids must be integers, got .*float32"),
    "rows": ({}, 2**31, "int32", ValueError, "int32 cannot index .* 2147483648 rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    sizes, rows, dtype, error, words = BAD[name]
    mesh = make_mesh((8,), ("d",))
    struct = jax.ShapeDtypeStruct
    lookup = on_mesh(mesh, P("d"), P("d"))(
        lambda table, ids: osa.sharded_lookup(table, ids, "d", **sizes)
    )
    with pytest.raises(error, match=words):
        jax.eval_shape(lookup, struct((rows, 2), jnp.float32), struct((8,), dtype))
    count = on_mesh(mesh, P("d"), P())(lambda ids: osa.lookup_rounds(ids, 17, "d"))
    with pytest.raises(ValueError, match=r"divide evenly .* 17 rows for 8 devices"):
        jax.eval_shape(count, struct((8,), jnp.int32))


def test_first_rows_beyond_int32():
    """With int64 ids a table may have more than 2**31 rows."""
    with jax.enable_x64():
        first = on_mesh(make_mesh((8,), ("d",)), (), P("d"))(
            lambda: first_row("d", 2**29, jnp.int64)[None]
        )
        assert first().tolist() == [k * 2**29 for k in range(8)]
