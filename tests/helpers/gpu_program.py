"""Run by test_gpu.py: the memory of a step, and whether two runs give the same bits."""

import json

import jax
import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa

DIM, IDS = 64, 8192


def loss(table, ids, scale):
    return jnp.sum(table[ids] * scale)


def measure(rows):
    tx = osa.sparse_adam(1e-3)

    def step(table, state, ids, scale):
        grad = osa.grad(loss)(table, ids, scale)
        updates, state = tx.update(grad, state)
        return osa.apply_updates(table, updates), state

    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, rows // 100, IDS).astype(np.int32))
    scale = jnp.asarray(rng.standard_normal((IDS, DIM)).astype(np.float32))
    program = jax.jit(step, donate_argnums=(0, 1))
    program = program.lower(
        *jax.eval_shape(
            lambda: (jnp.ones((rows, DIM)), tx.init(jnp.ones((rows, DIM))))
        ),
        ids,
        scale,
    ).compile()
    results = []
    for _ in range(2):
        table = jnp.ones((rows, DIM))
        state = tx.init(table)
        for _ in range(3):
            table, state = program(table, state, ids, scale)
        results.append([np.asarray(x).tobytes() for x in (table, state.mu, state.nu)])
        del table, state
    sizes = program.memory_analysis()
    return {
        "above the tables": sizes.temp_size_in_bytes,
        "repeats": results[0] == results[1],
    }


if __name__ == "__main__":
    print(json.dumps([measure(rows) for rows in (100_000, 2_000_000)]))
