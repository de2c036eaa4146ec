"""What the tests of the optional kernel share, beside the fixtures of conftest.py."""

import os
import subprocess
import sys

import pytest

from optax_sparse_adam.native import _build

needs_compiler = pytest.mark.skipif(
    not _build.compiler(), reason="there is no C++ compiler"
)


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
