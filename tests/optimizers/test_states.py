"""States that do not fit: of other parameters, or of another optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import bcoo

SHAPE = (9, 4)
TABLE = jnp.ones(SHAPE, jnp.bfloat16)  # of a type that stochastic_rounding rounds
GRADS = {
    "sparse": bcoo(np.ones((2, 4), jnp.bfloat16), np.array([[1], [7]]), SHAPE),
    "dense": TABLE,
}

# Whether a gradient may be row-sparse, and the optimiser.
OPTIMIZERS = {
    "sparse_adam": (True, osa.sparse_adam(0.1)),
    "sparse_adafactor": (True, osa.sparse_adafactor()),
    "lazy": (True, osa.lazy(optax.adam(0.1))),
    "lazy(per_row)": (True, osa.lazy(osa.per_row(optax.adam(0.1)))),
    "lazy(stochastic_rounding)": (
        True,
        osa.lazy(osa.stochastic_rounding(optax.adam(0.1), 0)),
    ),
    "rowwise_adam": (True, osa.rowwise_adam(0.1)),
    "rowwise_adagrad": (True, osa.rowwise_adagrad(0.1)),
    "scale_by_rowwise_adam": (False, osa.scale_by_rowwise_adam()),
    "scale_by_rowwise_rss": (False, osa.scale_by_rowwise_rss()),
    "per_row": (False, osa.per_row(optax.adam(0.1))),
    "stochastic_rounding": (False, osa.stochastic_rounding(optax.adam(0.1), 0)),
}
CASES = [
    (name, kind)
    for name, (is_lazy, _) in OPTIMIZERS.items()
    for kind in (("sparse", "dense") if is_lazy else ("dense",))
    if (name, kind) != ("lazy", "dense")  # optax's own affair
]


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


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_misfit_raises_while_tracing(name, kind):
    """Rows without a moment would train in silence, or write beyond a buffer."""
    _, tx = OPTIMIZERS[name]
    for state in misfits(tx.init(TABLE)):
        with pytest.raises(ValueError, match=r"must have the shape|would hold arrays"):
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
    _, tx = OPTIMIZERS[name]
    state = other.init(TABLE)
    words = r"takes its own state, \w+State\(.*\), got .*State.*Make one by `init`"
    with pytest.raises(TypeError, match=words):
        tx.update(GRADS["dense"], state, TABLE)


@pytest.mark.parametrize("name", ["lazy", "per_row"])
def test_state_of_another_size(name):
    _, tx = OPTIMIZERS[name]
    state = optax.sgd(0.1, momentum=0.9).init(TABLE)
    kind = "sparse" if name == "lazy" else "dense"
    with pytest.raises(ValueError, match=r"\d+ arrays|would hold arrays"):
        tx.update(GRADS[kind], state, TABLE)


@pytest.mark.parametrize("inner", [optax.adam, osa.sparse_adam, None])
@pytest.mark.parametrize(
    "wrap", [osa.lazy, osa.per_row, lambda inner: osa.stochastic_rounding(inner, 0)]
)
def test_what_is_no_transformation(wrap, inner):
    with pytest.raises(TypeError, match=r"takes an optax transformation.*Call what"):
        wrap(inner)


def test_float_indices_in_a_flax_step():
    """By `optax.apply_updates`, which Flax calls: an empty AssertionError before."""
    table = jnp.ones(SHAPE)
    grad = osa.grad(lambda table: jnp.sum(table[jnp.array([1, 7])]))(table)
    for way in (lambda f: f, jax.jit):
        with pytest.raises(TypeError, match=r"integer indices.*inside lazy"):
            way(lambda grad: optax.apply_updates(table, scaled(grad)))(grad)


def scaled(grad):
    with jax.numpy_dtype_promotion("standard"):
        return optax.scale(-0.1).update(grad, optax.EmptyState())[0]
