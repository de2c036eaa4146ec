"""`lazy`: updates and states have the types that they have in optax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from tests.helpers.support import TOLERANCE, assert_close, assert_identical, bcoo

SHAPE, IDS = (10, 4), np.array([[3], [7]])
TYPES = ["float32", "bfloat16", "float16"]
INNER = {
    "adam": optax.adam,
    "amsgrad": optax.amsgrad,
    "lion": optax.lion,
    "momentum": lambda rate, mu_dtype=None: optax.sgd(
        rate, momentum=0.9, accumulator_dtype=mu_dtype
    ),
    "adagrad": lambda rate, mu_dtype=None: optax.adagrad(rate),
    "rmsprop": lambda rate, mu_dtype=None: optax.rmsprop(rate),
    "clipped": lambda rate, mu_dtype=None: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(rate, mu_dtype=mu_dtype)
    ),
}
MIXED = [
    case
    for case in itertools.product(TYPES, TYPES, [None, "float32", "bfloat16"])
    if len({x for x in case if x}) > 1
]


@pytest.fixture(autouse=True)
def as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def types(tree):
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]


def two_steps(update, state, params, grad):
    """Types of both steps, the first of which may widen the state."""
    first, state = update(grad, state, params)
    second, state = update(grad, state, params)
    return [(first.dtype.name, second.dtype.name), types(state)], second, state


def check_types(name, dtype, grad_dtype, mu_dtype):
    tx = INNER[name](0.1, mu_dtype=mu_dtype)
    params = jnp.full(SHAPE, 0.5, dtype)
    values = np.array([[0.5], [-2.0]], np.float32) * np.ones((2, 4), np.float32)
    grad = bcoo(jnp.asarray(values, grad_dtype), IDS, SHAPE)
    dense = jnp.zeros(SHAPE, grad_dtype).at[IDS[:, 0]].set(grad.data)
    state = tx.init(params)
    expected, update, news = two_steps(tx.update, state, params, dense)
    lifted = osa.lazy(tx).update
    found = two_steps(jax.jit(lifted), state, params, grad)
    assert found[0] == expected
    assert jax.eval_shape(lifted, grad, state, params)[0].dtype.name == expected[0][0]
    # XLA rounds less often in a program: a unit of the lowest type.
    used = [x for x in (dtype, grad_dtype, mu_dtype) if x]
    tol = 4 * float(max(jnp.finfo(x).eps for x in used))
    rows = found[1].todense()[IDS[:, 0]]
    assert_close(*(x.astype("float32") for x in (rows, update[IDS[:, 0]])), tol)
    trees = map(jax.tree.leaves, (found[2], state, news))
    for new, old, dense_new in zip(*trees, strict=True):
        if new.shape == SHAPE:  # other rows keep their values
            assert_identical(new[:3], old[:3].astype(new.dtype))
            args = (x[IDS[:, 0]].astype("float32") for x in (new, dense_new))
            assert_close(*args, tol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "types",
    [("float32", "bfloat16", None), ("bfloat16", "float32", None)],
    ids=["narrow gradient", "wide gradient"],
)
def test_types_of_adam(types):
    check_types("adam", *types)


@pytest.mark.slow
@pytest.mark.parametrize("name", INNER)
def test_types_of_optax(name):
    takes_type = name not in ("adagrad", "rmsprop")
    for case in MIXED if name == "adam" else MIXED[::3]:
        if takes_type or case[2] is None:
            check_types(name, *case)


@pytest.mark.slow
def test_a_widened_state_keeps_its_blocks():
    """Blocks of rows, of a table that is widened first."""
    rows = 4096
    params = jnp.full((rows, 32), 0.5, "float16")
    grad = bcoo(jnp.ones((rows, 32)), np.arange(rows)[:, None], params.shape)
    tx = optax.adam(0.1)
    state = tx.init(params)
    update, new = jax.jit(osa.lazy(tx).update)(grad, state, params)
    expected, dense_new = tx.update(grad.data, state, params)
    assert types(new) == types(dense_new) == ["int32", "float32", "float16"]
    assert_close(update.todense(), expected, 2 * float(jnp.finfo("float16").eps))
    assert_close(new[0].mu, dense_new[0].mu, TOLERANCE["float32"].numpy)
