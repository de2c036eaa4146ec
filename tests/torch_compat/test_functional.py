"""From the shim's state to the functional one and back, in the middle of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.torch_compat import SparseAdam

from ..helpers.support import assert_identical
from .test_programs import OURS, assert_same, gradient, seen, table


def train_with_optax(params, state, seeds, lr=0.1):
    tx = osa.sparse_adam(lr)
    for seed in seeds:
        grads = {"a": gradient(OURS, seed), "b": (gradient(OURS, seed + 100),)}
        updates, state = tx.update(grads, state)
        params = osa.apply_updates(params, updates)
    return params, state


def train_with_shim(optimizer, tree, seeds):
    for seed in seeds:
        tree["a"].grad = gradient(OURS, seed)
        tree["b"][0].grad = gradient(OURS, seed + 100)
        optimizer.step()


def tree_and_optimizer():
    tree = {"a": table(OURS), "b": (table(OURS, 1),)}
    return tree, SparseAdam([tree["b"][0], tree["a"]], lr=0.1)


@pytest.mark.parametrize("before", [0, 3])
def test_the_functional_state_and_back(before):
    tree, optimizer = tree_and_optimizer()
    train_with_shim(optimizer, tree, range(before))
    state = optimizer.to_optax(tree)
    params = jax.tree.map(lambda p: jnp.copy(p.data), tree)
    fresh = osa.sparse_adam(0.1).init(params)
    assert_identical(*(jax.tree.map(jnp.zeros_like, x) for x in (state, fresh)))
    params, state = train_with_optax(params, state, range(3, 6))

    again, back = tree_and_optimizer()
    jax.tree.map(lambda p, x: setattr(p, "data", x), again, params)
    back.from_optax(again, state)
    assert_identical(back.to_optax(again), state)
    train_with_shim(back, again, range(6, 9))
    expected = jax.tree.map(np.array, state)
    train_with_shim(optimizer, tree, range(3, 9))
    results = (jax.tree.map(lambda x: x, seen(x)) for x in (back, optimizer))  # sorted
    assert_same(*results)
    assert {x["step"] for x in back.state.values()} == {before + 6}
    assert_identical(state, expected)


def test_unequal_steps_have_no_functional_state():
    tree, optimizer = tree_and_optimizer()
    tree["a"].grad = gradient(OURS, 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"same number of steps, got \[0, 1\]"):
        optimizer.to_optax(tree)
    assert int(optimizer.to_optax(tree["a"]).count) == 1
    assert list(optimizer.state) == [tree["a"]]


def test_moments_of_another_type_are_cast():
    tree, optimizer = tree_and_optimizer()
    params = jax.tree.map(lambda p: p.data, tree)
    state = osa.sparse_adam(0.1, mu_dtype="bfloat16").init(params)
    optimizer.from_optax(tree, state)
    moments = [
        [state["exp_avg"], state["exp_avg_sq"]] for state in optimizer.state.values()
    ]
    assert {x.dtype.name for x in jax.tree.leaves(moments)} == {"float32"}
