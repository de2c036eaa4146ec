"""`allow_int` and `holomorphic`, as `jax.value_and_grad` has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.gradients import dense, is_bcoo
from ..helpers.support import TOLERANCE, assert_close

IDS = jnp.array([3, 7, 3])


def params():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32)
    key = jax.random.key(0)
    return {"table": table, "ids": IDS, "flag": True, "key": key, "scale": 2.0}


def loss(params, shift=0):
    rows = params["table"][params["ids"] + shift]
    noise = jax.random.normal(params["key"], rows.shape)
    return jnp.sum((rows + noise) ** 2) * params["scale"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients_of_integers(wrap):
    value, grads = wrap(osa.value_and_grad(loss, allow_int=True))(params())
    expected, expected_grads = jax.value_and_grad(loss, allow_int=True)(params())
    tol = TOLERANCE["float32"].sum
    assert_close(value, expected, tol)
    assert is_bcoo(grads["table"])
    for name, wanted in expected_grads.items():
        got = dense(grads[name])
        assert jnp.result_type(got) == jnp.result_type(wanted)
        assert jnp.shape(got) == jnp.shape(wanted)
        if wanted.dtype != jax.dtypes.float0:
            assert_close(got, wanted, tol)


def test_positions_of_the_arguments_are_those_of_jax():
    value, aux = osa.grad(lambda p: (loss(p), 3), 0, True, False, True)(params())
    assert value["ids"].dtype == jax.dtypes.float0
    assert aux == 3


def test_integers_are_refused_without_it():
    with pytest.raises(TypeError, match="'flag'"):
        osa.grad(loss)(params())


def test_holomorphic():
    table = jax.lax.complex(params()["table"], params()["table"])

    def power(table):
        return jnp.sum(table[IDS] ** 3)

    got = osa.grad(power, holomorphic=True)(table)
    expected = jax.grad(power, holomorphic=True)(table)
    np.testing.assert_array_equal(got, expected)
    for options in ({"sparse": True}, {"sparse": {"t": True}}, {"read": ()}):
        with pytest.raises(ValueError, match="holomorphic"):
            osa.grad(power, holomorphic=True, **options)
    with pytest.raises(TypeError, match="requires inputs with complex dtype"):
        osa.grad(power, holomorphic=True)(params()["table"])
