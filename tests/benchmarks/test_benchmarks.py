"""The programs of benchmarks/: they run, and who is compared computes the same."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import gpu
import jax
import large_graph
import numpy as np
import pytest
import report
import turns
import wheels
import words
from contestants import DENSE, TORCH, InJax, InTorch
from problem import DRAWS, Problem, draw

from ..helpers import gpu_selection
from ..helpers.support import TOLERANCE, WEEKLY, Magnitude, program_environment

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"
GPU_FILE, GPU_PAGE = FOLDER / "gpu.json", FOLDER.parent / "docs" / "gpu.md"
PROBLEM = Problem(300, 8, 64, "float32")


@pytest.fixture(autouse=True)
def default_promotion():
    """`optax.adam`, which is measured as well, promotes types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def printed(script, *args, **environment):
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *args],
        env=program_environment() | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_apart():
    args = "--rounds", "4", "--shapes", "300x8x64"
    stdout = printed("apart.py", "exact_adam", "sparse_adam", *args)
    assert re.search(r"\| 300 x 8 x 64 \| [\d.]+ \| [\d.]+ \| [\d.]+ \(", stdout)


def test_steps(tmp_path):
    file, plot = str(tmp_path / "run.json"), str(tmp_path / "run.png")
    size = ["--rows", "3000", "--dim", "8", "--ids", "64", "--repeats", "4", "--busy"]
    stdout = printed("steps.py", *size, "--json", file)
    (result,) = json.loads(Path(file).read_text())["results"]
    for measured in result["measurements"]:
        assert len(measured["seconds"]) == 4
        median = report.digits(1e3 * np.median(measured["seconds"]))
        assert f"| {measured['name']} | {median} " in stdout
    names = [(m["phase"], m["name"]) for m in result["measurements"]]
    both = [
        (phase, name) for name in ("sparse_adam", TORCH) for phase in ("update", "step")
    ]
    assert names == [*both, ("step", DENSE)]
    # Table and two moments of 8 float32, read and written; 64 rows of a gradient.
    touched = 2 * result["touched"] * 3 * 32
    least = [touched + 64 * 32, touched] * 2 + [2 * 3000 * 3 * 32]
    assert [m["least_bytes"] for m in result["measurements"]] == [
        # The state's count is rounded away: four bytes in 3,000 rows.
        *least
    ]
    assert stdout.count("of what memory allows") == len(names)
    table = stdout[stdout.index("| update") :].partition("\n\n")[0]
    assert table in printed("report.py", file, "--only", "k x 8", "--plot", plot)
    both = Path(plot).read_bytes()
    printed("report.py", file, "--plot", plot, "--phase", "step")
    assert Path(plot).read_bytes() != both
    assert both.startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    "command",
    [
        "bags.py --tables 2 --rows 50 --dim 3 --bags 4 --ids 2 --repeats 1",
        *(["compile_times.py 8"] if WEEKLY else []),
        "keras_fit.py --rows 90 300 --dim 3 --bags 4 --ids 2 --steps 4 --turns 2",
    ],
)
def test_other_programs(command):
    if "keras" in command:
        pytest.importorskip("keras")
    lines = printed(*command.split()).splitlines()
    assert len({x.count("|") for x in lines if x.startswith("|")}) == 1


def test_gpu(tmp_path):
    """All parts at tiny sizes; the tables of its file, and the page that has them."""
    file = tmp_path / "gpu.json"
    stdout = printed("gpu.py", "--tiny", "--json", str(file))
    content = json.loads(file.read_text())
    states = {x["state"] for x in content["parts"].values()}
    assert states == {"done"}, stdout
    assert [*content["parts"]] == [x for x in gpu.PARTS if x != "tests"]
    assert not any("error" in x for x in content["records"])
    assert content["deaths"] == []
    assert all(x["ok"] for x in content["records"] if x["part"] == "checks")
    tables = gpu.table.tables(content)
    assert tables in stdout
    assert tables.count("| sparse_adam |") == 5
    assert "| kernel |" in tables
    assert gpu.TABLE.search(GPU_PAGE.read_text(encoding="utf-8"))


def test_a_process_that_dies_is_followed_by_another(tmp_path, monkeypatch):
    """Which begins with the next part."""
    file, died = tmp_path / "gpu.json", []
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "child.py").write_text(
        "import json, sys; file = sys.argv[3]; content = json.load(open(file))\n"
        "part = sys.argv[sys.argv.index('--only') + 1]\n"
        "content['parts'][part] = {'state': 'began'}\n"
        "json.dump(content, open(file, 'w')); sys.exit(part != 'small')\n"
    )
    gpu.write(file, {"parts": {}, "deaths": died, "records": []})
    args = types.SimpleNamespace(json=file, until=2e9 * 2, tiny=True, quick=False)
    gpu.run_in_children(args, ["update", "bags", "small", "cross"])
    content = gpu.read(file)
    assert [*content["parts"]] == ["update", "bags", "small"]
    assert [x["part"] for x in content["deaths"]] == ["update", "bags"]
    assert "exit status 1" in content["deaths"][0]["why"]


def test_the_page_on_gpus_has_the_tables_of_its_file():
    tables = gpu.table.tables(json.loads(GPU_FILE.read_text(encoding="utf-8")))
    assert tables in GPU_PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("selection", ["whole", "core"])
def test_the_tests_for_a_gpu_are_there(selection):
    """What a machine with a GPU is asked to run is collected here."""
    options = "--collect-only", "-n0", "--dist=no"
    done = subprocess.run(
        gpu_selection.command(selection, *options),
        cwd=FOLDER.parent,
        env=gpu_selection.environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    is_whole = selection == "whole"
    for file in gpu_selection.WHOLE:
        assert (file in done.stdout) == is_whole, file
    for folder in () if is_whole else gpu_selection.FOLDERS:
        assert f"{folder}/test_" in done.stdout, folder


@pytest.mark.parametrize("path", sorted(FOLDER.glob("cpu*.json")), ids=lambda p: p.stem)
def test_results_in_the_repository_can_be_read(path):
    run = report.load(path)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    if not path.stem.endswith("_plain"):
        plain = path.with_stem(f"{path.stem}_plain")
        runs = [run, *([report.load(plain)] if plain.exists() else [])]
        assert all(table in text for table in report.tables(runs))


def test_times_of_a_busy_machine_are_not_trusted():
    """Torch's threads had to wait for a core: 400 times its time, and no word of it."""
    measured = [
        {"phase": "step", "name": name, "seconds": [time] * 3}
        for name, time in (("sparse_adam", 1.0), (TORCH, 400.0))
    ]
    result = {"problem": PROBLEM._asdict(), "measurements": measured, "others": 1.2}
    run = {"environment": {"cores": 2}}
    assert report.distrust(run, result) == "others took 1.20 of 2 cores"
    assert report.distrust(run, result | {"others": 0.0}) == ""


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_compute_the_same(name, dtype, monkeypatch):
    """The guard of the benchmark: ours and torch's table agree after the same turns."""
    monkeypatch.setattr(turns, "REST_SECONDS", 0)
    problem = PROBLEM._replace(dtype=dtype, draw=name)
    batches = draw(problem)
    with jax.enable_x64(dtype == "float64"):
        ours, theirs = InJax("sparse_adam", problem), InTorch(problem, torch, "cpu")
        group = turns.Turns([ours, theirs], batches)
        group.run(repeats=4)
    assert {len(seconds) for seconds in group.seconds.values()} == {4}
    table = Magnitude(1.0)  # the table began with ones
    table.check(ours.table(), theirs.table(), TOLERANCE[dtype].torch, what="table")
    # 24 steps of at most 0.001 or so, in the rows of the batches and no others.
    moved = np.abs(ours.table() - 1).max(axis=1)
    assert set(np.flatnonzero(moved)) == set(np.concatenate(batches.ids).tolist())
    assert 0.005 < moved.max() < 0.0245


def test_quality():
    """One cell: as published, and exact Adam as dense, with data from a wheel."""
    pytest.importorskip("tqdm")
    try:
        wheels.find_wheel("pykeen")
    except SystemExit as error:
        pytest.skip(str(error))
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}  # a training, not a trial
    stdout = printed("quality.py", "--quick", **optimized)
    assert stdout.endswith("all as they should be\n")


@pytest.mark.skipif(
    not WEEKLY, reason="takes half a minute: OPTAX_SPARSE_ADAM_TEST_WEEKLY=1"
)
def test_large_graph(tmp_path):
    """Everybody trains; what is ranked is what was held out; both are drawn."""
    pytest.importorskip("tqdm")
    plot = tmp_path / "graph.png"
    size = ["--rows", "3000", "--seconds", "0.2", "--plot", str(plot)]
    stdout = printed("large_graph.py", *size)
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    rows = re.findall(r"^(.{20}) +([\d.]+) .* (0\.\d{4})$", stdout, re.MULTILINE)
    assert [name.strip() for name, *_ in rows] == large_graph.NAMES, stdout
    assert all(float(mrr) > 0.04 for *_, mrr in rows)  # by chance: 0.052


def test_measures_of_words():
    """Spearman's correlation, with ties, against SciPy's definition by loops."""
    values = np.array([3.0, 1.0, 3.0, 2.0])
    np.testing.assert_array_equal(words.ranks(values), [3.5, 1.0, 3.5, 2.0])
    lines = ["# a comment", "a\tb\t9", "a\tc\t1", "b\tc\t5", "a\tunknown\t2"]
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [0.2, 1.0]])
    found = words.similarity(vectors, {"a": 0, "b": 1, "c": 2}, lines)
    assert found == (pytest.approx(1.0), 3)  # cosines 1.00, 0.20, 0.29


def test_vectors_of_words(monkeypatch):
    """What stands beside gensim trains on the pairs of its epochs."""
    pytest.importorskip("tqdm")
    rng = np.random.default_rng(0)
    pieces = [rng.integers(50, size=200) for _ in range(20)]
    monkeypatch.setattr(words, "BATCH", 256)
    counts = np.bincount(np.concatenate(pieces), minlength=50)
    vectors, seconds = words.by_ours("exact_adam", pieces, counts, 1, 0)
    assert vectors.shape == (50, 100)
    assert np.all(np.isfinite(vectors))
    assert seconds > 0


def test_keys():
    stdout = printed("keys.py", "--rows", "3000", "--keys", "256", "--dim", "8")
    calls, steps, pipeline = stdout.split("\n\n")[1:]
    assert calls.count("\n| `assign`") == 4
    assert steps.count("\n| b") == 3
    assert "| before the block | " in steps
    assert "| in `prepare` | " in pipeline
