"""Steps of Keras' `fit`: Keras' own Adam beside optimisers of this package.

    python benchmarks/keras_fit.py [--rows 20000 1000000] [--steps 30] [--turns 4]

Bags of Zipf ids, their mean, a dense layer, the loss of a yes-or-no question: the model
of docs/keras.md, whose table this prints. Contestants take turns: a turn is a `fit` on
the same batches. A step is the time from the end of one batch to that of the next one,
when its loss is there; the first two of a turn, of which one may compile, do not count.
What `fit` does once, as to bring rows of `exact_adam` up to date, is no part of a step.
Of all steps the median; in brackets, those of the fastest and the slowest turn.
"""

import argparse
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import optax
from machine import OtherPrograms
from problem import DRAWS

import optax_sparse_adam as osa
from optax_sparse_adam.keras import Optimizer, row_sparse

RATE = 1e-3
KERAS = "`keras.optimizers.Adam`"
WARMUP = 2
OPTIMIZERS = {
    KERAS: lambda: keras.optimizers.Adam(RATE),
    "`sparse_adam`": lambda: Optimizer(osa.sparse_adam, RATE, eps=1e-7),
    "`exact_adam`": lambda: Optimizer(osa.exact_adam, RATE),
    "`lazy(optax.adamw)`": lambda: Optimizer(lambda x: osa.lazy(optax.adamw(x)), RATE),
}


class Clock(keras.callbacks.Callback):
    """When the loss of each batch was there."""

    def on_train_begin(self, logs=None):
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        self.ends.append(time.perf_counter())


def model_of(name, rows, dim):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Embedding(rows, dim),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model = model if name == KERAS else row_sparse(model)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=OPTIMIZERS[name](), loss=loss)
    return model


def turn(model, ids, labels, bags):
    """Milliseconds of each step of a `fit`."""
    clock = Clock()
    model.fit(ids, labels, bags, callbacks=[clock], shuffle=False, verbose=0)
    return 1e3 * np.diff(clock.ends)[WARMUP - 1 :]


def in_words(turns):
    """Median of all steps, and the medians of the fastest and the slowest turn."""
    medians = [np.median(x) for x in turns]
    return (
        f"{np.median(np.concatenate(turns)):.3g} "
        f"({min(medians):.3g} to {max(medians):.3g})"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 1_000_000])
    sizes = {"dim": 64, "bags": 1024, "ids": 8, "steps": 30, "turns": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.steps <= WARMUP:
        parser.error(f"--steps must be more than {WARMUP}, which do not count")
    print(f"{vars(args)}; keras {keras.__version__}\n")
    others = OtherPrograms()
    print(f"| rows | {' | '.join(OPTIMIZERS)} |\n|{'---|' * (1 + len(OPTIMIZERS))}")
    for rows in args.rows:
        rng = np.random.default_rng(0)
        shape = args.steps * args.bags, args.ids
        ids = DRAWS["zipf"](rng, rows, shape)()
        labels = (ids.sum(axis=1, keepdims=True) % 2).astype(np.float32)
        models = {name: model_of(name, rows, args.dim) for name in OPTIMIZERS}
        times = {name: [] for name in models}
        for number in range(args.turns):
            for name in [*models][:: -1 if number % 2 else 1]:
                times[name].append(turn(models[name], ids, labels, args.bags))
        cells = " | ".join(in_words(x) for x in times.values())
        print(f"| {rows:,} | {cells} |", flush=True)
    print(others.in_words())


if __name__ == "__main__":
    main()
