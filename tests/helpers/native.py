"""What the tests of the optional kernel share, beside the fixtures of conftest.py."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from optax_sparse_adam.native import _build, _library

needs_compiler = pytest.mark.skipif(
    not _build.compiler(), reason="there is no C++ compiler"
)

_KEPT = Path(__file__).parents[2] / ".pytest_cache" / "kernels"


def compile_once(monkeypatch):
    """Lets `CXX` be the compiler that is there, which keeps what it has made."""
    if command := _build.compiler():
        keeping = Path(__file__).with_name("compiler.py")
        command = [sys.executable, str(keeping), str(_KEPT), *command]
        monkeypatch.setenv("CXX", shlex.join(command))


def installed_or_built(monkeypatch):
    """The library in the cache folder: that of the installation, or a new one.

    That of an installation is taken if it is of this source and interface, by its name.
    """
    newest = _build.interface(jax.ffi.include_dir())
    for version, installed in _build.libraries(_library.INSTALLED, newest):
        if version == newest:
            library = _library.cache() / installed.name
            library.parent.mkdir(parents=True, exist_ok=True)
            library.symlink_to(installed)
            return library
    compile_once(monkeypatch)
    return _library.build()


def calls_in(program):
    """The handler and the formula of each call of the kernel in a lowered program."""
    pattern = r"@optax_sparse_adam\.(\w+)\(.*formula = \"(\w+)\""
    return [" ".join(call) for call in re.findall(pattern, program)]


def python(*args, **environment):
    path = os.pathsep.join([os.getcwd(), *sys.path])
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def sanitized(folder):
    """The kernel compiled with sanitizers, and what a process sets to load it.

    `None` where the compiler has none, or they are none to preload.
    """
    compiler = _build.compiler()
    flags = "-O0 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    library = folder / "sanitized.so"
    command = [*compiler, *_build.FLAGS.split(), *flags.split()]
    command += [f"-isystem{jax.ffi.include_dir()}", str(_build.SOURCE)]
    built = subprocess.run([*command, "-o", library], capture_output=True, check=False)
    variables = sanitizers()
    return None if built.returncode or variables is None else (library, variables)


def sanitizers():
    """What a process sets to load a library with sanitizers; `None` without them."""
    compiler = _build.compiler()
    # An interpreter that is not sanitized loads the runtime first; and with it the
    # library of C++, whose exceptions the runtime wraps.
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(name).is_absolute() for name in runtimes):
        return None
    # Python and JAX keep memory until the end.
    return {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}


def flags_of_memory(address):
    """Those of the kernel of Linux for the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
