"""These tests compare the shim with torch: all have the marker `torch`."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_pycollect_makemodule(module_path, parent):
    module = pytest.Module.from_parent(parent, path=module_path)
    module.add_marker("torch")
    return module
