"""What happens once: import, compilation and the first step, in new processes."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._command_line import InputError
from ._contestants import DENSE, training_step
from ._optimizers import RATE, make_optimizer
from ._problem import Problem

_REPEATS = 5
_TABLE_BYTES = 1 << 28  # neither compilation nor our step depends on the rows
_IMPORT = """
import time
began = time.perf_counter()
import optax
middle = time.perf_counter()
import optax_sparse_adam
print([time.perf_counter() - began, middle - began])"""
_CHILD = "from optax_sparse_adam.benchmark import _startup; _startup.child({!r}, {!r})"


def measure(problem: Problem, name: str) -> dict[str, dict[str, list[float]]]:
    """Seconds of each, for `name` and for the dense step of the same model."""
    most = max(1, _TABLE_BYTES // (problem.dim * jnp.dtype(problem.dtype).itemsize))
    problem = problem._replace(rows=min(problem.rows, most))
    once: dict[str, dict[str, list[float]]] = {
        what: {name: [], DENSE: []} for what in ("import", "compile", "first step")
    }
    for _ in range(_REPEATS):
        for contestant, seconds in zip((name, DENSE), _run(_IMPORT), strict=True):
            once["import"][contestant].append(seconds)
        for contestant in (name, DENSE):
            times = _run(_CHILD.format(contestant, tuple(problem)))
            for what, seconds in zip(("compile", "first step"), times, strict=True):
                once[what][contestant].append(seconds)
    return once


def _run(code: str) -> Any:
    # A step found in a cache on disk would not be compiled.
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise InputError(f"--startup failed in a new process ({why}); leave it out")
    return [round(x, 4) for x in json.loads(done.stdout.splitlines()[-1])]


def child(name: str, sizes: Any) -> None:
    """Compiles and takes one step, and prints the seconds of both."""
    problem = Problem(*sizes)
    with jax.enable_x64(problem.dtype == "float64"):
        tx: Any = optax.adam(RATE) if name == DENSE else make_optimizer(name)
        table = jnp.ones((problem.rows, problem.dim), problem.dtype)
        ids = jnp.arange(problem.ids, dtype=jnp.int32) % problem.rows
        weights = jnp.ones(problem.dim, problem.dtype)
        given = jax.block_until_ready((table, tx.init(table), ids, weights))
        step = jax.jit(training_step(tx, sparse=name != DENSE), donate_argnums=(0, 1))
        del table
        began = time.perf_counter()
        compiled = step.lower(*given).compile()
        middle = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        print([middle - began, time.perf_counter() - middle])
