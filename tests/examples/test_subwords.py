"""examples/word2vec.py --subwords: words as bags of their character n-grams."""

import re
import zlib

import jax
import numpy as np
import pytest

from ..helpers.examples import load_example, run_example
from ..helpers.support import assert_close

pytestmark = pytest.mark.slow

word2vec = load_example("word2vec")
TOPICS = ["banana", "kettle", "monsoon"]


def test_a_whole_run(tmp_path):
    """Words of a stem end up near, and so do words that the text does not have."""
    rng = np.random.default_rng(0)
    words = [[f"{stem}{x}{y}" for x in "dfgh" for y in "rsx"] for stem in TOPICS]
    stems = rng.permutation(np.arange(30) % len(TOPICS))
    text = "\n".join(" ".join(rng.choice(words[s], 1000)) for s in stems)
    (tmp_path / "text").write_text(text)
    options = ["--text", "text", "--steps", 300, "--subwords", 2000]
    done = run_example("word2vec", *options, "--save", "v.npz", cwd=tmp_path)
    assert "tables: 2,036 and 36 rows x 100 float32" in done.stdout
    with np.load(tmp_path / "v.npz") as file:
        assert file["center"].shape == file["context"].shape == (36, word2vec.DIM)
    shown = re.findall(r"^  ([a-z]{6})\w* +([a-z]{6})\w* \d", done.stdout, re.M)
    assert len(shown) == 12
    assert all(word == near for word, near in shown)
    made = done.stdout.partition("words that the text does not have:\n")[2]
    assert re.findall(r"^  (\w+)", made, re.M) == word2vec.UNSEEN.split(", ")


def test_subwords_equal_a_plain_loop():
    words, rng = ["read", "nonnegativeness", "new"], np.random.default_rng(0)
    table = rng.normal(size=(2 + 50, 4)).astype(np.float32)
    ids = word2vec.subwords(words, 2, 50)
    found = word2vec.vectors(jax.device_put(table), ids)
    for i, (word, vector) in enumerate(zip(words, found, strict=True)):
        marked = f"<{word}>"
        rows = [table[i]] if i < 2 else []  # "new" has no row of its own
        grams = [
            marked[at : at + size]
            for size in (3, 4, 5, 6)
            for at in range(len(marked))
            if at + size <= len(marked)
        ]
        for gram in grams[: word2vec.MAX_NGRAMS]:
            rows.append(table[2 + zlib.crc32(gram.encode()) % 50])
        assert_close(vector, np.mean(rows, axis=0, dtype=np.float64), 1e-6)


def test_a_negative_number_of_rows(main_of):
    text = "--subwords must be at least 0, got -1"
    assert text in main_of(word2vec, "--subwords", "-1")
