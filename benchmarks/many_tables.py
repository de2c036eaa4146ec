"""Times the training step of a recommender with many tables, against torch and dense.

`python benchmarks/many_tables.py [--tables 26] [--rows 50000] [--dim 32] [--ids 2048]`:
each example looks one row of each table up, Zipf ids, and two dense layers follow. With
torch installed, torch takes part. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain JAX.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contestants import load_torch
from machine import OtherPrograms, is_busy, num_cores
from problem import NUM_BATCHES
from turns import Turns

import optax_sparse_adam as osa

HIDDEN = 64


def loss(params, ids):
    rows = [table[ids[:, i]] for i, table in enumerate(params["tables"])]
    hidden = jax.nn.relu(jnp.concatenate(rows, axis=1) @ params["hidden"])
    return jnp.mean(jnp.logaddexp(0, -hidden @ params["out"]))


class Contestant:
    """One of those that take turns; see `contestants.py`."""

    phases = ("step",)

    def __init__(self, name, options):
        self.name, self.options, self.compiled = name, options, ""
        self.layer = options.tables * options.dim, HIDDEN

    def stop(self):
        self.run = None


class InJax(Contestant):
    def __init__(self, name, options, tx, lib):
        super().__init__(name, options)
        self.tx, self.lib = tx, lib

    def start(self, batches):
        rows, dim = self.options.rows, self.options.dim
        params = {
            "tables": [jnp.full((rows, dim), 0.01) for _ in range(self.options.tables)],
            "hidden": jnp.full(self.layer, 0.01),
            "out": jnp.full(HIDDEN, 0.01),
        }
        self.train = params, self.tx.init(params)
        self.ids = [jnp.asarray(ids) for ids in batches]
        step = jax.jit(self.step, donate_argnums=0)
        start = time.perf_counter()
        self.program = step.lower(self.train, self.ids[0]).compile()
        self.compiled = f", compiled in {time.perf_counter() - start:.2f} s"

    def step(self, train, ids):
        params, state = train
        grads = self.lib.grad(loss)(params, ids)
        updates, state = self.tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    def run(self, phase, batch):
        self.train = jax.block_until_ready(self.program(self.train, self.ids[batch]))


class InTorch(Contestant):
    def __init__(self, name, options, torch):
        super().__init__(name, options)
        self.torch = torch

    def start(self, batches):
        torch, shape = self.torch, (self.options.rows, self.options.dim)
        self.is_gpu = jax.default_backend() == "gpu"
        torch.set_default_device("cuda" if self.is_gpu else "cpu")
        number = range(self.options.tables)
        self.tables = [torch.nn.Embedding(*shape, sparse=True) for _ in number]
        self.hidden = torch.nn.Parameter(torch.full(self.layer, 0.01))
        self.out = torch.nn.Parameter(torch.full((HIDDEN,), 0.01))
        self.optimizers = (
            torch.optim.SparseAdam([table.weight for table in self.tables]),
            torch.optim.Adam([self.hidden, self.out]),
        )
        self.ids = [torch.tensor(ids) for ids in batches]

    def run(self, phase, batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        ids = self.ids[batch]
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        scores = self.torch.relu(self.torch.cat(rows, 1) @ self.hidden) @ self.out
        self.torch.nn.functional.softplus(-scores).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.is_gpu:
            self.torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ids", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", metavar="NAME", help="in a process of its own")
    options = parser.parse_args()
    size = NUM_BATCHES, options.ids, options.tables
    drawn = np.random.default_rng(0).zipf(1.1, size)
    batches = (np.minimum(drawn, options.rows) - 1).astype(np.int32)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    contestants = [
        InJax("sparse_adam", options, osa.sparse_adam(1e-3), osa),
        InJax("lazy(clip, adamw)", options, osa.lazy(clipped), osa),
        InJax("rowwise_adagrad", options, osa.rowwise_adagrad(1e-2), osa),
        InJax("optax.adam, dense", options, optax.adam(1e-3), jax),
    ]
    torch, where = load_torch(jax.default_backend())
    print("torch:", where)
    if torch:
        contestants.append(InTorch("torch", options, torch))
    if options.only:
        contestants = [x for x in contestants if x.name == options.only]
    turns = Turns(contestants, batches)
    others = OtherPrograms()
    turns.run(options.repeats)
    taken = others.cores()
    if is_busy(taken, num_cores()):
        print(f"NOT TO BE TRUSTED: others took {taken:.2f} of {num_cores()} cores")
    for contestant in contestants:
        name = contestant.name
        if name in turns.skipped:
            print(f"{name:18} {turns.skipped[name]}")
            continue
        times = turns.seconds["step", name]
        low, median, high = 1e3 * np.percentile(times, [25, 50, 75])
        spread = f"({low:.2f} to {high:.2f})"
        print(f"{name:18} {median:7.2f} ms a step {spread}{contestant.compiled}")


if __name__ == "__main__":
    main()
