"""Ctrl-C in a change of a vocabulary: it is done as a whole, or not at all."""

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
