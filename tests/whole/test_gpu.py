"""Numbers, memory, gradients and the shim on a GPU; skipped where there is none.

The other tests run on CPU devices everywhere (see conftest.py). Those of gpu_selection,
which need one device only, run once more in processes in which JAX chooses the GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers import gpu_selection

_ROOT = Path(__file__).parents[2]
_PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin"
# Of the driver; of the device, which some containers show alone; of Windows under WSL.
_DRIVERS = "/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"


def why_not():
    if not any(map(importlib.util.find_spec, _PLUGINS)):
        return "JAX is installed without CUDA"
    if not any(os.path.exists(path) for path in _DRIVERS):
        return "there is no NVIDIA GPU"
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def run(module, *args):
    done = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{module}", *args],
        cwd=_ROOT,
        env=gpu_selection.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("selection", ["whole", "core"])
def test_selection(selection):
    assert " passed" in run("gpu_selection", selection)


def test_a_step_holds_what_the_batch_needs_and_repeats():
    """Peak memory at two heights; the bits of two runs on batches with duplicates."""
    small, large = json.loads(run("gpu_program"))
    above, above_large = small["above the tables"], large["above the tables"]
    assert abs(above_large - above) <= 0.01 * above  # buffers are packed anew
    # Sums and three operands of 8,192 x 64 float32 each, ids, and what is rounded up.
    assert above_large <= 4 * 8192 * 64 * 4 + (1 << 21)
    # Neighbours are added up in one order.
    assert small["repeats"]
    assert large["repeats"]
