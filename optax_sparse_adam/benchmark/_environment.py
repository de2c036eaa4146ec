"""The machine: what it is, how much memory is free, how fast it copies."""

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..native import available

_PACKAGES = ("optax-sparse-adam", "jax", "jaxlib", "optax", "numpy", "torch")
_COPY_BYTES = 1 << 28  # beyond every cache, and little memory


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """The time of a call, to 0.1 us: a results file need not hold more."""
    began = time.perf_counter()
    run(*args)
    return round(time.perf_counter() - began, 7)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Device, system and versions."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "cores": num_cores(),
        "os": f"{platform.system()} {platform.machine()}",
        "kernel": device.platform == "cpu" and available(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def free_bytes() -> int | None:
    """Memory that tables can take, or `None` where nothing tells."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    free = [
        int(line.split()[1]) * 1024
        for line in _read("/proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    # A container may have less than the machine.
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free.append(int(limit) - int(used))
    return min(free, default=None)


def time_copies(repeats: int) -> tuple[int, list[float]]:
    """Copies one array onto another: the bytes read and written, and the times."""
    free = free_bytes()
    size = _COPY_BYTES if free is None else min(_COPY_BYTES, free // 8)
    source = jnp.ones(size // 4, jnp.float32)
    target = jnp.zeros_like(source)
    # Donated, or each copy would first be given fresh memory by the system.
    copy: Any = jax.jit(
        lambda target, source: jnp.copy(source), donate_argnums=0, keep_unused=True
    )
    jax.block_until_ready((source, target))

    def once() -> None:
        nonlocal target
        target = jax.block_until_ready(copy(target, source))

    return 2 * source.nbytes, [seconds(once) for _ in range(repeats + 2)][2:]
