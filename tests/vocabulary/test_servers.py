"""A server that asks `changed_since` now and then has what the vocabulary has.

It fetches everything where that raises. Between two questions keys come and go, and
batches are taken back by `undo` and by `restore`, several in a row.
"""

import pickle

import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._vocabulary import servers

from ..helpers.support import slow_but

OPTIONS = [{}, {"ttl": 4}, {"score": "hits"}, {"min_hits": 2}, {"tombstones": 2}]


def contents(vocab):
    arrays = vocab.arrays
    pairs = zip(arrays["keys"].tolist(), arrays["hits"], strict=True)
    return {key: row for row, (key, hits) in enumerate(pairs) if hits}


class Server:
    def __init__(self, vocab):
        self.vocab, self.rows = vocab, contents(vocab)
        self.step = int(vocab.arrays["numbers"][1])

    def ask(self):
        try:
            changed = self.vocab.changed_since(self.step)
        except ValueError:
            self.rows = contents(self.vocab)
        else:
            for key in changed.gone.tolist():
                self.rows.pop(key, None)
            pairs = zip(changed.keys.tolist(), changed.rows.tolist(), strict=True)
            self.rows.update(pairs)
        self.step = int(self.vocab.arrays["numbers"][1])
        assert self.rows == contents(self.vocab)


@pytest.mark.parametrize("most_entries", [64, 2])
@pytest.mark.parametrize("options", slow_but(OPTIONS, {"score": "hits"}, {}))
@pytest.mark.parametrize(
    "letters", slow_but(["aaaqqu", "aaaqqsr", "aaaqqusrg"], "aaaqqusrg")
)
def test_random_programs(letters, options, most_entries, monkeypatch):
    monkeypatch.setattr(servers, "_MOST_ENTRIES", most_entries)
    for seed in range(25):
        rng = np.random.default_rng(seed)
        vocab, step = osa.Vocabulary(int(rng.integers(4, 9)), **options), 0
        server, saved = Server(vocab), [vocab.arrays]
        for letter in rng.choice(list(letters), 40):
            if letter == "a":
                step += int(rng.integers(0, 3))
                try:
                    vocab.assign(rng.integers(0, 25, int(rng.integers(1, 4))), step)
                except ValueError:  # before the last step, or more keys than rows
                    step = max(step, int(vocab.arrays["numbers"][1]))
            elif letter == "u" and vocab._history._calls:
                vocab.undo()
            elif letter == "s":
                saved.append(vocab.arrays)
            elif letter == "r":
                vocab.restore(saved[rng.integers(len(saved))])
            elif letter == "g":
                vocab.grow(vocab.rows + 1)
            elif letter == "q":
                server.ask()


def test_batches_that_are_taken_back_one_after_the_other():
    vocab = osa.Vocabulary(7)
    vocab.assign([12], 9)
    vocab.assign([12], 11)
    server = Server(vocab)
    vocab.undo()
    vocab.undo()
    server.ask()
    assert server.rows == {}


def test_keys_that_had_gone_before_a_restore():
    vocab = osa.Vocabulary(4)
    empty = vocab.arrays
    vocab.assign([13, 2, 0], 1)
    server = Server(vocab)
    vocab.assign([11, 24, 14], 2)  # the others have gone, and nobody has asked
    vocab.restore(empty)
    server.ask()
    assert server.rows == {}


def test_keys_that_had_gone_before_a_restore_and_are_forgotten():
    """Who saw a step that was taken back misses tombstones of steps before it."""
    vocab = osa.Vocabulary(4, tombstones=1)
    vocab.assign([], 0)
    empty = vocab.arrays
    vocab.assign([1, 2, 3], 1)
    vocab.assign([1], 5)
    server = Server(vocab)
    vocab.undo()
    vocab.assign([4, 5, 6], 2)  # of three that have gone one is known
    vocab.restore(empty)
    server.ask()
    assert server.rows == {}


def test_a_step_that_this_vocabulary_has_seen_is_no_others():
    vocab = osa.Vocabulary(8)
    vocab.assign([1, 2, 3], 5)
    arrays = vocab.arrays
    vocab.assign([1, 2], 7)
    vocab.restore(arrays)
    assert not vocab.changed_since(7).gone.size
    copied = pickle.loads(pickle.dumps(vocab))
    copied.assign([1], 6)
    copied.undo()
    assert not copied.changed_since(6).gone.size
    with pytest.raises(ValueError, match="restored or copied"):
        copied.changed_since(7)  # seen by the one that it is a copy of
