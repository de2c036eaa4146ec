"""Bags against FBGEMM's tables for CPUs, whose optimisers are fused into the backward.

    pip install torch==2.13.0 && pip install --no-deps fbgemm-gpu-cpu==1.8.0
    python benchmarks/fbgemm.py [--optimizer rowwise_adagrad adagrad] [--uniform]

Forward, backward and update of `rowwise_adagrad`, or of `lazy(optax.adagrad)`, over
`embedding_bag`. The contestants run in processes of their own, in turn, because two
thread pools in one process disturb each other; each line has the best of the medians.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np

# Tables, rows, columns, bags, ids in each.
CASES = [
    (1, 1_000_000, 64, 8192, 1),
    (1, 1_000_000, 64, 4096, 5),
    (1, 1_000_000, 64, 4096, 20),
    (1, 1_000_000, 128, 4096, 20),
    (1, 1_000_000, 64, 1024, 100),
    (8, 300_000, 32, 4096, 5),
]
BATCHES, RATE, EPS = 8, 1e-2, 1e-8


def draw(case, is_uniform):
    """Ids `[BATCHES, tables, bags, length]`, Zipf's as in `problem.py`; a gradient."""
    tables, rows, dim, bags, length = case
    rng = np.random.default_rng(0)
    rank = rng.random((BATCHES, tables, bags, length))
    rank = rows * rank if is_uniform else float(rows) ** rank - 1
    ids = rng.permutation(rows).astype(np.int32)[rank.astype(np.int64)]
    return ids, rng.standard_normal((bags, tables * dim), dtype=np.float32)


def ours(case, optimizer, ids, gradient):
    import jax
    import jax.numpy as jnp
    import optax

    import optax_sparse_adam as osa

    osa.native.keep_memory()
    start = {"initial_accumulator_value": 0.0, "eps": EPS}
    if optimizer == "rowwise_adagrad":
        tx = osa.rowwise_adagrad(RATE, **start)
    else:
        tx = osa.lazy(optax.adagrad(RATE, **start))
    num, rows, dim, *_ = case

    def loss(tables, ids):
        bags = [osa.embedding_bag(x, ids[i]) for i, x in enumerate(tables)]
        return jnp.sum(jnp.concatenate(bags, axis=1) * gradient)

    tables = [jnp.ones((rows, dim)) for _ in range(num)]
    train = [tables, tx.init(tables)]
    ids = [jnp.asarray(x) for x in ids]
    step = osa.make_train_step(loss, tx).lower(*train, ids[0]).compile()

    def run(i):
        *train[:], value = step(*train, ids[i])
        jax.block_until_ready((train, value))

    return run


def fbgemm(case, optimizer, ids, gradient):
    import torch
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

    num, rows, dim, _, length = case
    place = training.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place)] * num,
        optimizer=EmbOptimType[f"EXACT_{optimizer.upper()}"],
        learning_rate=RATE,
        eps=EPS,
        output_dtype=SparseType.FP32,
    )
    ids = [torch.from_numpy(x.astype(np.int64).ravel()) for x in ids]
    offsets, gradient = torch.arange(0, len(ids[0]) + 1, length), torch.tensor(gradient)
    return lambda i: tables(ids[i], offsets).backward(gradient)


def median(contestant, case, optimizer, is_uniform, rounds=28):
    """The median milliseconds of a step, in this process."""
    run = contestant(case, optimizer, *draw(case, is_uniform))
    times = []
    for i in range(rounds):
        start = time.perf_counter()
        run(i % BATCHES)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[3:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ("rowwise_adagrad", "adagrad")
    parser.add_argument("--optimizer", choices=names, nargs="+", default=names)
    parser.add_argument("--uniform", action="store_true", help="ids; else Zipf's law")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # for processes of its own
    args = parser.parse_args()
    contestants = {"ours": ours, "fbgemm": fbgemm}
    if args.one:
        name, *case = json.loads(args.one)
        print(median(contestants[name], *case))
        return
    head = "tables x rows x columns, bags x ids", "optimiser", "ours", "FBGEMM", "ratio"
    print("{:40}{:>18}{:>10}{:>10}{:>8}".format(*head))
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    for optimizer in args.optimizer:
        for case in CASES:
            best = dict.fromkeys(contestants, float("inf"))
            for _ in range(args.turns):
                for name in contestants:
                    one = json.dumps([name, case, optimizer, args.uniform])
                    command = [sys.executable, __file__, "--one", one]
                    found = subprocess.run(
                        command, env=environment, stdout=subprocess.PIPE, check=True
                    )
                    best[name] = min(best[name], float(found.stdout.split()[-1]))
            sizes = "{} x {:,} x {}, {:,} x {}".format(*case)
            cells = best["ours"], best["fbgemm"], best["ours"] / best["fbgemm"]
            print("{:40}{:>18}{:10.2f}{:10.2f}{:8.2f}".format(sizes, optimizer, *cells))


if __name__ == "__main__":
    main()
