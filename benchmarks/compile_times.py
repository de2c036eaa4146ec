"""Seconds that whole models take to trace, to lower and to compile.

`python benchmarks/compile_times.py`: a training step of `examples/word2vec.py` (two
tables) and of `examples/ngram_memory.py` (a transformer of two layers with a table),
each in a new process without JAX's cache; the table has 200,000 rows, which changes
nothing. `OPTAX_SPARSE_ADAM_NATIVE=0` measures plain JAX.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[1] / "examples")


def word2vec(tx):
    import jax
    import jax.numpy as jnp
    import word2vec

    tables = {name: jnp.zeros((30_000, 100)) for name in ("center", "context")}
    ids = jnp.zeros(512, jnp.int32), jnp.zeros((512, 6), jnp.int32)
    return word2vec.loss_fn, jax.eval_shape(lambda: tables), tx, None, ids


def language_model(make):
    import jax
    import jax.numpy as jnp
    import ngram_memory

    model = ngram_memory.LanguageModel(200_000)
    batch = jnp.zeros((16, 65), jnp.int32)
    init = jax.eval_shape(model.init, jax.random.key(0), batch[:, :-1])
    loss, params = ngram_memory.make_loss(model), init["params"]
    tx, sparse = make(params)
    return loss, params, tx, sparse, (batch,)


def programs():
    """Names, and what makes the loss, the parameters, the optimiser and a batch."""
    import ngram_memory
    import optax

    import optax_sparse_adam as osa

    def parts(memory):
        return lambda params: (
            ngram_memory.optimizer_of_parts(params, 2e-3, memory),
            ngram_memory.is_memory,
        )

    w2v, lm = "word2vec, ", "language model, "
    return {
        w2v + "optax.adam": lambda: word2vec(optax.adam(1e-3)),
        w2v + "sparse_adam": lambda: word2vec(osa.sparse_adam(1e-3)),
        w2v + "exact_adam": lambda: word2vec(osa.exact_adam(1e-3)),
        w2v + "lazy(adam)": lambda: word2vec(osa.lazy(optax.adam(1e-3))),
        lm + "optax.adamw": lambda: language_model(
            lambda params: (optax.adamw(2e-3), False)
        ),
        lm + "rowwise_adagrad and adamw": lambda: language_model(
            parts("rowwise_adagrad")
        ),
        lm + "exact_adamw and adamw": lambda: language_model(parts("exact_adamw")),
        lm + "exact_adamw for all": lambda: language_model(
            lambda params: (osa.exact_adamw(2e-3), None)
        ),
        lm + "lazy(adamw) for all": lambda: language_model(
            lambda params: (osa.lazy(optax.adamw(2e-3)), None)
        ),
    }


def measure(name):
    import jax

    import optax_sparse_adam as osa

    loss, params, tx, sparse, batch = programs()[name]()
    state = jax.eval_shape(tx.init, params)
    step = osa.make_train_step(loss, tx, sparse=sparse)
    began = time.perf_counter()
    traced = step.trace(params, state, *batch)
    seconds = [time.perf_counter()]
    lowered = traced.lower()
    seconds.append(time.perf_counter())
    lowered.compile()
    seconds.append(time.perf_counter())
    parts = [b - a for a, b in zip([began, *seconds], seconds, strict=False)]
    print(f"{name}: " + ", ".join(f"{x:.2f}" for x in (*parts, sum(parts))))


def main():
    sys.path.insert(0, EXAMPLES)
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    print("seconds to trace, to lower, to compile, together")
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    for name in programs():
        command = [sys.executable, __file__, name]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
