"""Checkpoints of every optimiser of torch, in each of ours.

Either the program continues with torch's results, or it stops with the reason.
"""

import inspect
import itertools
import re

import jax
import numpy as np
import pytest
import torch

from optax_sparse_adam import torch_compat
from optax_sparse_adam.torch_compat import Adam, AdamW, SparseAdam

from .test_programs import OURS, TORCH, compare, copy_parameters, seen, to_numpy

OF_TORCH = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
)
# Those of ours, and two that share options with them; the others are slow tests.
CORE = {"SparseAdam", "Adam", "AdamW", "Adafactor", "RAdam", "SGD"}
# Options that change the results, where an optimiser has them.
VARIANTS = {
    "defaults": {},
    "weight_decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9, "nesterov": True},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "neutral": {"weight_decay": 0, "amsgrad": False},
    "maximize": {"maximize": True},
}
OF_OURS = {
    "SparseAdam": {"allow_dense": True},
    "Adam": {},
    "AdamW": {},
    "Adafactor": {},
}


def start(world):
    return world.parameter(np.random.default_rng(0).normal(size=(4, 3)))


def steps(world, optimizer, count, seed, to_sparse=False):
    rng = np.random.default_rng(seed)
    log = []
    for _ in range(count):
        (param,) = optimizer.param_groups[0]["params"]
        values = rng.normal(size=(4, 3))
        param.grad = (
            world.sparse(values, range(4), (4, 3))
            if to_sparse
            else world.parameter(values).data
        )
        optimizer.step(*([lambda: 1.0] if isinstance(optimizer, LBFGS) else []))
        log.append(to_numpy(param))
    return log


LBFGS = torch.optim.LBFGS


def trained(name, options):
    theirs = getattr(torch.optim, name)
    known = inspect.signature(theirs).parameters
    given = {key: x for key, x in options.items() if key in known}
    if options and not given:
        return None
    optimizer = theirs([start(TORCH)], lr=0.01, **given)
    steps(TORCH, optimizer, 5, 1, name == "SparseAdam")
    return optimizer


def continues(source, group, target):
    """Whether the target has the source's formula, with these options."""
    if {source, target} <= {"Adam", "AdamW"}:
        return target == "Adam" or (
            group["decoupled_weight_decay"] or not group["weight_decay"]
        )
    return source == target


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, marks=() if pair[0] in CORE else pytest.mark.slow)
        for pair in itertools.product(OF_TORCH, OF_OURS)
    ],
)
def test_each_into_each(source, target):
    accepted = 0
    with jax.enable_x64(True):
        for variant, options in VARIANTS.items():
            theirs = trained(source, options)
            if theirs is None:
                continue
            ours = getattr(torch_compat, target)([start(OURS)], **OF_OURS[target])
            before = seen(ours)
            saved = theirs.state_dict()
            if continues(source, theirs.param_groups[0], target):
                ours.load_state_dict(saved)
                copy_parameters(theirs, ours)
                logs = [
                    steps(world, optimizer, 10, 2, source == "SparseAdam")
                    for world, optimizer in ((OURS, ours), (TORCH, theirs))
                ]
                compare(*logs, 1e-12)
                accepted += 1
                continue
            with pytest.raises(ValueError, match="loaded state dict ") as caught:
                ours.load_state_dict(saved)
            assert target in str(caught.value), variant
            np.testing.assert_equal(seen(ours), before)
    assert bool(accepted) == (source == target or {source, target} <= {"Adam", "AdamW"})


@pytest.mark.parametrize(
    ("target", "source", "options", "words"),
    [
        (
            SparseAdam,
            "Adam",
            {"weight_decay": 0.25, "amsgrad": True},
            ["SparseAdam does not have, in group 0: weight_decay=0.25, amsgrad=True"],
        ),
        (SparseAdam, "NAdam", {}, ["momentum_decay=0.004", "that optimizer's class"]),
        (Adam, "SGD", {"momentum": 0.5}, ["momentum=0.5", "nesterov=False"]),
        (
            Adam,
            "RAdam",
            {},
            ["lacks options, in group 0: amsgrad"],
        ),
        (AdamW, "Adamax", {}, ["lacks options, in group 0: amsgrad"]),
        (
            AdamW,
            "Adam",
            {"weight_decay": 0.25},
            ["decays otherwise than AdamW", "decoupled_weight_decay=False"],
        ),
    ],
)
def test_messages(target, source, options, words):
    """The option, its value, and what to do."""
    theirs = getattr(torch.optim, source)([start(TORCH)], **options)
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        target([start(OURS)]).load_state_dict(theirs.state_dict())
    for word in words:
        assert word in str(caught.value)


def test_the_state_of_another_is_refused_at_the_step():
    theirs = trained("Adagrad", {})
    ours = SparseAdam([start(OURS)])
    groups = ours.state_dict()["param_groups"]
    ours.load_state_dict(theirs.state_dict() | {"param_groups": groups})
    words = r"arrays of the shapes \{'exp_avg': \(4, 3\), .*got \{\}.*start from zeros"
    with pytest.raises(ValueError, match=words):
        steps(OURS, ours, 1, 0, to_sparse=True)
    ours.state.clear()
    steps(OURS, ours, 1, 0, to_sparse=True)


@pytest.mark.parametrize("name", OF_OURS)
def test_options_of_ones_own(name):
    """A label, or a rate that a program of one's own reads: both groups have it."""
    make = getattr(torch_compat, name)
    labelled = make([{"params": [start(OURS)], "label": "decoder"}])
    saved = labelled.state_dict()
    with pytest.raises(ValueError, match=r"label='decoder'.*the same key first"):
        make([start(OURS)]).load_state_dict(saved)
    other = make([{"params": [start(OURS)], "label": "encoder"}])
    other.load_state_dict(saved)
    assert other.param_groups[0]["label"] == "decoder"
