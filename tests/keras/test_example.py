"""examples/keras_words.py, as a user meets it."""

import re

import numpy as np
import pytest

from ..helpers.examples import run_example

pytestmark = pytest.mark.slow


def test_a_whole_run(tmp_path):
    done = run_example("keras_words", "--steps", 40, "--compared", 12, cwd=tmp_path)
    number = r" +(\d+\.\d+)"
    rows = re.findall(rf"^(\S+){2 * number}$", done.stdout, re.M)
    names, _, losses = zip(*rows, strict=True)
    assert names == ("keras.optimizers.Adam", "osa.exact_adam", "osa.sparse_adam")
    dense, exact, sparse = map(float, losses)
    np.testing.assert_allclose(exact, dense, rtol=0, atol=2e-4)
    assert sparse != dense  # lazy: another optimiser
    assert done.stdout.count("val_loss") == 4
    assert re.search(r"^ +encode: \w+, \w+, \w+, \w+, \w+$", done.stdout, re.M)
