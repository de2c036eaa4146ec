"""What is around an optimiser of rows and takes updates for dense: refused in all ways.

By hand, where a transformation of optax raises itself, in JAX's words or in ours; in
`make_train_step` and `flax_nnx.update` by what to do. No number is made in silence.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.support import slow_but
from ..helpers.wrapper_changes import log_norm
from ..helpers.wrappers import Seen, after, in_chain, loss, start

pytestmark = pytest.mark.usefixtures("as_optax_expects")

IDS = np.array([3, 7, 3])


def behind(part):
    return lambda tx: optax.chain(tx, part)


def in_front(part):
    return lambda tx: optax.chain(part, tx)


def of_all_arrays(function):
    def change(updates, state, params, seen):
        return jax.tree.map(function, updates), state

    return lambda tx: after(change)(tx, Seen())


def of_table(function):
    """Faults of the wrapper's own, which dense gradients do not mend."""

    def change(updates, state, params, seen):
        new = dict(updates.items())
        new["table"] = function(new["table"])
        return type(updates)(new), state

    return lambda tx: after(change)(tx, Seen())


DENSE_ONLY = {
    "scale": behind(optax.scale(0.5)),
    "learning rate": behind(optax.scale_by_learning_rate(0.1)),
    "clip": behind(optax.clip(0.1)),
    "global norm": behind(optax.clip_by_global_norm(0.1)),
    "weight decay": behind(optax.add_decayed_weights(0.1)),
    "noise": behind(optax.add_noise(0.1, 0.5, 0)),
    "trace": behind(optax.trace(0.9)),
    "ema": behind(optax.ema(0.9)),
    "centralize": behind(optax.centralize()),
    "apply_every": behind(optax.apply_every(2)),
    "norm of updates": behind(optax.normalize_by_update_norm()),
    "adaptive clip": behind(optax.adaptive_grad_clip(0.1)),
    "nonnegative": behind(optax.keep_params_nonnegative()),
    "adam": behind(optax.scale_by_adam()),
    "trust ratio": behind(optax.scale_by_trust_ratio()),
    "rms": behind(optax.scale_by_rms()),
    "block rms": behind(optax.clip_by_block_rms(1.0)),
    "clip in front": in_front(optax.clip(0.1)),
    "global norm in front": in_front(optax.clip_by_global_norm(0.1)),
    "adam in front": in_front(optax.scale_by_adam()),
    "flatten": optax.flatten,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "mechanize": optax.contrib.mechanize,
    "floats of all arrays": of_all_arrays(lambda x: x.astype(jnp.float32)),
    "half of all arrays": of_all_arrays(lambda x: x / 2),
    "log, then scale": lambda tx: optax.chain(
        in_chain(log_norm)(tx, Seen()), optax.scale(0.5)
    ),
    "scale in a partition": lambda tx: optax.partition(
        {"rows": optax.chain(tx, optax.scale(0.5)), "rest": optax.sgd(0.1)},
        {"table": "rows", "w": "rest"},
    ),
}
WRONG = {
    "other shape": of_table(
        lambda x: BCOO((jnp.ones((1, 3)), jnp.array([[0]])), shape=(13, 3))
    ),
    "values of integers": of_table(
        lambda x: BCOO((jnp.ones((1, 3), int), jnp.array([[0]])), shape=(12, 3))
    ),
    "dense of another shape": of_table(lambda x: jnp.ones((12, 2))),
    "a batch": of_table(lambda x: jax.tree.map(lambda y: y[None], x)),
    "two in one": of_table(lambda x: (x, x)),
}
NOT_IN_FLAX = {"scale in a partition"}  # labels of Flax's own trees
INNER = {"sparse_adam": osa.sparse_adam, "rowwise_adagrad": osa.rowwise_adagrad}


class Model(nnx.Module):
    def __init__(self):
        for name, value in start().items():
            setattr(self, name, nnx.Param(value))


def by_hand(tx):
    def step(params, state, ids):
        grads = osa.grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    return step


def step_of_flax(model, optimizer):
    def of_model(model):
        return loss({"table": model.table[...], "w": model.w[...]}, IDS)

    flax_nnx.update(optimizer, model, flax_nnx.grad(of_model)(model))


def optimizer_of(tx):
    model = Model()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


# Each with each optimiser, and by the kernel and by XLA in turns.
CASES = [
    (name, inner, ("plain", "kernel")[(i + j) % 2])
    for i, name in enumerate(DENSE_ONLY)
    for j, inner in enumerate(INNER)
]


@pytest.mark.parametrize(
    ("name", "inner", "backend"),
    slow_but(CASES, *(x for x in CASES if x[:2] == ("trace", "sparse_adam"))),
    indirect=["backend"],
)
def test_dense_only(name, inner, backend):
    """While it is traced, with the function that was called and what to do."""
    tx = DENSE_ONLY[name](INNER[inner](0.1))
    args = start(), tx.init(start()), IDS
    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(by_hand(tx), *args)
    words = r"make_train_step gives .* takes dense"
    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(osa.make_train_step(loss, tx), *args)
    if name not in NOT_IN_FLAX:
        words = (
            r"inside lazy.* flax_nnx.update gives .* dense ones only|chain inside lazy"
        )
        # Outside of a program JAX says NotImplementedError of some arithmetic of keys.
        errors = TypeError, ValueError, NotImplementedError
        for way in (nnx.jit, lambda function: function):
            with pytest.raises(errors, match=words):
                way(step_of_flax)(*optimizer_of(tx))


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_in_all_forms(name, backend):
    """In the words of `apply_updates`, whichever function calls it."""
    tx = WRONG[name](osa.sparse_adam(0.1))
    args = start(), tx.init(start()), IDS
    found = []
    for way in (
        lambda: jax.eval_shape(by_hand(tx), *args),
        lambda: jax.eval_shape(osa.make_train_step(loss, tx), *args),
        lambda: nnx.jit(step_of_flax)(*optimizer_of(tx)),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            way()
        found.append(str(raised.value)[:40])
    assert len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", ["scale", "sign"])
def test_all_arrays_as_integers(part, backend):
    """By hand only a running program knows it, whose first rows become NaN."""
    scaled = optax.scale(-1) if part == "scale" else optax.scale_by_sign()
    tx = optax.chain(osa.sparse_adam(0.1), scaled)
    params, state = start(), tx.init(start())
    with pytest.raises(ValueError, match="the indices that it was made with"):
        by_hand(tx)(params, state, IDS)
    table = jax.jit(by_hand(tx))(params, state, IDS)[0]["table"]
    assert np.isnan(table[:3]).all()
    assert np.isfinite(table[4:]).all()
    words = r"flax_nnx.update gives .* dense ones only"
    for way in (nnx.jit, lambda function: function):
        with pytest.raises(TypeError, match=words):
            way(step_of_flax)(*optimizer_of(tx))
    with pytest.raises(TypeError, match=r"make_train_step gives .* dense ones only"):
        osa.make_train_step(loss, tx)(params, state, IDS)


@pytest.mark.slow
def test_sums_for_flax():
    """`make_train_step` adds duplicates up by itself; Flax's gradients are as given."""
    tx = optax.apply_if_finite(osa.sparse_adam(0.1), 3)
    words = r"flax_nnx.update gives .* duplicates are added up.* osa.coalesce"
    with pytest.raises((TypeError, ValueError), match=words):
        nnx.jit(step_of_flax)(*optimizer_of(tx))


@pytest.mark.slow
def test_gradients_without_read():
    """What is wrong is not their form, and the error does not speak of it."""
    with pytest.raises(ValueError, match="exact_adam needs gradients that are made"):
        nnx.jit(step_of_flax)(*optimizer_of(osa.exact_adam(0.1)))


@pytest.mark.slow
def test_what_a_user_raises_in_flax():
    def fail(updates, state, params, seen):
        raise KeyError("mine")

    tx = after(fail)(osa.sparse_adam(0.1), Seen())
    with pytest.raises(KeyError) as raised:
        nnx.jit(step_of_flax)(*optimizer_of(tx))
    assert raised.value.args == ("mine",)
