"""`sparse_adafactor` in blocks of rows, as on CPUs where there are many."""

import jax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._optimizers.by_leaf import update_leaf
from optax_sparse_adam._rows import map_rows

from ..helpers.support import bcoo, compile_for_users
from . import test_every_optimizer, test_sparse_adafactor


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
    test_every_optimizer.test_touched_rows_are_a_table(
        "sparse_adafactor", shape, test_every_optimizer.SOME
    )


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
