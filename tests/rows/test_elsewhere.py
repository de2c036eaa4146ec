"""The way of GPUs and TPUs through the rows, on CPUs, against the same references.

`lax.platform_dependent` chooses between a CPU's way and the other; here it always takes
the other.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..collectives import test_routed, test_sharded_jit
from ..helpers.mesh import Case
from ..helpers.support import (
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    slow_but,
)
from . import test_coalesce


@pytest.fixture(autouse=True, scope="module")
def elsewhere():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            lax, "platform_dependent", lambda *args, default, cpu: default(*args)
        )
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_sparse", "shape"), slow_but(test_coalesce.SHAPES, test_coalesce.SHAPES[1])
)
def test_sums(n_sparse, shape):
    rng = np.random.default_rng(0)
    # Levels of the scan; a row of another shape is summed alike.
    sizes = (0, 1, 8, 9, 65, 600) if shape == (7, 5) else (65,)
    for nse, outside in itertools.product(sizes, (False, True)):
        values, ids = random_entries(rng, shape, n_sparse, nse, outside=outside)
        values[64:] = 0  # sums of more would not be exact
        order = rng.permutation(nse)
        entries = values[order], ids[order]
        out = osa.coalesce(bcoo(*entries, shape))
        test_coalesce.check_coalesced(out, *entries, shape)
        order = np.lexsort(ids.T[::-1])
        entries = values[order], ids[order]
        grad = bcoo(*entries, shape, indices_sorted=True)
        assert_identical(osa.coalesce(grad), out, "sorted on input")


def test_rounding_and_neighbours():
    """Errors grow with the rounds, not with the entries; NaN stays in its row."""
    rng = np.random.default_rng(0)
    nse, shape = 20_000, (50, 3)
    ids = np.minimum(rng.zipf(1.2, nse), 50).astype(np.int32)[:, None] - 1
    values = rng.standard_normal((nse, 3)).astype(np.float32)
    values[np.flatnonzero(ids == 7)[1]] = np.nan, np.inf, 1.0
    rows = np.unique(ids)
    with np.errstate(invalid="ignore"):
        exact, sizes = (
            np.stack([x[ids[:, 0] == row].sum(axis=0) for row in rows])
            for x in (values.astype(np.float64), np.abs(values).astype(np.float64))
        )
    out = jax.jit(osa.coalesce)(bcoo(values, ids, shape))
    rounds = 8 * math.ceil(math.log(nse, 8))  # each adds up 8 neighbours
    sums = np.asarray(out.data)[: len(rows)]
    assert_identical(np.isnan(sums), np.isnan(exact), "NaN")
    real = np.isfinite(exact)
    assert_identical(sums[~real & ~np.isnan(exact)], np.float32([np.inf]), "infinity")
    error = rounds * 6e-8
    assert_close(sums[real], exact[real], error, magnitude=sizes[real], what="sums")


@pytest.mark.slow
def test_derivatives_and_batches():
    rng = np.random.default_rng(0)
    values, ids = random_entries(rng, (9, 2), 1, 30)
    tx = osa.sparse_adam(0.1)
    state = tx.init(jnp.zeros((9, 2)))

    def update(values):
        updates, new = tx.update(bcoo(values, ids, (9, 2)), state)
        return osa.apply_updates(jnp.zeros((9, 2)), updates), new.nu

    both = jnp.stack([values, 2 * values])
    alone = jax.tree.map(lambda *x: jnp.stack(x), *map(update, both))
    assert_identical(jax.vmap(update)(both), alone, "two at once")
    # A first step depends on the size of the gradient through eps alone.
    (table, nu), (slope, _) = jax.jvp(update, (both[0],), (both[0],))
    expected = table * (1e-8 / (jnp.sqrt(nu) + 1e-8))
    assert_close(slope, expected, 1e-6, magnitude=0.1, what="derivative")


CASES = [
    Case("sparse_adam", (4, 2), P("x", "y"), P("y")),
    Case("lazy", (8,), P("x", None), P("x"), AxisType.Explicit),
    Case("sparse_adafactor", (4, 2), P("x", "y"), P("x"), AxisType.Explicit),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0]), ids=str)
def test_eight_devices(case):
    test_sharded_jit.on_one_device.cache_clear()
    with jax.numpy_dtype_promotion("standard"):
        test_sharded_jit.test_training(case)
    test_sharded_jit.on_one_device.cache_clear()


@pytest.mark.slow
def test_routed_lookups():
    test_routed.test_is_lookup_of_the_whole_table("capacity 1")
