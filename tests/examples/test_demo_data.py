"""The demo: its data and its model against plain loops and known distributions."""

import math
from collections import Counter

import jax
import numpy as np
import pytest

from optax_sparse_adam.demo import _corpus, _word2vec
from optax_sparse_adam.demo._corpus import Corpus, SkipGrams, read_corpus

from ..helpers.support import assert_close

# --- data ---


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7, 60])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_skip_grams_equal_a_plain_loop(num_tokens, window):
    rng = np.random.default_rng(num_tokens)
    tokens = rng.integers(0, 9, num_tokens).astype(np.int32)
    reach = rng.integers(1, window + 1, num_tokens).astype(np.int32)
    expected = []
    for i in range(num_tokens):
        for j in range(max(0, i - reach[i]), min(num_tokens, i + reach[i] + 1)):
            if i != j:
                expected.append([tokens[i], tokens[j]])
    pairs = _corpus.skip_grams(tokens, reach)
    assert pairs.dtype == np.int32
    assert sorted(pairs.tolist()) == sorted(expected)


def test_keep_probabilities():
    counts = np.array([9000, 900, 90, 10])
    keep = _corpus.keep_probabilities(counts, 1e-3)
    expected = [min(1.0, math.sqrt(1e-3 / (count / 10_000))) for count in counts]
    assert_close(keep, expected, 1e-12)
    assert keep[-1] == 1.0


def test_negative_table_is_in_proportion():
    counts = np.array([5000, 300, 300, 20, 1])
    size = 1 << 16
    table = _corpus.negative_table(counts, size)
    weights = [count**0.75 for count in counts.tolist()]
    expected = [size * weight / sum(weights) for weight in weights]
    found = np.bincount(table, minlength=len(counts))
    assert found.sum() == size
    assert np.all(np.abs(found - expected) <= 1), (found, expected)


def independent_tokens(num_words=30, num_tokens=40_000):
    """Words by falling frequency in no order: any two are a pair by chance alone."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, num_words + 1)
    tokens = rng.choice(num_words, num_tokens, p=share / share.sum()).astype(np.int32)
    counts = np.bincount(tokens, minlength=num_words)
    return Corpus([f"w{i}" for i in range(num_words)], counts, tokens, 1)


def test_batches_follow_the_distributions():
    """Centers and contexts are thinned out words, negatives go by count ** 0.75."""
    corpus = independent_tokens()
    source = SkipGrams(corpus, window=4, negatives=3, sample=0.02, batch=500)
    batches = source.train(np.random.default_rng(1))
    first = [next(batches) for _ in range(400)]
    centers = np.concatenate([batch.centers for batch in first])
    contexts = np.concatenate([batch.contexts for batch in first])
    frequency = corpus.counts / corpus.counts.sum()
    kept = frequency * np.minimum(1, np.sqrt(0.02 / frequency))
    noise = corpus.counts**0.75
    for ids, weights in (
        (centers, kept),
        (contexts[:, 0], kept),
        (contexts[:, 1:], noise),
    ):
        found = np.bincount(ids.ravel(), minlength=len(weights)) / ids.size
        distance = 0.5 * np.abs(found - weights / weights.sum()).sum()
        assert distance < 0.01, (distance, found, weights / weights.sum())


def every_word_once(num_words=20_000):
    words = [f"w{i}" for i in range(num_words)]
    tokens = np.arange(num_words, dtype=np.int32)
    return Corpus(words, np.ones(num_words, int), tokens, 1)


def test_the_reach_of_a_center_is_uniform():
    source = SkipGrams(every_word_once(), 4, negatives=1, sample=1.0, batch=1000)
    batches = source.train(np.random.default_rng(0))
    first = [next(batches) for _ in range(90)]  # within the first pass: 95 batches
    distance = np.abs(
        np.concatenate([b.centers for b in first])
        - np.concatenate([b.contexts[:, 0] for b in first])
    )
    found = np.bincount(np.minimum(distance, 5), minlength=6) / distance.size
    # A distance d is within reach if the draw from 1, 2, 3, 4 is at least d.
    expected = [0, 4 / 10, 3 / 10, 2 / 10, 1 / 10, 0]
    # Seams between shuffled pieces of 1000 tokens make one pair in 200 a far one.
    assert np.abs(found - expected).max() < 0.02, found


def test_held_out_text_is_never_trained_on():
    source = SkipGrams(every_word_once(), 4, negatives=1, sample=1.0, batch=1000)
    batches = source.train(np.random.default_rng(0))
    seen = {int(i) for _ in range(300) for i in next(batches).centers}
    held_out = source.held_out(np.random.default_rng(0), 1500)
    assert len(held_out) == 2
    never = {int(i) for batch in held_out for i in batch.centers}
    assert never
    assert not never & seen
    assert len(seen) == 19_000


@pytest.mark.parametrize("batch", [1, 7, 5000])
def test_batches_have_one_shape_and_no_end(batch):
    corpus = independent_tokens(num_tokens=400)
    source = SkipGrams(corpus, window=2, negatives=4, sample=1.0, batch=batch)
    batches = source.train(np.random.default_rng(0))
    for _ in range(5):
        centers, contexts = next(batches)
        assert (centers.shape, contexts.shape) == ((batch,), (batch, 5))
        assert (centers.dtype, contexts.dtype) == (np.int32, np.int32)


def test_read_corpus_counts_words(tmp_path):
    folder = tmp_path / "text"
    (folder / "deeper").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    names = [f"name_{i}" for i in range(12)]
    (folder / "a.txt").write_text(" ".join(names * 3) + " ValueError x once 42")
    (folder / "deeper" / "b.txt").write_bytes(
        b"ValueError caf\xc3\xa9, caf\xc3\xa9 \xff"
    )
    (folder / "binary").write_bytes(b"ValueError \0 ValueError")
    (folder / "empty").write_text("")
    (folder / ".hidden" / "c.txt").write_text("hidden hidden")
    corpus = read_corpus(folder, min_count=2, max_words=100)
    expected = Counter(names * 3 + ["ValueError", "café"] * 2)
    assert dict(zip(corpus.words, corpus.counts.tolist(), strict=True)) == expected
    assert list(corpus.counts) == sorted(corpus.counts, reverse=True)
    assert corpus.num_files == 2
    found = [corpus.words[i] for i in corpus.tokens]
    assert found == names * 3 + ["ValueError", "ValueError", "café", "café"]
    assert len(read_corpus(folder, min_count=2, max_words=11).words) == 11


def test_the_standard_library_is_large_enough():
    corpus = read_corpus(None, min_count=2, max_words=50_000)
    assert len(corpus.words) > 20_000
    assert {"read", "write", "ValueError", "the"} <= set(corpus.words)
    assert corpus.tokens.max() == len(corpus.words) - 1


# --- model ---


def test_loss_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    tables = {
        n: rng.normal(size=(9, 4)).astype(np.float32) for n in ("center", "context")
    }
    batch = _corpus.Batch(np.array([0, 3, 3]), np.array([[1, 2], [8, 8], [0, 3]]))
    expected = 0.0
    for center, contexts in zip(batch.centers, batch.contexts, strict=True):
        for place, context in enumerate(contexts):
            score = float(tables["center"][center] @ tables["context"][context])
            expected += math.log1p(math.exp(score if place else -score))
    assert_close(_word2vec.loss_fn(jax.device_put(tables), batch), expected, 1e-6)


@pytest.mark.parametrize("among", [5, 20, 100])
def test_nearest_equals_a_plain_loop(among):
    vectors = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    vectors[7] = 0  # a word that was never trained has no direction
    ids = [0, 3, 19]
    rows, cosines = _word2vec.nearest(vectors, ids, num=4, among=among)
    for word, found, values in zip(ids, rows, cosines, strict=True):
        others = []
        for other in range(min(among, 20)):
            lengths = np.linalg.norm(vectors[word]) * np.linalg.norm(vectors[other])
            cosine = vectors[word] @ vectors[other] / lengths if lengths else 0.0
            others += [(cosine, other)] if other != word else []
        best = sorted(others, reverse=True)[:4]
        assert found.tolist() == [other for _, other in best]
        assert_close(values, [cosine for cosine, _ in best], 1e-5)
