"""The numbers of `torch.optim.SparseAdam`, step by step."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_sparse_adam as osa

from ..helpers.support import TOLERANCE, Magnitude, bcoo, random_entries, slow_but

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("backend")]

torch.set_num_threads(1)


class Hyper(NamedTuple):
    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    maximize: bool = False


def torch_steps(start, steps, hyper):
    """Parameters and moments of torch after each step."""
    table = torch.tensor(start, requires_grad=True)
    betas = (hyper.b1, hyper.b2)
    optimizer = torch.optim.SparseAdam(
        [table], lr=hyper.lr, betas=betas, eps=hyper.eps, maximize=hyper.maximize
    )
    for values, indices in steps:
        ids = torch.tensor(indices.T.astype(np.int64))
        table.grad = torch.sparse_coo_tensor(
            ids, torch.tensor(values), start.shape, check_invariants=True
        )
        optimizer.step()
        state = optimizer.state[table]
        moments = state["exp_avg"], state["exp_avg_sq"]
        yield tuple(x.detach().numpy().copy() for x in (table, *moments))


def our_steps(start, steps, hyper, compiled=False):
    tx = osa.sparse_adam(*hyper[:4], maximize=hyper.maximize)
    table = jnp.asarray(start)
    state = tx.init(table)
    update = jax.jit(tx.update) if compiled else tx.update
    for values, indices in steps:
        updates, state = update(bcoo(values, indices, start.shape), state)
        table = osa.apply_updates(table, updates)
        yield table, state.mu, state.nu


def check(start, steps, hyper, padded=None, compiled=False):
    tol = TOLERANCE[start.dtype.name].torch
    table, mu, nu = Magnitude(start), Magnitude(), Magnitude()
    theirs = torch_steps(start, steps, hyper)
    ours = our_steps(start, padded or steps, hyper, compiled)
    for t, (expected, actual) in enumerate(zip(theirs, ours, strict=True), 1):
        what = f"after {t} steps with {hyper}"
        mu.check(actual[1], expected[1], tol, what=f"exp_avg {what}")
        nu.check(actual[2], expected[2], tol, what=f"exp_avg_sq {what}")
        # Where exp_avg has cancelled, it keeps the error of its former size, and passes
        # it on to the update (divided by eps alone with b2 = 0 and a zero gradient).
        step_size = hyper.lr * math.sqrt(1 - hyper.b2**t) / (1 - hyper.b1**t)
        table.include(step_size * mu.largest / (np.sqrt(expected[2]) + hyper.eps))
        table.check(actual[0], expected[0], tol, what=f"table {what}")


def start_table(rng, shape, dtype):
    return rng.normal(size=shape).astype(dtype)


HYPERS = [
    Hyper(),
    Hyper(lr=0.1, eps=1.0, maximize=True),
    Hyper(lr=0.02, b1=0.0),
    Hyper(lr=0.02, b2=0.0, eps=1e-3),
    Hyper(lr=0.5, b1=0.0, b2=0.0, eps=1e-2),
    Hyper(lr=0.01, b1=0.99, b2=0.99, eps=1e-6),
]


WAYS = ("plain", "kernel")
# In float64 each number of axes once: shapes and types are independent of each other,
# and the hyperparameters below take all types.
AXES = [(n_sparse, n_dense) for n_sparse in (1, 2, 3) for n_dense in (0, 1, 2)]
AXES = [(*axes, "float32", "plain") for axes in AXES] + [
    (*axes, "float64-x64", "plain") for axes in ((1, 2), (2, 0), (3, 1))
]
# The kernel takes float32 and one sparse axis; and does not take others.
AXES += [
    *((1, n_dense, "float32", "kernel") for n_dense in (0, 1, 2)),
    (2, 1, "float32", "kernel"),
    (1, 2, "float64-x64", "kernel"),
]


CORE = [(*axes, "float32", "plain") for axes in ((1, 0), (1, 2), (2, 1), (3, 0))]
CORE += [(1, 1, "float32", "kernel"), (2, 0, "float64-x64", "plain")]


@pytest.mark.parametrize(
    ("n_sparse", "n_dense", "dtype", "backend"),
    slow_but(AXES, *CORE),
    indirect=["dtype", "backend"],
)
def test_shapes(dtype, n_sparse, n_dense, backend):
    number = 3 * (n_sparse - 1) + n_dense
    rng = np.random.default_rng(number)
    shape = (7, 3, 2)[:n_sparse] + (5, 2)[:n_dense]
    steps = [
        random_entries(rng, shape, n_sparse, nse, dtype)
        for nse in rng.permutation([0, 1, 16] * 7)[:20]
    ]
    check(start_table(rng, shape, dtype), steps, HYPERS[number % len(HYPERS)])


# Each type with and without the kernel, and with each of three hyperparameters.
DTYPES = ("float32", "float32-x64", "float64-x64")
COMPILED = [
    (dtype, WAYS[(number + other) % 2], hyper)
    for number, dtype in enumerate(DTYPES)
    for other, hyper in enumerate((HYPERS[0], HYPERS[4], HYPERS[5]))
]


@pytest.mark.parametrize(
    ("dtype", "backend", "hyper"),
    slow_but(COMPILED, *COMPILED[:2]),
    indirect=["dtype", "backend"],
    ids=str,
)
def test_compiled(dtype, hyper, backend):
    """Under `jit` the moments are averaged in their tables; `b1` and `b2` are known."""
    rng = np.random.default_rng(1)
    steps = [random_entries(rng, (7, 5), 1, 16, dtype) for _ in range(20)]
    check(start_table(rng, (7, 5), dtype), steps, hyper, compiled=True)


FOR_USERS = [
    (dtype, WAYS[(number + other) % 2], hyper)
    for number, dtype in enumerate(DTYPES)
    for other, hyper in enumerate(HYPERS)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend", "hyper"),
    FOR_USERS,
    indirect=["dtype", "backend"],
    ids=str,
)
def test_compiled_for_users(dtype, hyper, backend, optimized):
    test_compiled(dtype, hyper, backend)


betas = st.sampled_from([0.0, 0.5, 0.9, 0.999]) | st.floats(0.5, 0.9999)
hypers = st.builds(
    Hyper,
    lr=st.floats(1e-4, 1.0),
    b1=betas,
    b2=betas,
    eps=st.sampled_from([1e-8, 1e-4, 1.0]) | st.floats(1e-8, 1.0),
    maximize=st.booleans(),
)
NSE = 8
batches = st.lists(st.lists(st.integers(0, 5), max_size=NSE), min_size=1, max_size=20)


@given(hypers, batches, st.integers(0, 2**32 - 1))
def test_hyperparameters(dtype, hyper, batches, seed):
    """Any numbers, any batches; ours are padded to one size, so nothing recompiles."""
    rng = np.random.default_rng(seed)
    shape = (6, 3)
    steps, padded = [], []
    for ids in batches:
        values, _ = random_entries(rng, shape, 1, NSE, dtype)
        indices = np.array(ids, np.int32)[:, None]
        steps.append((values[: len(ids)], indices))
        outside = rng.choice([-1, -6, 6, 9], (NSE - len(ids), 1))
        order = rng.permutation(NSE)
        all_indices = np.concatenate([indices, outside]).astype(np.int32)
        padded.append((values[order], all_indices[order]))
    check(start_table(rng, shape, dtype), steps, hyper, padded)
