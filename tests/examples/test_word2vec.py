"""examples/word2vec.py: as a user meets it, and its parts against plain loops."""

import math
import os
import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

from ..helpers.examples import (
    FOLDER,
    assert_one_clear_line,
    interrupt_example,
    load_example,
    run_example,
)
from ..helpers.support import assert_close

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
        ("--text {tmp}/short.txt", "1,000 words, and 20 different"),
        ("--text {tmp}/binary", "got 0 and 0; pass more text"),
        ("--text {text} --steps 0", "--steps must be at least 1, got 0"),
        ("--text {text} --save {tmp}/fifo", "fifo must be a file that can be written"),
        ("--text {text} --save {tmp}", "must be a file that can be written"),
        ("--text {text} --plot {tmp}/no/a.png", "a.png must be a file that can be"),
    ],
)
def test_bad_input_is_one_clear_line(options, words, text, tmp_path, main_of):
    (tmp_path / "short.txt").write_text("hello world " * 30)
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    options = options.format(tmp=tmp_path, text=text).split()
    assert words in main_of(word2vec, *options)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("missing", ["tqdm", "matplotlib"])
def test_a_missing_package_is_one_clear_line(missing, tmp_path, monkeypatch):
    code = f"raise ModuleNotFoundError(name={missing!r})"
    (tmp_path / f"{missing}.py").write_text(code)
    shutil.copy(FOLDER / "word2vec.py", tmp_path)  # its folder is searched first
    monkeypatch.setattr("tests.helpers.examples.FOLDER", tmp_path)
    done = run_example("word2vec", cwd=tmp_path, check=False)
    assert_one_clear_line(done, f"needs {missing}", 'pip install ".[examples]"')


_COUNTS_STEPS = r"\| [1-9]\d*/100000000 "


@pytest.mark.parametrize(
    ("after", "seconds"),
    [(r"\| +numpy$", 0), ("^a step", 0), ("^a step", 1), (_COUNTS_STEPS, 0)],
    ids=["imports", "before the first step", "compiling", "steps"],
)
def test_ctrl_c(text, tmp_path, after, seconds, monkeypatch):
    """Amid the imports, before the first step, while XLA compiles, amid the steps."""
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


# --- its parts ---


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 60])
def test_skip_grams_equal_a_plain_loop(num_tokens, window):
    rng = np.random.default_rng(num_tokens)
    tokens = rng.integers(0, 9, num_tokens).astype(np.int32)
    reach = rng.integers(1, window + 1, num_tokens)
    expected = []
    for i in range(num_tokens):
        for j in range(max(0, i - reach[i]), min(num_tokens, i + reach[i] + 1)):
            if i != j:
                expected.append([tokens[i], tokens[j]])
    assert sorted(word2vec.skip_grams(tokens, reach).tolist()) == sorted(expected)


def test_read_corpus_counts_words(tmp_path):
    names = [f"name_{i}" for i in range(12)]
    (tmp_path / "tests").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.txt").write_text(" ".join(names * 3) + " ValueError x once 42")
    (tmp_path / "tests" / "b").write_bytes(b"ValueError caf\xc3\xa9, caf\xc3\xa9 \xff")
    (tmp_path / "binary").write_bytes(b"ValueError \0 ValueError")
    (tmp_path / ".hidden" / "c.txt").write_text("hidden hidden")
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it
    words, counts, tokens = word2vec.read_corpus(tmp_path)
    expected = Counter(names * 3 + ["ValueError", "café"] * 2)
    assert dict(zip(words, counts.tolist(), strict=True)) == expected
    assert list(counts) == sorted(counts, reverse=True)
    assert [words[i] for i in tokens] == names * 3 + ["ValueError"] * 2 + ["café"] * 2


def test_loss_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    tables = {
        n: rng.normal(size=(9, 4)).astype(np.float32) for n in ("center", "context")
    }
    centers, contexts = np.array([0, 3, 3]), np.array([[1, 2], [8, 8], [0, 3]])
    expected = 0.0
    for center, row in zip(centers, contexts, strict=True):
        for place, context in enumerate(row):
            score = float(tables["center"][center] @ tables["context"][context])
            expected += math.log1p(math.exp(score if place else -score))
    found = word2vec.loss_fn(jax.device_put(tables), centers, contexts)
    assert_close(found, expected, 1e-6)
