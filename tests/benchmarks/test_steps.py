"""benchmarks/steps.py: as a user meets it, who takes turns, and what is said."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import machine
import numpy as np
import pytest
import report
import steps
import turns
from contestants import DENSE, TORCH, InJax, InTorch
from problem import Problem, draw

from ..helpers.support import TOLERANCE, Magnitude

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"
OURS = "sparse_adam"
PROBLEM = Problem(300, 8, 64, "float32")


@pytest.fixture(autouse=True)
def default_promotion():
    """`optax.adam`, which is measured as well, promotes types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def without_rest(monkeypatch):
    monkeypatch.setattr(turns, "REST_SECONDS", 0)


# --- a whole run ---


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One whole run with torch: its output and its files."""
    folder = tmp_path_factory.mktemp("run")
    size = ["--rows", "3000", "--dim", "8", "--ids", "64", "--repeats", "4", "--busy"]
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    command = [sys.executable, str(FOLDER / "steps.py"), *size, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_the_table_is_what_the_file_holds(measured):
    stdout, folder = measured
    content = json.loads((folder / "run.json").read_text())
    lines = re.findall(r"^  (update|step)  +(.+?)  +(\d.*)$", stdout, re.M)
    printed = {(phase, name): cells for phase, name, cells in lines}
    (result,) = content["results"]
    times = {(m["phase"], m["name"]): m for m in result["measurements"]}
    both = [(phase, name) for phase in ("update", "step") for name in (OURS, TORCH)]
    assert list(printed) == [*both, ("step", DENSE)]
    assert set(printed) == set(times)
    rate = content["copy_bytes"] / np.median(content["copy_seconds"])
    for (phase, name), cells in printed.items():
        seconds = np.array(times[phase, name]["seconds"])
        assert seconds.shape == (4,)
        expected = [*(1e3 * np.percentile(seconds, [50, 25, 75]))]
        for rival in (TORCH, DENSE) if name == OURS else ():
            if (phase, rival) in times:
                other = np.array(times[phase, rival]["seconds"])
                expected.append(np.median(seconds) / np.median(other))
                expected += [*np.percentile(seconds / other, [25, 75])]
        floor = times[phase, name]["floor_bytes"]
        expected.append(100 * floor / rate / np.median(seconds))
        for value, shown in zip(expected, re.findall(r"[\d.,]*\d", cells), strict=True):
            last_digit = 10.0 ** -len(shown.partition(".")[2])
            assert abs(float(shown.replace(",", "")) - value) <= 0.51 * last_digit
    assert f"{result['touched']:,} rows touched" in stdout
    assert f"jax {jax.__version__}" in stdout
    assert re.search(r"^load +(\d\.\d\d of \d+ cores taken|unknown)", stdout, re.M)
    # Times of a busy machine and shares below a tenth take more digits in the table.
    texts = re.sub(r"^  (update|step|[\d,]+ rows) .*\n", "", stdout, flags=re.M)
    assert max(map(len, texts.splitlines())) <= 100
    assert max(map(len, stdout.splitlines())) <= 120
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_file_is_printed_and_drawn_again(measured):
    stdout, folder = measured
    command = [sys.executable, str(FOLDER / "report.py"), str(folder / "run.json")]
    options = ["--plot", str(folder / "again.svg")]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.stdout == stdout
    drawing = (folder / "again.svg").read_text()
    for text in (OURS, TORCH, DENSE, "whole training step", "rows of the table", "3k"):
        assert f"<!-- {text} -->" in drawing, text


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_results_in_the_repository_can_be_read(path):
    run = report.load(path)
    assert report.verdict(run).startswith("Against torch: faster in ")
    assert all(report.table(run, result) for result in run["results"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rows 0", "a whole number from 1"),
        ("--ids 8 many", "got 'many'"),
        ("--optimizer adam", "rowwise_adagrad, or lazy_X"),
        ("--optimizer lazy_adafactor", "use sparse_adafactor"),
        ("--plot a.bmp", "must end in .png"),
        ("--shapes 5x6", "a shape is ROWSxDIMxIDS"),
        ("--shapes 5x6x7 --ids 8", "not together with"),
        ("--json no/a.json", "there is no folder no"),
    ],
)
def test_bad_input_is_one_clear_line(options, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        steps.main(options.split())
    assert words in capsys.readouterr().err.splitlines()[-1]


# --- a busy machine ---


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr(machine.OtherPrograms, "cores", lambda self: 1.3)
    monkeypatch.setattr(steps, "measure", None)
    with pytest.raises(
        SystemExit, match=r"1\.30 of .* cores; times would mean nothing"
    ):
        steps.main(["--rows", "3000"])


def run_of(times, others=0.0):
    """A run of one problem with these times, by phase and name."""
    measurements = [
        {
            "phase": phase,
            "name": name,
            "memory_bytes": 10**9,
            "floor_bytes": 6400,
            "seconds": seconds,
        }
        for (phase, name), seconds in times.items()
    ]
    names = [name for _, name in times]
    result = {
        "problem": Problem(1000, 16, 8, "float32")._asdict(),
        "touched": 7,
        "groups": [names[:1], names[1:]],
        "skipped": {"x": "why"},
        "others": others,
        "measurements": measurements,
    }
    return {
        "environment": {"cores": 2},
        "options": {"repeats": 3},
        "copy_bytes": 10**6,
        "copy_seconds": [0.1],
        "results": [result],
    }


def test_a_share_of_nothing_is_not_to_be_trusted():
    """Torch's threads had to wait for a core: 400 times its time, and no word of it."""
    times = {("step", OURS): [1.0, 1.0, 1.0], ("step", TORCH): [400.0, 400.0, 410.0]}
    for others, trusted in ((0.0, True), (1.2, False), (None, True)):
        run = run_of(times, others)
        table = report.table(run, run["results"][0])
        assert "0.0025 [0.0025, 0.0025]" in table
        assert ("NOT TO BE TRUSTED: 1.20 of 2 cores" in table) != trusted
        verdict = report.verdict(run)
        assert verdict.startswith(
            "Against torch" if trusted else "No verdict on 1 of 1"
        )
    run = run_of(times | {("step", TORCH): [1.0, 400.0, 400.0]})
    table = report.table(run, run["results"][0])
    assert (
        "NOT TO BE TRUSTED: the quartiles of torch SparseAdam lie far apart"
        not in table
    )
    run = run_of(times | {("step", TORCH): [1.0, 2.0, 400.0]})
    table = report.table(run, run["results"][0])
    assert "NOT TO BE TRUSTED: the quartiles of torch SparseAdam lie far apart" in table


# --- who is measured, and on what ---


@functools.cache
def compiled(name, problem=PROBLEM):
    return InJax(name, problem)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_compute_the_same(dtype):
    """The guard of the benchmark: ours and torch's table agree after the same turns."""
    problem = PROBLEM._replace(dtype=dtype)
    batches = draw(problem)
    with jax.enable_x64(dtype == "float64"):
        ours, theirs = compiled(OURS, problem), InTorch(problem, torch, "cpu")
        group = turns.Turns([ours, theirs], batches)
        group.run(repeats=4)
    assert {len(seconds) for seconds in group.seconds.values()} == {4}
    table = Magnitude(1.0)  # the table began with ones
    table.check(ours.table(), theirs.table(), TOLERANCE[dtype].torch, what="table")
    # 24 steps of at most 0.001 or so, in the rows of the batches and no others.
    moved = np.abs(ours.table() - 1).max(axis=1)
    assert set(np.flatnonzero(moved)) == set(np.concatenate(batches.ids).tolist())
    assert 0.005 < moved.max() < 0.02
    group.stop()


def test_the_dense_step_is_adam_on_a_dense_gradient():
    batches, dense = draw(PROBLEM), compiled(DENSE)
    assert dense.phases == ("step",)
    dense.start(batches)
    embedding = torch.nn.Embedding(300, 8, _weight=torch.ones(300, 8))
    adam = torch.optim.Adam(embedding.parameters(), lr=1e-3)
    weights = torch.from_numpy(batches.weights)
    for number in range(3):
        dense.run("step", number)
        adam.zero_grad()
        rows = embedding(torch.from_numpy(batches.ids[number]))
        torch.nn.functional.softplus(rows @ weights).mean().backward()
        adam.step()
    expected = embedding.weight.detach().numpy()
    assert np.abs(expected - 1).max() > 2e-3
    # One step is 1e-3 of gradient over root; both come from sums in another order.
    np.testing.assert_allclose(dense.table(), expected, rtol=0, atol=1e-6)
    dense.stop()


# --- the turns ---


class Fake:
    """Takes no time and writes down what it is asked to do."""

    phases = ("update", "step")

    def __init__(self, name, log=None, fails=None):
        self.name, self.fails = name, fails
        self.log = [] if log is None else log

    def start(self, batches):
        self.log.append((self.name, "start"))

    def run(self, phase, batch):
        self.log.append((self.name, phase, batch))
        if self.fails == (phase, batch):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore lines")

    def stop(self):
        self.log.append((self.name, "stop"))


def test_turns_alternate():
    log = []
    group = turns.Turns([Fake("a", log=log), Fake("b", log=log)], None)
    group.run(repeats=3)
    group.stop()
    assert log[:2] == [("a", "start"), ("b", "start")]
    assert log[-2:] == [("a", "stop"), ("b", "stop")]
    rounds = [log[2 + i : 10 + i] for i in range(0, len(log) - 4, 8)]
    assert len(rounds) == 2 + 3
    order = iter(("ba", "ab", "ab", "ba", "ba"))
    for number, one in enumerate(rounds, -2):
        first, second = next(order)
        assert one == [
            (name, phase, (number + shift + before) % 8)
            for phase, shift in (("update", 0), ("step", 4))
            for name in (first, second)
            for before in (-1, 0)  # the run before is not timed
        ]
    assert all(len(seconds) == 3 for seconds in group.seconds.values())


def test_who_runs_out_of_memory_leaves():
    failing, other = Fake("a", fails=("step", 6)), Fake("b")
    group = turns.Turns([failing, other], None)
    group.run(repeats=4)
    assert group.skipped == {"a": "RESOURCE_EXHAUSTED: out of memory"}
    assert failing.log[-1] == ("a", "stop")
    assert len(group.seconds["step", "a"]) == 2
    assert len(group.seconds["step", "b"]) == 4


# --- what is said ---


def test_the_verdict_says_where_we_lose():
    run = run_of(
        {
            ("update", OURS): [2.0, 2.1, 2.2],
            ("update", TORCH): [1.0, 1.0, 1.0],
            ("step", OURS): [1.0, 1.0, 1.0],
            ("step", TORCH): [2.0, 1.0, 0.9],
            ("step", DENSE): [9.0, 9.0],
        }
    )
    where = "1,000 x 16 float32, 8 ids"
    assert report.verdict(run).splitlines() == [
        "Against torch: faster in 0 of 2 rows.",
        f"  SLOWER: update, sparse_adam, {where}: 2.10 [2.05, 2.15]",
        f"  no clear difference: step, sparse_adam, {where}: 1.00 [0.75, 1.06]",
        "Against optax.adam: faster in 1 of 1 rows.",
    ]
    table = report.table(run, run["results"][0])
    assert "  step, optax.adam, dense: 2 rounds only" in table
    assert "  x: left out, why" in table
    assert "  too large to take turns all together: sparse_adam; then " in table
