"""Arrays that a vocabulary does not take, and servers whose batches are taken back."""

import functools
import pickle

import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.support import assert_identical


def filled(steps=12, rows=20, **options):
    vocab = osa.Vocabulary(rows, **options)
    for step in range(steps):
        vocab.assign(np.random.default_rng(step).integers(1, 40, 6), step)
    return vocab


# --- what is not taken ---


def with_entries(name, at, value):
    def change(arrays):
        arrays[name][at] = value

    return change


def cut(name):
    def change(arrays):
        arrays[name] = arrays[name][:-1]

    return change


def a_key_twice(arrays):
    arrays["keys"][2] = arrays["keys"][1]


def a_key_often(arrays):
    arrays["keys"][2:9] = arrays["keys"][1]


DAMAGED = {
    "a key twice": (a_key_twice, "in 2 rows"),
    "a key in many rows": (a_key_often, "in 8 rows"),
    "fewer hits": (cut("hits"), "lengths of keys, last, hits, changed"),
    "fewer changes": (cut("changed"), "lengths of keys, last, hits, changed"),
    "fewer tombstones": (cut("gone_at"), "lengths of gone, gone_at"),
    "negative hits": (with_entries("hits", 3, -1), "hits has negative numbers"),
    "hits of row 0": (with_entries("hits", 0, 2), "hits has negative numbers, or"),
    "a step to come": (with_entries("last", 3, 99), "last has steps outside of 0 to"),
    "a negative step": (with_entries("last", 3, -2), "last has steps outside"),
    "a change to come": (with_entries("changed", 3, 99), "changed has steps outside"),
    "a death to come": (with_entries("gone_at", 0, 99), "gone_at has steps outside"),
    "another kind": (with_entries("numbers", 0, 7), "the kind 7"),
    "a last step": (with_entries("numbers", 1, 2**40), f"step {2**40}"),
    "many tombstones": (with_entries("numbers", 2, 2**63 - 1), "tombstones"),
    "fewer than no tombstones": (with_entries("numbers", 2, -1), "-1 tombstones"),
    "a step that was lost": (with_entries("numbers", 3, 99), "lost until step 99"),
    "no numbers": (cut("numbers"), "numbers has 8 entries"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("way", ["restore", "pickle"])
def test_damaged_arrays(name, way):
    change, words = DAMAGED[name]
    arrays = filled().arrays
    change(arrays)
    vocab = filled(5)
    held = vocab.arrays
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(filled()))
        copied._given = arrays
        with pytest.raises(ValueError, match=words):
            copied.find([1])
        return
    with pytest.raises(ValueError, match=words):
        vocab.restore(arrays)
    assert_identical(vocab.arrays, held, "after the error")
    assert vocab.assign([5], 12).rows.shape == (1,)


def newest(last, hits):
    return -last


@pytest.mark.parametrize(
    ("options", "other", "words"),
    [
        ({"score": "hits"}, {}, r"another score; this one has score='last'"),
        ({}, {"score": newest}, "another score; this one has score=<function newest"),
        ({"ttl": 9}, {}, "another ttl 9; this one has ttl=None"),
        ({}, {"ttl": 9}, "another ttl None; this one has ttl=9"),
        ({"padding": -1}, {}, "another padding; this one has padding=None"),
        ({"padding": -1}, {"padding": -2}, "another padding; this one has padding=-2"),
        ({"padding": "a"}, {"padding": "b"}, "another padding"),
        ({"min_hits": 3}, {"min_hits": 2}, "another min_hits 3; this one has"),
        ({"min_hits": 3}, {}, "another min_hits 3; this one has min_hits=1"),
    ],
)
def test_arrays_of_other_options(options, other, words):
    arrays = osa.Vocabulary(20, **options).arrays
    with pytest.raises(ValueError, match=words):
        osa.Vocabulary(20, **other).restore(arrays)
    osa.Vocabulary(20, **options).restore(arrays)
    with pytest.raises(TypeError, match="a dictionary of them, got list"):
        osa.Vocabulary(20).restore([*arrays.values()])


def test_places_for_more_keys_that_wait_than_there_are_rows():
    """After `restore` it is not known how many keys a step has had."""
    vocab = osa.Vocabulary(4, min_hits=3, waiting=9)
    vocab.assign(np.arange(6), 0)
    again = osa.Vocabulary(4, min_hits=3, waiting=9)
    again.restore(vocab.arrays)
    with pytest.raises(ValueError, match="11 keys of this step, for which there are 9"):
        again.assign(np.arange(6, 11), 0)
    assert again.assign(np.arange(6, 9), 0).rows.tolist() == [0, 0, 0]


# --- servers ---


class Server:
    """Has rows by key, as keys.md teaches it."""

    def __init__(self):
        self.rows = {}

    def ask(self, vocab, since):
        keys, rows, gone = vocab.changed_since(since)
        self.rows.update(zip(keys.tolist(), rows.tolist(), strict=True))
        for key in gone.tolist():
            self.rows.pop(key, None)

    def is_right(self, vocab):
        held = vocab.arrays
        rows = np.flatnonzero(held["hits"])
        keys = held["keys"].view(np.int64)[rows].tolist()
        return self.rows == dict(zip(keys, rows.tolist(), strict=True))


def test_results_that_are_written_over():
    """They are the caller's: `undo` does not read them."""
    vocab = osa.Vocabulary(100)
    vocab.assign(np.arange(1, 80), 0)
    for keys in (np.arange(1, 80), np.arange(50, 140)):  # all known; some evict others
        before = vocab.arrays
        for array in vocab.assign(keys, 1):
            array[:] = 0
        vocab.undo()
        assert_identical(vocab.arrays, before)
        np.testing.assert_array_equal(vocab.find(np.arange(1, 80)), np.arange(1, 80))


@pytest.mark.parametrize("number", [1, 3])
def test_a_server_that_has_seen_batches_which_are_undone(number):
    vocab, server = osa.Vocabulary(16), Server()
    for step in range(30):
        rng = np.random.default_rng(step)
        for _ in range(number if step % 4 == 3 else 0):
            vocab.assign(rng.integers(1, 30, 4), step)
        server.ask(vocab, max(0, step - 1))
        for _ in range(number if step % 4 == 3 else 0):
            vocab.undo()
        server.ask(vocab, step)
        assert server.is_right(vocab)
        vocab.assign(rng.integers(1, 30, 3), step)
        if step == 20:
            vocab.grow(17)
        server.ask(vocab, step)
        assert server.is_right(vocab)


def test_a_server_that_has_seen_batches_before_a_restore():
    vocab, server = filled(10, tombstones=99), Server()
    saved = vocab.arrays
    for step in range(10, 16):
        vocab.assign(np.random.default_rng(step).integers(1, 60, 4), step)
    server.ask(vocab, 0)
    assert server.is_right(vocab)
    vocab.restore(saved)
    server.ask(vocab, 15)
    assert server.is_right(vocab)
    vocab.assign([70, 71], 10)
    server.ask(vocab, 15)  # which was asleep meanwhile
    assert server.is_right(vocab)


def test_a_server_that_has_seen_more_than_a_checkpoint():
    """Another process knows nothing of these batches, and says so as far as it can."""
    again = osa.Vocabulary(20)
    again.restore(filled(10).arrays)
    assert len(again.changed_since(0).keys) == len(again)
    for copied in (again, pickle.loads(pickle.dumps(again))):
        with pytest.raises(ValueError, match=r"its last one is 9; got 15.*`arrays`"):
            copied.changed_since(15)


def test_how_many_keys_are_told_again():
    vocab = osa.Vocabulary(9, tombstones=99)
    for step in range(6):
        vocab.assign(np.arange(8) + 10 * step, step)
        vocab.undo()
        vocab.assign(np.arange(8), step)
    with pytest.raises(ValueError, match=r"after step \d, .*Fetch everything"):
        vocab.changed_since(0)
    vocab.changed_since(5)


def test_a_server_of_a_vocabulary_that_is_empty_again():
    """Its keys are told as they were: a negative one is no large one."""
    vocab, server = osa.Vocabulary(9), Server()
    vocab.assign([-5, 7], 3)
    server.ask(vocab, 0)
    vocab.undo()
    server.ask(vocab, 3)
    assert server.rows == {}


@pytest.mark.parametrize("options", [{}, {"min_hits": 3, "ttl": 4, "waiting": 20}])
def test_arrays_before_are_those_of_a_vocabulary_that_has_seen_less(options):
    """Of each of the last steps; nothing changes, and `undo` goes on as before."""
    make = functools.partial(osa.Vocabulary, 20, tombstones=7, **options)
    rng, vocab, seen = np.random.default_rng(0), make(), []
    for step in range(40):
        seen.append(vocab.arrays)
        for _ in range(1 + step % 2):  # two calls for some steps
            vocab.assign(rng.zipf(1.2, 7) % 50, step)
        now = vocab.arrays
        for before in range(max(1, step - 4), step + 1):
            assert_identical(vocab.arrays_before(before), seen[before])
        assert_identical(vocab.arrays_before(step + 1), now)
        assert_identical(vocab.arrays, now)
    with pytest.raises(ValueError, match="at most 8 calls ahead"):
        vocab.arrays_before(30)
    with pytest.raises(ValueError, match="the last call of all had the step 39"):
        vocab.arrays_before(41)
    vocab.undo()
    vocab.undo()
    assert_identical(vocab.arrays, seen[39])
    again = make()
    again.restore(vocab.arrays_before(38))
    assert_identical(again.arrays_before(38), seen[38])


@pytest.mark.parametrize("sizes", [{}, {"waiting": 20, "tombstones": 9}], ids=str)
def test_one_that_was_grown_goes_on_as_one_that_is_restored(sizes):
    """Keys that wait, and tombstones, have as much room in both."""
    grown, rng = osa.Vocabulary(30, min_hits=2, **sizes), np.random.default_rng(0)
    for step in range(10):
        grown.assign(rng.integers(0, 400, 20), step)
    grown.grow(60)
    restored = osa.Vocabulary(60, min_hits=2, **sizes)
    restored.restore(grown.arrays)
    assert_identical(restored.arrays, grown.arrays)
    for step in range(10, 100):
        keys = rng.integers(0, 400, 20)
        assert_identical(grown.assign(keys, step), restored.assign(keys, step))
    assert_identical(restored.arrays, grown.arrays)


@pytest.mark.parametrize("step", [0, 10])
def test_arrays_before_the_first_call(step):
    """Of a vocabulary that joins a run: empty, until nobody knows why it is not."""
    vocab = osa.Vocabulary(9)
    empty = vocab.arrays
    assert_identical(vocab.arrays_before(step), empty)
    vocab.assign([1], step)
    with pytest.raises(ValueError, match="cannot tell keys that had rows before"):
        vocab.arrays_before(step)
    assert vocab.arrays_before(step + 1)["hits"].sum() == 1
    vocab.undo()
    assert_identical(vocab.arrays_before(step), empty)


def test_arrays_before_of_a_step_without_keys():
    vocab = osa.Vocabulary(9)
    vocab.assign([], 0)
    vocab.assign([1], 1)  # drawn ahead
    assert vocab.arrays_before(1)["hits"].sum() == 0


def test_what_was_before_it_was_grown_is_not_known():
    vocab = osa.Vocabulary(9)
    vocab.assign([1], 0)
    vocab.assign([2], 1)
    vocab.grow(12)
    with pytest.raises(ValueError, match=r"restored or grown it does not know: train"):
        vocab.arrays_before(1)
    assert vocab.arrays_before(2)["hits"].sum() == 2
