"""The kernel for GPUs without one: compiled by NVRTC, lowered, and left alone."""

import ctypes
import re
import time

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import native
from optax_sparse_adam._rows import with_ops
from optax_sparse_adam._rows.cuda_ops import CudaOps
from optax_sparse_adam.native import _calls, _cuda, _gpu
from optax_sparse_adam.native._cuda_printer import Unsupported

from ..helpers.cubins import resources
from ..helpers.native import needs_compiler, python

pytestmark = pytest.mark.usefixtures("as_optax_expects")
needs_nvrtc = pytest.mark.skipif(
    isinstance(_cuda._compiler(), str), reason="NVRTC is not installed: extra `cuda`"
)
ROWS, WIDTH, IDS = 1_000_000, 128, 65_536


class Recorded(CudaOps):
    """Programs for `cuda` hold the kernel, as on a device of this architecture."""

    calls, arch = [], "sm_90"

    @staticmethod
    def available():
        return True

    def launch(self, call, *args):
        self.calls.append(call)
        return _cuda.launch(call, *args)


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    monkeypatch.setitem(with_ops.KERNELS, "cuda", Recorded)
    monkeypatch.setattr(_cuda, "architecture", lambda: Recorded.arch)
    monkeypatch.setattr(_calls, "available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Recorded.calls.clear()
    _cuda.compiled.cache_clear()
    jax.clear_caches()
    yield Recorded.calls
    jax.clear_caches()


OPTIMIZERS = {
    "exact_adamw": lambda: osa.exact_adamw(1e-2, weight_decay=1e-2),
    "sparse_adam": lambda: osa.sparse_adam(1e-2),
    "exact_adam": lambda: osa.exact_adam(1e-2),
    "rowwise_adam": lambda: osa.rowwise_adam(1e-2),
    "rowwise_adagrad": lambda: osa.rowwise_adagrad(1e-2),
    "adafactor": lambda: osa.sparse_adafactor(1e-2),
    "per_row": lambda: osa.lazy(osa.per_row(optax.adam(1e-2))),
    "lazy": lambda: osa.lazy(optax.adamw(1e-2)),
}


def lowered(tx, in_bags, width=WIDTH):
    """A step's program for `cuda`."""
    like = jax.ShapeDtypeStruct
    params = {"t": like((ROWS, width), jnp.float32), "w": like((width,), jnp.float32)}

    def loss(params, ids):
        x = params["t"][ids]
        if in_bags:
            x = osa.embedding_bag(params["t"], ids.reshape(-1, 16))
        return jnp.mean(x @ params["w"])

    step = jax.jit(osa.make_train_step(loss, tx), donate_argnums=(0, 1))
    args = params, jax.eval_shape(tx.init, params), like((IDS,), jnp.int32)
    return step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@needs_nvrtc
@pytest.mark.parametrize("in_bags", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lowered_step(recorded, in_bags):
    """Tables are updated in place, and bags have no array of one row an entry."""
    text = lowered(OPTIMIZERS["sparse_adam"](), in_bags)
    assert text.count("custom_call @optax_sparse_adam.launch.1") == 1
    (call,) = [x for x in text.splitlines() if "@optax_sparse_adam.launch.1" in x]
    assert call.count("output_operand_alias<") == 3
    # Keys and places; of bags of one length no bag of each entry.
    assert call.count(f"tensor<{IDS}xi32>") == 2
    made = rf"= \"?stablehlo\.(\w+).*[ (]tensor<{{}}x{WIDTH}xf32>[^>]*$"
    on_tables = re.findall(made.format(ROWS), text, re.MULTILINE)
    assert set(on_tables) <= {"custom_call"}
    if in_bags:
        assert not re.findall(made.format(IDS), text, re.MULTILINE)
    (call,) = recorded
    assert call.launches[0][3] == IDS


@needs_nvrtc
@pytest.mark.parametrize("read", [False, True])
def test_exported_with_free_sizes(recorded, read):
    """Such a program is for any process: by XLA."""
    table, tx = jnp.ones((100, 4)), osa.exact_adam(0.1)
    state = tx.init(table)

    def bags(table, ids):
        def loss(table):
            sums = osa.embedding_bag(table, ids)
            return jnp.sum(sums**2) + jnp.sum(table[ids] ** 2)

        return osa.grad(loss, read=state if read else None)(table).data

    export = jax.export.export(jax.jit(bags), platforms=("cuda",))
    sizes = jax.export.symbolic_shape("m, n", constraints=["m * n <= 50"])
    free = export(table, jax.ShapeDtypeStruct(sizes, jnp.int32))
    assert _cuda.TARGET not in free.mlir_module()
    if read:
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            export(table, jnp.zeros((3, 4), jnp.int32))
        assert recorded


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled(recorded, monkeypatch, name, arch):
    monkeypatch.setattr(Recorded, "arch", arch)
    for width in (WIDTH, 33, 300):
        for in_bags in (False, True):
            lowered(OPTIMIZERS[name](), in_bags, width)
    for call in recorded:
        code = _cuda.compiled(call.source, arch, call.options)
        found, dim = resources(code), re.findall(r"#define DIM (\d+)", call.source)
        assert found["registers"] <= 128
        assert len(code) < (40 if dim == [str(WIDTH)] else 64) << 10
        # Ten columns a lane of five arrays do not fit; a lane of four does.
        if dim != ["300"]:
            assert found["stack"] == 0, call.source[:900]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_how_long_a_formula_takes(recorded, arch):
    """The longest: 0.25 s of CPU."""
    lowered(OPTIMIZERS["exact_adamw"](), True)
    source = max((call.source for call in recorded), key=len)
    seconds = []
    for _ in range(3):  # the machine may have other work
        begin = time.process_time()
        _cuda._compile(source, arch, ())
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5


SOURCE = 'extern "C" __global__ void one(int* x) { *x = 1; }'


@needs_nvrtc
def test_cache_on_disk(monkeypatch, tmp_path):
    """By source, architecture and options; what it cannot keep it compiles again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = _cuda.compiled.__wrapped__
    code = compiled(SOURCE, "sm_90")
    (file,) = tmp_path.rglob("*.cubin")
    assert file.read_bytes() == code
    file.write_bytes(b"from the cache")
    assert compiled(SOURCE, "sm_90") == b"from the cache"
    others = compiled(SOURCE, "sm_80"), compiled(SOURCE, "sm_90", ("--fmad=false",))
    assert b"from the cache" not in others
    assert len([*tmp_path.rglob("*")]) == 5  # two folders, three files
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/no/folder")
    assert compiled(SOURCE, "sm_90") == code
    for source, arch in ((SOURCE[:-9], "sm_90"), (SOURCE, "sm_999")):
        with pytest.raises(Unsupported, match=f"NVRTC for {arch}: "):
            compiled(source, arch)


@needs_compiler
@pytest.mark.slow
def test_handlers(tmp_path):
    done = python(
        "-m",
        "tests.helpers.cuda_handler",
        str(tmp_path),
        JAX_PLATFORMS="cpu",
        OPTAX_SPARSE_ADAM_NATIVE="0",
        XLA_FLAGS="",
    )
    assert done.stdout == "the handlers launch\n", done.stderr


@pytest.mark.slow
def test_nothing_of_it_without_a_gpu():
    """Wanted or not: no import, no library, no look for a device."""
    code = (
        "import sys, jax.numpy as jnp, optax_sparse_adam as osa;"
        "tx = osa.sparse_adam(0.1); t = jnp.ones((9, 4));"
        "g = osa.grad(lambda t: t[jnp.array([1, 1])].sum())(t);"
        "print(osa.apply_updates(t, tx.update(g, tx.init(t))[0])[1, 0]);"
        "print([x for x in sys.modules if 'cuda' in x and 'optax_sparse' in x]);"
        "maps = open('/proc/self/maps').read();"
        "print('nvrtc' in maps, 'libcuda' in maps); print(osa.native.gpu_status())"
    )
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = python("-c", code, OPTAX_SPARSE_ADAM_GPU_KERNEL="1", **flags)
    first, *rest, status = done.stdout.splitlines()
    assert float(first) == pytest.approx(0.9), done.stderr
    assert rest == [
        "['optax_sparse_adam._rows.cuda_kernel']",
        "False False",
    ]
    assert status == "The kernel for GPUs is not used: JAX has CPUs only here."


def test_switch(monkeypatch):
    monkeypatch.delenv("OPTAX_SPARSE_ADAM_GPU_KERNEL", raising=False)
    assert _gpu.switched_on() == _gpu.IS_DEFAULT
    for value, is_on in {"1": True, "on": True, "0": False, "Off": False}.items():
        monkeypatch.setenv("OPTAX_SPARSE_ADAM_GPU_KERNEL", value)
        assert _gpu.switched_on() == is_on
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_GPU_KERNEL", "0")
    assert "OPTAX_SPARSE_ADAM_GPU_KERNEL=1 turns it on" in native.gpu_status()


class Device:
    device_kind, compute_capability = "a GPU", "9.0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_device": None}, "no NVIDIA GPU here, or more than one"),
        ({"capability": "6.1"}, "a GPU is older than compute capability 7.0"),
        ({"_compiler": "NVRTC is missing"}, "NVRTC is missing"),
        ({"loaded": None}, "compile it by python -m optax_sparse_adam.native"),
    ],
    ids=["device", "capability", "nvrtc", "library"],
)
def test_why_not(monkeypatch, change, words):
    device = Device()
    device.compute_capability = change.get("capability", "9.0")
    own = change.get("_device", device)
    monkeypatch.setattr(_cuda, "_device", lambda: own)
    nvrtc = change.get("_compiler", ctypes.CDLL(None))
    monkeypatch.setattr(_cuda, "_compiler", lambda: nvrtc)
    monkeypatch.setattr(_cuda._library, "loaded", lambda: change.get("loaded"))
    monkeypatch.setattr(_cuda._library, "has_cpus_only", lambda: False)
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_GPU_KERNEL", "1")
    monkeypatch.delenv("OPTAX_SPARSE_ADAM_NATIVE", raising=False)
    _cuda.reason.cache_clear()
    try:
        assert words in native.gpu_status()
        assert not _cuda.available()
    finally:
        _cuda.reason.cache_clear()
