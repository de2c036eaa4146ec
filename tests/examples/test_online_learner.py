"""examples/online_learner.py: as a user meets it."""

import re

import jax
import numpy as np
import pytest

from ..helpers.examples import assert_one_clear_line, load_example, run_example

pytestmark = pytest.mark.slow

online_learner = load_example("online_learner")


@pytest.fixture(autouse=True)
def default_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_whole_run(tmp_path):
    """Killed on its way, it has learned what a run has that was not."""
    options = ["--steps", 300, "--rows", 15_000, "--folder", tmp_path / "run"]
    stdout = run_example("online_learner", *options, cwd=tmp_path).stdout
    assert (tmp_path / "online_learner.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert re.search(
        r"^served meanwhile: \d+ times, [\d.]+% of the keys known", stdout, re.M
    )
    killed, first = re.search(
        r"^killed after (\d+) .* at (\d+)$", stdout, re.M
    ).groups()
    assert 200 <= int(killed) < 300
    assert int(first) == 200
    found = re.findall(r"^(\w+ .*?) +(0\.\d+) +([\d.]+)% +([\d.]+)$", stdout, re.M)
    assert [name for name, *_ in found] == [
        "least recent goes",
        "all keys have rows",
        "least frequent goes",
    ]
    assert [float(x) > 0 for *_, x in found] == [True, False, True]
    with np.load(tmp_path / "run" / "learner.npz") as file:
        history = file["history"]
    learner = online_learner.Learner(15_000)
    for step in range(300):
        learner.train(step)
    expected = np.array(learner.history)
    assert expected[:, 2].sum() > 1000
    np.testing.assert_array_equal(history[:, 1:], expected[:, 1:])
    np.testing.assert_allclose(history[:, 0], expected[:, 0], rtol=1e-4)
    assert history[-50:, 0].mean() < history[:50, 0].mean() - 0.02


def test_wrong_options(tmp_path):
    done = run_example("online_learner", "--steps", 1, cwd=tmp_path, check=False)
    assert_one_clear_line(done, "--steps", "at least")
