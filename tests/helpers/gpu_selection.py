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
FOLDERS = "gradients", "host_tables", "optimizers", "rows"
# These look at programs for CPUs, at their memory, or at their last bits.
OF_CPUS = (
    "optimizers/test_huge_pages.py",
    "optimizers/test_lazy_row_analysis.py",
    "rows/test_elsewhere.py",
    "rows/test_row_ops.py",
    "gradients/test_cost_of_steps.py::test_old_rows_beside_the_step",
    "gradients/test_nnx_steps.py::test_kernel_adds_updates",
    "gradients/test_promises.py::test_tables_that_share_their_ids_sort_them_once",
    "gradients/test_train_step.py::test_step_is_that_of_its_parts",
    "optimizers/test_lazy_blocks.py::test_memory",
    "optimizers/test_lazy_blocks.py::test_what_rows_and_others_need_is_computed_once",
    "rows/test_bags.py::test_floats_alone_are_scaled",
    "rows/test_bags.py::test_row_arithmetic_takes_it",
    "rows/test_coalesce.py::test_tables_of_all_heights_are_traced_once",
    "rows/test_in_place.py::test_rows_in_parts",
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
        options = *options, *(f"--deselect=tests/{x}" for x in WHOLE)
    options = *options, *(f"--deselect=tests/{x}" for x in OF_CPUS)
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
