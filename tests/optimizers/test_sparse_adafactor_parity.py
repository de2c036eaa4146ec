"""The numbers of `torch.optim.Adafactor` on dense leaves, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_sparse_adam as osa

from ..helpers.support import Magnitude

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

torch.set_num_threads(1)

# Relative to the largest value so far. Each step divides by two roots of sums and adds
# to the parameters; torch takes the squares of norms where we take means of squares.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
SHAPES = [(), (6,), (5, 3), (1, 4), (4, 1), (2, 5, 3), (2, 3, 4, 2)]


def gradient(rng, shape, dtype, scale):
    return np.asarray(scale * 10 ** rng.uniform(-3, 3) * rng.normal(size=shape), dtype)


def torch_steps(start, grads, hyper):
    """The parameter and the moments, without the axes of length 1, after each step."""
    param = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adafactor([param], **hyper)
    for grad in grads:
        param.grad = torch.tensor(grad)
        optimizer.step()
        state = optimizer.state[param]
        moments = [state[name] for name in ("row_var", "col_var") if name in state]
        moments = moments or [state["variance"]]
        yield param.detach().numpy().copy(), [m.numpy().copy() for m in moments]


def our_steps(start, grads, hyper):
    hyper = dict(hyper)
    tx = osa.sparse_adafactor(hyper.pop("lr", 1e-2), **hyper)
    param = jnp.asarray(start)
    state = tx.init(param)
    for grad in grads:
        updates, state = tx.update(jnp.asarray(grad), state, param)
        param = osa.apply_updates(param, updates)
        moments = [m for m in (state.v_row, state.v_col, state.v) if m is not None]
        yield param, moments


def check(shape, hyper, dtype, seed=0, scale=1.0, steps=20):
    rng = np.random.default_rng(seed)
    start = np.asarray(rng.normal(size=shape), dtype)
    grads = [gradient(rng, shape, dtype, scale) for _ in range(steps)]
    largest = [Magnitude(start), Magnitude(), Magnitude()]
    pairs = zip(
        torch_steps(start, grads, hyper), our_steps(start, grads, hyper), strict=True
    )
    for t, ((param, moments), (our_param, our_moments)) in enumerate(pairs, 1):
        expected = [param, *moments]
        actual = [our_param, *our_moments]
        assert len(actual) == len(expected)
        for a, e, magnitude in zip(actual, expected, largest, strict=False):
            what = f"{shape} after {t} steps with {hyper}"
            assert a.dtype == e.dtype, what
            magnitude.check(a, e.reshape(a.shape), TOLERANCE[dtype], what)


HYPERS = [
    {},
    {"lr": 0.3, "maximize": True},
    {"lr": 0.0},
    {"lr": 0.1, "weight_decay": 0.3},
    {"d": 3.0, "beta2_decay": -0.4},
    {"eps": (None, 0.7), "lr": 1.0},
    {"eps": (1e-2, 1e-3)},
    {"eps": (1.0, 0.0), "weight_decay": 0.01, "maximize": True},
    {"beta2_decay": 0.0},
    {"beta2_decay": -2.0, "d": 1.0},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranks_and_hyperparameters(dtype, shape):
    with jax.enable_x64(dtype == "float64"):
        for hyper in HYPERS:
            check(shape, hyper, dtype)


hypers = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(0.0, 2.0),
        "beta2_decay": st.floats(-1.5, 0.0),
        "eps": st.tuples(
            st.none() | st.floats(1e-8, 1.0), st.sampled_from([0.0, 1e-3, 0.5])
        ),
        "d": st.floats(1.0, 10.0),
        "weight_decay": st.floats(0.0, 0.5),
        "maximize": st.booleans(),
    },
)


@given(hypers, st.sampled_from([1e-6, 1.0, 1e6]), st.integers(0, 2**32 - 1))
def test_any_hyperparameters(hyper, scale, seed):
    with jax.enable_x64():
        check((4, 3), hyper, "float64", seed, scale, steps=5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_bad_gradient_spreads_no_further_than_in_torch(wrong):
    start = np.ones((4, 3), np.float32)
    grad = start.copy()
    grad[1, 2] = wrong
    grads = [start, grad, start]
    steps = zip(torch_steps(start, grads, {}), our_steps(start, grads, {}), strict=True)
    for (expected, _), (actual, _) in steps:
        assert not np.any(np.isnan(actual) & ~np.isnan(expected))
