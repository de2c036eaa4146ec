"""Times `Vocabulary`: its calls, and the training step of docs/keys.md with them.

python benchmarks/keys.py
python benchmarks/keys.py --rows 1000000 --keys 8192 --dim 64
NPROC=1 python benchmarks/keys.py  # one thread for JAX: a core is free beside the step

Calls: milliseconds, the best, the median and the mean, by the package's library and by
NumPy. In the mean are searches for the next rows to go, once in hundreds of calls.
Steps: blocks of steps in turns, whose rows are assigned before the block, right before
each step, or by a thread while the step before runs. Each of the three has a vocabulary
of its own, which sees the same keys: one that is restored searches anew.

Pipeline: the same on a table in host memory, by `HostTrainer.run`, with `assign` in
`prepare` and with rows that were assigned before the block.
"""

import argparse
import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.native import _keys

STEPS, ROUNDS, CALLS, SEARCHES = 60, 16, 200, 1500


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--keys", type=int, default=8_192, help="in a batch")
    parser.add_argument("--dim", type=int, default=64, help="length of a row")
    return parser.parse_args()


class Stream:
    """Keys by Zipf's law that all have a row at first, and new ones."""

    def __init__(self, rows, size):
        self.rng, self.size, self.next = np.random.default_rng(0), size, rows
        self.first = self.rng.permutation(np.arange(1, rows, dtype=np.int64) * 2**20)

    def batch(self, share_of_new, draw):
        count = len(self.first)
        place = count ** self.rng.random(self.size)
        if draw == "uniform":
            place = self.rng.integers(0, count, self.size)
        keys = self.first[place.astype(np.int64)]
        new = round(share_of_new * self.size)
        self.next += new
        at = self.rng.permutation(self.size)[:new]
        keys[at] = (self.next - np.arange(new, dtype=np.int64)) * 2**20
        return keys


def in_ms(function, arguments):
    taken = []
    for argument in arguments:
        start = time.perf_counter()
        function(argument)
        taken.append(1e3 * (time.perf_counter() - start))
    return f"{min(taken):.3f}, {np.median(taken):.3f}, {np.mean(taken):.3f}"


def assigner(vocab):
    steps = itertools.count(1)
    return lambda keys: vocab.assign(keys, next(steps))


def calls(args):
    by_library = _keys._functions
    print("| ms: best, median, mean | library | NumPy |\n|---|---|---|")
    cells = {}
    for functions in (by_library, lambda: None):
        _keys._functions = functions
        stream, vocab = Stream(args.rows, args.keys), osa.Vocabulary(args.rows)
        vocab.assign(stream.first, 0)
        assign = assigner(vocab)
        for name, share, draw in (
            ("all known, Zipf", 0, "zipf"),
            ("all known, uniform", 0, "uniform"),
            ("one in a hundred new, as many evicted", 0.01, "zipf"),
            ("all new, as many evicted", 1, "zipf"),
        ):
            number = SEARCHES if share == 0.01 else CALLS
            batches = [stream.batch(share, draw) for _ in range(number)]
            if not share:
                cells.setdefault(f"`find`: {name}", []).append(
                    in_ms(vocab.find, batches)
                )
            assign(batches[0])
            cells.setdefault(f"`assign`: {name}", []).append(in_ms(assign, batches[1:]))
    _keys._functions = by_library
    for name, both in cells.items():
        print(f"| {name} | {' | '.join(both)} |")


def loss(params, rows, labels):
    logits = params["table"][rows].sum(axis=1) @ params["w"]
    return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)


class Trainer:
    """The step of docs/keys.md."""

    def __init__(self, args):
        self.tx = osa.rowwise_adagrad(0.3)
        params = {"table": jnp.zeros((args.rows, args.dim)), "w": jnp.ones(args.dim)}
        self.held = params, self.tx.init(params)
        self.begin = jax.jit(self._begin, donate_argnums=(0, 1))
        self.step = osa.make_train_step(loss, self.tx)
        self.least = max(64, 1 << int(np.log2(args.keys / 32)))

    def _begin(self, params, state, rows):
        zeros = jnp.zeros((len(rows), params["table"].shape[1]))
        ids, values = {"table": rows, "w": None}, {"table": zeros, "w": None}
        return osa.reset_rows(self.tx, params, state, ids, values)

    def train(self, assigned, labels):
        params, state = self.begin(*self.held, assigned.fresh.padded(self.least))
        *held, value = self.step(params, state, assigned.rows.reshape(-1, 4), labels)
        self.held = tuple(held)
        return value


def steps(args):
    trainer, stream = Trainer(args), Stream(args.rows, args.keys)
    labels = stream.rng.integers(0, 2, args.keys // 4).astype(np.float32)
    loader = ThreadPoolExecutor(1)
    ways = ["before the block", "before each step", "by a thread"]
    vocabs = {way: osa.Vocabulary(args.rows) for way in ways}
    for vocab in vocabs.values():
        vocab.assign(stream.first, 0)
    taken = {way: [] for way in ways}
    for turn in range(-1, ROUNDS):
        number = 1 + (turn + 1) * STEPS
        batches = [(stream.batch(0.01, "zipf"), number + i) for i in range(STEPS)]
        assigned = [vocabs[ways[0]].assign(*batch) for batch in batches]
        for way in ways[:: -1 if turn % 2 else 1]:
            assign = vocabs[way].assign
            jax.block_until_ready(trainer.held)
            start = time.perf_counter()
            if way == "before the block":
                for result in assigned:
                    value = trainer.train(result, labels)
            elif way == "before each step":
                for batch in batches:
                    value = trainer.train(assign(*batch), labels)
            else:
                ahead = loader.submit(assign, *batches[0])
                for batch in [*batches[1:], None]:
                    result = ahead.result()
                    ahead = batch and loader.submit(assign, *batch)
                    value = trainer.train(result, labels)
            jax.block_until_ready(value)
            if turn >= 0:
                taken[way].append(1e3 * (time.perf_counter() - start) / STEPS)
    show("`assign`", taken)


def pipeline(args):
    """`HostTrainer.run`, whose batches have keys, or rows that were assigned before."""
    stream, ways = Stream(args.rows, args.keys), ["before the block", "in `prepare`"]
    labels = stream.rng.integers(0, 2, args.keys // 4).astype(np.float32)
    vocabs = {way: osa.Vocabulary(args.rows) for way in ways}

    def prepared(vocab, step, keys):
        rows, fresh, _ = vocab.assign(keys, step)
        zeros = np.zeros((len(fresh), args.dim), np.float32)
        ids, values = {"table": fresh, "w": None}, {"table": zeros, "w": None}
        return host.BatchWithReset((rows.reshape(-1, 4), labels), ids, values)

    def made(vocab, **options):
        vocab.assign(stream.first, 0)
        table = host.HostTable((args.rows, args.dim))
        params = {"table": table, "w": jnp.ones(args.dim)}
        tx = osa.rowwise_adagrad(0.3)
        return host.HostTrainer(loss, tx, params, steps=1, **options)

    keys = vocabs[ways[1]]
    of_keys = functools.partial(prepared, keys)
    trainers = {ways[0]: made(vocabs[ways[0]])}
    trainers[ways[1]] = made(keys, prepare=of_keys, stateful={"keys": keys})
    taken = {way: [] for way in ways}
    for turn in range(-1, ROUNDS):
        number = 1 + (turn + 1) * STEPS
        batches = [stream.batch(0.01, "zipf") for _ in range(STEPS)]
        for way in ways[:: -1 if turn % 2 else 1]:
            given = batches
            if way == ways[0]:
                pairs = enumerate(batches, number)
                given = [prepared(vocabs[way], step, x) for step, x in pairs]
            start = time.perf_counter()
            for _ in trainers[way].run(given):
                pass
            if turn >= 0:
                taken[way].append(1e3 * (time.perf_counter() - start) / STEPS)
    show("`HostTrainer.run`, `assign`", taken)


def show(name, taken):
    print(f"\n| {name} | ms a step | of that without, and its quartiles |")
    print("|---|---|---|")
    without = np.array(next(iter(taken.values())))
    for way, times in taken.items():
        low, middle, high = np.quantile(times / without, [0.25, 0.5, 0.75])
        ms = np.median(times)
        print(f"| {way} | {ms:.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    arguments = parse_args()
    print(f"{arguments.keys:,} keys of {arguments.rows:,} rows x {arguments.dim}\n")
    calls(arguments)
    steps(arguments)
    pipeline(arguments)
