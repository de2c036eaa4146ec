"""Word vectors in Keras, trained at the cost of the batch.

    pip install -e ".[examples,keras]"
    python examples/keras_words.py

The model, the text and the pairs are those of `word2vec.py`: two vectors for each of
some 30,000 words of Python's standard library, so that the vector of a word tells the
words around it from noise. Here Keras trains them, with `fit`, its callbacks and its
validation: for a few steps by `keras.optimizers.Adam`, and, with three lines that
differ, by `exact_adam`, whose losses are the same. It takes half a minute.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import argparse
import sys
import time

try:
    import keras
    import numpy as np
    from keras import layers

    import optax_sparse_adam as osa
    from optax_sparse_adam.keras import Optimizer, row_sparse  # 1
except ImportError as error:
    install = 'pip install ".[examples,keras]"'
    sys.exit(
        f"keras_words.py needs {error.name}, which is not installed; run {install}"
    )

import word2vec
from word2vec import BATCH, DIM, LEARNING_RATE, NEGATIVES

# Each on its own line in `train`: which model, which optimiser.
OPTIMIZERS = {
    "keras.optimizers.Adam": lambda: keras.optimizers.Adam(LEARNING_RATE, epsilon=1e-8),
    "osa.exact_adam": lambda: Optimizer(osa.exact_adam, LEARNING_RATE),
    "osa.sparse_adam": lambda: Optimizer(osa.sparse_adam, LEARNING_RATE),
}


def make_model(num_words):
    """Scores `[batch, 1 + NEGATIVES]` of a word, `[batch, 1]`, and of contexts."""
    uniform = keras.initializers.RandomUniform(-0.5 / DIM, 0.5 / DIM, seed=0)
    center = keras.Input((1,), dtype="int32")
    contexts = keras.Input((1 + NEGATIVES,), dtype="int32")
    words = layers.Embedding(num_words, DIM, uniform, name="words")(center)
    others = layers.Embedding(num_words, DIM, "zeros", name="contexts")(contexts)
    return keras.Model([center, contexts], layers.Dot(2)([words, others]))


def batches(pairs):
    """What `fit` takes: inputs, and labels, of which the first is a true context."""
    labels = np.zeros((BATCH, 1, 1 + NEGATIVES), np.float32)
    labels[..., 0] = 1
    for centers, contexts in pairs:
        yield (centers[:, None], contexts), labels


class Clock(keras.callbacks.Callback):
    """The milliseconds of each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # waits for the step
        self.steps.append(1e3 * (time.perf_counter() - self.began))


def train(name, corpus, steps, verbose=2):
    """A model after so many steps, its history, and the milliseconds of a step."""
    words, counts, tokens = corpus
    model = make_model(len(words))
    if name != "keras.optimizers.Adam":
        model = row_sparse(model)  # 2
    # A sum, for the reason that `loss_fn` of word2vec.py gives.
    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")
    model.compile(OPTIMIZERS[name](), loss)  # 3
    rng, pieces = np.random.default_rng(0), word2vec.split(tokens)
    source = word2vec.SkipGrams(counts)
    held_out = [*batches(source.held_out(pieces[::20], np.random.default_rng(1)))]
    kept = [x for i, x in enumerate(pieces) if i % 20]
    clock = Clock()
    history = model.fit(
        batches(source.train(kept, rng)),
        steps_per_epoch=steps // 4,
        epochs=4,
        validation_data=(x for _ in range(4) for x in held_out),
        validation_steps=len(held_out),
        callbacks=[clock],
        shuffle=False,  # done by the generator
        verbose=verbose,
    )
    return model, history.history, float(np.median(clock.steps))


def main():
    parser = argparse.ArgumentParser(description="Word vectors in Keras.")
    add = parser.add_argument
    add("--steps", type=int, default=4000, help="of exact_adam; default: 4000")
    add("--compared", type=int, default=200, help="of each of them; default: 200")
    add("--words", default="read,max,left,True,encode,hour", help="to look up")
    args = parser.parse_args()
    if min(args.steps, args.compared) < 4:
        parser.error("--steps and --compared must be at least 4")
    corpus = word2vec.read_corpus()
    words = corpus[0]
    print(f"{len(corpus[2]):,} words of {len(words):,} kinds")
    print(f"{'':24}{'ms a step':>10}{'loss on held-out pairs':>24}")
    for name in OPTIMIZERS:
        _, history, milliseconds = train(name, corpus, args.compared, verbose=0)
        loss = history["val_loss"][-1] * (1 + NEGATIVES) / BATCH  # of a pair
        print(f"{name:24}{milliseconds:10.2f}{loss:24.4f}")
    model, history, _ = train("osa.exact_adam", corpus, args.steps)
    vectors = model.get_layer("words").get_weights()[0]
    shown = [words.index(x) for x in args.words.split(",") if x in words]
    for i, rows in zip(shown, word2vec.nearest(vectors, shown)[0], strict=True):
        print(f"{words[i]:>10}: {', '.join(words[row] for row in rows)}")


if __name__ == "__main__":
    main()
