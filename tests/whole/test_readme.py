"""The README is true: its code runs, its commands are the project's commands."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", _README, re.MULTILINE | re.DOTALL)
_PYTHON = [code for language, code in _BLOCKS if language == "python"]
_SHELL = [code for language, code in _BLOCKS if language == "sh"]


@pytest.mark.slow
def test_python_blocks_run_alone():
    """Each with names of its own; in one process, for the time of the imports."""
    assert _PYTHON
    program = f"for code in {_PYTHON!r}: exec(code, {{'__name__': '__main__'}})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_is_short():
    """The first block of Python ends within forty lines."""
    end = _README.index(_PYTHON[0]) + len(_PYTHON[0])
    assert _README[:end].count("\n") <= 40
    assert _README.count("\n") <= 150


def test_begins_with_the_main_job_and_ends_with_the_tests():
    languages = [language for language, _ in _BLOCKS]
    assert languages[:2] == ["sh", "python"]
    assert languages.count("sh") == 2
    assert languages[-1] == "sh"
    assert _SHELL[0].splitlines() == [
        "python -m venv .venv && . .venv/bin/activate",
        'pip install -e ".[examples]"',  # the clone's folder shadows another one
        "python examples/word2vec.py",
    ]
    assert "python -m pytest" in _SHELL[1]


def test_times_are_those_of_the_files():
    def medians(name):
        measured = json.loads((_ROOT / "benchmarks" / name).read_text(encoding="utf-8"))
        for result in measured["results"]:
            times = {
                m["name"]: 1e3 * statistics.median(m["seconds"])
                for m in result["measurements"]
                if m["phase"] == "step"
            }
            yield result["problem"], times

    (problem, kernel), *_ = medians("cpu.json")
    (_, plain), *_ = medians("cpu_plain.json")
    (_, optimizers), *_ = medians("cpu_optimizers.json")
    first = {"rows": 10**6, "dim": 64, "ids": 8192, "dtype": "float32", "draw": "zipf"}
    assert problem == first
    ours, torch, dense = "sparse_adam", "torch SparseAdam", "optax.adam, dense"
    share = optimizers["exact_adam"] / optimizers[ours]  # of one run
    text = " ".join(_README.split())
    for words in (
        f"takes {kernel[ours]:.1f} ms ({plain[ours]:.1f} without the C++ kernel)",
        f"torch's SparseAdam takes {kernel[torch]:.1f} and",
        f"dense `optax.adam` {kernel[dense]:.0f}.",
        f"With `exact_adam` it takes {share:.1f} times as long.",
    ):
        assert words in text


def test_ci_runs_the_second_block():
    script = (_ROOT / ".ci" / "run").read_text(encoding="utf-8")
    line = next(x for x in script.splitlines() if x.startswith("block=$("))
    done = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\n" "$block"'],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == _SHELL[1]
