"""Taylor series, by `jax.experimental.jet`, of gradients and in losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from tests.helpers.support import assert_close

IDS = np.array([3, 7, 3])
TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 40
W = np.linspace(-1, 1, 4, dtype=np.float32)
PARAMS = {"table": TABLE, "w": W}


def loss(params):
    return ((params["table"][IDS] @ params["w"]) ** 3).sum()


def with_aux(params):
    return loss(params), params["table"][IDS].sum()


def compare(function, ours, at):
    """Values, and derivatives of two orders, as by `jax.grad`."""
    series = [np.ones_like(at), 0.5 * np.ones_like(at)]
    expected = jet(lambda x: function(jax.value_and_grad, x), (at,), (series,))
    found = jet(lambda x: function(ours, x), (at,), (series,))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(a, e, 1e-6, magnitude=np.abs(e).max())


PROGRAMS = {
    "of the table": (lambda vag, t: vag(loss)({"table": t, "w": W}), TABLE),
    "of other parameters": (lambda vag, w: vag(loss)({"table": TABLE, "w": w}), W),
    "of what the loss closes over": (
        lambda vag, w: vag(lambda t: loss({"table": t, "w": w}))(jnp.asarray(TABLE)),
        W,
    ),
    "of another argument": (
        lambda vag, w: vag(lambda t, w: loss({"table": t, "w": w}))(TABLE, w),
        W,
    ),
    "with aux": (
        lambda vag, t: vag(with_aux, has_aux=True)({"table": t, "w": W}),
        TABLE,
    ),
    "of a step": (lambda vag, t: t - 0.1 * vag(lambda t: (t[IDS] ** 3).sum())(t)[1],
                  TABLE),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_series_of_a_gradient(name):
    compare(PROGRAMS[name][0], osa.value_and_grad, PROGRAMS[name][1])


def test_series_of_rows_in_a_program():
    """`jit` hides from `value_and_grad` what surrounds it: series of the rows."""

    def rows(t):
        grad = osa.grad(lambda t: (t[IDS] ** 3).sum())(t)
        return grad.data

    found = jet(jax.jit(rows), (TABLE,), ([np.ones_like(TABLE)],))
    assert_close(found[0], 3 * TABLE[IDS] ** 2, 1e-6)
    assert_close(found[1][0], 6 * TABLE[IDS], 1e-6)


def test_a_series_in_the_loss():
    def loss(t):
        y, (first,) = jet(lambda t: jnp.sin(t[IDS]), (t,), ([jnp.ones_like(t)],))
        return y.sum() + first.sum()

    grad = osa.grad(loss)(jnp.asarray(TABLE))
    assert isinstance(grad, BCOO)
    assert_close(grad.todense(), jax.jit(jax.grad(loss))(jnp.asarray(TABLE)), 1e-6)


@pytest.mark.parametrize("which", ["sparse", "read"])
def test_refusals(which):
    kwargs = {"sparse": True}
    if which == "read":
        kwargs = {"read": osa.exact_adam(0.1).init(TABLE)}

    def grad(t):
        return osa.grad(lambda t: t[IDS].sum(), **kwargs)(t)

    with pytest.raises(ValueError, match="jet gradients are dense"):
        jet(grad, (TABLE,), ([np.ones_like(TABLE)],))
