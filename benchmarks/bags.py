"""Pooled lookups: a step and a forward pass against torch and `table[ids].sum(1)`.

    python benchmarks/bags.py [--rows 1000000] [--dim 64] [--turns 8]

Four contestants take turns, so that whatever else the machine does hits all alike:
`osa.embedding_bag`, the recipe with one row for each id, and torch's
`EmbeddingBag(sparse=True)` with `SparseAdam`. Each line has the median time of a step
in milliseconds, that of a forward pass, and temporary memory in units of the rows that
are looked up, `N x D`. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain JAX.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

import optax_sparse_adam as osa

SHAPES = [(4096, 5), (4096, 20), (1024, 100)]  # bags, ids in each
BATCHES = 8


def jax_contestant(pool, rows, dim, scale, batches):
    """Functions that take a step and a forward pass, and the temporary bytes."""
    tx = osa.sparse_adam(1e-3)
    # Made by XLA, as a user's is.
    table = jax.jit(lambda: jax.random.normal(jax.random.key(0), (rows, dim)))()
    carry = [table, tx.init(table)]

    def loss(table, ids):
        return jnp.sum(jnp.tanh(pool(table, ids)) * scale)

    def step(table, state, ids):
        value, grad = osa.value_and_grad(loss)(table, ids)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state, value

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carry, batches[0]).compile()
    forward = jax.jit(pool)

    def take_step(i):
        *carry[:], value = compiled(*carry, batches[i % BATCHES])
        jax.block_until_ready((carry, value))

    def look_up(i):
        jax.block_until_ready(forward(carry[0], batches[i % BATCHES]))

    return take_step, look_up, compiled.memory_analysis().temp_size_in_bytes


def torch_contestant(rows, dim, scale, batches):
    module = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=1e-3)
    batches = [torch.tensor(np.asarray(ids), dtype=torch.int64) for ids in batches]
    scale = torch.tensor(np.asarray(scale))

    def take_step(i):
        optimizer.zero_grad()
        torch.sum(torch.tanh(module(batches[i % BATCHES])) * scale).backward()
        optimizer.step()

    def look_up(i):
        with torch.no_grad():
            module(batches[i % BATCHES])

    return take_step, look_up, None


def medians(functions, turns):
    """The median milliseconds of each function, called in turn.

    The first three calls of a turn do not count: torch's threads spin for a while after
    its last operation, and would hinder whoever comes next.
    """
    times = [[] for _ in functions]
    for turn in range(turns):
        for function, own in zip(functions, times, strict=True):
            for i in range(6):
                start = time.perf_counter()
                function(6 * turn + i)
                if i > 2:
                    own.append(time.perf_counter() - start)
    return [1e3 * float(np.median(own)) for own in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    head = ("bags x ids", "contestant", "step", "/ torch", "/ recipe", "forward")
    print("".join(f"{x:>15}" for x in (*head, "/ torch", "memory")))
    for bags, length in SHAPES:
        ids = rng.integers(0, args.rows, (BATCHES, bags, length))
        batches = [jnp.asarray(x, jnp.int32) for x in ids]
        scale = jnp.asarray(rng.standard_normal((bags, args.dim)), jnp.float32)
        sizes = args.rows, args.dim, scale, batches
        contestants = {
            "embedding_bag": jax_contestant(osa.embedding_bag, *sizes),
            "recipe": jax_contestant(lambda t, ids: t[ids].sum(1), *sizes),
            "torch": torch_contestant(*sizes),
        }
        steps, forwards, memory = zip(*contestants.values(), strict=True)
        steps, forwards = medians(steps, args.turns), medians(forwards, args.turns)
        unit = 4 * bags * length * args.dim
        for i, name in enumerate(contestants):
            used = "" if memory[i] is None else f"{memory[i] / unit:.2f}"
            ratios = steps[i] / steps[2], steps[i] / steps[1], forwards[i] / forwards[2]
            cells = f"{steps[i]:.2f}", f"{ratios[0]:.2f}", f"{ratios[1]:.2f}"
            cells += f"{forwards[i]:.2f}", f"{ratios[2]:.2f}", used
            print("".join(f"{x:>15}" for x in (f"{bags} x {length}", name, *cells)))


if __name__ == "__main__":
    main()
