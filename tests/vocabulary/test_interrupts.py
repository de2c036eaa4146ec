"""Ctrl-C in a change of a vocabulary: it is done as a whole, or not at all."""

import contextlib

import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._vocabulary import (
    contents,
    history,
    index,
    one_writer,
    order,
    servers,
    store,
    vocabulary,
)

from ..helpers.support import slow_but
from ..helpers.system_calls import interrupted_at_line

MODULES = (
    *(contents, history, index, one_writer),
    *(order, servers, store, vocabulary),
)
KEYS = np.array([3, 100, 101, 7, 102])


def made(batches=6, min_hits=1):
    """Full, so that keys are evicted."""
    vocab, rng = osa.Vocabulary(9, min_hits=min_hits, ttl=20), np.random.default_rng(0)
    for step in range(batches):
        vocab.assign(rng.integers(0, 20, 7), step)
    return vocab


LATER = made(7).arrays
CHANGES = {
    "assign": lambda vocab: vocab.assign(KEYS, 6),
    "undo": lambda vocab: vocab.undo(),
    "grow": lambda vocab: vocab.grow(14),
    "restore": lambda vocab: vocab.restore(LATER),
}


def assert_same(found, expected):
    for name, x in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], x, err_msg=name)


def is_same(found, expected):
    arrays = expected.arrays
    return all(np.array_equal(x, arrays[name]) for name, x in found.arrays.items())


def assert_goes_on_alike(found, expected):
    for step in range(7, 11):
        keys = np.random.default_rng(step).integers(0, 40, 6)
        pair = found.assign(keys, step), expected.assign(keys, step)
        for x, y in zip(*pair, strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(*(v.find(range(40)) for v in (found, expected)))
    for _ in range(3):
        found.undo()
        expected.undo()
        assert_same(found, expected)


@pytest.mark.parametrize("every", slow_but([1, 9], 9))
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_interrupted_anywhere(name, every):
    """It may go on; a lock that stays, or half a change, would be seen then."""
    seen, kinds, lines = 0, set(), [0, ""]
    while len(lines) == 2:
        seen += every
        vocab = made()
        with interrupted_at_line(seen, *MODULES) as lines:
            CHANGES[name](vocab)
        # Python shows a line for the end of a `with`, where no signal is looked for.
        if lines[1:] and lines[1].startswith("alone"):
            continue
        expected = made()
        is_done = not is_same(vocab, expected)
        kinds.add(is_done)
        if is_done:
            CHANGES[name](expected)
        assert_same(vocab, expected)
        assert_goes_on_alike(vocab, expected)
    assert kinds == {True, False}


class Failure(Exception):
    """What a change fails by at first."""


def failing_once(monkeypatch, owner, name):
    """Replaces a method by one that raises when it is called first."""
    method, calls = getattr(owner, name), []

    def raising(*args):
        calls.append(args)
        if len(calls) == 1:
            raise Failure
        return method(*args)

    monkeypatch.setattr(owner, name, raising)


@pytest.mark.parametrize("every", slow_but([1, 7], 7))
@pytest.mark.parametrize(
    ("name", "place"),
    [("assign", (history.History, "note")), ("undo", (servers.Servers, "note"))],
)
def test_what_takes_back_is_interrupted(name, place, every, monkeypatch):
    """By a second Ctrl-C, say: whoever comes next ends it."""
    seen, lines, kinds = 0, [0, ""], set()
    while len(lines) == 2:
        seen += every
        vocab, expected = made(), made()
        with monkeypatch.context() as patch:
            failing_once(patch, *place)
            interrupted = interrupted_at_line(seen, *MODULES)
            with contextlib.suppress(Failure), interrupted as lines:
                CHANGES[name](vocab)
        kinds.add(vocab._take_back is not None)
        if lines[1:] and lines[1].startswith("alone"):
            continue
        if name == "undo" and not is_same(vocab, expected):
            expected.undo()
        np.testing.assert_array_equal(*(v.find(range(40)) for v in (vocab, expected)))
        assert vocab._version % 2 == 0
        assert_same(vocab, expected)
        assert_goes_on_alike(vocab, expected)
    assert kinds == {True, False}


def test_find_within_a_change():
    """Of a score of the user's: it ends nothing, and finds what was there."""
    found = []

    def score(last, hits):
        if vocab is not None:
            found.append(vocab.find([3, 4]).tolist())
        return last.astype(np.float32)

    vocab = None
    vocab = osa.Vocabulary(4, score=score)
    for step in range(4):
        vocab.assign([step, step + 1], step)
    assert found
    assert vocab._take_back is None
    assert sorted(vocab.arrays["keys"][1:].tolist()) == [2, 3, 4]


def test_failures_need_no_more_memory():
    def score(last, hits):
        return np.where(last == 6, np.nan, last).astype(np.float32)

    vocab = osa.Vocabulary(100, score=score)
    for step in range(6):
        vocab.assign(np.arange(30 * step, 30 * step + 60), step)
    slots = len(vocab._contents.main.index._slots)
    for n in range(20):
        with pytest.raises(ValueError, match="NaN"):
            vocab.assign(np.arange(1000 * n, 1000 * n + 60) + 10**6, 6)
    # By its random hash one index in 300 is twice as large, one in 1e7 more than four
    # times; one that grew by each failure would be a million times.
    assert len(vocab._contents.main.index._slots) <= 4 * slots
