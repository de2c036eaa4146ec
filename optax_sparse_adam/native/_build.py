"""How the kernel is compiled. Imports no JAX: an installation has its headers only.

The name of a library says what it was compiled from and for, so that none of an older
source, of other `FLAGS` or for another kind of processor is ever loaded. It does not
say what `CXX` adds: `CXX="g++ -march=native"` is for one machine, not for a home folder
that several share.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

Version = tuple[int, int]
SOURCE = Path(__file__).with_name("rows.cc")  # it includes the headers beside it
# No contraction of multiply and add, so that all compilers round equally; sqrt need not
# set errno, so that it is one instruction for several numbers; and what is inline in
# XLA's headers is not mixed with that of other libraries and versions.
FLAGS = (
    "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fPIC -shared -fvisibility=hidden"
)


def switched_off() -> bool:
    """Whether the user wants no kernel, be it compiled or used."""
    switch = os.environ.get("OPTAX_SPARSE_ADAM_NATIVE", "")
    return switch.lower() in ("0", "false", "off", "no")


def supported() -> bool:
    """Whether the kernel is for this system: on Windows nobody has run it."""
    return sys.platform != "win32"


def compiler() -> list[str]:
    """The command of `CXX`, or the first C++ compiler on the path; empty if none.

    Raises:
      RuntimeError: If `CXX` has a quote that does not end.
    """
    if not supported():
        return []
    compilers = map(shutil.which, ("c++", "g++", "clang++"))
    command = os.environ.get("CXX", "")
    try:
        return shlex.split(command) or [*filter(None, compilers)][:1]
    except ValueError as error:
        raise RuntimeError(f"CXX={command} is not a command: {error}") from error


def interface(include: str | Path) -> Version:
    """Which version of XLA's foreign function interface these headers describe.

    Raises:
      RuntimeError: If they are not there, or say nothing.
    """
    header = Path(include, "xla", "ffi", "api", "c_api.h")
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"jaxlib has no headers: {error}") from error
    numbers = re.findall(
        r"^#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)$", text, re.MULTILINE
    )
    if len(numbers) != 2:
        raise RuntimeError(f"No version of XLA's interface found in {header}")
    return int(numbers[0]), int(numbers[1])


def _prefix() -> str:
    digest = hashlib.sha256(f"{FLAGS} {sys.platform} {platform.machine()}".encode())
    for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))):
        digest.update(path.read_bytes())
    return f"rows-{digest.hexdigest()[:16]}"


def library_name(version: Version) -> str:
    """The file name of this source's library on this machine."""
    return f"{_prefix()}-{version[0]}.{version[1]}.so"


def libraries(folder: Path, newest: Version) -> list[tuple[Version, Path]]:
    """The libraries of this source in a folder for this interface, newest first.

    XLA takes what was compiled for an older version of its interface for a year or
    more, but nothing that was compiled for a newer one.
    """
    prefix = _prefix()
    pattern = re.compile(re.escape(prefix) + r"-(\d+)\.(\d+)\.so")
    names = [pattern.fullmatch(path.name) for path in folder.glob(f"{prefix}-*.so")]
    versions = [((int(m[1]), int(m[2])), folder / m[0]) for m in names if m]
    return sorted(
        (x for x in versions if x[0][0] == newest[0] and x[0] <= newest), reverse=True
    )


def compile_into(folder: Path, include: str | Path) -> Path:
    """Compiles the library with these headers, in place of an older one.

    Raises:
      OSError: Where the folder cannot be written.
      RuntimeError: Where there is no compiler or no header, where compiling fails, or
        where this process cannot load the result.
    """
    if not supported():
        raise RuntimeError(
            "On Windows the kernel is not compiled; all runs in plain JAX."
        )
    command = compiler()
    if not command:
        raise RuntimeError(
            "No C++ compiler found: looked for c++, g++ and clang++, and at the "
            "variable CXX. Install one, or go on in plain JAX, which needs none."
        )
    target = folder / library_name(interface(include))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch, target.name)
        command += [*FLAGS.split(), f"-isystem{include}", str(SOURCE)]
        command += ["-o", str(output)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace"
            )
        except OSError as error:
            raise RuntimeError(f"{command[0]} could not be run: {error}") from error
        if done.returncode or not output.exists():
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        try:
            # That of another machine, say; once in place it would be met, and warned
            # of, in every process.
            ctypes.CDLL(str(output))
        except OSError as error:
            raise RuntimeError(
                f"{shlex.join(command)} made what cannot be loaded: {error}"
            ) from error
        os.replace(output, target)  # never half written for those who look for it
    return target
