"""Run by test_compilers.py: compiles steps for a device that is not there.

`python -m tests.helpers.compiler_program cuda|tpu ROWS...` prints what the programs
hold that are compiled for tables with these numbers of rows.
"""

import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from . import mesh
from .optimizers import OPTIMIZERS

WIDTH, IDS, MANY = 128, 65_536, 1 << 20


def cases():
    """The optimiser, the type of the table, and what applies the updates."""
    ours, adam = osa.apply_updates, osa.sparse_adam(1e-3)
    rounded = osa.stochastic_rounding(adam, jax.random.key(0))
    found = {
        name: (optimizer.make(1e-3), "float32", ours)
        for name, optimizer in OPTIMIZERS.items()
    }
    return found | {
        "optax.apply_updates": (adam, "float32", optax.apply_updates),
        "bfloat16": (osa.lazy(rounded), "bfloat16", ours),
    }


def devices_of(platform):
    if platform == "tpu":
        return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    return topologies.get_topology_desc(
        "1x1x8",
        platform="cuda",
        topology="1x1x8",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
    ).devices


def plain(table, ids):
    return table[ids]


def laid_out(table, ids):
    return table.at[ids].get(out_sharding=P("x", None))


def gradient(table, ids, scale, lookup=plain, read=None):
    def loss(table):
        return jnp.sum(jnp.tanh(lookup(table, ids) * scale))

    return osa.grad(loss, read=read)(table)


def gradient_of_bags(table, ids, _):
    """Of bags of 16 ids."""

    def loss(table):
        return jnp.sum(jnp.tanh(osa.embedding_bag(table, ids.reshape(-1, 16))))

    return osa.grad(loss)(table)


def stored(table, ids, data):
    return BCOO((data, ids[:, None]), shape=table.shape)


def traced(case, rows, sharding_of, gradient=gradient, number=IDS):
    """The step for a table with so many rows; `sharding_of` takes shapes."""
    tx, dtype, apply = case

    def step(table, state, ids, scale):
        read = {"read": state} if isinstance(state, osa.ExactAdamState) else {}
        grad = gradient(table, ids, scale, **read)
        updates, state = tx.update(grad, state, table)
        return apply(table, updates), state

    def arguments():
        table = jnp.zeros((rows, WIDTH), dtype)
        ids = jnp.zeros((number,), jnp.int32)
        return table, tx.init(table), ids, jnp.zeros((number, WIDTH), dtype)

    def there(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x.shape))

    arguments = jax.tree.map(there, jax.eval_shape(arguments))
    shardings = jax.tree.map(lambda x: x.sharding, arguments[:2])
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return step.trace(*arguments)


def compiled(*args, **options):
    return traced(*args, **options).lower().compile()


def on_mesh(case, rows, devices, axis_type, *args, **options):
    """Table and batch split by rows over all devices."""
    mesh = Mesh(np.array(devices), ("x",), axis_types=(axis_type,))

    def sharding_of(shape):
        whole = shape in ((), (1,), (1, WIDTH))  # a number, or one row
        return NamedSharding(mesh, P() if whole else P("x", *[None] * (len(shape) - 1)))

    with jax.set_mesh(mesh):
        return compiled(case, rows, sharding_of, *args, **options)


def report(program, rows):
    memory = program.memory_analysis()
    lines = program.as_text().splitlines()
    scatters = [line for line in lines if " scatter(" in line]
    # The shape of a table, or of the part of it that a device holds.
    table = rf"\[({rows}|{rows // 8})(,\d+)?\]\S* copy\("
    return {
        "temporary": memory.temp_size_in_bytes,
        "not in place": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "copies": len([line for line in lines if re.search(table, line)]),
        "loops": len([line for line in lines if " while(" in line]),
        "scatters": len(scatters),
        "to one place": len([x for x in scatters if "unique_indices=true" not in x]),
        "sent at once": mesh.largest_collective(program.as_text()),
    }


def programs(devices, rows):
    """Names and programs: every case on one device, two of them on eight."""
    alone = SingleDeviceSharding(devices[0])
    found = cases()
    for name, case in found.items():
        yield name, compiled(case, rows, lambda shape: alone)
    if devices[0].platform != "tpu":  # in parts
        many = functools.partial(compiled, number=MANY)
        yield "many ids", many(found["sparse_adam"], rows, lambda shape: alone)
    bags = compiled(found["lazy"], rows, lambda shape: alone, gradient_of_bags)
    yield "lazy, bags", bags
    for name in ("sparse_adam", "lazy"):
        for axis_type in (AxisType.Auto, AxisType.Explicit):
            explicit = axis_type is AxisType.Explicit
            wanted = functools.partial(gradient, lookup=laid_out if explicit else plain)
            on = functools.partial(on_mesh, found[name], rows, devices, axis_type)
            yield f"{name}, {axis_type.name}", on(wanted)
            yield f"{name}, {axis_type.name}, bags", on(gradient_of_bags)
            yield f"{name}, {axis_type.name}, one row", on(stored, number=1)


if __name__ == "__main__":
    for rows in map(int, sys.argv[2:]):
        for name, program in programs(devices_of(sys.argv[1]), rows):
            print(json.dumps([name, rows, report(program, rows)]), flush=True)
