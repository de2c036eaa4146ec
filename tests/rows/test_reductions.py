"""Functions of all arrays of a gradient: refused, or NaN; and what to call instead."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree

import optax_sparse_adam as osa

from ..helpers.support import assert_close, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)
IDS = np.array([[3, 7, 3], [19, 5, 20]])
LOSSES = {
    "rows": lambda t: jnp.sum(jnp.sin(t.at[IDS].get(mode="fill", fill_value=0))),
    "bags": lambda t: jnp.sum(jnp.sin(osa.embedding_bag(t, IDS))),
    "one row": lambda t: jnp.sum(jnp.sin(t[5])),
}


def leaves(function):
    return lambda grads: function(jax.tree.leaves(grads))


def total(function):
    return leaves(lambda arrays: sum(map(function, arrays)))


REDUCTIONS = {
    "optax.tree.sum": optax.tree.sum,
    "optax.tree.max": optax.tree.max,
    "optax.tree.min": optax.tree.min,
    "optax.tree.norm": optax.tree.norm,
    "optax.tree.norm of order 1": functools.partial(optax.tree.norm, ord=1),
    "optax.tree.norm of order inf": functools.partial(optax.tree.norm, ord=jnp.inf),
    "optax.tree.vdot": lambda grads: optax.tree.vdot(grads, grads),
    "sum": total(jnp.sum),
    "sum of squares": total(lambda x: jnp.sum(x**2)),
    "sum of vdot": total(lambda x: jnp.vdot(x, x)),
    "mean": total(jnp.mean),
    "largest": leaves(lambda arrays: max(map(jnp.max, arrays))),
    "maximum": lambda g: jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, g)),
    "reduce": lambda g: jax.tree.reduce(lambda a, x: a + jnp.sum(x), g, 0.0),
    "tree.reduce": lambda g: jax.tree.reduce(operator.add, jax.tree.map(jnp.sum, g)),
    "ravel": lambda grads: jnp.linalg.norm(ravel_pytree(grads)[0]),
    "concatenate": leaves(lambda xs: jnp.concatenate([x.ravel() for x in xs]).max()),
    "stack": leaves(lambda arrays: jnp.stack([jnp.max(x) for x in arrays]).max()),
    "hypot": leaves(lambda xs: functools.reduce(jnp.hypot, map(jnp.linalg.norm, xs))),
}
ON_HOST = {
    "floats": total(lambda x: float(jnp.sum(x))),
    "floats of squares": total(lambda x: float(jnp.sum(x * x))),
    "numpy": total(lambda x: float(np.sum(np.asarray(x)))),
    "numpy squares": total(lambda x: float(np.sum(np.square(np.asarray(x))))),
}
FEW = ("optax.tree.sum", "optax.tree.max", "optax.tree.norm", "sum", "ravel")


@pytest.mark.parametrize("kind", slow_but(LOSSES, "rows"))
@pytest.mark.parametrize("name", slow_but(REDUCTIONS, *FEW))
def test_refused(name, kind):
    """While it is traced, alone and within a tree of others."""

    def program(table):
        grad = osa.grad(LOSSES[kind])(table)
        return REDUCTIONS[name]({"table": grad, "w": jnp.ones(3)})

    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(program, TABLE)
    with pytest.raises((TypeError, ValueError)):
        program(TABLE)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", slow_but(ON_HOST, "floats"))
def test_python_numbers(name, kind):
    with np.errstate(over="ignore"):
        assert np.isnan(ON_HOST[name](osa.grad(LOSSES[kind])(TABLE)))


def test_checks_of_numbers_pass():
    """What asks whether numbers are finite, or replaces those that are not."""
    grad = osa.grad(LOSSES["bags"])(TABLE)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(grad))
    for function in (
        jnp.nan_to_num,
        lambda x: jnp.where(jnp.isfinite(x), x, 0),
        lambda x: x * 0.5 if x.dtype == "float32" else x,
        np.asarray,
    ):
        found = osa.coalesce(jax.tree.map(function, grad)).data
        factor = osa.coalesce(grad).data / np.where(found == 0, 1, found)
        assert set(np.unique(factor)) <= {0.0, 1.0, 2.0}


HOST_ARRAYS = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "np.linalg.norm": np.linalg.norm,
    "np.mean": np.mean,
    "np.histogram": np.histogram,
    "np.save": lambda grad: np.save("/dev/null", grad),
    "of type": lambda grad: np.asarray(grad, np.float32),
    "jnp.asarray": jnp.asarray,
    "stack": lambda grad: np.stack([grad, grad]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "bags"])
@pytest.mark.parametrize("name", HOST_ARRAYS)
def test_no_array_of_numpy(name, kind):
    """At once: NumPy would ask for one number after another."""
    grad = osa.grad(LOSSES[kind])(jnp.ones((1_000_000, 64)))
    with pytest.raises(TypeError, match="gradient_stats"):
        HOST_ARRAYS[name](grad)


@pytest.mark.torch
@pytest.mark.parametrize("function", ["as_tensor", "tensor"])
def test_no_tensor_of_torch(function):
    torch = pytest.importorskip("torch")
    grad = osa.grad(LOSSES["rows"])(TABLE)
    with pytest.raises((TypeError, IndexError, ValueError, RuntimeError)):
        getattr(torch, function)(grad)


@pytest.mark.parametrize("kind", slow_but(LOSSES, "rows", "bags"))
@pytest.mark.parametrize("way", slow_but(["eager", "jit"], "jit"))
def test_stats(kind, way):
    """Against JAX's dense gradient."""

    def program(table):
        grads = {"t": osa.grad(LOSSES[kind])(table), "w": 2 * table, "n": None}
        return osa.gradient_stats(grads | {"s": jnp.float32(-3)})

    stats = (jax.jit(program) if way == "jit" else program)(TABLE)
    dense = np.asarray(jax.grad(LOSSES[kind])(TABLE), np.float64)
    assert_close(stats["t"].norm, np.linalg.norm(dense), 1e-6)
    assert stats["t"].touched == (dense != 0).any(1).sum()
    assert_close(stats["w"].norm, 2 * np.linalg.norm(TABLE), 1e-6)
    assert stats["w"].touched == 20
    assert (stats["n"], *map(float, stats["s"])) == (None, 3.0, 1.0)


@pytest.mark.slow
def test_stats_of_other_gradients():
    """By hand, in bfloat16, of two sparse axes, unique with padding, with nothing."""
    data, ids = jnp.array([[3.0], [0.0], [4.0]]), jnp.array([[1], [-1], [8]])
    grad = BCOO((data, ids), shape=(9, 1), unique_indices=True)
    assert tuple(map(float, osa.gradient_stats(grad))) == (5.0, 2.0)
    small = BCOO((data.astype(jnp.bfloat16), ids), shape=(9, 1))
    assert osa.gradient_stats(small).norm.dtype == jnp.float32
    pairs = BCOO((data[:, 0], jnp.array([[0, 1], [0, 1], [2, 0]])), shape=(3, 2))
    assert tuple(map(float, osa.gradient_stats(pairs))) == (5.0, 2.0)
    nothing = osa.grad(lambda t: 0.0)(TABLE)
    assert tuple(map(float, osa.gradient_stats(nothing))) == (0.0, 0.0)
    with pytest.raises(TypeError, match="integer indices"):
        osa.gradient_stats(jax.tree.map(lambda x: 0.5 * x, nothing))
