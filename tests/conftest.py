"""Strict JAX for every test, eight devices, and compiled programs that are kept."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# On CPUs, also where there is a GPU; test_gpu.py asks for that.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices, set before JAX starts; tests that need a mesh take what they need. With
# one, the kernel is used: native/test_main_tests.py runs some tests so.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count="
    + os.environ.get("TEST_DEVICES", "8")
)

# Most of the suite's time is compiling. LLVM's optimizations are a fifth of that:
# without them XLA still fuses, aliases and plans memory as it does for users. Its
# fusion emitters are half of the rest, and one piece of code is compiled faster than
# several. Without the emitters XLA fuses otherwise: tests that look at a program use
# `compile_for_users` of helpers/support.py. jaxlib 0.12 has no others.
# native/test_main_tests.py has some with everything.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "true" and version(
    "jaxlib"
).startswith("0.10."):
    os.environ["XLA_FLAGS"] += (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )

# Programs are kept on disk, for the other worker and for the next run: JAX finds them
# by their text, their flags and its own version.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

from optax_sparse_adam.native import _library

from .helpers.native import compile_once

# The same examples in every run, and no database: a failure can be run again anywhere.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,  # the first example of a shape compiles
    max_examples=30,
    # Fixtures here are settings, equal for all examples.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("repeatable")


# `pytest -m quick`: some fast tests of each folder of the package except `native/`.
_QUICK = {
    "collectives/test_psum_scatter.py",
    "gradients/test_errors.py",
    "gradients/test_unused_leaves.py",
    "optimizers/test_lazy_row_analysis.py",
    "optimizers/test_lazy_sizes.py",
    "optimizers/test_sparse_adam.py",
    "optimizers/test_states.py",
    "rows/test_apply_updates.py",
    "torch_compat/test_groups.py",
    "torch_compat/test_hooks.py",
    "torch_compat/test_state_dict.py",
    "torch_compat/test_steps.py",
    "whole/test_signatures.py",
}


# Few tests, of minutes each: a worker that begins one of them last works alone.
_LONG = {"native", "whole"}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parts[-2] not in _LONG)
    for item in items:
        if "/".join(item.path.parts[-2:]) in _QUICK:
            item.add_marker(pytest.mark.quick)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file goes to one worker: two would both compile what its tests share."""
    if config.option.dist != "load":
        return None  # another way was asked for
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadFileScheduling  # where there is xdist

    return LoadFileScheduling(config, log)


def pytest_collection_finish():
    """What is imported stays; to go through it at each collection takes a tenth.

    Rarer collections take a thirtieth less.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def strict():
    """Nothing is promoted or broadcast in silence."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """The test runs without and with 64-bit types."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture(params=["float32", "float32-x64", "float64-x64"])
def dtype(request):
    """The type of the parameters; float32 without and with 64-bit types."""
    name, *x64 = request.param.split("-")
    with jax.enable_x64(bool(x64)):
        yield name


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file():
    """Programs of a file are dropped after it: a worker would grow to several GB."""
    yield
    jax.clear_caches()


@pytest.fixture
def compilations():
    """A list that grows with each compilation."""
    seen = []

    def listener(event, duration, **kwargs):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache folder with the compiled library in it, known to XLA."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        compile_once(patch)
        _library.register(_library.build())
    return folder


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Settings of a process with one CPU device, and nothing installed."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setattr(_library, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(_library, "loaded", _library.loaded.__wrapped__)
    return tmp_path / "installed"
