"""The tests that run once more on a GPU, in workers that share it.

    python -m tests.helpers.gpu_selection [OPTIONS OF PYTEST...]

`tests/whole/test_gpu.py` runs this, and so does `benchmarks/gpu.py`. Most of the time
is compiling, on the host: 107 s in 14 workers beside an H100, where a process for each
file, one after the other, did not end within 170 s.
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Numbers, memory, gradients and the shim, of one device.
FILES = (
    "gradients/test_value_and_grad.py",
    "gradients/test_cost.py",
    "optimizers/test_sparse_adam_parity.py",
    "optimizers/test_sparse_adam.py",
    "optimizers/test_sparse_adam_inputs.py",
    "optimizers/test_lazy.py",
    "optimizers/test_memory.py",
    "optimizers/test_rowwise.py",
    "rows/test_coalesce.py",
    "rows/test_in_place.py",
    "rows/test_apply_updates.py",
    "torch_compat/test_steps.py",
    "torch_compat/test_checkpoints.py",
    "native/test_cuda_programs.py::test_on_a_gpu",
)


def num_workers():
    """Two cores are left to the drivers; each worker takes half a GB of the GPU."""
    return max(1, min(14, (os.cpu_count() or 1) - 2))


def command(*options):
    """The call of pytest."""
    # By files, as conftest.py has them, the longest file would take as long as it does
    # alone. So a worker that has no tests left takes some of the others'.
    spread = "-n", str(num_workers()), "--dist", "worksteal"
    # Where pytest-benchmark is installed, it warns of the workers: that is an error.
    left_out = "-p", "no:cacheprovider", "-p", "no:benchmark"
    options = *spread, "-q", "-m", "", *left_out, *options
    return [sys.executable, "-m", "pytest", *options, *(str(TESTS / x) for x in FILES)]


def environment():
    """A GPU for JAX, of which each worker takes what it needs, when it needs it."""
    return os.environ | {
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


if __name__ == "__main__":
    args = command(*sys.argv[1:])
    os.chdir(TESTS.parent)
    os.execve(args[0], args, environment())
