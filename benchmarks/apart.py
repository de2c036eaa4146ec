"""Two optimisers, or two versions of this package, in processes that take turns.

    python benchmarks/apart.py exact_adam sparse_adam
    python benchmarks/apart.py sparse_adam sparse_adam --trees . ../before

A training step of each, for 60 ms at a time, and the ratio of both in each round: the
median, and its quartiles. Both processes live all the while, and other programs of the
machine slow down both: so 5 % can be told apart where times of one process after
another differ by half.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPES = [f"1000000x{dim}x{ids}" for ids in (8_192, 65_536) for dim in (32, 64, 128)]
SECONDS, REST_SECONDS = 0.06, 0.01


def take_turns(name, shape):
    """Prints the milliseconds of a step, each time when a line is read."""
    from contestants import InJax
    from problem import NUM_BATCHES, Problem, draw

    problem = Problem(*map(int, shape.split("x")), "float32")
    contestant = InJax(name, problem)
    contestant.start(draw(problem))
    number = 0

    def run():
        nonlocal number
        number += 1
        start = time.perf_counter()
        contestant.run("step", number % NUM_BATCHES)
        return 1e3 * (time.perf_counter() - start)

    for _ in range(6):
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        run()
        run()
        times, end = [], time.perf_counter() + SECONDS
        while len(times) < 3 or time.perf_counter() < end:
            times.append(run())
        print(statistics.median(times), flush=True)


class Process:
    """A contestant in a process of its own, with the package of a checkout."""

    def __init__(self, name, tree, shape):
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, "--one", shape],
            env=os.environ | {"PYTHONPATH": str(Path(tree).resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self.process.stdout.readline().strip() != "ready":
            sys.exit(f"apart.py: {name} of {tree} has failed, as it says above")

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        milliseconds = float(self.process.stdout.readline())
        time.sleep(REST_SECONDS)
        return milliseconds

    def stop(self):
        self.process.kill()
        self.process.wait()


def compare(names, trees, shape, rounds):
    one, other = (Process(*x, shape) for x in zip(names, trees, strict=True))
    pairs = []
    for number in range(rounds):
        if number % 2:  # who comes second finds the caches full of the other's
            second, first = other.turn(), one.turn()
        else:
            first, second = one.turn(), other.turn()
        pairs.append((first, second))
    one.stop()
    other.stop()
    low, middle, high = statistics.quantiles(x / y for x, y in pairs)
    first, second = (statistics.median(x) for x in zip(*pairs, strict=True))
    cells = f"{first:.3f} | {second:.3f} | {middle:.2f} ({low:.2f} to {high:.2f})"
    print(f"| {shape.replace('x', ' x ')} | {cells} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", help="two, as of steps.py --optimizer")
    here = [Path(__file__).resolve().parents[1]] * 2
    parser.add_argument("--trees", nargs=2, default=here, help="two checkouts")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="ROWSxDIMxIDS")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # for processes of its own
    args = parser.parse_args()
    if args.one:
        take_turns(args.names[0], args.one)
        return
    if len(args.names) != 2:
        parser.error(f"needs two names, got {args.names}")
    first, second = args.names
    print(f"| rows x columns x ids | {first} | {second} | ratio |\n|---|---|---|---|")
    for shape in args.shapes:
        compare(args.names, args.trees, shape, args.rounds)


if __name__ == "__main__":
    main()
