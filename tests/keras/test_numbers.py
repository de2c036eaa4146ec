"""Forty steps of `fit`, beside Keras' own dense Adam."""

import jax
import keras
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.keras import Optimizer, flush

from ..helpers import keras as h

pytestmark = pytest.mark.slow
MODELS = [
    *(h.functional, h.sequential, h.Subclassed),
    *(h.masked, h.with_statistics, h.shared),
]


@pytest.mark.parametrize("make", MODELS)
def test_exact_adam_is_keras_adam(make):
    ours, keras_own = h.compiled(make, h.exact()), h.compiled(make, h.adam())
    h.assert_same_run(ours, keras_own)


def test_exact_adamw_is_keras_adamw():
    options = {"weight_decay": 1e-2}
    ours = Optimizer(osa.exact_adamw, 1e-2, eps=h.EPS, **options)
    keras_own = keras.optimizers.AdamW(1e-2, epsilon=h.EPS, **options)
    h.assert_same_run(
        h.compiled(h.functional, ours), h.compiled(h.functional, keras_own)
    )


@pytest.mark.parametrize("weights", ["sample", "class"])
def test_weights(weights):
    value = {"sample": np.linspace(0, 2, 128), "class": {0: 0.5, 1: 2.0}}[weights]
    runs = [h.compiled(h.functional, x) for x in (h.exact(), h.adam())]
    h.assert_same_run(*runs, **{f"{weights}_weight": value})


def test_a_regularised_table_is_dense():
    ours = h.compiled(h.regularised, h.exact(), sparse=None)
    h.assert_same_run(ours, h.compiled(h.regularised, h.adam()))


def test_sparse_adam_is_keras_adam_where_all_rows_are_touched():
    """Also with Keras' epsilon, which is added to the same root as by sparse_adam."""
    ids = np.stack([np.random.default_rng(i).permutation(h.ROWS) for i in range(64)])
    labels = (ids[:, :1] % 2).astype(np.float32)
    histories = []
    optimizers = Optimizer(osa.sparse_adam, 1e-2, eps=1e-7), keras.optimizers.Adam(1e-2)
    for optimizer in optimizers:
        model = h.compiled(h.sequential, optimizer)
        run = model.fit(ids, labels, 8, epochs=5, shuffle=False, verbose=0)
        histories.append((run.history["loss"], *model.get_weights()))
    for one, two in zip(*histories, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-5)


def test_untouched_rows_are_the_same_bits():
    model = h.compiled(h.functional, Optimizer(osa.sparse_adam, 1e-2))
    ids, labels = h.data()
    before = model.get_weights()[0]
    model.fit(ids[16:], labels[16:], verbose=0)
    after = model.get_weights()[0]
    np.testing.assert_array_equal(before[h.ROWS // 2 :], after[h.ROWS // 2 :])
    assert np.all(np.any(before != after, axis=1)[: h.ROWS // 2])


def lazy_adamw(rate):
    return osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)))


def partition(rate):
    """Labels are a list, in the order of the trainable variables."""
    labels = ["table", *["rest"] * 4]
    parts = {
        "table": osa.exact_adam(rate, eps=h.EPS),
        "rest": optax.adam(rate, eps=h.EPS),
    }
    return optax.partition(parts, labels)


def test_a_partition_is_keras_adam():
    ours = h.compiled(h.functional, Optimizer(partition, 1e-2))
    h.assert_same_run(ours, h.compiled(h.functional, h.adam()))


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(osa.rowwise_adagrad(1e-1)),
        Optimizer(lazy_adamw, 1e-2),
        Optimizer(osa.exact_adamw, 1e-2, weight_decay=1e-3),
        Optimizer(osa.sparse_adafactor, 1e-2),
    ],
    ids=["made", "lazy", "exact_adamw", "adafactor"],
)
def test_a_step_is_that_of_make_train_step(optimizer):
    model = h.compiled(h.functional, optimizer, metrics=None)
    params = [np.array(v.value) for v in model.trainable_variables]
    state = optimizer._made(optimizer._rate).init(list(map(jax.numpy.array, params)))

    def loss(params, ids, labels):
        predicted, _ = model.stateless_call(params, [], ids)
        return h.LOSS(labels, predicted)

    step = osa.make_train_step(loss, optimizer._made(optimizer._rate))
    params = list(map(jax.numpy.array, params))
    for ids, labels in (h.data(i, batches=1) for i in range(5)):
        params, state, value = step(params, state, ids, labels)
        ours = model.train_on_batch(ids, labels)
        np.testing.assert_allclose(ours, value, **h.CLOSE)
    flush(model)
    params, _ = osa.flush(params, state)
    for x, v in zip(params, model.trainable_variables, strict=True):
        np.testing.assert_allclose(v.value, x, rtol=0, atol=1e-6)
