"""Time against the number of rows, or time per id against the number of ids, drawn."""

from contestants import DENSE, PHASES, TORCH
from matplotlib.figure import Figure
from problem import in_short
from report import spread

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


def series(run, by_ids):
    """The points of each kind of problem, phase and name.

    A point is the number of rows, median and quartiles in ms; or the number of ids,
    and the same in microseconds for each.
    """
    found = {}
    for result in run["results"]:
        problem = result["problem"]
        ids, kind = problem["ids"], f"rows of {problem['dim']} {problem['dtype']}"
        if not by_ids:
            kind = f"{ids:,} Zipf ids, {kind}"
        scale = 1e6 / ids if by_ids else 1e3
        for measured in result["measurements"]:
            panels = found.setdefault(kind, {phase: {} for phase in PHASES})
            points = panels[measured["phase"]].setdefault(measured["name"], [])
            times = (scale * x for x in spread(measured["seconds"]))
            points.append((ids if by_ids else problem["rows"], *times))
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


def draw(path, run):
    """Draws two panels, update and step, for each kind of problem."""
    by_ids = is_by_ids(run)
    kinds = series(run, by_ids)
    size = (9.5, 0.8 + 3.6 * len(kinds))
    canvas = Figure(figsize=size, layout="constrained", dpi=150)
    lines = canvas.subplots(max(1, len(kinds)), 2, squeeze=False, sharey="row")
    handles = {}
    for line, (kind, panels) in zip(lines, kinds.items(), strict=False):
        unit = "microseconds per id" if by_ids else "ms"
        line[0].set_ylabel(f"{unit}, median and quartiles")
        for axes, (phase, lines_of) in zip(line, panels.items(), strict=True):
            draw_times(axes, lines_of)
            style(axes, lines_of, by_ids)
            axes.set_title(f"{TITLES[phase]}\n{kind}", fontsize=10, loc="left")
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles[label] = handle
    canvas.legend(
        handles.values(), handles, loc="outside lower center", ncols=4, frameon=False
    )
    there = run["environment"]
    machine = f"{there['device']}, {there['cores']} cores"
    canvas.suptitle(machine, fontsize=9, color="#555555")
    canvas.savefig(path)
