"""Rows taken, put and begun again on a mesh of eight devices, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.mesh import Case, largest_collective, specs_of
from ..helpers.support import slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

ROWS, WIDTH = 512, 16
CASES = [
    Case("sparse_adam", (8,), P("x", None), P()),
    Case("sparse_adam", (2, 2, 2), P("x", "y"), P(), AxisType.Explicit),
    Case("exact_adamw", (4, 2), P("x", "y"), P()),
    Case("exact_adamw", (8,), P("x", None), P(), AxisType.Explicit),
    Case("rowwise_adam", (4, 2), P("x", "y"), P(), AxisType.Explicit),
]


def verbs(tx):
    """Clones of rows, and rows that begin again; ids with padding."""

    def run(params, state, origins, places, values):
        def ids(x):
            return {"table": x, "w": None}

        taken = osa.take_rows(tx, params, state, ids(origins))
        params, state = osa.put_rows(tx, params, state, ids(places), *taken)
        return osa.reset_rows(tx, params, state, ids(places + 1), ids(values))

    return jax.jit(run, donate_argnums=(0, 1))


def state_of_steps(tx, params):
    """A state whose rows differ."""
    step = osa.make_train_step(lambda p, ids: jnp.sum(jnp.sin(p["table"][ids])), tx)
    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)
    for ids in np.arange(24).reshape(3, 8):
        params, state, _ = step(params, state, ids)
    return jax.tree.map(np.asarray, (params, state))


@pytest.mark.parametrize("case", slow_but(CASES, CASES[3], is_one_value=True), ids=str)
def test_as_on_one_device(case):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    host = state_of_steps(case.tx, {"table": table, "w": np.ones(WIDTH, np.float32)})
    args = np.array([3, 9, ROWS, 1]), np.array([400, 2, 700, 62]), table[:4] + 1
    expected = verbs(case.tx)(*jax.tree.map(jnp.asarray, host), *args)
    by_id = {id(x): spec for x, spec in specs_of(host, (ROWS, WIDTH), case.table)}
    specs = [by_id.get(id(x), P()) for x in jax.tree.leaves(host)]
    structure = jax.tree.structure(host)
    leaves = zip(jax.tree.leaves(host), specs, strict=True)
    on_mesh = structure.unflatten([case.put(x, spec) for x, spec in leaves])
    args = [case.put(x, P()) for x in args]
    program = verbs(case.tx)
    with jax.set_mesh(case.mesh):
        text = program.lower(*on_mesh, *args).compile().as_text()
        found = program(*on_mesh, *args)
    for x, y, spec in zip(*map(jax.tree.leaves, (found, expected)), specs, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(case.put(y, spec).sharding, x.ndim)
    # What travels, sent at once: the rows of four ids, of the table and both moments.
    assert largest_collective(text) <= 3.5 * 4 * WIDTH * 4
