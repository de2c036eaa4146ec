"""The optional kernel: the numbers of the plain path, in place, and only where it may.

The tests' process has eight devices, so nothing in it uses the kernel by itself: the
functions are called directly, and what users see is tested in processes of one device.
"""

import json
import os
import shlex
import socket
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

from optax_sparse_adam import _adam_rows, _rows
from optax_sparse_adam.native import __main__, _build, _calls, _library

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
    not _build.compiler(), reason="there is no C++ compiler"
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
    factors = _adam_rows.Factors(*numbers)
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
    program = str(Path(__file__).with_name("_native_program.py"))
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    variables = {"XLA_FLAGS": flags, "XDG_CACHE_HOME": str(cache)} | environment
    result = python(program, *args, **variables)
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
    # Many tables at once take the plain path: those of the kernel would be copied.
    assert with_it["uses under vmap"] == []
    assert with_it["ensemble"] < TOLERANCE["float32"].torch
    for name in ("derivative", "gradient of many"):
        assert with_it[name] == pytest.approx(without[name], rel=1e-5)
    refused, exported = with_it["export"]
    assert "no compatibility guarantees" in refused
    assert exported == ""
    assert without["export"] == ["", ""]
    small, large = with_it["memory"]
    assert small == large
    temporary, alias = small
    assert alias == 4  # the count; the three tables are subtracted
    # The gradient's buffer, which becomes the update; its indices; some vectors of ids.
    assert temporary <= 4096 * (64 * 4 + 3 * 4) + 1024
    if hasattr(os, "sched_setaffinity"):
        on_one_core = run(cache, "--one-core")  # no deadlock, the same bits
        assert on_one_core["sparse_adam"] == with_it["sparse_adam"]


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Settings of a process with one CPU device, and nothing installed."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setattr(_library, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(_library, "loaded", _library.loaded.__wrapped__)
    return tmp_path / "installed"


@needs_compiler
def test_where_it_is_not_used(cache, alone, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert _library.available()
    assert _library.status().startswith("Used on CPUs: ")
    monkeypatch.setenv("XLA_FLAGS", "--a=b --xla_force_host_platform_device_count=2")
    assert not _library.available()
    assert "several CPU devices" in _library.status()
    monkeypatch.setenv("XLA_FLAGS", "file")  # which JAX has read: eight devices
    assert not _library.available()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_count", unittest.mock.Mock(side_effect=RuntimeError))
        assert not _library.available()  # no CPU among `jax_platforms`
    monkeypatch.delenv("XLA_FLAGS")
    assert _library.available()
    with monkeypatch.context() as patch:
        patch.setattr(jax.distributed, "is_initialized", lambda: True)
        assert not _library.available()
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", "0")
    assert not _library.available()
    assert "turns it off" in _library.status()


@needs_compiler
def test_which_library_is_taken(cache, alone, monkeypatch, tmp_path):
    """The newest, then the user's own; for this source and this interface."""
    (compiled,) = cache.glob("*/rows-*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own, (major, minor) = _library.cache(), _build.interface(jax.ffi.include_dir())
    assert compiled.name == _build.library_name((major, minor))
    own.mkdir()
    alone.mkdir()
    for version in ((major, minor + 1), (major + 1, 0), (major + 1, minor)):
        (own / _build.library_name(version)).write_bytes(b"not a library")
    (own / compiled.name.replace("rows-", "rows-0")).write_bytes(b"of older source")
    assert _library.loaded() is None
    assert "Not there" in _library.status()
    (alone / compiled.name).symlink_to(compiled)
    assert _library.loaded() == alone / compiled.name
    older = own / _build.library_name((major, minor - 1))
    older.symlink_to(compiled)
    assert _library.loaded() == alone / compiled.name
    (own / compiled.name).write_bytes(b"not a library")
    assert _library.loaded() == alone / compiled.name
    (alone / compiled.name).unlink()
    assert _library.loaded() == older
    older.unlink()
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded: .*Compile it anew"):
        assert not _library.available()
    (own / compiled.name).unlink()
    for folder in (own, alone):
        (folder / compiled.name).symlink_to(compiled)
    assert _library.loaded() == own / compiled.name


def test_name_says_what_a_library_was_compiled_from(tmp_path, monkeypatch):
    names = {_build.library_name((0, 3)), _build.library_name((0, 4))}
    other = tmp_path / "rows.cc"
    other.write_text(_build.SOURCE.read_text() + "\n")
    for target, value in {
        "platform.machine": lambda: "other",
        "sys.platform": "other",
        "optax_sparse_adam.native._build.FLAGS": "-O0",
        "optax_sparse_adam.native._build.SOURCE": other,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            names.add(_build.library_name((0, 3)))
    assert len(names) == 6


OTHER_HEADERS = """
import re
import sys
from pathlib import Path
import jax
from optax_sparse_adam.native import _build, _library
folder = Path(sys.argv[1])
for part in ("api.h", "c_api.h", "ffi.h"):
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", part).read_text()
    text = re.sub(r"XLA_FFI_API_MINOR \\d+", "XLA_FFI_API_MINOR 0", text)
    path = folder / "include" / "xla" / "ffi" / "api" / part
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
library = _build.compile_into(_library.cache(), folder / "include")
assert library.name.endswith("-0.0.so"), library
"""
REFUSED = """
import warnings
import jax.numpy as jnp
from optax_sparse_adam.native import _library
_library.INSTALLED = _library.cache() / "none"
with warnings.catch_warnings(record=True) as caught:
    assert not _library.available()
(warning,) = caught
assert "API version" in str(warning.message), warning
assert jnp.ones(3).sum() == 3
"""


@needs_compiler
def test_what_xla_refuses_does_not_stop_the_backend(tmp_path):
    """In a process that has not started JAX; all of the interfaces since 0.1 work."""
    variables = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""}
    for code in (OTHER_HEADERS, REFUSED):
        done = python("-c", code, str(tmp_path), **variables)
        assert done.returncode == 0, done.stderr


TRACED_FIRST = """
import sys
import jax
from jax.experimental.sparse import BCOO
import optax_sparse_adam as osa
from optax_sparse_adam.native import available

def update(data, indices, table):
    grad = BCOO((data, indices), shape=table.shape)
    tx = osa.sparse_adam(0.1)
    return tx.update(grad, tx.init(table))

array = jax.ShapeDtypeStruct
args = array((3, 2), "float32"), array((3, 1), "int32"), array((9, 2), "float32")
assert "adam_rows" in str(jax.jit(update).trace(*args).jaxpr)
jax.distributed.initialize("localhost:" + sys.argv[1], num_processes=1, process_id=0)
assert not available()  # other processes may hold parts of the tables
"""


@needs_compiler
def test_tracing_starts_no_backend(cache):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"XDG_CACHE_HOME": str(cache), "XLA_FLAGS": ""}
    done = python("-c", TRACED_FIRST, str(port), **variables)
    assert done.returncode == 0, done.stderr


def test_where_it_cannot_be_looked_for(tmp_path, alone, monkeypatch):
    """A user without a home, an unreadable cache, a jaxlib without headers."""
    monkeypatch.setenv("XDG_CACHE_HOME", "x" * 999)  # too long a name for a folder
    assert not _library.available()
    monkeypatch.delenv("XDG_CACHE_HOME")
    fails = {"side_effect": RuntimeError("Could not determine home directory.")}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", unittest.mock.Mock(**fails))
        assert not _library.available()
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert not _library.available()
    with pytest.raises(RuntimeError, match="jaxlib has no headers"):
        _library.build()
    (header,) = [tmp_path / "xla" / "ffi" / "api" / "c_api.h"]
    header.parent.mkdir(parents=True)
    header.touch()
    with pytest.raises(RuntimeError, match="No version of XLA's interface"):
        _library.build()


def python(*args, **environment):
    path = os.pathsep.join([os.getcwd(), *sys.path])
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def command(monkeypatch, *args):
    """What `python -m optax_sparse_adam.native` does, in this process."""
    monkeypatch.setattr(sys, "argv", ["native", *args])
    return __main__.main()


@needs_compiler
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_library, "INSTALLED", tmp_path)
    done = python("-m", "optax_sparse_adam.native", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    (library,) = tmp_path.glob("optax_sparse_adam/*")
    assert f"Compiled {library}" in done.stdout
    assert f"Used on CPUs: {library}" in done.stdout
    assert command(monkeypatch, "--status") == 0
    assert capsys.readouterr().out == f"{_library.status()}\n"
    assert command(monkeypatch, "--remove") == 0
    assert f"Deleted {library}" in capsys.readouterr().out
    assert command(monkeypatch, "--remove") == 0
    assert f"none in {library.parent}" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", "x" * 999)
    for args in ([], ["--remove"]):
        assert command(monkeypatch, *args) == 1
        assert capsys.readouterr().err.startswith("[Errno ")


# Compilers: one warns in the encoding of another country, one is for another machine.
WARNS = """
import subprocess, sys
sys.stderr.buffer.write(b"w\\xe4re")
sys.exit(subprocess.call(sys.argv[1:]))
"""
FOR_OTHERS = "import sys; open(sys.argv[-1], 'wb').write(b'no library')"


def as_compiler(program):
    return shlex.join([sys.executable, "-c", program])


@needs_compiler
def test_what_the_compiler_says_need_not_be_text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    command = f"{as_compiler(WARNS)} {shlex.join(_build.compiler())}"
    monkeypatch.setenv("CXX", command)
    assert _library.build().exists()


def test_on_windows(tmp_path, monkeypatch, capsys):
    """Where nobody has run it: said at once, whatever compiler there is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setattr(sys, "platform", "win32")
    assert _build.compiler() == []
    assert command(monkeypatch) == 1
    assert capsys.readouterr().err.startswith("On Windows the kernel is not compiled")
    assert command(monkeypatch, "--status") == 0
    assert capsys.readouterr().out == "Not used: on Windows there is none.\n"
    assert [*tmp_path.iterdir()] == []


def test_build_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler, words in {
        "no-such-compiler": "no-such-compiler could not be run",
        'c++ "': "CXX=.* is not a command: No closing quotation",
        as_compiler("import sys; sys.exit('no')"): "failed:\nno",
        as_compiler(FOR_OTHERS): "made what cannot be loaded: ",
    }.items():
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError, match=words):
            _library.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"No C\+\+ compiler found"):
        _library.build()
    assert [*tmp_path.glob("*/*")] == []
    assert command(monkeypatch) == 1
    assert capsys.readouterr().err.startswith("No C++ compiler found")
