"""A recommender with published figures: BPR on MovieLens 100k.

    python examples/recommender.py

Each user and each film gets a vector, trained to score the films that the user has
rated above films drawn at random: Bayesian personalized ranking, Rendle et al. (2009,
https://arxiv.org/abs/1205.2618). Data, split, sizes, loss, rate, batches and early
stopping are those of RecBole (https://recbole.io), which publishes what comes out;
`PUBLISHED` are its figures. Four optimisers train in turns, and the last table has
theirs beside RecBole's.

Then users come while the model is in use: a tenth of them was left out, and is added in
the middle of a training, to a table that grows for them, by `osa.reset_rows`; those who
were there keep their vectors and their moments.

The data come in the wheel of recbole, which is downloaded once (`wheels.py` says under
which terms). All of it takes about a minute on two cores.
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
from typing import NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from tqdm import tqdm

    import optax_sparse_adam as osa
except ImportError as error:
    install = 'pip install ".[examples]"'
    sys.exit(
        f"recommender.py needs {error.name}, which is not installed; run {install}"
    )

import ranking
from wheels import read_lines

# RecBole's settings: recbole/properties/overall.yaml and model/BPR.yaml of 1.2.1.
DIM, BATCH, RATE, MAX_EPOCHS, PATIENCE = 64, 2048, 1e-3, 300, 10
PUBLISHED = {
    "RecBole, its guide": (0.2523, 0.4855, 0.2920, 0.7953, 0.1962),
    "RecBole, its README": (0.2368, 0.4519, 0.2768, 0.7614, 0.1901),
}

# name: (which gradients, the optimiser). Adam at RecBole's rate; row-wise Adagrad has
# no published rate: of 0.03, 0.1 and 0.3 the best by validation.
OPTIMIZERS = {
    "optax.adam, dense": (False, optax.adam(RATE)),
    "osa.exact_adam": (None, osa.exact_adam(RATE)),
    "osa.sparse_adam": (None, osa.sparse_adam(RATE)),
    "osa.rowwise_adagrad": (None, osa.rowwise_adagrad(0.1)),
}


# --- the data ---


class Data(NamedTuple):
    """Who has rated what: pairs to train with, and masks `[users, items]`."""

    pairs: np.ndarray  # [n, 2] int32: user, item
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def read_pairs(folder=None):
    """Users and items of MovieLens 100k, numbered from 0, `[100000, 2]`."""
    path = "recbole/dataset_example/ml-100k/ml-100k.inter"
    lines = [line.split("\t")[:2] for line in read_lines("recbole", path, folder)[1:]]
    columns = np.array(lines).T
    return np.stack([np.unique(x, return_inverse=True)[1] for x in columns], 1)


def split(pairs, seed):
    """Of each user 80, 10 and 10 %, at random; the latter two are rounded down.

    That rounding is RecBole's (`Dataset._calcu_split_ids`). Rounded up, the tests would
    have half an item more on average: recall 2 % lower, precision 5 % higher.
    """
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(pairs)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    users, first, number = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    place = np.arange(len(pairs)) - np.repeat(first, number)
    tenth = np.repeat(number // 10, number)
    left = np.repeat(number, number) - place  # of the same user, this one included
    part = np.where(left <= tenth, 2, np.where(left <= 2 * tenth, 1, 0))
    masks = np.zeros((3, len(users), pairs[:, 1].max() + 1), bool)
    masks[part, pairs[:, 0], pairs[:, 1]] = True
    return Data(pairs[part == 0].astype(np.int32), *masks)


def epoch_of(data, rng):
    """Batches `[BATCH, 3]`: user, a rated item, one that the user has not rated."""
    pairs = rng.permutation(data.pairs)
    others = rng.integers(data.train.shape[1], size=len(pairs), dtype=np.int32)
    while np.any(again := data.train[pairs[:, 0], others]):
        others[again] = rng.integers(data.train.shape[1], size=again.sum())
    triples = np.concatenate([pairs, others[:, None]], axis=1)
    return [triples[i : i + BATCH] for i in range(0, len(triples), BATCH)]


# --- the model ---


def init_params(num_users, num_items, rng):
    """Normal numbers of Glorot's variance, as RecBole's `xavier_normal_`."""

    def normal(rows):
        scale = np.sqrt(2 / (rows + DIM))
        return jnp.array(scale * rng.normal(size=(rows, DIM)), jnp.float32)

    return {"user": normal(num_users), "item": normal(num_items)}


def loss_fn(params, batch):
    user, item, other = batch.T
    ahead = params["item"][item] - params["item"][other]
    margin = jnp.sum(params["user"][user] * ahead, axis=1)
    return -jnp.mean(jax.nn.log_sigmoid(margin))


def measure(params, known, right):
    """The five measures of all users, among the items that they have not had."""
    scores = np.asarray(params["user"]) @ np.asarray(params["item"]).T
    return ranking.of_lists(ranking.top_items(scores, known), right)


class Trained(NamedTuple):
    test: dict[str, float]  # measures of the best epoch
    curve: list[tuple[float, float]]  # seconds of steps, MRR by validation
    steps: int
    losses: np.ndarray  # of each epoch


def up_to_date(params, state):
    """All rows as they are now; of `exact_adam`, which leaves rows stale, too."""
    return osa.evaluate(lambda p: jax.tree.map(jnp.copy, p), read=state)(params)


def train(name, data, seed, epochs=MAX_EPOCHS, bar=None):
    """Trains until the MRR of validation has not risen for `PATIENCE` epochs."""
    sparse, tx = OPTIMIZERS[name]
    rng = np.random.default_rng(seed)
    params = init_params(*data.train.shape, rng)
    state, step = tx.init(params), osa.make_train_step(loss_fn, tx, sparse=sparse)
    known, best, curve, losses, clock, steps = (
        data.train | data.valid,
        None,
        [],
        [],
        0,
        0,
    )
    for epoch in range(epochs):
        batches = epoch_of(data, rng)
        if not epoch:  # both lengths of a batch are compiled before the clock runs
            for batch in batches[:: max(1, len(batches) - 1)]:
                step(*jax.tree.map(jnp.copy, (params, state)), batch)
        began, values = time.perf_counter(), []
        for batch in batches:
            params, state, value = step(params, state, batch)
            values.append(value)
        jax.block_until_ready(params)
        clock, steps = clock + time.perf_counter() - began, steps + len(batches)
        losses.append(float(np.mean(values)))
        now = up_to_date(params, state)
        mrr = measure(now, data.train, data.valid)["mrr"]
        curve.append((clock, mrr))
        if best is None or mrr >= best[0]:
            best = mrr, epoch, measure(now, known, data.test)
        if bar is not None:
            bar.update()
            bar.set_postfix_str(f"epoch {epoch}, MRR {mrr:.3f}", refresh=False)
        if epoch - best[1] > PATIENCE:
            break
    return Trained(best[2], curve, steps, np.array(losses))


# --- users who come later ---


def grow(tx, params, state, rows):
    """The table of users with these rows below the others, whose state stays."""
    number = len(params["user"])
    old = {"user": np.arange(number), "item": None}
    taken = osa.take_rows(tx, params, state, old)
    larger = params | {"user": jnp.concatenate([params["user"], rows])}
    params, state = osa.put_rows(tx, larger, tx.init(larger), old, *taken)
    new = {"user": np.arange(number, number + len(rows)), "item": None}
    return osa.reset_rows(tx, params, state, new, {"user": rows, "item": None})


def add_users(data, seed, epochs, bar=None):
    """NDCG of the first users and of those who come after half of the epochs.

    Newcomers begin as the average of all users: what is recommended to them is what
    most users like. A list of (when, NDCG of the first ones, NDCG of the newcomers).
    """
    rng, tx = np.random.default_rng(seed), osa.exact_adam(RATE)
    num_users, num_items = data.train.shape
    first = num_users - num_users // 10
    params = init_params(first, num_items, rng)
    state, step = tx.init(params), osa.make_train_step(loss_fn, tx)
    known, rows = data.train | data.valid, []

    def look(when, params, state):
        now = up_to_date(params, state)
        parts = [slice(0, first), slice(first, len(now["user"]))]
        ndcg = [
            measure(now | {"user": now["user"][x]}, known[x], data.test[x])["ndcg"]
            for x in parts
        ]
        rows.append((when, *ndcg))

    before = data._replace(pairs=data.pairs[data.pairs[:, 0] < first])
    for epoch in range(epochs):
        if epoch == epochs // 2:
            mean = jnp.mean(up_to_date(params, state)["user"], axis=0)
            newcomers = jnp.broadcast_to(mean, (num_users - first, DIM))
            params, state = grow(tx, params, state, newcomers)
            before = data
            look("as they come", params, state)
        for batch in epoch_of(before, rng):
            params, state, _ = step(params, state, batch)
        if bar is not None:
            bar.update()
        if epoch in (epochs // 2 + 4, epochs - 1):
            look(f"{epoch + 1 - epochs // 2} epochs later", params, state)
    return rows


# --- the table ---


def row(title, values, text=""):
    return f"{title:22}" + "".join(f"{x:11.4f}" for x in values) + text


def main():
    parser = argparse.ArgumentParser(description="BPR on MovieLens 100k.")
    add = parser.add_argument
    add("--seeds", type=int, default=1, help="splits and trainings; default: 1")
    add("--epochs", type=int, default=MAX_EPOCHS, help="at most; default: 300")
    add("--folder", help="of the wheel; default: the user's cache, or a download")
    add("--plot", default="recommender.png", help="default: recommender.png")
    args = parser.parse_args()
    if args.seeds < 1 or args.epochs < 2:
        parser.error("--seeds must be at least 1, and --epochs at least 2")
    pairs = read_pairs(args.folder)
    users, items = pairs.max(axis=0) + 1
    print(f"{len(pairs):,} ratings of {items:,} films by {users} users")

    results, curves, losses = {}, {}, {}
    lines = {} if sys.stderr.isatty() else {"mininterval": 10}
    for seed in range(2020, 2020 + args.seeds):
        data = split(pairs, seed)
        for name in OPTIMIZERS:
            with tqdm(desc=f"{name:20}", unit=" epochs", **lines) as bar:
                done = train(name, data, seed, args.epochs, bar)
            results.setdefault(name, []).append(done)
            curves.setdefault(name, done.curve)
            losses[name, seed] = done.losses
    names = ["recall", "mrr", "ndcg", "hit", "precision"]
    print(f"\n{'test, at 10':22}" + "".join(f"{x:>11}" for x in names), end="")
    print(f"{'ms a step':>12}{'epochs':>8}")
    for title, values in PUBLISHED.items():
        print(row(title, values))
    for name, found in results.items():
        table = np.array([[x.test[y] for y in names] for x in found])
        milliseconds = np.mean([1e3 * x.curve[-1][0] / x.steps for x in found])
        epochs = np.mean([len(x.curve) for x in found])
        print(row(name, table.mean(axis=0), f"{milliseconds:12.2f}{epochs:8.0f}"))
        if args.seeds > 1:
            print(row("  over seeds, +-", table.std(axis=0, ddof=1)))
    ours, dense = losses["osa.exact_adam", 2020], losses["optax.adam, dense", 2020]
    both = min(len(ours), len(dense))
    apart = np.max(np.abs(ours[:both] - dense[:both]))
    print(f"\nlosses of exact_adam and of dense Adam, {both} epochs: {apart:.0e} apart")

    epochs = min(40, args.epochs)
    with tqdm(desc="users come later", total=epochs, unit=" epochs", **lines) as bar:
        table = add_users(split(pairs, 2020), 2020, epochs, bar)
    print(f"\n{'NDCG@10':22}{'first users':>14}{'newcomers':>14}")
    for when, first, newcomers in table:
        print(f"{when:22}{first:14.4f}{newcomers:14.4f}")
    ranking.draw(args.plot, curves, "MRR@10 of validation")
    print(f"\nMRR by looks and by time: {args.plot}")


if __name__ == "__main__":
    main()
