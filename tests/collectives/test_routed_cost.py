"""What devices send and hold, from the compiled programs."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import optax_sparse_adam as osa
from optax_sparse_adam._collectives.routing import default_capacity

from ..helpers.routed import P, make_mesh, on_mesh, weighted_loss
from ..helpers.support import bcoo, compile_for_users, slow_but

SHARE, WIDTH = 1000, 16  # ids on each device, numbers in each row
ID, ROW = 4, 4 * WIDTH  # bytes
TALL = 240_000_000  # a bit for each row of a device is 3.75 MB
COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)\S*\("
)


def collectives(text):
    """`(outside of loops, inside)`: lists of (operation, bytes of its result)."""
    found, outside = ([], []), False
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%?[\w.-]+ \(.*\{$", line):
            outside = line.startswith("ENTRY")
        match = COLLECTIVE.search(line)
        if match:
            arrays = re.findall(r"[fs]32\[([\d,]*)\]", match[1])
            numbers = [np.prod([int(x) for x in a.split(",") if x]) for a in arrays]
            found[not outside].append((match[2], 4 * int(sum(numbers))))
    return tuple(map(sorted, found))


def compiled(function, mesh, rows, tables=1):
    """For a table of this many rows and others like it, ids, and a row for each id."""

    def abstract(shape, dtype):
        sharding = NamedSharding(mesh, P("d"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    number = SHARE * mesh.size
    table = abstract((rows, WIDTH), jnp.float32)
    ids, weights = (
        abstract((number,), jnp.int32),
        abstract((number, WIDTH), jnp.float32),
    )
    return compile_for_users(function.lower(*[table] * tables, ids, weights))


def gradient(mesh, **sizes):
    @on_mesh(mesh, P("d"), P("d"))
    def function(table, ids, weights):
        loss = partial(weighted_loss, axis_name="d", **sizes)
        (value, _), grad = osa.value_and_grad(loss, has_aux=True)(table, ids, weights)
        return value[None], grad.data, grad.indices

    return function


def scattered(mesh, **sizes):
    @on_mesh(mesh, P("d"), P("d"))
    def function(table, ids, weights):
        grad = bcoo(weights, ids[:, None], (len(table) * mesh.size, WIDTH))
        grad = osa.psum_scatter(grad, "d", **sizes)
        return grad.data, grad.indices

    return function


FORMS = {
    "lookup, one round": (gradient, {"max_rounds": 1}),
    "lookup, gathered": (gradient, {"capacity": SHARE}),
    "sum": (scattered, {}),
    "sum, gathered": (scattered, {"capacity": SHARE}),
}
CASES = [("lookup, one round", devices) for devices in (2, 4)]
CASES += [(name, 8) for name in FORMS]


@pytest.mark.parametrize(("name", "devices"), slow_but(CASES, CASES[3]))
def test_bytes_sent(name, devices):
    """In a round, hardly more than the share, on however many devices.

    Gathered, as many times the share as there are devices.
    """
    mesh = make_mesh((devices,), ("d",))
    function, sizes = FORMS[name]
    program = compiled(function(mesh, **sizes), mesh, TALL)
    slots, everything = devices * default_capacity(SHARE, devices), devices * SHARE
    assert slots <= 1.6 * SHARE
    rounds = ("all-reduce", 4)  # how many there are
    ids, rows = ("all-to-all", slots * ID), ("all-to-all", slots * ROW)
    all_ids, all_rows = (
        ("all-gather", everything * ID),
        ("all-gather", everything * ROW),
    )
    answers = ("all-to-all", everything * ROW)
    outside, loops = collectives(program.as_text())
    assert (
        outside
        == {
            "lookup, one round": [rounds, ids, rows, rows],  # the last is the gradient
            "lookup, gathered": [all_ids, answers, answers],
            "sum": [rounds, ids, rows],
            "sum, gathered": [all_ids, all_rows],
        }[name]
    )
    assert loops == ([ids, rows] if name == "sum" else [])
    assert program.memory_analysis().temp_size_in_bytes < 10 * everything * ROW


def test_step_costs_nothing_for_the_table():
    """A whole step with room for all rounds; further rounds cost what the first did."""
    mesh = make_mesh((8,), ("d",))
    tx = osa.sparse_adam(0.1)
    state = osa.ScaleBySparseAdamState(P(), P("d"), P("d"))

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    @partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=(P("d"), state))
    def step(table, mu, nu, ids, weights):
        loss = partial(weighted_loss, axis_name="d")
        grad, _ = osa.grad(loss, has_aux=True)(table, ids, weights)
        state = osa.ScaleBySparseAdamState(jnp.zeros([], jnp.int32), mu, nu)
        updates, state = tx.update(grad, state)
        return osa.apply_updates(table, updates), state

    program = compiled(step, mesh, TALL, tables=3)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 40 * SHARE * ROW < TALL // 8 // 8
    assert memory.alias_size_in_bytes == 3 * TALL // 8 * ROW
    slots = 8 * default_capacity(SHARE, 8)
    outside, loops = collectives(program.as_text())
    once = [("all-to-all", slots * ID), ("all-to-all", slots * ROW)]
    assert outside == [("all-reduce", 4), *once, once[1]]
    assert loops == sorted(2 * once)
