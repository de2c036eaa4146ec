"""ComplEx on a graph of five million entities: a step's time, and what is learned.

    python benchmarks/large_graph.py [--rows 5000000] [--seconds 30]

A graph as large as public ones, but made: entities are in 1,000 groups, a relation
leads from each group to another, and the ends of a triple are drawn by Zipf's law. Each
contestant trains for the same seconds of steps, in a process of its own, one after the
other: dense `optax.adam`, three optimisers of this package by `make_train_step`, and
torch's SparseAdam. Printed are the milliseconds of a step, its temporary memory, and
the MRR of 4,096 held-out triples, whose true end is ranked among 99 random entities;
the first and the last are drawn, too.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import ranking

COLUMNS, BATCH, NEGATIVES, RELATIONS, GROUPS = 128, 1024, 512, 8, 1000
RATE = 2e-2
NAMES = ["optax.adam, dense", "exact_adam", "sparse_adam", "rowwise_adagrad"]
NAMES += ["torch SparseAdam"]


def until(seconds, taken, name):
    """Iterates until the steps, whose times are in `taken`, took so many seconds."""
    line = "{desc}{percentage:3.0f}%|{bar}| {elapsed}"
    with tqdm(desc=f"{name:20}", total=seconds, bar_format=line, leave=False) as bar:
        while len(taken) < 5 or sum(taken) < seconds:  # the first two are warming up
            yield
            bar.update(min(sum(taken), seconds) - bar.n)


class Graph:
    """Draws triples; entity `order[i]` has rank i, and is in group `i % GROUPS`."""

    def __init__(self, rows, seed=0):
        self.rows, rng = rows, np.random.default_rng(seed)
        self.order = rng.permutation(rows).astype(np.int32)
        self.leads = [rng.permutation(GROUPS) for _ in range(RELATIONS)]

    def triples(self, rng, size):
        per_group = self.rows // GROUPS

        def zipf():  # a place in a group: its logarithm is uniform
            return (per_group ** rng.random(size)).astype(np.int64) - 1

        group, relation = (
            rng.integers(GROUPS, size=size),
            rng.integers(RELATIONS, size=size),
        )
        to = np.stack(self.leads)[relation, group]
        ends = [self.order[GROUPS * zipf() + x] for x in (group, to)]
        return np.stack([ends[0], relation.astype(np.int32), ends[1]], axis=1)

    def batch(self, rng):
        return self.triples(rng, BATCH), rng.integers(self.rows, size=NEGATIVES)

    def held_out(self):
        rng = np.random.default_rng(1)
        triples = self.triples(rng, 4096)
        others = rng.integers(self.rows, size=(4096, 99))
        return triples, np.concatenate([triples[:, 2:], others], axis=1)


def mrr(entity, relation, held_out, times):
    """Of NumPy's rows: the true end is the first of each row of candidates."""
    triples, candidates = held_out
    query = np.asarray(times(entity[triples[:, 0]], relation[triples[:, 1]]))
    scores = np.einsum("bd,bkd->bk", query, entity[candidates])
    rank = 1 + np.sum(scores[:, 1:] >= scores[:, :1], axis=1)
    return float(np.mean(1 / rank))


def in_jax(name, graph, seconds):
    import jax
    import jax.numpy as jnp
    import knowledge_graph
    import optax

    import optax_sparse_adam as osa

    cell = knowledge_graph.CELLS[0]._replace(model="ComplEx", way="negatives")
    dense = name == NAMES[0]
    tx = (
        optax.adam(RATE)
        if dense
        else getattr(osa, name)(5 * RATE if "row" in name else RATE)
    )
    step = osa.make_train_step(
        knowledge_graph.make_loss(cell), tx, sparse=False if dense else None
    )
    keys = jax.random.split(jax.random.key(0))
    sizes = {"entity": graph.rows, "relation": RELATIONS}
    params = {
        key: 0.1 * jax.random.normal(k, (rows, COLUMNS))
        for k, (key, rows) in zip(keys, sizes.items(), strict=True)
    }
    state, rng = tx.init(params), np.random.default_rng(2)
    batch = tuple(np.asarray(x, np.int32) for x in graph.batch(rng))
    compiled = step.lower(params, state, *batch).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    taken = []
    for _ in until(seconds, taken, name):
        batch = tuple(np.asarray(x, np.int32) for x in graph.batch(rng))
        began = time.perf_counter()
        params, state, _ = jax.block_until_ready(compiled(params, state, *batch))
        taken.append(time.perf_counter() - began)
    triples, candidates = graph.held_out()
    ids = np.concatenate([triples[:, 0], candidates.reshape(-1)])

    def rows(params):  # up to date, and no others
        return params["entity"][ids], params["relation"][jnp.arange(RELATIONS)]

    entity, relation = osa.evaluate(rows, read=state)(params)
    places = np.arange(len(ids))
    heads, ends = (
        places[: len(triples)],
        places[len(triples) :].reshape(candidates.shape),
    )
    looked_up = np.stack([heads, triples[:, 1], ends[:, 0]], axis=1), ends
    values = np.asarray(entity), np.asarray(relation)
    return taken, memory, mrr(*values, looked_up, knowledge_graph.times)


def in_torch(graph, seconds):
    import torch

    def times(a, b):
        (a_re, a_im), (b_re, b_im) = a.chunk(2, -1), b.chunk(2, -1)
        both = a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re
        return torch.cat(both, -1)

    torch.manual_seed(0)
    entity = torch.nn.Embedding(graph.rows, COLUMNS, sparse=True)
    relation = torch.nn.Embedding(RELATIONS, COLUMNS, sparse=True)
    for table in (entity, relation):
        torch.nn.init.normal_(table.weight, std=0.1)
    both = [*entity.parameters(), *relation.parameters()]
    optimizer, rng = torch.optim.SparseAdam(both, lr=RATE), np.random.default_rng(2)
    taken = []
    for _ in until(seconds, taken, NAMES[-1]):
        triples, others = map(torch.from_numpy, graph.batch(rng))
        began = time.perf_counter()
        optimizer.zero_grad()
        head, kind, tail = triples.long().T
        query, true = times(entity(head), relation(kind)), entity(tail)
        false = query @ entity(others).T
        scores = torch.cat([(query * true).sum(1, keepdim=True), false], dim=1)
        (torch.logsumexp(scores, 1) - scores[:, 0]).mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    values = [x.weight.detach().numpy() for x in (entity, relation)]
    as_torch = lambda a, b: times(torch.from_numpy(a), torch.from_numpy(b))  # noqa: E731
    return taken, None, mrr(*values, graph.held_out(), as_torch)


def main():
    parser = argparse.ArgumentParser(description="ComplEx on a large graph.")
    add = parser.add_argument
    add("--rows", type=int, default=5_000_000, help="a multiple of 1,000")
    add("--seconds", type=float, default=30, help="of steps, of each contestant")
    add("--only", default="", help="names with these words")
    add("--plot", default="large_graph.png", help="default: large_graph.png")
    add("--work", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        graph = Graph(args.rows - args.rows % GROUPS)
        train = in_torch if args.work == NAMES[-1] else in_jax
        options = (graph, args.seconds)
        found = train(*options) if train is in_torch else train(args.work, *options)
        print(json.dumps(found))
        return
    print(
        f"{args.rows:,} x {COLUMNS}, {BATCH} triples and {NEGATIVES} negatives a step"
    )
    heads = ("median ms", "quartiles", "steps", "temporary", "MRR")
    line = "{:>14}{:>18}{:>14}{:>14}{:>14}".format(*heads)
    print(f"{'':20}{line}")
    panels = {"milliseconds a step": {}, f"MRR after {args.seconds:g} s of steps": {}}
    for name in NAMES:
        if args.only not in name:
            continue
        command = [sys.executable, __file__, "--work", name, "--rows", str(args.rows)]
        command += ["--seconds", str(args.seconds)]
        # The bar is in what is passed on, standard error.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name:20}  left out: it ended with {done.returncode}")
            continue
        taken, memory, value = json.loads(done.stdout.splitlines()[-1])
        low, middle, high = np.percentile(1e3 * np.array(taken[2:]), [25, 50, 75])
        told = f"{memory / 1e6:,.0f} MB" if memory is not None else "-"
        spread = f"{low:.1f} to {high:.1f}"
        print(
            f"{name:20}{middle:14.1f}{spread:>18}{len(taken):14,}{told:>14}{value:14.4f}",
            flush=True,
        )
        for panel, number in zip(panels.values(), (middle, value), strict=True):
            panel[name] = number
    ranking.draw_bars(args.plot, panels, log=["milliseconds a step"])
    print(f"\nmilliseconds and MRR: {args.plot}")


if __name__ == "__main__":
    main()
