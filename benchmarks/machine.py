"""The machine: what it is, its free memory, who else uses it."""

import os
import platform
import time
from importlib.metadata import distributions
from pathlib import Path

import jax
import jax.numpy as jnp

from optax_sparse_adam.native import available

PACKAGES = ("optax-sparse-adam", "jax", "jaxlib", "optax", "numpy", "torch")


def cores():
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def num_cores():
    return len(cores())


def seconds(run, *args):
    """The time of a call, to 0.1 us: a results file need not hold more."""
    began = time.perf_counter()
    run(*args)
    return round(time.perf_counter() - began, 7)


def read(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def processor():
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe():
    """Device, system and versions."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else processor(),
        "cores": num_cores(),
        "os": f"{platform.system()} {platform.machine()}",
        "kernel": device.platform == "cpu" and available(),
        "python": platform.python_version(),
        "versions": {x.name: x.version for x in distributions() if x.name in PACKAGES},
    }


COPIED_BYTES = 1 << 28  # more than any cache holds


def bytes_a_second():
    """What the memory moves now: an array is read and written in place, by all cores.

    The best of five, as others can only slow it down.
    """
    scale = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    x = jax.block_until_ready(scale(jnp.ones(COPIED_BYTES // 4, jnp.float32)))
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        x = jax.block_until_ready(scale(x))
        taken.append(time.perf_counter() - began)
    return 2 * COPIED_BYTES / min(taken)


class OtherPrograms:
    """How many of our cores other programs take, from now on.

    Threads that wait for a core make a measurement worthless, most of all torch's,
    which wait for each other.
    """

    def __init__(self):
        self.began, self.before = time.perf_counter(), self.busy_seconds()

    @staticmethod
    def busy_seconds():
        """CPU seconds that others have taken, a virtual machine's host included."""
        ours = {f"cpu{number}" for number in cores()}
        ticks = [
            sum(map(int, numbers[:8])) - int(numbers[3]) - int(numbers[4])
            for name, *numbers in map(str.split, read("/proc/stat").splitlines())
            if name in ours  # all but "idle" and "iowait"
        ]
        if not ticks:
            return None
        return sum(ticks) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])

    def cores(self):
        """Cores taken on average since this was made; `None` where nothing tells."""
        if self.before is None:
            return None
        taken = self.busy_seconds() - self.before
        return round(max(0.0, taken / (time.perf_counter() - self.began)), 2)

    def in_words(self):
        """A last line for programs that print times."""
        taken = self.cores()
        doubt = ": the times mean nothing" if is_busy(taken, num_cores()) else ""
        return f"other programs took {taken} cores{doubt}"


def is_busy(taken, num_cores):
    """Whether others take so much that times mean nothing: a tenth of the cores."""
    return taken is not None and taken > 0.1 * num_cores


def free_bytes():
    """Memory that tables can take, or `None` where nothing tells."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    free = [
        int(line.split()[1]) * 1024
        for line in read("/proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    # A container may have less than the machine.
    limit = read("/sys/fs/cgroup/memory.max").strip()
    used = read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free.append(int(limit) - int(used))
    return min(free, default=None)
