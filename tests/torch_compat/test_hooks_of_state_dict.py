"""The shim beside `torch.optim`: hooks of state_dict and of load_state_dict."""

import pytest

from .test_hooks import make, note
from .test_programs import check, seen, to_numpy

STORIES = []


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
