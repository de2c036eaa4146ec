"""Word vectors beside gensim's Word2Vec, which is C: quality, and words a second.

    pip install -e ".[examples]" gensim   # 4.4.0; its wheel has both sets of pairs
    python benchmarks/words.py [--text FOLDER] [--epochs 5]

The same text, dimensions, window, subsampling, negatives and epochs: those of
`examples/word2vec.py`; ours share noise words between pairs. Both take two threads,
each in a process of its own, in turns. The vectors are compared by wordsim353 and
simlex999: Spearman's correlation of the cosines with what people say, on the pairs
whose words are in the text. A word a second is a word of the text, before subsampling,
and the clock holds what a training needs again and again: batches and steps, no
compilation and no vocabulary. A picture of both is drawn as well.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

PAIRS = {
    "wordsim353": "gensim/test/test_data/wordsim353.tsv",
    "simlex999": "gensim/test/test_data/simlex999.txt",
}
BATCH = 4096  # pairs; the example's 512 is half as fast
# Noise words are drawn for so many pairs together, which are told from all of them by
# one product of matrices: a sixth of the lookups. Ji et al., "Parallelizing Word2Vec in
# Shared and Distributed Memory", 2016, https://arxiv.org/abs/1604.04661. The loss keeps
# its expectation.
SHARED, EACH = (128, 32), (1, 5)  # pairs and their noise words; EACH: as published
# name: the optimiser, its rate, that of the example, and the noise; gensim's own
# default is SGD with a rate that falls from 0.025.
OURS = {
    "sparse_adam": ("sparse_adam", 5e-3, SHARED),
    "exact_adam": ("exact_adam", 5e-3, SHARED),
    "5 words each": ("sparse_adam", 5e-3, EACH),
}
THREADS = 2


def by_gensim(pieces, counts, epochs, seed):
    """Vectors, and the seconds of the training."""
    from gensim.models import Word2Vec
    from gensim.models.callbacks import CallbackAny2Vec
    from tqdm import tqdm
    from word2vec import DIM, NEGATIVES, SAMPLE, WINDOW

    sentences = [[str(i) for i in piece] for piece in pieces]
    model = Word2Vec(
        vector_size=DIM,
        window=WINDOW,
        negative=NEGATIVES,
        sample=SAMPLE,
        sg=1,
        min_count=1,
        workers=THREADS,
        seed=seed,
    )
    model.build_vocab(sentences)
    bar = tqdm(desc=f"{'gensim':14}", total=epochs, unit=" epochs", leave=False)

    class Progress(CallbackAny2Vec):
        def on_epoch_end(self, model):
            bar.update()

    options = {"total_examples": len(sentences), "epochs": epochs}
    with bar:
        began = time.perf_counter()
        model.train(sentences, **options, callbacks=[Progress()])
        seconds = time.perf_counter() - began
    return np.stack([model.wv[str(i)] for i in range(len(counts))]), seconds


def by_ours(name, pieces, counts, epochs, seed):
    """Vectors, and the seconds of batches and steps."""
    import jax
    import jax.numpy as jnp
    import word2vec
    from tqdm import tqdm

    import optax_sparse_adam as osa

    optimizer, rate, (together, num_noise) = OURS[name]

    class SharedNoise(word2vec.SkipGrams):
        """Centers and contexts `[BATCH]`, noise `[BATCH // together, num_noise]`."""

        def batch(self, pairs, rng):
            size = len(pairs) // together, num_noise
            return *pairs.T, self.noise[rng.integers(len(self.noise), size=size)]

    def loss(params, centers, contexts, noise):
        rows, apart = params["center"][centers], params["context"][noise]
        true = jnp.sum(rows * params["context"][contexts], axis=1)
        groups = rows.reshape(len(noise), together, -1)
        false = jax.nn.log_sigmoid(-jnp.einsum("gbd,gkd->gbk", groups, apart))
        each = word2vec.NEGATIVES / num_noise  # so many noise words count for a pair
        return -jnp.sum(jax.nn.log_sigmoid(true)) - each * jnp.sum(false)

    word2vec.BATCH = BATCH
    rng = np.random.default_rng(seed)
    grams = SharedNoise(counts)
    params = word2vec.init_params(len(counts), rng)
    tx = getattr(osa, optimizer)(rate)
    step, state = osa.make_train_step(loss, tx), tx.init(params)
    # As many steps as the passes have pairs; the last ones are a sample's.
    sample = pieces[:: max(1, len(pieces) // 50)]
    share = sum(map(len, pieces)) / sum(map(len, sample))
    num_steps = int(epochs * share * len(grams.pairs(sample, rng)) / BATCH)
    batches = grams.train(pieces, rng)
    step(*jax.tree.map(jax.numpy.copy, (params, state)), *next(batches))  # compiles
    began = time.perf_counter()
    batches = itertools.islice(batches, num_steps)
    lines = {"desc": f"{name:14}", "total": num_steps, "unit": " steps"}
    for batch in tqdm(batches, **lines, leave=False, mininterval=1):
        params, state, _ = step(params, state, *batch)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - began
    now = osa.evaluate(lambda p: jax.tree.map(jax.numpy.copy, p), read=state)(params)
    return np.asarray(now["center"]), seconds


def similarity(vectors, number, lines):
    """Spearman's correlation over the pairs whose words occur, and their number."""
    rows, said = [], []
    for line in lines:
        first, second, value = [*line.split("\t"), "", ""][:3]  # or a comment
        if first in number and second in number:
            rows.append((number[first], number[second]))
            said.append(float(value))
    a, b = vectors[np.array(rows).T]
    cosines = np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return np.corrcoef(ranks(cosines), ranks(np.array(said)))[0, 1], len(rows)


def ranks(values):
    """Ranks from 1; equal values have the mean of theirs."""
    _, first, number = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(number) - (number - 1) / 2)[first]


def work(name, text, epochs, seed, file):
    """One contestant, in this process."""
    from word2vec import read_corpus, split

    _, counts, tokens = read_corpus(text)
    train = by_gensim if name == "gensim" else lambda *args: by_ours(name, *args)
    vectors, seconds = train(split(tokens), counts, epochs, seed)
    np.savez(file, vectors=vectors, seconds=seconds)


def main():
    parser = argparse.ArgumentParser(description="Word vectors beside gensim's.")
    add = parser.add_argument
    add("--text", type=Path, help="a file or folder; default: the standard library")
    add("--epochs", type=int, default=5, help="default: 5, gensim's")
    add("--seeds", type=int, default=1, help="default: 1")
    add("--plot", default="words.png", help="default: words.png")
    add("--work", nargs=3, metavar=("NAME", "SEED", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, seed, file = args.work
        return work(name, args.text, args.epochs, int(seed), file)

    import ranking
    from wheels import read_lines
    from word2vec import read_corpus

    words, _, tokens = read_corpus(args.text)
    number = {word: i for i, word in enumerate(words)}
    said = {key: read_lines("gensim", path) for key, path in PAIRS.items()}
    print(f"{len(tokens):,} words of {len(words):,} kinds, {args.epochs} epochs")
    print(f"{'':14}{'seconds':>9}{'words/s':>11}" + "".join(f"{x:>20}" for x in PAIRS))
    found = {title: {} for title in ("words a second", *PAIRS)}  # of each seed
    environment = {"OMP_NUM_THREADS": str(THREADS)}
    for seed, name in itertools.product(range(args.seeds), ["gensim", *OURS]):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "vectors.npz")
            command = [sys.executable, __file__, "--epochs", str(args.epochs)]
            command += ["--text", str(args.text)] if args.text else []
            command += ["--work", name, str(seed), str(file)]
            subprocess.run(command, check=True, env=os.environ | environment)
            with np.load(file) as trained:
                vectors, seconds = trained["vectors"], float(trained["seconds"])
        speed = args.epochs * len(tokens) / seconds
        line = f"{name:14}{seconds:9.1f}{speed:11,.0f}"
        found["words a second"].setdefault(name, []).append(speed)
        for key, lines in said.items():
            value, pairs = similarity(vectors, number, lines)
            line += f"{value:9.3f} ({pairs:4} pairs)"
            found[key].setdefault(name, []).append(value)
        print(line, flush=True)
    means = {
        title: {name: float(np.mean(x)) for name, x in values.items()}
        for title, values in found.items()
    }
    ranking.draw_bars(args.plot, means)
    print(f"\nwords a second and correlations: {args.plot}")


if __name__ == "__main__":
    main()
