"""The kernel for GPUs: whether it agrees with XLA here, and which variant wins.

python benchmarks/gpu_tuning.py          # on an NVIDIA GPU; prints as it goes, 100 s
python benchmarks/gpu_tuning.py small    # the same program at small sizes
"""

import collections
import functools
import glob
import gzip
import json
import os
import sys
import tempfile
import time
import traceback

os.environ["OPTAX_SPARSE_ADAM_GPU_KERNEL"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, os.getcwd())

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam import native
from optax_sparse_adam._rows import with_ops
from optax_sparse_adam._rows.cuda_ops import CudaOps
from optax_sparse_adam._rows.kernel_ops import KernelOps
from optax_sparse_adam.native import _cuda, _library
from optax_sparse_adam.native._cuda_source import Tuning

START = time.time()
LIMIT = float(os.environ.get("LIMIT", 95))
SMALL = "small" in sys.argv
OUT = os.environ.get("OUT", "")
LINES = []


def say(*words):
    line = " ".join(map(str, words))
    LINES.append(line)
    print(f"[{time.time() - START:5.1f}] {line}", flush=True)
    if OUT:
        with open(f"{OUT}/gpu_tuning.txt", "w") as file:
            file.write("\n".join(LINES))


def guarded(function):
    @functools.wraps(function)
    def call(*args, **flags):
        if time.time() - START > LIMIT:
            return None
        try:
            return function(*args, **flags)
        except Exception as error:
            say("FAILED", function.__name__, args[:4], repr(error)[:1500])
            if not getattr(guarded, "told", False):
                guarded.told = True
                say(traceback.format_exc()[-3000:])
            return None

    return call


PLATFORM = "cpu" if jax.default_backend() == "cpu" else "cuda"
if PLATFORM == "cpu":  # to try this program
    from tests.helpers.cuda_on_cpu import CudaOnCpu as CudaOps


def use(tuning=None):
    """The kernel with this tuning; `None`: XLA."""
    with_ops.KERNELS.pop("cuda", None)
    if PLATFORM == "cpu":
        with_ops.KERNELS["cpu"] = KernelOps
    if tuning is not None:
        with_ops.KERNELS[PLATFORM] = type("Tuned", (CudaOps,), {"tuning": tuning})
    jax.clear_caches()
    _cuda._counts.clear()
    _cuda._reasons.clear()


OPTIMIZERS = {
    "sparse_adam": lambda: osa.sparse_adam(1e-2),
    "exact_adam": lambda: osa.exact_adam(1e-2),
    "exact_adamw": lambda: osa.exact_adamw(1e-2, weight_decay=1e-2),
    "rowwise_adagrad": lambda: osa.rowwise_adagrad(1e-2),
    "rowwise_adam": lambda: osa.rowwise_adam(1e-2),
    "lazy(adamw)": lambda: osa.lazy(optax.adamw(1e-2)),
}


def training(tx, width, bags, by_hand, dtype, rows=300, n=4000):
    """A function that trains from the same beginning each time."""

    def loss(params, ids, y):
        if bags:
            x = osa.embedding_bag(params["t"], ids.reshape(-1, 5), mode="mean")
        else:
            x = params["t"][ids]
        x = x.astype(jnp.float32)
        return jnp.mean((jnp.sum(x * params["w"], axis=1) - y[: len(x)]) ** 2)

    def by_parts(params, state, ids, y):
        value, grads = osa.value_and_grad(loss, read=state)(params, ids, y)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state, value

    step = jax.jit(by_parts) if by_hand else osa.make_train_step(loss, tx)

    def run():
        rng = np.random.default_rng(0)
        params = {
            "t": jnp.asarray(rng.standard_normal((rows, width)), dtype),
            "w": jnp.asarray(rng.standard_normal(width), jnp.float32),
        }
        state = tx.init(params)
        for _ in range(3):
            ids = (rows ** rng.random(n)).astype(np.int32) - 1
            ids[rng.random(n) < 0.1] = -1 if bags else 5
            y = jnp.asarray(rng.standard_normal(n), jnp.float32)
            params, state, _ = step(params, state, jnp.asarray(ids), y)
        return params, state

    return run


def difference(a, b):
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating) and x.size:
            x, y = (np.asarray(z.astype(jnp.float32)) for z in (x, y))
            far = np.atleast_1d(np.abs(x - y) / (1 + np.abs(x)))
            far[np.atleast_1d(np.isnan(x) & np.isnan(y))] = 0
            worst = max(worst, float(np.max(np.where(np.isnan(far), np.inf, far))))
    return worst


@guarded
def agrees(name, width, bags, by_hand=False, dtype=jnp.float32):
    tx = OPTIMIZERS[name]()
    use()
    n = 50 if SMALL else 4000
    by_xla = training(tx, width, bags, by_hand, dtype, n=n)()
    use(Tuning())
    run = training(tx, width, bags, by_hand, dtype, n=n)
    by_kernel, again = run(), run()
    pairs = zip(*map(jax.tree.leaves, (by_kernel, again)), strict=True)
    same = all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
    error = difference(by_xla, by_kernel)
    limit = 2e-5 if dtype == jnp.float32 else 1e-2
    say(
        "OK " if error < limit and same else "BAD",
        f"{name} {width} {'bags' if bags else 'rows'} {'hand' if by_hand else 'step'}",
        f"{jnp.dtype(dtype).name} differs by {error:.1e}, repeats {same}",
        dict(_cuda._counts),
        dict(_cuda._reasons),
    )


@guarded
def primitives():
    """Each primitive of the printer beside XLA, both on this device."""
    from tests.native import test_cuda_printer as cases

    cases.CudaOnCpu, wrong = CudaOps, []
    x, y = np.meshgrid(cases.FLOATS, cases.FLOATS)
    integers = np.meshgrid(*[cases.INTEGERS.astype(np.int32)] * 2)
    groups = (
        (cases.UNARY, [jnp.asarray(cases.FLOATS)[None]]),
        (cases.BINARY, [jnp.asarray(x), jnp.asarray(y)]),
        (cases.OF_INTEGERS, list(map(jnp.asarray, integers))),
    )
    for functions, operands in groups:
        found = cases.evaluated(functions, *operands)
        run = jax.jit(lambda *x, fs=functions: {k: f(*x) for k, f in fs.items()})
        for name, right in run(*operands).items():
            try:
                cases.check(name, operands, np.asarray(found[name]), np.asarray(right))
            except AssertionError as error:
                wrong.append(str(error)[:160])
    say(f"primitives that differ from XLA on this device: {len(wrong)}")
    for line in wrong[:12]:
        say("  ", line)


def ids_of(kind, n, rows):
    rng = np.random.default_rng(0)
    ids = (float(rows) ** rng.random(n)).astype(np.int64) - 1
    if kind == "uniform":
        ids = rng.integers(0, rows, n)
    if kind == "half":
        ids[rng.random(n) < 0.5] = 7
    return jnp.asarray(ids.astype(np.int32))


class Update:
    """An update of a table: entries in, table and state out."""

    def __init__(self, name, rows, width, n, repeats=1):
        self.name, self.shape, self.n, self.repeats = name, (rows, width), n, repeats
        self.tx = OPTIMIZERS[name]()
        self.param = jnp.zeros(self.shape)
        self.state = self.tx.init(self.param)
        self.data = jnp.asarray(
            np.random.default_rng(1).standard_normal((n, width)), jnp.float32
        )

    def program(self):
        def step(param, state, data, ids):
            for _ in range(self.repeats):
                grad = BCOO((data, ids[:, None]), shape=self.shape)
                param, state = self.tx.update.add_to_params(grad, state, param)
            return param, state

        return jax.jit(step, donate_argnums=(0, 1))

    def time(self, ids, reps=15, rounds=3):
        step, times = self.program(), []
        reps, rounds = (1, 1) if SMALL else (reps, rounds)
        for i in range(rounds + 1):
            begin = time.perf_counter()
            for _ in range(reps if i else 2):
                self.param, self.state = step(self.param, self.state, self.data, ids)
            jax.block_until_ready(self.param)
            times.append((time.perf_counter() - begin) / reps / self.repeats * 1e3)
        return min(times[1:])

    def profile(self, ids, reps=3):
        """Kernels of a step, by their time on the device."""
        step = self.program()

        def run(n):
            for _ in range(n):
                self.param, self.state = step(self.param, self.state, self.data, ids)
            jax.block_until_ready(self.param)

        run(2)
        return profile_of(lambda: run(reps), reps * self.repeats)


def profile_of(run, steps):
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e["name"] == "thread_name"
    }
    device = {
        e["pid"]
        for e in events
        if e.get("ph") == "M"
        and e["name"] == "process_name"
        and "GPU" in e["args"].get("name", "")
    }
    total, order = 0.0, collections.defaultdict(list)
    for e in sorted(events, key=lambda e: e.get("ts", 0)):
        place = e.get("pid"), e.get("tid")
        if (
            e.get("ph") == "X"
            and place[0] in device
            and "Stream" in names.get(place, "")
        ):
            total += e["dur"]
            order[e["name"][:60]].append(e["dur"])
    lines = []
    for name, durations in sorted(order.items(), key=lambda x: -sum(x[1])):
        each = len(durations) / steps
        part = durations[-max(1, round(each)) :] if "rows_kernel" in name else []
        detail = " ".join(f"{d:.1f}" for d in part)
        lines.append(
            f"   {sum(durations) / steps:8.1f} us {each:4.1f} x {name} {detail}"
        )
    return total / steps, lines


@guarded
def measured(update, tuning, ids, label, **flags):
    use(tuning)
    took = update.time(ids, **flags)
    say(f"{took:7.3f} ms {update.name} {label}", dict(_cuda._reasons) or "")
    return took


@guarded
def profiled(update, tuning, ids, label):
    use(tuning)
    total, lines = update.profile(ids)
    say(f"{total:7.1f} us of kernels: {update.name} {label}")
    for line in lines[:9]:
        say(line)
    return total


def search(update, ids, tuning, choices):
    """The best value of each field in turn."""
    best = measured(update, tuning, ids, "as it is")
    if best is None:
        return tuning
    for field, values in choices:
        own = tuning
        for value in values:
            if value == getattr(own, field):
                continue
            variant = own._replace(**{field: value})
            took = measured(update, variant, ids, f"{field}={value}")
            if took is not None and took < best * 0.997:
                best, tuning = took, variant
    say(f"best {best:.3f} ms: {tuning}")
    return tuning


def large():
    rows, width, n = (10_000_000, 128, 1 << 20) if not SMALL else (300, 16, 64)
    zipf, uniform, half = (ids_of(x, n, rows) for x in ("zipf", "uniform", "half"))
    update = Update("sparse_adam", rows, width, n)
    profiled(update, Tuning(), zipf, "zipf")
    measured(update, None, zipf, "by XLA", reps=5)
    options = [
        ("fetch", [False]),
        ("ahead", [8, 16]),
        (
            "parts",
            [((2**31, 256, 32, 8),), ((2048, 128, 16, 8), (2**31, 1024, 32, 16))],
        ),
        ("options", [("--maxrregcount=64",)]),
        ("large", [32]),
    ]
    best = search(update, zipf, Tuning(), options)
    for ids, label in ((uniform, "uniform"), (half, "half on one row")):
        measured(update, best, ids, label)
        if best != Tuning():
            measured(update, Tuning(), ids, label + ", as it is")
    profiled(update, best, zipf, "zipf, best")
    del update
    few()
    CudaOps.tuning = best._replace(pools=True)
    steps(best._replace(pools=True), ["sparse_adam"], True, ["sparse_adam"])
    CudaOps.tuning = Tuning()
    steps(best, ["sparse_adam", "rowwise_adagrad"], True)
    steps(best, ["sparse_adam", "exact_adam", "lazy(adamw)"], False, ["exact_adam"])
    exact = Update("exact_adam", rows, width, n)
    options = [
        ("options", [("--maxrregcount=64",)]),
    ]
    best_exact = search(exact, zipf, best, options)
    profiled(exact, best_exact, zipf, "zipf, best")


@guarded
def steps(tuning, names, in_bags, shows=()):
    """Steps of `make_train_step`, and the kernels of some."""
    rows, width, n = (10_000_000, 128, 1 << 20) if not SMALL else (300, 16, 64)
    ids = ids_of("zipf", n, rows)
    ids = ids.reshape(-1, 16) if in_bags else ids
    for name in names:
        use(tuning)
        tx = OPTIMIZERS[name]()
        weights = jnp.asarray(
            np.random.default_rng(0).standard_normal(width), jnp.float32
        )
        params = {"t": jnp.ones((rows, width)), "w": weights}

        def loss(params, ids):
            x = params["t"][ids]
            if in_bags:
                x = osa.embedding_bag(params["t"], ids, mode="sum")
            return jnp.mean(jax.nn.softplus(x @ params["w"]))

        step, state = osa.make_train_step(loss, tx), tx.init(params)
        best = float("inf")
        for i in range(2 if SMALL else 4):
            begin = time.perf_counter()
            for _ in range(15 if i and not SMALL else 2):
                params, state, value = step(params, state, ids)
            jax.block_until_ready((params, value))
            if i:
                best = min(best, (time.perf_counter() - begin) / 15 * 1e3)
        kind = "in bags of 16" if in_bags else "of rows"
        say(f"{best:7.3f} ms a step {kind}: {name}", dict(_cuda._reasons) or "")
        if name in shows:
            held = [params, state]

            def run(step=step, held=held):
                for _ in range(3):
                    held[0], held[1], value = step(*held, ids)
                jax.block_until_ready(value)

            total, lines = profile_of(run, 3)
            say(f"{total:7.1f} us of kernels")
            for line in lines[:10]:
                say(line)
            params, state = held
            del held, run
        del params, state, step


@guarded
def sorts():
    """Sorts of few pairs: by counting, by XLA, and padded so that XLA takes CUB."""
    rows = 1_000_000
    for n in (8192, 16384) if not SMALL else (100, 300):
        ids = ids_of("zipf", n, rows)
        ops = CudaOps()

        def by_counting(ids, ops=ops, rows=rows):
            return ops._order(ids, ids >= 0, rows)

        def by_xla(ids):
            places = jnp.arange(len(ids), dtype=jnp.int32)
            return lax.sort((ids, places), num_keys=1)

        def padded(ids, n=n):
            more = jnp.full([24576 - n], 2**31 - 1, jnp.int32)
            return [x[:n] for x in by_xla(jnp.concatenate([ids, more]))]

        for function in (by_counting, by_xla, padded):
            run = jax.jit(function)
            expected = np.argsort(np.asarray(ids), kind="stable")
            right = np.array_equal(np.asarray(run(ids)[1]), expected)
            total, _ = profile_of(
                lambda run=run, ids=ids: [
                    jax.block_until_ready(run(ids)) for _ in range(5)
                ],
                5,
            )
            say(f"{total:7.1f} us sort of {n} {function.__name__}, right {right}")


def few():
    rows, width, n = (1_000_000, 64, 8192) if not SMALL else (300, 64, 64)
    ids = ids_of("zipf", n, rows)
    update = Update("sparse_adam", rows, width, n)
    for label, tuning in {
        "as it is": Tuning(),
        "fetch=False": Tuning(fetch=False),
        "ahead=8": Tuning(ahead=8),
        "small=16": Tuning(small=16),
        "parts of 256": Tuning(parts=((2**31, 256, 32, 8),)),
    }.items():
        profiled(update, tuning, ids, f"8,192 ids of 1M x 64, {label}")


def main():
    device = jax.devices()[0]
    say(
        device.device_kind,
        "jax",
        jax.__version__,
        "compute",
        getattr(device, "compute_capability", "?"),
    )
    begin = time.time()
    if _library.loaded() is None:
        say("library compiled:", native.build(), f"{time.time() - begin:.1f} s")
        _library.loaded.cache_clear()
    say(native.gpu_status())
    if PLATFORM == "cuda" and not _cuda.available():
        say("There is no kernel here.")
        return
    primitives()
    agrees("sparse_adam", 128, False)
    agrees("exact_adam", 33, True)
    agrees("exact_adamw", 64, False)
    agrees("rowwise_adagrad", 7, True)
    agrees("rowwise_adam", 96, False)
    agrees("sparse_adam", 100, True, dtype=jnp.float16)
    agrees("lazy(adamw)", 64, False, by_hand=True, dtype=jnp.bfloat16)
    large()
    sorts()


if __name__ == "__main__":
    main()
