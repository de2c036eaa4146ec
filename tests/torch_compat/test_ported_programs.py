"""What programs that were ported from torch do beside the documented way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.torch_compat import (
    Adam,
    Parameter,
    SparseAdam,
    embedding_bag,
)

from ..helpers.support import assert_close, assert_identical

TABLE = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
IDS = jnp.array([1, 4, 1])


def _trained(order="aaabab"):
    """Two tables, of which each step uses one."""
    tables = {name: Parameter(TABLE) for name in "ab"}
    optimizer = SparseAdam(tables.values(), lr=0.1)

    def loss(tables, name):
        return jnp.sum(tables[name][IDS] ** 2)

    for name in order:
        arrays = {key: table.data for key, table in tables.items()}
        grads = osa.grad(loss)(arrays, name)
        for key, table in tables.items():
            table.grad = grads[key]
        optimizer.step()
    return tables


def test_an_unused_table_does_not_count_a_step():
    """torch has no gradient for it: its steps, and bias corrections, are its own."""
    torch = pytest.importorskip("torch")
    ours = _trained()
    theirs = {
        name: torch.nn.Embedding.from_pretrained(
            torch.tensor(TABLE), freeze=False, sparse=True
        )
        for name in "ab"
    }
    weights = [table.weight for table in theirs.values()]
    optimizer = torch.optim.SparseAdam(weights, lr=0.1)
    for name in "aaabab":
        optimizer.zero_grad()
        (theirs[name](torch.tensor(np.array(IDS))) ** 2).sum().backward()
        optimizer.step()
    for name in "ab":
        assert_close(ours[name].data, theirs[name].weight.detach().numpy(), 1e-6)


@pytest.mark.parametrize("make", [SparseAdam, Adam])
def test_a_step_inside_of_jit(make):
    """It raises, and the optimizer goes on as if it had not been called."""
    param = Parameter(TABLE)
    options = {"allow_dense": True} if make is SparseAdam else {}
    optimizer = make([param], lr=0.1, **options)
    param.grad = jnp.ones_like(param.data)
    with pytest.raises(RuntimeError, match=r"inside of jit.*Call it outside"):
        jax.jit(optimizer.step)()
    assert_identical(param.data, TABLE)
    optimizer.step()
    assert_close(param.data, TABLE - 0.1, 1e-5)
    assert list(optimizer.state[param]) == ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([1, 3], r"offsets\[0\] must be 0, .* got 1"),
        ([0, 3, 1], r"ascending.*got \[0, 3, 1\]"),
        ([0, 9], "at most the number of ids, 3"),
    ],
)
def test_offsets_that_torch_refuses(offsets, words):
    with pytest.raises(ValueError, match=words):
        embedding_bag(IDS, TABLE, jnp.array(offsets))


def test_arguments_of_embedding_bag_in_the_order_of_torch():
    """All that torch's takes, by position; what is not there is refused."""
    torch = pytest.importorskip("torch")
    ids, offsets, weights = [1, 4, 1], [0, 2], [1.0, 2.0, 3.0]
    rest = (None, 2.0, False, "sum", False)
    ours = embedding_bag(
        jnp.array(ids), TABLE, jnp.array(offsets), *rest, jnp.array(weights)
    )
    theirs = torch.nn.functional.embedding_bag(
        torch.tensor(ids),
        torch.tensor(TABLE),
        torch.tensor(offsets),
        *rest,
        torch.tensor(weights),
    )
    assert_close(ours, theirs.numpy(), 1e-6)
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match=r"no max_norm and no scale_grad"):
            embedding_bag(jnp.array([ids]), TABLE, **option)


def test_a_dict_of_parameters():
    with pytest.raises(TypeError, match=r"is str\. Give dict\.values\(\)"):
        SparseAdam({"table": Parameter(TABLE)})
