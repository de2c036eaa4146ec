"""Saved and restored: the bits of a run that was never interrupted."""

import copy
import functools
import json
import operator
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.keras import Optimizer, row_sparse

from ..helpers import keras as h

pytestmark = pytest.mark.slow


@keras.saving.register_keras_serializable("tests")
def adamw_on_rows(rate, decay=0.1):
    return osa.lazy(optax.adamw(rate, weight_decay=decay))


@keras.saving.register_keras_serializable("tests")
def rounded(rate):
    """Its state has a random key."""
    key = jax.random.key(3)
    return osa.lazy(osa.stochastic_rounding(optax.adam(rate), key))


SCHEDULE = keras.optimizers.schedules.CosineDecay(1e-2, 100)
OPTIMIZERS = {
    "sparse_adam": lambda: Optimizer(osa.sparse_adam, 1e-2, b2=0.99, clipnorm=1.0),
    "exact_adam": lambda: Optimizer(osa.exact_adam, 1e-2),
    "exact_adam, schedule": lambda: Optimizer(osa.exact_adam, SCHEDULE),
    "exact_adamw": lambda: Optimizer(osa.exact_adamw, 1e-2, weight_decay=1e-3),
    "mask": lambda: Optimizer(
        osa.exact_adamw, 1e-2, weight_decay=0.1, mask=[True] * 2 + [False] * 3
    ),
    "tuple": lambda: Optimizer(osa.sparse_adafactor, 1e-2, eps=(None, 1e-3)),
    "array": lambda: Optimizer(osa.sparse_adam, 1e-2, b1=jnp.float32(0.8)),
    "registered": lambda: Optimizer(adamw_on_rows, 1e-2, decay=0.3),
    "key": lambda: Optimizer(rounded, 1e-2),
}


def states(model):
    return [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]


def assert_goes_on(model, other, epochs=1):
    """Equal losses and bits, in what comes after."""
    fits = [h.fitted(x, epochs=epochs, validation_data=None) for x in (model, other)]
    assert fits[0] == fits[1]
    for one, two in zip(states(model), states(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_compile_again_in_the_middle():
    """Rows of `exact_adam` are up to date before their optimiser goes."""
    model = h.compiled(h.functional, OPTIMIZERS["exact_adam"]())
    for seed in range(3):
        model.train_on_batch(*h.data(seed, batches=1))
    expected = model.predict(h.data(7)[0], verbose=0)
    model.compile(OPTIMIZERS["exact_adam"](), "mse")
    predicted = model.predict(h.data(7)[0], verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_save_and_load_model(name, tmp_path):
    """Also in the middle, where `exact_adam` has stale rows."""
    model = h.compiled(h.functional, OPTIMIZERS[name]())
    for seed in range(3):
        model.train_on_batch(*h.data(seed, batches=1))
    expected = model.predict(h.data(7)[0], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = row_sparse(keras.saving.load_model(tmp_path / "model.keras"))
    one, two = (json.dumps(x.optimizer.get_config()) for x in (loaded, model))
    assert one == two  # a tuple is a list in the file
    for one, two in zip(states(model)[:5], states(loaded)[:5], strict=True):
        np.testing.assert_array_equal(one, two)
    predicted = loaded.predict(h.data(7)[0], verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)
    assert_goes_on(model, loaded)


def test_a_file_is_served_without_this_package(tmp_path):
    """The model in it is Keras' own, and its rows are those of now."""
    model = h.compiled(h.functional, h.exact())
    for seed in range(3):
        model.train_on_batch(*h.data(seed, batches=1))
    expected = model.predict(h.data(7)[0], verbose=0)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "ids.npy", h.data(7)[0])
    code = (
        "import keras, numpy as np, sys\n"
        "model = keras.saving.load_model('model.keras', compile=False)\n"
        "np.save('out.npy', model(np.load('ids.npy')))\n"
        "assert 'optax_sparse_adam' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def by_file(name):
    def copied(model, folder):
        keras.saving.save_model(model, folder / name)
        return keras.saving.load_model(folder / name, compile=False)

    return copied


def by_weights(model, folder):
    keras.saving.save_weights(model, folder / "model.weights.h5")
    other = h.functional()
    other.load_weights(folder / "model.weights.h5")
    return other


def by_tree(model, _):
    other, tree = h.functional(), model.get_state_tree()["trainable_variables"]
    names = [v.path.split("/") for v in model.trainable_variables]
    other.set_weights([functools.reduce(operator.getitem, x, tree) for x in names])
    return other


COPIES = {
    "function": by_file("model.keras"),
    "old function": by_file("model.h5"),
    "weights": by_weights,
    "tree": by_tree,
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "copy": lambda model, _: copy.deepcopy(model),
}


@pytest.mark.parametrize("way", COPIES)
def test_other_ways_to_copy_a_model(way, tmp_path):
    """Rows are those of now, whoever reads them."""
    model = h.compiled(h.functional, h.exact())
    for seed in range(3):
        model.train_on_batch(*h.data(seed, batches=1))
    expected = model.predict(h.data(7)[0], verbose=0)
    found = COPIES[way](model, tmp_path)(h.data(7)[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_weights_that_come_by_a_function(tmp_path):
    """Of another model, without the state of its optimiser: rows of now, here too."""
    other = h.compiled(h.functional, h.adam(), seed=9)
    keras.saving.save_weights(other, tmp_path / "model.weights.h5")
    model = h.compiled(h.functional, h.exact())
    model.train_on_batch(*h.data(0, batches=1))
    keras.saving.load_weights(
        model, tmp_path / "model.weights.h5", objects_to_skip=[model.optimizer]
    )
    expected = other.predict(h.data(7)[0], verbose=0)
    found = model.predict(h.data(7)[0], verbose=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam"])
def test_save_weights(name, tmp_path):
    """The optimiser's state is in them, and comes back if it has been built."""
    model = h.compiled(h.functional, OPTIMIZERS[name]())
    h.fitted(model, epochs=1)
    model.train_on_batch(*h.data(5, batches=1))
    model.save_weights(tmp_path / "model.weights.h5")
    other = h.compiled(h.functional, OPTIMIZERS[name](), seed=9)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_goes_on(model, other)


def test_a_transformation_without_a_name(tmp_path):
    """What `load_model` says to do is what restores the run, to the bit."""

    def optimizer():
        return Optimizer(optax.chain(osa.lazy(optax.clip(1.0)), osa.sparse_adam(1e-2)))

    model = h.compiled(h.functional, optimizer())
    h.fitted(model, epochs=1)
    path = tmp_path / "model.keras"
    model.save(path)
    with pytest.raises(ValueError, match=r"then model\.load_weights"):
        keras.saving.load_model(path)
    loaded = row_sparse(keras.saving.load_model(path, compile=False))
    loaded.compile(optimizer(), h.LOSS, metrics=["mae"])
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(path)
    assert_goes_on(model, loaded)


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam"])
@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_backup_and_restore(name, save_freq, tmp_path):
    """A run that is killed goes on from its backup as one that was not."""

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise Stop

    def run(folder, *callbacks):
        model = h.compiled(h.functional, OPTIMIZERS[name]())
        model.build((None, h.LENGTH))
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=save_freq)
        h.fitted(model, epochs=4, callbacks=[backup, *callbacks])
        return model

    whole = run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "killed", Kill())
    again = run(tmp_path / "killed")
    if save_freq == "epoch":
        for one, two in zip(states(whole), states(again), strict=True):
            np.testing.assert_array_equal(one, two)
    else:  # of 15 steps; Keras begins the epoch of the last save again
        assert again.optimizer.iterations.value == 15 + 3 * 8


@pytest.mark.parametrize("weights_only", [True, False])
def test_checkpoints_and_early_stopping(weights_only, tmp_path):
    """The best of several epochs is what validation saw."""
    suffix = ".weights.h5" if weights_only else ".keras"
    path = tmp_path / f"best{suffix}"
    model = h.compiled(h.functional, h.exact(0.1))
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            path, "val_loss", save_best_only=True, save_weights_only=weights_only
        ),
        keras.callbacks.EarlyStopping("val_loss", 2, restore_best_weights=True),
    ]
    history = h.fitted(model, epochs=12, callbacks=callbacks)
    best = min(history["val_loss"])
    assert history["val_loss"].index(best) < len(history["val_loss"]) - 1
    if weights_only:
        other = h.compiled(h.functional, h.exact(0.1), seed=4)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path)
    else:
        other = keras.saving.load_model(path)
    for x in (model, other):
        loss = x.evaluate(*h.data(1), verbose=0)[0]
        np.testing.assert_allclose(loss, best, rtol=1e-6)


def test_load_without_row_sparse_is_refused(tmp_path):
    model = h.compiled(h.functional, OPTIMIZERS["sparse_adam"]())
    h.fitted(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.compile(OPTIMIZERS["sparse_adam"](), h.LOSS)
    for other in (loaded, clone):
        with pytest.raises(ValueError, match=r"call \S*row_sparse\(model"):
            h.fitted(other)


def test_set_weights():
    """`set_weights` puts values, and `get_weights` returns them, of stale rows, too."""
    model = h.compiled(h.functional, h.exact())
    model.train_on_batch(*h.data(0, batches=1))
    values = [x + 1 for x in model.get_weights()]
    model.train_on_batch(*h.data(1, batches=1))
    model.set_weights(values)
    for x, y in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(x, y)
    expected = model.predict(h.data(2)[0], verbose=0)
    np.testing.assert_allclose(model(h.data(2)[0]), expected, rtol=0, atol=1e-6)
