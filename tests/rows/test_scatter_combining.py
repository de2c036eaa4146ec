"""Rows combined with those of a table in one operation, against NumPy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_sparse_adam._jax_extras import scatter_combining
from optax_sparse_adam._optimizers import sparse_adam
from optax_sparse_adam._optimizers.by_leaf import update_leaf
from optax_sparse_adam._rows import gather_scatter

from ..helpers.support import (
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    slow_but,
)


def towards(old, new):
    return old + 0.25 * (new - old)  # exact for the small integers below


def in_numpy(table, indices, rows):
    table = np.array(table)
    for index, row in zip(np.asarray(indices).tolist(), np.asarray(rows), strict=True):
        if all(0 <= i < n for i, n in zip(index, table.shape, strict=False)):
            table[tuple(index)] = towards(table[tuple(index)], row)
    return table


combine = functools.partial(gather_scatter.combine_rows, formula=towards)


def problem(n_sparse=1, dtype="float32", nse=5):
    rng = np.random.default_rng(0)
    shape = (6, 4, 3)[: n_sparse + 1]
    table = rng.integers(-8, 8, shape).astype(dtype)
    flat = rng.permutation(np.prod(shape[:n_sparse]))[:nse]
    indices = np.stack(np.unravel_index(flat, shape[:n_sparse]), axis=1).astype("int32")
    indices[1, 0] += 100  # padding
    rows = rng.integers(-8, 8, (nse, *shape[n_sparse:])).astype(dtype)
    return tuple(map(jnp.asarray, (table, indices, rows)))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("n_sparse", [1, 2])
def test_values(dtype, n_sparse, jit):
    args = problem(n_sparse, dtype)
    out = (jax.jit(combine) if jit else combine)(*args)
    assert_identical(out, in_numpy(*args))


def test_batches():
    args = [jnp.stack([x, x + x.dtype.type(x.dtype == jnp.float32)]) for x in problem()]
    expected = np.stack([in_numpy(*one) for one in zip(*args, strict=True)])
    assert_identical(jax.vmap(combine)(*args), expected)
    one = jax.vmap(combine, (0, None, None))(args[0], args[1][0], args[2][0])
    assert_identical(one[0], expected[0])


def test_derivatives():
    table, indices, rows = problem()

    def of_both(table, rows):
        return jnp.sum(combine(table, indices, rows) ** 2)

    touched = np.isin(np.arange(len(table)), indices)[:, None]
    real = np.asarray(indices) < len(table)
    new = in_numpy(table, indices, rows)
    slopes = jax.grad(of_both, argnums=(0, 1))(table, rows)
    assert_identical(slopes[0], np.where(touched, 1.5, 2.0).astype(np.float32) * new)
    there = new[np.minimum(np.ravel(indices), len(table) - 1)]
    assert_identical(slopes[1], np.where(real, 0.5 * there, 0).astype(np.float32))


AXES = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize("axis_type", AXES, ids=lambda x: x.name)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()], ids=str)
@pytest.mark.parametrize("nse", slow_but([2, 5], 5))
def test_on_a_mesh(nse, spec, axis_type):
    mesh = jax.make_mesh((2,), ("x",), (axis_type,), devices=jax.devices()[:2])
    args = problem(2, nse=nse)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(args, (spec, P(), P()), strict=True)
    ]
    with jax.set_mesh(mesh):
        out = jax.jit(combine)(*placed)
        one = jax.jit(combine)(placed[0], *(x[:1] for x in placed[1:]))
    assert_identical(out, in_numpy(*args))
    assert_identical(one, in_numpy(args[0], *(x[:1] for x in args[1:])))


@pytest.mark.parametrize("spec", [(P("x"), P()), (P(), P("x"))], ids=str)
def test_in_shard_map(spec):
    """Table and rows need not vary over the same axes."""
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    one, other = problem(), tuple(x + 1 for x in problem())
    tables = jnp.concatenate([one[0], other[0]]) if spec[0] else one[0]
    rows = jnp.concatenate([one[2], other[2]]) if spec[1] else one[2]
    indices = one[1]
    mapped = jax.shard_map(
        combine, mesh=mesh, in_specs=(spec[0], P(), spec[1]), out_specs=P("x")
    )
    out = mapped(tables, indices, rows)
    second = (other[0], indices, one[2]) if spec[0] else (one[0], indices, other[2])
    expected = [in_numpy(one[0], indices, one[2]), in_numpy(*second)]
    assert_identical(out, np.concatenate(expected))


def test_jax_has_combiners():
    """The parameter of JAX's scatter that `scatter_combining.py` sets."""
    assert scatter_combining.takes_combiners()


def test_without_combiners(monkeypatch):
    monkeypatch.setattr(gather_scatter, "takes_combiners", lambda: False)
    assert_identical(combine(*problem()), in_numpy(*problem()))


@pytest.mark.parametrize("nse", [40, 3000])
def test_traced_decay_rates(nse):
    """They take another way, to the same numbers."""
    shape, weights = (300, 20), (0.2, 0.01)
    entries = random_entries(np.random.default_rng(0), shape, 1, nse)
    grad, moments = bcoo(*entries, shape), (jnp.ones(shape), jnp.ones(shape))
    factors = sparse_adam.StepScalars(*map(jnp.float32, (1, *weights, 1e-8, -0.1)))
    known = sparse_adam.ADAM._replace(constants=weights)
    update, new = update_leaf(sparse_adam.ADAM, grad, None, moments, factors)
    known, others = update_leaf(known, grad, None, moments, factors)
    # One rounding more or less of each product.
    assert_close(known.data, update.data, 2.4e-7, magnitude=0.1, what="update")
    assert_close(others[0], new[0], 1.2e-7, magnitude=1, what="mu")
    assert_close(others[1], new[1], 1.2e-7, magnitude=1, what="nu")
