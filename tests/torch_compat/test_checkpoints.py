"""Checkpoints: from torch and back, of any type, apart from what continues."""

import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from optax_sparse_adam import torch_compat
from optax_sparse_adam.torch_compat import Parameter, SparseAdam

from ..helpers.support import TOLERANCE
from .test_programs import (
    OURS,
    TORCH,
    assert_same,
    compare,
    copy_parameters,
    gradient,
    seen,
    steps,
    table,
    to_numpy,
)
from .test_state_dict import make


def to_torch(state_dict):
    """The lines in the docstring of `state_dict`."""
    return jax.tree.map(
        lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, state_dict
    )


def save_and_load(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def numpy_dict(state_dict):
    return pickle.loads(pickle.dumps(to_numpy(state_dict)))


@pytest.mark.parametrize("convert", [save_and_load, numpy_dict])
def test_a_torch_checkpoint_continued(convert):
    """A hundred steps here and in torch; groups, options and unequal steps."""

    def make(world, **options):
        one, two, three = (table(world, i) for i in range(3))
        groups = [{"params": [one, two], **options}, {"params": [three], "eps": 0.1}]
        return world.optim.SparseAdam(groups)

    def assert_same_steps(ours, theirs, seeds):
        logs = (
            [steps(world, optimizer, 1, seed) for seed in seeds]
            for world, optimizer in ((OURS, ours), (TORCH, theirs))
        )
        compare(*logs, TOLERANCE["float32"].torch)

    theirs = make(TORCH, lr=0.05, betas=(0.8, 0.9), maximize=True)
    steps(TORCH, theirs, 10, seed=200)
    theirs.param_groups[0]["params"][1].grad = None
    theirs.step()
    ours = make(OURS)
    copy_parameters(theirs, ours)
    ours.load_state_dict(convert(theirs.state_dict()))
    assert_same(seen(ours), seen(theirs), 0)
    assert_same_steps(ours, theirs, range(100))

    back = make(TORCH)
    copy_parameters(ours, back)
    back.load_state_dict(save_and_load(to_torch(ours.state_dict())))
    assert_same_steps(ours, back, range(100, 120))


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("param_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("saved_dtype", FLOATS)
def test_types_of_torch(saved_dtype, param_dtype):
    """Cast to the parameter's, as torch casts; the step never."""
    values = torch.tensor([[0.1, 3e-8], [70000.0, -2.0]], dtype=torch.float64)
    values = values.to(getattr(torch, saved_dtype))
    state = {"step": torch.tensor(1001.0), "exp_avg": values, "exp_avg_sq": values.T}
    groups = torch.optim.SparseAdam([torch.nn.Parameter(values)]).state_dict()
    saved = {"state": {0: state}, "param_groups": groups["param_groups"]}
    optimizer = SparseAdam([Parameter(jnp.zeros((2, 2), param_dtype))])
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert int(loaded["step"]) == 1001
    for key in ("exp_avg", "exp_avg_sq"):
        expected = state[key].to(getattr(torch, param_dtype)).double().numpy()
        assert loaded[key].dtype == param_dtype
        np.testing.assert_array_equal(loaded[key].astype("float32"), expected)
    param = Parameter(values)
    assert param.dtype == (saved_dtype if saved_dtype != "float64" else "float32")
    np.testing.assert_array_equal(param.data.astype("float32"), values.float())


def test_saved_and_loaded_dicts_never_change():
    """Nor do they change the optimiser."""
    lr = np.array([0.1])
    optimizer = SparseAdam([table(OURS)], lr=lr)
    optimizer.param_groups[0].update(mine=[jnp.zeros(2)], others={1})
    steps(OURS, optimizer)
    saved = optimizer.state_dict()
    loaded = optimizer.state_dict()
    assert {type(x) for x in saved["state"][0].values()} == {int, np.ndarray}
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(saved))
    before = to_numpy(saved)
    optimizer.load_state_dict(loaded)
    lr *= 2
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.param_groups[0]["mine"][0] += 1
    optimizer.param_groups[0]["others"].add(2)
    for i in range(3):
        steps(OURS, optimizer, seed=i)
        assert_same(to_numpy(saved), before, 0)
        assert_same(to_numpy(loaded), before, 0)
    expected = seen(optimizer)
    for state_dict in (saved, loaded):
        for array in jax.tree.leaves(state_dict):
            if isinstance(array, np.ndarray):
                array[...] = 7
        state_dict["param_groups"][0]["mine"].append(1)
        state_dict["param_groups"][0]["others"].add(3)
        state_dict["state"].clear()
    assert_same(seen(optimizer), expected, 0)


def test_schedule_stays_where_a_scalar_is_loaded():
    schedule = optax.linear_schedule(0.5, 0.0, 10)
    optimizer = make(OURS, lr=schedule)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    steps(OURS, optimizer, 4)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert saved["param_groups"][0]["lr"] == pytest.approx(0.3)
    other = make(OURS, lr=schedule)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] is schedule
    copy_parameters(optimizer, other)
    assert_same(steps(OURS, other), steps(OURS, optimizer), 0)
    constant = make(OURS)
    constant.load_state_dict(saved)
    assert constant.param_groups[0]["lr"] == pytest.approx(0.3)


def test_state_of_other_parameters_is_refused_at_the_step():
    small = SparseAdam([table(OURS, 0, (5, 3))])
    optimizer = make(OURS, 1)
    steps(OURS, optimizer)
    small.load_state_dict(optimizer.state_dict())
    small.param_groups[0]["params"][0].grad = gradient(OURS, 0, (5, 3))
    with pytest.raises(ValueError, match=r"shape \(5, 3\) must have .*\(6, 3\)"):
        small.step()


@pytest.mark.parametrize("name", ["SparseAdam", "Adafactor"])
def test_a_group_added_after_loading(name):
    """torch then has `differentiable` among its defaults, and in the new group."""
    theirs, more = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    optimizer = getattr(torch.optim, name)([theirs], lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [more]})
    saved = optimizer.state_dict()
    assert saved["param_groups"][1]["differentiable"] is False
    groups = [{"params": [Parameter(jnp.ones((4, 2)))]} for _ in range(2)]
    ours = getattr(torch_compat, name)(groups)
    ours.load_state_dict(saved)
    assert ours.param_groups[1]["lr"] == 0.1
