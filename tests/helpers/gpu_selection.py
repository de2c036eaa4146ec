"""The tests that run once more on a GPU, in workers that share it.

    python -m tests.helpers.gpu_selection whole|core [OPTIONS OF PYTEST...]

`whole` is all tests of some files, `core` the quick ones of all files about gradients,
optimisers and tables. `tests/whole/test_gpu.py` runs both, and so does
`benchmarks/gpu.py`. Most of the time is compiling, on the host.
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Numbers, memory, gradients and the shim, of one device.
WHOLE = (
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
# What is left out looks at programs for CPUs, or is about other processes.
FOLDERS = "gradients", "host_tables", "optimizers", "rows", "torch_compat"
FOR_CPUS = (
    "optimizers/test_huge_pages.py",
    "rows/test_elsewhere.py",
    "rows/test_row_ops.py",
)


def num_workers():
    """Two cores are left to the drivers; each worker takes half a GB of the GPU."""
    return max(1, min(14, (os.cpu_count() or 1) - 2))


def command(selection, *options):
    """The call of pytest."""
    if selection == "whole":
        chosen, marked = WHOLE, ""
    else:
        chosen, marked = FOLDERS, "not slow"
        left_out = (*FOR_CPUS, *(x for x in WHOLE if "::" not in x))
        options = *options, *(f"--ignore={TESTS / x}" for x in left_out)
    # By files, as conftest.py has them, the longest file would take as long as it does
    # alone. So a worker that has no tests left takes some of the others'.
    spread = "-n", str(num_workers()), "--dist", "worksteal"
    # Where pytest-benchmark is installed, it warns of the workers: that is an error.
    without = "-p", "no:cacheprovider", "-p", "no:benchmark"
    options = *spread, "-q", "-m", marked, *without, *options
    places = (str(TESTS / x) for x in chosen)
    return [sys.executable, "-m", "pytest", *options, *places]


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
