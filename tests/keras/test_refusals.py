"""What is refused, in which words, and learning rates."""

import doctest
import functools
import os
import subprocess
import sys

import jax
import keras
import numpy as np
import optax
import pytest
from keras import layers

import optax_sparse_adam as osa
from optax_sparse_adam.keras import Optimizer, flush, row_sparse

from ..helpers import keras as h

pytestmark = pytest.mark.slow


class WithTrainStep(h.Subclassed):
    def train_step(self, state, data):
        return super().train_step(state, data)


class OfOnesOwn(h.Subclassed):
    """Keras' guide for JAX, with the two names that change."""

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(trainable):
            predicted, new = self.stateless_call(trainable, others, x, training=True)
            return keras.ops.mean(h.LOSS(y, predicted)), new

        read = self.optimizer.state_of(slots)
        both = osa.value_and_grad(loss, has_aux=True, read=read)
        (value, others), grads = both(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        return {"loss": value}, (trainable, others, slots, metrics)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_ema": True}, "no use_ema: an average"),
        ({"gradient_accumulation_steps": 4}, "larger batch_size"),
        ({"loss_scale_factor": 8.0}, "need none"),
        ({"weight_decay": 0.1}, "unexpected keyword argument 'weight_decay'"),
        ({"epsilon": 1e-7}, "unexpected keyword argument 'epsilon'"),
        ({"clipvalue": 1.0, "clipnorm": 1.0}, "Only one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_options_of_keras(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        h.fitted(h.compiled(h.functional, Optimizer(osa.sparse_adam, 1e-3, **options)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Optimizer(osa.sparse_adam(1e-3), 1e-3), "a function that makes"),
        (lambda: Optimizer("adam"), "got str"),
        (lambda: Optimizer(osa.sparse_adam, "1e-3"), "number or a schedule, got '1e"),
        (lambda: Optimizer(osa.sparse_adam, np.ones(1)), "number or a schedule"),
        (lambda: Optimizer(osa.sparse_adam, 1).apply([]), "stateless_apply"),
        (
            lambda: Optimizer(osa.exact_adamw, 1).exclude_from_weight_decay([]),
            r"has no exclude_from_weight_decay.* mask=\[.bias",
        ),
        (lambda: row_sparse(layers.Dense(1)), "got Dense"),
        (lambda: row_sparse(WithTrainStep(), bool), "pass `sparse` to"),
    ],
    ids=["made", "text", "rate", "rates", "apply", "exclude", "layer", "train_step"],
)
def test_wrong_arguments(make, words):
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(
    ("optimizer", "policy", "words"),
    [
        (keras.optimizers.Adam(), "float32", "got Adam: pass Optimizer"),
        (Optimizer(osa.sparse_adam, 1e-3), "mixed_float16", "mixed_bfloat16"),
        (Optimizer(optax.adam, 1e-3), "float32", "takes dense ones only"),
    ],
    ids=["keras", "float16", "dense"],
)
def test_other_optimizers(optimizer, policy, words):
    keras.config.set_dtype_policy(policy)
    model = row_sparse(h.functional())
    model.compile(optimizer, h.LOSS)
    with pytest.raises((TypeError, ValueError), match=words):
        h.fitted(model)


@pytest.mark.parametrize("name", ["use_ema", "weight_decay", "loss_scale_factor"])
def test_options_of_keras_that_are_set_later(name):
    optimizer = h.exact()
    setattr(optimizer, name, 0.5)
    with pytest.raises(TypeError, match=f"Optimizer takes no {name}: "):
        h.fitted(h.compiled(h.functional, optimizer))


def test_a_mask_of_weight_decay():
    """What the refusal of exclude_from_weight_decay says."""
    models = []
    for is_ours in (True, False):
        model = h.functional()
        mask = ["bias" not in v.path for v in model.trainable_variables]
        decay = {"weight_decay": 0.5}
        if is_ours:
            optimizer = Optimizer(osa.exact_adamw, 1e-2, eps=h.EPS, mask=mask, **decay)
        else:
            optimizer = keras.optimizers.AdamW(1e-2, epsilon=h.EPS, **decay)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        models.append(h.compiled(h.functional, optimizer))
    h.assert_same_run(*models)


def test_a_constraint_under_exact_adam():
    def make():
        return h.functional(embeddings_constraint=keras.constraints.UnitNorm(axis=1))

    with pytest.raises(ValueError, match="got one of table/embeddings"):
        h.fitted(h.compiled(make, h.exact()))
    model = h.compiled(make, Optimizer(osa.sparse_adam, 1e-2))
    h.fitted(model, epochs=1)
    norms = np.linalg.norm(model.get_weights()[0], axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_sparse_names_the_variable():
    model = h.compiled(h.regularised, h.exact())
    with pytest.raises(ValueError, match="sparse") as error:
        h.fitted(model)
    assert "table/embeddings" in "".join(error.value.__notes__)


def test_variables_that_change():
    model = h.compiled(h.functional, h.exact())
    h.fitted(model, epochs=1)
    model.get_layer("table").trainable = False
    model.compile(model.optimizer, h.LOSS)
    with pytest.raises(ValueError, match="compile with a new Optimizer"):
        model.train_on_batch(*h.data(batches=1))


def two_tables():
    ids = keras.Input((6,), dtype="int32")
    tables = [layers.Embedding(h.ROWS, 4, name=f"table{k}") for k in range(2)]
    mean = layers.GlobalAveragePooling1D()(tables[0](ids) + tables[1](ids))
    tables[1].trainable = False
    return keras.Model(ids, layers.Dense(1)(mean))


def test_as_many_other_variables_of_the_same_shape():
    """Read they may be; what was trained before has its rows of now."""
    model = h.compiled(two_tables, h.exact())
    model.train_on_batch(*h.data(0, batches=1))
    model.train_on_batch(*h.data(1, batches=1))
    expected = model.predict(h.data(2)[0], verbose=0)
    for k in range(2):
        model.get_layer(f"table{k}").trainable = bool(k)
    with pytest.raises(ValueError, match=r"for the trainable .*table0.* got .*table1"):
        model.train_on_batch(*h.data(2, batches=1))
    for _ in range(2):
        found = model.predict(h.data(2)[0], verbose=0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        model.evaluate(*h.data(2), verbose=0)
        model.get_layer("table1").trainable = False  # fewer
    table = model.get_layer("table0").get_weights()[0]
    model.compile(h.exact(), h.LOSS)
    model.train_on_batch(*h.data(3, batches=1))
    np.testing.assert_array_equal(model.get_layer("table0").get_weights()[0], table)


def test_a_train_step_of_ones_own():
    runs = []
    for make, optimizer in ((OfOnesOwn, h.exact()), (h.Subclassed, h.adam())):
        keras.utils.set_random_seed(0)
        model = row_sparse(make()) if make is OfOnesOwn else make()
        model.compile(optimizer, h.LOSS)
        for seed in range(5):
            model.train_on_batch(*h.data(seed, batches=1))
        runs.append(model.predict_on_batch(h.data(9)[0]))
    np.testing.assert_allclose(*runs, rtol=0, atol=h.ROUNDED)


@pytest.mark.parametrize("order", ["compiled", "row_sparse"])
def test_a_loop_of_ones_own(order):
    """What the refusal of `apply` says, beside Keras' own `train_on_batch`."""
    keras.utils.set_random_seed(0)
    model, optimizer = h.sequential(), h.exact()
    model.build((None, h.LENGTH))
    if order == "row_sparse":
        row_sparse(model)
    model.compile(optimizer)
    if order == "compiled":
        row_sparse(model)
    variables = model.trainable_variables
    optimizer.build(variables)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(trainable, slots, ids, labels):
        def loss(trainable):
            predicted, _ = model.stateless_call(trainable, [], ids, training=True)
            return keras.ops.mean(h.LOSS(labels, predicted))

        grads = osa.grad(loss, read=optimizer.state_of(slots))(trainable)
        return optimizer.stateless_apply(slots, grads, trainable)

    both = variables, optimizer.variables
    values = [[v.value for v in x] for x in both]
    expected = h.compiled(h.sequential, h.adam())
    for seed in range(3):
        batch = h.data(seed, batches=1)
        values = step(*values, *batch)
        expected.train_on_batch(*batch)
    for x, new in zip(both, values, strict=True):
        for v, value in zip(x, new, strict=True):
            v.assign(value)
    flush(model)
    h.assert_same_weights(model, expected, atol=h.ROUNDED)


def test_a_train_step_that_keras_makes_dense():
    model = row_sparse(WithTrainStep())
    model.compile(h.exact(), h.LOSS)
    with pytest.raises(ValueError, match=r"in place of jax\.value_and_grad"):
        h.fitted(model)


def test_a_train_step_without_row_sparse():
    """Else validation would read rows where they are not, under `exact_adam`."""
    model = OfOnesOwn()
    model.compile(h.exact(), h.LOSS)
    with pytest.raises(ValueError, match="that row_sparse was called for"):
        h.fitted(model)


CLIPS = [("clipnorm", 0.05), ("clipvalue", 0.01), ("global_clipnorm", 0.05)]
NO_CLIPS = [("clipnorm", -1.0), ("clipvalue", 0.0), ("global_clipnorm", 0)]


@pytest.mark.parametrize(("name", "value"), CLIPS + NO_CLIPS)
def test_clipping(name, value):
    options = {name: value}
    ours = h.compiled(h.functional, h.exact(**options))
    h.assert_same_run(ours, h.compiled(h.functional, h.adam(**options)))


def rate_of(epoch, rate):
    return rate if epoch < 2 else rate * 0.3


@pytest.mark.parametrize(
    "callback",
    [
        lambda: keras.callbacks.LearningRateScheduler(rate_of),
        lambda: keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=10.0),
    ],
    ids=["scheduler", "plateau"],
)
def test_callbacks_change_the_rate(callback):
    """Of all rows in each batch, so that lazy Adam is dense Adam."""
    ids = np.stack([np.random.default_rng(i).permutation(h.ROWS) for i in range(64)])
    labels = (ids[:, :1] % 2).astype(np.float32)
    runs = []
    rate, b1 = np.float32(1e-2), np.float32(0.9)  # as a sweep has them
    ours = Optimizer(osa.sparse_adam, rate, b1=b1, eps=1e-7)
    ours = Optimizer.from_config(ours.get_config())
    for optimizer in (ours, keras.optimizers.Adam(1e-2)):
        model = h.compiled(h.sequential, optimizer)
        history = model.fit(
            *(ids, labels, 8),
            epochs=5,
            callbacks=[callback()],
            shuffle=False,
            verbose=0,
        ).history
        runs.append([history["loss"], history["learning_rate"]])
    assert len(set(runs[0][1])) > 1
    np.testing.assert_allclose(*runs, rtol=2e-5)
    model = h.compiled(h.functional, h.exact())
    with pytest.raises(TypeError, match="for exact_adam a schedule"):
        h.fitted(model, callbacks=[callback()])


@pytest.mark.parametrize("kind", ["keras", "optax"])
def test_schedules(kind):
    keras_own = keras.optimizers.schedules.CosineDecay(1e-2, 30)
    schedule = keras_own if kind == "keras" else optax.cosine_decay_schedule(1e-2, 30)
    ours = h.compiled(h.functional, h.exact(schedule))
    h.assert_same_run(ours, h.compiled(h.functional, h.adam(keras_own)))
    assert float(ours.optimizer.learning_rate) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["sparse", "exact"])
def test_a_rate_that_is_set_before_the_first_step(name):
    """Whichever way: from then on `exact_adam` knows its rates."""

    def assign(optimizer):
        optimizer.learning_rate.assign(0.05)

    def set_to(optimizer):
        optimizer.learning_rate = 0.05

    runs = []
    for change, first in ((assign, 0.001), (set_to, 0.001), (lambda _: None, 0.05)):
        optimizer = Optimizer(getattr(osa, f"{name}_adam"), first, eps=h.EPS)
        change(optimizer)
        assert float(optimizer.learning_rate) == pytest.approx(0.05)
        model = h.compiled(h.sequential, optimizer)
        model.train_on_batch(*h.data(0, batches=1))
        flush(model)
        assert float(optimizer.learning_rate) == pytest.approx(0.05)
        runs.append(model.get_weights())
    for weights in runs[:2]:
        for x, expected in zip(weights, runs[2], strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_another_rate_after_flush():
    """What the refusal says: `flush`, and a new optimiser. Moments begin again."""
    results = []
    for optimizer in (h.exact, h.adam):
        model = h.compiled(h.functional, optimizer(1e-2))
        for seed in range(3):
            model.train_on_batch(*h.data(seed, batches=1))
        flush(model)
        model.compile(optimizer(1e-3), h.LOSS)
        results.append([model.train_on_batch(*h.data(s, batches=1)) for s in range(4)])
    np.testing.assert_allclose(*results, **h.CLOSE)


def test_backends():
    code = "import optax_sparse_adam.keras"
    for backend, words in (("numpy", "KERAS_BACKEND=jax"), ("jax", "")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) is (backend == "jax")
        assert words in done.stderr


def test_the_core_does_not_import_keras():
    code = "import sys, optax_sparse_adam; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_examples():
    """The docstrings, which the core cannot import."""
    from optax_sparse_adam import keras as package

    assert doctest.testmod(package).failed == 0
    assert doctest.testmod(package).attempted > 5


def test_what_is_not_public():
    """The one name of Keras without which there is no training step."""
    assert callable(keras.Model._update_metrics_variables)


def reads_whole_tables(rate):
    """A part of one's own in front of `exact_adam`, which would see stored rows."""

    def update(updates, state, params=None):
        return updates, state + sum(x.sum() for x in params)

    own = optax.GradientTransformation(lambda params: np.zeros((), "f4"), update)
    return optax.chain(own, osa.exact_adam(rate))


def decays_gradients(rate):
    decay = osa.lazy(optax.add_decayed_weights(0.1))
    return optax.chain(decay, osa.exact_adam(rate))


def test_what_reads_tables_in_front_of_exact_adam():
    with pytest.raises(ValueError, match="Optimizer was given an optimiser that reads"):
        h.fitted(h.compiled(h.functional, Optimizer(reads_whole_tables, 1e-2)))
    model = h.compiled(h.functional, Optimizer(decays_gradients, 1e-2))
    assert np.isfinite(h.fitted(model, validation_data=None)["loss"]).all()
