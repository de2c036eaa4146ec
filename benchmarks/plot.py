"""Draws time against the number of rows, or time per id against the number of ids."""

from contestants import DENSE, PHASES, TORCH
from matplotlib.figure import Figure
from problem import in_short
from spread import spread

TITLES = {"update": "update of the table", "step": "whole training step"}
OURS = ("#0b6e4f", "#2f7fb8", "#76b041", "#8e4585")
STYLES = {
    TORCH: {"color": "#e07a1f", "marker": "s"},
    DENSE: {"color": "#8d99ae", "marker": "^"},
}


def is_by_ids(run):
    """Whether the batches of a run differ more than its tables."""
    problems = [result["problem"] for result in run["results"]]
    ids, rows = ({problem[key] for problem in problems} for key in ("ids", "rows"))
    return len(ids) > len(rows)


def series(run, phase, by_ids):
    """The points of each name: number of rows, median and quartiles in ms.

    Or the number of ids, and the same in microseconds for each.
    """
    found = {}
    for result in run["results"]:
        problem = result["problem"]
        place = problem["ids" if by_ids else "rows"]
        scale = 1e6 / place if by_ids else 1e3
        for measured in result["measurements"]:
            if measured["phase"] == phase:
                times = (scale * x for x in spread(measured["seconds"]))
                found.setdefault(measured["name"], []).append((place, *times))
    return found


def draw_times(axes, lines):
    ours = iter(OURS * len(lines))
    for name, points in lines.items():
        style = STYLES.get(name) or {"color": next(ours), "marker": "o"}
        rows, middle, low, high = zip(*sorted(points), strict=True)
        width = 1.6 if name in STYLES else 2.4
        axes.plot(rows, middle, label=name, linewidth=width, markersize=5, **style)
        axes.fill_between(rows, low, high, color=style["color"], alpha=0.18, lw=0)


def style(axes, lines, by_ids):
    label = "Zipf ids in a batch" if by_ids else "rows of the table"
    axes.set(xscale="log", yscale="log", xlabel=label)
    # Labels at what was measured, and at 1, 2 and 5 times the powers of ten.
    measured = sorted({rows for points in lines.values() for rows, *_ in points})
    labels = [f"{x:,}" if by_ids else in_short(x) for x in measured]
    axes.set_xticks(measured, labels)
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter(lambda value, position: in_short(value))
    axes.minorticks_off()
    axes.grid(color="#e3e3e3", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path, run, phases=PHASES):
    """A panel for each phase, of problems that differ in ids or rows only."""
    by_ids = is_by_ids(run)
    canvas = Figure(figsize=(9.5, 3.9), layout="constrained", dpi=150)
    panels = canvas.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    unit = "microseconds per id" if by_ids else "ms"
    panels[0].set_ylabel(f"{unit}, median and quartiles")
    problem = run["results"][0]["problem"]
    kind = f"rows of {problem['dim']} {problem['dtype']}"
    if not by_ids:
        kind = f"{problem['ids']:,} Zipf ids, {kind}"
    for axes, phase in zip(panels, phases, strict=True):
        lines = series(run, phase, by_ids)
        draw_times(axes, lines)
        style(axes, lines, by_ids)
        axes.set_title(f"{TITLES[phase]}\n{kind}", fontsize=10, loc="left")
    # The step, the last one, has all names; optax's dense step is in no update.
    handles = axes.get_legend_handles_labels()
    canvas.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    there = run["environment"]
    machine = f"{there['device']}, {there['cores']} cores"
    canvas.suptitle(machine, fontsize=9, color="#555555")
    canvas.savefig(path)
