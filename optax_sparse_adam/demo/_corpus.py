"""From text to skip-gram batches for the demo, in numpy alone.

Follows Mikolov et al., `Distributed Representations of Words and Phrases and their
Compositionality <https://arxiv.org/abs/1310.4546>`_, 2013, sections 2.2 and 2.3.
"""

import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._command_line import InputError

Ints = NDArray[np.int32]

# Identifiers stay whole and keep their case: ValueError is one word. One letter says
# too little: x and i are everywhere.
_WORD = re.compile(r"[^\W\d]\w+")
# Folders of the standard library that hold other things than library code.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# The tables of character sets are code points in a column, not text.
_SKIPPED |= {"encodings", "lib2to3"}
_FEWEST_WORDS = 10
_PIECE = 1000  # tokens that stay in their order when the text is shuffled
_CHUNK = 1000  # pieces whose pairs are in memory at a time
_HELD_OUT = 20  # one piece in so many is never trained on


class Corpus(NamedTuple):
    """A text as numbers.

    Attributes:
      words: The vocabulary, most frequent first.
      counts: `[len(words)]`, how often the text holds each of them.
      tokens: The text, as indices into `words`; rarer words are left out.
      num_files: How many files were read.
    """

    words: list[str]
    counts: NDArray[np.int64]
    tokens: Ints
    num_files: int


class Batch(NamedTuple):
    """Pairs to tell from noise.

    Attributes:
      centers: `[batch]`.
      contexts: `[batch, 1 + negatives]`, the true context in front.
    """

    centers: Ints
    contexts: Ints


def _find_files(text: Path | None) -> list[Path]:
    """The files of a text: one file, a folder, or Python's standard library."""
    if text is None:
        root = Path(sysconfig.get_path("stdlib"))
        return [p for p in _walk(root, _SKIPPED) if p.suffix == ".py"]
    return list(_walk(text, set())) if text.is_dir() else [text]


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        visible = (f for f in folders if f not in skipped and not f.startswith("."))
        folders[:] = sorted(visible)
        for name in sorted(names):
            path = Path(folder, name)
            # A folder may hold pipes and sockets, which would never end.
            if path.is_file() and not name.startswith("."):
                yield path


def _read_words(path: Path) -> Iterator[list[str]]:
    """The words of a file, some thousand lines at a time; none if it is binary."""
    with path.open("rb") as file:
        if b"\0" in file.read(8192):
            return
    with path.open(encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(1 << 22):
            yield _WORD.findall("".join(lines))


def read_corpus(text: Path | None, min_count: int, max_words: int) -> Corpus:
    """Reads a file, a folder, or (`None`) the source of Python's standard library.

    Binary and unreadable files are passed over.

    Raises:
      InputError: If fewer than ten different words are left.
    """
    index: defaultdict[str, int] = defaultdict()
    index.default_factory = index.__len__  # a new word gets the next number
    parts = [np.zeros(0, np.int32)]
    num_files = 0
    for path in _find_files(text):
        before = len(parts)
        try:
            for words in _read_words(path):
                parts.append(np.array([index[w] for w in words], np.int32))
        except OSError:
            continue
        num_files += len(parts) > before
    tokens = np.concatenate(parts)
    counts = np.bincount(tokens, minlength=len(index))
    order = np.argsort(-counts, kind="stable")[:max_words]
    order = order[counts[order] >= min_count]
    if len(order) < _FEWEST_WORDS:
        raise InputError(
            f"--text must hold at least {_FEWEST_WORDS} different words of two letters "
            f"or more, each at least {min_count} times, got {len(order)} in "
            f"{str(text or 'the standard library')!r} ({num_files} readable files); "
            "pass more text (UTF-8), or a lower --min-count"
        )
    rank = np.full(len(index), -1, np.int32)
    rank[order] = np.arange(len(order))
    tokens = rank[tokens]
    names = list(index)
    words = [names[i] for i in order]
    return Corpus(words, counts[order], tokens[tokens >= 0], num_files)


def keep_probabilities(
    counts: NDArray[np.int64], threshold: float
) -> NDArray[np.float64]:
    """How likely an occurrence of each word is kept: `sqrt(threshold / frequency)`."""
    frequency = counts / counts.sum()
    return np.minimum(1.0, np.sqrt(threshold / frequency))


def negative_table(counts: NDArray[np.int64], size: int = 1 << 22) -> Ints:
    """Words in proportion to `count ** 0.75`, so that a uniform draw is a negative."""
    share = np.cumsum(counts**0.75)
    share /= share[-1]
    middle = (np.arange(size) + 0.5) / size
    return np.searchsorted(share, middle).astype(np.int32)


def skip_grams(tokens: Ints, reach: Ints) -> Ints:
    """All pairs of a token and one at most `reach` of that token away.

    Args:
      tokens: `[num_tokens]`, in the order of the text.
      reach: `[num_tokens]`, the reach of each token as a center.

    Returns:
      `[num_pairs, 2]`: center and context.
    """
    pairs = [np.zeros((0, 2), np.int32)]
    for offset in range(1, int(np.max(reach, initial=0)) + 1):
        left, right = tokens[:-offset], tokens[offset:]
        for center, context, far in (
            (left, right, reach[:-offset]),
            (right, left, reach[offset:]),
        ):
            near = far >= offset
            pairs.append(np.stack([center[near], context[near]], axis=1))
    return np.concatenate(pairs)


class SkipGrams:
    """Draws batches from a corpus: subsampled, paired, with negatives.

    Args:
      corpus: The text.
      window: The largest reach; each center draws its own from 1 to `window`.
      negatives: Number of noise words for each pair. As in word2vec they come from all
        words; one that equals the true context by chance is so rare that it stays.
      sample: Frequency above which words are thinned out.
      batch: Number of pairs in a batch.
    """

    def __init__(
        self, corpus: Corpus, window: int, negatives: int, sample: float, batch: int
    ) -> None:
        # Windows cross the seams between pieces: one pair in some hundred is noise.
        num_pieces = max(_HELD_OUT, len(corpus.tokens) // _PIECE)
        self._pieces = np.array_split(corpus.tokens, num_pieces)
        self._keep = keep_probabilities(corpus.counts, sample)
        self._noise = negative_table(corpus.counts)
        self._window = window
        self._negatives = negatives
        self._batch = batch

    def _pairs(self, pieces: list[Ints], rng: np.random.Generator) -> Ints:
        tokens = np.concatenate(pieces)
        tokens = tokens[rng.random(len(tokens)) < self._keep[tokens]]
        reach = rng.integers(1, self._window + 1, len(tokens), dtype=np.int32)
        return rng.permutation(skip_grams(tokens, reach))

    def _with_noise(self, pairs: Ints, rng: np.random.Generator) -> Batch:
        size = (len(pairs), self._negatives)
        noise = self._noise[rng.integers(len(self._noise), size=size)]
        return Batch(pairs[:, 0], np.concatenate([pairs[:, 1:], noise], axis=1))

    def train(self, rng: np.random.Generator) -> Iterator[Batch]:
        """Batches without end; the text is shuffled anew for each pass over it."""
        pieces = [p for i, p in enumerate(self._pieces) if i % _HELD_OUT]
        rest = np.zeros((0, 2), np.int32)
        while True:
            order = rng.permutation(len(pieces))
            for chunk in np.array_split(order, -(-len(order) // _CHUNK)):
                fresh = self._pairs([pieces[i] for i in chunk], rng)
                pairs = np.concatenate([rest, fresh])
                num_batches, left = divmod(len(pairs), self._batch)
                for full in np.split(pairs[: len(pairs) - left], num_batches or 1):
                    if len(full):
                        yield self._with_noise(full, rng)
                rest = pairs[len(pairs) - left :]

    def held_out(self, rng: np.random.Generator, num_pairs: int) -> list[Batch]:
        """About `num_pairs` pairs from the pieces that `train` never shows.

        Raises:
          InputError: If these pieces hold no pair.
        """
        pairs = self._pairs(self._pieces[::_HELD_OUT], rng)
        if not len(pairs):
            raise InputError(
                f"--text must be long enough to hold out one part in {_HELD_OUT}, "
                f"got {sum(map(len, self._pieces))} tokens; pass more text"
            )
        size = (-(-num_pairs // self._batch), self._batch)
        drawn = pairs[rng.integers(len(pairs), size=size)]
        return [self._with_noise(batch, rng) for batch in drawn]
