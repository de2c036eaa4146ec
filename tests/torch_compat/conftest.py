"""These tests compare the shim with torch: they have the marker `torch`.

Without torch they are skipped.
"""

import importlib.util

import pytest


class WithoutTorch(pytest.Module):
    def collect(self):
        pytest.skip('needs torch: pip install -e ".[torch]"')


def pytest_pycollect_makemodule(module_path, parent):
    is_there = importlib.util.find_spec("torch") is not None
    kind = pytest.Module if is_there else WithoutTorch
    module = kind.from_parent(parent, path=module_path)
    module.add_marker("torch")
    return module
