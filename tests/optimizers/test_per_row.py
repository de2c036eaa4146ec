"""`per_row`: each row has a state and a clock of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.identity import numbers, train
from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    row_sums,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPE = (9, 4)


def steps(rng, count=6, dtype="float32"):
    for _ in range(count):
        yield random_entries(rng, SHAPE, 1, 6, dtype, outside=True)


def test_formula(dtype):
    """Adam with the bias correction of the row's own steps, in a loop over rows."""
    rng = np.random.default_rng(0)
    lr, b1, b2, eps = 0.1, 0.9, 0.99, 1e-8
    start = rng.normal(size=SHAPE)
    table, mu, nu = start.copy(), np.zeros(SHAPE), np.zeros(SHAPE)
    count = np.zeros(SHAPE[0], np.int32)
    grads = []
    for values, indices in steps(rng, dtype=dtype):
        grads.append(bcoo(values, indices, SHAPE))
        for (row,), g in row_sums(values, indices, SHAPE).items():
            count[row] += 1
            mu[row] += (1 - b1) * (g - mu[row])
            nu[row] += (1 - b2) * (g * g - nu[row])
            mean, square = mu[row] / (1 - b1 ** count[row]), 1 - b2 ** count[row]
            table[row] -= lr * mean / (np.sqrt(nu[row] / square) + eps)
    assert len(set(count.tolist())) > 2
    tx = osa.lazy(osa.per_row(optax.adam(lr, b1, b2, eps)))
    actual, state = train(tx, jnp.asarray(start, dtype), grads)
    assert_identical(state[0].count, jnp.asarray(count))
    # optax computes 1 - b2**t with cancellation: 1e-7 of 1e-2 in float32.
    tol = 1e-5 if dtype == "float32" else 1e-13
    assert_close(actual, table, tol, magnitude=1.0)


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "schedule": optax.adamw(optax.linear_schedule(0.5, 0.0, 4), weight_decay=0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "random keys": optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1, momentum=0.9)
    ),
    "stateless": optax.sgd(0.1),
}


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "schedule", "random keys"))
def test_each_row_is_a_parameter(name):
    """It gets what the optimiser gives it alone, at the steps that touch it."""
    tx, rng = OPTIMIZERS[name], np.random.default_rng(0)
    tol = TOLERANCE["float32"].numpy
    start = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    batches = list(steps(rng))
    lifted = osa.lazy(osa.per_row(tx))
    actual, state = train(lifted, start, [bcoo(*b, SHAPE) for b in batches])
    for row in range(SHAPE[0]):
        sums = [row_sums(*batch, SHAPE).get((row,)) for batch in batches]
        grads = [jnp.asarray(g, jnp.float32) for g in sums if g is not None]
        expected, row_state = train(tx, start[row], grads)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(row_state), strict=True)
        for a, e in [(actual, expected), *pairs]:
            assert_close(numbers(a[row]), numbers(e), tol, magnitude=1.0)


def test_state():
    """That of the inner transformation, with counts by parameter and row."""
    shapes = {"table": SHAPE, "bias": (3,), "scale": ()}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()} | {"none": None}
    tx = optax.chain(optax.scale_by_adam(), optax.scale(-0.1))
    state = osa.per_row(tx).init(params)
    count = {n: jnp.zeros(shape[:1], jnp.int32) for n, shape in shapes.items()}
    assert_identical(state[0].count, count | {"none": None})
    assert_identical(
        state[0]._replace(count=None), tx.init(params)[0]._replace(count=None)
    )
    assert state[1] == optax.EmptyState()
    assert_identical(osa.per_row(tx).init({}), tx.init({}))
    assert_identical(osa.per_row(tx).update({}, tx.init({}))[0], {})


def test_extra_arguments_and_missing_parameters():
    tx = osa.per_row(optax.polyak_sgd())
    params = jnp.asarray([[3.0, 4.0], [0.0, 2.0]])
    state = tx.init(params)
    updates, _ = tx.update(params, state, params, value=jnp.float32(0.5))
    # Polyak's step: value / norm**2, of each row.
    expected = np.array([[-3.0, -4.0], [0.0, -2.0]]) * 0.5 / np.array([[25.0], [4.0]])
    assert_close(updates, expected, TOLERANCE["float32"].numpy)
    tx = osa.per_row(optax.adam(0.1))
    assert_identical(
        tx.update(params, tx.init(params)), tx.update(params, tx.init(params), params)
    )


def test_none():
    """A gradient of None leaves its parameter's state, and all of them everything."""
    tx = osa.per_row(optax.chain(optax.scale_by_adam(), optax.scale(-0.1)))
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 1)), "c": None, "d": None}
    state = tx.init(params)
    grads = params | {"a": None}
    updates, new = tx.update(grads, state, params)
    alone = {"b": params["b"]}
    expected, alone_state = tx.update(alone, tx.init(alone), alone)
    assert_identical(updates, expected | {"a": None, "c": None, "d": None})
    for field in ("count", "mu", "nu"):
        old, both = getattr(state[0], field), getattr(new[0], field)
        assert_identical(both, old | getattr(alone_state[0], field))
    nothing = dict.fromkeys("abcd")
    assert_identical(tx.update(nothing, new, params), (nothing, new))


def test_two_sparse_axes_are_refused():
    shape = (4, 3, 2)
    grad = bcoo(*random_entries(np.random.default_rng(0), shape, 2, 5), shape)
    tx = osa.lazy(osa.per_row(optax.adam(0.1)))
    with pytest.raises(ValueError, match=r"tables with \[2\] sparse axes"):
        tx.update(grad, tx.init(jnp.ones(shape)))


@pytest.mark.parametrize(
    "tx",
    [
        osa.per_row(optax.adam(0.1)),
        osa.scale_by_rowwise_adam(),
        osa.scale_by_rowwise_rss(),
        osa.stochastic_rounding(optax.adam(0.1), 0),
    ],
    ids=["per_row", "scale_by_rowwise_adam", "scale_by_rowwise_rss", "rounding"],
)
def test_row_sparse_gradients_need_lazy(tx):
    params = {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}
    entries = random_entries(np.random.default_rng(0), SHAPE, 1, 6)
    grads = {"table": bcoo(*entries, SHAPE), "bias": jnp.ones(3)}
    with pytest.raises(TypeError, match=r"got a BCOO\. Put it inside lazy"):
        tx.update(grads, tx.init(params), params)
    jax.eval_shape(osa.lazy(tx).update, grads, tx.init(params), params)


def test_a_state_of_another_tree_for_each_parameter():
    """That of sm3 has as many arrays as the parameter has axes, less one a row."""
    tx = osa.lazy(osa.per_row(optax.sm3(0.1)))
    tx.init({"a": jnp.ones((9, 4)), "b": jnp.ones((5, 2))})
    with pytest.raises(ValueError, match=r"per_row needs.*one tree for all"):
        tx.init({"a": jnp.ones((9, 4)), "bias": jnp.ones(9)})
