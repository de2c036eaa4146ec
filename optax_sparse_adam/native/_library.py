"""Compiles the kernel, finds it again, and registers it with XLA."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import jax

TARGETS = ("adam_rows", "sum_rows")
_SOURCE = Path(__file__).with_name("rows.cc")
# No contraction of multiply and add, so that each compiler rounds alike; and sqrt need
# not set errno, so that it is one instruction for several numbers.
_FLAGS = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fPIC -shared"


def path() -> Path:
    """Where the library of this source, this jaxlib and this machine is or would be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = f"{_FLAGS} {version('jaxlib')} {sys.platform} {platform.machine()}"
    digest = hashlib.sha256(key.encode() + _SOURCE.read_bytes()).hexdigest()
    return Path(cache, "optax_sparse_adam", f"rows-{digest[:16]}.so")


def compiler() -> list[str]:
    """The command of `CXX`, or the first C++ compiler on the path; empty if none."""
    found = map(shutil.which, ("c++", "g++", "clang++"))
    return shlex.split(os.environ.get("CXX", "")) or [*filter(None, found)][:1]


def build() -> Path:
    """Compiles the library, in place of an older one.

    Raises:
      OSError: Where the cache cannot be written.
      RuntimeError: Where there is no compiler, or where it fails.
    """
    command = compiler()
    if not command:
        raise RuntimeError(
            "No C++ compiler found: looked for c++, g++ and clang++, and at the "
            "variable CXX. Install one, or go on in plain JAX, which needs none."
        )
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder, target.name)
        include = f"-isystem{jax.ffi.include_dir()}"
        command += [*_FLAGS.split(), include, str(_SOURCE), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"{command[0]} could not be run: {error}") from error
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        os.replace(output, target)  # never half written for those who look for it
    return target


def register(library: Path) -> None:
    """Loads the library and makes its functions known to XLA."""
    functions = ctypes.CDLL(str(library))
    for name in TARGETS:
        capsule = jax.ffi.pycapsule(getattr(functions, name))
        jax.ffi.register_ffi_target(f"optax_sparse_adam.{name}", capsule, "cpu")


@functools.cache
def available() -> bool:
    """Whether the kernel may be used; decided once in a process.

    XLA's partitioner cannot look into the kernel: it would collect a sharded table on
    each device. So a process that has several CPU devices does without.
    """
    switch = os.environ.get("OPTAX_SPARSE_ADAM_NATIVE", "")
    if switch.lower() in ("0", "false", "off", "no"):
        return False
    try:
        library = path()
        if not library.exists() or jax.device_count("cpu") > 1:
            return False
    except (ImportError, OSError, RuntimeError):
        # Of jaxlib no version is known; the cache or the source cannot be read; there
        # is no home folder; or `jax_platforms` leaves out the CPU.
        return False
    try:
        register(library)
    except (OSError, AttributeError, RuntimeError) as error:
        warnings.warn(
            f"The kernel at {library} cannot be loaded ({error}); going on in plain "
            "JAX. Compile it anew: python -m optax_sparse_adam.native",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
