"""`CudaOps` on a CPU: the same sources, compiled by g++ and run lane by lane."""

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np

from optax_sparse_adam._rows import with_ops
from optax_sparse_adam._rows.cuda_ops import CudaOps
from optax_sparse_adam.native import _build, _calls

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_KEPT = Path(__file__).parents[2] / ".pytest_cache" / "cuda"
FLAGS = "-O1 -std=c++17 -fPIC -shared -ffp-contract=off -w"
SANITIZERS = "-O0 -fsanitize=address,undefined -fno-sanitize-recover=undefined"


@functools.cache
def library(source):
    """The source of a kernel, loaded as a library for this CPU."""
    return ctypes.CDLL(str(compiled(source)))


@functools.cache
def compiled(source):
    """The path of that library."""
    flags = f"{FLAGS} {os.environ.get('CUDA_ON_CPU_FLAGS', '')}"
    source = source.replace("extern __shared__ uint4 shared_memory[];", "")
    name = "rank_kernel" if "rank_kernel" in source else "rows_kernel"
    text = f"""{HEADER.read_text()}
{source}
extern "C" void run(unsigned blocks, unsigned threads, void** params) {{
  emulation::launch({name}, blocks, threads, params);
}}
"""
    digest = hashlib.sha256(f"{flags} {text}".encode()).hexdigest()[:24]
    path = _KEPT / f"{digest}.so"
    if not path.exists():
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as scratch:
            code = Path(scratch, "rows.cc")
            code.write_text(text)
            made = Path(scratch, "rows.so")
            command = [*_build.compiler(), *flags.split(), str(code), "-o", str(made)]
            # The compiler needs no sanitizer, by which it takes twice as long.
            env = {k: x for k, x in os.environ.items() if k != "LD_PRELOAD"}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            assert not done.returncode, done.stderr[:5000]
            os.replace(made, path)
    return path


def run(call, results, aliases, *operands):
    """What the handler in `gpu.h` does, in the memory of NumPy."""
    operands = [np.array(x) for x in operands]  # a copy of each, as some are written
    owners = {result: operand for operand, result in aliases.items()}
    made = []
    for i, like in enumerate(results):
        if i in owners:
            made.append(operands[owners[i]])
        else:
            # What has not been written has no meaning.
            made.append(np.full(like.shape, 77).astype(like.dtype))
    arrays = [operands[n] if n >= 0 else made[-1 - n] for n in call.pointers]
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in arrays]
    lib = library(call.source)
    for blocks, threads, shared, *numbers in call.launches:
        assert shared <= 96 << 10
        values = [*pointers, *map(ctypes.c_longlong, numbers)]
        params = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values)
        )
        lib.limit_shared(shared)
        lib.run(blocks, threads, params)
    return tuple(made)


CALLS = []


class CudaOnCpu(CudaOps):
    """`CudaOps`, whose launches are callbacks."""

    @staticmethod
    def available():
        return True

    def launch(self, call, operands, results, aliases):
        CALLS.append(call)
        function = functools.partial(run, call, tuple(results), dict(aliases))
        return jax.pure_callback(function, tuple(results), *operands)


@contextlib.contextmanager
def emulated():
    """Programs for CPUs use the kernel for GPUs."""
    before = with_ops.KERNELS, _calls.available
    jax.clear_caches()
    with_ops.KERNELS = {"cpu": CudaOnCpu}
    _calls.available = lambda: False  # that for CPUs
    try:
        yield CALLS
    finally:
        with_ops.KERNELS, _calls.available = before
        jax.clear_caches()
