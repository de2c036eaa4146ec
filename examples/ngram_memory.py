"""A language model with a memory of two million rows, trained at the cost of the batch.

    python examples/ngram_memory.py

A small Flax transformer reads the source files of Python's standard library byte by
byte. Beside it stands a table: the last two, three, ... six bytes at each position are
hashed to rows, and what is there helps to guess the next byte. Such memories make a
model know more without making it think longer: of two million rows a step reads 5,120.
But `jax.grad` and `optax.adamw` read and write all of them, and two moments of each.

Here the gradient of the table is row-sparse, and each part has its own optimiser, by
`optax.partition`: the table `osa.rowwise_adagrad`, which keeps one number a row, the
rest AdamW. Printed are the loss with and without the memory, and what a step costs.

    python examples/ngram_memory.py --optimizer exact_adamw

trains the table by `osa.exact_adamw` instead: the whole model then has the losses of
dense AdamW, at a seventh of its time.

    python examples/ngram_memory.py --host

keeps the table in the host's memory, for devices that do not hold it, and with `--file`
in a file (`optax_sparse_adam.host_tables`). Model, loss and optimiser are the same.
"""

import os
import signal

# Ctrl-C ends the program at once: JAX may crash when it is torn down amid its work. See
# word2vec.py. There is nothing to save.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import sys
import sysconfig
import time
from pathlib import Path

try:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from matplotlib.figure import Figure
    from tqdm import tqdm

    import optax_sparse_adam as osa
    from optax_sparse_adam import host_tables
except ImportError as error:
    install = 'pip install ".[examples]"'
    sys.exit(
        f"ngram_memory.py needs {error.name}, which is not installed; run {install}"
    )

# Not on a terminal: lines of progress now and then.
LINES = {"mininterval": 10, "bar_format": "{l_bar}{bar:10}{r_bar}\n"}
QUIET = {} if sys.stderr.isatty() else LINES

LENGTH, BATCH = 64, 16  # bytes in an example, examples in a step
WIDTH, LAYERS, HEADS = 128, 2, 4  # of the transformer
ORDERS = (2, 3, 4, 5, 6)  # lengths of the n-grams
MEMORY_WIDTH = 32
LEARNING_RATE, MEMORY_RATE = 2e-3, 0.1


# --- the text ---


def read_text():
    """The standard library's source: bytes to train on, and bytes held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    skipped |= {"encodings", "lib2to3", "pydoc_data"}  # tables
    files = sorted(root.rglob("*.py"))
    files = [p for p in files if not skipped & {*p.relative_to(root).parts}]
    parts = [
        b"".join(p.read_bytes() for p in group)
        for group in ([p for i, p in enumerate(files) if i % 20], files[::20])
    ]
    return [np.frombuffer(part, np.uint8).astype(np.int32) for part in parts]


def draw(text, rng, size=BATCH):
    """Examples `[size, LENGTH + 1]`: each byte is to be told from those before it."""
    start = rng.integers(len(text) - LENGTH, size=(size, 1))
    return text[start + np.arange(LENGTH + 1)]


# --- the model: ordinary Flax ---


def ngram_rows(tokens, num_rows):
    """Rows of the memory, `[batch, length, len(ORDERS)]`, for `[batch, length]` bytes.

    The n-grams that end at a position are hashed (FNV-1a, and a last mixing). Some will
    share a row: the fewer, the more rows there are.
    """
    rows, hashed = [], jnp.full(tokens.shape, 2166136261, jnp.uint32)
    for n in range(1, max(ORDERS) + 1):
        before = jnp.pad(tokens, ((0, 0), (n - 1, 0)))[:, : tokens.shape[1]]
        hashed = (hashed ^ (before + 1).astype(jnp.uint32)) * jnp.uint32(16777619)
        if n in ORDERS:
            mixed = (hashed ^ (hashed >> 15)) * jnp.uint32(2246822519)
            rows.append((mixed ^ (mixed >> 13)) % jnp.uint32(num_rows))
    return jnp.stack(rows, axis=-1).astype(jnp.int32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden)


class LanguageModel(nn.Module):
    memory_rows: int  # 0: without a memory

    @nn.compact
    def __call__(self, tokens):  # [batch, length] to logits [batch, length, 256]
        x = nn.Embed(256, WIDTH)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        if self.memory_rows:
            # An ordinary Flax layer: whether its gradient is row-sparse is up to who
            # takes the gradient.
            zeros = nn.initializers.zeros
            memory = nn.Embed(
                self.memory_rows, MEMORY_WIDTH, embedding_init=zeros, name="memory"
            )
            found = memory(ngram_rows(tokens, self.memory_rows))
            x = x + nn.Dense(WIDTH)(found.reshape(*tokens.shape, -1))
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


def make_loss(model):
    def loss_fn(params, examples):
        """Bits that a byte takes."""
        logits = model.apply({"params": params}, examples[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, examples[:, 1:]
        )
        return jnp.mean(losses) / jnp.log(2.0)

    return loss_fn


# --- training ---


OPTIMIZERS = {  # of the memory, by the schedule of all other parameters
    "rowwise_adagrad": lambda rate: osa.rowwise_adagrad(MEMORY_RATE),
    "exact_adamw": osa.exact_adamw,
}


def is_memory(path, _):
    """Whose gradient is row-sparse; that of all else is for optax's AdamW.

    Without `sparse=` that of the table of 256 bytes would be row-sparse, too.
    """
    return path[0].key == "memory"


def optimizer_of_parts(params, rate, memory):
    """AdamW for the transformer, one of `OPTIMIZERS` for the memory."""
    parts = {"rows": OPTIMIZERS[memory](rate), "dense": optax.adamw(rate)}
    labels = {name: "rows" if name == "memory" else "dense" for name in params}
    return optax.partition(parts, labels)


class Trainer:
    """A model in training; with a row-sparse gradient of the memory, or without."""

    def __init__(self, model, make_optimizer, batch, row_sparse=True):
        loss_fn = make_loss(model)
        self.params = jax.jit(model.init)(jax.random.key(0), batch[:, :-1])["params"]
        optimizer = make_optimizer(self.params)
        self.state = jax.jit(optimizer.init)(self.params)
        # Gradient, update and addition, compiled and donated: not donated, each step
        # would copy the memory and its moments.
        sparse = is_memory if row_sparse else False
        step = osa.make_train_step(loss_fn, optimizer, sparse=sparse)
        self.step = step.lower(self.params, self.state, batch).compile()

        # In exact Adam rows that no batch reads go on moving: `read` tells where they
        # are by now.
        @jax.jit
        def loss(params, state, batch):
            return osa.evaluate(loss_fn, read=state)(params, batch)

        self.loss = loss
        self.seconds, self.losses, self.history = [], [], []

    def train(self, name, text, held_out, num_steps):
        rng, compare = np.random.default_rng(0), max(1, num_steps // 8)
        steps = range(1, num_steps + 1)
        for number in tqdm(steps, f"{name:26}", unit="step", **QUIET):
            batch = draw(text, rng)
            start = time.perf_counter()
            done = jax.block_until_ready(self.step(self.params, self.state, batch))
            self.seconds.append(time.perf_counter() - start)
            self.params, self.state, loss = done
            self.losses.append(float(loss))
            if number % compare == 0:
                now = self.params, self.state
                loss = np.mean([self.loss(*now, x) for x in held_out])
                self.history.append((number, float(loss)))
        return self

    def megabytes(self):
        """What parameters and state take, and what a step needs besides."""
        memory = self.step.memory_analysis()
        return memory.argument_size_in_bytes / 1e6, memory.temp_size_in_bytes / 1e6


class HostTrainer(Trainer):
    """The same with the memory on the host: no array of its size is on the device."""

    def __init__(self, model, make_optimizer, batch, file=None):
        def new():
            return model.init(jax.random.key(0), batch[:, :-1])["params"]

        memory = jax.eval_shape(new)["memory"]["embedding"]
        # XLA drops what is not returned. A new table is zeros, as that of the model.
        params = jax.jit(lambda: {k: x for k, x in new().items() if k != "memory"})()
        table = host_tables.HostTable(memory.shape, memory.dtype, file=file)
        params["memory"] = {"embedding": table}
        loss_fn, optimizer = make_loss(model), make_optimizer(params)
        trainer = host_tables.HostTrainer(loss_fn, optimizer, params, sparse=is_memory)
        evaluate = trainer.evaluate(loss_fn)
        self.trainer, self.params, self.state = trainer, None, None
        self.step = lambda params, state, batch: (None, None, trainer.step(batch))
        self.loss = lambda params, state, batch: evaluate(batch)
        self.seconds, self.losses, self.history = [], [], []

    def megabytes(self):
        """What the device has of parameters and state; the rest is not counted."""
        rows = self.trainer.params["memory"]["embedding"].shape[:1]
        leaves = jax.tree.leaves((self.trainer.params, self.trainer.state))
        held = sum(x.nbytes for x in leaves if x.shape[:1] != rows)
        return held / 1e6, float("nan")


def picture(path, trainers, costs):
    figure = Figure(figsize=(11, 3.8), layout="constrained", dpi=120)
    losses, times, sizes = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    colors = ["C7", "C0", "C3"]
    for name, color in zip(list(trainers)[:2], colors, strict=False):
        points = zip(*trainers[name].history, strict=True)
        losses.plot(*points, "o-", color=color, label=name)
    losses.set(xlabel="steps", ylabel="bits per byte, held-out text")
    losses.legend()
    milliseconds, held, besides = zip(*costs.values(), strict=True)
    together = np.array(held) + np.nan_to_num(besides)
    for axes, values in ((times, milliseconds), (sizes, together)):
        bars = axes.barh(list(costs), values, color=colors)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=2)
        axes.set(xlim=(0, 1.3 * max(values)))
        axes.invert_yaxis()
    times.set(title="ms a step")
    sizes.set(title="MB in a step", yticks=[])
    figure.savefig(path, format="png")


def main():
    parser = argparse.ArgumentParser(description="Trains a model with a large memory.")
    add = parser.add_argument
    add("--steps", type=int, default=400, help="for each model; default: 400")
    add("--rows", type=int, default=2_000_000, help="of the memory; default: 2,000,000")
    add("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad")
    add("--host", action="store_true", help="keep the memory on the host")
    add("--file", help="keep it in this new file")
    add("--dense-steps", type=int, default=10, help="of dense AdamW; default: 10")
    add("--plot", default="ngram_memory.png", help="default: ngram_memory.png")
    args = parser.parse_args()
    least = min(args.steps, args.dense_steps)
    if least < 1 or args.rows < 1:
        parser.error(f"at least 1 step and 1 row, got {least} and {args.rows}")
    text, other = read_text()
    held_out = [draw(other, np.random.default_rng(i), 64) for i in range(2)]
    print(f"text: {len(text) / 1e6:.1f} million bytes, held out {len(other) / 1e6:.1f}")
    megabytes, lookups = (
        args.rows * MEMORY_WIDTH * 4 / 1e6,
        BATCH * LENGTH * len(ORDERS),
    )
    print(f"memory: {args.rows:,} rows x {MEMORY_WIDTH} float32, {megabytes:,.0f} MB")
    print(f"a step: {BATCH} x {LENGTH} bytes, {lookups:,} lookups in the memory")

    rate = optax.cosine_decay_schedule(LEARNING_RATE, args.steps)
    plain, with_memory = LanguageModel(memory_rows=0), LanguageModel(args.rows)

    def parts(params):
        return optimizer_of_parts(params, rate, args.optimizer)

    def adamw(params):
        return optax.adamw(rate)

    first = held_out[0][:BATCH]
    makers = {
        "without memory": lambda: Trainer(plain, adamw, first, row_sparse=False),
        "with memory": lambda: (
            HostTrainer(with_memory, parts, first, args.file)
            if args.host or args.file
            else Trainer(with_memory, parts, first)
        ),
        "dense AdamW": lambda: Trainer(with_memory, adamw, first, row_sparse=False),
    }
    lengths = dict.fromkeys(makers, args.steps)
    lengths["dense AdamW"] = min(args.dense_steps, args.steps)
    trainers = {}
    for name, make in makers.items():
        trainers[name] = make().train(name, text, held_out, lengths[name])
        del trainers[name].params, trainers[name].state  # room for the next one

    costs = {
        name: (1e3 * np.median(trainer.seconds), *trainer.megabytes())
        for name, trainer in trainers.items()
    }
    print(
        f"\n{'':16}{'ms a step':>9}  {'MB held':>8}  {'MB besides':>10}  bits per byte"
    )
    for name, (milliseconds, held, besides) in costs.items():
        steps, loss = trainers[name].history[-1]
        print(
            f"{name:16}{milliseconds:9.1f}  {held:8,.0f}  {besides:10,.0f}  "
            f"{loss:.3f} after {steps:,} steps"
        )
    last = lengths["dense AdamW"]
    losses = ", ".join(f"{x} {trainers[x].losses[last - 1]:.4f}" for x in lengths)
    print(f"\ntraining loss in step {last}: {losses}")
    picture(args.plot, trainers, costs)
    print(f"\nloss, time and memory: {args.plot}")


if __name__ == "__main__":
    main()
