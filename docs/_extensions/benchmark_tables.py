"""`benchmark-table`: a table of times from files of `benchmarks/`, made by the build.

    ```{benchmark-table} cpu.json cpu_plain.json
    ```

A table for each phase; one row for each contestant and file, one column for each
problem. A cell holds the median of the rounds in milliseconds, and in brackets the
share of torch's median in the same run, with the quartiles of the shares of each round.
"""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[2] / "benchmarks"
_TORCH = "torch SparseAdam"
_OURS = ("kernel", "plain JAX")


class Row(NamedTuple):
    head: str
    cells: list[str]


def _cell(seconds: list[float], torch: list[float] | None) -> str:
    milliseconds = 1e3 * statistics.median(seconds)
    cell = f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"
    if torch is None or torch is seconds or len(torch) != len(seconds):
        return cell
    shares = [a / b for a, b in zip(seconds, torch, strict=True)]
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    share = statistics.median(seconds) / statistics.median(torch)
    return f"{cell} ({share:.2f}, {low:.2f} to {high:.2f})"


def _heads(problems: list[dict[str, Any]]) -> list[str]:
    """What differs between the problems, in short."""

    def size(rows: int) -> str:
        return f"{rows // 1_000_000}M" if rows >= 1_000_000 else f"{rows // 1_000}k"

    heads = [f"{size(x['rows'])} x {x['dim']}" for x in problems]
    if len({x["ids"] for x in problems}) == 1:
        return heads
    return [f"{h}, {x['ids']:,} ids" for h, x in zip(heads, problems, strict=True)]


def read(file: Path) -> dict[str, list[Row]]:
    """The rows of the tables of a file, by phase; the first one has the problems."""
    measured = json.loads(file.read_text(encoding="utf-8"))
    path = _OURS[0] if measured["environment"]["kernel"] else _OURS[1]
    tables: dict[str, dict[str, list[str]]] = {}
    heads = _heads([result["problem"] for result in measured["results"]])
    for column, result in enumerate(measured["results"]):
        times = {(m["phase"], m["name"]): m["seconds"] for m in result["measurements"]}
        for (phase, name), seconds in times.items():
            ours = not name.startswith(("torch", "optax"))
            head = f"{name}, {path}" if ours else name
            row = tables.setdefault(phase, {}).setdefault(head, ["-"] * len(heads))
            row[column] = _cell(seconds, times.get((phase, _TORCH)) if ours else None)
    return {
        phase: [Row(phase, heads), *(Row(*row) for row in rows.items())]
        for phase, rows in tables.items()
    }


def _table(rows: list[Row]) -> nodes.table:
    table = nodes.table(classes=["benchmark"])
    group = nodes.tgroup(cols=1 + len(rows[0].cells))
    table += group
    group += [nodes.colspec(colwidth=1) for _ in range(group["cols"])]
    head, body = nodes.thead(), nodes.tbody()
    group += [head, body]
    for number, (first, cells) in enumerate(rows):
        row = nodes.row()
        (body if number else head).append(row)
        for text in (first, *cells):
            row += nodes.entry("", nodes.paragraph("", text))
    return table


class BenchmarkTable(SphinxDirective):
    required_arguments = 1
    optional_arguments = 8

    def run(self) -> list[nodes.Node]:
        tables: dict[str, list[Row]] = {}
        for name in self.arguments:
            self.env.note_dependency(str(FOLDER / name))
            for phase, rows in read(FOLDER / name).items():
                if name == self.arguments[0]:
                    tables[phase] = rows
                elif rows[0] != tables[phase][0]:
                    raise self.error(f"{name} has other problems: {rows[0].cells}")
                else:  # ours only: the others' times are those of the first file
                    tables[phase] += [x for x in rows[1:] if x.head.endswith(_OURS)]
        return [_table(rows) for rows in tables.values()]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("benchmark-table", BenchmarkTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
