"""Time against the number of rows, drawn."""

from pathlib import Path
from typing import Any

from ._contestants import DENSE, PHASES
from ._report import spread
from ._results import Run
from ._torch import NAME as TORCH

_TITLES = {"update": "update of the table", "step": "whole training step"}
_OURS = ("#0b6e4f", "#2f7fb8", "#76b041", "#8e4585")
_STYLES = {
    TORCH: {"color": "#e07a1f", "marker": "s"},
    DENSE: {"color": "#8d99ae", "marker": "^"},
}
Series = dict[str, list[tuple[float, ...]]]


def _series(run: Run) -> dict[tuple[Any, ...], dict[str, Series]]:
    """For each kind of problem and each phase: rows, median and quartiles in ms."""
    found: dict[tuple[Any, ...], dict[str, Series]] = {}
    for result in run.results:
        rows, *kind = result.problem
        for measured in result.measurements:
            panels = found.setdefault(tuple(kind), {phase: {} for phase in PHASES})
            points = panels[measured.phase].setdefault(measured.name, [])
            points.append((rows, *(1e3 * x for x in spread(measured.seconds))))
    return found


def _label(value: float, position: int | None = None) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _draw(axes: Any, series: Series) -> None:
    ours = iter(_OURS * len(series))
    for name, points in series.items():
        style = _STYLES.get(name) or {"color": next(ours), "marker": "o"}
        rows, middle, low, high = zip(*sorted(points), strict=True)
        width = 1.6 if name in _STYLES else 2.4
        axes.plot(rows, middle, label=name, linewidth=width, markersize=5, **style)
        axes.fill_between(rows, low, high, color=style["color"], alpha=0.18, lw=0)


def _style(axes: Any, series: Series) -> None:
    axes.set(xscale="log", yscale="log", xlabel="rows of the table")
    # Labels at what was measured, and at 1, 2 and 5 times the powers of ten.
    measured = sorted({rows for points in series.values() for rows, *_ in points})
    axes.set_xticks(measured, [_label(rows) for rows in measured])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter(_label)
    axes.minorticks_off()
    axes.grid(color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plot(figure: Any, path: Path, run: Run) -> None:
    """Draws two panels, update and step, for each kind of problem."""
    kinds = _series(run)
    size = (9.5, 0.8 + 3.6 * len(kinds))
    canvas = figure.Figure(figsize=size, layout="constrained", dpi=150)
    lines = canvas.subplots(max(1, len(kinds)), 2, squeeze=False, sharey="row")
    handles = {}
    for line, (kind, panels) in zip(lines, kinds.items(), strict=False):
        dim, ids, distribution, dtype = kind
        batch = f"{ids:,} {distribution} ids, rows of {dim} {dtype}"
        line[0].set_ylabel("ms, median and quartiles")
        for axes, (phase, series) in zip(line, panels.items(), strict=True):
            _draw(axes, series)
            _style(axes, series)
            axes.set_title(f"{_TITLES[phase]}\n{batch}", fontsize=10, loc="left")
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles[label] = handle
    canvas.legend(
        handles.values(), handles, loc="outside lower center", ncols=4, frameon=False
    )
    there = run.environment
    machine = f"{there['device']}, {there['cores']} cores"
    canvas.suptitle(machine, fontsize=9, color="#555555")
    canvas.savefig(path)
