"""Kernels of an NVIDIA GPU: compiled for the formula of an optimiser, and called.

NVRTC, NVIDIA's compiler as a library, comes with `jax[cuda12]` and `jax[cuda13]`. It
makes machine code for the device that is there. A program holds it, and the user's
cache (`XDG_CACHE_HOME`, else `~/.cache`), where other processes find it. Nothing of
this is looked for in a process without a GPU.
"""

import collections
import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _library
from ._cuda_printer import Unsupported

OLDEST = 70  # Volta: lanes of a warp that vote and shuffle by a mask
TARGET = "optax_sparse_adam.launch.1"  # the number changes with its operands
_NO_LOAD = getattr(os, "RTLD_NOLOAD", 4)

# What was asked of the kernel, and why XLA did it where it did.
_counts: collections.Counter[str] = collections.Counter()
_reasons: collections.Counter[tuple[str, str]] = collections.Counter()


class Call(NamedTuple):
    """A kernel, and how it is launched.

    Attributes:
      source: Its CUDA C++.
      name: Of the function.
      options: Of the compiler, beside the architecture.
      pointers: Its first parameters: `n >= 0` for an operand, `-1 - n` for a result.
      launches: For each launch blocks, threads of a block, bytes that a block shares,
        and then the integers that are its other parameters.
    """

    source: str
    name: str
    options: tuple[str, ...]
    pointers: tuple[int, ...]
    launches: tuple[tuple[int, ...], ...]


@functools.cache
def _device() -> Any:
    """The one GPU of this process; `None` if there is none, or if there are several.

    XLA's partitioner cannot look into the kernel: it would collect a sharded table on
    each device.
    """
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    return devices[0] if len(devices) == 1 else None


def architecture() -> str:
    """That of the device, as `sm_90`."""
    return f"sm_{_capability(_device())}"


def _capability(device: Any) -> int:
    return int(str(device.compute_capability).replace(".", ""))


@functools.cache
def reason() -> str | None:
    """Why there is no kernel in this process, if there is none."""
    device = _device()
    if device is None:
        return "JAX has no NVIDIA GPU here, or more than one."
    if _capability(device) < OLDEST:
        return f"{device.device_kind} is older than compute capability 7.0."
    if isinstance(compiler := _compiler(), str):
        return compiler
    library = _library.loaded()
    if library is None:
        return (
            "The library that launches it is not there: compile it by python -m "
            "optax_sparse_adam.native, which needs a C++ compiler."
        )
    try:
        _register(library)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"{library} cannot be used: {error}"
    return None


def available() -> bool:
    """Whether the kernel may be used, where it is wanted."""
    return reason() is None


def status() -> str:
    """In words, what the kernel has been used for."""
    lines = [f"The kernel for GPUs is used: {architecture()}, NVRTC {_version()}."]
    used = sorted(_counts.items())
    lines += [f"By the kernel, traced {n} times: {what}" for what, n in used]
    by_xla = sorted(_reasons.items())
    lines += [f"By XLA, traced {n} times: {what}, {why}" for (what, why), n in by_xla]
    return "\n".join(lines)


def note(what: str, why: str | None = None) -> None:
    """Remembers for `status` what was traced for the kernel, or why not."""
    if why is None:
        _counts[what] += 1
    else:
        _reasons[what, why] += 1


def _register(library: Path) -> None:
    dll = ctypes.CDLL(str(library))
    stages = {"initialize": dll.prepare_gpu, "execute": dll.launch_gpu}
    capsules = {stage: jax.ffi.pycapsule(x) for stage, x in stages.items()}
    jax.ffi.register_ffi_target(TARGET, capsules, platform="CUDA")


def _candidates() -> list[str]:
    """Where NVRTC may be: in packages, then in the system."""
    paths = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        paths += glob.glob(os.path.join(folder, "*", "lib", "libnvrtc.so.*"))
    names = sorted((x for x in paths if "alt" not in x), key=_major, reverse=True)
    return [*names, "libnvrtc.so.13", "libnvrtc.so.12"]


def _major(path: str) -> int:
    last = path.rpartition(".so.")[2].partition(".")[0]
    return int(last) if last.isdigit() else 0


def _driver_major() -> int:
    """The CUDA version of the driver: older ones refuse what newer compilers make."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 99
    return version.value // 1000 or 99


@functools.cache
def _compiler() -> Any:
    """NVRTC; or in words, why it is not there."""
    newest, errors = _driver_major(), []
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=ctypes.DEFAULT_MODE | _NO_LOAD)
    for path in _candidates():
        if _major(path) > newest:
            continue
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            errors.append(str(error))
    return f"NVRTC, which comes with jax[cuda12] and jax[cuda13], is missing: {errors}"


@functools.cache
def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.lru_cache(maxsize=256)
def compiled(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The machine code of a source, from the cache if it is there.

    Raises:
      Unsupported: If NVRTC refuses it, as for a device that is newer than NVRTC.
    """
    parts = source, arch, *options, _version()
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    path = _library.cache() / "cuda" / f"{digest}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = _compile(source, arch, options)
    with contextlib.suppress(OSError):  # the cache cannot be written: compiled again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)  # never half written for those who look for it
    return code


def _compile(source: str, arch: str, options: Sequence[str]) -> bytes:
    lib, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *args: Any) -> None:
        if code := getattr(lib, name)(*args):
            lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise Unsupported(f"{name}: {lib.nvrtcGetErrorString(code).decode()}")

    text = source.encode()
    call("nvrtcCreateProgram", ctypes.byref(program), text, b"rows.cu", 0, None, None)
    try:
        flags = [f"--gpu-architecture={arch}", "--std=c++17", *options]
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if lib.nvrtcCompileProgram(program, len(flags), array):
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("nvrtcGetProgramLog", program, log)
            raise Unsupported(f"NVRTC for {arch}: {log.value.decode()[:2000]}")
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, code)
        return code.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def launch(
    call: Call,
    operands: Sequence[jax.Array],
    results: Sequence[Any],
    aliases: Mapping[int, int],
) -> tuple[jax.Array, ...]:
    """Calls a kernel in a program: the shapes `results`, some in memory of operands."""
    code = compiled(call.source, architecture(), call.options)
    ffi_call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=dict(aliases))
    made = ffi_call(
        *operands,
        cubin=code,
        key=hashlib.sha256(code).hexdigest(),
        name=call.name,
        pointers=np.asarray(call.pointers, np.int64),
        launches=np.asarray(call.launches, np.int64).reshape(-1),
        width=np.int64(len(call.launches[0])),
    )
    return tuple(made)
