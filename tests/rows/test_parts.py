"""Steps of large gradients by parts, where they are not made in blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from optax_sparse_adam._rows import map_rows
from optax_sparse_adam._rows.row_ops import Formula, RowOps

from ..helpers.support import assert_identical, slow_but

ROWS, WIDTH = 50, 4
PAIRS = [(adds, reads) for adds in (False, True) for reads in (False, True)]


def momentum(grad, rows, rate):
    mean, *param = rows
    mean = mean + 0.1 * (grad - mean)
    decayed = mean + 0.01 * param[0] if param else mean
    return -rate * decayed, (mean,)


def step(adds, reads):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(-9, ROWS + 9, (30, 1)), jnp.int32)
    data, mean, param = (
        jnp.asarray(rng.standard_normal((size, WIDTH)), jnp.float32)
        for size in (30, ROWS, ROWS)
    )
    grad = BCOO((data, ids), shape=(ROWS, WIDTH))
    function = functools.partial(RowOps("scan").step, Formula(momentum))
    groups = (mean,), (param,) * reads, (param,) * adds
    made = jax.jit(function)(grad, *groups, jnp.float32(0.1))
    return made, str(jax.make_jaxpr(function)(grad, *groups, jnp.float32(0.1)))


@pytest.mark.parametrize(
    ("adds", "reads"), slow_but(PAIRS, (False, True), (True, False))
)
def test_steps_by_parts(adds, reads, monkeypatch):
    """The same bits, of seven or eight entries at a time."""
    whole, program = step(adds, reads)
    monkeypatch.setattr(map_rows, "_PART_BYTES", 64)
    by_parts, longer = step(adds, reads)
    more = longer.count(" scatter[") - program.count(" scatter[")
    assert more == 3
    assert longer.count(" scatter-add[") - program.count(" scatter-add[") == 3 * adds
    assert_identical(by_parts, whole, "step")


def test_what_has_no_parts(monkeypatch):
    monkeypatch.setattr(map_rows, "_PART_BYTES", 64)
    rows = map_rows.Rows(jnp.zeros((30, 1), int), jnp.zeros((30, 4)), jnp.int32(0))
    assert len(map_rows.parts(rows, (jnp.zeros((50, 4)),))) == 4
    for table in (jnp.zeros((50, 4), jnp.int32), jnp.zeros(50)):
        assert map_rows.parts(rows, (table,)) == [rows]
    monkeypatch.setattr(map_rows, "_PART_BYTES", 500)
    assert map_rows.parts(rows, (jnp.zeros((50, 4)),)) == [rows]
