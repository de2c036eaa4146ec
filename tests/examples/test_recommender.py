"""examples/recommender.py: as a user meets it, and its split."""

import re

import jax
import numpy as np
import pytest

from ..helpers.examples import load_example

pytestmark = pytest.mark.slow

recommender = load_example("recommender")


@pytest.fixture(scope="module")
def pairs():
    try:
        return recommender.read_pairs()
    except SystemExit as error:  # no package index
        pytest.skip(str(error))


def test_split(pairs):
    """Of each user a tenth is for tests, rounded down, and nothing is in two parts."""
    data = recommender.split(pairs, 0)
    parts = np.stack([data.train, data.valid, data.test])
    assert parts.sum() == len(pairs) == 100_000
    assert parts.sum(axis=0).max() == 1
    number = parts.sum(axis=(0, 2))
    np.testing.assert_array_equal(data.test.sum(axis=1), number // 10)
    np.testing.assert_array_equal(data.valid.sum(axis=1), number // 10)
    assert np.all(data.train[data.pairs[:, 0], data.pairs[:, 1]])
    assert len(data.pairs) == data.train.sum()


def test_negatives_are_no_positives(pairs):
    data = recommender.split(pairs, 0)
    batches = recommender.epoch_of(data, np.random.default_rng(0))
    user, item, other = np.concatenate(batches).T
    assert len(user) == len(data.pairs)
    assert np.all(data.train[user, item])
    assert not np.any(data.train[user, other])


def test_a_whole_run(pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["recommender.py", "--epochs", "2"])
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        recommender.main()
    printed = capsys.readouterr().out
    assert "100,000 ratings of 1,682 films by 943 users" in printed
    number = r" +(0\.\d{4})"
    found = re.findall(rf"^(\w.*?){5 * number} +\d+\.\d\d +2$", printed, re.M)
    assert [row[0] for row in found] == list(recommender.OPTIMIZERS)
    dense, exact = (np.array(row[1:], float) for row in found[:2])
    np.testing.assert_allclose(exact, dense, rtol=0, atol=1e-4)
    assert re.search(r"2 epochs: \de-\d\d apart", printed)
    come = re.findall(rf"^(as they come|\d epochs later){2 * number}$", printed, re.M)
    assert [row[0] for row in come] == ["as they come", "1 epochs later"]
    assert (tmp_path / "recommender.png").read_bytes().startswith(b"\x89PNG\r\n")
