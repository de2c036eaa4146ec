"""Link prediction with published figures: ComplEx, DistMult and TransE.

    python examples/knowledge_graph.py

A knowledge graph is a set of triples such as (person100, term10, person80). Each entity
and each relation gets a vector, trained so that the true end of a triple scores above
others. Two ways to train, on two graphs that the wheel of PyKEEN carries (`wheels.py`):

- *negatives*: the true end against entities drawn at random, as a large graph needs it.
  PyKEEN publishes a benchmark of it (Ali et al., 2020, https://arxiv.org/abs/2006.13365).
- *1-N*: all entities are scored, each by its own label (Dettmers et al., 2018,
  https://arxiv.org/abs/1707.01476). The settings are those of a table of Dice
  embeddings (https://github.com/dice-group/dice-embeddings), with a layer norm (Ba et
  al., 2016, https://arxiv.org/abs/1607.06450) of heads and of relations.

ComplEx (Trouillon et al., 2016, https://arxiv.org/abs/1606.06357) has complex vectors:
here, as everywhere with this library, *one real table of twice the columns*. TransE
(Bordes et al., 2013) wants entities of length 1: rows are normalised where they are
looked up, which is a part of the loss. Relations have inverses (Lacroix et al., 2018,
https://arxiv.org/abs/1806.07297), so that heads are predicted as tails are.

Dense Adam and `osa.exact_adam` train in turns, and `osa.sparse_adam`; the table has
them beside what is published. `--data FOLDER` takes another graph, as train.txt,
valid.txt and test.txt: WN18RR (40,943 entities) is the smallest public one where a step
that touches few rows is faster.
"""

import os
import signal

# Ctrl-C ends the program at once: JAX may crash when it is torn down amid its work. See
# word2vec.py. There is nothing to save.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from tqdm import tqdm

    import optax_sparse_adam as osa
except ImportError as error:
    needs = f"knowledge_graph.py needs {error.name}, which is not installed"
    sys.exit(f'{needs}; run pip install ".[examples]"')

import ranking
from wheels import read_lines

PYKEEN, DICE = "PyKEEN", "Dice embeddings"


class Cell(NamedTuple):
    """A training of a published table."""

    data: str
    model: str
    way: str  # "negatives" or "1-N"
    published: dict[str, float]
    source: str = PYKEEN
    columns: int = 128
    rate: float = 1e-2
    epochs: int = 60
    batch: int = 256
    chooses: bool = True  # the epoch by validation; else the last one
    n3: float = 0.0  # cubes of the batch's rows, Lacroix et al.
    inverses: bool = True  # a relation's inverse has a vector of its own
    norm: bool = False  # a layer norm of heads and of relations

    def __str__(self):
        return f"{self.data}, {self.model}, {self.way}"


# PyKEEN's are the best of a search over settings, TransE's that of two losses (0.8517
# by the other). Ours: a softmax, the rate that was tried first, and for TransE the
# better of two scales. The settings of Dice embeddings are those of their
# command: binary cross entropies, and layer norms.
DICE_SETTINGS = {"source": DICE, "columns": 32, "rate": 0.1, "epochs": 256}
DICE_SETTINGS |= {"batch": 1024, "chooses": False, "norm": True}
CELLS = [
    Cell("kinships", "ComplEx", "negatives", {"hits@10": 0.9777}),
    Cell("kinships", "DistMult", "negatives", {"hits@10": 0.8627}, inverses=False),
    Cell("kinships", "TransE", "negatives", {"hits@10": 0.8776}),
    *(
        Cell(data, model, "1-N", published, **DICE_SETTINGS)
        for data, model, published in [
            ("kinships", "DistMult", {"mrr": 0.640, "hits@1": 0.497, "hits@10": 0.939}),
            ("kinships", "ComplEx", {"mrr": 0.762, "hits@1": 0.646, "hits@10": 0.973}),
            ("umls", "DistMult", {"mrr": 0.739}),
            ("umls", "ComplEx", {"mrr": 0.749}),
        ]
    ),
]
# WN18RR and others of `--data`: a place to begin, no search was made.
LARGE = Cell("", "ComplEx", "negatives", {}, columns=200, rate=2e-2, epochs=30)
LARGE = LARGE._replace(batch=512, n3=1e-3)
LARGE_NEGATIVES = 2048

# name: (which gradients, the optimiser of a rate)
OPTIMIZERS = {
    "optax.adam, dense": (False, optax.adam),
    "osa.exact_adam": (None, osa.exact_adam),
    "osa.sparse_adam": (None, osa.sparse_adam),
}


# --- the graph ---


class Graph(NamedTuple):
    """Triples of numbers, each both ways; relation r + R is the inverse of r."""

    entities: list[str]
    relations: list[str]
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    tails: dict[tuple[int, int], np.ndarray]  # all true ends of (head, relation)


def read_graph(data, folder=None):
    """`kinships` or `umls` of the wheel, or the three files of a folder."""
    parts = {}
    for part in ("train", "valid", "test"):
        if Path(data, "train.txt").exists():
            lines = Path(data, f"{part}.txt").read_text(encoding="utf-8").splitlines()
        else:
            path = f"pykeen/datasets/{data}/{part}.txt"
            lines = read_lines("pykeen", path, folder)
        parts[part] = [line.split("\t") for line in lines]
    every = [triple for part in parts.values() for triple in part]
    entities = sorted({x for head, _, tail in every for x in (head, tail)})
    relations = sorted({relation for _, relation, _ in every})
    number = {name: i for i, name in enumerate(entities)}
    kind = {name: i for i, name in enumerate(relations)}
    arrays = {}
    for part, triples in parts.items():
        rows = [(number[h], kind[r], number[t]) for h, r, t in triples]
        one_way = np.array(rows, np.int32).reshape(-1, 3)
        inverse = one_way[:, ::-1] + np.array([0, len(relations), 0], np.int32)
        arrays[part] = np.concatenate([one_way, inverse])
    tails = defaultdict(list)
    for head, relation, tail in np.concatenate([*arrays.values()]).tolist():
        tails[head, relation].append(tail)
    tails = {key: np.unique(found) for key, found in tails.items()}
    return Graph(entities, relations, **arrays, tails=tails)


# --- the models: a query of head and relation, and its scores with entities ---


def times(a, b):
    """The complex product of vectors whose first half is real, whose second imaginary;
    the score of ComplEx is the scalar product of a query and the tail, both as such.
    """
    (a_re, a_im), (b_re, b_im) = jnp.split(a, 2, -1), jnp.split(b, 2, -1)
    return jnp.concatenate([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], -1)


def unit(rows):
    return rows / jnp.sqrt(jnp.sum(rows**2, axis=-1, keepdims=True) + 1e-12)


def product(query, entities):
    return query @ entities.T


def distance(query, entities):
    """Minus the 1-norm; TransE's relation is a translation of unit vectors."""
    return -SCALE * jnp.sum(jnp.abs(query[:, None] - unit(entities)), axis=-1)


MODELS = {
    "ComplEx": (times, product),
    "DistMult": (jnp.multiply, product),
    "TransE": (lambda head, relation: unit(head) + relation, distance),
}
SCALE = 4.0  # of TransE's distances, which unit vectors bound


def relation_of(params, relation):
    """Rows of relations; where the table has none for inverses, they share rows."""
    return params["relation"][relation % len(params["relation"])]


def init_params(graph, cell, rng):
    """Normal numbers of Glorot's variance."""
    columns = cell.columns

    def normal(rows):
        scale = np.sqrt(2 / (rows + columns))
        return jnp.array(scale * rng.normal(size=(rows, columns)), jnp.float32)

    relations = (1 + cell.inverses) * len(graph.relations)
    params = {"entity": normal(len(graph.entities)), "relation": normal(relations)}
    if cell.norm:
        one = {"scale": jnp.ones(columns), "shift": jnp.zeros(columns)}
        params |= {"head norm": one, "relation norm": jax.tree.map(jnp.copy, one)}
    return params


def make_query(cell):
    """A function of heads and relations: what is scored with entities."""
    to_query, _ = MODELS[cell.model]

    def norm(rows, by):
        return jax.nn.standardize(rows, epsilon=1e-5) * by["scale"] + by["shift"]

    def query_of(params, head, relation):
        heads, relations = params["entity"][head], relation_of(params, relation)
        if cell.norm:
            heads = norm(heads, params["head norm"])
            relations = norm(relations, params["relation norm"])
        return to_query(heads, relations)

    return query_of


def make_loss(cell):
    """The loss of a cell; every row of a table that it reads, it looks up."""
    query_of, (_, score) = make_query(cell), MODELS[cell.model]

    def of_negatives(params, triples, others):
        """The surprise of the true end among others, by a softmax of their scores."""
        head, relation, tail = triples.T
        query, ends = query_of(params, head, relation), params["entity"][tail]
        true = jax.vmap(lambda q, end: score(q[None], end[None])[0, 0])(query, ends)
        false = score(query, params["entity"][others])
        every = jnp.concatenate([true[:, None], false], axis=1)
        loss = jnp.mean(jax.nn.logsumexp(every, axis=1) - true)
        if cell.n3:
            rows = params["entity"][head], relation_of(params, relation), ends
            sizes = [jnp.hypot(*jnp.split(x, 2, -1)) ** 3 for x in rows]
            loss += cell.n3 * sum(jnp.sum(x) for x in sizes) / len(head)
        return loss

    def of_all(params, head, relation, labels):
        """1-N: each entity is an end of (head, relation), or is not."""
        every = params["entity"][jnp.arange(labels.shape[1])]
        scores = score(query_of(params, head, relation), every)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, labels))

    return of_negatives if cell.way == "negatives" else of_all


def epoch_of(cell, graph, rng):
    """The batches of an epoch; the last one, if shorter, is left out of it."""
    if cell.way == "negatives":
        triples = rng.permutation(graph.train)
        large = len(graph.entities) > 10 * cell.batch
        size = LARGE_NEGATIVES if large else len(graph.entities)
        for i in range(0, len(triples) - cell.batch + 1, cell.batch):
            others = rng.integers(len(graph.entities), size=size, dtype=np.int32)
            yield triples[i : i + cell.batch], others
        return
    # Pairs (head, relation) of the training, and which ends they have in it.
    pairs, of_pair = np.unique(graph.train[:, :2], axis=0, return_inverse=True)
    labels = np.zeros((len(pairs), len(graph.entities)), np.float32)
    labels[of_pair.reshape(-1), graph.train[:, 2]] = 1
    order = rng.permutation(len(pairs))
    size = min(cell.batch, len(order))
    for i in range(0, len(order) - size + 1, size):
        chosen = order[i : i + size]
        yield *pairs[chosen].T, labels[chosen]


# --- training ---


def make_scores(cell):
    query_of, (_, score) = make_query(cell), MODELS[cell.model]

    @jax.jit
    def scores(params, head, relation):
        return score(query_of(params, head, relation), params["entity"])

    return scores


def measure(scores, params, graph, triples):
    """Filtered ranking of both ends: MRR, hits@1, hits@10."""
    found = []
    for i in range(0, len(triples), 256):
        part = triples[i : i + 256]
        padded = np.resize(part, (256, 3))  # one shape, one compilation
        every = np.asarray(scores(params, *padded[:, :2].T))[: len(part)]
        others = [
            graph.tails[h, r][graph.tails[h, r] != t] for h, r, t in part.tolist()
        ]
        found.append(ranking.ranks(every, part[:, 2], others))
    return ranking.of_ranks(np.concatenate(found))


class Trained(NamedTuple):
    test: dict[str, float]
    curve: list[tuple[float, float]]  # seconds of steps, MRR by validation
    steps: int
    losses: np.ndarray


def train(name, cell, graph, seed, bar=None):
    """Trains a cell by one optimiser; measures the best epoch, or the last one."""
    sparse, optimizer = OPTIMIZERS[name]
    tx, rng = optimizer(cell.rate), np.random.default_rng(seed)
    params = init_params(graph, cell, rng)
    state, scores = tx.init(params), make_scores(cell)
    step = osa.make_train_step(make_loss(cell), tx, sparse=sparse)
    best, curve, losses, clock, steps = None, [], [], 0.0, 0
    every = max(1, cell.epochs // 12) if cell.chooses else cell.epochs
    for epoch in range(1, cell.epochs + 1):
        batches, values = list(epoch_of(cell, graph, rng)), []
        if epoch == 1:  # compiled before the clock runs
            step(*jax.tree.map(jnp.copy, (params, state)), *batches[0])
        began = time.perf_counter()
        for batch in batches:
            params, state, value = step(params, state, *batch)
            values.append(value)
        jax.block_until_ready(params)
        clock, steps = clock + time.perf_counter() - began, steps + len(batches)
        losses.append(float(np.mean(values)))
        if bar is not None:
            bar.update()
        if epoch % every == 0:
            # Rows up to date, of any optimiser; only exact_adam has stale ones.
            now = osa.evaluate(lambda p: jax.tree.map(jnp.copy, p), read=state)(params)
            mrr = measure(scores, now, graph, graph.valid)["mrr"]
            curve.append((clock, mrr))
            if best is None or mrr >= best[0] or not cell.chooses:
                best = mrr, now
    test = measure(scores, best[1], graph, graph.test)
    return Trained(test, curve, steps, np.array(losses))


NAMES = ["mrr", "hits@1", "hits@10"]


def report(cell, results):
    """A cell's rows of the table: what is published, and ours over the seeds."""
    told = "".join(f"{cell.published.get(x, np.nan):10.4f}" for x in NAMES)
    if cell.published:
        yield f"{cell.source:20}{told.replace('nan', '  -')}"
    for name, found in results.items():
        values = np.array([[x.test[y] for y in NAMES] for x in found])
        numbers = "".join(f"{x:10.4f}" for x in values.mean(axis=0))
        each = 1e3 * np.mean([x.curve[-1][0] / x.steps for x in found])
        yield f"{name:20}{numbers}{each:12.2f}{found[0].steps:9,}"
        if len(found) > 1:
            spread = values.std(axis=0, ddof=1)
            yield f"{'  over seeds, +-':20}" + "".join(f"{x:10.4f}" for x in spread)


def main():
    parser = argparse.ArgumentParser(description="Link prediction, as it is published.")
    add = parser.add_argument
    add(
        "--data", help="a folder with train.txt, valid.txt and test.txt: a larger graph"
    )
    add("--only", default="", help="cells with these words, such as ComplEx or umls")
    add("--seeds", type=int, default=1, help="default: 1")
    add("--epochs", type=int, help="in place of a cell's own")
    add("--folder", help="of the wheel; default: the user's cache, or a download")
    add("--plot", default="knowledge_graph.png", help="default: knowledge_graph.png")
    args = parser.parse_args()
    cells = [cell for cell in CELLS if args.only in str(cell)]
    if args.data:
        if not Path(args.data, "train.txt").is_file():
            parser.error(f"--data must be a folder with train.txt, got {args.data}")
        cells = [LARGE._replace(data=args.data)]
    if not cells or args.seeds < 1 or (args.epochs or 1) < 1:
        parser.error("--only must name a cell, and --seeds and --epochs be at least 1")
    if args.epochs:
        cells = [cell._replace(epochs=args.epochs) for cell in cells]
    lines, curves, told = {}, {}, []
    if not sys.stderr.isatty():
        lines = {"mininterval": 10}
    for cell in cells:
        graph = read_graph(cell.data, args.folder)
        results = defaultdict(list)
        for seed in range(args.seeds):
            for name in OPTIMIZERS:
                label = f"{cell}, {name}"
                with tqdm(
                    desc=label, total=cell.epochs, unit=" epochs", **lines
                ) as bar:
                    results[name].append(train(name, cell, graph, seed, bar))
        curves = curves or {name: found[0].curve for name, found in results.items()}
        exact, dense = (
            results[x][0].losses for x in ("osa.exact_adam", next(iter(OPTIMIZERS)))
        )
        apart = np.max(np.abs(exact - dense) / np.abs(dense))
        told += [
            "",
            f"{cell}: {len(graph.entities):,} entities, {len(graph.train):,} "
            "triples to train with, both ways",
        ]
        told += report(cell, results)
        told += [f"losses of exact_adam and of dense Adam: {apart:.0e} apart"]
    heads = "".join(f"{x:>10}" for x in NAMES)
    print(f"\n{'test, filtered':20}{heads}{'ms a step':>12}{'steps':>9}")
    print("\n".join(told))
    ranking.draw(args.plot, curves, "MRR of validation")
    print(f"\nMRR by looks and by time, of the first cell: {args.plot}")


if __name__ == "__main__":
    main()
