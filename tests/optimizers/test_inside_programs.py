"""All optimisers of this package as parts of optax and Flax programs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_sparse_adam as osa

from ..helpers.identity import train
from ..helpers.optimizers import FINAL
from ..helpers.support import TOLERANCE, assert_identical, random_entries, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPE = (9, 4)
LABELS = {"table": "rows", "bias": "dense"}


@pytest.fixture(params=slow_but(FINAL, "lazy"))
def make(request):
    return FINAL[request.param].make


@pytest.fixture
def params():
    return {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}


@pytest.fixture
def grads():
    values, indices = random_entries(np.random.default_rng(0), SHAPE, 1, 6)
    values[values == 0] = 1
    # As `value_and_grad` returns it, with a canary.
    grad = osa.grad(lambda table: jnp.sum(table[indices[:, 0]] * values))
    grad = osa.coalesce(jax.jit(grad)(jnp.ones(SHAPE)))
    return {"table": grad, "bias": jnp.arange(1.0, 4.0)}


def assert_trees_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, atol=TOLERANCE["float32"].numpy)


# Ways to wrap what `make(0.1)` returns.
KINDS = {
    "chain": lambda make: optax.chain(make(0.1), optax.identity()),
    "named_chain": lambda make: optax.named_chain(("rows", make(0.1))),
    "partition": lambda make: optax.partition(
        {"rows": make(0.1), "dense": make(0.1)}, LABELS
    ),
    "masked": lambda make: optax.chain(
        optax.masked(make(0.1), {"table": True, "bias": False}),
        optax.masked(make(0.1), {"table": False, "bias": True}),
    ),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(0.1),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(0.1), 3),
    "conditionally_transform": lambda make: optax.conditionally_transform(
        make(0.1), lambda step: step < 9
    ),
    "with_extra_args_support": lambda make: optax.with_extra_args_support(make(0.1)),
    "schedule": lambda make: make(optax.constant_schedule(0.1)),
}
_TRAINED = {}  # what each optimiser does alone, of one gradient


# Clipping and the means of Adafactor run over the leaves of one partition.
@pytest.mark.parametrize(
    ("kind", "make"),
    slow_but(
        [(kind, opt.make) for kind in KINDS for opt in FINAL.values()],
        *((kind, FINAL["lazy"].make) for kind in [*KINDS][::3]),
        ("partition", FINAL["sparse_adam"].make),
    ),
)
def test_inside_optax(kind, make, params, grads):
    """Each way to wrap an optimiser leaves its numbers, and untouched rows, alone."""
    if make not in _TRAINED:
        _TRAINED[make], _ = train(make(0.1), params, [grads] * 2)
    expected = _TRAINED[make]
    actual, _ = train(KINDS[kind](make), params, [grads] * 2)
    assert_trees_close(actual, expected)
    untouched = np.setdiff1d(np.arange(SHAPE[0]), grads["table"].indices)
    assert len(untouched) > 2
    assert_identical(actual["table"][untouched], params["table"][untouched])


def test_apply_if_finite_skips(make, params, grads):
    tx = optax.apply_if_finite(make(0.1), 3)
    bad = grads | {"bias": grads["bias"] * np.nan}
    state = tx.init(params)
    updates, new = tx.update(bad, state, params)
    assert_identical(osa.apply_updates(params, updates), params)
    assert_identical(new.inner_state, state.inner_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "backend"),
    slow_but(
        [(name, way) for name in FINAL for way in ("plain", "kernel")],
        ("sparse_adam", "plain"),
        ("lazy", "kernel"),
    ),
    indirect=True,
)
def test_inside_scan(make, params, grads, backend):
    """A training loop inside of one program."""
    tx = make(0.1)

    def body(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (osa.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), grads["bias"])

    def table_step(carry, bias):
        return body(carry, {"table": grads["table"], "bias": bias})

    actual, _ = jax.lax.scan(table_step, (params, tx.init(params)), stacked)
    assert_trees_close(actual, train(tx, params, [grads] * 3))


def test_flax_train_state(make, params, grads):
    state = TrainState.create(apply_fn=None, params=params, tx=make(0.1))
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for _ in range(2):
        state = step(state, grads)
    expected = train(make(0.1), params, [grads] * 2)
    assert_trees_close((state.params, state.opt_state), expected)


def test_nnx_optimizer(make, grads):
    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(*SHAPE, rngs=nnx.Rngs(0))

    model = Model()
    optimizer = nnx.Optimizer(model, make(0.1), wrt=nnx.Param)
    table = jnp.array(model.embed.embedding[...])

    @nnx.jit
    def step(model, optimizer, grad):
        tree = jax.tree.map(lambda _: grad, nnx.state(model, nnx.Param))
        optimizer.update(model, tree)

    for _ in range(2):
        step(model, optimizer, grads["table"])
    expected, _ = train(make(0.1), table, [grads["table"]] * 2)
    assert_trees_close(model.embed.embedding[...], expected)


# What scales the indices of an update with its values; `apply_updates` is to see it.
FLOATS = {
    "clip": optax.clip(0.5),
    "scale": optax.scale(0.5),
}
INTEGERS = {
    "a schedule": optax.scale_by_schedule(optax.constant_schedule(0.5)),
    "a large schedule": optax.scale_by_schedule(optax.constant_schedule(-1.5)),
    "a sign": optax.scale(-1),
}


@pytest.mark.parametrize(
    ("name", "make"),
    slow_but(
        [(name, make) for name in FLOATS | INTEGERS for make in FINAL],
        *((name, "sparse_adam") for name in FLOATS | INTEGERS),
    ),
    indirect=["make"],
)
def test_optax_after_ours(name, make, params, grads):
    """Where no index becomes a float, the canary is not what it was."""
    tx = optax.chain(make(0.1), (FLOATS | INTEGERS)[name])

    def step(grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return osa.apply_updates(params, updates)["table"]

    with pytest.raises(
        TypeError if name in FLOATS else ValueError, match="inside lazy"
    ):
        step(grads)
    if name in FLOATS:
        return
    table = jax.jit(step)(grads)
    # The first rows, one for each that was touched; zeros of padding may be none.
    touched = int((grads["table"].indices < SHAPE[0]).sum())
    assert touched > 2
    assert jnp.isnan(table[:touched]).all()
    nse = grads["table"].nse
    np.testing.assert_array_equal(table[nse:], params["table"][nse:])


@pytest.mark.parametrize("every", [1, 2])
def test_multi_steps(every, make, params, grads):
    """Its sums are dense: it refuses BCOO by itself. A scan in the loss accumulates."""
    tx = optax.MultiSteps(make(0.1), every)
    with pytest.raises(ValueError, match="BCOO"):
        tx.update(grads, tx.init(params), params)
