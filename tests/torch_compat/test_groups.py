"""The shim beside `torch.optim`: constructors, parameter groups, repr."""

import copy
import pickle

import numpy as np
import optax
import pytest
import torch

from optax_sparse_adam.torch_compat import Adam, Parameter, SparseAdam

from .test_programs import (
    OURS,
    TORCH,
    check,
    dense_steps,
    failure,
    gradient,
    seen,
    steps,
    table,
    to_numpy,
)

STORIES = []


def options(optimizer):
    """The groups but for their parameters, of which only the count is left."""
    groups = [dict(group) for group in optimizer.param_groups]
    return [group | {"params": len(group["params"])} for group in groups]


@STORIES.append
def kinds_of_params(world):
    """Iterables and generators of parameters and groups."""

    def one(i=0):
        return table(world, i)

    given = [
        [one(), one(1)],
        (one(), one(1)),
        iter([one()]),
        (one(i) for i in range(3)),
        {"a": one()}.values(),
        [{"params": one()}],
        [{"params": [one()], "lr": 0.5}, {"params": (one(i) for i in range(2))}],
        ({"params": [one(i)], "betas": (0.0, 0.5)} for i in range(2)),
        [{"params": []}],
    ]
    log = []
    for params in given:
        optimizer = world.optim.SparseAdam(params)
        log.append((options(optimizer), repr(optimizer), steps(world, optimizer)))
    return log


@STORIES.append
def refused_params(world):
    def param():
        return table(world)

    shared = param()
    given = [
        shared,
        shared.data,
        1,
        [],
        iter([]),
        [1],
        ["a"],
        [None],
        [shared, {"params": [param()]}],
        [{"params": [param()]}, param()],
        [{"params": {param()}}],
        [{"lr": 1.0}],
        [{"params": [shared]}, {"params": [param(), shared]}],
    ]
    return [failure(world.optim.SparseAdam, params) for params in given]


@STORIES.append
def named_params(world):
    """Pairs of a name and a parameter; the names go with their group."""

    def pairs(*names):
        return [(name, table(world, i)) for i, name in enumerate(names)]

    given = [
        pairs("a", "b"),
        dict(pairs("a", "b")).items(),
        (pair for pair in pairs("a")),
        [{"params": pairs("a", "b"), "lr": 0.5}, {"params": iter(pairs("c"))}],
        [{"params": [table(world)], "param_names": ["given"]}],
        pairs("same", "same"),
    ]
    log = []
    for params in given:
        optimizer = world.optim.SparseAdam(params)
        names = [group["param_names"] for group in optimizer.param_groups]
        log += [names, repr(optimizer), steps(world, optimizer)]
        optimizer.add_param_group({"params": pairs("later"), "betas": (0.5, 0.5)})
        copied = copy.deepcopy(optimizer)
        log += [options(optimizer), steps(world, copied), steps(world, optimizer)]
    return log


@STORIES.append
def refused_names(world):
    def param():
        return table(world)

    named, unnamed = ("a", param()), param()
    given = [
        [named, unnamed],
        [unnamed, named],
        [{"params": [named]}, {"params": [unnamed]}],
        [{"params": unnamed}, {"params": [named]}],
        [{"params": ("a", param())}],
        [("a", 1)],
        [{"params": [named]}, {"params": [("b", param()), named]}],
    ]
    log = [failure(world.optim.SparseAdam, params) for params in given]
    for params, other in ([named], unnamed), ([unnamed], [named]):
        optimizer = world.optim.Adam(params)
        log.append(failure(optimizer.add_param_group, {"params": other}))
        log.append(options(optimizer))
    return log


@STORIES.append
def a_parameter_twice_in_one_group(world):
    """Warns; a step updates it twice, one after the other."""
    log = []
    for kind in ("SparseAdam", "Adam", "AdamW", "Adafactor"):
        one, two = table(world, 1), table(world, 2)
        make, run = getattr(world.optim, kind), dense_steps
        with pytest.warns(UserWarning, match="duplicate parameters; in future"):
            optimizer = make([one, two, one], lr=0.1)
        if kind == "SparseAdam":
            run = steps
        log += [options(optimizer), run(world, optimizer)]
        saved = optimizer.state_dict()
        with pytest.warns(UserWarning, match="duplicate parameters; in future"):
            again = make([{"params": (p for p in (one, two, one))}])
        again.load_state_dict(saved)
        log.append(run(world, again, seed=1))
        with pytest.warns(UserWarning, match="duplicate parameters; in future"):
            again.add_param_group({"params": [table(world, 3)] * 2})
        log.append(to_numpy(again.param_groups[1]["params"]))
    return log


@STORIES.append
def refused_kinds(world):
    """Sparse and complex parameters, by their places."""
    array = np.ones((2, 3), np.complex64)
    sparse = world.parameter(torch.ones(2, 3).to_sparse(1))
    given = [
        [table(world), sparse],
        [{"params": [table(world)]}, {"params": [sparse, table(world)]}],
        [world.parameter(array)],
        [{"params": [table(world)]}, {"params": world.parameter(array)}],
        [sparse, world.parameter(array)],
    ]
    return [failure(world.optim.SparseAdam, params) for params in given]


@STORIES.append
def refused_options(world):
    given = [
        {"lr": 0.0},
        {"lr": -1},
        {"lr": float("nan")},
        {"lr": world.tensor([0.1, 0.2])},
        {"lr": world.tensor([])},
        {"eps": 0.0},
        {"eps": -1e-8},
        {"betas": (1.0, 0.5)},
        {"betas": (-0.1, 0.5)},
        {"betas": (0.5, 1.0)},
        {"betas": (0.5, float("nan"))},
        {"betas": (2.0, 3.0), "eps": -1},
        {"betas": (0.5,)},
    ]
    return [failure(world.optim.SparseAdam, [table(world)], **x) for x in given]


@STORIES.append
def add_param_group(world):
    optimizer = world.optim.SparseAdam([table(world)], lr=0.1)
    log = [steps(world, optimizer)]
    group = {"params": (table(world, i) for i in (1, 2)), "eps": 0.1}
    log.append(optimizer.add_param_group(group))
    log += [optimizer.param_groups[1] is group, options(optimizer)]
    optimizer.add_param_group({"params": table(world, 3), "other": "kept"})
    group["lr"] = 0.01
    return log, steps(world, optimizer), repr(optimizer)


@STORIES.append
def refused_groups(world):
    param = table(world)
    optimizer = world.optim.SparseAdam([param])
    given = [
        [param],
        {"params": param},
        {"params": [table(world), param]},
        {"params": {table(world)}},
        {"params": [1]},
        {"params": 1},
    ]
    log = [failure(optimizer.add_param_group, group) for group in given]
    return log, len(optimizer.param_groups)


@STORIES.append
def representation(world):
    groups = [
        {"params": [table(world)], "zeta": None, "alpha": "x"},
        {"params": [table(world, 1)], "lr": 1},
    ]
    optimizer = world.optim.SparseAdam(groups, maximize=True, betas=(0, 0.5))
    return repr(optimizer), str(optimizer), format(optimizer), optimizer.defaults


@STORIES.append
def copies(world):
    """Each has parameters of its own, no gradients, and goes on alone."""
    optimizer = world.optim.SparseAdam([table(world)], lr=0.1)
    log = [steps(world, optimizer)]
    for copied in (
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
        copy.deepcopy(copy.deepcopy(optimizer)),
    ):
        param = copied.param_groups[0]["params"][0]
        log += [repr(copied), param.grad is None, param in copied.state, seen(copied)]
        copied.param_groups[0]["lr"] = 0.5
        log += [steps(world, copied, seed=1), seen(optimizer)]
    log.append(steps(world, optimizer, seed=2))
    return log


@STORIES.append
def shared_copies(world):
    """They share parameters, groups and state; both may go on."""
    optimizer = world.optim.SparseAdam([table(world)], lr=0.1)
    steps(world, optimizer)
    other = copy.copy(optimizer)
    same = other.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]
    return same, [steps(world, x, 1) for x in (optimizer, other, optimizer, other)]


@STORIES.append
def an_optimizer_of_ones_own(world):
    """Overrides `step`, as in torch."""

    class Forget(world.optim.Optimizer):
        def __init__(self, params, share=0.5):
            super().__init__(params, {"share": share})

        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data = param.data * group["share"]
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1
            return None if closure is None else closure()

    optimizer = Forget([{"params": table(world)}, {"params": table(world), "share": 2}])
    log = [optimizer.step(lambda: 3), optimizer.step(), seen(optimizer)]
    again = Forget([{"params": table(world, 2)}, {"params": table(world, 3)}])
    again.load_state_dict(optimizer.state_dict())
    log += [seen(again), repr(again)]
    param = table(world)
    param.grad = gradient(world, 0)
    base = world.optim.Optimizer([param], {"lr": 0.1})
    return log, repr(base), failure(base.step).kind


@pytest.mark.parametrize("story", STORIES)
def test_as_torch(story):
    check(story)


def test_schedule_of_optax():
    """Each parameter is at its own place in the schedule."""
    schedule = optax.cosine_decay_schedule(0.5, 6)
    early, late = table(OURS), table(OURS)
    optimizer = SparseAdam([late, early], lr=schedule)
    log = []
    for i in range(6):
        early.grad = gradient(OURS, i)
        late.grad = gradient(OURS, i - 2) if i > 1 else None
        optimizer.step()
        log.append((np.array(early.data), np.array(late.data)))
    for i in range(4):
        np.testing.assert_array_equal(log[i][0], log[i + 2][1])

    by_hand = table(OURS)
    optimizer = SparseAdam([by_hand])
    for i in range(6):
        optimizer.param_groups[0]["lr"] = float(schedule(i))
        by_hand.grad = gradient(OURS, i)
        optimizer.step()
        np.testing.assert_array_equal(by_hand.data, log[i][0])


PARAM, SPARSE = table(OURS), Parameter(gradient(TORCH, 0))
COMPLEX = Parameter(np.ones((2, 3), np.complex64))
# What ours says in other words, or more of.
REFUSED = [
    ([np.zeros(3, np.float32)], TypeError, r"ndarray\. Give arrays as Parameters"),
    (PARAM, TypeError, "iterable of Tensors or dicts.*Give a list"),
    ({"table": PARAM}, TypeError, r"is str\..* dict\.values\(\).* dict\.items\(\)"),
]


@pytest.mark.parametrize(("params", "error", "words"), REFUSED)
def test_refused(params, error, words):
    with pytest.raises(error, match=words):
        SparseAdam(params)


@pytest.mark.parametrize("kind", [SPARSE, COMPLEX])
def test_kinds_that_torch_takes_in_a_later_group(kind):
    """torch looks at those of the constructor, and fails in a step."""
    optimizer = SparseAdam([PARAM])
    with pytest.raises(ValueError, match=r"params at indices \[\[1, 0\]\]: SparseAdam"):
        optimizer.add_param_group({"params": kind})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="Adam "):
        Adam([kind])


def test_integers_are_no_parameters():
    with pytest.raises(RuntimeError, match=r"floating point.*got int32 of shape"):
        Parameter(np.ones(3, np.int32))
