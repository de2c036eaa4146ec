"""Keras as its users have it."""

import pytest


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
