"""What was measured, and the JSON file that holds it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from .._command_line import InputError
from ._problem import Problem

_FORMAT = "optax_sparse_adam.benchmark 1"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The times of one contestant in one phase, one for each round.

    Attributes:
      phase: `"update"` or `"step"`.
      name: The contestant.
      memory_bytes: Parameters, state, batch and temporary memory.
      floor_bytes: What must be moved.
      seconds: In the order of the rounds.
    """

    phase: str
    name: str
    memory_bytes: int
    floor_bytes: int
    seconds: list[float]


@dataclasses.dataclass(frozen=True)
class Result:
    """A problem, measured.

    Attributes:
      problem: The size.
      touched: Different rows in a batch, averaged.
      groups: Names of those that took turns, one group after the other.
      skipped: Names of those that were left out, and why.
      measurements: All times.
    """

    problem: Problem
    touched: int
    groups: list[list[str]]
    skipped: dict[str, str]
    measurements: list[Measurement]


@dataclasses.dataclass
class Run:
    """A run of the program.

    Attributes:
      environment: See `_environment.describe`; and where torch runs.
      options: The command line, defaults included.
      copy_bytes: Read and written by a copy on the device.
      copy_seconds: Times of such copies.
      startup: See `_startup.measure`; empty if it was not asked for.
      results: One for each problem.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    copy_bytes: int
    copy_seconds: list[float]
    startup: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    results: list[Result] = dataclasses.field(default_factory=list)


def save(run: Run, path: Path) -> None:
    """Writes a run, the numbers of a list in one line."""
    content = {"format": _FORMAT, "unit": "seconds", **dataclasses.asdict(run)}
    for result, written in zip(run.results, content["results"], strict=True):
        written["problem"] = result.problem._asdict()
    text = json.dumps(content, indent=1)
    flat = re.compile(r"\[[^][{}]*\]")
    text = flat.sub(lambda match: re.sub(r"\s+", " ", match[0]), text)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Run:
    """Reads what `save` wrote.

    Raises:
      InputError: If the file holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise KeyError("format")
        content.pop("unit")
        results = [_result(**result) for result in content.pop("results")]
        return Run(**content, results=results)
    except OSError as error:
        found = error.strerror
    except (ValueError, KeyError, TypeError, AttributeError):
        found = "something else"
    raise InputError(
        f"--from must be a file that --json of this version wrote, got {str(path)!r} "
        f"({found}); measure again"
    )


def _result(problem: Any, measurements: Any, **rest: Any) -> Result:
    return Result(
        problem=Problem(**problem),
        measurements=[Measurement(**measurement) for measurement in measurements],
        **rest,
    )
