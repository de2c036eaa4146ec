"""The optional kernel: how it is compiled, found, and done without."""

import re
import shlex
import shutil
import sys
import unittest.mock
from pathlib import Path

import jax
import pytest

from optax_sparse_adam import native
from optax_sparse_adam.native import __main__, _build, _library

from ..helpers.native import compile_once, needs_compiler, python

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def once(monkeypatch):
    compile_once(monkeypatch)


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
    with pytest.warns(RuntimeWarning, match=r"not compiled .* -m optax_sparse_adam"):
        assert _library.loaded() is None
    monkeypatch.setenv("CXX", "no-such-compiler '")
    assert _library.loaded() is None  # without a word: it cannot be had
    monkeypatch.delenv("CXX")
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
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded: .*Compile it again"):
        assert not _library.available()
    (own / compiled.name).unlink()
    for folder in (own, alone):
        (folder / compiled.name).symlink_to(compiled)
    assert _library.loaded() == own / compiled.name


def test_name_says_what_a_library_was_compiled_from(tmp_path, monkeypatch):
    names = {_build.library_name((0, 3)), _build.library_name((0, 4))}
    for target, value in {
        "platform.machine": lambda: "other",
        "sys.platform": "other",
        "optax_sparse_adam.native._build.FLAGS": "-O0",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            names.add(_build.library_name((0, 3)))
    folder = _build.SOURCE.parent
    for path in (_build.SOURCE, *folder.glob("*.h")):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(_build, "SOURCE", tmp_path / "rows.cc")
    assert _build.library_name((0, 3)) in names  # wherever the source is
    for path in [*tmp_path.iterdir()]:  # the source, and each of its headers
        path.write_text(path.read_text() + "\n")
        names.add(_build.library_name((0, 3)))
    assert len(names) == 5 + 1 + len([*folder.glob("*.h")])


# It is refused before it runs, so it need not be fast.
FAST_TO_COMPILE = _build.FLAGS.replace("-O3", "-O0")
REFUSED = f"""
import warnings
import jax.numpy as jnp
from optax_sparse_adam.native import _build, _library
_build.FLAGS = {FAST_TO_COMPILE!r}
_library.INSTALLED = _library.cache() / "none"
with warnings.catch_warnings(record=True) as caught:
    assert not _library.available()
(warning,) = caught
assert "API version" in str(warning.message), warning
assert jnp.ones(3).sum() == 3
"""


@needs_compiler
def test_what_xla_refuses_does_not_stop_the_backend(tmp_path, monkeypatch):
    """In a process that has not started JAX; all of the interfaces since 0.1 work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_build, "FLAGS", FAST_TO_COMPILE)
    headers = tmp_path / "include" / "xla" / "ffi" / "api"
    headers.mkdir(parents=True)
    for part in ("api.h", "c_api.h", "ffi.h"):
        text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", part).read_text()
        text = re.sub(r"XLA_FFI_API_MINOR \d+", "XLA_FFI_API_MINOR 0", text)
        (headers / part).write_text(text)
    library = _build.compile_into(_library.cache(), tmp_path / "include")
    assert library.name.endswith("-0.0.so")
    done = python("-c", REFUSED, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:The kernel for CPUs is not compiled")
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
    assert capsys.readouterr().out == f"{_library.status()}\n{native.gpu_status()}\n"
    assert command(monkeypatch, "--remove") == 0
    assert f"Deleted {library}" in capsys.readouterr().out
    assert command(monkeypatch, "--remove") == 0
    assert f"none in {library.parent}" in capsys.readouterr().out
    (library.parent / "rows-folder.so").mkdir()
    assert command(monkeypatch, "--remove") == 1
    assert capsys.readouterr().err.startswith("[Errno ")
    monkeypatch.setenv("XDG_CACHE_HOME", "x" * 999)
    assert command(monkeypatch) == 1
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
    assert capsys.readouterr().out.startswith("Not used: on Windows there is none.\n")
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
