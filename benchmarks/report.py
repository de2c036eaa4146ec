"""The tables of a run, and what they mean in words; also of a file that is kept.

python benchmarks/report.py FILE.json [--plot FILE.png]

A run is what `steps.py --json` writes: `environment` (see `machine.describe`),
`options`, `copy_bytes` and `copy_seconds` (see `machine.time_copies`), `others` (see
`machine.OtherPrograms`) and `results`. Each of these has a `problem`, the rows
`touched`, the `groups` that took turns, who was `skipped` and why, `others`, and
`measurements`: `phase`, `name`, `memory_bytes`, `floor_bytes`, and the `seconds` of
each round.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
from contestants import DENSE, PHASES, TORCH
from machine import is_busy
from problem import Problem

FORMAT = "optax_sparse_adam benchmarks/steps.py 2"
RIVALS = {TORCH: "torch", DENSE: "optax.adam"}
HEAD = ("median", "quartiles", "of torch's time", "of optax.adam's", "floor")
WIDTH = 100
UNSTEADY = 3  # times the lower quartile; quiet machines stay below 2.5


def save(run, path):
    """Writes a run, the numbers of a list on one line."""
    text = json.dumps({"format": FORMAT, "unit": "seconds", **run}, indent=1)
    flat = re.compile(r"\[[^][{}]*\]")
    text = flat.sub(lambda match: re.sub(r"\s+", " ", match[0]), text)
    path.write_text(text + "\n", encoding="utf-8")


def load(path):
    """Reads what `save` wrote.

    Raises:
      ValueError: If the file holds something else.
    """
    run = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(run, dict) or run.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no file that this version of steps.py wrote")
    run.pop("unit")
    return run


class Spread(NamedTuple):
    middle: float
    low: float
    high: float


def spread(values):
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Spread(float(middle), float(low), float(high))


def ratio(ours, theirs):
    """The ratio of the medians, and the quartiles of the ratios of each round."""
    rounds = [a / b for a, b in zip(ours, theirs, strict=False)]
    _, low, high = spread(rounds)
    return Spread(float(np.median(ours) / np.median(theirs)), low, high)


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


def with_quartiles(value, form=share):
    middle, low, high = map(form, value)
    return f"{middle} [{low}, {high}]"


def columns(rows, gap="  "):
    """Lays out a table; the cells right of the first column end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = map(str.rjust, rest, widths[1:])
        lines.append(gap.join(["  " + first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def load_in_words(run, others):
    """What other programs took; an old file does not say."""
    if others is None:
        return "unknown"
    return f"{others:.2f} of {run['environment']['cores']} cores taken by others"


def header(run):
    """The machine, the versions and the method."""
    there = run["environment"]
    versions = {**there["versions"], "python": there["python"]}
    rates = [run["copy_bytes"] / seconds / 1e9 for seconds in run["copy_seconds"]]
    kernel = "the compiled one of optax_sparse_adam.native"
    paragraphs = {
        "device": f"{there['device']} ({there['platform']}), {there['cores']} cores, "
        f"{there['os']}",
        "load": load_in_words(run, run["others"]),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
        "kernel": kernel if there["kernel"] else "none, plain JAX",
        "torch": there["torch"],
        "copy": f"{with_quartiles(spread(rates), digits)} GB/s read and written, "
        f"copying {run['copy_bytes'] / 2e6:.0f} MB",
        "method": f"in turns in one process, {run['options']['repeats']} rounds after "
        "some to warm up; a turn is two runs, the second timed; medians [quartiles] in "
        "ms; ratios of medians [quartiles of the ratios of each round]; floor: what "
        "moving the bytes that must be moved would take, at the rate of the copy, as a "
        "share of the time",
    }
    indent = " " * 10
    return "\n".join(
        textwrap.fill(f"{name:<10}{text}", WIDTH, subsequent_indent=indent)
        for name, text in paragraphs.items()
    )


def against(result, ours, rival):
    """The ratio of our times to a rival's in the same phase, or `None`."""
    for theirs in result["measurements"]:
        if (theirs["phase"], theirs["name"]) == (ours["phase"], rival):
            same = ours["name"] in RIVALS
            return None if same else ratio(ours["seconds"], theirs["seconds"])
    return None


def line(run, result, measured):
    time = spread(measured["seconds"])
    rate = run["copy_bytes"] / spread(run["copy_seconds"]).middle
    floor = measured["floor_bytes"] / rate
    ratios = [against(result, measured, rival) for rival in RIVALS]
    return (
        f"{measured['phase']:<6}  {measured['name']}",
        digits(time.middle * 1e3),
        f"[{digits(time.low * 1e3)}, {digits(time.high * 1e3)}]",
        *("" if value is None else with_quartiles(value) for value in ratios),
        f"{100 * floor / time.middle:.0f} %",
    )


def distrust(run, result):
    """Why these times mean nothing, or an empty string."""
    if is_busy(result["others"], run["environment"]["cores"]):
        return f"NOT TO BE TRUSTED: {load_in_words(run, result['others'])}"
    spreads = {m["name"]: spread(m["seconds"]) for m in result["measurements"]}
    wide = [name for name, s in spreads.items() if s.high > UNSTEADY * s.low]
    if wide:
        names = " and of ".join(wide)
        return f"NOT TO BE TRUSTED: the quartiles of {names} lie far apart"
    return ""


def remarks(run, result):
    if why := distrust(run, result):
        yield textwrap.fill(f"  {why}", WIDTH, subsequent_indent=" " * 4)
    memory = {m["name"]: m["memory_bytes"] / 1e9 for m in result["measurements"]}
    sizes = "; ".join(f"{name} {size:.3g}" for name, size in memory.items())
    yield textwrap.fill(f"  memory in GB: {sizes}", WIDTH, subsequent_indent=" " * 4)
    for measured in result["measurements"]:
        if len(measured["seconds"]) < run["options"]["repeats"]:
            where = f"{measured['phase']}, {measured['name']}"
            yield f"  {where}: {len(measured['seconds'])} rounds only"
    if len(result["groups"]) > 1:
        parts = "; then ".join(", ".join(group) for group in result["groups"])
        yield f"  too large to take turns all together: {parts}"


def table(run, result):
    """The times of a problem, who was left out, and who did not take turns."""
    lines = []
    if result["measurements"]:
        ordered = sorted(
            result["measurements"], key=lambda measured: PHASES.index(measured["phase"])
        )
        head = (f"{result['touched']:,} rows touched", *HEAD)
        lines.append(columns([head, *(line(run, result, m) for m in ordered)]))
        lines += remarks(run, result)
    lines += [f"  {name}: left out, {why}" for name, why in result["skipped"].items()]
    return "\n".join(lines)


def verdict(run):
    """Says where this package is slower, and where it makes no clear difference."""
    lines = []
    trusted = [result for result in run["results"] if not distrust(run, result)]
    if distrusted := len(run["results"]) - len(trusted):
        lines.append(f"No verdict on {distrusted} of {len(run['results'])} sizes.")
    for rival, short in RIVALS.items():
        found = [
            (f"{m['phase']}, {m['name']}, {Problem(**result['problem'])}", ratio)
            for result in trusted
            for m in result["measurements"]
            if (ratio := against(result, m, rival)) is not None
        ]
        if not found:
            continue
        faster = [value for _, value in found if value.high < 1]
        lines.append(f"Against {short}: faster in {len(faster)} of {len(found)} rows.")
        for where, value in found:
            if value.high >= 1:
                word = "SLOWER" if value.low > 1 else "no clear difference"
                lines.append(f"  {word}: {where}: {with_quartiles(value)}")
    return "\n".join(lines) or "Nothing to compare with."


def main():
    from plot import draw, picture  # needs matplotlib

    parser = argparse.ArgumentParser(description="Prints what steps.py --json kept.")
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=picture, help="draw time against rows")
    args = parser.parse_args()
    try:
        run = load(args.file)
    except (OSError, ValueError) as error:
        sys.exit(f"report.py: {error}")
    print(header(run))
    for result in run["results"]:
        print(f"\n{Problem(**result['problem'])}\n{table(run, result)}")
    print(f"\n{verdict(run)}")
    if args.plot:
        draw(args.plot, run)


if __name__ == "__main__":
    main()
