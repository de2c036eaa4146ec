"""Models of pooled lookups, step and forward pass: ours, optax's and torch's.

    python benchmarks/bags.py [--rows 1000000] [--dim 64] [--bags 4096] [--ids 20]
    python benchmarks/bags.py --tables 26 --rows 50000 --dim 32 --bags 2048 --ids 1

For each example as many ids are looked up in each table and added up; a linear layer
follows. Contestants take turns (see README.md): `osa.embedding_bag`, the recipe
`table[ids].sum(1)`, both with `sparse_adam`, other optimisers, the dense step of
`optax.adam`, and torch's `EmbeddingBag(sparse=True)` with `SparseAdam` and `Adam`.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contestants import DENSE, RATE, TORCH, load_torch
from machine import OtherPrograms
from problem import DRAWS, NUM_BATCHES
from report import cell
from turns import Turns

import optax_sparse_adam as osa

PHASES = ("step", "forward")


def recipe(table, ids):
    return table[ids].sum(axis=1)


class InJax:
    """One of those that take turns; see `contestants.py`."""

    phases = PHASES

    def __init__(self, name, sizes, tx, pool=osa.embedding_bag):
        self.name, self.sizes, self.tx, self.pool = name, sizes, tx, pool

    def forward(self, params, ids):
        bags = [self.pool(table, ids[i]) for i, table in enumerate(params["tables"])]
        return jnp.concatenate(bags, axis=1) @ params["out"]

    def loss(self, params, ids):
        return jnp.mean(jax.nn.softplus(-self.forward(params, ids)))

    def start(self, batches):
        tables, rows, dim = self.sizes
        key = jax.random.key(0)
        params = {
            "tables": [jax.random.normal(key, (rows, dim)) for _ in range(tables)],
            "out": jnp.full(tables * dim, 0.01),
        }
        self.train = [params, self.tx.init(params)]
        self.ids = [jnp.asarray(ids) for ids in batches]
        sparse = False if self.name == DENSE else None
        step = osa.make_train_step(self.loss, self.tx, sparse=sparse)
        self.step = step.lower(*self.train, self.ids[0]).compile()
        self.read = jax.jit(self.forward)
        self.memory = f"{self.step.memory_analysis().temp_size_in_bytes / 1e6:.1f} MB"

    def run(self, phase, batch):
        if phase == "step":
            *self.train, value = self.step(*self.train, self.ids[batch])
            jax.block_until_ready((self.train, value))
        else:
            jax.block_until_ready(self.read(self.train[0], self.ids[batch]))

    def stop(self):
        self.train = None


class InTorch:
    name, phases, memory = TORCH, PHASES, ""

    def __init__(self, sizes, torch):
        self.sizes, self.torch = sizes, torch

    def start(self, batches):
        torch, (tables, rows, dim) = self.torch, self.sizes
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        self.tables = [
            torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True).to(self.device)
            for _ in range(tables)
        ]
        out = torch.full((tables * dim,), 0.01, device=self.device)
        self.out = torch.nn.Parameter(out)
        self.optimizers = (
            torch.optim.SparseAdam([table.weight for table in self.tables], lr=RATE),
            torch.optim.Adam([self.out], lr=RATE),
        )
        self.ids = [torch.tensor(x, device=self.device).long() for x in batches]

    def run(self, phase, batch):
        torch, ids = self.torch, self.ids[batch]
        with torch.set_grad_enabled(phase == "step"):
            bags = [table(ids[i]) for i, table in enumerate(self.tables)]
            scores = torch.cat(bags, 1) @ self.out
        if phase == "step":
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            torch.nn.functional.softplus(-scores).mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def stop(self):
        self.tables = self.optimizers = None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"tables": 1, "rows": 1_000_000, "dim": 64, "bags": 4096, "ids": 20}
    for name, default in (sizes | {"repeats": 15}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--draw", choices=DRAWS, default="uniform")
    args = parser.parse_args()
    drawn = args.tables, args.bags, args.ids
    batch = DRAWS[args.draw](np.random.default_rng(0), args.rows, np.prod(drawn))
    batches = [batch().reshape(drawn) for _ in range(NUM_BATCHES)]
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE))
    sizes = args.tables, args.rows, args.dim
    group = [
        InJax("embedding_bag, sparse_adam", sizes, osa.sparse_adam(RATE)),
        InJax("recipe, sparse_adam", sizes, osa.sparse_adam(RATE), recipe),
        InJax("lazy(chain(clip, adamw))", sizes, osa.lazy(clipped)),
        InJax("rowwise_adagrad", sizes, osa.rowwise_adagrad(RATE)),
        InJax(DENSE, sizes, optax.adam(RATE)),
    ]
    torch, where = load_torch(jax.default_backend())
    group += [InTorch(sizes, torch)] if torch else []
    print(f"{vars(args)}; torch: {where}\n")
    others, turns = OtherPrograms(), Turns(group, batches)
    turns.run(args.repeats)
    print("| contestant | step | forward | temporary memory |\n|---|---|---|---|")
    for x in group:
        cells = [cell(turns.seconds, phase, x.name) for phase in PHASES]
        print(f"| {x.name} | {' | '.join(cells)} | {x.memory} |")
    print(others.in_words())


if __name__ == "__main__":
    main()
