"""Times steps by the share of the table's rows that a batch touches, by width.

`python benchmarks/dense_share.py [--rows 100000]`: each batch looks that many different
rows up once, drawn uniformly. Sparse steps are divided by the dense step of optax.adam
on the same batch: above 1, dense is faster. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain
JAX.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contestants import DENSE, RATE, make_optimizer, training_step
from machine import OtherPrograms, is_busy, num_cores, seconds

NAMES = ("sparse_adam", "exact_adam", DENSE)
WIDTHS, PERCENT = (4, 16, 64, 128), (2, 5, 10, 20, 40, 80)
ROUNDS = 9


def start(name, rows, dim, batches):
    """A function that takes one step on one of the batches."""
    tx = optax.adam(RATE) if name == DENSE else make_optimizer(name)
    step = jax.jit(training_step(tx, name != DENSE), donate_argnums=(0, 1))
    weights = jnp.ones(dim)
    table = jax.random.normal(jax.random.key(0), (rows, dim))
    kept = [table, jax.jit(tx.init)(table)]

    def run(batch):
        *kept[:], value = step(*kept, batches[batch % len(batches)], weights)
        jax.block_until_ready((kept, value))

    return run


def measure(rows, dim, percent):
    """Median milliseconds of each, in turns."""
    rng = np.random.default_rng(0)
    size = rows * percent // 100
    drawn = [rng.choice(rows, size, replace=False) for _ in range(4)]
    batches = [jnp.asarray(ids, jnp.int32) for ids in drawn]
    runs = {name: start(name, rows, dim, batches) for name in NAMES}
    times = {name: [] for name in NAMES}
    for turn in range(-2, ROUNDS):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            run(turn)  # brings its own data into the caches
            times[name].append(seconds(run, turn + 1))
    return [1e3 * statistics.median(times[name][2:]) for name in NAMES]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000, help="of the table")
    rows = parser.parse_args().rows
    others = OtherPrograms()
    print("columns, touched: ms " + ", ".join(NAMES) + "; shares of the dense step")
    for dim in WIDTHS:
        for percent in PERCENT:
            *ours, dense = measure(rows, dim, percent)
            shares = ", ".join(f"{time / dense:.2f}" for time in ours)
            times = ", ".join(f"{time:.2f}" for time in (*ours, dense))
            print(f"{dim:4}, {percent:2} %: {times}; {shares}", flush=True)
    taken = others.cores()
    print(f"other programs took {taken} cores", end="")
    print(": the times mean nothing" if is_busy(taken, num_cores()) else "")


if __name__ == "__main__":
    main()
