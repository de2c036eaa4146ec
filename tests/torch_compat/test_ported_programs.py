"""What programs that were ported from torch do beside the documented way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.torch_compat import Adam, Parameter, SparseAdam

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


def test_a_dict_of_parameters():
    with pytest.raises(TypeError, match=r"is str\..* dict\.values\(\)"):
        SparseAdam({"table": Parameter(TABLE)})
