"""What CONTRIBUTING says of the layers: no folder imports one above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import optax_sparse_adam

ROOT = Path(optax_sparse_adam.__file__).parent
# Each imports from itself and from those before it; the modules beside them from all.
LAYERS = ["_jax_extras", "native", "_rows", "_optimizers", "_exact_adam"]
ABOVE = ["_gradients", "_collectives", "torch_compat"]  # on rows, and not on each other
MAY_IMPORT = {name: LAYERS[: i + 1] for i, name in enumerate(LAYERS)}
MAY_IMPORT |= {name: [*LAYERS[:3], name] for name in ABOVE}
MAY_IMPORT["_vocabulary"] = ["native", "_vocabulary"]  # on the host
BESIDE = ["_train_step", "_row_verbs", "_row_tables", "_gradients", "host_tables"]
MAY_IMPORT["host_tables"] = [*LAYERS, *BESIDE, "_vocabulary"]  # imported by nothing
MAY_IMPORT["torch_compat"] = [*LAYERS, "torch_compat"]
MAY_IMPORT["keras"] = [*LAYERS, "_train_step", "_gradients", "keras"]  # nor this


def imported(path):
    """The folder or module of the package that each relative import names first."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) + 1 - node.level],)
            for name in [node.module] if node.module else [x.name for x in node.names]:
                yield (*base, *name.split("."))[0]


def test_every_folder_has_a_layer():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == {*MAY_IMPORT}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_nothing_imports_upwards(folder):
    found = {
        (path.name, name)
        for path in (ROOT / folder).glob("*.py")
        for name in imported(path)
    }
    assert len(found) > 1
    assert {pair for pair in found if pair[1] not in MAY_IMPORT[folder]} == set()


@pytest.mark.slow
def test_host_tables_and_keras_are_imported_by_choice():
    modules = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    for package in ("host_tables", "keras"):
        others = [path for path in modules if path.parent.name != package]
        assert package not in {name for path in others for name in imported(path)}
    code = "import sys, optax_sparse_adam; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "optax_sparse_adam._gradients" in names.stdout
    assert "host_tables" not in names.stdout
    assert "keras" not in names.stdout
