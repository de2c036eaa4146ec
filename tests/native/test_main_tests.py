"""The main tests once more as most users run: one CPU device, with the kernel.

The tests' own process has eight devices, where the kernel is never used.
"""

from pathlib import Path

from ..helpers.native import needs_compiler, python

_TESTS = Path(__file__).parents[1]
_FILES = (
    "gradients/test_read.py",
    "gradients/test_models.py",
    "gradients/test_unused_leaves.py",
    "optimizers/test_exact_adam.py::test_against_dense",
    "optimizers/test_exact_adam.py::test_long_rest",
    "optimizers/test_exact_adam.py::test_what_params_hold",
    "optimizers/test_exact_adam.py::test_too_much_decay_later",
    "optimizers/test_inside_programs.py",
    "optimizers/test_sparse_adam.py",
    "optimizers/test_sparse_adam_parity.py",
    "rows/test_apply_updates.py",
    "rows/test_in_place.py",
)


@needs_compiler
def test_with_the_kernel(cache):
    # A worker of xdist has inherited the flags of the tests, and added them again.
    variables = {
        "TEST_DEVICES": "1",
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
        "XDG_CACHE_HOME": str(cache),
    }
    status = python("-m", "optax_sparse_adam.native", "--status", **variables)
    assert "Used on CPUs" in status.stdout
    files = [str(_TESTS / name) for name in _FILES]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = python("-m", "pytest", *options, *files, **variables)
    assert done.returncode == 0, done.stdout[-5000:]
