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

    def indexes(t, ids):
        return loss(t, ids) * ids.astype(np.float32)[jnp.clip(ids[0], 0, 3)]

    for fun in loss, indexes:
        grads = osa.grad(fun)(TABLE, IDS)
        expected = jax.grad(fun)(TABLE, IDS)
        np.testing.assert_allclose(grads.todense(), expected, rtol=1e-6)
        assert traces[0] is np.ndarray
    assert len(traces) == 5  # two of `jax.grad`, and two of `indexes`


def test_what_numpy_computes_stays_numpys():
    """In 64 bits, which JAX does not have; with masks, whose size is known."""
    ids = np.array([1, 2_000_000, 7, 7])
    seconds = np.array([1_732_880_000.0, 1_732_883_601.0, 0.0, 3600.0])

    def rows_of(ids, seconds):
        yield ids * 1_000_003 % 8
        yield (seconds // 3600 % 8).astype(int)
        yield ids[ids > 5] % 8
        yield seconds.astype(np.int64)[::-1] % 8

    def loss(t, features, ids, seconds):
        rows = np.concatenate([*rows_of(ids, seconds)])
        scale = features[jnp.clip(ids[:2], 0, 7)].sum()
        return jnp.sum(t[rows] ** 2) * scale

    args = TABLE, FEATURES, ids, seconds
    grads = osa.grad(loss)(*args)
    expected = jax.grad(loss)(*args)
    np.testing.assert_allclose(grads.todense(), expected, rtol=1e-6)


def test_integers_that_jax_does_not_hold_stay_numpys():
    """Of 2**32 + 3 JAX would make row 3; a bag makes none of it."""
    ids = np.array([[2**32 + 3, 1], [2, 2]])

    def loss(t, features, ids):
        return jnp.sum(osa.embedding_bag(t, ids) * features[jnp.clip(IDS[:2], 0, 7)])

    grads = osa.grad(loss)(TABLE, FEATURES, ids)
    expected = np.zeros((8, 3), np.float32)
    expected[1] = FEATURES[1]
    expected[2] = 2 * FEATURES[6]
    np.testing.assert_allclose(grads.todense(), expected, rtol=1e-6)

    with pytest.raises(jax.errors.TracerArrayConversionError):
        osa.grad(lambda t, ids: jnp.sum(t[ids[jnp.clip(IDS, 0, 1), 0]]))(TABLE, ids)


def test_what_raises_again_raises():
    closed_over = FEATURES

    def outside(t, unused, ids):
        return jnp.sum(t[ids] * closed_over[jnp.clip(ids, 0, 7)])

    with pytest.raises(jax.errors.TracerArrayConversionError):
        osa.grad(outside)(TABLE, FEATURES, IDS)


def test_a_loss_that_changes_an_argument_is_not_traced_again():
    def loss(t, features, ids):
        ids -= 1
        return jnp.sum(t[ids] * features[jnp.clip(ids, 0, 7)])

    with pytest.raises(ValueError, match="read-only"):
        osa.grad(loss)(TABLE, FEATURES, IDS.copy())


def test_what_leaves_the_loss_is_numpys():
    def loss(t, features, ids):
        rows = t[ids] * features[jnp.clip(ids, 0, 7)]
        return jnp.sum(rows), [features, ids + 1, ids.max(), features[0], ids]

    _, aux = osa.grad(loss, has_aux=True)(TABLE, FEATURES, IDS)
    _, expected = jax.grad(loss, has_aux=True)(TABLE, FEATURES, IDS)
    assert [*map(type, aux)] == [*map(type, expected)]
    for x, y in zip(aux, expected, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.ndim == 0 or x.flags.writeable


def test_masked_arrays_stay_what_they_are():
    masked = np.ma.masked_array(FEATURES[3:5], mask=FEATURES[3:5] < 0)

    def loss(t, features, masked, ids):
        scale = float(masked.mean())
        return jnp.sum(t[ids] * features[jnp.clip(ids, 0, 7)]) * scale

    args = TABLE, FEATURES, masked, IDS
    np.testing.assert_allclose(
        osa.grad(loss)(*args).todense(), jax.grad(loss)(*args), rtol=1e-6
    )


@pytest.mark.parametrize("graph", [True, False])
def test_a_module_of_flax_that_holds_numpy_and_changes(graph):
    nnx = pytest.importorskip("flax.nnx")
    from optax_sparse_adam import flax_nnx

    class Model(nnx.Module):
        def __init__(self, array):
            self.embedding = nnx.Param(TABLE)
            self.scales = nnx.Variable(array(FEATURES[::-1]))
            self.mean = nnx.BatchStat(jnp.zeros(3))
            self.seen = nnx.Variable(array(FEATURES))

    def loss(model, features, ids):
        model.mean[...] += 1
        model.seen.set_value(model.seen[...] + 1)
        rows = model.embedding[...][ids] * model.scales[...][jnp.clip(ids, 0, 7)]
        return jnp.sum(rows * features[jnp.clip(ids, 0, 7)])

    def loss_and_grad(transform, array):
        model = Model(array)
        out = transform(loss, graph=graph)(model, array(FEATURES), IDS % 8)
        return *out, model

    value, grads, model = loss_and_grad(flax_nnx.value_and_grad, np.asarray)
    expected = loss_and_grad(nnx.value_and_grad, jnp.asarray)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(
        grads.embedding[...].todense(), expected[1].embedding[...], rtol=1e-6
    )
    np.testing.assert_array_equal(model.mean[...], expected[2].mean[...])
    np.testing.assert_array_equal(model.seen[...], expected[2].seen[...])
    assert type(model.scales.get_raw_value()) is np.ndarray
    if graph:  # without, all variables are differentiated, and JAX's
        assert type(model.seen.get_raw_value()) is np.ndarray
    assert model.mean[...].tolist() == [1, 1, 1]


def test_keywords_of_a_function_of_a_module_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    from optax_sparse_adam import flax_nnx

    def predict(embed, *, ids, features):
        return embed(ids) * features[jnp.clip(ids, 0, 7)]

    embed = nnx.Embed(8, 3, rngs=nnx.Rngs(0))
    arguments = {"ids": IDS % 8, "features": FEATURES}
    rows = flax_nnx.evaluate(predict)(embed, **arguments)
    np.testing.assert_array_equal(rows, predict(embed, **arguments))
