"""Every way in which Keras runs a step, an evaluation and a prediction."""

import functools

import jax
import keras
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.keras import Optimizer, flush, row_sparse
from optax_sparse_adam.keras._row_sparse import _read_step

from ..helpers import keras as h
from ..helpers.support import need_devices

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 3},  # of eight batches: the last call has two
        {"jit_compile": True},
        {"jit_compile": False},
        {"run_eagerly": True},
    ],
    ids=lambda x: "-".join(map(str, *x.items())),
)
def test_ways_to_compile(options):
    exact = h.compiled(h.functional, h.exact(), **options)
    is_eager = options.get("jit_compile") is False or "run_eagerly" in options
    h.assert_same_run(
        exact, h.compiled(h.functional, h.adam()), epochs=2 if is_eager else 5
    )


def test_one_batch_at_a_time():
    """`test_on_batch` and `predict_on_batch` read rows as they are now."""
    exact, dense = (h.compiled(h.functional, x) for x in (h.exact(), h.adam()))
    for model in (exact, dense):  # predicts before its optimiser is built
        model.predict_on_batch(h.data(9)[0])
    for seed in range(4):
        results = []
        for model in (exact, dense):
            ids, labels = h.data(seed, batches=1)
            weight = np.linspace(0, 2, 16)
            results.append(
                [
                    model.train_on_batch(ids, labels, sample_weight=weight),
                    model.test_on_batch(*h.data(9)),
                    model.predict_on_batch(h.data(9)[0]),
                    model.predict(h.data(9)[0], verbose=0, batch_size=7),
                    model.evaluate(*h.data(9), verbose=0, batch_size=7),
                ]
            )
        for one, two in zip(*results, strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=h.ROUNDED)
    # Stored rows lie ahead; called directly, the model reads them as they are stored.
    stored = np.array(exact.trainable_variables[0].value)
    now = dense.get_weights()[0]
    assert np.max(np.abs(stored - now)) > 1e-3
    flush(exact)
    h.assert_same_weights(exact, dense, atol=h.ROUNDED)
    ids = h.data(9)[0]
    np.testing.assert_allclose(exact(ids), dense(ids), rtol=0, atol=h.ROUNDED)


def test_evaluation_writes_nothing():
    model = h.compiled(h.functional, h.exact())
    model.train_on_batch(*h.data(batches=1))
    before = [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]
    names = [v.path for v in (*model.variables, *model.optimizer.variables)]
    model.evaluate(*h.data(), verbose=0)
    model.predict(h.data()[0], verbose=0)
    after = [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]
    for name, x, y in zip(names, before, after, strict=True):
        if "metric" not in name and "mean" not in name:
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("optimizer", [osa.sparse_adam, osa.exact_adam])
def test_nothing_of_the_size_of_the_table_is_computed(optimizer):
    """What each program holds beside its arguments is less than a byte a row."""
    rows = 200_000
    ids = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(rows, 16, name="table")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))
    model = row_sparse(model)
    model.compile(Optimizer(optimizer, 1e-3), "mse")
    batch = np.arange(32, dtype=np.int32).reshape(8, 4), np.ones((8, 1), np.float32)
    model.train_on_batch(*batch)
    parts = model.trainable_variables, model.non_trainable_variables
    parts = *parts, model.optimizer.variables, model.metrics_variables
    trainable, others, slots, metrics = ([v.value for v in x] for x in parts)
    step = jax.jit(model.train_step, donate_argnums=0)
    read = jax.jit(functools.partial(_read_step, model, "test"))
    programs = [
        step.lower((trainable, others, slots, metrics), batch),
        read.lower(trainable, (others, metrics), slots, batch),
    ]
    for program in programs:
        assert program.compile().memory_analysis().temp_size_in_bytes < rows


def test_callbacks_see_rows_of_now():
    """In the middle of an epoch, too: Keras then brings its variables up to date."""
    seen = {}

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                kind = type(self.model.optimizer).__name__
                seen[kind] = self.model.predict(h.data(5)[0], verbose=0)

    for optimizer in (h.exact(), h.adam()):
        model = h.compiled(h.functional, optimizer)
        h.fitted(model, epochs=1, callbacks=[Look()])
    np.testing.assert_allclose(seen["Optimizer"], seen["Adam"], rtol=0, atol=h.ROUNDED)


class Structured(keras.Model):
    """Outputs without a batch, which nothing concatenates where there is one batch."""

    def __init__(self):
        super().__init__()
        self.table = h.embedding()

    def call(self, ids):
        rows = self.table(ids)
        return {"rows": rows, "mean": keras.ops.mean(rows)}


def test_outputs_of_one_batch():
    ids = h.data(batches=1)[0]
    model = h.compiled(Structured, h.exact())
    now = model.predict_on_batch(ids)
    expected = h.compiled(Structured, h.adam()).predict_on_batch(ids)
    np.testing.assert_array_equal(now["rows"], expected["rows"])
    np.testing.assert_allclose(now["mean"], expected["mean"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_policies(policy):
    keras.config.set_dtype_policy(policy)
    with jax.enable_x64(policy == "float64"):
        runs = [h.compiled(h.functional, x) for x in (h.exact(), h.adam())]
        one, two = (h.fitted(x)["loss"] for x in runs)
        # bfloat16 has eight bits; a difference of one rounding grows.
        atol = {"mixed_bfloat16": 2e-2, "float64": 1e-9}[policy]
        np.testing.assert_allclose(one, two, rtol=0, atol=atol)


def test_frozen_layers():
    """Frozen, and then trained, compiled with a new optimiser as Keras wants it."""

    results = []
    for optimizer in (h.exact, h.adam):
        model = h.compiled(h.functional, optimizer(), sparse=None)
        model.trainable = False  # all of it
        model.compile(optimizer(), h.LOSS)
        h.fitted(model, epochs=1)
        model.predict(h.data()[0], verbose=0)
        model.trainable = True
        table = model.get_layer("table")
        losses, first = [], table.get_weights()[0]
        for trainable in (False, True):
            table.trainable = trainable
            model.compile(optimizer(), h.LOSS)
            losses += h.fitted(model, epochs=2)["loss"]
            assert np.array_equal(first, table.get_weights()[0]) is not trainable
        results.append(losses)
    np.testing.assert_allclose(*results, **h.CLOSE)


@pytest.mark.parametrize("kind", ["data", "model"])
def test_distribution(kind):
    """Replicated, or the table and its moments by rows over eight devices."""
    need_devices(8)
    names = [f"cpu:{i}" for i in range(8)]
    if kind == "data":
        made = keras.distribution.DataParallel(devices=names, auto_shard_dataset=False)
    else:
        mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], names)
        layouts = keras.distribution.LayoutMap(mesh)
        layouts["table/embeddings"] = ("model", None)
        made = keras.distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
        )
    reference = h.fitted(h.compiled(h.functional, h.adam()))
    with made.scope():
        model = h.compiled(h.functional, h.exact())
        history = h.fitted(model)
        model.evaluate(*h.data(2), verbose=0)
        table = model.trainable_variables[0].value
        moments = [v.value for v in model.optimizer.variables if v.shape == table.shape]
    for name in reference:
        np.testing.assert_allclose(history[name], reference[name], **h.CLOSE)
    assert len(moments) == 2
    shapes = {x.addressable_shards[0].data.shape for x in (table, *moments)}
    assert shapes == {(h.ROWS // 4 if kind == "model" else h.ROWS, 4)}
