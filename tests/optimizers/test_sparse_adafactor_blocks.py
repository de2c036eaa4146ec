"""`sparse_adafactor` in blocks of rows, as on CPUs where there are many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._optimizers.by_leaf import update_leaf
from optax_sparse_adam._rows import map_rows

from ..helpers.support import (
    TOLERANCE,
    assert_close,
    bcoo,
    compile_for_users,
    random_entries,
)
from . import test_sparse_adafactor

SHAPE = (9, 4)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two rows or three, of the tables here."""
    monkeypatch.setattr(map_rows, "_BLOCK_BYTES", 60)
    update_leaf.clear_cache()
    yield
    update_leaf.clear_cache()


@pytest.mark.parametrize("hyper", test_sparse_adafactor.HYPERS[1:3], ids=str)
def test_means_run_over_blocks(small_blocks, hyper):
    test_sparse_adafactor.test_means_run_over_touched_rows("float32", hyper)


@pytest.mark.parametrize("shape", [(13,), (13, 5), (13, 3, 5)], ids=str)
def test_blocks_are_a_table(small_blocks, shape):
    test_sparse_adafactor.test_touched_rows_are_a_table(shape, (2, 5, 7, 11))


def test_blocks_of_many_tables(small_blocks):
    """Under `vmap`, where there are none; and in derivatives."""
    rng = np.random.default_rng(0)
    values, indices = random_entries(rng, SHAPE, 1, 12, outside=True)
    table = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    tx = osa.sparse_adafactor(0.3, weight_decay=0.1)

    def step(table, values):
        updates, _ = tx.update(bcoo(values, indices, SHAPE), tx.init(table), table)
        return osa.apply_updates(table, updates)

    def loss(table, values):
        return jnp.sum(jnp.sin(step(table, values)))

    tables = jnp.stack([table, 2 * table])
    many = jax.jit(jax.vmap(step, (0, None)))(tables, values)
    tol = 5 * TOLERANCE["float32"].numpy
    for one, start in zip(many, tables, strict=True):
        assert_close(one, jax.jit(step)(start, values), tol)
    direction = jnp.ones_like(table), jnp.ones_like(values)
    _, slope = jax.jit(lambda: jax.jvp(loss, (table, jnp.asarray(values)), direction))()
    with jax.enable_x64():
        exact = [np.float64(x) + 1e-6 * s for s in (-1, 1) for x in (table, values)]
        low, high = (
            loss(*map(jnp.asarray, exact[:2])),
            loss(*map(jnp.asarray, exact[2:])),
        )
    assert slope == pytest.approx(float(high - low) / 2e-6, rel=1e-4)


def test_memory_of_blocks():
    """Of many rows the gradient and its sums are held, and not what is in between."""
    table = jax.ShapeDtypeStruct((100_000, 64), "float32")
    data = jax.ShapeDtypeStruct((65_536, 64), "float32")
    indices = jax.ShapeDtypeStruct((65_536, 1), "int32")
    tx = osa.sparse_adafactor()

    def step(table, state, data, indices):
        updates, state = tx.update(bcoo(data, indices, table.shape), state, table)
        return osa.apply_updates(table, updates), state

    state = jax.eval_shape(tx.init, table)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, data, indices)
    temporary = compile_for_users(lowered).memory_analysis().temp_size_in_bytes
    gradient = 65_536 * 64 * 4
    assert temporary <= 1.5 * gradient, f"{temporary}, more than 1.5 * {gradient}"
