"""A run of `gpu.py`: its sizes, its time, its programs, and where its numbers go."""

import functools
import gc
import json
import os
import re
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from gpu_parts import KERNEL, XLA
from optax_sparse_adam import native
from optax_sparse_adam._rows.with_ops import KERNELS

SWITCH = "OPTAX_SPARSE_ADAM_GPU_KERNEL"


class OutOfTimeError(Exception):
    """The time of the run is used up."""


class Sizes:
    """Rows, columns and ids; and for how long a round of calls is to last, in seconds.

    The tiny ones, for a machine without a GPU, show that the program runs.
    """

    def __init__(self, is_tiny, is_quick):
        self.is_tiny, self.is_quick = is_tiny, is_quick or is_tiny
        self.round_seconds = 0.002 if is_tiny else 0.05 if is_quick else 0.15
        self.large = (2000, 16, 512) if is_tiny else (10_000_000, 128, 1 << 20)
        self.bag = 16
        small = [(1_000_000, 64, 65_536), (1_000_000, 64, 8192)]
        self.small = [(500, 8, 64)] if is_tiny else small
        self.formulas = (1000, 8, 128) if is_tiny else (4_000_000, 64, 262_144)
        cross = [(10_000, 64, 8192), (100_000, 64, 8192)]
        self.cross = [(300, 8, 64)] if is_tiny else cross
        # And the columns of the two layers of a model that takes some 7.5 ms.
        self.host = (1000, 8, 64, 16) if is_tiny else (4_000_000, 64, 65_536, 2048)
        self.copied = 1 << (20 if is_tiny else 29)  # numbers of four bytes


@dataclass
class Run:
    """What parts of a run share.

    Attributes:
      file: Written after each number; that of an earlier process is gone on with.
      until: When the last case may begin, by `time.time()`.
      sizes: What is measured.
    """

    file: Path
    until: float
    sizes: Sizes

    def __post_init__(self):
        self.content = json.loads(self.file.read_text(encoding="utf-8"))
        self.part = ""

    def say(self, *words):
        print(*words, flush=True)

    def write(self):
        half = self.file.with_suffix(".half")
        half.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        half.replace(self.file)

    def alive(self):
        """Tells the process that waits for this one that it goes on."""
        os.utime(self.file)

    def is_well(self):
        """Whether the GPU still computes: after a fault of a kernel it does not."""
        try:
            return float(jnp.sum(jnp.ones(8))) == 8
        except Exception:
            return False

    def begin(self, part):
        self.part, self.began = part, time.time()
        self.content["parts"][part] = {"state": "began"}
        self.write()
        self.say(f"\n## {part}")

    def end(self, state="done"):
        if os.environ.get(SWITCH) == "1":  # else it says that nobody asks for it
            self.content["status"] = native.gpu_status()
        seconds = round(time.time() - self.began, 1)
        self.content["parts"][self.part] = {"state": state, "seconds": seconds}
        self.write()
        self.say(f"[{self.part}: {state}, {seconds} s]")

    def record(self, **numbers):
        self.content["records"].append({"part": self.part, **numbers})
        self.write()

    def check_time(self):
        if time.time() > self.until:
            raise OutOfTimeError

    def attempt(self, function, *args, **what):
        """`function(*args)`, or `None` where it raises, which is said and kept."""
        self.check_time()
        try:
            return function(*args)
        except OutOfTimeError:
            raise
        except Exception as error:
            self.failed(error, **what)
            return None
        finally:
            gc.collect()

    def failed(self, error, **what):
        words = f"{type(error).__name__}: {str(error)[:600]}"
        self.say("FAILED", *what.values(), words)
        self.say("".join(traceback.format_tb(error.__traceback__)[-3:]))
        self.record(**what, error=words)


def switch(on):
    """Programs that are traced next use the kernel for GPUs, or XLA alone."""
    os.environ[SWITCH] = str(int(on))
    jax.clear_caches()


@functools.cache
def paths():
    """By XLA, and by the kernel, if there is one for this GPU."""
    switch(True)
    kernel = KERNELS.get("cuda")
    there = jax.default_backend() == "gpu" and kernel and kernel.available()
    switch(False)
    return [XLA, KERNEL] if there else [XLA]


def compile_all(run, cases, lower):
    """Programs of cases, those by XLA first; whoever cannot be compiled is recorded.

    Compiling is most of the time of a run, and threads share it: NVRTC and XLA leave
    Python's lock. So the seconds of a program are those beside others.

    Args:
      run: The run.
      cases: Each has a `path` and `what()`, its words for the record.
      lower: Traces a case, and returns a lowered program.

    Yields:
      Cases, with their programs, custom calls by target, and seconds.
    """
    futures = {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        for path in paths():
            run.check_time()
            switch(path == KERNEL)
            chosen = [case for case in cases if case.path == path]
            traced = {case: pool.submit(_traced, run, lower, case) for case in chosen}
            for case, future in traced.items():
                made = future.exception() is None and future.result()
                # Once more alone: threads may have been in each other's way.
                made = made or run.attempt(_traced, run, lower, case, **case.what())
                if made:
                    futures[case] = pool.submit(_compiled, run, *made)
    for case, future in futures.items():
        made = run.attempt(future.result, **case.what())
        if made:
            yield case, *made


def _traced(run, lower, case):
    began = time.perf_counter()
    lowered = lower(case)
    found = re.findall(r'custom_call @"?([\w.$]+)', lowered.as_text())
    calls = {target: found.count(target) for target in found}
    run.alive()
    return lowered, calls, round(time.perf_counter() - began, 3)


def _compiled(run, lowered, calls, traced):
    began = time.perf_counter()
    program = lowered.compile()
    run.alive()
    taken = round(time.perf_counter() - began, 3)
    return program, calls, {"trace": traced, "compile": taken}
