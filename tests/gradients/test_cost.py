"""Nothing of a table's size is computed, held or written for a row-sparse leaf."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import optax_sparse_adam as osa

from ..helpers.function_cases import FUNCTIONS
from ..helpers.lookup_cases import LOOKUPS
from ..helpers.support import (
    compile_for_users,
    slow_but,
)
from ..helpers.transform_cases import UNDER

CASES = {**LOOKUPS, **UNDER, **FUNCTIONS}

# The loss itself computes something of the table's size.
OWN_ARITHMETIC = {"stopped norm", "stopped output weights", "two tables, one dense"}
OWN_ARITHMETIC |= {"scan, table halved", "norm of an inner gradient"}
# A branch hands out what its derivative needs, which is of the size of the table.
OWN_ARITHMETIC |= {"branches of tanh"}
# Numbers that are nothing else's, for what is traced and for what is compiled.
SHORT, TALL = 30_011, 3_000_017

# Equations that hand tables through, or stand for the equations inside them.
HANDING_ON = {
    "closed_call",
    "cond",
    "eval_jaxpr",
    "jit",
    "optimization_barrier",
    "pvary",
    "remat2",
    "scan",
    "shard_map",
    "stop_gradient",
}


def inner_jaxprs(eqn):
    for value in eqn.params.values():
        for jaxpr in value if isinstance(value, tuple | list) else (value,):
            if isinstance(jaxpr, ClosedJaxpr):
                yield jaxpr.jaxpr
            elif isinstance(jaxpr, Jaxpr):
                yield jaxpr


def table_sized(jaxpr, rows):
    """The operations of a jaxpr, and inside it, with a result of this many rows."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from table_sized(inner, rows)
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
        if any(rows in shape for shape in shapes):
            yield eqn.primitive.name


def assert_no_table_sized_operation(name, jaxpr, rows):
    """Whatever XLA makes of it: this is also what runs without `jit`."""
    found = set(table_sized(jaxpr, rows)) - HANDING_ON
    if name not in OWN_ARITHMETIC:
        assert found == set(), f"table-sized results of {found}"


def materialised(text, rows):
    """The instructions of a compiled program with an array of this many rows."""
    instruction = re.compile(
        r"^\s*(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", re.M
    )
    found = {op for shape, op in instruction.findall(text) if f"{rows}" in shape}
    return found - {"parameter", "bitcast", "get-tuple-element"}


def assert_costs_nothing(function, inputs):
    """Less memory than a bit for each row of the table, and no array of its height."""
    compiled = compile_for_users(jax.jit(function).lower(*inputs))
    analysis = compiled.memory_analysis()
    held = analysis.temp_size_in_bytes, analysis.output_size_in_bytes
    assert sum(held) < TALL / 8, f"(temporary, output) bytes: {held}"
    found = materialised(compiled.as_text(), TALL)
    assert found == set(), f"arrays of the table's size: {found}"


COMPILED = [
    "matrix of ids",
    "take clip",
    "i and i j",
    "dynamic_slice of a scaled table",
    "checkpoint of tanh",
    "scan, table carried",
    "scan of cast",
    "branches, fewer ids",
    "vmap of scan",
    "shard_map",
    "times a traced number",
    "tanh of the table",
    "product of tables",
]


@pytest.mark.parametrize("name", slow_but(COMPILED, *COMPILED[::3]))
def test_compiled(name):
    case = CASES[name]
    assert_costs_nothing(osa.value_and_grad(case.loss), case.abstract(TALL))


def test_a_loop_of_unknown_length_reads_rows():
    """Random walks, beam searches: `exact_adam` brings no other rows up to date."""
    tx = osa.exact_adam(0.1)

    def walk(table, row):
        def step(carry):
            place, found = carry
            return (3 * place + 1) % TALL, found + jnp.sum(table[place])

        return jax.lax.while_loop(lambda c: c[1] < 9, step, (row, 0.0))[1]

    def read(table, state, row):
        return osa.evaluate(walk, read=state)(table, row)

    table = jax.ShapeDtypeStruct((TALL, 4), jnp.float32)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    assert_costs_nothing(read, (table, jax.eval_shape(tx.init, table), row))


def test_dense_gradient_is_seen():
    """The measures of this file find the dense gradient of JAX."""
    case = LOOKUPS["matrix of ids"]
    function = jax.value_and_grad(case.loss)
    jaxpr = jax.make_jaxpr(function)(*case.abstract(SHORT))
    assert set(table_sized(jaxpr.jaxpr, SHORT)) >= {"broadcast_in_dim", "scatter-add"}
    compiled = compile_for_users(jax.jit(function).lower(*case.abstract(TALL)))
    assert "scatter" in materialised(compiled.as_text(), TALL)
    assert compiled.memory_analysis().output_size_in_bytes > 4 * 4 * TALL


def equations(jaxpr):
    return sum(1 + sum(map(equations, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def deep(p, ids):
    """A model of two tables and 24 layers, each a few equations of rows."""
    x = p["table"][ids] + p["position"][jnp.arange(8)][None]
    for matrix in p["layers"]:
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu((x * scale) @ matrix)
    return jnp.mean(jnp.square(x))


def scanned(p, ids):
    def layer(x, matrix):
        return x + jax.nn.gelu(x @ matrix), None

    return jnp.mean(jax.lax.scan(layer, p["table"][ids], p["layers"])[0])


@pytest.mark.slow
@pytest.mark.parametrize("loss", slow_but([deep, scanned], deep))
def test_deep_models_trace_to_as_much(loss):
    """The interpreter adds a few equations a table, and none a layer."""
    shapes = {"table": (1000, 16), "position": (16, 16), "layers": (24, 16, 16)}
    params = {x: jax.ShapeDtypeStruct(s, jnp.float32) for x, s in shapes.items()}
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    ours = jax.make_jaxpr(osa.value_and_grad(loss))(params, ids)
    theirs = jax.make_jaxpr(jax.value_and_grad(loss))(params, ids)
    assert jax.eval_shape(osa.grad(loss), params, ids)["table"].nse == 16
    extra = equations(ours.jaxpr) - equations(theirs.jaxpr)
    assert extra <= 100, f"{extra} equations more than {equations(theirs.jaxpr)}"


def test_checkpoint_still_saves_memory():
    """The activations that JAX does not hold are not held under our gradient either."""

    def layer(p, x):
        return jnp.sin(jnp.sin(jnp.sin(x @ p["m"])))

    def loss(wrap):
        def function(p, ids):
            step = wrap(lambda x, i: (layer(p, x + p["t"][i]), None))
            return jnp.sum(jax.lax.scan(step, p["t"][ids[0]], ids)[0])

        return function

    params = {
        "t": jax.ShapeDtypeStruct((SHORT, 64), jnp.float32),
        "m": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    }
    ids = jax.ShapeDtypeStruct((16, 256), jnp.int32)

    def temporary(lib, wrap):
        lowered = jax.jit(lib.grad(loss(wrap))).lower(params, ids)
        return compile_for_users(lowered).memory_analysis().temp_size_in_bytes

    held, plain = temporary(osa, jax.checkpoint), temporary(osa, lambda f: f)
    reference = temporary(jax, jax.checkpoint)
    assert held < 0.5 * plain, f"{held} bytes with checkpoint, {plain} without"
    assert held < 1.1 * reference, f"{held} bytes, {reference} under jax.grad"


def test_checkpoint_keeps_its_barriers():
    """One for each checkpoint, or XLA would undo the rematerialization."""

    def loss(p, ids):
        x = jnp.ones((3, 4))
        for _ in range(3):
            x = jax.checkpoint(lambda t, x: jnp.sin(jnp.sin(t[ids] * x)))(p["t"], x)
        return jnp.sum(x)

    params = {"t": jnp.ones((16, 4))}
    counts = [
        jax.jit(lib.grad(loss)).lower(params, jnp.arange(3)).as_text().count("barrier")
        for lib in (osa, jax)
    ]
    assert counts == [3, 3]


def test_checkpoint_keeps_its_policy():
    """What it saves is not computed again."""

    def loss(table, ids, policy):
        function = jax.checkpoint(lambda t: jnp.sin(jnp.sin(t[ids])), policy=policy)
        return jnp.sum(function(table))

    table, ids = jnp.ones((16, 4)), jnp.arange(3)
    for policy, count in (None, 3), (jax.checkpoint_policies.everything_saveable, 2):
        grad = jax.make_jaxpr(osa.grad(loss), static_argnums=2)(table, ids, policy)
        assert str(grad).count("= sin ") == count
