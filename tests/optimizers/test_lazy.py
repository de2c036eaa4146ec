"""`lazy(inner)`: what it does to touched rows, to other leaves, and to wrong input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa

from ..helpers.identity import assert_identity, make_task, train
from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    bcoo,
    random_entries,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPE = (9, 4)


def scale_by_extra():
    """A transformation with an argument of its own."""

    def update(updates, state, params=None, *, factor, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


# What optax has, chains and wrappers of it among them, is in `test_lazy_optax`.
CHAINS = {
    "nested": optax.chain(
        optax.chain(optax.zero_nans(), optax.clip_by_global_norm(0.5)),
        optax.named_chain(("a", optax.scale_by_adam()), ("b", optax.scale(-0.1))),
    ),
    "masked decay": optax.adamw(0.1, mask={"table": False, "bias": True}),
    "extra arguments": optax.chain(scale_by_extra(), optax.adam(0.1)),
    "low precision moment": optax.adam(0.1, mu_dtype="bfloat16"),
}


@pytest.mark.parametrize("rows", [(2, 5, 7, 11), range(13)], ids=["some", "all"])
@pytest.mark.parametrize("name", slow_but(CHAINS, "extra arguments", "nested"))
def test_touched_rows_are_a_table(name, rows):
    """A chain sees the rows of all leaves together; other rows keep every bit."""
    tx, task = CHAINS[name], make_task(rows, dtype="float32")
    # Sums over rows in another order: one rounding, of bfloat16 if that is stored.
    tol = 1e-2 if name == "low precision moment" else 3 * TOLERANCE["float32"].numpy
    assert_identity(osa.lazy(tx), tx, task, tol, factor=0.5)


def test_norm_of_the_summed_gradient():
    """Duplicates add up before they are measured, and dense leaves count."""
    tx = osa.lazy(optax.clip_by_global_norm(1.0))
    values = np.array([[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], np.float32)
    table = bcoo(values, np.array([[5], [5], [9]]), (9, 2))
    params = {"table": jnp.zeros((9, 2)), "bias": jnp.zeros(1)}
    grads = {"table": table, "bias": jnp.array([12.0])}
    updates, _ = tx.update(grads, tx.init(params))
    assert_close(updates["bias"], [12 / 13], TOLERANCE["float32"].numpy)
    assert_close(updates["table"].data[0], [3 / 13, 4 / 13], TOLERANCE["float32"].numpy)


@pytest.mark.slow
def test_a_tree_is_its_leaves_alone():
    """Where leaves do not meet: dense, row-sparse and no gradients in one tree."""
    tx = osa.lazy(optax.adamw(0.1, weight_decay=0.1))
    rng = np.random.default_rng(0)
    shapes = {"a": SHAPE, "b": (5,), "dense": (3, 2), "scalar": (), "none": SHAPE}
    params = {
        k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()
    }
    grads = {
        "a": bcoo(*random_entries(rng, SHAPE, 1, 7, outside=True), SHAPE),
        "b": bcoo(*random_entries(rng, (5,), 1, 3), (5,)),
        "dense": jnp.ones((3, 2)),
        "scalar": jnp.ones(()),
        "none": None,
    }
    together, state = train(tx, params, [grads] * 2, compiled=False)
    assert_identical(together["none"], params["none"])
    assert_identical(state[0].mu["none"], jnp.zeros(SHAPE))
    for name in ("a", "b", "dense", "scalar"):
        alone, alone_state = train(tx, params[name], [grads[name]] * 2)
        # optax compiles some functions for the tree; XLA may round these otherwise.
        tol = TOLERANCE["float32"].numpy
        assert_close(together[name], alone, tol, magnitude=1.0, what=name)
        assert_close(state[0].nu[name], alone_state[0].nu, tol, what=name)


def test_dense_trees_are_left_to_the_inner_transformation():
    tx = optax.adamw(0.1)
    params = {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}
    lifted = osa.lazy(tx)
    assert_identical(lifted.init(params), tx.init(params))
    expected = tx.update(params, tx.init(params), params)
    assert_identical(lifted.update(params, lifted.init(params), params), expected)


def test_low_precision():
    """bfloat16: the duplicates add up in float32, the rest is optax's."""
    values = np.full((4, 4), 1.0, np.float32)
    values[1:] = 2.0**-8
    grad = bcoo(jnp.asarray(values, jnp.bfloat16), np.full((4, 1), 3), SHAPE)
    tx = osa.lazy(optax.sgd(1.0, momentum=0.9))
    params = jnp.zeros(SHAPE, jnp.bfloat16)
    updates, state = tx.update(grad, tx.init(params), params)
    assert updates.dtype == state[0].trace.dtype == jnp.bfloat16
    # 1 + 2**-8 is 1 in bfloat16; 1 + 3 * 2**-8 is 1 + 2**-6 rounded to even.
    assert_identical(state[0].trace[3], jnp.full(4, 1 + 2.0**-6, jnp.bfloat16))


def test_gradients_of_other_shapes():
    tx = osa.lazy(optax.adam(0.1))
    params = {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}
    short = bcoo(np.ones((1, 4), np.float32), [[0]], (8, 4))
    for bias in params["bias"], None:
        with pytest.raises(ValueError, match=r"shapes of the parameters|Call update\("):
            tx.update({"table": short, "bias": bias}, tx.init(params))


def test_state_that_is_not_made_of_rows():
    def flat(params):
        return jnp.zeros(sum(x.size for x in jax.tree.leaves(params)))

    tx = osa.lazy(optax.GradientTransformation(flat, lambda g, s, p=None: (g, s)))
    grad = bcoo(np.ones((1, 4), np.float32), [[0]], SHAPE)
    with pytest.raises(ValueError, match=r"rows of a table .* got shape \(36,\)"):
        tx.update(grad, tx.init(jnp.ones(SHAPE)))


def test_multi_steps_is_refused():
    """Of both kinds: the class, and the transformation that it makes."""
    steps = optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    )
    for tx in (steps, steps.gradient_transformation()):
        with pytest.raises(ValueError, match=r"lax\.scan in the loss"):
            osa.lazy(tx).init(jnp.ones(SHAPE))


def test_extra_arguments_that_change_an_update():
    """Outside of `jit`, too, where what was looked into before is known."""

    def update(updates, state, params=None, *, by_size=False, **_):
        # With `by_size`, another thing for a table than for a few of its rows.
        scale = 1.0 if by_size and len(updates) > 100 else 2.0
        if by_size and len(updates) > 100:
            updates = updates + 0.0 * jnp.sum(updates)
        return updates * scale, state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
    tx, table = osa.lazy(inner), jnp.ones((200, 2))
    grad = BCOO((jnp.ones((1, 2)), jnp.array([[3]])), shape=(200, 2))
    for _ in range(2):
        assert_identical(tx.update(grad, (), table)[0].todense()[3], 2 * jnp.ones(2))
        with pytest.raises(ValueError, match="depends on the number of rows"):
            tx.update(grad, (), table, by_size=True)
