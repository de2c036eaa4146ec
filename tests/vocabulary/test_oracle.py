"""Vocabularies beside dictionaries and heaps, on random streams of keys."""

import copy
import functools
import pickle

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

import optax_sparse_adam as osa
from optax_sparse_adam._vocabulary import order

from ..helpers.support import WEEKLY, assert_identical
from ..helpers.vocabulary import Oracle, TooMany


def oldest_of_the_rare(last, hits):
    return last + 3.0 * np.sqrt(hits)


def newest(last, hits):
    return -last


SCORES = {
    "last": lambda last, hits: last,
    "hits": lambda last, hits: hits,
    oldest_of_the_rare: oldest_of_the_rare,
    newest: newest,
}


@pytest.fixture(params=[1, 1024], ids=["few-are-sorted", "all-are-sorted"])
def sorted_rows(request, monkeypatch):
    """How many rows an order sorts at once; with few it is often at its end."""
    monkeypatch.setattr(order, "_FEW", request.param)


class Pair:
    """A vocabulary and its oracle, which must say the same."""

    def __init__(self, rows, score="last", min_hits=1, ttl=None, waiting=None):
        options = {"min_hits": min_hits, "ttl": ttl, "waiting": waiting}
        self.make = functools.partial(osa.Vocabulary, score=score, **options)
        self.vocab = self.make(rows)
        self.oracle = Oracle(rows, score=SCORES[score], **options)
        self.before, self.step = [], 0
        self.has_all()

    def has_all(self, is_copy=False):
        """Nothing was taken back that a server may have seen."""
        self.taken_back, self.lost, self.is_copy = [], -1, is_copy

    def assign(self, keys, mask=None):
        held = self.vocab.arrays
        before = copy.deepcopy(self.oracle), held
        meant = [
            int(k) if mask is None or m else None
            for k, m in zip(keys, keys if mask is None else mask, strict=True)
        ]
        try:
            expected = self.oracle.assign(meant, self.step)
        except TooMany as error:
            number = f"{error.args[0]:,} keys"
            with pytest.raises(ValueError, match=rf"\b{number} (for|of)"):
                self.vocab.assign(keys, self.step, mask=mask)
            assert_identical(self.vocab.arrays, held, "after an error")
            return
        rows, fresh, evicted = self.vocab.assign(keys, self.step, mask=mask)
        assert (rows.tolist(), fresh.tolist(), evicted.tolist()) == expected
        assert rows.dtype == fresh.dtype == np.int32
        assert len(self.vocab) == len(self.oracle.main.row_of)
        self.oracle.keep_tombstones(len(held["gone"]))
        self.before = [*self.before[-7:], before]

    def undo(self):
        if self.before:
            old, (self.oracle, arrays) = self.oracle, self.before.pop()
            self.vocab.undo()
            assert_identical(self.vocab.arrays, arrays, "taken back")
            by_row = [
                {row: key for key, row in x.main.row_of.items()}
                for x in (old, self.oracle)
            ]
            pairs = [[x.get(row) for x in by_row] for row in {*by_row[0], *by_row[1]}]
            keys = [k for a, b in pairs for k in (a, b) if a != b and k is not None]
            self.taken_back.append((old.step, self.oracle.step, keys))
            while sum(len(keys) for *_, keys in self.taken_back) > 2 * self.vocab.rows:
                self.lost = max(self.lost, self.taken_back.pop(0)[0])

    def restore(self, how):
        vocab, held = self.vocab, self.vocab.arrays
        if how == "pickle":
            self.vocab = pickle.loads(pickle.dumps(vocab))
        elif how == "tree":
            self.vocab = jax.tree.map(np.copy, {"feature": vocab})["feature"]
        else:
            sizes = {"tombstones": len(held["gone"])}  # which may be other than rows
            if self.oracle.min_hits > 1:
                sizes["waiting"] = len(held["waiting_keys"]) - 1
            if how == "larger":
                sizes = {name: size + 1 for name, size in sizes.items()}
            self.vocab = self.make(vocab.rows + 3 * (how == "larger"), **sizes)
            self.vocab.restore(held)
            self.oracle.main.grow(self.vocab.rows)
            self.oracle.waiting.grow(sizes.get("waiting", 0) + 1)
        if how != "larger":
            assert_identical(self.vocab.arrays, held, how)
        self.before = []
        self.has_all(is_copy=True)

    def grow(self, more):
        old = self.vocab.rows
        rows = old + more
        self.vocab.grow(rows)
        self.oracle.main.grow(rows)
        if self.oracle.waiting.rows == old + 1:  # as many as there are rows
            self.oracle.waiting.grow(rows + 1)
        self.before = []

    def compare(self, keys):
        assert self.vocab.find(keys).tolist() == self.oracle.find(keys.tolist())
        for step in {0, self.step // 2, self.step}:
            lost = max(self.lost, self.oracle.lost)
            # All that was taken back since a server may have seen this step.
            places = (i for i, x in enumerate(self.taken_back) if x[0] >= step)
            seen = self.taken_back[next(places, len(self.taken_back)) :]
            first = min([step, *(x[1] for x in seen)])
            others = {key for *_, keys in seen for key in keys}
            is_lost = first <= self.oracle.lost or step <= self.lost
            words = f"after step {lost}," if is_lost else ""
            if not words and self.is_copy and step > self.oracle.step and not seen:
                words = f"its last one is {self.oracle.step}; got {step}"
            if words:
                with pytest.raises(ValueError, match=words):
                    self.vocab.changed_since(step)
                continue
            keys, rows, gone = self.vocab.changed_since(step)
            pairs = [*zip(rows.tolist(), keys.tolist(), strict=True)]
            assert (pairs, gone.tolist()) == self.oracle.changed_since(first, others)


def a_stream(seed, rows, score, min_hits, ttl, steps=60):
    """Keys by Zipf's law, of which the frequent ones drift, and all that may happen."""
    rng = np.random.default_rng(seed)
    pair = Pair(rows, score, min_hits, ttl, waiting=int(rng.integers(1, 2 * rows)))
    keys = rng.integers(-(2**63), 2**63, 4 * rows + 4)
    for _ in range(steps):
        size = int(rng.integers(0, 2 * rows))
        ranks = (len(keys) ** rng.random(size)).astype(int) - 1
        batch = keys[(ranks + pair.step // 3) % len(keys)]
        mask = rng.random(size) < 0.8 if rng.random() < 0.3 else None
        pair.assign(batch, mask)
        pair.step += int(rng.integers(3))
        chance = rng.random()
        if chance < 0.1:
            pair.undo()
        elif chance < 0.2:
            how = ["pickle", "tree", "arrays", "larger"][rng.integers(4)]
            pair.restore(how)
        elif chance < 0.23:
            pair.grow(int(rng.integers(4)))
        elif chance < 0.4:
            pair.compare(rng.choice(keys, 10))


@pytest.mark.parametrize("score", SCORES, ids=lambda x: getattr(x, "__name__", x))
def test_streams(score, sorted_rows, by):
    for seed, (rows, min_hits, ttl) in enumerate(
        [(2, 1, None), (3, 2, 4), (9, 1, 3), (17, 3, None), (40, 1, None)]
    ):
        a_stream(seed, rows, score, min_hits, ttl, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES, ids=lambda x: getattr(x, "__name__", x))
def test_hundreds_of_streams(score, sorted_rows):
    for seed in range(150 if WEEKLY else 40):
        rng = np.random.default_rng(seed)
        rows = 1 + int(1000 ** rng.random()) if seed % 25 else 1001
        min_hits, ttl = rng.choice([1, 1, 2, 5]), rng.choice([None, None, 2, 10, 35])
        a_stream(seed, rows, score, int(min_hits), ttl and int(ttl), steps=30)


class Machine(stateful.RuleBasedStateMachine):
    """Small numbers of keys, and every order of calls that hypothesis thinks of."""

    @stateful.initialize(
        rows=st.integers(2, 6),
        score=st.sampled_from([*SCORES]),
        min_hits=st.integers(1, 3),
        ttl=st.none() | st.integers(1, 4),
    )
    def start(self, rows, score, min_hits, ttl):
        self.pair = Pair(rows, score, min_hits, ttl)

    @stateful.rule(
        keys=st.lists(st.integers(-4, 4), max_size=8), later=st.integers(0, 3)
    )
    def assign(self, keys, later):
        self.pair.step += later
        self.pair.assign(np.array(keys, np.int64))

    @stateful.rule()
    def undo(self):
        self.pair.undo()

    @stateful.rule(how=st.sampled_from(["pickle", "tree", "arrays", "larger"]))
    def restore(self, how):
        self.pair.restore(how)

    @stateful.rule(more=st.integers(0, 2))
    def grow(self, more):
        self.pair.grow(more)

    @stateful.rule()
    def compare(self):
        self.pair.compare(np.arange(-4, 5))


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis.settings(max_examples=30, stateful_step_count=20)


@pytest.mark.slow
def test_many_machines():
    examples = 2000 if WEEKLY else 700
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=30)
    stateful.run_state_machine_as_test(Machine, settings=settings)
