"""The table on the terminal, and what it means in words."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._command_line import columns
from ._contestants import DENSE, PHASES
from ._results import Measurement, Result, Run
from ._torch import NAME as TORCH

_RIVALS = {TORCH: "torch", DENSE: "optax.adam"}
_HEAD = ("median", "quartiles", "of torch's time", "of optax.adam's", "floor")
_WIDTH = 100
_KERNEL = {
    True: "the compiled one of optax_sparse_adam.native",
    False: "none, plain JAX (see optax_sparse_adam.native, for CPUs)",
}


class Spread(NamedTuple):
    """A number with its quartiles."""

    middle: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Spread(float(middle), float(low), float(high))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio of the medians, and the quartiles of the ratios of each round."""
    rounds = [a / b for a, b in zip(ours, theirs, strict=False)]
    _, low, high = spread(rounds)
    return Spread(float(np.median(ours) / np.median(theirs)), low, high)


def digits(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value >= 99.95:
        return f"{value:,.0f}"
    decimals = 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{decimals}f}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else digits(value)


def _with_quartiles(value: Spread, form: Callable[[float], str] = _hundredths) -> str:
    middle, low, high = map(form, value)
    return f"{middle} [{low}, {high}]"


def header(run: Run) -> str:
    """The machine, the versions and the method."""
    there = run.environment
    versions = {**there["versions"], "python": there["python"]}
    rate = spread([run.copy_bytes / seconds / 1e9 for seconds in run.copy_seconds])
    paragraphs = {
        "device": f"{there['device']} ({there['platform']}), {there['cores']} cores, "
        f"{there['os']}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
        "kernel": _KERNEL[there.get("kernel", False)],
        "torch": there["torch"],
        "copy": f"{_with_quartiles(rate, digits)} GB/s read and written, copying "
        f"{run.copy_bytes / 2e6:.0f} MB",
        "method": f"in turns in one process, {run.options['repeats']} rounds after "
        "some to warm up; a turn is two runs, the second timed; medians [quartiles] in "
        "ms; ratios of medians [quartiles of the ratios of each round]; floor: what "
        "moving the bytes that must be moved would take, at the rate of the copy, as a "
        "share of the time",
    }
    indent = " " * 10
    return "\n".join(
        textwrap.fill(f"{name:<10}{text}", _WIDTH, subsequent_indent=indent)
        for name, text in paragraphs.items()
    )


def _find(result: Result, phase: str, name: str) -> Measurement | None:
    for measurement in result.measurements:
        if (measurement.phase, measurement.name) == (phase, name):
            return measurement
    return None


def _against(result: Result, ours: Measurement, rival: str) -> Spread | None:
    theirs = _find(result, ours.phase, rival)
    if theirs is None or ours.name in _RIVALS:
        return None
    return ratio(ours.seconds, theirs.seconds)


def _line(result: Result, measured: Measurement, rate: float) -> tuple[str, ...]:
    time = spread(measured.seconds)
    floor = measured.floor_bytes / rate
    ratios = [_against(result, measured, rival) for rival in _RIVALS]
    low, high = digits(time.low * 1e3), digits(time.high * 1e3)
    return (
        f"{measured.phase:<6}  {measured.name}",
        digits(time.middle * 1e3),
        f"[{low}, {high}]",
        *("" if value is None else _with_quartiles(value) for value in ratios),
        f"{100 * floor / time.middle:.0f} %",
    )


def copy_rate(run: Run) -> float:
    """Bytes read and written in a second by a copy."""
    return run.copy_bytes / spread(run.copy_seconds).middle


def _remarks(run: Run, result: Result) -> Iterator[str]:
    memory = {m.name: m.memory_bytes / 1e9 for m in result.measurements}
    sizes = "; ".join(f"{name} {size:.3g}" for name, size in memory.items())
    yield textwrap.fill(f"  memory in GB: {sizes}", _WIDTH, subsequent_indent=" " * 4)
    for measured in result.measurements:
        if len(measured.seconds) < run.options["repeats"]:
            where = f"{measured.phase}, {measured.name}"
            yield f"  {where}: {len(measured.seconds)} rounds only"
    if len(result.groups) > 1:
        parts = "; then ".join(", ".join(group) for group in result.groups)
        yield f"  too large to take turns all together: {parts}"


def table(run: Run, result: Result) -> str:
    """The times of a problem, who was left out, and who did not take turns."""
    lines = []
    if result.measurements:
        rate = copy_rate(run)
        ordered = sorted(result.measurements, key=lambda m: PHASES.index(m.phase))
        head = (f"{result.touched:,} rows touched", *_HEAD)
        rows = [head, *(_line(result, measured, rate) for measured in ordered)]
        lines.append(columns(rows, str.rjust, gap="  "))
        lines += _remarks(run, result)
    lines += [f"  {name}: left out, {why}" for name, why in result.skipped.items()]
    return "\n".join(lines)


def _comparisons(run: Run, rival: str) -> Iterator[tuple[str, Spread]]:
    for result in run.results:
        for measured in result.measurements:
            against = _against(result, measured, rival)
            if against is not None:
                yield f"{measured.phase}, {measured.name}, {result.problem}", against


def verdict(run: Run) -> str:
    """Says where this package is slower, and where it makes no clear difference."""
    lines = []
    for rival, short in _RIVALS.items():
        found = list(_comparisons(run, rival))
        if not found:
            continue
        faster = [against for _, against in found if against.high < 1]
        lines.append(f"Against {short}: faster in {len(faster)} of {len(found)} rows.")
        for where, against in found:
            if against.high >= 1:
                word = "SLOWER" if against.low > 1 else "no clear difference"
                lines.append(f"  {word}: {where}: {_with_quartiles(against)}")
    return "\n".join(lines) or "Nothing to compare with."


def startup(times: dict[str, dict[str, list[float]]]) -> str:
    """What happens once: import, compilation, the first step."""
    rows = [("", *next(iter(times.values())), "ratio")]
    for what, pair in times.items():
        cells = (_with_quartiles(spread(x), digits) for x in pair.values())
        rows.append((f"{what}, s", *cells, _with_quartiles(ratio(*pair.values()))))
    return columns(rows, str.rjust)
