"""`flax_nnx.value_and_grad` against `nnx.value_and_grad`, with all side effects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from optax_sparse_adam import flax_nnx

from ..helpers.gradients import assert_row_sparse, dense, is_bcoo
from ..helpers.nnx import IDS, Model, mean_square, model
from ..helpers.support import slow_but


@pytest.fixture(autouse=True)
def default_promotion(strict):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def tied():
    """The table of `again` is that of `embed`."""
    new = model()
    new.again = nnx.Embed(16, 4, rngs=nnx.Rngs(1))
    new.again.embedding = new.embed.embedding
    return new


def sum_of_two(a, b, ids):
    return mean_square(a, ids) + 2 * mean_square(b, ids)


def both_tables(model, ids):
    return mean_square(model, ids) * jnp.sum(model.again(ids[0]))


def additions(model, ids):
    model.sow(nnx.Intermediate, "ids", ids)
    model.extra = nnx.Variable(jnp.ones(2))
    model.itself = model
    model.name = "changed"
    return mean_square(model, ids)


def deletion(model, ids):
    value = mean_square(model, ids)
    del model.dropout
    return value


def overwritten(model, ids):
    model.out.bias[...] += 1
    return mean_square(model, ids)


def aux_of_all_kinds(model, ids):
    aux = {"model": model, "mean": model.norm.mean, "out": model(ids), "text": "x"}
    return mean_square(model, ids), aux


def inside(transform):
    def loss(model, ids):
        return jnp.mean(transform(lambda model, ids: model(ids))(model, ids) ** 2)

    return loss


def statistics(model, ids):
    return jnp.sum(model.embed(ids) * (model.norm.mean + model.norm.var))


DiffState = nnx.DiffState
# (function, keyword arguments, what makes its arguments, row-sparse gradients)
CASES = {
    "module": (mean_square, {}, lambda: (model(),), 1),
    "two modules": (sum_of_two, {"argnums": (1, 0)}, lambda: (model(), model(1)), 2),
    "second module": (sum_of_two, {"argnums": 1}, lambda: (model(), model(1)), 1),
    "one module twice": (sum_of_two, {"argnums": (0, 1)}, lambda: (model(),) * 2, 1),
    "shared keys": (
        sum_of_two,
        {"argnums": (0, 1)},
        lambda: tuple(map(Model, (nnx.Rngs(0),) * 2)),
        2,
    ),
    "tied tables": (both_tables, {}, lambda: (tied(),), 1),
    "dict of modules": (
        lambda models, ids: sum_of_two(*models.values(), ids),
        {},
        lambda: ({"a": model(), "b": model(1)},),
        2,
    ),
    "array, too": (
        lambda model, w, ids: mean_square(model, ids) * w,
        {"argnums": (0, 1)},
        lambda: (model(), jnp.float32(2)),
        1,
    ),
    "keys as argument": (
        lambda m, rngs, ids: jnp.sum(m.embed(ids) * rngs.normal((2, 3, 4))),
        {},
        lambda: (model(), nnx.Rngs(3)),
        1,
    ),
    "variable": (
        lambda table, ids: jnp.sum(table[ids] ** 2),
        {},
        lambda: (nnx.BatchStat(jnp.ones((16, 4))),),
        1,
    ),
    "state": (
        lambda state, ids: jnp.sum(state["embed"]["embedding"][ids] ** 2),
        {},
        lambda: (nnx.state(model(), nnx.Param),),
        1,
    ),
    "filter": (
        mean_square,
        {"argnums": DiffState(0, nnx.PathContains("embed"))},
        lambda: (model(),),
        1,
    ),
    "filter of statistics": (
        statistics,
        {"argnums": DiffState(0, (nnx.BatchStat, nnx.Param))},
        lambda: (model(),),
        1,
    ),
    "two filters": (
        sum_of_two,
        {"argnums": (DiffState(0, nnx.PathContains("out")), 1)},
        lambda: (model(), model(1)),
        1,
    ),
    "additions": (additions, {}, lambda: (model(),), 1),
    "deletion": (deletion, {}, lambda: (model(),), 1),
    "overwritten parameter": (overwritten, {}, lambda: (model(),), 1),
    "aux": (aux_of_all_kinds, {"has_aux": True}, lambda: (model(),), 1),
    "aux in a list": (
        lambda m, ids: [mean_square(m, ids), m.embed.embedding[...]],
        {"has_aux": True},
        lambda: (model(),),
        1,
    ),
    "negative, behind a default": (
        lambda m, ids, scale=2.0: scale**2 * mean_square(m, ids),
        {"argnums": (0, -1)},
        lambda: (model(),),
        1,
    ),
    "jit inside": (inside(nnx.jit), {}, lambda: (model(),), 1),
    "remat inside": (inside(nnx.remat), {}, lambda: (model(),), 1),
}


def assert_same(actual, expected):
    """Equal to 1e-6, keys and integers to the bit, and equal structures."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = map(jax.tree.leaves, (actual, expected))
    for a, b in zip(*leaves, strict=True):
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jnp.inexact):
            # Sums over a batch are taken in other orders.
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("name", slow_but(CASES, *list(CASES)[::10]))
def test_same_as_nnx(name):
    """Value, gradients, `aux`, and all that the loss does to its arguments."""
    function, kwargs, make, tables = CASES[name]
    expected_args, args = make(), make()
    expected = nnx.value_and_grad(function, **kwargs)(*expected_args, IDS)
    actual = flax_nnx.value_and_grad(function, **kwargs)(*args, IDS)
    leaves = jax.tree.leaves(actual, is_leaf=is_bcoo)
    # What the loss does not use has a BCOO as well, with nothing stored.
    assert sum(is_bcoo(leaf) and leaf.nse > 0 for leaf in leaves) == tables
    # The graph holds what is static, and which objects are the same.
    graph, state = nnx.split((args, actual[0]))
    expected_graph, expected_state = nnx.split((expected_args, expected[0]))
    assert graph == expected_graph
    assert_same(state, expected_state)
    assert_same(dense(actual[1]), expected[1])


def test_identities_are_kept():
    new = model()
    variables = {path: x for path, x in nnx.iter_graph(new) if is_variable(x)}
    (_, aux), _ = flax_nnx.value_and_grad(aux_of_all_kinds, has_aux=True)(new, IDS)
    assert aux["model"] is new
    assert aux["mean"] is new.norm.mean
    for path, x in nnx.iter_graph(new):
        assert not is_variable(x) or x is variables[path]
    table = new.embed.embedding[...]
    flax_nnx.grad(mean_square)(new, IDS)
    assert new.embed.embedding[...] is table  # not an output of any program


def is_variable(x):
    return isinstance(x, nnx.Variable)


def test_sparse_names_leaves_of_the_gradient():
    def embed(path, leaf):
        return "embedding" in jax.tree_util.keystr(path)

    grads = flax_nnx.grad(mean_square, sparse=embed)(model(), IDS)
    assert_row_sparse(grads.embed.embedding[...], (16, 4), "float32", 6)
    grads = flax_nnx.grad(mean_square, sparse=False)(model(), IDS)
    assert not is_bcoo(grads.embed.embedding[...])
    with pytest.raises(ValueError, match=r"\['out'\]\['kernel'\]"):
        flax_nnx.grad(mean_square, sparse=lambda path, leaf: leaf.ndim == 2)(
            model(), IDS
        )


def test_module_as_keyword():
    value, grads = flax_nnx.value_and_grad(mean_square)(ids=IDS, model=model())
    expected = flax_nnx.value_and_grad(mean_square)(model(), IDS)
    assert_same((value, dense(grads)), dense(expected))


OUTSIDE = model()
# (function, keyword arguments, arguments, error, words)
REFUSED = {
    "argument missing": (
        mean_square,
        {"argnums": 2},
        (model(), IDS),
        TypeError,
        "got 2",
    ),
    "argument twice": (
        sum_of_two,
        {"argnums": (0, -3)},
        (model(), model(), IDS),
        ValueError,
        "0 is repeated",
    ),
    "integers": (mean_square, {"argnums": 1}, (model(), IDS), TypeError, "int32"),
    "no pair": (mean_square, {"has_aux": True}, (model(), IDS), TypeError, "pair"),
    "captured module": (
        lambda w, ids: mean_square(OUTSIDE, ids) * w,
        {},
        (1.0, IDS),
        Exception,
        "different trace level",
    ),
    "shared, one differentiated": (
        sum_of_two,
        {},
        (*(OUTSIDE,) * 2, IDS),
        ValueError,
        "aliasing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, kwargs, args, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        flax_nnx.value_and_grad(function, **kwargs)(*args)
    flax_nnx.value_and_grad(mean_square)(model(), IDS)  # leaves no context behind
