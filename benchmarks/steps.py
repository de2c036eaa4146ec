"""Times updates and training steps on one table: ours, torch's and dense optax.

python benchmarks/steps.py
python benchmarks/steps.py --rows 10000000 --dim 128 --ids 1048576 --json large.json
python benchmarks/steps.py --shapes 1000000x64x8192 4000000x64x1048576

Measures the row-sparse optimisers of this package, torch.optim.SparseAdam where torch
is installed, and optax.adam on dense gradients, in turns in one process: see README.md.
JAX_PLATFORMS=cpu measures on the CPU of a machine with a GPU.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

# JAX would take most of a GPU's memory for itself, and leave little to torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import report
from contestants import DENSE, InJax, InTorch, load_torch
from machine import OtherPrograms, bytes_a_second, describe, free_bytes, is_busy
from problem import DRAWS, Problem, draw
from turns import Turns, groups

# What is measured where --rows, --dim and --ids are left out.
USUAL = [(1_000_000, 64, 8_192), (1_000_000, 64, 65_536), (2_000_000, 96, 24_000)]


def shape(text):
    """A table and a batch: `ROWSxDIMxIDS`."""
    rows, dim, ids = map(int, text.split("x"))
    return rows, dim, ids


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, many = parser.add_argument, {"type": int, "nargs": "+", "metavar": "N"}
    add("--rows", **many, help="of the table (default: 1,000,000)")
    add("--dim", **many, help="length of a row (default: 64)")
    add("--ids", **many, help="in a batch (default: 8,192 and 65,536)")
    text = "instead of --rows, --dim and --ids: just these"
    add("--shapes", type=shape, nargs="+", metavar="ROWSxDIMxIDS", help=text)
    types = ("float32", "bfloat16", "float16", "float64")
    add("--dtype", choices=types, default=types[0], help="of table and moments")
    add("--draw", choices=DRAWS, default="zipf", help="how ids are drawn")
    text = "such as rowwise_adagrad, or lazy_X with an optimiser X of optax"
    add("--optimizer", nargs="+", metavar="NAME", default=["sparse_adam"], help=text)
    rivals = ("torch", "dense", "both", "nobody")
    add("--against", choices=rivals, default="both", help="who takes turns with us")
    add("--repeats", type=int, default=30, metavar="N", help="rounds (default: 30)")
    add("--busy", action="store_true", help="measure while other programs run")
    add("--json", type=Path, metavar="FILE.json", help="keep times, for report.py")
    args = parser.parse_args()
    if args.shapes and (args.rows or args.dim or args.ids):
        parser.error("--shapes: not together with --rows, --dim or --ids")
    return args


def problems(args):
    """All sizes that were asked for."""
    sizes = args.shapes or USUAL
    if args.rows or args.dim or args.ids:
        rows, dim = args.rows or [1_000_000], args.dim or [64]
        sizes = itertools.product(rows, dim, args.ids or [8_192, 65_536])
    return [Problem(*size, args.dtype, args.draw) for size in sizes]


def least_bytes(contestant, phase, problem, touched):
    """What memory must move: each touched row of table and state, there and back.

    An update also reads its gradient. What a step makes between its lookup and its
    update may stay in the caches, and counts nothing.
    """
    rows = problem.rows if contestant.name == DENSE else touched
    width = jnp.dtype(problem.dtype).itemsize * problem.dim
    gradient = problem.ids * width if phase == "update" else 0
    return 2 * rows * contestant.row_bytes + gradient


def measure(args, problem, torch):
    contestants = [InJax(name, problem) for name in dict.fromkeys(args.optimizer)]
    if torch is not None:
        contestants.append(InTorch(problem, torch, jax.devices()[0].platform))
    if args.against in ("dense", "both"):
        contestants.append(InJax(DENSE, problem))
    together, skipped = groups(contestants, free_bytes())
    measurements, batches = [], draw(problem)
    others, bandwidth = OtherPrograms(), bytes_a_second()
    for group in together:
        turns = Turns(group, batches)
        turns.run(args.repeats)
        turns.stop()
        skipped |= turns.skipped
        measurements += [
            {
                "phase": phase,
                "name": contestant.name,
                "memory_bytes": contestant.memory,
                "least_bytes": least_bytes(contestant, phase, problem, batches.touched),
                "seconds": seconds,
            }
            for contestant in group
            for phase in contestant.phases
            if (seconds := turns.seconds[phase, contestant.name])
        ]
    return {
        "problem": problem._asdict(),
        "touched": batches.touched,
        "groups": [[contestant.name for contestant in group] for group in together],
        "skipped": skipped,
        "others": others.cores(),
        "bytes_a_second": max(bandwidth, bytes_a_second()),
        "measurements": measurements,
    }


def main():
    args = parse_args()
    others = OtherPrograms()
    time.sleep(1)
    taken, environment = others.cores(), describe()
    if is_busy(taken, environment["cores"]) and not args.busy:
        sys.exit(
            f"steps.py: other programs take {taken:.2f} of {environment['cores']} "
            "cores; times would mean nothing. Wait for their end, or pass --busy"
        )
    torch, environment["torch"] = None, "left out"
    if args.against in ("torch", "both"):
        torch, environment["torch"] = load_torch(environment["platform"])
    run = {
        "environment": environment,
        "options": {k: v for k, v in vars(args).items() if k != "json"},
        "others": taken,
        "results": [],
    }
    print(report.header(run), flush=True)
    for problem in problems(args):
        print(f"\n{problem}\n", flush=True)
        with jax.enable_x64(problem.dtype == "float64"):
            run["results"].append(measure(args, problem, torch))
        last = run["results"][-1]
        print("\n\n".join(report.tables([run | {"results": [last]}])))
        print(*report.remarks(run, last), sep="\n", flush=True)
        if args.json:  # now: the next problem may be the one that is interrupted
            report.save(run, args.json)


if __name__ == "__main__":
    main()
