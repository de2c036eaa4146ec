"""Finds the compiled kernel, and registers it with XLA."""

import contextlib
import ctypes
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, TypeVar

import jax

from . import _build

# Each function of the library, by its name behind `optax_sparse_adam.` in programs.
TARGETS = {"read": "read_rows", "update": "update_rows", "zeros": "zeros"}
INSTALLED = _build.SOURCE.parent  # where an installation leaves its library

Functions = TypeVar("Functions")


def cache() -> Path:
    """The folder of the libraries that the user compiles."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "optax_sparse_adam")


def build() -> Path:
    """Compiles the kernel into the user's cache, and returns where it lies there.

    Raises:
      OSError: If the cache cannot be written.
      RuntimeError: If there is no compiler, or it fails; with what it said.
    """
    return _build.compile_into(cache(), jax.ffi.include_dir())


def _found(newest: _build.Version) -> Iterator[tuple[_build.Version, Path]]:
    """What XLA would take here: the user's own and that of the installation."""
    for folder in (cache, lambda: INSTALLED):
        with contextlib.suppress(OSError, RuntimeError):  # no home, or not readable
            yield from _build.libraries(folder(), newest)


def libraries() -> list[tuple[_build.Version, Path]]:
    """Those of this source that XLA would take here, the newest first.

    Of equal ones the user's own comes first. Nothing is loaded.
    """
    try:
        newest = _build.interface(jax.ffi.include_dir())
        return sorted(_found(newest), key=lambda x: x[0], reverse=True)
    except (OSError, RuntimeError):
        return []  # no headers, or no source


def on_the_host(functions_of: Callable[[Path], Functions]) -> Functions | None:
    """Functions of the library that is there, which XLA need not know of.

    A process with several CPU devices has no kernel, and calls them all the same.
    """
    if not _build.switched_off():
        for _, library in libraries():
            with contextlib.suppress(OSError, AttributeError):  # of another machine
                return functions_of(library)
    return None


def register(library: Path) -> None:
    """Loads the library and makes its functions known to XLA."""
    dll = ctypes.CDLL(str(library))
    functions = {name: getattr(dll, symbol) for name, symbol in TARGETS.items()}
    for name, function in functions.items():
        capsule = jax.ffi.pycapsule(function)
        jax.ffi.register_ffi_target(f"optax_sparse_adam.{name}", capsule, "cpu")


@functools.cache
def loaded() -> Path | None:
    """The library that was registered, if any; decided once in a process."""
    errors = []
    try:
        newest = _build.interface(jax.ffi.include_dir())
    except (OSError, RuntimeError):
        return None  # no headers
    there = libraries()
    for version, library in there:
        # XLA may refuse what is older. Said before its backend starts, that would come
        # to light then, and no backend would start.
        if version != newest and _started_devices() == 0:
            return None
        try:
            register(library)
            return library
        except (OSError, AttributeError, RuntimeError) as error:
            errors.append(f"{library} ({error})")
    if errors:
        warnings.warn(
            f"The kernel cannot be loaded: {'; '.join(errors)}. Going on in plain JAX. "
            "Compile it again by python -m optax_sparse_adam.native, or turn it off: "
            "OPTAX_SPARSE_ADAM_NATIVE=0",
            RuntimeWarning,
            stacklevel=2,
        )
    elif not there and has_cpus_only() and _can_be_compiled():
        warnings.warn(
            "The kernel for CPUs is not compiled for this source and this jaxlib, and "
            "plain JAX takes up to three times as long. Compile it once by python -m "
            "optax_sparse_adam.native, or leave it out: OPTAX_SPARSE_ADAM_NATIVE=0",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def _can_be_compiled() -> bool:
    try:
        return _build.supported() and bool(_build.compiler())
    except RuntimeError:  # `CXX` is no command
        return False


def has_cpus_only() -> bool:
    """Whether this process can have no other devices, without starting JAX's backends.

    After that `jax.distributed.initialize` fails, and a step may be traced before it.
    """
    config: Any = jax.config  # not all of it has types in every version
    return config.jax_platforms == "cpu" or not _has_plugins()


@functools.cache
def _has_plugins() -> bool:
    """Whether a package for another platform is installed."""
    packages = map(util.find_spec, ("jax_plugins", "libtpu"))
    return any(packages) or bool(metadata.entry_points(group="jax_plugins"))


def _started_devices() -> int:
    """How many CPU devices there are; starts the backends."""
    try:
        return jax.device_count("cpu")
    except RuntimeError:  # `jax_platforms` leaves it out
        return 0


def _one_device() -> bool:
    """Whether this process has one CPU device, and shares it with no other process.

    Asking JAX would start its backends, after which `jax.distributed.initialize` fails:
    a step may be traced before that, if not run.
    """
    if jax.distributed.is_initialized():
        return False
    config: Any = jax.config  # not all of it has types in every version
    count = config.jax_num_cpu_devices
    if count < 0:
        flags = os.environ.get("XLA_FLAGS", "")
        if flags.strip() and not flags.strip().startswith("-"):  # the name of a file
            return _started_devices() == 1
        counts = re.findall(r"xla_force_host_platform_device_count=(\d+)", flags)
        count = int(counts[-1]) if counts else 1
    return bool(count == 1)


def available() -> bool:
    """Whether the kernel may be used.

    XLA's partitioner cannot look into the kernel: it would collect a sharded table on
    each device. So a process that has several CPU devices does not use it.
    """
    return not _build.switched_off() and _one_device() and loaded() is not None


def status() -> str:
    """In words, what `available` says and why."""
    if _build.switched_off():
        return "Not used: OPTAX_SPARSE_ADAM_NATIVE turns it off."
    if not _build.supported():
        return "Not used: on Windows there is none."
    if not _one_device():
        return "Not used: this process has several CPU devices, or is one of several."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said here
        library = loaded()
    if library is None:
        return (
            "Not there, or not for this source and this jaxlib: compile it by the same "
            "command without flags."
        )
    return f"Used on CPUs: {library}"
