"""The shim beside `torch.optim`: one program run in both worlds, equal results.

A *story* is a function of a `World` that returns what it saw. What the other files of
this name add are stories; this one has the two worlds, and one walk in both.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from optax_sparse_adam import torch_compat

from ..helpers.support import Magnitude, bcoo

torch.set_num_threads(1)


class World(NamedTuple):
    """One library; `sparse` makes a gradient of values, row ids and a shape."""

    optim: Any
    parameter: Callable[..., Any]
    tensor: Callable[..., Any]
    sparse: Callable[..., Any]
    register_pre_hook: Callable[..., Any]
    register_post_hook: Callable[..., Any]


def torch_sparse(values, indices, shape):
    indices = torch.tensor(np.asarray(indices, np.int64)[None, :])
    values = torch.tensor(np.asarray(values))
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def our_sparse(values, indices, shape):
    indices = np.asarray(indices, np.int32)[:, None]
    return bcoo(np.asarray(values), indices, shape)


TORCH = World(
    optim=torch.optim,
    parameter=lambda x: torch.nn.Parameter(torch.as_tensor(x)),
    tensor=torch.tensor,
    sparse=torch_sparse,
    register_pre_hook=register_optimizer_step_pre_hook,
    register_post_hook=register_optimizer_step_post_hook,
)
OURS = World(
    optim=torch_compat,
    parameter=torch_compat.Parameter,
    tensor=lambda x: np.asarray(x, np.float32),
    sparse=our_sparse,
    register_pre_hook=torch_compat.register_optimizer_step_pre_hook,
    register_post_hook=torch_compat.register_optimizer_step_post_hook,
)


class Failure(NamedTuple):
    """An exception as a result; ours may say more than torch's, at the end."""

    kind: str
    message: str


def failure(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args, **kwargs)
    return Failure(caught.type.__name__, str(caught.value))


def to_numpy(x):
    """Scalars, strings and NumPy arrays; a copy."""
    if isinstance(x, (torch.nn.Parameter, torch_compat.Parameter)):
        x = x.data
    if isinstance(x, Failure):
        return x
    if isinstance(x, (dict, defaultdict)):
        return {key: to_numpy(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(to_numpy, x))
    return np.asarray(x).copy() if hasattr(x, "__array__") else x


def assert_same(ours, theirs, tol=1e-6, what="result"):
    """Equal, but for rounding; dicts in the same order too."""
    if isinstance(theirs, Failure):
        # What was passed has another name in another library.
        common = theirs.message.split("one of the params is")[0].split("but got")[0]
        assert ours.kind == theirs.kind, f"{what}: {ours}, not {theirs}"
        assert ours.message.startswith(common), f"{what}: {ours}, not {theirs}"
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), what
        for key in theirs:
            assert_same(ours[key], theirs[key], tol, f"{what}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs), f"{what}: {ours}, not {theirs}"
        assert len(ours) == len(theirs), f"{what}: {ours}, not {theirs}"
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(our, their, tol, f"{what}[{i}]")
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype}, not {theirs.dtype}"
        Magnitude(np.max(np.abs(theirs), initial=0)).check(ours, theirs, tol, what)
    else:
        assert ours == theirs, f"{what}: {ours!r}, not {theirs!r}"


def check(story, tol=1e-6):
    assert_same(to_numpy(story(OURS)), to_numpy(story(TORCH)), tol)


def gradient(world, seed, shape=(6, 3), nse=5):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(nse, *shape[1:])).astype(np.float32)
    return world.sparse(values, rng.integers(0, shape[0], nse), shape)


def table(world, seed=0, shape=(6, 3)):
    rng = np.random.default_rng(seed)
    return world.parameter(rng.normal(size=shape).astype(np.float32))


def seen(optimizer):
    """All that a step may change, as it is now: torch's own dict goes on changing."""
    groups = [group["params"] for group in optimizer.param_groups]
    return to_numpy((groups, optimizer.state_dict()))


def steps(world, optimizer, count=4, seed=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i in range(count):
        for j, param in enumerate(params):
            param.grad = gradient(world, 100 * seed + 10 * i + j)
        optimizer.step()
    return seen(optimizer)


def make_dense(
    world, kind="Adam", dtype="float64", shapes=((), (5,), (4, 3), (2, 3, 4)), **options
):
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    return getattr(world.optim, kind)(list(map(world.parameter, arrays)), **options)


def dense_steps(world, optimizer, count=4, seed=0):
    """What the optimiser holds after each step, with gradients of many sizes."""
    rng = np.random.default_rng(seed)
    log = []
    for i in range(count):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for j, param in enumerate(params):
            values = rng.normal(size=tuple(param.shape)) * 10.0 ** ((i + j) % 5 - 2)
            values = np.asarray(values, to_numpy(param).dtype)
            # One parameter has a gradient only now and then.
            skipped = j == 1 and i % 3
            param.grad = None if skipped else world.parameter(values).data
        optimizer.step()
        log.append(seen(optimizer))
    return log


def compare(ours, theirs, tol):
    """Every array after every step, against the largest value it has had so far.

    A difference of nearly equal values has the rounding errors of the values.
    """
    magnitudes = {}
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        paths = jax.tree_util.tree_flatten_with_path(their)[0]
        leaves = jax.tree.leaves(our)
        for (path, expected), actual in zip(paths, leaves, strict=True):
            if isinstance(expected, np.ndarray):
                assert actual.dtype == expected.dtype
                magnitude = magnitudes.setdefault(path, Magnitude())
                name = f"{jax.tree_util.keystr(path)} after {i + 1} steps"
                magnitude.check(actual, expected, tol, name)
            else:
                assert actual == expected, path


def copy_parameters(source, target):
    for old, new in zip(source.param_groups, target.param_groups, strict=True):
        for param, other in zip(old["params"], new["params"], strict=True):
            values = np.array(to_numpy(param))
            other.data = torch.tensor(values) if torch.is_tensor(other) else values
