"""What all optimisers do to the rows that a batch touches, and to all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.identity import assert_identity, make_task, train
from ..helpers.optimizers import FINAL
from ..helpers.support import (
    TOLERANCE,
    assert_identical,
    bcoo,
    random_entries,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPES = [(13,), (13, 5), (13, 2, 5), (13, 2, 3, 5)]
SOME, ALL = (2, 5, 7, 11), range(13)
CASES = [(shape, rows) for shape in SHAPES for rows in (SOME, ALL)]


@pytest.mark.parametrize(
    ("shape", "rows"), slow_but(CASES, ((13, 2, 5), SOME)), ids=str
)
@pytest.mark.parametrize("name", FINAL)
def test_touched_rows_are_a_table(name, shape, rows):
    """With all rows touched: row-sparse gradients do what dense ones do."""
    tx = FINAL[name].make(0.1)
    with jax.enable_x64():
        task = make_task(rows, shape)
        # optax adds up norms in another order.
        tol = 10 * TOLERANCE["float64"].numpy
        assert_identity(tx, tx, task, tol, compiled=True)


@pytest.mark.parametrize("nse", slow_but([0, 3], 3))
@pytest.mark.parametrize("name", FINAL)
def test_nothing_touched(name, nse):
    """Only counts move on, whatever the values of padding are."""
    shape, rng, tx = (9, 4), np.random.default_rng(0), FINAL[name].make(0.1)
    grad = bcoo(*random_entries(rng, shape, 1, 6), shape)
    table, state = train(tx, jnp.ones(shape), [grad], compiled=True)
    nothing = np.full((nse, 4), np.nan, np.float32), np.full((nse, 1), 9, np.int32)
    for empty in (bcoo(*nothing, shape), None):
        updates, new = jax.jit(tx.update)(empty, state, table)
        assert_identical(osa.apply_updates(table, updates), table)
        for a, b in zip(*map(jax.tree.leaves, (new, state)), strict=True):
            if a.ndim:
                assert_identical(a, b)
