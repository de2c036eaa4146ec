"""A learner that never ends: keys come and go, the table does not grow.

    python examples/online_learner.py

A stream of examples, each of a few keys (64-bit hashes) and a label, such as a click. A
few keys are in most examples, by Zipf's law, but which ones, changes all the time; one
key in fifty is there once and never again. So there are ever more keys. The table has
rows for a tenth of them, and an `osa.Vocabulary` says which keys have them.

The program trains in a process of its own, in which a second thread serves: it looks
keys up while others come and go. It is killed, and goes on from its last checkpoint as
if nothing had been. Then two other learners read the same stream: one that evicts by
hits, which is a bad score where keys drift, and one with rows for all keys. A picture
compares them.
"""

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from matplotlib.figure import Figure
    from tqdm import tqdm

    import optax_sparse_adam as osa
except ImportError as error:
    install = 'pip install ".[examples]"'
    sys.exit(f"online_learner.py needs {error.name}, which is not installed; {install}")

tqdm.set_lock(threading.RLock())  # its own would be lost with a process that is killed
# Not on a terminal: lines of progress now and then.
LINES = {"mininterval": 10, "bar_format": "{l_bar}{bar:10}{r_bar}\n"}
QUIET = {} if sys.stderr.isatty() else LINES

EXAMPLES, KEYS, DIM = 1024, 4, 8  # examples in a batch, keys in each, numbers in a row
PLACES = 20_000  # keys that are in use at a time
LIFE = 1200  # for how many steps a place has one key, before another one takes it
ONCE = 0.02  # the part of the keys that never comes back
SAVE = 100  # steps from one checkpoint to the next


# --- the stream ---


def mix(x):
    """Random bits of numbers, the same for the same (splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(bits):
    return (bits >> np.uint64(11)) / 2.0**53


def batch(step):
    """Keys `[EXAMPLES, KEYS]` and labels; the step says all."""
    rng = np.random.default_rng(step)
    places = (float(PLACES) ** rng.random((EXAMPLES, KEYS))).astype(np.uint64)
    begins = mix(places) % np.uint64(LIFE)  # not all places change at once
    keys = mix(
        places + (begins + np.uint64(step)) // np.uint64(LIFE) * np.uint64(2**32)
    )
    once = rng.random(keys.shape) < ONCE
    keys[once] = rng.integers(2**64, size=once.sum(), dtype=np.uint64)
    worth = 4 * unit(mix(keys + np.uint64(1))) - 2  # what is to be learned
    odds = 1 / (1 + np.exp(-worth.sum(axis=1)))
    return keys, (rng.random(EXAMPLES) < odds).astype(np.float32)


# --- the learner ---


def loss(params, rows, labels):
    logits = params["table"][rows].sum(axis=1) @ params["w"]
    return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)


TX = osa.rowwise_adagrad(0.3)
STEP = osa.make_train_step(loss, TX)


@jax.jit(donate_argnums=(0, 1))
def begin(params, state, rows):
    """Rows of new keys begin with zeros, and without anything of the keys before."""
    zeros = jnp.zeros((len(rows), DIM))
    ids, values = {"table": rows, "w": None}, {"table": zeros, "w": None}
    return osa.reset_rows(TX, params, state, ids, values)


class Learner:
    """A table, its optimiser, and the keys that have its rows."""

    def __init__(self, rows, score="last"):
        self.vocab = osa.Vocabulary(rows, score=score)
        self.params = {"table": jnp.zeros((rows, DIM)), "w": jnp.ones(DIM) / DIM}
        self.state = TX.init(self.params)
        self.history = []  # of each step: loss before it, known keys, evicted ones

    def train(self, step):
        keys, labels = batch(step)
        known = np.mean(self.vocab.find(keys) != self.vocab.unknown)
        rows, fresh, evicted = self.vocab.assign(keys, step)
        both = begin(self.params, self.state, fresh.padded(256))
        self.params, self.state, value = STEP(*both, rows, labels)
        self.history.append((float(value), known, len(evicted)))

    def save(self, path):
        """Writes all that is needed to go on into one file, at once or not at all."""
        leaves = jax.tree.leaves((self.params, self.state))
        names = {f"leaf{i}": np.asarray(x) for i, x in enumerate(leaves)}
        temporary = path.with_suffix(".new.npz")
        np.savez(temporary, history=self.history, **names, **self.vocab.arrays)
        temporary.replace(path)

    def load(self, path):
        with np.load(path) as file:
            leaves, of = jax.tree.flatten((self.params, self.state))
            leaves = [jnp.array(file[f"leaf{i}"]) for i in range(len(leaves))]
            self.params, self.state = jax.tree.unflatten(of, leaves)
            self.vocab.restore({name: file[name] for name in self.vocab.arrays})
            self.history = [tuple(x) for x in file["history"]]

    def serve(self, done, served):
        """What a server does, in a thread: looks keys up, again and again."""
        while not done.is_set():
            keys, _ = batch(len(self.history))
            rows = self.vocab.find(keys)
            served.append(np.mean(rows != self.vocab.unknown))
            time.sleep(0.05)


def run(folder, rows, steps):
    """Trains from the last checkpoint on, if there is one; a process of its own."""
    learner, path = Learner(rows), Path(folder, "learner.npz")
    if path.exists():
        learner.load(path)
    first, done, served = len(learner.history), threading.Event(), []
    server = threading.Thread(target=learner.serve, args=(done, served))
    server.start()
    try:
        for step in tqdm(range(first, steps), "least recent goes", steps, **QUIET):
            learner.train(step)
            Path(folder, "at").write_text(f"{first} {step + 1}")
            if (step + 1) % SAVE == 0 or step + 1 == steps:
                learner.save(path)
    finally:
        done.set()
        server.join()
    found = np.mean(served) if served else 0
    print(f"served meanwhile: {len(served)} times, {found:.1%} of the keys known")


def run_and_kill(folder, rows, steps):
    """Trains in a process that is killed on its way, and in another one."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=run, args=(folder, rows, steps))
    process.start()
    at, wanted = Path(folder, "at"), steps * 55 // 100 + SAVE // 2
    while process.is_alive() and step_of(at) < wanted:
        time.sleep(0.02)
    process.kill()
    process.join()
    killed = step_of(at)
    process = spawn.Process(target=run, args=(folder, rows, steps))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit("online_learner.py: the second process has failed")
    first = at.read_text().split()[0]
    print(f"killed after {killed} steps; went on from the checkpoint at {first}")


def step_of(at):
    try:
        return int(at.read_text().split()[1])
    except (FileNotFoundError, IndexError):  # not there yet, or not yet written
        return 0


# --- the comparison ---


def draw(histories, path):
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, history in histories.items():
        size = max(1, len(history) // 40)
        parts = np.array(history[: len(history) // size * size])
        means = parts.reshape(-1, size, 3).mean(axis=1)
        steps = size * (0.5 + np.arange(len(means)))
        style = ":" if name.startswith("all") else "-"  # it hides another one
        left.plot(steps, means[:, 0], style, label=name)
        right.plot(steps, 100 * means[:, 1], style, label=name)
    left.set(xlabel="steps", ylabel="loss of a batch, before its step")
    right.set(xlabel="steps", ylabel="keys that have a row, %")
    left.legend()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=int, default=4000, help="default: 4000")
    add("--rows", type=int, help="of the table (default: a tenth of the keys)")
    add("--folder", type=Path, help="of the checkpoint (default: a new one, removed)")
    args = parser.parse_args()
    if args.steps < 2 * SAVE:
        parser.error(f"--steps must be at least {2 * SAVE}")
    every = [np.unique(batch(step)[0]) for step in range(args.steps)]
    number = len(np.unique(np.concatenate(every)))
    rows = args.rows or number // 10
    print(f"{number:,} keys in {args.steps:,} steps; {rows:,} rows")

    learners = {"all keys have rows": Learner(number + 1)}
    learners["least frequent goes"] = Learner(rows, "hits")
    histories = {}
    with tempfile.TemporaryDirectory() as new:
        folder = args.folder or Path(new)
        folder.mkdir(parents=True, exist_ok=True)
        run_and_kill(folder, rows, args.steps)
        with np.load(folder / "learner.npz") as file:
            histories["least recent goes"] = file["history"].tolist()
    for name, learner in learners.items():
        for step in tqdm(range(args.steps), name, **QUIET):
            learner.train(step)
        histories[name] = learner.history

    half = args.steps // 2  # when all tables are full
    print("in the second half:      loss   keys with a row   evicted in a step")
    for name, history in histories.items():
        value, known, evicted = np.mean(history[half:], axis=0)
        print(f"{name:20} {value:8.4f} {known:17.1%} {evicted:19.1f}")
    draw(histories, "online_learner.png")
    print("drawn: online_learner.png")


if __name__ == "__main__":
    main()
