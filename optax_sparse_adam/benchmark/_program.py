"""The program: measures each problem, prints, keeps and draws what it found."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import jax

from .._command_line import exit_code, need
from . import _report, _results, _startup
from ._contestants import DENSE, Contestant, JaxContestant
from ._environment import describe, free_bytes, time_copies
from ._measure import Turns, groups
from ._options import parse_args, problems
from ._plot import plot
from ._problem import Problem, draw
from ._torch import TorchContestant, load_torch

_FILES = ("json", "plot", "source")  # options that do not change what is measured


def _contestants(
    args: argparse.Namespace, problem: Problem, torch: Any
) -> list[Contestant]:
    names = dict.fromkeys(args.optimizer)
    found: list[Contestant] = [JaxContestant(name, problem) for name in names]
    if torch is not None:
        platform = jax.devices()[0].platform
        found.append(TorchContestant(problem, torch, platform))
    if args.dense != "never":
        found.append(JaxContestant(DENSE, problem))
    return found


def _measure(args: argparse.Namespace, problem: Problem, torch: Any) -> _results.Result:
    contestants = _contestants(args, problem, torch)
    together, skipped = groups(contestants, free_bytes())
    measurements = []
    touched = 0
    if together:
        batches = draw(problem)
        touched = batches.touched
    for group in together:
        turns = Turns(group, batches, slow_dense=args.dense == "always")
        turns.run(args.repeats)
        turns.stop()
        skipped |= turns.skipped
        measurements += [
            _results.Measurement(phase, c.name, c.memory, c.floor(touched), seconds)
            for c in group
            for phase in c.phases
            if (seconds := turns.seconds[phase, c.name])
        ]
    names = [[contestant.name for contestant in group] for group in together]
    return _results.Result(problem, touched, names, skipped, measurements)


def _start(args: argparse.Namespace) -> tuple[_results.Run, Any]:
    environment = describe()
    torch, place = None, "left out, --no-torch"
    if not args.no_torch:
        torch, place = load_torch(environment["platform"])
    environment["torch"] = place
    options = {key: value for key, value in vars(args).items() if key not in _FILES}
    return _results.Run(environment, options, *time_copies(args.repeats)), torch


def _run(args: argparse.Namespace) -> int:
    figure = need("benchmark", "matplotlib.figure") if args.plot else None
    if args.source:
        run = _results.load(args.source)
        print(_report.header(run))
        for result in run.results:
            print(f"\n{result.problem}\n{_report.table(run, result)}")
    else:
        run = _measure_all(args)
    if run.startup:
        print(f"\nonce, in a new process\n{_report.startup(run.startup)}")
    print(f"\n{_report.verdict(run)}")
    if args.plot:
        plot(figure, args.plot, run)
    for path, what in ((args.json, "times"), (args.plot, "plot")):
        if path:
            print(f"{what} in {path}")
    return 0


def _measure_all(args: argparse.Namespace) -> _results.Run:
    run, torch = _start(args)
    print(_report.header(run), flush=True)
    asked = problems(args)
    if args.startup:  # before memory is taken here
        run.startup = _startup.measure(asked[0], args.optimizer[0])
    for problem in asked:
        print(f"\n{problem}", flush=True)
        with jax.enable_x64(problem.dtype == "float64"):
            result = _measure(args, problem, torch)
        run.results.append(result)
        print(_report.table(run, result), flush=True)
        if args.json:  # now: the next problem may be the one that is interrupted
            _results.save(run, args.json)
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit code is 0, 2 for bad input, 130 for Ctrl-C."""
    # JAX would take most of a GPU's memory for itself, and leave little to torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return exit_code("benchmark", lambda: _run(parse_args(argv)))
