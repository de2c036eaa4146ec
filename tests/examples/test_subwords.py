"""examples/word2vec.py --subwords: words as bags of their character n-grams."""

import re

import numpy as np
import pytest

from ..helpers.examples import load_example, run_example

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
