"""The device, the versions, and the speed of its memory."""

import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend
from machine import describe, read

from gpu_parts import KERNEL
from gpu_parts.run import SWITCH, paths
from gpu_parts.steps import timed


def device(run):
    there = describe() | {
        "driver": driver(),
        "jax_platform": get_backend().platform_version,
    }
    there["devices"] = len(jax.devices())
    there["gpu_kernel"] = KERNEL in paths()
    run.content["environment"] = there
    for name, value in there.items():
        run.say(f"{name}: {value}")
    run.say(f"commit: {run.content['commit'] or 'unknown (--commit)'}")
    if not there["gpu_kernel"]:
        run.say(f"no kernel for this device, asked for by {SWITCH}=1: XLA alone")
    run.write()
    run.attempt(copy_speed, run, name="copy")


def driver():
    asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        return done.stdout.strip().splitlines()[-1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return read(Path("/proc/driver/nvidia/version")).split("\n")[0]


def copy_speed(run):
    """Bytes a second, those that are read and those that are written."""
    x = jnp.ones(run.sizes.copied)
    program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    last = [x]

    def call():
        last[0] = program(last[0])

    del x
    numbers = timed(run, call, lambda: jax.block_until_ready(last))
    speed = 2 * 4 * run.sizes.copied / (numbers["best_ms"] / 1e3)
    run.say(f"copy of {4 * run.sizes.copied / 1e9:.2g} GB: {speed / 1e9:,.0f} GB/s")
    run.content["copy_bytes_per_s"] = round(speed)
    run.record(name="copy", bytes=2 * 4 * run.sizes.copied, **numbers)
