"""Packages that go together: link prediction on the dependencies of Debian's packages.

    python examples/packages.py

reads the package index that apt keeps on each Debian or Ubuntu machine: 63,000 packages
and 340,000 edges such as (gimp, Suggests, ghostscript). A few packages are in very many
edges (libc6 in 21,000), as in all real graphs. Each package gets a vector, trained to
tell the true end of an edge from random packages: ComplEx, of Trouillon et al. (2016,
https://arxiv.org/abs/1606.06357), with an inverse of each relation, of Lacroix et al.
(2018, https://arxiv.org/abs/1806.07297).

Four optimisers train for the same time. A dense step moves every row of the table, the
others only those that a batch has read: so they take many more steps. (`exact_adam` is
dense Adam: it moves a row when it is next read to where dense steps would have moved it
by then.) They are compared after equal steps and after equal time by how well they rank
the true ends of edges that were held out, and the best one says which packages go
together.
"""

import os
import signal

# Ctrl-C ends the program at once: JAX may crash when it is torn down amid its work. See
# word2vec.py. There is nothing to save.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import bz2
import gzip
import lzma
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

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
    sys.exit(f"packages.py needs {error.name}, which is not installed; run {install}")

DIM = 64  # complex numbers in the vector of a package
BATCH = 512  # edges in a step
NEGATIVES = 256  # random packages that each edge of a batch is told from
HELD_OUT = 1000  # edges
APT = Path("/var/lib/apt/lists")
RELATIONS = ["Depends", "Pre-Depends", "Recommends", "Suggests", "Enhances"]
SHOWN = ["git", "nginx", "gimp", "vlc", "cups", "postgresql", "python3-numpy", "r-base"]
SHOWN += ["libreoffice-calc", "gnome-shell", "openssh-server", "texlive-latex-base"]

# name: (gradients of tables, the optimiser). To compare another one, add a line.
# Of three rates each, a factor of three apart, these were the best.
DENSE, SPARSE = False, True
OPTIMIZERS = {
    "optax.adam, dense": (DENSE, optax.adam(1e-2)),
    "osa.exact_adam": (SPARSE, osa.exact_adam(1e-2)),
    "osa.sparse_adam": (SPARSE, osa.sparse_adam(1e-2)),
    "osa.rowwise_adagrad": (SPARSE, osa.rowwise_adagrad(3e-1)),
}


# --- the graph ---


def read_index(path):
    """The text of a package index, compressed or not."""
    if path.suffix == ".lz4":  # as apt may keep it; Python cannot read that
        helper, lz4 = "/usr/lib/apt/apt-helper", shutil.which("lz4")
        command = [helper, "cat-file"] if Path(helper).exists() else [lz4, "-dc"]
        if command[0] is None:
            sys.exit(f"packages.py: {path} needs lz4; run apt-get install lz4")
        return subprocess.check_output([*command, path]).decode()
    opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    with opener.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        return file.read()


def read_edges(text):
    """Edges such as ("gimp", "Suggests", "ghostscript") of an index."""
    field = re.compile(rf"^(Package|{'|'.join(RELATIONS)}): (.*(?:\n .*)*)", re.M)
    for stanza in text.split("\n\n"):
        fields = dict(field.findall(stanza))
        head = fields.pop("Package", None)
        for relation, others in fields.items():
            # a (>= 1.0), b:any [amd64] | c: the names alone, alternatives as well
            for name in re.findall(r"(?:^|[,|])\s*([^\s,|:(\[]+)", others):
                yield head, relation, name


def make_graph(edges):
    """Names, most frequent first, and edges `[n, 3]`: head, relation and tail."""
    edges = sorted(set(edges))
    degree = defaultdict(int)
    for head, _, tail in edges:
        degree[head] += 1
        degree[tail] += 1
    names = sorted(degree, key=lambda name: (-degree[name], name))
    index = {name: i for i, name in enumerate(names)}
    rows = [(index[h], RELATIONS.index(r), index[t]) for h, r, t in edges]
    return names, np.array(rows, np.int32).reshape(-1, 3)


def both_ways(edges):
    """Each edge, and the inverse one: by it the head is predicted from the tail."""
    inverse = edges[:, ::-1] + np.array([0, len(RELATIONS), 0], np.int32)
    return np.concatenate([edges, inverse])


# --- the model ---


def init_params(num_packages, rng):
    """Real parts, then imaginary parts, of each package and each relation."""

    def normal(rows):
        return jnp.array(0.1 * rng.normal(size=(rows, 2 * DIM)), jnp.float32)

    return {"package": normal(num_packages), "relation": normal(2 * len(RELATIONS))}


def times(a, b):
    """The complex product of vectors; the scores of all tails are `times(h, r) @ t`."""
    (a_re, a_im), (b_re, b_im) = jnp.split(a, 2, -1), jnp.split(b, 2, -1)
    return jnp.concatenate([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], -1)


def loss_fn(params, edges, negatives):
    """How surprising the true tails are, among `negatives`, `[NEGATIVES]` packages."""
    head, relation, tail = edges.T
    query = times(params["package"][head], params["relation"][relation])
    true = jnp.sum(query * params["package"][tail], axis=1)
    others = query @ params["package"][negatives].T
    everything = jnp.concatenate([true[:, None], others], axis=1)
    # A sum, as a mean would bring the gradient of a row near to the `eps` of Adam.
    return jnp.sum(jax.nn.logsumexp(everything, axis=1) - true)


def make_step(sparse, optimizer):
    """The same step for all optimisers and gradients; donated: done in place."""

    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, edges, negatives):
        value_and_grad = osa.value_and_grad(loss_fn, sparse=sparse, read=state)
        loss, grads = value_and_grad(params, edges, negatives)
        updates, state = optimizer.update(grads, state, params)
        return osa.apply_updates(params, updates), state, loss

    return step


def draw_batch(edges, num_packages, rng):
    drawn = edges[rng.integers(len(edges), size=BATCH)]
    return drawn, rng.integers(num_packages, size=NEGATIVES, dtype=np.int32)


# --- how good it is ---


class Ranking:
    """The ranks of the true tails of edges, among all packages."""

    def __init__(self, edges, known):
        self.edges = edges
        # Other true tails of the same head and relation do not count ("filtered").
        tails = defaultdict(list)
        for head, relation, tail in known.tolist():
            tails[head, relation].append(tail)
        self.known = [np.array(tails[h, r]) for h, r, _ in edges.tolist()]

    def ranks(self, scores_of):
        """`scores_of(heads, relations)` are the scores `[len(heads), num_packages]`."""
        found = []
        for start in range(0, len(self.edges), 250):
            head, relation, tail = self.edges[start : start + 250].T
            for row, i, known in zip(
                scores_of(head, relation), tail, self.known[start:], strict=False
            ):
                better = np.sum(row > row[i]) - np.sum(row[known] > row[i])
                ties = np.sum(row == row[i]) - np.sum(row[known] == row[i])
                found.append(1 + better + ties / 2)
        return np.array(found)

    def of(self, params):
        """Mean reciprocal rank, and the share of ranks up to 10 (hits@10)."""
        package, relation = (np.asarray(params[x]) for x in ("package", "relation"))
        ranks = self.ranks(
            lambda h, r: np.asarray(times(package[h], relation[r])) @ package.T
        )
        return np.mean(1 / ranks), np.mean(ranks <= 10)


def train(name, start, edges, ranking, seconds, rank_after):
    """Trains for some seconds: params, and (steps, seconds, MRR, hits@10) on the way.

    The clock counts steps only, and not the time that compiling and ranking take.
    """
    sparse, optimizer = OPTIMIZERS[name]
    params = jax.tree.map(jnp.copy, start)
    num_packages, rng = len(params["package"]), np.random.default_rng(1)
    state, batch = optimizer.init(params), draw_batch(edges, num_packages, rng)
    step = make_step(sparse, optimizer).lower(params, state, *batch).compile()
    rank_at = [seconds * share for share in (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)]
    clock, number, history = 0.0, 0, []
    look = "{l_bar}{bar:10}| {n:.0f}/{total:.0f} s{postfix}"
    unit = {"unit": "s", "bar_format": look}
    if not sys.stderr.isatty():  # lines of progress now and then
        unit |= {"mininterval": 10, "bar_format": look + "\n"}
    with tqdm(total=seconds, desc=f"{name:20}", **unit) as bar:
        while rank_at:
            batch = draw_batch(edges, num_packages, rng)
            began = time.perf_counter()
            params, state, _ = jax.block_until_ready(step(params, state, *batch))
            taken = time.perf_counter() - began
            clock, number = clock + taken, number + 1
            bar.update(min(taken, seconds - bar.n))
            if clock >= rank_at[0] or number == rank_after:
                rank_at = [moment for moment in rank_at if moment > clock]
                now, _ = osa.flush(params, state)  # rows of `exact_adam`, up to date
                history.append((number, clock, *ranking.of(now)))
                bar.set_postfix_str(f"{number:,} steps, MRR {history[-1][2]:.3f}")
    return now, history


def nearest(vectors, ids, num=5):
    """The rows nearest to some rows by cosine, `[len(ids), num]`."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit[ids] @ unit.T
    cosines[np.arange(len(ids)), ids] = -1
    return np.argsort(-cosines, axis=1)[:, :num]


def draw(path, histories):
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    axes = figure.subplots(1, 2, sharey=True)
    for name, history in histories.items():
        steps, seconds, mrr, _ = zip(*history, strict=True)
        axes[0].plot(steps, mrr, "o-", label=name)
        axes[1].plot(seconds, mrr, "o-", label=name)
    axes[0].set(xscale="log", xlabel="steps", ylabel="MRR on held-out edges")
    axes[1].set(xlabel="seconds of steps")
    axes[1].legend()
    figure.savefig(path, format="png")


def main():
    parser = argparse.ArgumentParser(description="Learns which packages go together.")
    add = parser.add_argument
    add("--index", type=Path, nargs="+", help="Packages files; default: those of apt")
    add("--seconds", type=float, default=25, help="for each optimiser; default: 25")
    add("--plot", default="packages.png", help="default: packages.png")
    args = parser.parse_args()
    files = args.index or sorted(APT.glob("*_Packages*"))
    if missing := [path for path in files if not path.is_file()]:
        parser.error(f"--index must be a file that exists, got {missing[0]}")
    if not files:
        sys.exit(
            f"packages.py: there is no package index in {APT}. On Debian and Ubuntu "
            "run apt-get update; elsewhere pass --index FILE, a file such as "
            "dists/stable/main/binary-amd64/Packages.xz of a mirror"
        )
    names, edges = make_graph(e for path in files for e in read_edges(read_index(path)))
    if len(edges) < 100:
        sys.exit(f"packages.py: an index of at least 100 edges, got {len(edges)}")
    count, touched = np.sum(edges[:, [0, 2]] == 0), 2 * BATCH + NEGATIVES
    print(f"{len(names):,} packages, {len(edges):,} edges, {names[0]} in {count:,}")
    print(f"a step: at most {touched:,} of {len(names):,} rows x {2 * DIM} float32")

    rng = np.random.default_rng(0)
    edges = rng.permutation(edges)
    num_held_out = min(HELD_OUT, len(edges) // 10)
    known = both_ways(edges[num_held_out:])
    ranking = Ranking(both_ways(edges[:num_held_out]), both_ways(edges))
    # To compare with: the tails that a relation has most often, whatever the head.
    often = np.zeros((2 * len(RELATIONS), len(names)))
    np.add.at(often, (known[:, 1], known[:, 2]), 1)
    ranks = ranking.ranks(lambda head, relation: often[relation])
    guess = f"{np.mean(1 / ranks):8.3f}{np.mean(ranks <= 10):9.3f}"

    start = init_params(len(names), rng)
    histories, trained, num_steps = {}, {}, None
    for name in OPTIMIZERS:
        done = train(name, start, known, ranking, args.seconds, num_steps)
        trained[name], histories[name] = done
        num_steps = num_steps or histories[name][-1][0]  # those of the first, dense one

    print(f"\n{num_held_out:,} held-out edges, both ends ranked among all packages:")
    print(f"{'':20}{'steps':>8}{'seconds':>9}{'ms a step':>11}{'MRR':>8}{'hits@10':>9}")
    print(f"{'the most frequent':48}{guess}")
    for title, chosen in (("equal steps", num_steps), ("equal time", None)):
        print(f"after {title}:")
        for name, history in histories.items():
            rows = [row for row in history if chosen in (None, row[0])]
            for steps, seconds, mrr, hits in rows[-1:]:  # none if it was the slower one
                each = f"{1e3 * seconds / steps:11.2f}"
                print(f"{name:20}{steps:8,}{seconds:9.1f}{each}{mrr:8.3f}{hits:9.3f}")

    best = max(trained, key=lambda name: histories[name][-1][2])
    index = {name: i for i, name in enumerate(names)}
    shown = ([name for name in SHOWN if name in index] or names)[:12]
    near = nearest(np.asarray(trained[best]["package"]), [index[x] for x in shown])
    print(f"\npackages that go together ({best}):")
    for name, row in zip(shown, near, strict=True):
        print(f"  {name:20}" + ", ".join(names[i] for i in row))
    draw(args.plot, histories)
    print(f"\nMRR by steps and by time: {args.plot}")


if __name__ == "__main__":
    main()
