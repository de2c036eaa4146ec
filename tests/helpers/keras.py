"""Models, data and a run that is compared with one of Keras' own dense Adam."""

import keras
import numpy as np
from keras import layers

import optax_sparse_adam as osa
from optax_sparse_adam.keras import Optimizer, row_sparse

ROWS, LENGTH = 40, 6
# Both add epsilon where it decides nothing: exact_adam to the corrected root as optax,
# Keras to the uncorrected one.
EPS = 1e-12
# Losses of float32, of 40 steps that each round in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# Weights and single outputs near 1 of the same runs: rounding is not averaged there.
ROUNDED = 3e-5


def data(seed=0, batches=8, size=16, first=0):
    """Bags of ids, each of them in the lower half of the rows but for one batch."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(first, ROWS // 2, (batches * size, LENGTH), dtype=np.int32)
    ids[:size] += ROWS // 2 - first
    return ids, (ids.sum(1, keepdims=True) % 3 == 0).astype(np.float32)


def embedding(**options):
    return layers.Embedding(ROWS, 4, name="table", **options)


def functional(**options):
    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(embedding(**options)(ids))
    return keras.Model(ids, layers.Dense(1)(layers.Dense(4, "tanh")(hidden)))


def with_statistics():
    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Flatten()(embedding()(ids))
    hidden = layers.Dropout(0.2, seed=1)(layers.BatchNormalization()(hidden))
    return keras.Model(ids, layers.Dense(1)(hidden))


def masked():
    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.GRU(3)(embedding(mask_zero=True)(ids))
    return keras.Model(ids, layers.Dense(1)(hidden))


def shared():
    one, two = (keras.Input((LENGTH,), dtype="int32", name=x) for x in "ab")
    table = embedding()
    both = layers.Multiply()([table(one), table(two)])
    model = keras.Model([one, two], layers.Dense(1)(layers.Flatten()(both)))
    return keras.Model(one, model([one, one + 0]))


def sequential():
    return keras.Sequential([embedding(), layers.Flatten(), layers.Dense(1)])


def regularised():
    return functional(embeddings_regularizer=keras.regularizers.L2(1e-3))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table, self.out = embedding(), layers.Dense(1)

    def call(self, ids, training=False):
        scale = 0.5 if training else 1.0
        return self.out(keras.ops.mean(self.table(ids), axis=1) * scale)


LOSS = keras.losses.BinaryCrossentropy(from_logits=True)


def compiled(make, optimizer, seed=0, sparse=lambda v: "table" in v.path, **options):
    """A new model; row-sparse, with the table's gradient required to be, for ours."""
    keras.utils.set_random_seed(seed)
    model = make()
    if isinstance(optimizer, Optimizer):
        model = row_sparse(model, sparse)
    model.compile(optimizer, **{"loss": LOSS, "metrics": ["mae"], **options})
    return model


def exact(rate=1e-2, **options):
    return Optimizer(osa.exact_adam, rate, eps=EPS, **options)


def adam(rate=1e-2, **options):
    return keras.optimizers.Adam(rate, epsilon=EPS, **options)


def fitted(model, epochs=5, shuffle=False, **options):
    ids, labels = data()
    options = {"batch_size": 16, "verbose": 0, "validation_data": data(1), **options}
    history = model.fit(ids, labels, epochs=epochs, shuffle=shuffle, **options)
    return history.history


def assert_same_run(ours, keras_own, **options):
    """Equal losses, metrics, validation, evaluation, predictions and weights."""
    ours_history = fitted(ours, **options)
    history = fitted(keras_own, **options)
    assert ours_history.keys() == history.keys()
    for name in history:
        np.testing.assert_allclose(ours_history[name], history[name], **CLOSE)
    results = [
        (m.evaluate(*data(2), verbose=0), m.predict(data(2)[0], verbose=0))
        for m in (ours, keras_own)
    ]
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=ROUNDED)
    assert_same_weights(ours, keras_own, atol=ROUNDED)


def assert_same_weights(one, two, atol=0.0):
    for x, y in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)
