"""The benchmark: the program as a user meets it."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from optax_sparse_adam import benchmark
from optax_sparse_adam.benchmark import (
    _environment,
    _measure,
    _program,
    _results,
    _startup,
)
from optax_sparse_adam.benchmark._problem import Problem

OURS, TORCH, DENSE = "sparse_adam", "torch SparseAdam", "optax.adam, dense"
SMALL = ["--rows", "3000", "--dim", "8", "--ids", "64", "--repeats", "4"]


@pytest.fixture(autouse=True)
def cheap_copies_without_rest(monkeypatch):
    monkeypatch.setattr(_environment, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(_measure, "_REST_SECONDS", 0)


@pytest.fixture(autouse=True)
def default_promotion():
    """`optax.adam`, which is measured as well, promotes types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One whole run with torch: its output and its files."""
    folder = tmp_path_factory.mktemp("run")
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    command = [sys.executable, "-m", "optax_sparse_adam.benchmark", *SMALL, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, folder


def read(folder):
    return json.loads((folder / "run.json").read_text())


def rows(stdout):
    """The cells of each line of times, by phase and name."""
    lines = re.findall(r"^  (update|step)  +(.+?)  +(\d.*)$", stdout, re.M)
    return {(phase, name): cells for phase, name, cells in lines}


def assert_shown(value, shown):
    """A number as it is printed, within its last digit."""
    unit = 10.0 ** -len(shown.partition(".")[2])
    assert abs(float(shown.replace(",", "")) - value) <= 0.51 * unit, (value, shown)


# --- a whole run ---


def test_the_table_is_what_the_file_holds(measured):
    stdout, folder = measured
    content, printed = read(folder), rows(stdout)
    (result,) = content["results"]
    times = {(m["phase"], m["name"]): m for m in result["measurements"]}
    assert list(printed) == [
        ("update", OURS),
        ("update", TORCH),
        ("step", OURS),
        ("step", TORCH),
        ("step", DENSE),
    ]
    assert set(printed) == set(times)
    rate = content["copy_bytes"] / np.median(content["copy_seconds"])
    for (phase, name), cells in printed.items():
        one = times[phase, name]
        seconds = np.array(one["seconds"])
        assert seconds.shape == (4,)
        assert (seconds > 0).all()
        expected = [*(1e3 * np.percentile(seconds, [50, 25, 75]))]
        for rival in (TORCH, DENSE) if name == OURS else ():
            if (phase, rival) in times:
                other = np.array(times[phase, rival]["seconds"])
                expected.append(np.median(seconds) / np.median(other))
                expected += [*np.percentile(seconds / other, [25, 75])]
        expected.append(100 * one["floor_bytes"] / rate / np.median(seconds))
        shown = re.findall(r"[\d.,]*\d", cells)
        for value, text in zip(expected, shown, strict=True):
            assert_shown(value, text)


def test_the_file_describes_itself(measured):
    stdout, folder = measured
    content = read(folder)
    (result,) = content["results"]
    assert Problem(**result["problem"]) == Problem(3000, 8, 64, "zipf", "float32")
    assert result["groups"] == [[OURS, TORCH, DENSE]]
    assert content["options"]["repeats"] == 4
    there = content["environment"]
    versions = there["versions"]
    assert set(versions) > {"jax", "jaxlib", "optax", "torch", "numpy"}
    for name, version in versions.items():
        assert re.search(rf"{name}\s+{re.escape(version)}", stdout), name
    assert versions["jax"] == jax.__version__
    assert f"{there['device']} (cpu), {there['cores']} cores, {there['os']}" in stdout
    assert f"{result['touched']:,} rows touched" in stdout
    assert re.fullmatch(r"cpu, \d+ threads", there["torch"])
    # A list of times is one line.
    assert len((folder / "run.json").read_text().splitlines()) < 120


def test_the_output_fits_a_terminal(measured):
    assert max(map(len, measured[0].splitlines())) <= 100


def test_the_plot(measured):
    assert (measured[1] / "run.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_file_is_printed_and_drawn_again(measured, capsys, monkeypatch):
    stdout, folder = measured
    monkeypatch.setattr(_program, "_measure_all", None)
    again = str(folder / "again.svg")
    options = ["--from", str(folder / "run.json"), "--plot", again]
    assert benchmark.main(options) == 0
    end = "\ntimes in"
    printed = capsys.readouterr().out
    assert printed.partition("\nplot in")[0] == stdout.partition(end)[0]
    drawing = (folder / "again.svg").read_text()
    for text in (OURS, TORCH, DENSE, "whole training step", "rows of the table", "3k"):
        assert f"<!-- {text} -->" in drawing, text


def test_without_torch_and_without_dense(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert benchmark.main([*SMALL, "--dense", "never"]) == 0
    out = capsys.readouterr().out
    assert "not installed; to compare with it, pip install torch" in out
    assert list(rows(out)) == [("update", OURS), ("step", OURS)]
    assert "\n3,000 x 8 float32, 64 zipf ids\n" in out
    assert "Nothing to compare with." in out


def test_what_does_not_fit_is_said_before_memory_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(_program, "draw", None)
    size = ["--rows", "200000000", "--dim", "1024", "--ids", "64"]
    assert benchmark.main([*size, "--no-torch", "--dense", "never"]) == 0
    out = capsys.readouterr().out
    # The table and two moments, 819.2 GB each, and no other array of this size.
    assert "sparse_adam: left out, needs 2,457.6 GB of memory, and may take" in out


def test_ctrl_c_keeps_what_was_measured(monkeypatch, capsys, tmp_path, measured):
    done = _results.load(measured[1] / "run.json").results
    results = iter(done)

    def stop_at_second(*args):
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(_program, "_measure", stop_at_second)
    path = tmp_path / "part.json"
    options = ["--rows", "3000", "4000", "--no-torch", "--repeats", "1"]
    assert benchmark.main([*options, "--json", str(path)]) == 130
    assert capsys.readouterr().err == "benchmark: interrupted\n"
    assert _results.load(path).results == done


def test_startup(monkeypatch, capsys):
    """Runs in this process what the program runs in new ones."""
    asked = []

    def here(code):
        asked.append(code)
        capsys.readouterr()
        exec(code, {})
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(_startup, "_run", here)
    monkeypatch.setattr(_startup, "_REPEATS", 1)
    problem = Problem(10**9, 8, 16, "zipf", "float32")
    monkeypatch.setattr(_startup, "_TABLE_BYTES", 100 * 8 * 4)
    times = _startup.measure(problem, OURS)
    assert list(times) == ["import", "compile", "first step"]
    for what in times.values():
        assert list(what) == [OURS, DENSE]
        assert all(len(x) == 1 and x[0] >= 0 for x in what.values())
    assert all(
        f"({name!r}, (100, 8, 16," in asked[i] for i, name in ((1, OURS), (2, DENSE))
    )


# --- what can go wrong ---

BAD = {
    "zero": ("--rows 0", "--rows must be a whole number from 1", "leave it out"),
    "second": ("--ids 8 many", "--ids must be a whole number", "got 'many'"),
    "fraction": ("--dim 1.5", "--dim must be a whole number", "got '1.5'"),
    "repeats": ("--repeats 0", "--repeats must be", "'0'; leave it out for 30"),
    "distribution": ("--distribution normal", "invalid choice: 'normal'", "zipf"),
    "type": ("--dtype int32", "invalid choice: 'int32'", "bfloat16"),
    "optimizer": ("--optimizer adam", "one of ", "got 'adam'", "lazy_adam"),
    "not an optimizer": ("--optimizer lazy_clip", "got 'lazy_clip'", "lazy_X"),
    "not lazy": ("--optimizer lazy_adafactor", "some rows", "use sparse_adafactor"),
    "dense": ("--dense maybe", "invalid choice: 'maybe'", "always"),
    "option": ("--row 5", "unrecognized arguments: --row 5", "see --help"),
    "plot": ("--plot a.bmp", "--plot must end in .png", "'a.bmp'", "a.png"),
    "json": ("--json {tmp}/no/a.json", "can be written", "No such file"),
    "no file": ("--from {tmp}/a.json", "that --json", "(No such file", "measure again"),
    "other file": ("--from {tmp}/other.json", "(something else); measure again"),
    "old file": ("--from {tmp}/old.json", "(something else); measure again"),
    "no json": ("--from {tmp}/text.json", "(something else); measure again"),
    "from and to": ("--from a.json --json {tmp}/b.json", "got both; leave one"),
}


@pytest.mark.parametrize(
    ("options", *["words"]), [(o, w) for o, *w in BAD.values()], ids=BAD
)
def test_bad_input_is_one_clear_line(options, words, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"results": []}')
    (tmp_path / "old.json").write_text('{"format": "optax_sparse_adam.benchmark 0"}')
    (tmp_path / "text.json").write_text("hello")
    argv = [option.format(tmp=tmp_path) for option in options.split()]
    assert benchmark.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("benchmark: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err


def test_a_missing_matplotlib_is_one_clear_line(monkeypatch, tmp_path, capsys):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    assert benchmark.main(["--plot", str(tmp_path / "a.png")]) == 2
    err = capsys.readouterr().err
    assert "benchmark needs matplotlib, which is not installed" in err
    assert 'pip install "optax-sparse-adam[benchmark]"' in err


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    options = set(re.findall(r"^  (--[a-z-]+)", out, re.M))
    assert {"--rows", "--dim", "--ids", "--sweep", "--json", "--from"} <= options
    assert "examples:" in out
    assert max(map(len, out.splitlines())) <= 90
