"""Arguments of NumPy: a loss sees them, and may index them by what JAX computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

TABLE = jnp.arange(24.0).reshape(8, 3)
FEATURES = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
IDS = np.array([1, 6, 9, 1])


def _predict(t, features, ids):
    return t[jnp.clip(ids, 0, 7)] * features[jnp.clip(ids, 0, 7)]


def _loss(*args, **kwargs):
    return jnp.sum(_predict(*args, **kwargs) ** 2)


def _with_aux(t, batch, *, features):
    rows = _predict(t, features["a"][0], batch)
    return jnp.sum(rows**2), {"rows": rows, "name": "x"}


@pytest.mark.parametrize("ids", [IDS, jnp.asarray(IDS)], ids=["numpy", "jax"])
def test_numpy_is_indexed_by_what_jax_computes(ids):
    value, grads = osa.value_and_grad(_loss)(TABLE, FEATURES, ids)
    expected = jax.value_and_grad(_loss)(TABLE, FEATURES, ids)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)  # another order of sums
    np.testing.assert_array_equal(grads.todense(), expected[1])
    assert grads.nse == 4

    out = osa.evaluate(_predict)(TABLE, FEATURES, ids)
    np.testing.assert_array_equal(out, _predict(TABLE, FEATURES, ids))


def test_in_keywords_and_trees_with_aux_and_before_exact_adam():
    tx = osa.exact_adam(0.1)
    step = osa.make_train_step(lambda t: jnp.sum(t[jnp.array([1, 2])] ** 2), tx)
    first = jnp.array(TABLE)  # is donated
    table, state, _ = step(first, tx.init(first))
    now, _ = osa.flush(table, state)  # rows 1 and 2 are behind in `table`
    features = {"a": [FEATURES]}

    grad = osa.grad(_with_aux, has_aux=True, read=state)
    grads, aux = grad(table, IDS, features=features)
    expected, of_jax = jax.grad(_with_aux, has_aux=True)(now, IDS, features=features)
    # `flush` and a lookup round one row's power of b2 in programs of their own.
    np.testing.assert_allclose(grads.todense(), expected, rtol=1e-6)
    np.testing.assert_allclose(aux["rows"], of_jax["rows"], rtol=1e-6)
    assert aux["name"] == "x"

    predict = osa.evaluate(_predict, read=state)
    rows = predict(table, ids=IDS, features=FEATURES)
    np.testing.assert_allclose(rows, of_jax["rows"], rtol=1e-6)


def test_an_integer_that_is_computed():
    def loss(t, scales, i):
        return jnp.sum(t[i] * scales[jnp.clip(i, 0, 7)].sum())

    grads = osa.grad(loss)(TABLE, FEATURES, 3)
    np.testing.assert_allclose(
        grads.todense(), jax.grad(loss)(TABLE, FEATURES, 3), rtol=1e-6
    )


def test_a_loss_still_decides_by_numpy():
    traces = []

    def loss(t, ids):
        traces.append(type(ids))
        return jnp.sum(t[ids] * (2.0 if ids.max() > 5 else 1.0))

    grads = osa.grad(loss)(TABLE, IDS)
    np.testing.assert_array_equal(grads.todense(), jax.grad(loss)(TABLE, IDS))
    assert traces[0] is np.ndarray
    assert len(traces) == 2  # `jax.grad`'s is the other


def test_integers_that_jax_does_not_hold_stay_numpys():
    """Of 2**32 + 3 JAX would make row 3; a bag makes none of it."""

    def loss(t, features, ids):
        return jnp.sum(osa.embedding_bag(t, ids) * features[jnp.clip(IDS[:2], 0, 7)])

    ids = np.array([[2**32 + 3, 1], [2, 2]])
    grads = osa.grad(loss)(TABLE, FEATURES, ids)
    expected = np.zeros((8, 3), np.float32)
    expected[1] = FEATURES[1]
    expected[2] = 2 * FEATURES[6]
    np.testing.assert_allclose(grads.todense(), expected, rtol=1e-6)


def test_what_raises_again_raises():
    closed_over = FEATURES

    def outside(t, unused, ids):
        return jnp.sum(t[ids] * closed_over[jnp.clip(ids, 0, 7)])

    with pytest.raises(jax.errors.TracerArrayConversionError):
        osa.grad(outside)(TABLE, FEATURES, IDS)

    def decides(t, features, ids):
        return jnp.sum(t[ids] * features[jnp.clip(ids, 0, 7)]) if ids[0] else t[0, 0]

    with pytest.raises(jax.errors.TracerBoolConversionError):
        osa.grad(decides)(TABLE, FEATURES, IDS)


def test_masked_arrays_stay_what_they_are():
    masked = np.ma.masked_array(FEATURES[3:5], mask=FEATURES[3:5] < 0)

    def loss(t, features, masked, ids):
        scale = float(masked.mean())
        return jnp.sum(t[ids] * features[jnp.clip(ids, 0, 7)]) * scale

    args = TABLE, FEATURES, masked, IDS
    np.testing.assert_allclose(
        osa.grad(loss)(*args).todense(), jax.grad(loss)(*args), rtol=1e-6
    )


def test_a_module_of_flax_that_the_loss_changes():
    nnx = pytest.importorskip("flax.nnx")
    from optax_sparse_adam import flax_nnx

    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(8, 3, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def loss(model, features, ids):
        model.calls[...] += 1
        return jnp.sum(model.embed(ids) * features[jnp.clip(ids, 0, 7)])

    model, reference = Model(), Model()
    ids = IDS % 8
    value, grads = flax_nnx.value_and_grad(loss)(model, FEATURES, ids)
    expected = nnx.value_and_grad(loss)(reference, jnp.asarray(FEATURES), ids)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    sparse = grads.embed.embedding[...]
    np.testing.assert_array_equal(sparse.todense(), expected[1].embed.embedding[...])
    assert model.calls[...] == reference.calls[...] == 1
