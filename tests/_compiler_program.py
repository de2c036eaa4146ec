"""Run by test_compilers.py: compiles steps for a device that is not there.

`python _compiler_program.py cuda|tpu ROWS...` prints what the programs compiled for
tables with these numbers of rows hold.
"""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import optax_sparse_adam as osa

WIDTH, IDS = 128, 65_536


def cases():
    """The optimiser, the type of the table, and what applies the updates."""
    ours, adam = osa.apply_updates, osa.sparse_adam(1e-3)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    rounded = osa.stochastic_rounding(adam, jax.random.key(0))
    return {
        "sparse_adam": (adam, "float32", ours),
        "optax.apply_updates": (adam, "float32", optax.apply_updates),
        "bfloat16": (osa.lazy(rounded), "bfloat16", ours),
        "lazy": (osa.lazy(clipped), "float32", ours),
        "per_row": (osa.lazy(osa.per_row(optax.adam(1e-3))), "float32", ours),
        "rowwise_adam": (osa.rowwise_adam(1e-3), "float32", ours),
        "rowwise_adagrad": (osa.rowwise_adagrad(1e-3), "float32", ours),
        "sparse_adafactor": (osa.sparse_adafactor(1e-3), "float32", ours),
    }


def device_of(platform):
    if platform == "tpu":
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    return topologies.get_topology_desc(
        "1x1x1",
        platform="cuda",
        topology="1x1x1",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
    ).devices[0]


def loss(table, ids, scale):
    return jnp.sum(jnp.tanh(table[ids] * scale))


def compiled(case, rows, device):
    tx, dtype, apply = case

    def step(table, state, ids, scale):
        grad = osa.grad(loss)(table, ids, scale)
        updates, state = tx.update(grad, state, table)
        return apply(table, updates), state

    def arguments():
        table = jnp.zeros((rows, WIDTH), dtype)
        ids = jnp.zeros((IDS,), jnp.int32)
        return table, tx.init(table), ids, jnp.zeros((IDS, WIDTH), dtype)

    def there(x):
        sharding = SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = jax.tree.map(there, jax.eval_shape(arguments))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def report(program, rows):
    memory = program.memory_analysis()
    lines = program.as_text().splitlines()
    scatters = [line for line in lines if " scatter(" in line]
    return {
        "temporary": memory.temp_size_in_bytes,
        "not in place": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "copies": len(
            [x for x in lines if re.search(rf"\[{rows},?\d*\]\S* copy\(", x)]
        ),
        "loops": len([line for line in lines if " while(" in line]),
        "scatters": len(scatters),
        "to one place": len([x for x in scatters if "unique_indices=true" not in x]),
    }


if __name__ == "__main__":
    device = device_of(sys.argv[1])
    for name, case in cases().items():
        for rows in map(int, sys.argv[2:]):
            result = report(compiled(case, rows, device), rows)
            print(json.dumps([name, rows, result]), flush=True)
