"""Times the training step of a recommender with many tables, against torch and dense.

`python benchmarks/many_tables.py [--tables 26] [--rows 50000] [--dim 32] [--ids 2048]`:
each example looks one row of each table up, Zipf ids, and two dense layers follow. With
torch installed, torch takes part. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain JAX.
"""

import argparse
import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_sparse_adam as osa


def loss(params, ids):
    rows = [table[ids[:, i]] for i, table in enumerate(params["tables"])]
    hidden = jax.nn.relu(jnp.concatenate(rows, axis=1) @ params["hidden"])
    return jnp.mean(jnp.logaddexp(0, -hidden @ params["out"]))


def jax_step(tx, lib, options, ids):
    """A compiled step; how long it took to trace and to compile."""
    params = {
        "tables": [jnp.full((options.rows, options.dim), 0.01)] * options.tables,
        "hidden": jnp.full((options.tables * options.dim, 64), 0.01),
        "out": jnp.full(64, 0.01),
    }
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)

    def step(params, state, ids):
        grads = lib.grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    start = time.perf_counter()
    step = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, ids).compile()
    seconds = time.perf_counter() - start

    def run(ids):
        nonlocal params, state
        params, state = step(params, state, ids)
        jax.block_until_ready(params)

    return run, seconds


def torch_step(options):
    import torch

    shape = options.rows, options.dim
    tables = [torch.nn.Embedding(*shape, sparse=True) for _ in range(options.tables)]
    hidden = torch.nn.Parameter(torch.full((options.tables * options.dim, 64), 0.01))
    out = torch.nn.Parameter(torch.full((64,), 0.01))
    sparse = torch.optim.SparseAdam([table.weight for table in tables])
    dense = torch.optim.Adam([hidden, out])

    def run(ids):
        sparse.zero_grad()
        dense.zero_grad()
        rows = [table(ids[:, i]) for i, table in enumerate(tables)]
        scores = torch.relu(torch.cat(rows, 1) @ hidden) @ out
        torch.nn.functional.softplus(-scores).mean().backward()
        sparse.step()
        dense.step()

    return run, 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ids", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    size = options.repeats + 3, options.ids, options.tables
    batches = (np.minimum(rng.zipf(1.1, size), options.rows) - 1).astype(np.int32)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    first = jnp.asarray(batches[0])
    contestants = {
        "sparse_adam": jax_step(osa.sparse_adam(1e-3), osa, options, first),
        "lazy(clip, adamw)": jax_step(osa.lazy(clipped), osa, options, first),
        "rowwise_adagrad": jax_step(osa.rowwise_adagrad(1e-2), osa, options, first),
        "optax.adam, dense": jax_step(optax.adam(1e-3), jax, options, first),
    }
    put = dict.fromkeys(contestants, jnp.asarray)
    if importlib.util.find_spec("torch"):
        import torch

        contestants["torch"], put["torch"] = torch_step(options), torch.from_numpy
    times = {name: [] for name in contestants}
    for number, ids in enumerate(batches):
        # To and fro, so that nobody always follows the same neighbour.
        for name in list(contestants)[:: 1 if number % 2 else -1]:
            batch = jax.block_until_ready(put[name](ids))
            start = time.perf_counter()
            contestants[name][0](batch)
            times[name].append(time.perf_counter() - start)
    for name, (_, seconds) in contestants.items():
        low, median, high = 1e3 * np.percentile(times[name][3:], [25, 50, 75])
        print(
            f"{name:18} {median:7.2f} ms a step ({low:.2f} to {high:.2f})",
            f"compiled in {seconds:.2f} s" if seconds else "",
        )


if __name__ == "__main__":
    main()
