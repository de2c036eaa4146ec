"""Times what happens once: import, compilation and the first step, in new processes.

python benchmarks/startup.py

A step of `sparse_adam` on row-sparse gradients, and of `optax.adam` on dense ones, on a
table of 1M x 64 with 8,192 ids; five new processes each, medians and quartiles.
"""

import json
import os
import subprocess
import sys
import time

import report
from contestants import DENSE

REPEATS = 5
ROWS, DIM, IDS = 1_000_000, 64, 8_192
IMPORT = """
import time
began = time.perf_counter()
import optax
middle = time.perf_counter()
import optax_sparse_adam
print([time.perf_counter() - began, middle - began])"""


def in_new_process(*arguments):
    # A step found in a cache on disk would not be compiled.
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def one_step(name, rows):
    """Compiles and takes one step, and prints the seconds of both."""
    import jax
    import jax.numpy as jnp
    import optax
    from contestants import RATE, make_optimizer, training_step

    tx = optax.adam(RATE) if name == DENSE else make_optimizer(name)
    table, weights = jnp.ones((rows, DIM)), jnp.ones(DIM)
    ids = jnp.arange(IDS, dtype=jnp.int32) % rows
    given = jax.block_until_ready((table, tx.init(table), ids, weights))
    step = jax.jit(training_step(tx, sparse=name != DENSE), donate_argnums=(0, 1))
    began = time.perf_counter()
    compiled = step.lower(*given).compile()
    middle = time.perf_counter()
    jax.block_until_ready(compiled(*given))
    print([middle - began, time.perf_counter() - middle])


def main():
    names = ("sparse_adam", DENSE)
    times = {what: ([], []) for what in ("import", "compile", "first step")}
    for _ in range(REPEATS):
        for taken, seconds in zip(
            times["import"], in_new_process("-c", IMPORT), strict=True
        ):
            taken.append(seconds)
        for number, name in enumerate(names):
            compiled, first = in_new_process(__file__, name, str(ROWS))
            times["compile"][number].append(compiled)
            times["first step"][number].append(first)
    rows = [("", *names, "ratio")]
    for what, (ours, theirs) in times.items():
        cells = [
            report.with_quartiles(report.spread(x), report.digits)
            for x in (ours, theirs)
        ]
        ratio = report.with_quartiles(report.ratio(ours, theirs))
        rows.append((f"{what}, s", *cells, ratio))
    print(report.columns(rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_step(sys.argv[1], int(sys.argv[2]))
    else:
        main()
