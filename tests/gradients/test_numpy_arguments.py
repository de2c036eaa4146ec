"""Arguments of NumPy outside of `jit`: a loss may decide by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

TABLE = jnp.arange(24.0).reshape(8, 3)
FEATURES = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
IDS = np.array([1, 6, 9, 1])


def loss(t, features, ids):
    return jnp.sum(t[jnp.clip(ids, 0, 7)] * features[jnp.clip(ids, 0, 7)])


@pytest.mark.parametrize("transform", [osa.grad, osa.value_and_grad, osa.evaluate])
def test_indexed_by_what_is_computed_they_raise_and_say_what_to_do(transform):
    with pytest.raises(jax.errors.TracerArrayConversionError) as info:
        transform(loss)(TABLE, FEATURES, IDS)
    note = info.value.__notes__[-1]
    assert "jnp.asarray" in note
    assert "jax.jit" in note


def test_what_the_error_says_is_right():
    expected = jax.grad(loss)(TABLE, FEATURES, IDS)
    grads = osa.grad(loss)(TABLE, jnp.asarray(FEATURES), IDS)
    np.testing.assert_array_equal(grads.todense(), expected)
    grads = jax.jit(osa.grad(loss))(TABLE, FEATURES, IDS)
    np.testing.assert_array_equal(grads.todense(), expected)


def test_a_loss_decides_by_their_values():
    """In 64 bits, which JAX does not have; with masks, whose size is known."""

    def deciding(t, ids, seconds):
        rows = [
            ids * 1_000_003 % 8,
            ids[ids > 5] % 8,
            (seconds // 3600 % 8).astype(int),
        ]
        return jnp.sum(t[np.concatenate(rows)] ** 2) * (2.0 if ids.max() > 5 else 1.0)

    args = TABLE, np.array([1, 2_000_000, 7]), np.array([1_732_880_000.0, 3600.0])
    grads = osa.grad(deciding)(*args)
    np.testing.assert_allclose(grads.todense(), jax.grad(deciding)(*args), rtol=1e-6)
