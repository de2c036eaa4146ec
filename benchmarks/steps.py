"""Times updates and training steps on one table: ours, torch's and dense optax.

python benchmarks/steps.py
python benchmarks/steps.py --rows 10000000 --dim 128 --ids 1048576 --json large.json
python benchmarks/steps.py --shapes 1000000x64x8192 4000000x64x1048576 --plot ids.png

Measures the row-sparse optimisers of this package, torch.optim.SparseAdam where torch
is installed, and optax.adam on dense gradients, in turns in one process: see README.md.
The last column is the time of the bytes that must be moved, at the rate of a copy, over
the time taken. --plot draws time per id where there are more batches than tables,
else time against rows. JAX_PLATFORMS=cpu measures on the CPU of a machine with a GPU.
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
import report
from contestants import DENSE, InJax, InTorch, load_torch, make_optimizer
from machine import OtherPrograms, describe, free_bytes, is_busy, time_copies
from plot import draw as draw_plot
from plot import picture
from problem import Problem, draw
from turns import Turns, groups

# What is measured where --rows, --dim and --ids are left out.
USUAL = [(1_000_000, 64, 8_192), (1_000_000, 64, 65_536), (2_000_000, 96, 24_000)]


def size(text):
    if not text.isdecimal() or not 1 <= int(text) <= 2 * 10**9:
        message = f"a whole number from 1 to 2,000,000,000 is needed, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def shape(text):
    """A table and a batch: `ROWSxDIMxIDS`."""
    sizes = text.split("x")
    if len(sizes) != 3:
        message = f"a shape is ROWSxDIMxIDS, such as 4000000x64x1048576, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return tuple(map(size, sizes))


def optimizer(name):
    try:
        make_optimizer(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    many = {"type": size, "nargs": "+", "metavar": "N"}
    parser.add_argument("--rows", **many, help="of the table (default: 1,000,000)")
    parser.add_argument("--dim", **many, help="length of a row (default: 64)")
    parser.add_argument("--ids", **many, help="in a batch (default: 8,192 and 65,536)")
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        metavar="ROWSxDIMxIDS",
        help="instead of --rows, --dim and --ids: just these",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default="float32",
        help="of table and moments (default: float32)",
    )
    parser.add_argument(
        "--optimizer",
        type=optimizer,
        nargs="+",
        default=["sparse_adam"],
        metavar="NAME",
        help="such as rowwise_adagrad, or lazy_X with an optimiser X of optax",
    )
    parser.add_argument(
        "--against",
        choices=("torch", "dense", "both", "nobody"),
        default="both",
        help="who takes turns with us (default: both)",
    )
    parser.add_argument(
        "--repeats", type=size, default=30, metavar="N", help="rounds (default: 30)"
    )
    parser.add_argument(
        "--busy", action="store_true", help="measure while other programs run, too"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE.json", help="keep all times, for report.py"
    )
    parser.add_argument(
        "--plot", type=picture, metavar="FILE.png", help="draw the times, see above"
    )
    args = parser.parse_args(argv)
    if args.shapes and (args.rows or args.dim or args.ids):
        parser.error("--shapes: not together with --rows, --dim or --ids")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    return args


def problems(args):
    """All sizes that were asked for."""
    if args.shapes:
        sizes = args.shapes
    elif args.rows or args.dim or args.ids:
        rows, dim = args.rows or [1_000_000], args.dim or [64]
        sizes = itertools.product(rows, dim, args.ids or [8_192, 65_536])
    else:
        sizes = USUAL
    return [Problem(*size, args.dtype) for size in sizes]


def measure(args, problem, torch):
    contestants = [InJax(name, problem) for name in dict.fromkeys(args.optimizer)]
    if torch is not None:
        contestants.append(InTorch(problem, torch, jax.devices()[0].platform))
    if args.against in ("dense", "both"):
        contestants.append(InJax(DENSE, problem))
    together, skipped = groups(contestants, free_bytes())
    measurements, touched = [], 0
    if together:
        batches = draw(problem)
        touched = batches.touched
    others = OtherPrograms()
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
                "floor_bytes": contestant.floor(touched),
                "seconds": seconds,
            }
            for contestant in group
            for phase in contestant.phases
            if (seconds := turns.seconds[phase, contestant.name])
        ]
    return {
        "problem": problem._asdict(),
        "touched": touched,
        "groups": [[contestant.name for contestant in group] for group in together],
        "skipped": skipped,
        "others": others.cores(),
        "measurements": measurements,
    }


def main(argv=None):
    args = parse_args(argv)
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
    kept = ("rows", "dim", "ids", "shapes", "dtype", "optimizer", "against", "repeats")
    copy_bytes, copy_seconds = time_copies(args.repeats)
    run = {
        "environment": environment,
        "options": {name: getattr(args, name) for name in kept},
        "others": taken,
        "copy_bytes": copy_bytes,
        "copy_seconds": copy_seconds,
        "results": [],
    }
    print(report.header(run), flush=True)
    for problem in problems(args):
        print(f"\n{problem}", flush=True)
        with jax.enable_x64(problem.dtype == "float64"):
            run["results"].append(measure(args, problem, torch))
        print(report.table(run, run["results"][-1]), flush=True)
        if args.json:  # now: the next problem may be the one that is interrupted
            report.save(run, args.json)
    print(f"\n{report.verdict(run)}")
    if args.plot:
        draw_plot(args.plot, run)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("steps.py: interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # JAX may crash when it is taken down: see examples/word2vec.py
