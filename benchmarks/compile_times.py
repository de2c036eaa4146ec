"""Seconds that happen once: import, tracing, lowering and compiling, the first step.

`python benchmarks/compile_times.py [WORD ...]`: training steps of models with tables of
bags and dense layers, each in a new process without JAX's cache; with words, only those
whose names hold one of them. CPU seconds, but for the import and the first step. Sizes
of tables change none but the last. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain JAX.
"""

import itertools
import os
import subprocess
import sys
import time

ROWS, DIM, BAGS, IDS = 10_000, 32, 512, 5


def model(tables, layers):
    """The loss, parameters, and ids of a model; the layers are those of a residual."""
    import jax
    import jax.numpy as jnp

    import optax_sparse_adam as osa

    width = tables * DIM

    def loss(params, ids):
        bags = [
            osa.embedding_bag(table, ids[:, i])
            for i, table in enumerate(params["tables"].values())
        ]
        x = jnp.concatenate(bags, axis=1)
        for layer in params["layers"]:
            x = x + jax.nn.relu(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    layer = {"w": jnp.zeros((width, width)), "b": jnp.zeros(width)}
    params = {
        "tables": {str(i): jnp.ones((ROWS, DIM)) for i in range(tables)},
        "layers": [jax.tree.map(jnp.copy, layer) for _ in range(layers)],
    }
    return loss, params, jnp.zeros((BAGS, tables, IDS), jnp.int32)


def optimizers():
    import optax

    import optax_sparse_adam as osa

    parts = {"tables": osa.exact_adamw(1e-3), "layers": optax.adamw(1e-3)}
    return {
        "dense optax.adamw": optax.adamw(1e-3),
        "lazy(optax.adamw)": osa.lazy(optax.adamw(1e-3)),
        "sparse_adam": osa.sparse_adam(1e-3),
        "exact_adamw": osa.exact_adamw(1e-3),
        "exact_adamw for tables, optax.adamw": optax.partition(
            parts, {name: name for name in parts}
        ),
    }


MODELS = {"1 table, 24 layers": (1, 24), "8 tables, 3": (8, 3), "26 tables, 3": (26, 3)}


def measure(size, name):
    began = time.perf_counter()
    import optax  # noqa: F401

    middle = time.perf_counter()
    import optax_sparse_adam as osa

    imported = time.perf_counter() - middle
    import jax

    loss, params, ids = model(*MODELS[size])
    tx = optimizers()[name]
    state = jax.block_until_ready(tx.init(params))
    step = osa.make_train_step(loss, tx, sparse=False if "dense" in name else None)
    marks = [time.process_time()]
    traced = step.trace(params, state, ids)
    marks.append(time.process_time())
    compiled = traced.lower().compile()
    marks.append(time.process_time())
    first = time.perf_counter()
    jax.block_until_ready(compiled(params, state, ids))
    first = time.perf_counter() - first
    trace, compile = (b - a for a, b in itertools.pairwise(marks))
    numbers = middle - began, imported, trace, compile, trace + compile, first
    print(f"| {size} | {name} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |")


def main():
    print("| model | optimiser | import optax | ours | trace | compile | both | run |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    for size in MODELS:
        for name in optimizers():
            if not sys.argv[1:] or any(word in size + name for word in sys.argv[1:]):
                command = [sys.executable, __file__, "--measure", size, name]
                subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    measure(*sys.argv[2:]) if "--measure" in sys.argv else main()
