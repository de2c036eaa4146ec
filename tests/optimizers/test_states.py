"""States that do not fit: of other parameters, or of another optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.optimizers import FINAL
from ..helpers.support import bcoo

SHAPE = (9, 4)
TABLE = jnp.ones(SHAPE, jnp.bfloat16)  # of a type that stochastic_rounding rounds
GRADS = {
    "sparse": bcoo(np.ones((2, 4), jnp.bfloat16), np.array([[1], [7]]), SHAPE),
    "dense": TABLE,
}

# With a gradient of rows, and of an array.
CASES = {name: (opt.make(0.1), ("sparse", "dense")) for name, opt in FINAL.items()}
CASES["lazy"] = osa.lazy(optax.adam(0.1)), ("sparse",)  # else it is optax's own affair
CASES |= {
    "lazy(stochastic_rounding)": (
        osa.lazy(osa.stochastic_rounding(optax.adam(0.1), 0)),
        ("sparse", "dense"),
    ),
    "scale_by_rowwise_adam": (osa.scale_by_rowwise_adam(), ("dense",)),
    "scale_by_rowwise_rss": (osa.scale_by_rowwise_rss(), ("dense",)),
    "scale_by_per_row": (osa.per_row(optax.adam(0.1)), ("dense",)),
    "stochastic_rounding": (osa.stochastic_rounding(optax.adam(0.1), 0), ("dense",)),
}


def misfits(state):
    """The state with one array at a time of fewer rows, more, one axis more."""
    leaves, treedef = jax.tree.flatten(state)
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        others = [leaf[None]]
        if leaf.ndim:
            others += [leaf[:-2], leaf[:1], jnp.concatenate([leaf, leaf])]
        if leaf.ndim > 1:
            others += [leaf[:, :1], leaf[:, :-1]]
        for other in others:
            changed = [*leaves]
            changed[i] = other
            yield treedef.unflatten(changed)


@pytest.mark.parametrize("name", CASES)
def test_every_misfit_raises_while_tracing(name):
    """Rows without a moment would train in silence, or write beyond a buffer."""
    tx, kinds = CASES[name]
    words = r"must have the shape|would hold arrays"
    for state in misfits(tx.init(TABLE)):
        for kind in kinds:
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(tx.update, GRADS[kind], state, TABLE)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("sparse_adam", optax.adam(0.1)),
        ("sparse_adafactor", optax.adafactor(0.1)),
        ("scale_by_rowwise_adam", optax.scale_by_adam()),
        ("scale_by_rowwise_rss", optax.scale_by_rss()),
        ("stochastic_rounding", optax.adam(0.1)),
    ],
)
def test_state_of_another_optimizer(name, other):
    """What is given, by its class, and what to do."""
    tx, _ = CASES[name]
    state = other.init(TABLE)
    words = r"takes its own state, \w+State\(.*\), got .*State.*Create it with `init`"
    with pytest.raises(TypeError, match=words):
        tx.update(GRADS["dense"], state, TABLE)


@pytest.mark.parametrize("name", ["lazy", "scale_by_per_row"])
def test_state_of_another_size(name):
    tx, (kind, *_) = CASES[name]
    state = optax.sgd(0.1, momentum=0.9).init(TABLE)
    with pytest.raises(ValueError, match=r"\d+ arrays|would hold arrays"):
        tx.update(GRADS[kind], state, TABLE)


@pytest.mark.parametrize("inner", [optax.adam, osa.sparse_adam, None])
@pytest.mark.parametrize(
    "wrap", [osa.lazy, osa.per_row, lambda inner: osa.stochastic_rounding(inner, 0)]
)
def test_what_is_no_transformation(wrap, inner):
    with pytest.raises(TypeError, match=r"takes an optax transformation.*Call the"):
        wrap(inner)
