"""Programs with mutable arrays, effects, extended types and rules, against `jax.grad`.

Each is differentiated by its table, which is looked up, and by other parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.differential_programs import LOG, PROGRAMS
from ..helpers.gradients import ROUNDED, assert_same, is_bcoo
from ..helpers.support import slow_but

CORE = [
    "read in a later step, alone",
    "recurrent, in a scan",
    "written by a checkpoint, alone",
    "whole table, in a branch",
    "scale in a loop",
    "shown of a ref",
]
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.integers(1, 9, (8, 4)) / 8, jnp.float32)
WEIGHTS = jnp.asarray([0.5, -1.0, 2.0, 0.25])
IDS = jnp.asarray([0, 5, 0])


def run(value_and_grad, loss):
    """The result, and what the host has seen."""
    LOG.clear()
    result = jax.jit(value_and_grad(loss, (0, 2)))(TABLE, IDS, WEIGHTS)
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result, list(LOG)


@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("name", slow_but(PROGRAMS, *CORE))
def test_same_as_jax(name):
    program = PROGRAMS[name]
    (value, (of_table, of_weights)), seen = run(osa.value_and_grad, program.loss)
    (like, likes), also_seen = run(jax.value_and_grad, program.loss)
    assert seen == also_seen
    assert_same(value, like, ROUNDED, "value")
    assert_same(of_table, likes[0], ROUNDED, "table")
    if jnp.any(likes[1]) or not is_bcoo(of_weights):  # else they are not used
        assert_same(of_weights, likes[1], ROUNDED, "weights")
    assert is_bcoo(of_table) == program.is_sparse
    assert not is_bcoo(of_table) or 0 < of_table.nse <= len(TABLE)
