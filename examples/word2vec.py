"""Word vectors in JAX, trained at the cost of the batch: word2vec from scratch.

    python examples/word2vec.py

reads the source files of Python's standard library, learns a vector for each of some
30,000 words, and prints the nearest neighbours of a few of them. See `make_step` for
what this library adds to a JAX program: `osa.value_and_grad`, whose gradients hold the
rows that the batch has read, and `osa.sparse_adam`, which updates no others. Then the
same model is trained for 200 steps by dense Adam, to compare, and by `osa.exact_adam`,
which has the losses of dense Adam at a fraction of its time. All of it takes twenty
seconds on two cores of an AMD EPYC.

With `--subwords 200000` the vector of a word is the mean of its own row and of those of
its character n-grams, hashed to so many rows (fastText: Bojanowski et al., "Enriching
Word Vectors with Subword Information", 2017, https://arxiv.org/abs/1607.04606). These
are bags of ids, `osa.embedding_bag`, and words that the text lacks get a vector, too.

The method is that of Mikolov et al., "Distributed Representations of Words and Phrases
and their Compositionality", 2013, https://arxiv.org/abs/1310.4546: the vector of a word
should tell the words around it from noise.
"""

import os
import signal

# Workaround: Ctrl-C while XLA compiles may end a JAX program with a segmentation fault.
# Cause: KeyboardInterrupt is raised inside a callback from C++ (jax issue 18246), or
# JAX is torn down while threads of XLA still run. Remedy: end at once, and raise and
# tear down nothing. Safe: before the training there is nothing to save; from there on a
# flag is set instead. Test: test_word2vec.py::test_ctrl_c. It stands in front of the
# imports because that of JAX takes seconds.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import itertools
import re
import sys
import sysconfig
import threading
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from matplotlib.figure import Figure
    from tqdm import tqdm

    import optax_sparse_adam as osa
except ImportError as error:
    install = 'pip install ".[examples]"'
    sys.exit(f"word2vec.py needs {error.name}, which is not installed; run {install}")

DIM = 100  # numbers in a vector
BATCH = 512  # pairs of words in a step
WINDOW = 5  # how far the words of a pair may lie apart
NEGATIVES = 5  # noise words for each pair
MIN_COUNT, MAX_WORDS = 2, 50_000  # rarer words are left out
SAMPLE = 1e-3  # words that are more frequent are thinned out
# Adam's usual 0.001 is slow for rows that few batches read. Held-out loss after 20,000
# steps: 2.62 with 0.001, 2.50 with 0.005, 2.57 with 0.01.
LEARNING_RATE = 5e-3
COMPARED_STEPS = 200  # steps that the other optimisers take as well
NGRAMS, MAX_NGRAMS = (3, 4, 5, 6), 32  # lengths of n-grams; how many of a word
UNSEEN = "rereadable, widths, halfhour, ThreadLocker, PipeError, asyncqueue"
SHOWN = "read, max, left, first, True, stdin, encode, hour, width, red, lock, socket"

# Not on a terminal: lines of progress now and then.
LINES = {"mininterval": 10, "bar_format": "{l_bar}{bar:10}{r_bar}\n"}
QUIET = {} if sys.stderr.isatty() else LINES

# --- the text: a list of words, most frequent first, and indices into it ---

WORD = re.compile(r"[^\W\d]\w+")  # names stay whole: ValueError is one word
# Folders of the standard library that hold other things than library code.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SKIPPED |= {"encodings", "lib2to3"}


def find_files(text):
    """A file, all files of a folder, or (`None`) the standard library's."""
    if text and not text.is_dir():
        return [text]  # may be a pipe
    files = []
    for folder, folders, names in os.walk(text or sysconfig.get_path("stdlib")):
        kept = [f for f in folders if f[0] != "." and (text or f not in SKIPPED)]
        folders[:] = sorted(kept)  # these are visited
        paths = [Path(folder, name) for name in sorted(names) if name[0] != "."]
        paths = [p for p in paths if p.is_file() and os.access(p, os.R_OK)]
        files += [p for p in paths if text or p.suffix == ".py"]
    return files


def read_corpus(text=None):
    """The words, their counts `[len(words)]`, and the text as indices into them."""
    index = defaultdict(lambda: len(index))  # a new word gets the next number
    parts = [np.zeros(0, np.int32)]
    for path in find_files(text):
        content = path.read_text(encoding="utf-8", errors="replace")
        if "\0" not in content[:8192]:  # else it is no text
            words = WORD.findall(content)
            parts.append(np.array([index[word] for word in words], np.int32))
    tokens, names = np.concatenate(parts), list(index)
    counts = np.bincount(tokens, minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:MAX_WORDS]
    order = order[counts[order] >= MIN_COUNT]
    rank = np.full(len(names), -1, np.int32)
    rank[order] = np.arange(len(order))
    tokens = rank[tokens]
    return [names[i] for i in order], counts[order], tokens[tokens >= 0]


def subwords(words, num_words, buckets):
    """The rows of each word and of its n-grams, `[len(words), 1 + MAX_NGRAMS]`.

    The table has a row for each of `num_words` words, then the buckets. Ids of -1 are
    padding; a word that is none of the first `num_words` has no row of its own.
    """
    ids = np.full((len(words), 1 + MAX_NGRAMS), -1, np.int32)
    ids[:num_words, 0] = np.arange(min(len(words), num_words))
    for row, word in zip(ids, words, strict=True):
        text = f"<{word}>".encode()
        grams = [text[i : i + n] for n in NGRAMS for i in range(len(text) - n + 1)]
        hashed = [num_words + zlib.crc32(gram) % buckets for gram in grams]
        row[1 : 1 + len(grams)] = hashed[:MAX_NGRAMS]
    return ids


def split(tokens):
    """Pieces of a thousand words, to shuffle, and to hold some of them out."""
    return np.array_split(tokens, max(20, len(tokens) // 1000))


# --- batches: pairs of words, and noise ---


def skip_grams(tokens, reach):
    """Pairs `[n, 2]` of each word and those at most `reach`, `[len(tokens)]`, away."""
    pairs = [np.zeros((0, 2), np.int32)]
    for offset in range(1, int(np.max(reach, initial=0)) + 1):
        left, right = tokens[:-offset], tokens[offset:]
        pairs.append(np.stack([left, right], axis=1)[reach[:-offset] >= offset])
        pairs.append(np.stack([right, left], axis=1)[reach[offset:] >= offset])
    return np.concatenate(pairs)


class SkipGrams:
    """Draws batches: centers `[BATCH]`, contexts `[BATCH, 1 + NEGATIVES]`.

    With `bags`, the rows of each word, the centers are bags, `[BATCH, length]`.
    """

    def __init__(self, counts, bags=None):
        self.bags = bags
        self.keep = np.minimum(1, np.sqrt(SAMPLE * counts.sum() / counts))
        # Noise words are drawn in proportion to count ** 0.75, from a table.
        share = np.cumsum(counts**0.75)
        middle = (np.arange(1 << 22) + 0.5) / (1 << 22)
        self.noise = np.searchsorted(share / share[-1], middle).astype(np.int32)

    def pairs(self, pieces, rng):
        tokens = np.concatenate(pieces)
        tokens = tokens[rng.random(len(tokens)) < self.keep[tokens]]
        reach = rng.integers(1, WINDOW + 1, len(tokens), dtype=np.int32)
        return rng.permutation(skip_grams(tokens, reach))

    def batch(self, pairs, rng):
        noise = self.noise[rng.integers(len(self.noise), size=(len(pairs), NEGATIVES))]
        centers = pairs[:, 0] if self.bags is None else self.bags[pairs[:, 0]]
        return centers, np.concatenate([pairs[:, 1:], noise], axis=1)

    def train(self, pieces, rng):
        """Batches without end; the pieces are shuffled anew for each pass."""
        rest = np.zeros((0, 2), np.int32)
        while True:
            order = rng.permutation(len(pieces))
            for chunk in np.array_split(order, -(-len(order) // 1000)):
                fresh = self.pairs([pieces[i] for i in chunk], rng)
                pairs = np.concatenate([rest, fresh])
                end = len(pairs) - len(pairs) % BATCH
                for start in range(0, end, BATCH):
                    yield self.batch(pairs[start : start + BATCH], rng)
                rest = pairs[end:]

    def held_out(self, pieces, rng, num_batches=32):
        """Batches from pieces that are not trained on."""
        pairs = self.pairs(pieces, rng)
        drawn = pairs[rng.integers(len(pairs), size=(num_batches, BATCH))]
        return [self.batch(batch, rng) for batch in drawn]


# --- the model and its training ---


def init_params(num_words, rng, buckets=0):
    """Two vectors for each word, as center and as context, and one for each bucket."""
    shape = (num_words + buckets, DIM)
    center = rng.uniform(-0.5 / DIM, 0.5 / DIM, shape).astype(np.float32)
    return {"center": jnp.array(center), "context": jnp.zeros((num_words, DIM))}


def vectors(table, ids):
    """The vectors of words: a row for each id, or the mean of each bag of ids."""
    if ids.ndim == 2:
        return osa.embedding_bag(table, ids, mode="mean")
    return table[ids]


def loss_fn(params, centers, contexts):
    """Negative sampling, equation 4 of the paper, summed over the batch.

    A sum, because word2vec takes a step for each pair: a mean would divide the gradient
    of each row by the batch, and bring it near to the `eps` of Adam.
    """
    # Lookups, and no other use of the tables: so their gradients can be row-sparse.
    center = vectors(params["center"], centers).astype(jnp.float32)
    context = params["context"][contexts].astype(jnp.float32)
    scores = jnp.einsum("bd,bkd->bk", center, context)
    true, noise = scores[:, 0], scores[:, 1:]
    return -jnp.sum(jax.nn.log_sigmoid(true)) - jnp.sum(jax.nn.log_sigmoid(-noise))


compiled_loss = jax.jit(loss_fn)


def mean_loss(params, batches):
    """The loss of a pair."""
    return float(np.mean([compiled_loss(params, *b) / BATCH for b in batches]))


def make_step(value_and_grad, optimizer):
    """A training step: params, state, batch to new params, new state, loss.

    With `osa.value_and_grad` the gradient of a table holds the rows that the batch has
    read, with `jax.value_and_grad` all rows. The rest of the step is the same. In exact
    Adam a row goes on moving while no batch reads it: `read` tells where it is by now.
    """

    # Donated tables and moments are updated in place. Without donation each step would
    # copy all of them, whatever the optimiser.
    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, batch):
        read = {"read": state} if isinstance(state, osa.ExactAdamState) else {}
        loss, grads = value_and_grad(loss_fn, **read)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return osa.apply_updates(params, updates), state, loss / BATCH

    return step


interrupted = threading.Event()


class Run(NamedTuple):
    params: dict
    losses: list[float]  # of a pair, by step
    seconds: list[float]  # by step
    held_out: dict[int, float]  # the loss on `held_out`, by number of steps


def train(name, value_and_grad, optimizer, params, batches, num_steps, held_out):
    """Trains for `num_steps`, or until Ctrl-C: that waits for the step to end."""
    step = make_step(value_and_grad, optimizer)
    params = jax.tree.map(jnp.copy, params)  # the first step donates them
    state = optimizer.init(params)
    losses, seconds, found = [], [], {0: mean_loss(params, held_out)}
    steps = itertools.islice(batches, num_steps)
    bar = tqdm(steps, name, num_steps, unit="step", **QUIET)
    for number, batch in enumerate(bar, 1):
        start = time.perf_counter()
        params, state, loss = jax.block_until_ready(step(params, state, batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
        if number % 100 == 0:
            bar.set_postfix_str(f"loss {np.mean(losses[-100:]):.3f}", refresh=False)
        if number in (COMPARED_STEPS, num_steps):
            now, _ = osa.flush(params, state)  # rows of exact Adam, up to date
            found[number] = mean_loss(now, held_out)
        if interrupted.is_set():
            break
    bar.close()
    return Run(params, losses, seconds, found)


# --- what came out ---


def nearest(rows, ids, num=5, among=5000):
    """The nearest of the first rows by cosine: rows and cosines, `[len(ids), num]`."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit[ids] @ unit[:among].T
    cosines[np.arange(cosines.shape[1]) == np.array(ids)[:, None]] = -1  # itself
    rows = np.argsort(-cosines, axis=1)[:, :num]
    return rows, np.take_along_axis(cosines, rows, axis=1)


def draw(path, runs, words, center, groups):
    """The losses, and a map of words: `groups` of indices, those of a row are near."""
    figure = Figure(figsize=(12, 5), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for name, run in runs.items():
        width = min(100, len(run.losses))
        mean = np.convolve(run.losses, np.full(width, 1 / width), mode="valid")
        label = f"{name}, {len(run.losses):,} steps"
        left.plot(np.cumsum(run.seconds)[width - 1 :], mean, label=label)
    left.set(xlabel="seconds, with compilation", ylabel="training loss of a pair")
    left.legend()
    # The plane in which these words differ most (principal components).
    points = center[groups.ravel()]
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    axes = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)[2][:2]
    for i, place in zip(groups.ravel(), points @ axes.T, strict=True):
        color = f"C{np.argwhere(groups == i)[0][0] % 10}"
        right.plot(*place, ".", color=color)
        right.annotate(words[i], place, color=color, size=8)
    right.set(title="words and their nearest neighbours", xticks=[], yticks=[])
    right.margins(x=0.12)  # room for the last words
    figure.savefig(path, format="png")


def main():
    parser = argparse.ArgumentParser(description="Trains word vectors.")
    add = parser.add_argument
    add("--text", type=Path, help="file, folder or pipe; default: Python's own library")
    add("--steps", type=int, default=8_000, help="default: 8,000")
    add(
        "--subwords",
        type=int,
        default=0,
        metavar="ROWS",
        help="for n-grams; try 200000",
    )
    add("--save", type=Path, metavar="FILE.npz", help="keep both tables and the words")
    add("--plot", type=Path, default=Path("word2vec.png"), help="default: word2vec.png")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.subwords < 0:
        parser.error(f"--subwords must be at least 0, got {args.subwords}")
    if args.text and not os.access(args.text, os.R_OK):
        parser.error(f"--text must be a file or folder to read, got {args.text}")
    for path in filter(None, (args.save, args.plot)):
        # Not opened to try: that would make a file, and wait for the reader of a pipe.
        folder = path.resolve().parent
        if (path.exists() and not path.is_file()) or not os.access(folder, os.W_OK):
            parser.error(f"{path} must be a file that can be written; choose another")

    # A text may hold what a terminal cannot show.
    sys.stdout.reconfigure(errors="replace", line_buffering=True)
    words, counts, tokens = read_corpus(args.text)
    if len(words) < 20 or len(tokens) < 1000:
        sys.exit(
            "word2vec.py: --text must hold 1,000 words, and 20 different ones that "
            f"occur twice, got {len(tokens):,} and {len(words)}; pass more text"
        )
    print(f"text: {len(tokens):,} words, {len(words):,} different ones")
    heights = len(words) + args.subwords, len(words)
    bags = subwords(words, len(words), args.subwords) if args.subwords else None
    sizes = f"{heights[0]:,} and {heights[1]:,} rows x {DIM} float32"
    print(f"tables: {sizes}, {sum(heights) * DIM * 4 / 1e6:.1f} MB together")
    lookups = BATCH * (1 + NEGATIVES + (1 if bags is None else bags.shape[1]))
    print(f"a step: {BATCH} pairs with {NEGATIVES} noise words, {lookups:,} lookups")

    pieces, source = split(tokens), SkipGrams(counts, bags)
    held_out = source.held_out(pieces[::20], np.random.default_rng(0))
    known = [piece for i, piece in enumerate(pieces) if i % 20]
    params = init_params(len(words), np.random.default_rng(1), args.subwords)
    rate = optax.linear_schedule(LEARNING_RATE, 0.05 * LEARNING_RATE, args.steps)

    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    batches = source.train(known, np.random.default_rng(2))
    sparse = osa.value_and_grad, osa.sparse_adam(rate)
    ours = train("osa.sparse_adam", *sparse, params, batches, args.steps, held_out)
    tables = {name: np.asarray(table) for name, table in ours.params.items()}
    if bags is not None:
        tables |= {"center": np.asarray(vectors(ours.params["center"], bags))}
    if args.save:
        with args.save.open("wb") as file:
            np.savez(file, words=np.array(words), counts=counts, **tables)
        print(f"words and vectors: {args.save}")
    if interrupted.is_set():
        print(f"interrupted after {len(ours.losses):,} steps")
        os._exit(130)  # see above

    index = {word: i for i, word in enumerate(words)}
    shown = [word for word in SHOWN.split(", ") if word in index]
    shown += [word for word in words if len(word) > 4 and word not in shown]
    ids = [index[word] for word in shown[:12]]
    rows, cosines = nearest(tables["center"], ids)
    print("\nnearest neighbours, and their cosines:")
    for i, row, values in zip(ids, rows, cosines, strict=True):
        near = [f"{words[j]} {c:.2f}" for j, c in zip(row, values, strict=True)]
        print(f"  {words[i]:<12}" + ", ".join(near))

    if bags is not None:
        unseen = [word for word in UNSEEN.split(", ") if word not in index]
        # Their vectors come after those of the words, and among these are the nearest.
        rows_of = subwords([*words, *unseen], len(words), args.subwords)[len(words) :]
        made = np.asarray(vectors(ours.params["center"], rows_of))
        places = range(len(words), len(words) + len(unseen))
        both = np.concatenate([tables["center"], made])
        near, _ = nearest(both, places, among=min(len(words), 5000))
        print("nearest neighbours of words that the text does not have:")
        for word, row in zip(unseen, near, strict=True):
            print(f"  {word:<13}" + ", ".join(words[j] for j in row))

    print("\nnow dense and exact Adam: the same model, first values and batches")
    others = {
        "optax.adam": (jax.value_and_grad, optax.adam(rate)),  # dense gradients
        "osa.exact_adam": (osa.value_and_grad, osa.exact_adam(rate)),
    }
    runs, steps = {"osa.sparse_adam": ours}, min(COMPARED_STEPS, args.steps)
    for name, other in others.items():
        batches = source.train(known, np.random.default_rng(2))
        runs[name] = train(name, *other, params, batches, steps, held_out)
        if interrupted.is_set():
            os._exit(130)

    def show(what, cells):
        print(f"{what:34}" + "".join(f"{cell:>16}" for cell in cells))

    print()
    show("", runs)
    times = [1e3 * np.median(run.seconds) for run in runs.values()]
    show("time of a step, median", [f"{time:.2f} ms" for time in times])
    for steps in ours.held_out:
        found = [run.held_out.get(steps) for run in runs.values()]
        losses = ["-" if loss is None else f"{loss:.3f}" for loss in found]
        show(f"held-out loss after {steps:,} steps", losses)
    print("Adam moves all rows in each step, and learns more by it than sparse_adam.")
    groups = np.concatenate([np.array(ids)[:, None], rows[:, :4]], axis=1)
    draw(args.plot, runs, words, tables["center"], groups)
    print(f"\nlosses and a map of the words: {args.plot}")


if __name__ == "__main__":
    main()
