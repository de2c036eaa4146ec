"""The shim beside `torch.optim`: state_dict and load_state_dict, in and between."""

import copy

import pytest

from .test_programs import check, failure, gradient, seen, steps, table, to_numpy

STORIES = []


def make(world, count=2, **options):
    tables = [table(world, i) for i in range(count)]
    return world.optim.SparseAdam(tables, **{"lr": 0.1, **options})


@STORIES.append
def structure(world):
    """Keys in order, the indices of parameters, options of one's own."""
    one, two, three = (table(world, i) for i in range(3))
    optimizer = world.optim.SparseAdam(
        [
            {
                "params": [one, two],
                "lr": 0.5,
                "mine": [1, {"a": "b"}],
            },
            {"eps": 0.1, "params": [three], "betas": (0, 0.5)},
        ]
    )
    log = [to_numpy(optimizer.state_dict())]
    for param in (three, one):
        param.grad = gradient(world, 0)
        optimizer.step()
        log.append(to_numpy(optimizer.state_dict()))
    optimizer.state["key"] = {"value": world.tensor([1.0])}
    return log, optimizer.state_dict()


@STORIES.append
def round_trip(world):
    """Into a new optimiser with other options, and into the same one later."""
    optimizer = make(world, lr=0.5, betas=(0.5, 0.9), maximize=True)
    steps(world, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    steps(world, optimizer, seed=1)
    other = make(world)
    log = []
    for loaded in (other, optimizer):
        # torch's steps change the dict that was loaded; see below for ours.
        log.append(loaded.load_state_dict(copy.deepcopy(saved)))
        log += [seen(loaded), steps(world, loaded, seed=2)]
    return log


@STORIES.append
def state_handed_over(world):
    """What programs do to keep the moments when they make another optimiser."""
    old = make(world, 1)
    steps(world, old)
    (param,) = old.param_groups[0]["params"]
    one, other = (world.optim.SparseAdam([param], lr=0.1) for _ in range(2))
    one.state = old.state
    log = [steps(world, one, 1)]
    other.state[param] = one.state[param]
    return [*log, steps(world, other, 1), steps(world, old, 1)]


@STORIES.append
def before_the_first_step(world):
    optimizer = make(world)
    saved = optimizer.state_dict()
    log = [to_numpy(saved)]
    steps(world, optimizer)
    optimizer.load_state_dict(saved)
    return log, seen(optimizer), steps(world, optimizer)


@STORIES.append
def wrong_groups(world):
    optimizer = make(world)
    log = []
    for change in (
        lambda saved: saved["param_groups"].pop(),
        lambda saved: saved["param_groups"].append({"params": []}),
        lambda saved: saved["param_groups"][0]["params"].pop(),
        lambda saved: saved["param_groups"][0]["params"].append(5),
        lambda saved: saved.pop("param_groups"),
        lambda saved: saved.pop("state"),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved)
        log.append(failure(optimizer.load_state_dict, saved))
    return log, steps(world, optimizer)


@STORIES.append
def names(world):
    """Loaded names replace those that are there, which else stay; none is compared."""

    def make(*names, rate=0.1):
        params = [table(world, i) for i in range(2)]
        pairs = list(zip(names, params, strict=True)) if names else params
        return world.optim.SparseAdam(pairs, lr=rate)

    log = []
    for source in (("a", "b"), ("b", "a"), ()):
        for target in (("a", "b"), ("x", "y"), ()):
            old, new = make(*source), make(*target, rate=0.5)
            steps(world, old)
            new.load_state_dict(copy.deepcopy(old.state_dict()))
            log += [seen(new), repr(new), steps(world, new, seed=1)]
            same = new.param_groups[0].get("param_names")
            log += [same, old.param_groups[0].get("param_names")]
            group = {"params": [("c", table(world, 2)), ("d", table(world, 3))]}
            if same is None:
                log.append(failure(new.add_param_group, group))
            else:
                new.add_param_group(group)
                log += [new.param_groups[1]["param_names"], steps(world, new, 1, 2)[0]]
    return log


@STORIES.append
def state_by_names(world):
    """A hook that brings a loaded dict into the order of the optimiser's names."""

    def in_own_order(optimizer, state_dict):
        (own,), (saved,) = optimizer.param_groups, state_dict["param_groups"]
        place = dict(zip(saved["param_names"], saved["params"], strict=True))
        found = [place[name] for name in own["param_names"]]
        state = {i: state_dict["state"][key] for i, key in enumerate(found)}
        group = {**saved, "param_names": own["param_names"]}
        return {"state": state, "param_groups": [group]}

    old = world.optim.SparseAdam([(x, table(world, i)) for i, x in enumerate("abc")])
    steps(world, old)
    new = world.optim.SparseAdam([(x, table(world, i)) for i, x in enumerate("ca")])
    saved = copy.deepcopy(old.state_dict())
    log = [failure(new.load_state_dict, saved)]

    def only_known(optimizer, state_dict):
        (saved,) = state_dict["param_groups"]
        known = [i for i, x in enumerate(saved["param_names"]) if x in "ca"]
        picked = {key: [saved[key][i] for i in known] for key in ("params",)}
        names = [saved["param_names"][i] for i in known]
        group = {**saved, **picked, "param_names": names}
        state_dict["param_groups"] = [group]

    new.register_load_state_dict_pre_hook(in_own_order)
    new.register_load_state_dict_pre_hook(only_known, prepend=True)
    new.load_state_dict(saved)
    return log, seen(new), steps(world, new, seed=1)


@STORIES.append
def keys_of_ones_own(world):
    """Indices of parameters are only names; what names nothing is kept."""
    optimizer = make(world)
    steps(world, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["params"] = [7, "x"]
    saved["state"] = {"x": saved["state"][0], 7: saved["state"][1], 99: {"z": [1]}}
    optimizer.load_state_dict(saved)
    return seen(optimizer), steps(world, optimizer)


@STORIES.append
def nested_values(world):
    optimizer = make(world, 1)
    steps(world, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    one = world.tensor([[1.0]])
    saved["state"][0]["more"] = {"list": [one, {"step": one}], "pair": (one, None, 3)}
    optimizer.load_state_dict(saved)
    return seen(optimizer)


@pytest.mark.parametrize("story", STORIES)
def test_as_torch(story):
    check(story)
