"""The kernel for GPUs, run on a CPU lane by lane: numbers, and who goes through it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam._rows.cuda_ops import CudaOps
from optax_sparse_adam._rows.row_ops import RowOps
from optax_sparse_adam.native import _cuda
from optax_sparse_adam.native._cuda_source import Tuning

from ..helpers.cuda_on_cpu import SANITIZERS, CudaOnCpu, emulated
from ..helpers.native import needs_compiler, python, sanitizers

pytestmark = [needs_compiler, pytest.mark.usefixtures("as_optax_expects")]


class Short(CudaOnCpu):
    """Chunks of few entries, so that few of them need several lists."""

    tuning = Tuning(small=4, large=8, ranked=100, parts=((2**31, 16, 4, 3),))


class Block(CudaOnCpu):
    """A single block that goes on by itself from the second list on."""

    tuning = Tuning(small=8, large=8, warps=1, parts=((2**31, 4096, 8, 2),), ahead=8)


def drawn(kind, size, rows, rng):
    """Row ids: many of one row, all equal, padding on both sides, ..."""
    ids = {
        "zipf": rows ** rng.random(size) - 1,
        "uniform": rng.integers(0, rows, size),
        "one": np.full(size, 3),
        "padding": rng.integers(-rows, 2 * rows, size),
        "none": rng.choice([-1, rows, 2**31 - 1, -(2**31)], size),
    }[kind]
    return ids.astype(np.int64).astype(np.int32)


def in_order(ids, data, rows):
    """Sums in float64, those in float32 in the order of the entries, and counts."""
    sums, exact = np.zeros((rows, data.shape[1])), np.zeros((rows, data.shape[1]), "f4")
    for row, values in zip(ids, data, strict=True):
        if 0 <= row < rows:
            sums[row] += values
            exact[row] += values
    inside = ids[(ids >= 0) & (ids < rows)]
    return sums, exact, np.bincount(inside, minlength=rows)


def check_sums(ops, kind, size, width, rows=60):
    rng = np.random.default_rng(size + width)
    ids = drawn(kind, size, rows, rng)
    data = rng.standard_normal((size, width)).astype(np.float32)
    grad = BCOO((jnp.asarray(data), jnp.asarray(ids)[:, None]), shape=(rows, width))

    @jax.jit
    def both(grad):
        # The kernel's own: of entries that are no bags it is XLA's.
        return CudaOps.sum.__wrapped__(ops, grad), RowOps().sum(grad)

    found, by_xla = both(grad)
    sums, exact, counts = in_order(ids, data, rows)
    touched = np.flatnonzero(counts)
    assert int(found.count) == len(touched) == int(by_xla.count)
    np.testing.assert_array_equal(found.indices, by_xla.indices)
    actual = np.asarray(found.data)
    assert not actual[len(touched) :].any()
    for at, row in enumerate(touched):
        if counts[row] <= 32:  # by one warp, in order
            np.testing.assert_array_equal(actual[at], exact[row])
    # A tree of sums is off by a rounding of each of its levels at most.
    size_of = np.maximum(np.abs(data).max(initial=0) * counts[touched], 1)[:, None]
    np.testing.assert_allclose(
        actual[: len(touched)] / size_of, sums[touched] / size_of, atol=3e-7
    )


SUMS = [
    (CudaOnCpu, "zipf", 700, 33),
    (Short, "one", 300, 33),
    (Block, "zipf", 300, 33),
    (Short, "padding", 90, 1),
    (CudaOnCpu, "none", 5, 33),
    (Short, "zipf", 300, 128),
    (CudaOnCpu, "one", 3000, 33),
    *((Short, "uniform", 90, width) for width in (2, 7, 31, 64, 96, 300)),
    *((Block, "padding", size, 33) for size in (1, 2, 8, 9, 64, 65, 1100)),
    *((Short, kind, 1100, 64) for kind in ("zipf", "one", "padding")),
]


@pytest.mark.parametrize(
    ("ops", "kind", "size", "width"),
    [*SUMS[:5], *(pytest.param(*x, marks=pytest.mark.slow) for x in SUMS[5:])],
)
def test_sums(ops, kind, size, width):
    check_sums(ops(), kind, size, width)


@pytest.mark.slow
def test_order_of_few_entries():
    """By counting, as a stable sort; tiles of 128 that are full, or not."""
    for size in (1, 31, 33, 127, 128, 129, 1500):
        ids = drawn("padding", size, 40, np.random.default_rng(size))
        valid = (ids >= 0) & (ids < 40)
        order = jax.jit(lambda *x: CudaOnCpu().order(*x, 40))
        keys, places = order(jnp.asarray(ids), jnp.asarray(valid))
        expected = np.where(valid, ids, 2**31 - 1)
        order = np.argsort(expected, kind="stable")
        np.testing.assert_array_equal(keys, expected[order])
        np.testing.assert_array_equal(
            places, np.where(valid, np.arange(size), -1)[order]
        )


@pytest.mark.slow
def test_sanitized():
    """Every optimiser and sum by kernels compiled with sanitizers."""
    variables = sanitizers()
    if variables is None:
        pytest.skip("the compiler has no sanitizers to preload")
    variables |= {"CUDA_ON_CPU_FLAGS": SANITIZERS, "XLA_FLAGS": ""}
    variables |= {"JAX_PLATFORMS": "cpu", "OPTAX_SPARSE_ADAM_NATIVE": "0"}
    program = "-m", "tests.helpers.cuda_sanitized"
    wrong = python(*program, "wrong", **variables)
    assert "heap-buffer-overflow" in wrong.stderr
    done = python(*program, **variables)
    assert done.stdout == "no call has left its buffers\n", done.stderr[-5000:]


OPTIMIZERS = {
    "exact_adamw": lambda: osa.exact_adamw(
        optax.linear_schedule(1e-2, 0, 50), weight_decay=1e-2
    ),
    "sparse_adam": lambda: osa.sparse_adam(1e-2),
    "rowwise_adam": lambda: osa.rowwise_adam(1e-2),
    "rowwise_adagrad": lambda: osa.rowwise_adagrad(1e-2),
    "exact_adam": lambda: osa.exact_adam(1e-2),
    "sparse_adafactor": lambda: osa.sparse_adafactor(1e-2),
    "low mu": lambda: osa.sparse_adam(1e-2, mu_dtype=jnp.bfloat16),
    "per_row": lambda: osa.lazy(osa.per_row(optax.adam(1e-2))),
    **{
        name: lambda name=name: osa.lazy(getattr(optax, name)(1e-2))
        for name in (
            *("adam", "adamw", "adagrad", "sgd", "lion"),
            *("rmsprop", "amsgrad", "lamb", "adan", "nadam"),
        )
    },
    "clipped": lambda: osa.lazy(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    ),
    "rounded": lambda: osa.lazy(
        osa.stochastic_rounding(optax.adam(1e-2), jax.random.key(0))
    ),
}


def trained(tx, width, by_hand, in_bags, dtype=jnp.float32, rows=300, size=100):
    rng = np.random.default_rng(0)
    params = {
        "t": jnp.asarray(rng.standard_normal((rows, width)), dtype),
        "w": jnp.asarray(rng.standard_normal(width), jnp.float32),
    }

    def loss(params, ids, y, weights):
        if in_bags:
            bags = ids.reshape(-1, 5), weights.reshape(-1, 5)
            x = osa.embedding_bag(params["t"], bags[0], weights=bags[1])
        else:
            x = params["t"][ids] * weights[:, None].astype(dtype)
        return jnp.mean((x.astype(jnp.float32) @ params["w"] - y[: len(x)]) ** 2)

    def by_parts(params, state, *batch):
        value, grads = osa.value_and_grad(loss, read=state)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state, value

    step = jax.jit(by_parts) if by_hand else osa.make_train_step(loss, tx)
    state = tx.init(params)
    for _ in range(3):
        ids = (rows ** rng.random(size)).astype(np.int32) - 1
        ids[rng.random(size) < 0.2] = -1 if in_bags else 5
        y, weights = rng.standard_normal((2, size)).astype(np.float32)
        batch = map(jnp.asarray, (ids, y, weights))
        params, state, value = step(params, state, *batch)
    return params, state, value


def compare(tx, *args, atol, **flags):
    """Whether the kernel's training is XLA's; returns the counts of its calls."""
    _cuda._counts.clear()
    _cuda._reasons.clear()
    expected = jax.tree.leaves(trained(tx, *args, **flags))
    with emulated():
        actual = jax.tree.leaves(trained(tx, *args, **flags))
    for x, y in zip(actual, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            x, y = (np.asarray(z.astype(jnp.float32)) for z in (x, y))
            np.testing.assert_allclose(x, y, rtol=atol, atol=atol)
        elif not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(x, y)
    return {*_cuda._counts}, {*_cuda._reasons}


# Adam divides what rounds differently, in another order of additions, by its root.
ATOL = 2e-6
CORE = "sparse_adam", False, True
CASES = [
    ("exact_adamw", True, True),
    ("exact_adamw", False, False),
    # Rows and bags of each, one of them by hand: in turns.
    *(
        (name, (number + bags) % 2, bags)
        for number, name in enumerate(OPTIMIZERS)
        for bags in (0, 1)
    ),
]


@pytest.mark.parametrize(
    ("name", "by_hand", "in_bags"),
    [pytest.param(*x, marks=pytest.mark.slow) for x in CASES] + [CORE],
)
def test_steps(name, by_hand, in_bags):
    used, _ = compare(OPTIMIZERS[name](), 12, by_hand, in_bags, atol=ATOL)
    assert used >= ({"add"} if by_hand else set())
    if name.startswith("exact"):
        assert "step" in used
        assert used & {"look_up", "look_up_bags"}
    elif name in ("sparse_adam", "rowwise_adam", "rowwise_adagrad", "low mu"):
        assert "step" in used
