"""The shim beside `torch.optim`: steps, options, closures, gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam import torch_compat

from ..helpers.support import TOLERANCE, assert_close
from .test_programs import TORCH, check, failure, gradient, seen, steps, table, to_numpy

STORIES = []


@STORIES.append
def options_of_groups(world):
    groups = [
        {"params": [table(world, 0), table(world, 1)], "lr": 0.1},
        {"params": table(world, 2), "betas": (0.5, 0.9), "eps": 0.1},
        {"params": [table(world, 3)], "maximize": True},
    ]
    return steps(world, world.optim.SparseAdam(groups, lr=0.02, eps=1e-3))


@STORIES.append
def options_changed_between_steps(world):
    optimizer = world.optim.SparseAdam([table(world)], lr=0.1)
    group = optimizer.param_groups[0]
    log = [steps(world, optimizer)]
    for change in (
        {"lr": 0.3},
        {"betas": (0.0, 0.5)},
        {"eps": 0.5},
        {"maximize": True},
        {"lr": world.tensor([0.01])},
        {"maximize": False, "betas": [0.9, 0.0]},
    ):
        group.update(change)
        log.append(steps(world, optimizer, 2, seed=len(log)))
    return log


@STORIES.append
def learning_rates(world):
    rates = [0.1, 1, world.tensor(0.1), world.tensor([0.1]), world.tensor([[0.1]])]
    return [steps(world, world.optim.SparseAdam([table(world)], lr)) for lr in rates]


@STORIES.append
def learning_rate_changed_in_place(world):
    lr = world.tensor([0.5])
    optimizer = world.optim.SparseAdam([table(world)], lr=lr)
    before = steps(world, optimizer)
    lr *= 0.1
    return before, steps(world, optimizer)


@STORIES.append
def no_gradient(world):
    """Such a parameter is skipped: no state, no step."""
    params = [table(world, i) for i in range(3)]
    optimizer = world.optim.SparseAdam(params)
    log = []
    for present in ([], [1], [0, 1], [], [2]):
        for i, param in enumerate(params):
            param.grad = gradient(world, i) if i in present else None
        optimizer.step()
        log.append(seen(optimizer))
    return log


@STORIES.append
def an_empty_gradient(world):
    """Counts as a step, and makes the state."""
    param = table(world)
    optimizer = world.optim.SparseAdam([param])
    log = []
    for nse in (0, 4, 0, 4):
        param.grad = gradient(world, nse, nse=nse)
        optimizer.step()
        log.append(seen(optimizer))
    return log


@STORIES.append
def zeros_that_are_stored(world):
    """Whatever is stored is updated: its moments decay, and it moves by them."""
    param, shape = table(world), (6, 3)
    optimizer = world.optim.SparseAdam([param], lr=0.1)
    log = []
    for rows, value in (([1, 4], 1.0), ([1, 2, 1], 0.0), ([4, 2], 0.0), ([2], 1.0)):
        values = np.full((len(rows), 3), value, np.float32)
        param.grad = world.sparse(values, rows, shape)
        optimizer.step()
        log.append(seen(optimizer))
    return log


@STORIES.append
def zero_grad(world):
    param = table(world)
    optimizer = world.optim.SparseAdam([param])
    log = []
    for set_to_none in (True, False):
        param.grad = gradient(world, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        log.append(param.grad is None)
        optimizer.step()
        log.append(seen(optimizer))
    param.grad = gradient(world, 0)
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    return log, param.grad is None


@STORIES.append
def closures(world):
    param = table(world)
    optimizer = world.optim.SparseAdam([param], lr=0.1)
    calls = []

    def closure():
        calls.append(to_numpy(param))
        param.grad = gradient(world, len(calls))
        return len(calls)

    losses = [optimizer.step(closure), optimizer.step(closure=closure)]
    return losses, optimizer.step(), calls, seen(optimizer)


@STORIES.append
def a_dense_gradient(world):
    param, other = table(world), table(world, 1)
    optimizer = world.optim.SparseAdam([other, param])
    param.grad = world.parameter(np.ones((6, 3), np.float32)).data
    return failure(optimizer.step)


@STORIES.append
def gradients_of_torch(world):
    """Sparse ones, from an embedding or made by hand: ours takes them as they are."""
    param = table(world)
    optimizer = world.optim.SparseAdam([param])
    log = []
    for i in range(3):
        made = torch.from_numpy(to_numpy(table(world, i))).relu().to_sparse(1 + i % 2)
        for grad in (gradient(TORCH, i), made):
            param.grad = grad
            optimizer.step()
            log.append(seen(optimizer))
    return log, failure(setattr, param, "grad", gradient(TORCH, 0, (5, 3)))


@STORIES.append
def assigned_gradients(world):
    param = table(world)
    wrong = [1, "a", gradient(world, 0, (5, 3)), gradient(world, 0, (6, 3, 1))]
    half = world.parameter(np.ones((6, 3), np.float16)).data
    log = [failure(setattr, param, "grad", grad) for grad in wrong]
    return log, failure(setattr, param, "grad", half).kind


@pytest.mark.parametrize("story", STORIES)
def test_as_torch(story):
    check(story)


def test_gradient_of_a_torch_model():
    """What `backward` leaves in a sparse embedding can be assigned as it is."""
    embedding = torch.nn.Embedding(7, 3, sparse=True)
    theirs = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    table = torch_compat.Parameter(embedding.weight)
    ours = torch_compat.SparseAdam([table], lr=0.1)
    for ids in ([5, 2, 5], [0, 5, 2]):
        theirs.zero_grad()
        embedding(torch.tensor(ids)).square().sum().backward()
        table.grad = embedding.weight.grad
        assert (table.grad.nse, table.grad.n_dense) == (len(set(ids)), 1)
        theirs.step()
        ours.step()
    expected = embedding.weight.detach().numpy()
    assert_close(table.data, expected, TOLERANCE["float32"].torch, magnitude=1.0)


def test_an_unused_table_does_not_count_a_step():
    """torch has no gradient for it: its steps, and bias corrections, are its own."""
    embeddings = {name: torch.nn.Embedding(6, 2, sparse=True) for name in "ab"}
    theirs = torch.optim.SparseAdam([x.weight for x in embeddings.values()], lr=0.1)
    tables = {x: torch_compat.Parameter(embeddings[x].weight) for x in embeddings}
    ours = torch_compat.SparseAdam(tables.values(), lr=0.1)
    ids = np.array([1, 4, 1])
    grad = osa.grad(lambda arrays, name: jnp.sum(arrays[name][ids] ** 2))
    for name in "aaabab":
        theirs.zero_grad()
        embeddings[name](torch.tensor(ids)).square().sum().backward()
        theirs.step()
        grads = grad({key: x.data for key, x in tables.items()}, name)
        for key in tables:
            tables[key].grad = grads[key]
        ours.step()
    for name in tables:
        expected = embeddings[name].weight.detach().numpy()
        assert_close(tables[name].data, expected, 1e-6, magnitude=1.0)


def test_a_batch_without_ids_does_not_count_a_step():
    """Unlike torch's: the gradient is that of an unused table. Others count."""
    table = torch_compat.Parameter(jnp.ones((6, 2)))
    ours = torch_compat.SparseAdam([table], lr=0.1)
    grad = osa.grad(lambda t, ids: jnp.sum(t[ids] ** 2))
    counts = []
    for ids in ([1, 4], [], [4]):
        table.grad = grad(table.data, jnp.asarray(ids, jnp.int32))
        ours.step()
        counts.append(int(ours.state[table]["step"]))
    empty = grad(table.data, jnp.zeros(0, jnp.int32))
    table.grad = BCOO((empty.data, empty.indices), shape=empty.shape)
    ours.step()
    assert [*counts, int(ours.state[table]["step"])] == [1, 1, 2, 3]
