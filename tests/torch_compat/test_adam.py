"""The shim beside `torch.optim`: Adam and AdamW, and what Adafactor shares."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import optax_sparse_adam as osa
from optax_sparse_adam.torch_compat import Adam, Parameter

from ..helpers.support import TOLERANCE
from .test_programs import (
    OURS,
    TORCH,
    assert_same,
    check,
    compare,
    copy_parameters,
    dense_steps,
    failure,
    gradient,
    make_dense,
    seen,
    table,
    to_numpy,
)

STORIES = []


OPTIONS = {
    "defaults": {},
    "large_eps": {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.3},
    "no_momentum": {"lr": 0.1, "betas": (0.0, 0.0), "eps": 1e-3},
    "weight_decay": {"lr": 0.05, "weight_decay": 0.3},
    "amsgrad": {"lr": 0.05, "betas": (0.5, 0.6), "amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.5, "amsgrad": True},
    "fused": {"fused": True, "weight_decay": 0.1},
    "foreach": {"foreach": True, "weight_decay": 0.1, "amsgrad": True},
    "zeros": {"lr": 0.0, "weight_decay": 0.1, "eps": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)]
)
def test_results(options, kind, dtype):
    with jax.enable_x64(dtype == "float64"):
        logs = [
            dense_steps(world, make_dense(world, kind, dtype, **options), 20)
            for world in (OURS, TORCH)
        ]
    compare(*logs, TOLERANCE[dtype].torch)


CHANGES = {
    "Adam": [
        {"lr": 0.3},
        {"betas": (0.5, 0.75)},
        {"eps": 0.1},
        {"weight_decay": 0.2},
        {"decoupled_weight_decay": True},
        {"maximize": True},
    ],
    "Adafactor": [
        {"lr": 0.3},
        {"beta2_decay": -0.1},
        {"eps": (0.1, 0.2)},
        {"eps": [None, 0.5]},
        {"d": 3.0},
        {"weight_decay": 0.2},
        {"maximize": True},
    ],
}


def changed_options(world, kind="Adam"):
    optimizer = make_dense(world, kind)
    log = [repr(optimizer), dense_steps(world, optimizer)]
    for change in CHANGES[kind]:
        optimizer.param_groups[0].update(change)
        log.append(dense_steps(world, optimizer, 2, seed=len(log)))
    return log


@STORIES.append
def infinite_parameters(world):
    """A decay of 0 is left out: nothing times infinity is not a number."""
    param = world.parameter(np.array([np.inf, -np.inf, np.nan, 1.0]))
    optimizer = world.optim.Adam([param], lr=0.1)
    for values in ([0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, np.nan]):
        param.grad = world.parameter(np.array(values)).data
        optimizer.step()
    return [str(x) for x in to_numpy(param)]


@STORIES.append
def amsgrad_ended(world):
    """The maximum stays in the state, as it was."""
    optimizer = make_dense(world, amsgrad=True)
    log = [dense_steps(world, optimizer)]
    optimizer.param_groups[0]["amsgrad"] = False
    log.append(dense_steps(world, optimizer))
    optimizer.param_groups[0]["amsgrad"] = True
    return log, dense_steps(world, optimizer)


REFUSED = {
    "Adam": [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"eps": -1e-8},
        {"betas": (1.0, 0.5)},
        {"betas": (0.5, float("nan"))},
        {"weight_decay": -0.1},
        {"weight_decay": float("nan")},
        {"lr": -1.0, "eps": -1.0, "weight_decay": -1.0},
        {"eps": -1.0, "betas": (2.0, 3.0)},
    ],
    "Adafactor": [
        {"lr": -1},
        {"beta2_decay": 0.8},
        {"eps": (-1e-30, 1e-3)},
        {"eps": (None, -1e-3)},
        {"d": 0.5},
        {"weight_decay": -1},
        {"lr": -1, "d": 0.0, "beta2_decay": 1},
        {"beta2_decay": 1, "eps": (-1, -1)},
    ],
}
REFUSED["AdamW"] = REFUSED["Adam"]


def refused_options(world, kind="Adam"):
    given = [*REFUSED[kind], {"lr": world.tensor([0.1, 0.2])}]
    return [failure(make_dense, world, kind, **options) for options in given]


@STORIES.append
def a_row_sparse_gradient(world):
    param, other = table(world), table(world, 1)
    optimizer = world.optim.Adam([other, param])
    param.grad = gradient(world, 0)
    return failure(optimizer.step), seen(optimizer)[0]


def round_trips(world, kind="AdamW"):
    options = {"amsgrad": True} if kind == "AdamW" else {"weight_decay": 0.1}
    optimizer = make_dense(world, kind, lr=0.5, **options)
    dense_steps(world, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    log = [to_numpy(saved)]
    other = make_dense(world, kind)
    other.load_state_dict(copy.deepcopy(saved))
    log += [dense_steps(world, other, seed=1), repr(other)]
    for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        log += [dense_steps(world, copied, seed=2), repr(copied)]
    return log, seen(other)


STORIES += [changed_options, refused_options, round_trips]
STORIES.append(functools.partial(refused_options, kind="AdamW"))


@pytest.mark.parametrize("story", STORIES)
def test_as_torch(story):
    with jax.enable_x64(True):
        check(story, 1e-12)


@pytest.mark.parametrize("scheduler", ["StepLR", "OneCycleLR", "CosineAnnealingLR"])
def test_a_scheduler_of_torch(scheduler):
    """One that drives an optimiser of torch; the program copies what it sets."""
    options = {
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "OneCycleLR": {"max_lr": 0.5, "total_steps": 8},
        "CosineAnnealingLR": {"T_max": 5},
    }[scheduler]
    theirs, ours = (make_dense(world, dtype="float32") for world in (TORCH, OURS))
    schedule = getattr(torch.optim.lr_scheduler, scheduler)(theirs, **options)
    logs = [], []
    for i in range(6):
        for key in ("lr", "betas"):
            ours.param_groups[0][key] = theirs.param_groups[0][key]
        for log, world, optimizer in zip(
            logs, (OURS, TORCH), (ours, theirs), strict=True
        ):
            dense_steps(world, optimizer, 1, seed=i)
            log.append(to_numpy(optimizer.param_groups[0]["params"]))
        schedule.step()
    compare(*logs, TOLERANCE["float32"].torch)
    copy_parameters(theirs, ours)
    ours.load_state_dict(theirs.state_dict())  # with what the scheduler has put there
    assert_same(seen(ours), seen(theirs), 0)


@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_learning_rate_in_an_array(shape, kind):
    """Of float32, in which torch computes with it."""

    def story(world):
        lr = world.tensor(np.full(shape, 0.3, np.float32))
        return dense_steps(world, make_dense(world, kind, dtype="float32", lr=lr))

    check(story, TOLERANCE["float32"].torch)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision(dtype):
    """Arithmetic in float32, and one rounding of what is stored."""
    optimizer = make_dense(OURS, dtype=dtype, shapes=[(4, 3)], lr=0.1, weight_decay=0.1)
    wide = make_dense(OURS, dtype="float32", shapes=[(4, 3)], lr=0.1, weight_decay=0.1)
    copy_parameters(optimizer, wide)
    for x in (optimizer, wide):
        (param,) = x.param_groups[0]["params"]
        values = np.random.default_rng(0).integers(-8, 8, (4, 3)) / 8
        param.grad = jnp.asarray(values, param.dtype)
        x.step()
    (narrow,), (exact,) = (x.param_groups[0]["params"] for x in (optimizer, wide))
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(narrow.data, exact.data.astype(dtype))
    for key in ("exp_avg", "exp_avg_sq"):
        moments = [x.state[p][key] for x, p in ((optimizer, narrow), (wide, exact))]
        assert moments[0].dtype == dtype
        np.testing.assert_array_equal(moments[0], moments[1].astype(dtype))


def test_a_parameter_that_the_loss_does_not_use_is_skipped():
    """Its gradient is a BCOO with nothing stored; torch's would be `None`."""
    used, other = (Parameter(np.ones((3, 2), np.float32)) for _ in range(2))
    optimizer = Adam([used, other], lr=0.1)
    loss = osa.value_and_grad(lambda a, b: jnp.sum(a**2), argnums=(0, 1))
    _, (used.grad, other.grad) = loss(used.data, other.data)
    assert other.grad.nse == 0
    optimizer.step()
    assert (np.asarray(other.data) == 1).all()
    assert other not in optimizer.state
    assert (np.asarray(used.data) != 1).all()
    alone = Adam([other])
    alone.zero_grad(set_to_none=False)  # a BCOO of nobody's, and all that there is
    alone.step()
    assert (np.asarray(other.data) == 1).all()
