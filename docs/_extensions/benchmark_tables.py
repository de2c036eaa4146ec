"""`benchmark-table`: a table of times from files of `benchmarks/`, made by the build.

    ```{benchmark-table} cpu.json cpu_plain.json
    ```

One row for each phase, contestant and file, one column for each problem. A cell holds
the median of the rounds in milliseconds, and in brackets the share of torch's time in
the same rounds: its median, and its quartiles.
"""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[2] / "benchmarks"
_TORCH = "torch SparseAdam"


class Row(NamedTuple):
    head: str
    cells: list[str]


def _cell(seconds: list[float], torch: list[float] | None) -> str:
    milliseconds = 1e3 * statistics.median(seconds)
    cell = f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"
    if torch is None or torch is seconds or len(torch) != len(seconds):
        return cell
    shares = sorted(a / b for a, b in zip(seconds, torch, strict=True))
    low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
    return f"{cell} ({middle:.2f}, {low:.2f} to {high:.2f})"


def _problem(problem: dict[str, Any]) -> str:
    return f"{problem['rows']:,} x {problem['dim']}, {problem['ids']:,} ids"


def read(path: Path) -> dict[str, list[Row]]:
    """The rows of the tables of a file, by phase; the first one has the problems."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    kernel = "kernel" if measured["environment"]["kernel"] else "plain JAX"
    tables: dict[str, dict[str, list[str]]] = {}
    heads = [_problem(result["problem"]) for result in measured["results"]]
    for column, result in enumerate(measured["results"]):
        times = {(m["phase"], m["name"]): m["seconds"] for m in result["measurements"]}
        for (phase, name), seconds in times.items():
            ours = not name.startswith(("torch", "optax"))
            head = f"{name}, {kernel}" if ours else name
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
                tables[phase] = [*tables.get(phase, []), *self._new(rows, tables)]
        return [_table(rows) for rows in tables.values()]

    def _new(self, rows: list[Row], tables: dict[str, list[Row]]) -> list[Row]:
        """Of a further file only our own times: the others are those of the first."""
        if not tables:
            return rows
        first = next(iter(tables.values()))[0].cells
        if rows[0].cells != first:
            raise self.error(f"These files have other problems: {rows[0].cells}")
        return [row for row in rows[1:] if row.head.endswith(("kernel", "JAX"))]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("benchmark-table", BenchmarkTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
