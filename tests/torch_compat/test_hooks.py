"""The shim beside `torch.optim`: hooks of steps and of `state_dict`s, and handles."""

import copy
import pickle

import numpy as np
import pytest

from optax_sparse_adam.torch_compat import SparseAdam

from .test_programs import OURS, check, failure, gradient, seen, table, to_numpy

STORIES = []


def make(world, lr=0.1):
    param = table(world)
    param.grad = gradient(world, 0)
    return world.optim.SparseAdam([param], lr=lr)


def note(log, name):
    """A hook of any kind that writes down its name and returns nothing."""

    def hook(*args):
        log.append(name)

    return hook


@STORIES.append
def order_of_steps(world):
    """Global hooks are outside, and stay when the optimiser is another one."""
    log = []
    optimizer, other = make(world), make(world)
    handles = [
        optimizer.register_step_post_hook(note(log, "own post 1")),
        world.register_post_hook(note(log, "global post 1")),
        optimizer.register_step_pre_hook(note(log, "own pre 1")),
        world.register_pre_hook(note(log, "global pre 1")),
        optimizer.register_step_pre_hook(note(log, "own pre 2")),
        optimizer.register_step_post_hook(note(log, "own post 2")),
        world.register_pre_hook(note(log, "global pre 2")),
        world.register_post_hook(note(log, "global post 2")),
    ]
    for handle in [None, *handles]:
        if handle is not None:
            handle.remove()
            handle.remove()
        optimizer.step()
        log.append("other")
        other.step()
    return log


@STORIES.append
def changed_arguments(world):
    """Each hook sees what the one before it returned; post hooks see the last."""
    optimizer = make(world)
    log = []

    def add(value):
        def hook(optimizer, args, kwargs):
            log.append((len(args), [key() for key in kwargs.values()]))
            return args, {"closure": lambda: value}

        return hook

    with world.register_pre_hook(add(1)):
        optimizer.register_step_pre_hook(add(2))
        optimizer.register_step_pre_hook(lambda *args: None)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: ((*args, None), {}))
        optimizer.register_step_post_hook(lambda o, args, kwargs: log.append(args[1:]))
        log.append(optimizer.step())
    log.append(optimizer.step(closure=lambda: 3))
    other = make(world)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((other,), kwargs))
    optimizer.step()
    return log, seen(optimizer), seen(other)


@STORIES.append
def wrong_returns(world):
    log = []
    for wrong in (1, (1,), (1, 2, 3), [(), {}], "ab"):
        optimizer = make(world)
        optimizer.register_step_post_hook(note(log, "not reached"))
        optimizer.register_step_pre_hook(lambda *args, wrong=wrong: wrong)
        log += [failure(optimizer.step).kind, seen(optimizer)]
        post = make(world)
        post.register_step_post_hook(lambda *args, wrong=wrong: wrong)
        log.append(post.step(lambda: 5))
    return log


@STORIES.append
def a_hook_that_raises(world):
    optimizer = make(world)

    def hook(*args):
        raise KeyError("mine")

    log = []
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        world.register_pre_hook,
    ):
        with register(hook):
            log += [failure(optimizer.step), seen(optimizer)]
    optimizer.step()
    return log, seen(optimizer)


@STORIES.append
def handles(world):
    """As context managers; removed from one optimiser only; also after an error."""
    log = []
    optimizer = make(world)
    hook = note(log, "called")
    with optimizer.register_step_pre_hook(hook) as handle:
        optimizer.step()
        log.append(type(handle).__name__)
    optimizer.step()
    with world.register_post_hook(hook):
        optimizer.step()
        log.append(failure(optimizer.step, 1, 2).kind)
    optimizer.step()
    with pytest.raises(KeyError), world.register_post_hook(hook):  # noqa: PT012
        optimizer.step()
        raise KeyError
    optimizer.step()
    first, second = (optimizer.register_step_pre_hook(hook) for _ in range(2))
    first.remove()
    log.append(second.id > first.id)
    optimizer.step()
    return log


@STORIES.append
def copies_have_no_hooks(world):
    optimizer = make(world)
    log = []
    optimizer.register_step_pre_hook(note(log, "step"))
    optimizer.register_state_dict_pre_hook(note(log, "save"))
    pickled = pickle.loads(pickle.dumps(optimizer))
    for copied in (copy.deepcopy(optimizer), copy.copy(optimizer), pickled):
        copied.step()
        copied.state_dict()
        copied.register_step_post_hook(note(log, "copy"))
        copied.step()
    optimizer.step()
    return log


@STORIES.append
def hooks_around_a_step_of_ones_own(world):
    log = []

    class Mine(world.optim.Optimizer):
        def step(self, closure=None):
            """Says so."""
            log.append("step")
            return closure() if closure else None

    optimizer = Mine([table(world)], {})
    optimizer.register_step_pre_hook(note(log, "pre"))
    optimizer.register_step_post_hook(note(log, "post"))
    log += [optimizer.step(), optimizer.step(lambda: 4)]
    return log, Mine.step.__doc__, Mine.step.__name__


@STORIES.append
def order_of_saving_and_loading(world):
    optimizer = make(world)
    log = []
    for i, prepend in enumerate([False, True, False, True]):
        for kind in ("state_dict_pre", "state_dict_post"):
            for prefix in ("", "load_"):
                register = getattr(optimizer, f"register_{prefix}{kind}_hook")
                register(note(log, (prefix, kind, i)), prepend=prepend)
    log.append(sorted(optimizer.state_dict()))
    log.append(optimizer.load_state_dict(optimizer.state_dict()))
    for kind in ("state_dict_pre", "state_dict_post"):
        with getattr(optimizer, f"register_{kind}_hook")(note(log, "last"), True):
            optimizer.state_dict()
    optimizer.state_dict()
    return log


@STORIES.append
def saving_hooks_that_change(world):
    optimizer = make(world)
    optimizer.step()

    def set_rate(optimizer):
        optimizer.param_groups[0]["lr"] = 0.75

    def in_place(optimizer, state_dict):
        state_dict["extra"] = [1]

    def another(optimizer, state_dict):
        return {**state_dict, "keys": sorted(state_dict)}

    optimizer.register_state_dict_pre_hook(set_rate)
    optimizer.register_state_dict_post_hook(another)
    log = [to_numpy(optimizer.state_dict())]
    optimizer.register_state_dict_post_hook(in_place, prepend=True)
    log.append(to_numpy(optimizer.state_dict()))
    optimizer.register_state_dict_post_hook(lambda *args: {"only": 1})
    return log, optimizer.state_dict()


@STORIES.append
def loading_hooks_that_change(world):
    saved = make(world)
    saved.step()
    saved = saved.state_dict()
    log = []

    def in_place(optimizer, state_dict):
        log.append(state_dict is saved)
        groups = state_dict["param_groups"]
        state_dict["param_groups"] = [{**group, "lr": 0.25} for group in groups]

    def another(optimizer, state_dict):
        return {**state_dict, "state": {}}

    def after(optimizer):
        optimizer.param_groups[0]["eps"] = 0.5

    optimizer = make(world)
    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(saved)
    log += [seen(optimizer), to_numpy(saved)]
    optimizer.register_load_state_dict_pre_hook(another, prepend=True)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    optimizer.step()
    return log, seen(optimizer), to_numpy(saved)


@pytest.mark.parametrize("story", STORIES)
def test_as_torch(story):
    check(story)


def test_hooks_run_once_when_a_step_calls_its_base():
    """In torch, twice if the base class has been used before, else once."""

    class Halved(SparseAdam):
        def step(self, closure=None):
            out = super().step(closure)
            for param in self.param_groups[0]["params"]:
                param.data = param.data / 2
            return out

    log = []
    param = table(OURS)
    optimizer = Halved([param])
    optimizer.register_step_pre_hook(note(log, "pre"))
    optimizer.register_step_post_hook(note(log, "post"))
    before = np.array(param.data)
    assert optimizer.step(lambda: 3) == 3
    assert log == ["pre", "post"]
    np.testing.assert_array_equal(param.data, before / 2)
    with pytest.raises(TypeError):
        optimizer.step(lambda: 3, 4)
    optimizer.step()
    assert log == ["pre", "post", "pre", "pre", "post"]
