"""What a user gets with an installation, and what importing it does."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import optax_sparse_adam as osa

_ROOT = Path(__file__).parents[2]
_SOURCES = sorted((_ROOT / "optax_sparse_adam").rglob("*.py"))
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_CORE = ["jax", "jaxlib", "numpy", "optax"]


def test_core_dependencies_are_four():
    names = [re.match(r"[\w-]+", x)[0] for x in _PROJECT["project"]["dependencies"]]
    assert sorted(names) == _CORE


def test_import_needs_the_core_dependencies_only():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "flax", "equinox", "haiku", "tqdm",
                                      "matplotlib", "orbax", "hypothesis", "pytest"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import numpy, optax_sparse_adam.torch_compat as t
t.SparseAdam([t.Parameter(numpy.zeros(3))]).state_dict()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_is_one():
    assert version("optax-sparse-adam") == osa.__version__
    changelog = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {osa.__version__}" in changelog


def test_package_is_typed():
    assert (_ROOT / "optax_sparse_adam" / "py.typed").exists()


def test_public_jax_only():
    private = re.compile(r"^\s*(?:from|import) jax(?:lib)?\._|jax\._src", re.MULTILINE)
    assert not [path.name for path in _SOURCES if private.search(path.read_text())]


def test_public_names_are_documented_with_an_example():
    names = [name for name in vars(osa) if not name.startswith("_")]
    functions = [getattr(osa, name) for name in names if callable(getattr(osa, name))]
    assert functions
    undocumented = [
        function.__name__
        for function in functions
        if not function.__doc__
        or (">>> " not in function.__doc__ and not hasattr(function, "_fields"))
    ]
    assert not undocumented
