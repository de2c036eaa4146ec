"""examples/word2vec.py: as a user meets it."""

import math
import os
import re

import numpy as np
import pytest

from ..helpers.examples import (
    assert_one_clear_line,
    interrupt_example,
    load_example,
    run_example,
)

pytestmark = pytest.mark.slow

TOPICS, PER_TOPIC = 8, 6
WORDS = [f"word{topic}{i}" for topic in range(TOPICS) for i in range(PER_TOPIC)]
word2vec = load_example("word2vec")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Paragraphs of 1,000 words, all of one topic and drawn with equal chances."""
    rng = np.random.default_rng(0)
    topics = rng.permutation(np.arange(96) % TOPICS)
    words = np.array(WORDS).reshape(TOPICS, PER_TOPIC)
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n".join(" ".join(rng.choice(words[t], 1000)) for t in topics))
    return path


# --- a whole run ---


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "v.npz").symlink_to(folder / "new.npz")  # a link that dangles
    options = ["--text", text, "--steps", 700, "--save", "v.npz"]
    return run_example("word2vec", *options, cwd=folder), folder


def test_words_of_a_topic_end_up_nearest(trained):
    done, folder = trained
    with np.load(folder / "v.npz") as file:
        words, center, context = (file[x] for x in ("words", "center", "context"))
        assert file["counts"].sum() == 96_000
    assert sorted(words) == sorted(WORDS)
    assert center.shape == context.shape == (48, word2vec.DIM)
    unit = center / np.linalg.norm(center, axis=1, keepdims=True)
    for word, cosines in zip(words, unit @ unit.T, strict=True):
        topic = {words[i][:5] for i in np.argsort(-cosines)[:PER_TOPIC]}
        assert topic == {word[:5]}, (word, topic)
    shown = re.findall(r"^  (word\d\d) +(word\d\d) (\d\.\d\d),", done.stdout, re.M)
    assert len(shown) == 12
    for word, near, cosine in shown:
        a, b = (unit[list(words).index(x)] for x in (word, near))
        assert abs(float(cosine) - a @ b) < 0.0051
        assert word[:5] == near[:5]


def test_the_loss_falls_to_what_theory_says(trained):
    line = r"after (\d+) steps +(\S+) +(\S+) +(\S+)$"
    lines = re.findall(line, trained[0].stdout, re.M)
    losses = {int(steps): found for steps, *found in lines}
    # All scores are 0 at first, so each of the 1 + 5 terms is log 2.
    assert losses[0] == [f"{6 * math.log(2):.3f}"] * 3
    # A center of a topic has each of its 6 words with chance 1/6 in its context, and of
    # 5 draws from all 48 words. The best score is log(1/6) - log(5/48) = log(8/5).
    score, same_topic = math.log(TOPICS / 5), 5 / TOPICS
    best = math.log1p(math.exp(-score)) + same_topic * math.log1p(math.exp(score))
    ours, dense, exact = map(float, losses[200])
    # Above it, because few pairs that cross the end of a paragraph cost much.
    assert best - 0.02 < float(losses[700][0]) < best + 0.2
    assert best - 0.02 < dense < best + 0.2
    assert best - 0.02 < ours < best + 0.2
    assert abs(exact - dense) < 0.0015  # that of dense Adam to three digits
    assert losses[700][1:] == ["-", "-"]


def test_what_is_written(trained):
    done, folder = trained
    assert (folder / "word2vec.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (folder / "v.npz").is_symlink()
    assert sorted(os.listdir(folder)) == ["new.npz", "v.npz", "word2vec.png"]
    assert "text: 96,000 words, 48 different ones\n" in done.stdout
    times = re.search(r"median" + r" +([\d.]+) ms" * 3, done.stdout)
    assert all(float(time) > 0 for time in times.groups())
    assert re.search(r"sparse_adam: 100%.*step/s, loss \d\.\d\d\d", done.stderr)


# --- what can go wrong ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--text {tmp}/nothing", "file or folder to read"),
        ("--text {text} --steps 0", "--steps must be at least 1, got 0"),
        ("--text {text} --save {tmp}/fifo", "fifo must be a file that can be written"),
    ],
)
def test_bad_input_is_one_clear_line(options, words, text, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    options = options.format(tmp=tmp_path, text=text).split()
    done = run_example("word2vec", *options, cwd=tmp_path, check=False)
    assert_one_clear_line(done, words)
    assert sorted(tmp_path.iterdir()) == before


_COUNTS_STEPS = r"\| [1-9]\d*/100000000 "


@pytest.mark.parametrize(
    ("after", "seconds"),
    [(r"\| +numpy$", 0), ("^a step", 1), (_COUNTS_STEPS, 0)],
    ids=["imports", "compiling", "steps"],
)
def test_ctrl_c(text, tmp_path, after, seconds, monkeypatch):
    """Amid the imports, while XLA compiles, amid the steps."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    options = ["--text", text, "--steps", 10**8, "--save", "v.npz"]
    timing = {"after": after, "seconds": seconds}
    out = interrupt_example("word2vec", *options, cwd=tmp_path, **timing)
    path = tmp_path / "v.npz"
    assert path.exists() == ("interrupted after" in out)
    if path.exists():
        with np.load(path) as file:
            assert np.isfinite(file["center"]).all()
    assert path.exists() or after != _COUNTS_STEPS
