"""The optional kernel: the numbers of the plain path, in place, and only where it may.

The tests' process has eight devices, so nothing in it uses the kernel by itself: the
functions are called directly, and what users see is tested in processes of one device.
"""

import json
import os
import subprocess
import sys
import unittest.mock
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import _rows, _sparse_adam
from optax_sparse_adam.native import _calls, _library

from ._support import (
    TOLERANCE,
    NumpyAdam,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
)

needs_compiler = pytest.mark.skipif(
    not _library.compiler(), reason="there is no C++ compiler"
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache folder with the compiled library in it, known to XLA."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        _library.register(_library.build())
    return folder


def sums(grad):
    return _rows.Rows(*_calls.sum_rows(grad))


@st.composite
def gradients(draw):
    """Tables of one to three radix digits, few and many duplicates, all ranks."""
    num_rows = draw(st.sampled_from([1, 2, 7, 2048, 2049, 5_000_000]))
    row_shape = draw(st.sampled_from([(), (1,), (5,), (64,), (2, 3)]))
    nse = draw(st.sampled_from([1, 2, 40, 700]))
    seed = draw(st.integers(0, 999))
    used = draw(st.sampled_from([1, 30, num_rows]))
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((nse, *row_shape)).astype(np.float32)
    values[rng.random(nse) < 0.2] = draw(st.sampled_from([0.0, -0.0, np.inf, np.nan]))
    low, high = draw(st.sampled_from([(0, 0), (-3, 3)]))
    indices = rng.integers(low, min(used, num_rows) + high, (nse, 1)).astype(np.int32)
    return bcoo(values, indices, (num_rows, *row_shape))


@needs_compiler
@hypothesis.settings(max_examples=20)
@hypothesis.given(gradients())
def test_sums_are_those_of_the_plain_path(cache, grad):
    assert_identical(jax.jit(sums)(grad), jax.jit(_rows._sums)(grad), "sums")


@needs_compiler
@pytest.mark.parametrize(("shape", "nse"), [((60, 5), 700), ((9, 2, 64), 3000)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_adam(cache, shape, nse, sign):
    """Against the formula in float64; rows that are not touched bit for bit."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape).astype(np.float32)
    expected = NumpyAdam(np.zeros(shape), lr=1.0, b1=0.8, b2=0.9, eps=1e-3)
    mu, nu = start, np.square(start)
    expected.mu, expected.nu = np.float64(mu), np.float64(nu)
    values, indices = random_entries(rng, shape, 1, nse, outside=True)
    indices[indices == 4] = 5
    rows = row_sums(values, indices, shape)
    expected.step({row: sign * value for row, value in rows.items()})
    size = np.sqrt(1 - 0.9) / (1 - 0.8)
    numbers = map(jnp.float32, (sign, 1 - 0.8, 1 - 0.9, 1e-3, -size))
    factors = _sparse_adam.Factors(*numbers)
    grad = bcoo(values, indices, shape)
    (ids, update, stop), moments = jax.jit(_calls.adam_rows)(grad, (mu, nu), factors)
    assert stop == len(rows)
    assert ids[: len(rows), 0].tolist() == [row for (row,) in rows]
    assert_identical(
        ids[len(rows) :, 0], np.arange(len(rows), nse, dtype=np.int32) + shape[0]
    )
    tol = TOLERANCE["float32"].numpy
    # A sum of two numbers is rounded relative to the larger one.
    assert_close(moments[0], expected.mu, tol, magnitude=np.abs(start) + 1)
    assert_close(moments[1], expected.nu, tol)
    touched = [row for (row,) in rows]
    assert_close(update[: len(rows)], expected.table[touched], 3 * tol, magnitude=5.0)
    assert not np.asarray(update[len(rows) :]).any()
    assert_identical((moments[0][4], moments[1][4]), (start[4], np.square(start[4])))


def run(cache, *args, **environment):
    program = Path(__file__).with_name("_native_program.py")
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    path = os.pathsep.join([os.getcwd(), *sys.path])
    variables = {"XLA_FLAGS": flags, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, str(program), *args],
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def arrays(hexes):
    return [np.frombuffer(bytes.fromhex(x), np.float32) for x in hexes]


@needs_compiler
def test_process_of_one_device(cache):
    """What it does by itself, and that it changes nothing but the time."""
    with_it = run(cache)
    without = run(cache, OPTAX_SPARSE_ADAM_NATIVE="0")
    assert with_it["uses"] == ["adam_rows"]
    assert without["uses"] == with_it["uses on a GPU"] == []
    # The sums of float16 values are float32, its moments are not.
    assert with_it["uses for others"] == [["sum_rows"], [], [], [], []]
    assert with_it["lazy"] == without["lazy"]
    assert with_it["rowwise_adam"] == without["rowwise_adam"]
    pairs = zip(*(arrays(x["sparse_adam"]) for x in (with_it, without)), strict=True)
    table, count, mu, nu = pairs
    assert_identical(*count)
    assert_close(*nu, TOLERANCE["float32"].torch)
    for a, b in (table, mu):  # of terms up to 1 that cancel
        assert_close(a, b, TOLERANCE["float32"].torch, magnitude=np.abs(b) + 1)
    assert with_it["ensemble"] is True
    assert with_it["derivative"] == pytest.approx(without["derivative"], rel=1e-5)
    small, large = with_it["memory"]
    assert small == large
    temporary, alias = small
    assert alias == 4  # the count; the three tables are subtracted
    # The gradient's buffer, which becomes the update; its indices; some vectors of ids.
    assert temporary <= 4096 * (64 * 4 + 3 * 4) + 1024
    on_one_core = run(cache, "--one-core")  # no deadlock, the same bits
    assert on_one_core["sparse_adam"] == with_it["sparse_adam"]


@needs_compiler
def test_where_it_is_not_used(cache, tmp_path, monkeypatch):
    available = _library.available.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert not available()  # eight devices
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    assert available()
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", "0")
    assert not available()
    monkeypatch.delenv("OPTAX_SPARSE_ADAM_NATIVE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not available()  # nothing there
    _library.path().parent.mkdir()
    _library.path().write_bytes(b"not a library")
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded .*Compile it anew"):
        assert not available()


def test_where_it_cannot_be_looked_for(tmp_path, monkeypatch):
    """A user without a home, an unreadable cache, no CPU among jax_platforms."""
    available = _library.available.__wrapped__
    fails = {"side_effect": RuntimeError("Unknown backend: 'cpu'")}
    monkeypatch.setattr(jax, "device_count", unittest.mock.Mock(**fails))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _library.path().parent.mkdir()
    _library.path().touch()
    assert not available()
    monkeypatch.setenv("XDG_CACHE_HOME", "x" * 999)  # too long a name for a folder
    assert not available()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unittest.mock.Mock(**fails))
    assert not available()


def command(*args, **environment):
    return subprocess.run(
        [sys.executable, "-m", "optax_sparse_adam.native", *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@needs_compiler
def test_command(tmp_path):
    here = {"XDG_CACHE_HOME": str(tmp_path)}
    done = command(**here)
    assert done.returncode == 0, done.stderr
    (library,) = tmp_path.glob("optax_sparse_adam/*")
    assert f"Compiled {library}" in done.stdout
    assert f"Deleted {library}" in command("--remove", **here).stdout
    assert f"none in {library.parent}" in command("--remove", **here).stdout
    for args in ([], ["--remove"]):
        done = command(*args, XDG_CACHE_HOME="x" * 999)
        assert done.returncode == 1
        assert done.stderr.startswith("[Errno ")


def test_build_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, words in {
        "no-such-compiler": "no-such-compiler could not be run",
        f"{sys.executable} -c 'import sys; sys.exit(\"no\")'": "failed:\nno",
    }.items():
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError, match=words):
            _library.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"No C\+\+ compiler found"):
        _library.build()
    assert [*tmp_path.glob("*/*")] == []
    done = command(XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("No C++ compiler found")


def test_package_works_without_it(tmp_path, monkeypatch):
    """No library, no compiler: nothing to see."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    grad = bcoo(np.ones((2, 3), np.float32), [[1], [1]], (4, 3))
    assert osa.coalesce(grad).data[0].tolist() == [2.0, 2.0, 2.0]
