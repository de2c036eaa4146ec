"""The site is built without a warning, its code runs, and it has every public name."""

import ast
import importlib
import inspect
import linecache
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from sphinx.util.inventory import InventoryFile

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = [page for page in sorted(_DOCS.glob("*.md")) if _BLOCK.search(page.read_text())]
_PUBLIC = ["optax_sparse_adam", *("optax_sparse_adam." + m for m in ("torch_compat",))]
_PUBLIC += ["optax_sparse_adam.flax_nnx", "optax_sparse_adam.native"]


@pytest.fixture
def defaults(strict):
    """JAX as a reader has it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(haiku|torch|orbax).*")
def test_code_of_a_page_runs_from_top_to_bottom(page, defaults, capsys):
    text = page.read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    linecache.checkcache(str(page))
    for block in _BLOCK.finditer(text):
        # Line numbers of errors are those of the page.
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, str(page), "exec"), names)


def test_every_training_step_of_the_pages_is_in_place():
    """Without donation a step costs what the table costs."""
    adds = re.compile(r"osa\.apply_updates\(|optimizer\.update\(model|apply_gradients\(")
    jitted = re.compile(r"^( *)@?(?:step = )?(?:jax|nnx)\.jit.*?(?=^\1\S.*\n(?!\1def)|\Z)", re.M | re.S)
    steps = 0
    for page in _PAGES:
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if adds.search(block) and re.search(r"\b(jax|nnx)\.jit\b", block):
                steps += 1
                assert "donate_argnums" in block, f"{page.name}: {block}"
    assert steps >= 15


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = ["-W", "--keep-going", "-n", "-q", "-d", folder / "doctrees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *command, _DOCS, folder / "html"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_public_name_is_in_the_reference(site):
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    documented = {
        name for kind in ("function", "class", "data") for name in inventory.data.get(f"py:{kind}", {})
    }
    for module in _PUBLIC:
        members = vars(importlib.import_module(module))
        public = {
            f"{module}.{name}"
            for name, value in members.items()
            if not name.startswith("_")
            and callable(value)
            and getattr(value, "__module__", "").startswith(module)
        }
        assert public
        assert public <= documented, public - documented
