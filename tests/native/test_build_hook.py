"""Building the package: with the kernel where that can be done, and else without."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest

from optax_sparse_adam.native import _build

from ..helpers.native import compile_once, needs_compiler

pytestmark = pytest.mark.slow

wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not there")

_ROOT = Path(__file__).parents[2]
_NEEDED = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore")


@pytest.fixture(autouse=True)
def once(monkeypatch):
    compile_once(monkeypatch)


@pytest.fixture
def source(tmp_path):
    """What an sdist holds, and a library of older source next to the kernel's."""
    for name in _NEEDED:
        shutil.copy(_ROOT / name, tmp_path)
    no_builds = shutil.ignore_patterns("*.so", "__pycache__")
    package = tmp_path / "optax_sparse_adam"
    shutil.copytree(_ROOT / "optax_sparse_adam", package, ignore=no_builds)
    (package / "native" / "rows-0123456789abcdef-0.3.so").touch()
    return tmp_path


def left(source):
    return [path.name for path in (source / "optax_sparse_adam").rglob("*.so")]


def build(source):
    """The wheel, and which of its files are libraries."""
    builder = wheel.WheelBuilder(str(source))
    (path,) = builder.build(directory=str(source / "dist"), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if name.endswith(".so")]
        (metadata,) = [x for x in archive.namelist() if x.endswith("/WHEEL")]
        pure = b"Root-Is-Purelib: true" in archive.read(metadata)
    assert pure == (not files)
    return Path(path), files


@pytest.mark.parametrize("repository", ["", "owner/name"])
def test_page_of_a_package_index_has_no_relative_link(source, monkeypatch, repository):
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", "0")
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    path, _ = build(source)
    with zipfile.ZipFile(path) as archive:
        (name,) = [x for x in archive.namelist() if x.endswith("/METADATA")]
        text = archive.read(name).decode()
    links = re.findall(r"\]\((.+?)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    pictures = re.findall(r"!\[.*?\]\((.+?)\)", text)
    assert len(pictures) == bool(repository)
    files = [re.search(r"owner/name/(?:blob/)?HEAD/([^#]+)", link) for link in links]
    assert all((_ROOT / found[1]).exists() for found in files if found)
    assert ("Project-URL: Source, https://github.com/owner/name" in text) == bool(
        files[0]
    )


def build_editable(source):
    """Runs the hook only: the rest needs a package for such installations."""
    builder = wheel.WheelBuilder(str(source))
    assert not [*builder.build(versions=["editable"], hooks_only=True)]


def library():
    return _build.library_name(_build.interface(jax.ffi.include_dir()))


@needs_compiler
def test_wheel_has_the_kernel(source):
    path, files = build(source)
    assert not path.stem.endswith("-any")
    assert "-py3-none-" in path.stem
    assert files == [f"optax_sparse_adam/native/{library()}"]
    assert len(left(source)) == 1  # the old one: nothing is written into the tree
    installed = source / "site"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(installed)
    done = subprocess.run(
        [sys.executable, "-m", "optax_sparse_adam.native", "--status"],
        cwd=installed,
        env=os.environ
        | {"XDG_CACHE_HOME": str(source), "XLA_FLAGS": "", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    used, of_gpus = done.stdout.splitlines()
    assert used == f"Used on CPUs: {installed / files[0]}", done.stderr
    assert of_gpus.startswith("The kernel for GPUs is not used: ")


@needs_compiler
def test_editable_installation_has_it_next_to_the_source(source):
    """Beside that of another environment, for another jaxlib; older source's goes."""
    other = _build.library_name((0, 99))
    (source / "optax_sparse_adam" / "native" / other).touch()
    build_editable(source)
    assert sorted(left(source)) == sorted([library(), other])


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PATH", "", "it needs a C++ compiler"),
        ("CXX", "false", "false -std=c++17"),
        ("CXX", "no-such-compiler", "no-such-compiler could not be run"),
        ("CXX", 'c++ "', "it needs a C++ compiler"),
        ("OPTAX_SPARSE_ADAM_NATIVE", "0", "it needs a C++ compiler"),
    ],
)
def test_package_is_built_without_it(
    source, monkeypatch, capsys, variable, value, words
):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    path, files = build(source)
    assert path.stem.endswith("-py3-none-any")
    assert files == []
    build_editable(source)
    assert len(left(source)) == 1
    out = "".join(capsys.readouterr())
    assert out.count(f"Built without the kernel for CPUs: {words}") == 2


def test_package_is_built_without_it_on_windows(source, monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "win32")
    assert wheel.WheelBuilder(str(source)).config.dependencies == []
    path, files = build(source)
    assert path.stem.endswith("-py3-none-any")
    assert files == []
    assert "a system other than Windows" in "".join(capsys.readouterr())


@needs_compiler
def test_wheel_is_for_one_processor_on_macos(source, monkeypatch):
    """Also where Python, as those of python.org, is for both and for older systems."""
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-10.13-universal2")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.3", ("", "", ""), "arm64"))
    path, files = build(source)
    assert len(files) == 1
    assert path.stem.endswith("-py3-none-macosx_15_0_arm64")


def test_jaxlib_is_asked_for_only_where_it_is_of_use(source, monkeypatch):
    """Not without a compiler, and not where the environment has its headers."""

    def dependencies():
        return wheel.WheelBuilder(str(source)).config.dependencies

    # No jaxlib to be seen from here, as in a build that is isolated.
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(source))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "c++")
    (needed,) = dependencies()
    assert needed.startswith("jaxlib>=")
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", "0")
    assert dependencies() == []
    monkeypatch.delenv("OPTAX_SPARSE_ADAM_NATIVE")
    header = source / "jaxlib" / "include" / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    for minor, expected in {2: [needed], 3: []}.items():
        header.write_text(
            f"#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR {minor}\n"
        )
        assert dependencies() == expected
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert dependencies() == []
