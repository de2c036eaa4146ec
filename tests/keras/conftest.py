"""Keras on JAX; it chooses its backend when it is imported."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

from pathlib import Path

import pytest

# Of Keras' variables, which NumPy 2 calls with a keyword that they do not take.
_COPY = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings(_COPY))


@pytest.fixture(autouse=True)
def strict():
    """Keras promotes types and ranks; what it does is its own."""


@pytest.fixture(autouse=True)
def no_state_of_others():
    """Names of layers, policies and seeds are Keras' own globals."""
    import keras  # the tests of this folder are slow, and the core has no Keras

    yield
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
