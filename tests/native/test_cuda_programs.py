"""Programs that hold the kernel for GPUs: exported, and found in JAX's cache."""

import importlib.util

import jax
import pytest

from ..helpers.native import needs_compiler, python

pytestmark = pytest.mark.slow
EXPORTED = pytest.param(
    "exported",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("flatbuffers") is None,
        reason="jax.export serializes by flatbuffers",
    ),
)


def used_by_another(folder, how, where, **environment):
    for what in ("make", "use"):
        args = str(folder), what, how, where
        done = python("-m", "tests.helpers.cuda_programs", *args, **environment)
        assert done.stdout == "as it should be\n", done.stdout + done.stderr


@needs_compiler
@pytest.mark.parametrize("how", ["cached", EXPORTED])
def test_by_handlers(tmp_path, how):
    """XLA for CPUs calls the handlers of the library; see `cuda_handler`."""
    flags = {"JAX_PLATFORMS": "cpu", "OPTAX_SPARSE_ADAM_NATIVE": "0", "XLA_FLAGS": ""}
    used_by_another(tmp_path, how, "cpu", **flags)


@pytest.mark.parametrize("how", ["cached", EXPORTED])
def test_on_a_gpu(tmp_path, how):
    if jax.default_backend() != "gpu":
        pytest.skip("there is no GPU, or JAX does not know it")
    used_by_another(tmp_path, how, "gpu", OPTAX_SPARSE_ADAM_GPU_KERNEL="1")
