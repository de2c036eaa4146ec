"""The demo: the program as a user meets it."""

import math
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from optax_sparse_adam import demo
from optax_sparse_adam.demo import _program, _word2vec
from optax_sparse_adam.demo._corpus import Corpus

TOPICS, PER_TOPIC, NEGATIVES = 8, 6, 5
WORDS = [f"word{topic}{i}" for topic in range(TOPICS) for i in range(PER_TOPIC)]


def topical_text(seed=0, paragraphs=240):
    """Paragraphs of 200 words, all of one topic and drawn with equal chances."""
    rng = np.random.default_rng(seed)
    topics = rng.permutation(np.arange(paragraphs) % TOPICS)
    words = np.array(WORDS).reshape(TOPICS, PER_TOPIC)
    return "\n".join(" ".join(rng.choice(words[topic], 200)) for topic in topics)


@pytest.fixture(autouse=True)
def default_promotion():
    """`optax.adam`, which the demo compares with, promotes types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(topical_text())
    return str(path)


def small_run(text, *more):
    """A command line for a small model that sees every word."""
    options = "--batch 256 --dim 16 --sample 1 --window 3 --compare 40"
    return ["--text", text, *options.split(), *more]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """One whole run: its output and its files."""
    folder = tmp_path_factory.mktemp("run")
    files = ["--save", str(folder / "v.npz"), "--plot", str(folder / "loss.png")]
    command = [sys.executable, "-m", "optax_sparse_adam.demo"]
    options = small_run(text, "--steps", "1500", "--words", "word31,word00", *files)
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done, folder


def saved(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


# --- a whole run ---


def test_words_of_a_topic_end_up_nearest(trained):
    file = saved(trained[1] / "v.npz")
    words, center = file["words"].tolist(), file["center"]
    unit = center / np.linalg.norm(center, axis=1, keepdims=True)
    for word, cosines in zip(words, unit @ unit.T, strict=True):
        topic = {words[i][:5] for i in np.argsort(-cosines)[:PER_TOPIC]}
        assert topic == {word[:5]}, (word, topic)


def results(stdout):
    """The numbers of each line of the closing table."""
    lines = re.findall(r"^  (\S.*?)  +([\d.]+)(?: \w+)? +([\d.]+|-)", stdout, re.M)
    return {name: numbers for name, *numbers in lines}


def test_the_loss_falls_to_what_theory_says(trained):
    table = results(trained[0].stdout)
    # All scores are 0 at first, so each of the 1 + 5 terms is log 2.
    assert table["held-out loss before"] == [f"{6 * math.log(2):.3f}"] * 2
    # A center of a topic has each of its 6 words with chance 1/6 in its context, and of
    # 5 draws from all 48 words. The best score is log(1/6) - log(5/48) = log(8/5).
    score = math.log(TOPICS / NEGATIVES)
    same_topic = NEGATIVES / TOPICS
    best = math.log1p(math.exp(-score)) + same_topic * math.log1p(math.exp(score))
    loss = float(table["held-out loss after 1,500 steps"][0])
    # Above it, because few pairs that cross the end of a paragraph cost much.
    assert best - 0.02 < loss < best + 0.15, (loss, best)
    assert float(table["held-out loss after 40 steps"][0]) > loss


def test_the_output_says_what_was_measured(trained):
    done, folder = trained
    assert "files: 1, tokens: 48,000, words seen 2 times or more: 48\n" in done.stdout
    # Batches of 256 pairs and 5 negatives for each hold more ids than there are rows.
    assert "at most 96 of 96 rows" in done.stdout
    assert "2 of 48 rows x 16 float32" in done.stdout
    neighbours = re.findall(r"^  (word\w+) +(word\w+) (\d\.\d\d) ", done.stdout, re.M)
    assert [word for word, _, _ in neighbours] == ["word31", "word00"]
    file = saved(folder / "v.npz")
    index = {word: i for i, word in enumerate(file["words"].tolist())}
    for word, other, cosine in neighbours:
        a, b = file["center"][index[word]], file["center"][index[other]]
        expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert abs(float(cosine) - expected) < 0.0051
    assert min(map(float, results(done.stdout)["time of a step, median"])) > 0
    assert "1,500 steps, 0.38 million pairs" in done.stdout
    assert re.search(r"sparse_adam: 100%.*pair/s, loss=\d\.\d\d\d", done.stderr)


def test_the_files(trained):
    file = saved(trained[1] / "v.npz")
    assert set(file) == {"words", "counts", "center", "context"}
    assert sorted(file["words"].tolist()) == sorted(WORDS)
    assert file["counts"].sum() == 48_000
    for name in ("center", "context"):
        assert (file[name].shape, file[name].dtype) == ((48, 16), np.float32)
        assert np.isfinite(file[name]).all()
    assert (trained[1] / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_same_seed_same_numbers(text, tmp_path, capsys):
    tables = []
    for seed in (5, 5, 6):
        path = tmp_path / "v.npz"
        options = ["--steps", "30", "--seed", str(seed), "--save", str(path)]
        assert demo.main(small_run(text, *options)) == 0
        tables.append((saved(path), results(capsys.readouterr().out)))
    (first, losses), (second, same_losses), (other, _) = tables
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], name)
    held_out = [name for name in losses if "loss" in name]
    assert [losses[n] for n in held_out] == [same_losses[n] for n in held_out]
    assert not np.array_equal(first["center"], other["center"])


def test_words_to_show():
    words = ["to", "whale", "ship", "sailor", "read"]
    corpus = Corpus(words, np.ones(5, int), np.zeros(0, np.int32), 1)
    shown = [words[i] for i in _program._choose_words(corpus, None)]
    assert shown == ["read", "whale", "sailor", "to", "ship"]
    assert _program._choose_words(corpus, "ship, to") == [2, 0]


# --- what can go wrong ---

BAD = {
    "no such text": ("--text {tmp}/nothing", "exists, got '{tmp}/nothing'; leave it"),
    "no name": ("--text=", "exists, got ''"),
    "empty text": ("--text {tmp}/empty.txt", "10 different words", "got 0 in", "pass"),
    "tiny text": ("--text {tmp}/tiny.txt", "each at least 2 times, got 2", "pass more"),
    "short text": ("--text {tmp}/short.txt --sample 1e-9", "long enough", "got 20 tok"),
    "binary text": ("--text {tmp}/binary", "got 0 in", "(0 readable files)"),
    "empty folder": ("--text {tmp}/folder", "got 0 in", "(0 readable files)"),
    "rare words": ("--text {text} --min-count 9999", "got 0", "lower --min-count"),
    "zero": ("--steps 0", "--steps must be a whole number from 1", "'0'", "20,000"),
    "negative": ("--dim -3", "--dim must be a whole number from 1", "got '-3'"),
    "no number": (
        "--batch many",
        "--batch must be a whole",
        "got 'many'; leave it out",
    ),
    "fraction": ("--negatives 2.5", "--negatives must be a whole", "got '2.5'"),
    "zero window": ("--window 0", "--window must be", "got '0'; leave it out for 5"),
    "zero rate": ("--learning-rate 0", "--learning-rate must be a number", "got '0'"),
    "not a number": ("--learning-rate nan", "must be a number", "got 'nan'"),
    "infinite": ("--sample inf", "--sample must be", "got 'inf'"),
    "negative seed": ("--seed -1", "--seed must be a whole number from 0", "'-1'"),
    "no value": ("--steps", "--steps: expected one argument", "see --help"),
    "unknown option": ("--stepz 3", "unrecognized arguments: --stepz", "see --help"),
    "unknown word": ("--text {text} --words word00,Zebra", "got 'Zebra'", "check the"),
    "picture type": ("--plot a.bmp", "--plot must end in .png", "'a.bmp'", "a.png"),
    "vectors type": ("--save {text}", "--save must end in .npz", "such as topics.npz"),
    "no folder": ("--save {tmp}/no/v.npz", "can be written", "No such file", "choose"),
    "is a folder": ("--plot {tmp}/folder.png", "must be a file that can be", "folder"),
}


@pytest.mark.parametrize(
    ("options", *["words"]), [(o, w) for o, *w in BAD.values()], ids=BAD
)
def test_bad_input_is_one_clear_line(options, words, text, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "tiny.txt").write_text("hello world hello world")
    (tmp_path / "short.txt").write_text(" ".join(WORDS[:10] * 2))
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    places = {"tmp": tmp_path, "text": text}
    argv = [option.format(**places) for option in options.split()]
    if "--save" not in argv:
        argv += ["--save", str(tmp_path / "unused.npz")]
    assert demo.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("demo: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word.format(**places) in err, err
    assert sorted(tmp_path.iterdir()) == before


def test_the_process_exits_with_the_code(tmp_path):
    command = [sys.executable, "-m", "optax_sparse_adam.demo", "--steps", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("demo: error: --steps must be a whole number")


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        demo.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    options = set(re.findall(r"^  (--[a-z-]+)", out, re.M))
    assert {"--text", "--steps", "--dim", "--batch", "--seed", "--plot"} <= options
    assert out.count("(default:") == len(options) - 2  # all but --plot and --save
    assert "example:" in out
    assert max(map(len, out.splitlines())) <= 90


@pytest.mark.parametrize("missing", ["tqdm", "matplotlib"])
def test_a_missing_package_is_one_clear_line(
    missing, text, tmp_path, monkeypatch, capsys
):
    for module in (missing, "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    assert demo.main(small_run(text, "--plot", str(tmp_path / "loss.png"))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"demo needs {missing}, which is not installed" in err
    assert 'pip install "optax-sparse-adam[demo]"' in err


def test_matplotlib_is_needed_for_the_plot_only(text):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from optax_sparse_adam import demo\n"
        "assert 'tqdm' not in sys.modules\n"
        "sys.exit(demo.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *small_run(text, "--steps", "3")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_is_one_clear_line(text, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    path = str(tmp_path / "v.npz")
    assert demo.main(small_run(text, "--steps", "2", "--save", path)) == 2
    assert "\ndemo: error: [Errno 28] No space left" in capsys.readouterr().err


# --- Ctrl-C ---


def test_ctrl_c_ends_the_step_and_saves(text, tmp_path, monkeypatch, capsys):
    """Pressed in the middle of a step, when the old tables are already donated."""
    before = signal.getsignal(signal.SIGINT)  # a job in the background ignores it
    advance = _word2vec.Trainer.advance
    after_step = []

    def pressed_in_step_60(trainer, batch):
        if len(trainer.losses) == 59:
            signal.raise_signal(signal.SIGINT)
        advance(trainer, batch)
        after_step.append(jax.device_get(trainer.params))

    monkeypatch.setattr(_word2vec.Trainer, "advance", pressed_in_step_60)
    path = tmp_path / "v.npz"
    options = ["--steps", "5000", "--save", str(path)]
    assert demo.main(small_run(text, *options)) == 130
    err = capsys.readouterr().err
    assert err.endswith(
        f"demo: interrupted after 60 steps; the vectors are in {path}\n"
    )
    assert len(after_step) == 40 + 60  # both optimisers, then one
    file = saved(path)
    for name in ("center", "context"):
        np.testing.assert_array_equal(file[name], after_step[-1][name], name)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_training(text, tmp_path, monkeypatch, capsys):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_program, "read_corpus", stop)
    path = tmp_path / "v.npz"
    assert demo.main(small_run(text, "--save", str(path))) == 130
    assert capsys.readouterr().err == "demo: interrupted\n"
    assert not path.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("save", [True, False])
def test_ctrl_c_on_the_process(text, tmp_path, save):
    path = tmp_path / "v.npz"
    options = ["--steps", "100000000", *(["--save", str(path)] * save)]
    command = [sys.executable, "-m", "optax_sparse_adam.demo"]
    with subprocess.Popen(
        [*command, *small_run(text, *options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        seen = ""
        while "sparse_adam:" not in seen:
            seen += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest
    kept = f"the vectors are in {path}" if save else "nothing is saved"
    assert re.search(rf"\ndemo: interrupted after [\d,]+ steps; {kept}\n$", rest), rest
    assert path.exists() == save
    if save:
        assert np.isfinite(saved(path)["center"]).all()
