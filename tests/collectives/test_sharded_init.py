"""The state lies on a mesh as its parameters do, however `init` is called."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.mesh import OPTIMIZERS, Case, specs_of
from ..helpers.support import assert_identical, compile_for_users, slow_but

SHAPE = (64, 16)
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)


def case_of(name, axis_type):
    return Case(name, (4, 2), P("x", "y"), P(), axis_type)


def assert_laid_out(state, case, spec=None, name="table"):
    parts = specs_of(state, SHAPE, case.table if spec is None else spec, name)
    assert parts
    for x, spec in parts:
        expected = NamedSharding(case.mesh, spec)
        assert x.sharding.is_equivalent_to(expected, x.ndim), (x.shape, x.sharding)


@pytest.mark.parametrize("axis_type", slow_but(AXIS_TYPES, AXIS_TYPES[-1]), ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_init(name, axis_type):
    case = case_of(name, axis_type)
    host = {"table": np.ones(SHAPE, np.float32), "w": np.ones(16, np.float32)}
    params = {
        "table": case.put(host["table"], case.table),
        "w": case.put(host["w"], P()),
    }
    state = case.tx.init(params)
    assert_laid_out(state, case)
    with jax.set_mesh(case.mesh):
        traced = jax.jit(case.tx.init)(params)
    assert_laid_out(traced, case)
    expected = case.tx.init(jax.tree.map(jnp.asarray, host))
    assert_identical(state, expected)
    assert_identical(traced, expected)


@pytest.mark.parametrize(
    "name", slow_but(["sparse_adam", "per_row", "sparse_adafactor"], "sparse_adafactor")
)
def test_abstract_init(name):
    """Over Explicit axes the sharding is part of the type."""
    case = case_of(name, AxisType.Explicit)
    params = {"table": case.struct(SHAPE, "float32", case.table)}
    state = jax.eval_shape(case.tx.init, params)
    for x, spec in specs_of(state, SHAPE, case.table):
        assert x.sharding.spec == spec


@pytest.mark.parametrize("name", ["sparse_adam", "lazy", "sparse_adafactor"])
def test_tables_of_one_shape(name):
    """Their zeros are equal, and lie in different ways; no table is sent."""
    specs = {"a": P("x", "y"), "b": P("y", None), "c": P(None, ("x", "y")), "d": P()}
    case = case_of(name, AxisType.Auto)
    params = {name: case.struct(SHAPE, "float32", s) for name, s in specs.items()}
    program = compile_for_users(jax.jit(case.tx.init).lower(params))
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(case.tx.init, params),
        program.output_shardings,
    )
    for key, spec in specs.items():
        assert_laid_out(state, case, spec, key)
    # One number a row or a column, of what has a number for each, may be summed.
    factored = name == "sparse_adafactor"
    assert program.memory_analysis().temp_size_in_bytes <= 4 * 4 * SHAPE[0] * factored
    text = program.as_text().replace("all-reduce", "" if factored else "all-reduce")
    assert "all-" not in text


@pytest.mark.parametrize(
    "name", slow_but(["sparse_adam", "lazy", "rowwise_adam"], "sparse_adam")
)
def test_inside_shard_map_over_some_axes(name):
    """The mesh has Manual and Auto axes then."""
    case = case_of(name, AxisType.Auto)
    table = case.put(np.ones(SHAPE, np.float32), case.table)

    def init(table):
        return [x for x in jax.tree.leaves(case.tx.init(table)) if x.ndim]

    mapped = jax.shard_map(
        init, mesh=case.mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    for x in jax.jit(mapped)(table):
        np.testing.assert_array_equal(x, np.zeros_like(x))
        assert x.sharding.spec[0] == "x"


@pytest.mark.parametrize("name", ["sparse_adam", "lazy"])
def test_vmap(name):
    """As for several models side by side."""
    case = case_of(name, AxisType.Auto)
    table = case.put(np.ones((3, *SHAPE), np.float32), P(None, *case.table))
    states = jax.vmap(case.tx.init)({"table": table})
    tables = [x for x in jax.tree.leaves(states) if x.shape == table.shape]
    assert len(tables) == 2
    for x in tables:
        assert x.sharding.is_equivalent_to(table.sharding, x.ndim), x.sharding


def test_values_are_kept():
    """What is laid out is what `init` of the inner transformation has made."""
    case = case_of("lazy", AxisType.Auto)
    table = case.put(np.zeros(SHAPE, np.float32), case.table)
    tx = osa.lazy(optax.adagrad(0.1, initial_accumulator_value=0.3))
    state = tx.init({"table": table})
    assert_laid_out(state, case)
    assert_identical(state, tx.init({"table": jnp.zeros(SHAPE)}))
