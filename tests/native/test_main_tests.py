"""Some main tests once more as most users run: one CPU device, with the kernel.

The tests' own process has eight devices, where the kernel is never used. Here are those
whose programs call it, or would but for a type or a flag; the others compile the same
programs as there.
"""

from pathlib import Path

import pytest

from ..helpers.native import needs_compiler, python

_TESTS = Path(__file__).parents[1]
# The numbers of torch: with LLVM's optimizations, without which the other tests run.
_OPTIMIZED = ("optimizers/test_sparse_adam_parity.py",)
_OTHERS = (
    "gradients/test_models.py::test_equinox_training_step",
    "gradients/test_models.py::test_linen_batch_statistics",
    "gradients/test_models.py::test_linen_train_state",
    "gradients/test_models.py::test_nnx_optimizer",
    "gradients/test_read.py::test_every_use",
    "gradients/test_read.py::test_parts_of_a_tree",
    "gradients/test_unused_leaves.py::test_rests",
    "optimizers/test_exact_adam.py::test_against_dense",
    "optimizers/test_exact_adam.py::test_long_rest",
    "optimizers/test_exact_adam.py::test_too_much_decay_later",
    "optimizers/test_inside_programs.py",
    "optimizers/test_sparse_adam.py",
    "rows/test_apply_updates.py::test_any_indices",
    "rows/test_apply_updates.py::test_row_0_among_padding",
    "rows/test_apply_updates.py::test_types",
    "rows/test_in_place.py::test_buffers_are_reused",
    "rows/test_in_place.py::test_memory",
    "rows/test_in_place.py::test_memory_of_compositions",
    "rows/test_in_place.py::test_memory_of_other_types",
    "rows/test_in_place.py::test_one_compilation",
)
# What is the plain path's alone, or repeats a call of the kernel.
_LEFT_OUT = (
    "parity and (float64 or [2- or [3-)",  # other types, several sparse dimensions
    "exact_adam and (float64 or [nadamw or [adam- or 0.95)",  # native/test_exact_adam
    "(inside_programs or rests) and not ([sparse_adam or [lazy)",  # the same calls
    "inside_optax and [lazy",
    "every_use and not (matrix or fill or branches or scan or vmap)",
    "in_place and ([float64 or [update or 2-)",
)


@needs_compiler
@pytest.mark.parametrize(
    ("tests", "fast_to_compile"), [(_OPTIMIZED, "false"), (_OTHERS, "true")]
)
def test_with_the_kernel(cache, tests, fast_to_compile):
    # A worker of xdist has inherited the flags of the tests, and added them again.
    variables = {
        "TEST_DEVICES": "1",
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": fast_to_compile,
        "XDG_CACHE_HOME": str(cache),
    }
    status = python("-m", "optax_sparse_adam.native", "--status", **variables)
    assert "Used on CPUs" in status.stdout
    files = [str(_TESTS / name) for name in tests]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
    chosen = ("-k", " and ".join(f"not ({x})" for x in _LEFT_OUT))
    done = python("-m", "pytest", *options, *chosen, *files, **variables)
    assert done.returncode == 0, done.stdout[-5000:]
