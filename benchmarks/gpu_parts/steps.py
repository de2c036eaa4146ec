"""Programs of a step or an update, by XLA and by the kernel, compiled and timed."""

import functools
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contestants import RATE, update_step
from problem import DRAWS, NUM_BATCHES, in_short

import optax_sparse_adam as osa
from gpu_parts import DENSE, KERNEL, TORCH
from gpu_parts.run import compile_all

ROUNDS = 3
OPTIMIZERS = {
    "sparse_adam": lambda: osa.sparse_adam(RATE),
    "rowwise_adagrad": lambda: osa.rowwise_adagrad(RATE),
    "exact_adam": lambda: osa.exact_adam(RATE),
    "exact_adamw": lambda: osa.exact_adamw(RATE, weight_decay=1e-4),
    "lazy(adamw)": lambda: osa.lazy(optax.adamw(RATE)),
    "rowwise_adam": lambda: osa.rowwise_adam(RATE),
    "sparse_adafactor": lambda: osa.sparse_adafactor(RATE),
    "per_row(adam)": lambda: osa.lazy(osa.per_row(optax.adam(RATE))),
    "lazy(adagrad)": lambda: osa.lazy(optax.adagrad(RATE)),
    "lazy(amsgrad)": lambda: osa.lazy(optax.amsgrad(RATE)),
    "lazy(lion)": lambda: osa.lazy(optax.lion(RATE)),
    "lazy(rmsprop)": lambda: osa.lazy(optax.rmsprop(RATE)),
    "lazy(sgd, momentum)": lambda: osa.lazy(optax.sgd(RATE, momentum=0.9)),
    "lazy(clip, adamw)": lambda: osa.lazy(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE))
    ),
    DENSE: lambda: optax.adam(RATE),
}


class Size(NamedTuple):
    """Of a table and a batch; `bag` is the ids of a bag, or 0 for rows."""

    rows: int
    dim: int
    ids: int
    bag: int = 0

    def __str__(self):
        bags = f" in bags of {self.bag}" if self.bag else ""
        return f"{in_short(self.rows)} x {self.dim}, {self.ids:,} ids{bags}"


class Case(NamedTuple):
    """What is timed; `phase` is "step" or "update", `path` is XLA or KERNEL."""

    name: str
    phase: str
    size: Size
    path: str

    def what(self):
        names = {"phase": self.phase, "name": self.name, "path": self.path}
        return names | self.size._asdict()


def loss_of(bag):
    def loss(params, ids):
        table = params["table"]
        rows = osa.embedding_bag(table, ids) if bag else table[ids]
        return jnp.mean(jax.nn.softplus(rows @ params["w"]))

    return loss


def shapes(tx, phase, size):
    """Parameters, state, and what a call takes besides, of an update and of a step."""
    like = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    params, last = like((size.rows, size.dim)), [like((size.ids, size.dim))]
    if phase == "step":
        params, last = {"table": params, "w": like((size.dim,))}, []
    ids = (size.ids // size.bag, size.bag) if size.bag else (size.ids,)
    state = jax.eval_shape(tx.init, params)
    return params, state, jax.ShapeDtypeStruct(ids, "int32"), *last


def lower(case):
    tx = OPTIMIZERS[case.name]()
    if case.phase == "update":
        step = jax.jit(update_step(tx), donate_argnums=(0, 1))
    else:
        sparse = False if case.name == DENSE else None
        step = osa.make_train_step(loss_of(case.size.bag), tx, sparse=sparse)
    return step.lower(*shapes(tx, case.phase, case.size))


@functools.lru_cache(maxsize=4)
def batches(draw, rows, ids):
    """As many ids as `problem.py` has batches, and the rows that each touches."""
    draw = DRAWS[draw](np.random.default_rng(0), rows, ids)
    drawn = [draw().astype(np.int32) for _ in range(NUM_BATCHES)]
    return drawn, round(float(np.mean([len(np.unique(x)) for x in drawn])))


def timed(run, call, wait):
    """Milliseconds of a call: of many in a row, in each of some rounds."""
    for _ in range(2):
        call()
    wait()
    began = time.perf_counter()
    call()
    wait()
    once = time.perf_counter() - began
    calls = min(max(int(run.sizes.round_seconds / once), 4), 300)

    def calls_in_a_row():
        for _ in range(calls):
            call()

    # The CPU bounds short calls, which take twice as long in one round as in another.
    rounds = ROUNDS if once > 5e-4 else 4 * ROUNDS
    return timed_rounds(run, calls_in_a_row, wait, calls, rounds)


def timed_rounds(run, work, wait, calls, number=ROUNDS):
    rounds = []
    for _ in range(number):
        began = time.perf_counter()
        work()
        wait()
        rounds.append(round((time.perf_counter() - began) / calls * 1e3, 5))
        run.alive()
    best, median = min(rounds), sorted(rounds)[number // 2]
    return {"best_ms": best, "median_ms": median, "rounds_ms": rounds, "calls": calls}


@jax.jit
def _moved(table):
    return jnp.sum(jnp.abs(table - 1))


class Training:
    """One that trains: `call()` is a step on the next batch."""

    def __init__(self, case, program):
        self.case, self.program = case, program
        rows, dim, ids, _ = self.case.size
        params, self.last = jnp.ones((rows, dim)), []
        if self.case.phase == "step":
            weights = np.random.default_rng(1).standard_normal(dim)
            params = {"table": params, "w": jnp.asarray(weights, jnp.float32)}
        else:
            self.last = [jax.random.normal(jax.random.key(0), (ids, dim))]
        state = OPTIMIZERS[self.case.name]().init(params)
        self.train, self.number = (params, state), 0

    def take(self, draw):
        rows, _, ids, bag = self.case.size
        drawn, self.touched = batches(draw, rows, ids)
        self.ids = [jnp.asarray(x.reshape(-1, bag) if bag else x) for x in drawn]

    def call(self):
        ids = self.ids[self.number % NUM_BATCHES]
        params, state, *self.value = self.program(*self.train, ids, *self.last)
        self.train, self.number = (params, state), self.number + 1

    def wait(self):
        jax.block_until_ready((self.train, self.value))

    def begin(self):
        """Three steps: the seconds of the first, the loss, and how far rows moved."""
        began = time.perf_counter()
        self.call()
        self.wait()
        seconds = round(time.perf_counter() - began, 3)
        for _ in range(2):
            self.call()
        moved = float(_moved(jax.tree.leaves(self.train[0])[0]))
        return {"first_s": seconds, "moved": moved, "loss": [*map(float, self.value)]}

    def least_ms(self, bytes_per_second):
        """Of an update: it reads its entries, and reads and writes touched rows."""
        rows, dim, ids, _ = self.case.size
        leaves = [x for x in jax.tree.leaves(self.train) if x.ndim and len(x) == rows]
        row_bytes = sum(x.nbytes for x in leaves) / rows
        least = ids * (dim + 1) * 4 + 2 * self.touched * row_bytes
        return round(least / bytes_per_second * 1e3, 5)


def measure(run, draws, case, program, calls, seconds):
    """A program on one kind of ids after another, from where it has come to."""
    training = Training(case, program)
    training.take(draws[0])
    static = {
        **case.what(),
        "seconds": seconds,
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "custom_calls": calls,
        **training.begin(),
    }
    for draw in draws:
        run.check_time()
        training.take(draw)
        numbers = {"draw": draw, "touched": training.touched}
        numbers |= timed(run, training.call, training.wait)
        speed, more = run.content.get("copy_bytes_per_s"), ""
        if case.phase == "update" and speed:
            numbers["least_ms"] = training.least_ms(speed)
            more = f", {numbers['best_ms'] / numbers['least_ms']:.2f} of the least"
        if case.path == KERNEL and not any("optax_sparse_adam" in x for x in calls):
            more += ", WITHOUT THE KERNEL"
        say_times(run, case, numbers, more)
        run.record(**static, **numbers)


def say_times(run, case, numbers, more=""):
    draw = "" if numbers["draw"] == "zipf" else f", {numbers['draw']}"
    run.say(
        f"{case.phase:6} {case.size}{draw}: {case.name}, {case.path}: "
        f"{numbers['best_ms']:.4g} ms (median {numbers['median_ms']:.4g}){more}"
    )


def measure_all(run, cases, draws=("zipf",)):
    for case, *made in compile_all(run, cases, lower):
        run.attempt(measure, run, draws, case, *made, **case.what())
    compare(run)


def compare(run):
    """After the same three steps both paths have the same loss, and moved as far."""
    runs = {}
    for x in run.content["records"]:
        if x["part"] == run.part and "moved" in x:
            key = x["phase"], x["name"], x["rows"], x["dim"], x["ids"], x["bag"]
            runs.setdefault(key, {})[x["path"]] = np.array([x["moved"], *x["loss"]])
    for key, of_path in runs.items():
        if len(of_path) == 2:
            plain, kernel = of_path.values()
            size = np.where(plain == kernel, 1, np.abs(plain))  # both may be 0
            difference = float(np.max(np.abs(kernel - plain) / size))
            words = "" if difference < 1e-3 else "  DIFFERS"
            run.say(f"{key}: kernel and XLA differ by {difference:.1e}{words}")
            run.record(compared=list(key), difference=difference)


class TorchTraining:
    """`torch.optim.SparseAdam` on the same device, and Adam for what is no table."""

    def __init__(self, torch, phase, size):
        self.torch, self.phase, self.size, self.number = torch, phase, size, 0
        self.is_cuda = jax.default_backend() == "gpu"
        if self.is_cuda and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        self.place = place = "cuda" if self.is_cuda else "cpu"
        make = torch.nn.EmbeddingBag if size.bag else torch.nn.Embedding
        options = {"mode": "sum"} if size.bag else {}
        self.module = make(size.rows, size.dim, sparse=True, device=place, **options)
        self.weights = torch.ones(size.dim, device=place, requires_grad=True)
        sparse = torch.optim.SparseAdam(self.module.parameters(), lr=RATE)
        self.optimizers = [sparse]
        if phase == "update":
            self.values = torch.randn(size.ids, size.dim, device=place)
        else:
            self.optimizers += [torch.optim.Adam([self.weights], lr=RATE)]

    def take(self, draw):
        bag = self.size.bag
        drawn, self.touched = batches(draw, self.size.rows, self.size.ids)
        ids = [x.astype(np.int64).reshape(-1, bag) if bag else x for x in drawn]
        self.ids = [self.torch.from_numpy(x).to(self.place) for x in ids]

    def call(self):
        ids, torch = self.ids[self.number % NUM_BATCHES], self.torch
        self.number += 1
        if self.phase == "update":
            self.module.weight.grad = torch.sparse_coo_tensor(
                *(ids[None].long(), self.values, self.module.weight.shape),
                check_invariants=False,
            )
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            outputs = self.module(ids) @ self.weights
            torch.nn.functional.softplus(outputs).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def wait(self):
        if self.is_cuda:
            self.torch.cuda.synchronize()


def measure_torch(run, phase, size, draws=("zipf",)):
    case = Case(TORCH, phase, size, TORCH)
    run.attempt(_measure_torch, run, case, draws, **case.what())
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _measure_torch(run, case, draws):
    import torch

    training = TorchTraining(torch, case.phase, case.size)
    for draw in draws:
        run.check_time()
        training.take(draw)
        numbers = {"draw": draw, "touched": training.touched}
        numbers |= timed(run, training.call, training.wait)
        say_times(run, case, numbers)
        run.record(**case.what(), **numbers)
