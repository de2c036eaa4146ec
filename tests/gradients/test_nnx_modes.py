"""`flax_nnx.value_and_grad` and `grad` as `nnx` has them: modes, options, refusals."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.gradients import dense, is_bcoo
from ..helpers.support import TOLERANCE, assert_close, slow_but

IDS = jnp.array([3, 7, 3])


@pytest.fixture(autouse=True)
def default_promotion(strict):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0.0))

    def __call__(self, ids):
        self.calls[...] += 1
        return self.out(self.embed(ids))


def model():
    return Model(nnx.Rngs(0))


def mean_square(model, ids=IDS):
    return jnp.mean(model(ids) ** 2)


def with_aux(model):
    out = model(IDS)
    return jnp.mean(out**2), {"out": out, "variable": nnx.Variable(out[0])}


def of_pairs(pair, other):
    return jnp.sum(pair[0](IDS)) * jnp.sum(other(IDS)) + pair[1]


MODES = [
    {},
    {"graph": True, "graph_updates": False},
    {"graph": False},
    {"graph": False, "graph_updates": False},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_sparse_is_of_the_paths_and_trees_of_the_gradient(mode):
    def path_of(path):
        return jax.tree_util.keystr(path).removesuffix(".value")

    def gradient(sparse, **options):
        return flax_nnx.grad(of_two, sparse=sparse, **options, **mode)(*models, IDS)

    def of_two(one, other, ids):
        return mean_square(one, ids) + mean_square(other, ids)

    models = model(), model()
    paths = []

    def second(path, leaf):
        paths.append(path_of(path))
        return "embedding" in paths[-1] and paths[-1].startswith("[1]")

    one, other = gradient(second, argnums=(0, 1))
    assert not is_bcoo(one.embed.embedding[...])
    assert is_bcoo(other.embed.embedding[...])
    leaves = jax.tree_util.tree_leaves_with_path((one, other), is_leaf=is_bcoo)
    assert paths == [path_of(path) for path, _ in leaves]

    with pytest.raises(TypeError, match="argnums"):
        gradient(second, argnums=7)

    for is_sparse in (True, False):
        marks = jax.tree.map(lambda _: False, one)
        marks.embed.embedding.set_value(is_sparse)
        assert is_bcoo(gradient(marks).embed.embedding[...]) == is_sparse
        one, other = gradient((marks, False), argnums=(0, 1))
        assert is_bcoo(one.embed.embedding[...]) == is_sparse
        assert not is_bcoo(other.embed.embedding[...])


CALLS = {
    "value_and_grad": (mean_square, {}, lambda: (model(),)),
    "aux": (with_aux, {"has_aux": True}, lambda: (model(),)),
    "arguments": (
        of_pairs,
        {"argnums": (0, 1)},
        lambda: ((model(), jnp.array(2.0)), model()),
    ),
    "integers": (
        lambda pair: jnp.sum(pair[0](IDS)) * pair[1],
        {"allow_int": True},
        lambda: ((model(), jnp.array(2)),),
    ),
    "holomorphic": (
        lambda v: jnp.sum(v[...] ** 2),
        {"holomorphic": True},
        lambda: (nnx.Param(jnp.array([1 + 2j, 3j])),),
    ),
}


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(dense(tree))]


# Each call in each mode, as a decorator or not in turns.
TURNS = [
    (name, mode, bool((number + other) % 2))
    for number, name in enumerate(CALLS)
    for other, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("name", "mode", "as_decorator"), slow_but(TURNS, *TURNS[5:7]))
def test_same_as_nnx(name, mode, as_decorator):
    fun, options, make = CALLS[name]
    results, arguments = [], []
    for transform in (flax_nnx.value_and_grad, nnx.value_and_grad):
        if as_decorator:
            made = transform(**options, **mode)(fun)
        else:
            made = transform(fun, **options, **mode)
        args = make()
        results.append(made(*args))
        arguments.append(args)
    (value, grads), (expected, expected_grads) = results
    tol = TOLERANCE["float32"].numpy
    for got, wanted in (
        (value, expected),
        (dense(grads), expected_grads),
        tuple(arguments),  # what the loss has done to them
    ):
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        for one, other in zip(arrays(got), arrays(wanted), strict=True):
            assert one.dtype == other.dtype
            if one.dtype != jax.dtypes.float0:
                assert_close(abs(one), abs(other), tol, magnitude=1.0)
    if name == "aux":
        assert is_bcoo(nnx.to_pure_dict(nnx.state(grads))["embed"]["embedding"])


def test_mode_is_that_of_the_context():
    with nnx.set_graph_updates(False):
        grads = flax_nnx.grad(mean_square)(model())
    assert isinstance(grads, Model)


def test_grad_as_decorator():
    @flax_nnx.grad(has_aux=True)
    def loss(model):
        return with_aux(model)

    grads, aux = loss(model())
    assert is_bcoo(grads.embed.embedding[...])
    assert set(aux) == {"out", "variable"}


class Net(nnx.Module):
    def loss(self):
        return jnp.array(0.0)


MADE = {
    "bound": (lambda f: f(Net().loss), "does not support bound methods"),
    "partial": (
        lambda f: f(functools.partial(Net().loss)),
        "does not support bound methods",
    ),
    "module": (lambda f: f(mean_square, argnums=model()), "Found graph node of type"),
    "variable": (
        lambda f: f(mean_square, argnums=nnx.Param(jnp.array(0))),
        "Found Variable of type Param",
    ),
    "DiffState": (
        lambda f: f(mean_square, argnums=nnx.DiffState(0, nnx.Param), graph=False),
        "cannot contain `DiffState` objects when",
    ),
}


@pytest.mark.parametrize("transform", ["value_and_grad", "grad"])
@pytest.mark.parametrize("name", MADE)
def test_refused_when_made(name, transform):
    make, words = MADE[name]
    for module in (nnx, flax_nnx):
        with pytest.raises(ValueError, match=words) as raised:
            make(getattr(module, transform))
    assert name not in ("bound", "partial") or f"flax_nnx.{transform}" in str(
        raised.value
    )


def test_reduce_axes():
    with pytest.raises(NotImplementedError, match="reduce_axes"):
        flax_nnx.grad(mean_square, reduce_axes=("x",))


def test_shared_variables_in_tree_mode():
    shared = model()
    shared.again = shared.embed
    with pytest.raises(ValueError, match="aliasing"):
        flax_nnx.grad(mean_square, graph=False)(shared)


def test_one_signature():
    """`grad` takes what `value_and_grad` takes."""
    signature = inspect.signature(flax_nnx.grad)
    assert signature == inspect.signature(flax_nnx.value_and_grad)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparce'"):
        flax_nnx.grad(mean_square, sparce=False)


@pytest.mark.parametrize("mode", MODES)
def test_update_takes_what_that_of_flax_takes(mode):
    """Gradients that are modules, and those of variables that are not trained."""
    ours, theirs = model(), model()
    for new, update in (ours, flax_nnx.update), (theirs, nnx.Optimizer.update):
        trained = nnx.All(nnx.Param, nnx.PathContains("embed"))
        optimizer = nnx.Optimizer(new, osa.sparse_adam(0.1), wrt=trained)
        grads = flax_nnx.grad(mean_square, **mode)(new)
        assert is_bcoo(grads.embed.embedding[...])
        update(optimizer, new, grads)
    chex.assert_trees_all_close(nnx.state(ours), nnx.state(theirs), rtol=1e-6)
    assert not np.array_equal(ours.embed.embedding[...], model().embed.embedding[...])


@pytest.mark.parametrize("mode", MODES[1:])
def test_read_of_other_variables(mode):
    """In these modes all variables are differentiated; the optimiser trains some."""
    new = model()
    optimizer = nnx.Optimizer(new, osa.exact_adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="pass those that it was made of"):
        flax_nnx.grad(mean_square, read=optimizer, **mode)(new)
