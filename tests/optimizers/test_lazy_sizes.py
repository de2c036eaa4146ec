"""Masks and labels that are functions of the parameters, inside `lazy`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import assert_identical, bcoo

pytestmark = pytest.mark.usefixtures("as_optax_expects")

PARAMS = {"table": jnp.ones((2000, 4)), "small": jnp.ones((5, 4)), "bias": jnp.ones(4)}
IDS = np.array([[3], [7], [3]], np.int32)
GRADS = {
    "table": bcoo(np.ones((3, 4), np.float32), IDS, (2000, 4)),
    "small": bcoo(np.ones((3, 4), np.float32), IDS % 5, (5, 4)),
    "bias": jnp.ones(4),
}


def over(function):
    return lambda tree: jax.tree.map(function, tree)


# Whether a leaf is chosen, and whether the number of rows decides.
BY_SIZE = {
    "size": over(lambda x: x.size > 1000),
    "rows": over(lambda x: x.ndim > 1 and x.shape[0] >= 5),
    "more rows than a probe has": over(lambda x: x.size > 1500 * 4),
    "not the table": over(lambda x: x.size < 1000),
}
BY_OTHERS = {
    "rank": over(lambda x: x.ndim > 1),
    "columns": over(lambda x: x.shape[-1] == 4),
    "name": lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: path[0].key == "table", tree
    ),
    "both are of one kind": over(lambda x: x.size > 2),
}


def labels(mask):
    return lambda tree: jax.tree.map(lambda x: "a" if x else "b", mask(tree))


WAYS = {
    "adamw": lambda mask: optax.adamw(0.1, weight_decay=0.5, mask=mask),
    "add_decayed_weights": lambda mask: optax.add_decayed_weights(0.5, mask),
    "masked": lambda mask: optax.masked(optax.adam(0.1), mask),
    "partition": lambda mask: optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)},
        labels(mask) if callable(mask) else jax.tree.map(lambda x: "ba"[x], mask),
    ),
    "inside of a cond": lambda mask: optax.apply_if_finite(
        optax.add_decayed_weights(0.5, mask), 3
    ),
}
EXPECTED = r"sizes of parameters.* Call such a function with"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", BY_SIZE)
def test_sizes_are_refused(mask, way):
    """They see the touched rows, which are fewer: weight decay would be off."""
    tx = osa.lazy(WAYS[way](BY_SIZE[mask]))
    # Coalesced, for the cond of `apply_if_finite`.
    grads = {key: osa.coalesce(GRADS[key]) for key in ("table", "small")}
    grads["bias"] = GRADS["bias"]

    def step(state, grads):
        return tx.update(grads, state, PARAMS)

    with pytest.raises(ValueError, match=EXPECTED):
        jax.eval_shape(lambda: step(tx.init(PARAMS), grads))
    with pytest.raises(ValueError, match=EXPECTED):
        step(tx.init(PARAMS), grads)


@pytest.mark.slow
@pytest.mark.parametrize("way", [w for w in WAYS if w != "inside of a cond"])
@pytest.mark.parametrize("mask", BY_OTHERS)
def test_others_are_those_of_the_table(mask, way):
    """And so is the remedy: a tree."""
    function = BY_OTHERS[mask]
    results = []
    for given in (function, function(PARAMS)):
        tx = osa.lazy(WAYS[way](given))
        updates, _ = jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
        results.append(osa.apply_updates(PARAMS, updates))
    assert_identical(*results)


@pytest.mark.slow
def test_equal_shapes_by_chance():
    """Two tables of which equally many rows are touched share random bits."""
    params = {"a": jnp.ones((9, 4), jnp.bfloat16), "b": jnp.ones((8, 4), jnp.bfloat16)}
    grads = {
        name: bcoo(np.ones((3, 4), jnp.bfloat16), IDS, table.shape)
        for name, table in params.items()
    }
    tx = osa.lazy(osa.stochastic_rounding(optax.adam(0.1), 0))
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    new = osa.apply_updates(params, updates)
    assert all((new[name][7] < 1).all() for name in params)


@pytest.mark.slow
def test_what_takes_a_row_for_a_vector():
    """`adaptive_grad_clip` squeezes: of one row it takes another norm than of two."""
    tx = osa.lazy(optax.adaptive_grad_clip(0.1))
    table = PARAMS["table"]
    state = tx.init(table)
    one = jax.tree.map(lambda x: x[:1], GRADS["table"])
    with pytest.raises(ValueError, match=r"2000 rows\) and for its touched rows \(1\)"):
        tx.update(one, state, table)
    tx.update(GRADS["table"], state, table)
    tx.update(None, state, table)
