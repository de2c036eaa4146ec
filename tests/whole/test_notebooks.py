"""Every notebook runs from top to bottom; each ends in an assertion or a picture."""

from pathlib import Path

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.slow

_NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert _NOTEBOOKS


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the kernel's own, in zmq
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("QUICK_NOTEBOOKS", "1")  # studies that take minutes take steps
    if path.stem == "many_devices":  # docs/many_devices.md says why none is loaded
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "inf")
    notebook = nbformat.read(path, as_version=4)
    if any("import torch\n" in cell.source for cell in notebook.cells):
        pytest.importorskip("torch")
    place = {"metadata": {"path": path.parent}}  # as Jupyter starts it
    nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources=place
    ).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)
