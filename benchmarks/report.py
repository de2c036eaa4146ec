"""The tables of a run, and of files that are kept.

    python benchmarks/report.py FILE.json [FILE.json ...] [--only WORDS]
        [--plot PNG [--phase PHASE]]

Files of the same problems, with the kernel and without it, say, make one table, with
the times of torch and of dense optax of the first. README.md holds these tables.

A run is what `steps.py --json` writes: `environment` (see `machine.describe`),
`options`, `others` (see `machine.OtherPrograms`) and `results`. Each of these has a
`problem`, the rows `touched`, the `groups` that took turns, who was `skipped` and why,
`others`, the `bytes_a_second` that the machine's memory moved before or after, and
`measurements`: `phase`, `name`, `memory_bytes`, the `least_bytes` that memory must
move, and the `seconds` of each round. (Files of November 2026 lack both bytes.)
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from contestants import DENSE, PHASES, TORCH
from machine import is_busy
from problem import Problem
from spread import ratio, spread

FORMAT = "optax_sparse_adam benchmarks/steps.py 2"
RIVALS = TORCH, DENSE
UNSTEADY = 3  # times the lower quartile; quiet machines stay below 2.5


def save(run, path):
    """Writes a run, the numbers of a list on one line."""
    text = json.dumps({"format": FORMAT, "unit": "seconds", **run}, indent=1)
    flat = re.compile(r"\[[^][{}]*\]")
    text = flat.sub(lambda match: re.sub(r"\s+", " ", match[0]), text)
    path.write_text(text + "\n", encoding="utf-8")


def load(path):
    """Reads what `save` wrote."""
    run = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(run, dict) or run.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no file that this version of steps.py wrote")
    run.pop("unit")
    return run


def digits(value):
    """Three significant digits, never in powers of ten."""
    if value >= 99.95:
        return f"{value:,.0f}"
    decimals = 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{decimals}f}"


def share(value):
    """Hundredths, and two digits of what is less than a tenth."""
    if value >= 9.995:
        return digits(value)
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


def in_brackets(value):
    middle, low, high = map(share, value)
    return f"{middle}, {low} to {high}"


def header(run):
    """The machine, the versions and the method."""
    there = run["environment"]
    versions = {**there["versions"], "python": there["python"]}
    lines = {
        "device": f"{there['device']}, {there['cores']} cores, {there['os']}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
        "kernel": "compiled" if there["kernel"] else "none, plain JAX",
        "torch": there["torch"],
        "method": f"in turns, {run['options']['repeats']} rounds; medians in ms; in "
        "brackets the share of torch's (or else optax's), and its quartiles",
    }
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items())


def seconds_of(result):
    return {(m["phase"], m["name"]): m["seconds"] for m in result["measurements"]}


def cell(times, phase, name):
    """The median, and the share of a rival's."""
    if (phase, name) not in times:
        return "-"
    text = digits(1e3 * np.median(times[phase, name]))
    rivals = [rival for rival in RIVALS if (phase, rival) in times]
    if name in RIVALS or not rivals:
        return text
    share_of = ratio(times[phase, name], times[phase, rivals[0]])
    return f"{text} ({in_brackets(share_of)})"


def tables(runs):
    """A table for each phase: medians of each contestant at each problem."""
    heads = [str(Problem(**result["problem"])) for result in runs[0]["results"]]
    for phase in PHASES:
        lines = [[phase, *heads]]
        for number, run in enumerate(runs):
            times = [seconds_of(result) for result in run["results"]]
            names = dict.fromkeys(name for x in times for p, name in x if p == phase)
            for name in names:
                head = name
                if name not in RIVALS and len(runs) > 1:
                    kernel = run["environment"]["kernel"]
                    head += ", kernel" if kernel else ", plain JAX"
                if name not in RIVALS or not number:
                    lines.append([head, *(cell(x, phase, name) for x in times)])
        if len(heads) >= len(lines):  # the longer side goes down
            lines = list(map(list, zip(*lines, strict=True)))
        lines.insert(1, ["---"] * len(lines[0]))
        if len(lines) > 2 and len(lines[0]) > 1:
            yield "\n".join("| " + " | ".join(line) + " |" for line in lines)


def distrust(run, result):
    """Why these times mean nothing, or an empty string."""
    cores = run["environment"]["cores"]
    if is_busy(result["others"], cores):
        return f"others took {result['others']:.2f} of {cores} cores"
    spreads = {m["name"]: spread(m["seconds"]) for m in result["measurements"]}
    wide = [name for name, s in spreads.items() if s.high > UNSTEADY * s.low]
    return f"the quartiles of {' and of '.join(wide)} lie far apart" if wide else ""


def remarks(run, result):
    """What the table does not say: doubts, rounds, memory."""
    line = f"  {Problem(**result['problem'])}: {result['touched']:,} rows touched"
    if "bytes_a_second" in result:
        line += f"; memory moves {result['bytes_a_second'] / 1e9:.1f} GB/s"
    yield line
    if why := distrust(run, result):
        yield f"  NOT TO BE TRUSTED: {why}"
    for m in result["measurements"]:
        rounds, memory = len(m["seconds"]), f"{m['memory_bytes'] / 1e9:.3g} GB"
        line = f"  {m['phase']}, {m['name']}: {rounds} rounds, {memory}"
        if "least_bytes" in m:
            least = m["least_bytes"] / result["bytes_a_second"]
            line += f", {share(np.median(m['seconds']) / least)} of what memory allows"
        yield line
    if len(result["groups"]) > 1:
        parts = "; then ".join(", ".join(group) for group in result["groups"])
        yield f"  too large to take turns all together: {parts}"
    for name, why in result["skipped"].items():
        yield f"  {name}: left out, {why}"


def main():
    parser = argparse.ArgumentParser(description="Prints what steps.py --json kept.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--only", default="", help="sizes with these words in them")
    parser.add_argument("--plot", type=Path, help="draw the first file")
    text = "draw this phase only"
    parser.add_argument("--phase", choices=PHASES, nargs=1, default=PHASES, help=text)
    args = parser.parse_args()
    runs = [load(path) for path in args.files]
    for run in runs:
        found = [x for x in run["results"] if args.only in str(Problem(**x["problem"]))]
        run["results"] = found
    print("\n\n".join([*map(header, runs), *tables(runs)]))
    for run in runs:
        print("", *(x for r in run["results"] for x in remarks(run, r)), sep="\n")
    if args.plot:
        from plot import draw  # needs matplotlib

        draw(args.plot, runs[0], args.phase)


if __name__ == "__main__":
    main()
