"""A process in which XLA for CPUs calls the handlers of `gpu.h`, and a driver that is
none launches the emulated kernels: from the call in a program to the kernel's numbers.

    python -m tests.helpers.cuda_handler FOLDER [FLAGS OF THE COMPILER]
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._rows import with_ops
from optax_sparse_adam._rows.cuda_ops import CudaOps
from optax_sparse_adam.native import _build, _calls, _cuda

from . import cuda_on_cpu

DRIVER = r"""
#include <dlfcn.h>
#include <cstdio>
#include <string>
using Run = void (*)(unsigned, unsigned, void**);
extern "C" {
int loads = 0, launches = 0;
int cuCtxGetCurrent(void** context) { *context = &loads; return 0; }
// Machine code is here the name of a library, up to the end of a line.
int cuModuleLoadData(void** module, const void* code) {
  const std::string text(static_cast<const char*>(code), 4096);
  *module = dlopen(text.substr(0, text.find('\n')).c_str(), RTLD_NOW);
  ++loads;
  return *module ? 0 : text.find("another GPU") ? 200 : 209;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = dlsym(module, "run");
  return dlsym(module, name) ? 0 : 500;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuGetErrorString(int, const char** words) {
  *words = "what the driver says";
  return 0;
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned,
                   unsigned threads, unsigned, unsigned, unsigned shared, void*,
                   void** params, void**) {
  if (shared > 96 << 10) return 1;
  ++launches;
  reinterpret_cast<Run>(function)(blocks, threads, params);
  return 0;
}
}
"""


def compile_both(folder, flags=()):
    """The driver and the handlers, which on a CPU have no stream."""
    text = (_build.SOURCE.parent / "gpu.h").read_text()
    for old, new in (
        (".Ctx<xla::ffi::PlatformStream<gpu::Pointer>>()", ""),
        ("ffi::Error launch(Pointer stream, ", "ffi::Error launch("),
        ("  Pointer function;\n  if", "  Pointer function, stream = nullptr;\n  if"),
    ):
        assert old in text
        text = text.replace(old, new)
    for name, code, more in (
        ("driver", DRIVER, ["-Wl,-soname,libcuda.so.1"]),
        ("handlers", text.replace("#pragma once", ""), []),
    ):
        source = Path(folder, f"{name}.cc")
        source.write_text(code)
        command = [*_build.compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", "-w"]
        command += [*flags, f"-isystem{jax.ffi.include_dir()}", str(source), *more]
        subprocess.run([*command, "-o", f"{folder}/{name}.so"], check=True)


def install(folder, flags=()):
    """Lets XLA for CPUs call the handlers; returns the driver below them."""
    if not Path(folder, "handlers.so").exists():
        compile_both(folder, flags)
    driver = ctypes.CDLL(f"{folder}/driver.so", mode=ctypes.RTLD_GLOBAL)
    dll = ctypes.CDLL(f"{folder}/handlers.so")
    stages = {"initialize": dll.prepare_gpu, "execute": dll.launch_gpu}
    capsules = {name: jax.ffi.pycapsule(x) for name, x in stages.items()}
    jax.ffi.register_ffi_target(_cuda.TARGET, capsules, platform="cpu")
    _cuda.architecture = lambda: "sm_90"
    _cuda.compiled = lambda source, *_: f"{cuda_on_cpu.compiled(source)}\n".encode()
    _calls.available = lambda: False
    return driver


class OnCpu(CudaOps):
    available = staticmethod(lambda: True)


def main(folder, *flags):
    driver = install(folder, flags)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((500, 33)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 9, 400), jnp.int32)

    def trained(ops):
        with_ops.KERNELS["cpu"] = ops
        jax.clear_caches()
        tx = osa.exact_adam(0.1)
        params = table + 0
        step = osa.make_train_step(lambda t, ids: jnp.sum(jnp.sin(t[ids])), tx)
        state = tx.init(params)
        for _ in range(3):
            params, state, value = step(params, state, ids)
        return list(map(np.asarray, jax.tree.leaves((params, state, value))))

    by_handlers, expected = trained(OnCpu), trained(cuda_on_cpu.CudaOnCpu)
    for x, y in zip(by_handlers, expected, strict=True):
        assert x.tobytes() == y.tobytes()
    loads, launches = (
        ctypes.c_int.in_dll(driver, x).value for x in ("loads", "launches")
    )
    assert loads == 3, loads  # a lookup, a sort, a step; each once
    assert launches >= 3 * 4, launches
    # What the driver says is told.
    for code, words in (
        (b"no such library\n", r"what the driver says \(200\).*_KERNEL=0"),
        (b"another GPU\n", r"\(209\)\. This program was made for another kind of GPU"),
    ):
        _cuda.compiled = lambda *_, code=code: code
        with pytest.raises(Exception, match=words):
            trained(OnCpu)
    print("the handlers launch")


if __name__ == "__main__":
    main(*sys.argv[1:])
