"""CPU seconds to trace and compile a training step, in brackets those to trace it.

`python benchmarks/compile_times.py [WORD ...]`: models with tables of bags and dense
layers, each in a new process without JAX's cache; with words, only those whose names
hold one of them. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain JAX.
"""

import os
import subprocess
import sys
import time

ROWS, DIM, BAGS, IDS = 10_000, 32, 512, 5  # these change nothing
MODELS = {
    "1 table, 24 layers": (1, 24),
    "8 tables, 3 layers": (8, 3),
    "26 tables, 3 layers": (26, 3),
}


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
        "dense `optax.adamw`": optax.adamw(1e-3),
        "`lazy(optax.adamw)`": osa.lazy(optax.adamw(1e-3)),
        "`sparse_adam`": osa.sparse_adam(1e-3),
        "`exact_adamw` for all": osa.exact_adamw(1e-3),
        "`exact_adamw` for the tables, `optax.adamw` for the layers": optax.partition(
            parts, {name: name for name in parts}
        ),
    }


def measure(size, name):
    """What a process of its own runs and prints."""
    import jax

    import optax_sparse_adam as osa

    loss, params, ids = model(*MODELS[size])
    tx = optimizers()[name]
    state = jax.block_until_ready(tx.init(params))
    step = osa.make_train_step(loss, tx, sparse=False if "dense" in name else None)
    start = time.process_time()
    traced = step.trace(params, state, ids)
    middle = time.process_time()
    traced.lower().compile()
    print(f"{time.process_time() - start:.1f} ({middle - start:.2f})")


def main():
    print("| optimiser | " + " | ".join(MODELS) + " |")
    print("|---" * (1 + len(MODELS)) + "|", flush=True)
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}

    def cell(size, name):
        if sys.argv[1:] and not any(word in size + name for word in sys.argv[1:]):
            return "-"
        command = [sys.executable, __file__, "--measure", size, name]
        found = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return found.stdout.strip()

    for name in optimizers():
        cells = " | ".join(cell(size, name) for size in MODELS)
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    measure(*sys.argv[2:]) if "--measure" in sys.argv else main()
