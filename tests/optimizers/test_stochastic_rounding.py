"""`stochastic_rounding` as a transformation: state, keys, laziness, cost, company."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.identity import assert_rows_close
from ..helpers.support import (
    assert_identical,
    bcoo,
    compile_for_users,
    random_entries,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPE = (40, 8)
KEY = jax.random.key(0)


def rounded(inner=None, **kwargs):
    return osa.stochastic_rounding(inner or optax.adam(1e-3), KEY, **kwargs)


def make_grad(dtype="bfloat16", shape=SHAPE):
    values, indices = random_entries(np.random.default_rng(0), shape, 1, 12)
    return osa.coalesce(bcoo(values.astype(dtype), indices, shape))


def step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return osa.apply_updates(params, updates), state


def train(tx, params, grads, steps=2):
    """The parameters and the state after some steps with the same gradient."""
    state, compiled = tx.init(params), jax.jit(partial(step, tx))
    for _ in range(steps):
        params, state = compiled(params, state, grads)
    return params, state


def train_long(tx, params, state, grads):
    """Three hundred of them, compiled."""

    @jax.jit
    def run(params, state):
        return jax.lax.fori_loop(
            0, 300, lambda i, carry: step(tx, *carry, grads), (params, state)
        )

    return run(params, state)


def mean(x):
    return np.asarray(x).astype(np.float64).mean()


def test_small_updates_add_up():
    """300 steps of 0.001 from 1.0, of which rounding to nearest makes nothing."""
    params = jnp.ones(16_384, jnp.bfloat16)
    tx = optax.sgd(1e-3)
    assert_identical(train(tx, params, params)[0], params)
    tx = rounded(tx)
    new, _ = train_long(tx, params, tx.init(params), params)
    # A step rounds by less than 2**-8, with a variance of at most a quarter of that.
    deviation = 2.0**-9 * np.sqrt(300 / params.size)
    assert abs(mean(new) - 0.7) < 5 * deviation < 1.5e-3


@pytest.mark.parametrize(
    "inner",
    slow_but([optax.adam(0.0), osa.sparse_adam(1e-9)], optax.adam(0.0)),
    ids=["optax", "sparse"],
)
def test_bfloat16_moments_follow_float32_ones(inner):
    """With b2 = 0.999 a change of the second moment is below the type's precision."""
    params = jnp.ones(4096, jnp.bfloat16)

    def second_moment(tx):
        filled = jax.tree.map(
            lambda x: jnp.ones_like(x) if x.shape == params.shape else x,
            tx.init(params),
        )
        state = train_long(tx, params, filled, jnp.zeros_like(params))[1]
        return optax.tree.get(state, "nu")

    expected = 0.999**300  # 0.74
    narrow, wide = (second_moment(rounded(inner, state_dtype=t)) for t in (None, "f4"))
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    assert abs(mean(wide) / expected - 1) < 1e-5
    assert abs(mean(narrow) - expected) < 5 * 2.0**-9 * np.sqrt(300 / params.size)
    assert mean(second_moment(inner)) == 1  # to nearest


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [(optax.adam(0.1), "float32"), (osa.rowwise_adam(0.1), "float64")],
)
def test_wide_parameters_are_handed_through(inner, dtype):
    with jax.enable_x64(dtype == "float64"):
        params = {"a": jnp.ones(SHAPE, dtype), "b": jnp.ones(SHAPE, dtype)}
        tx = rounded(inner, state_dtype="float32")
        expected, state = inner.update(params, inner.init(params), params)
        updates, new = tx.update(params, tx.init(params), params)
        assert_identical(updates, expected)
        assert_identical(new.inner_state, state)


@pytest.mark.slow
def test_mixed_tree():
    """The wide leaves get the bits that they would get alone, `None` stays `None`."""
    inner = optax.adam(1e-3)
    params = {
        "low": jnp.ones(SHAPE, jnp.bfloat16),
        "wide": jnp.ones(SHAPE),
        "none": None,
    }
    tx = rounded(inner)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    alone, _ = inner.update(params["wide"], inner.init(params["wide"]))
    assert_identical(updates["wide"], alone)
    assert updates["none"] is None
    assert {k: x.dtype for k, x in updates.items() if k != "none"} == {
        "low": jnp.bfloat16,
        "wide": jnp.float32,
    }
    # A None where there is a parameter, with an inner transformation that allows it.
    tx = rounded(osa.sparse_adam(1e-3))
    before = tx.init(params)
    updates, after = tx.update(params | {"low": None}, before, params)
    assert updates["low"] is None
    assert_identical(after.inner_state.nu["low"], before.inner_state.nu["low"])


@pytest.mark.slow
def test_keys():
    """The same key, the same bits; another one, or another leaf, other bits."""
    one = jnp.full(SHAPE, 1.003, jnp.bfloat16)
    params = dict.fromkeys("abc", one)

    def run(key):
        tx = osa.stochastic_rounding(optax.adam(1e-3), key)
        return train(tx, params, params)

    first, state = run(KEY)
    assert_identical(first, run(KEY)[0])
    for seed in (0, np.int64(0), jnp.int32(0)):  # as in optax.add_noise
        assert_identical(first, run(seed)[0])
    assert_identical(first, run(jax.random.PRNGKey(0))[0])
    moments = state.inner_state[0]
    for arrays in (
        [*first.values(), run(jax.random.key(1))[0]["a"], one],
        [*moments.mu.values(), *moments.nu.values()],
    ):
        assert len({np.asarray(x).tobytes() for x in arrays}) == len(arrays)
    assert state.key.dtype == KEY.dtype
    assert (jax.random.key_data(state.key) != jax.random.key_data(KEY)).any()
    # The state is donated, the key that the user holds is not.
    tx = rounded()
    update = jax.jit(lambda g, s, p: tx.update(g, s, p)[1], donate_argnums=1)
    for _ in range(2):
        update(params, tx.init(params), params)
    assert not KEY.is_deleted()


LIFTED = {
    "adam": rounded(),
    "adam, float32 moments": rounded(state_dtype=jnp.float32),
    "sparse_adam": rounded(osa.sparse_adam(1e-3)),
    "chain": rounded(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))),
    "rowwise": rounded(
        optax.chain(osa.scale_by_rowwise_adam(), optax.scale_by_learning_rate(1e-3))
    ),
    "per_row": rounded(osa.per_row(optax.adam(1e-3))),
    "noise": rounded(optax.chain(optax.add_noise(1e-3, 0.5, KEY), optax.adam(1e-3))),
    "inject": rounded(optax.inject_hyperparams(optax.adam)(1e-3)),
    "finite": rounded(optax.apply_if_finite(optax.adam(1e-3), 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(LIFTED, "noise"))
def test_lazy(name):
    """The touched rows change as a table of their own; the others keep every bit."""
    tx, grad = LIFTED[name], make_grad()
    params = jax.random.normal(KEY, SHAPE).astype(jnp.bfloat16)
    rows = np.unique(np.asarray(grad.indices))
    rows = rows[rows < SHAPE[0]]
    used = len(rows)
    grad = bcoo(grad.data[:used], grad.indices[:used], SHAPE, unique_indices=True)
    lifted = osa.lazy(tx)
    starts = params, lifted.init(params)
    actual, expected = train(lifted, params, grad), train(tx, params[rows], grad.data)
    for new, sub, old in zip(actual, expected, starts, strict=True):
        assert_rows_close(new, sub, old, rows, 0.0)
    moved = rows[np.asarray(grad.data).any(axis=1)]
    assert (np.asarray(actual[0])[moved] != np.asarray(params)[moved]).any()


@pytest.mark.slow
def test_padding_and_none():
    """Padding is harmless, and a gradient without rows changes no row."""
    tx = osa.lazy(rounded())
    params = dict.fromkeys("ab", jnp.ones(SHAPE, jnp.bfloat16))
    nothing = bcoo(jnp.ones((4, 8), jnp.bfloat16), np.full((4, 1), 99), SHAPE)
    grads = {"a": nothing, "b": None}
    new, state = jax.jit(partial(step, tx))(params, tx.init(params), grads)
    assert_identical(new, params)
    for moment in (state.inner_state[0].mu, state.inner_state[0].nu):
        assert_identical(moment, jax.tree.map(jnp.zeros_like, params))


def test_scalars_stay_in_float32():
    """In bfloat16, b2 = 0.999 is 1."""
    params = jnp.ones(SHAPE, jnp.bfloat16)
    for state_dtype in (None, jnp.bfloat16, jnp.float32):
        tx = rounded(
            optax.inject_hyperparams(optax.adam)(1e-3), state_dtype=state_dtype
        )
        state = tx.init(params).inner_state
        assert float(state.hyperparams["b2"]) == np.float32(0.999)
        assert state.inner_state[0].nu.dtype == (state_dtype or jnp.bfloat16)


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_init_makes_no_wide_table():
    params = jnp.ones((1000, 64), jnp.bfloat16)
    seen = []

    def init(params):
        seen.append((params.dtype, isinstance(params, jax.core.Tracer)))
        return optax.scale_by_adam().init(params)

    inner = optax.GradientTransformation(init, optax.scale_by_adam().update)
    state = rounded(inner, state_dtype=jnp.float32).init(params)
    assert all(is_traced for _, is_traced in seen)
    assert seen[-1][0] == jnp.float32
    assert state.inner_state.mu.dtype == jnp.float32
    tx = rounded(optax.inject_hyperparams(optax.adam)(1e-3), state_dtype=jnp.float32)
    lowered = jax.jit(tx.init).lower(params)
    memory = compile_for_users(lowered).memory_analysis()
    assert memory.temp_size_in_bytes < size(params) / 8


def test_init_keeps_the_devices():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    params = jax.device_put(jnp.ones(SHAPE, jnp.bfloat16), spec)
    for state_dtype in (None, jnp.float32):
        state = rounded(state_dtype=state_dtype).init(params).inner_state[0]
        assert state.mu.sharding == state.nu.sharding == spec


def test_errors():
    table, grad = jnp.ones(SHAPE, jnp.bfloat16), make_grad()
    tx = rounded()
    state = tx.init(table)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(table, state)
    with pytest.raises(ValueError, match="needs the parameters"):
        osa.lazy(tx).update(grad, state)
    with pytest.raises(TypeError, match=r"inside lazy: optax_sparse_adam\.lazy"):
        tx.update(grad, state, table)
    with pytest.raises(ValueError, match="Parameters must have the tree structure"):
        tx.update({"a": table}, state, {"b": table})
    for bad in (jnp.int32, "complex64"):
        with pytest.raises(TypeError, match="state_dtype must be a floating"):
            rounded(state_dtype=bad)
