"""Strict JAX for every test, eight devices, and compiled programs that are kept."""

import collections
import gc
import importlib.util
import math
import os
import re
import zlib
from pathlib import Path

from .helpers.versions import FAST_TO_COMPILE

# On CPUs, also where there is a GPU; test_gpu.py asks for that.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices, set before JAX starts; tests that need a mesh take what they need. So
# the kernel is not used unless a test asks for it: see `backend`. With one device, as
# most users have it, all tests use the kernel, and those that need a mesh are skipped.
os.environ.setdefault("OPTAX_SPARSE_ADAM_TEST_DEVICES", "8")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count="
    + os.environ["OPTAX_SPARSE_ADAM_TEST_DEVICES"]
    # A device that waits so many seconds for the others ends the process. By default it
    # is 40, after which Keras on eight devices was ended, on two cores with much to do.
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"
)

# Most of the suite's time is compiling. LLVM's optimizations are a fifth of that:
# without them XLA still fuses, aliases and plans memory as it does for users. Its
# fusion emitters are half of the rest, and one piece of code is compiled faster than
# several. Without the emitters XLA fuses otherwise: tests that look at a program use
# `compile_for_users` of helpers/support.py. jaxlib 0.12 has no others. The numbers of
# torch are also compared with everything: `optimized`.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
os.environ["XLA_FLAGS"] += f" {FAST_TO_COMPILE}"

# To write to each operation where it came from takes a twentieth; who fails says it.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Programs are kept on disk, for the other worker and for the next run: JAX finds them
# by their text, their flags and its own version.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Keras chooses its backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis
import jax
import pytest

from optax_sparse_adam._rows.with_ops import KERNELS
from optax_sparse_adam.native import _build, _calls, _library

from .helpers.native import installed_or_built
from .helpers.support import WEEKLY, need_devices, slow_but

DEVICES = int(os.environ["OPTAX_SPARSE_ADAM_TEST_DEVICES"])

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


collect_ignore = ["helpers"]  # which has no tests, and programs of slow ones
_SLOW_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Files that are slow as a whole need packages that the core does not."""
    is_core = config.option.markexpr == "not slow"
    if is_core and collection_path.suffix == ".py":
        return bool(_SLOW_FILE.search(collection_path.read_text())) or None
    return None


def pytest_report_header(config):
    if config.option.markexpr == _ALL_OTHERS and not WEEKLY:
        yield f"of slow cases a third: OPTAX_SPARSE_ADAM_TEST_TURN={_TURN}"
    if importlib.util.find_spec("torch") is None:
        yield 'without torch: left out is what needs it (pip install -e ".[torch]")'


# Few tests, of minutes each: a worker that begins one of them last works alone.
_LONG = {"native", "whole", "benchmarks", "examples"}
_LONG |= {"host_tables", "keras", "vocabulary"}


_MANY = 8  # cases of one test, of which the core has half
_ALL_OTHERS = "slow or torch"  # as `.ci/run` has it
# Of a test's slow cases a third runs at a time, by turns: of which turn, says a number
# that grows with each run of CI. All of them run in the job of each week.
_TURN = int(os.environ.get("OPTAX_SPARSE_ADAM_TEST_TURN", "0"))


def _by_turns(items):
    """Slow cases that are left to other turns; of each test some are not."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    slow = [item for item in slow if item.path.parts[-2] != "whole"]  # pages of docs
    for cases in _by_test(slow):
        turns = min(3, len(cases))
        yield from (x for i, x in enumerate(cases) if (i - _TURN) % turns)


def _by_test(items):
    """The cases of each test, by a hash: of the values of each parameter some first."""
    cases = collections.defaultdict(list)
    for item in sorted(items, key=lambda x: zlib.crc32(_parameters_of(x).encode())):
        cases[item.nodeid.partition("[")[0]].append(item)
    return cases.values()


def _parameters_of(item):
    return item.nodeid.partition("[")[2]


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config, items):
    core = [item for item in items if not item.get_closest_marker("slow")]
    for cases in _by_test(core):
        for item in cases[len(cases) // 2 :] if len(cases) >= _MANY else []:
            item.add_marker("slow")
    if config.option.markexpr == _ALL_OTHERS and not WEEKLY:
        left = {*_by_turns(items)}
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=[*left])
    files = {item.path: number for number, item in enumerate(items)}

    def place(item):
        kernel = hasattr(item, "callspec") and item.callspec.params.get("backend")
        is_short = item.path.parts[-2] not in _LONG
        return is_short, files[item.path], kernel == "kernel"  # these last in a file

    items.sort(key=place)


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


class CpuSeconds:
    """Lists core tests that took long, compiling included; none fails by the clock."""

    started = pytest.StashKey[float]()
    limit = 2.0

    def now(self):
        """CPU seconds of this process, and of those that it has waited for."""
        return sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.stash[self.started] = self.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            report.cpu_seconds = self.now() - item.stash[self.started]
        return report

    def pytest_terminal_summary(self, terminalreporter):
        ended = [r for r in terminalreporter.getreports("") if r.when == "teardown"]
        core = [r for r in ended if not {"slow", "torch"} & set(r.keywords)]
        if not core:
            return
        long = [r for r in core if r.cpu_seconds > self.limit]
        total = sum(r.cpu_seconds for r in core)
        title = f"{len(core)} tests of the core took {total:.0f} s of CPU"
        terminalreporter.section(title)
        for r in sorted(long, key=lambda r: -r.cpu_seconds):
            terminalreporter.line(f"{r.cpu_seconds:5.1f} s {r.nodeid}")


def pytest_configure(config):
    """A plugin, as hooks of this file do not apply to docstrings of the package."""
    config.pluginmanager.register(CpuSeconds())
    # A worker that dies is not replaced: xdist would wait for ever for what it leaves,
    # as each file is given to one worker. It ends, and names the test.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


@pytest.fixture(autouse=True)
def strict():
    """Nothing is promoted or broadcast in silence."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def of_these_devices(monkeypatch):
    """Tests that make a mesh of more devices than there are are skipped."""
    make_mesh = jax.make_mesh

    def make(shape, *args, **kwargs):
        need_devices(math.prod(shape))
        return make_mesh(shape, *args, **kwargs)

    monkeypatch.setattr(jax, "make_mesh", make)


@pytest.fixture
def as_optax_expects(strict):
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(params=slow_but([False, True], False), ids=["x32", "x64"])
def x64(request):
    """The test runs without and with 64-bit types."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture(params=slow_but(["float32", "float32-x64", "float64-x64"], "float32"))
def dtype(request):
    """The type of the parameters; float32 without and with 64-bit types."""
    name, *x64 = request.param.split("-")
    with jax.enable_x64(bool(x64)):
        yield name


@pytest.fixture
def optimized():
    """Programs are compiled with all optimizations, as for users."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


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
        library = installed_or_built(patch)
        own = _library.loaded() if DEVICES == 1 else None
        if own is None:
            _library.register(library)
        elif own != library:  # that of the installation: XLA takes no second one
            library.unlink()
            library.symlink_to(own)
    return folder


@pytest.fixture(params=["plain", "kernel"])
def backend(request, monkeypatch):
    """The test runs in plain JAX, and again with the kernel.

    The kernel is made for processes with one CPU device. Here are eight, and it is used
    all the same: no program of such a test may be for several. On a GPU it is that for
    GPUs, where there is one.
    """
    if jax.default_backend() != "cpu":
        _switch_gpu_kernel(request.param == "kernel", monkeypatch)
        yield request.param
        return
    if request.param == "plain" and DEVICES == 1:
        jax.clear_caches()  # what was traced with it
        monkeypatch.setattr(_calls, "available", lambda: False)
    if request.param == "kernel" and DEVICES > 1:
        if not _build.compiler():
            pytest.skip("there is no C++ compiler")
        request.getfixturevalue("cache")
        request.getfixturevalue("traced_with_the_kernel")
        monkeypatch.setattr(_calls, "available", lambda: True)
    yield request.param
    if request.param == "plain" and DEVICES == 1:
        jax.clear_caches()


def _switch_gpu_kernel(on, monkeypatch):
    """The switch of the kernel for GPUs; what was traced with the other is dropped."""
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_GPU_KERNEL", str(int(on)))
    kernel = KERNELS.get("cuda")
    if on and (kernel is None or not kernel.available()):
        pytest.skip("no kernel for this GPU")
    if _switch_gpu_kernel.is_on != on:
        _switch_gpu_kernel.is_on = on
        jax.clear_caches()


_switch_gpu_kernel.is_on = False


@pytest.fixture
def kernel(cache, monkeypatch):
    """It is used as in a process of one device."""
    monkeypatch.setattr(_calls, "available", lambda: True)
    jax.clear_caches()  # what was traced without it


@pytest.fixture
def without_kernel(monkeypatch):
    """Programs are XLA's alone, also in a process of one device."""
    if jax.default_backend() != "cpu":
        _switch_gpu_kernel(False, monkeypatch)
    monkeypatch.setattr(_calls, "available", lambda: False)
    jax.clear_caches()  # inner functions that have been traced with it
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def traced_with_the_kernel():
    """What was traced without it is traced anew; these tests are the last of a file."""
    jax.clear_caches()


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Settings of a process with one CPU device, and nothing installed."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setattr(_library, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(_library, "loaded", _library.loaded.__wrapped__)
    return tmp_path / "installed"
