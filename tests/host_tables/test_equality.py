"""Tables on the host are trained to the bits of tables in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import (
    DIM,
    IDS,
    ROWS,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.optimizers import OPTIMIZERS
from ..helpers.support import assert_identical, slow_but

LABELS = {"table": "rows", "w": "others"}
MORE = {
    "schedule": lambda lr: osa.sparse_adam(optax.cosine_decay_schedule(lr, 60)),
    "partition": lambda lr: optax.partition(
        {"rows": osa.exact_adam(lr), "others": optax.adam(lr)}, LABELS
    ),
    "clipped": lambda lr: optax.chain(
        osa.lazy(optax.clip_by_global_norm(1.0)), osa.exact_adamw(lr)
    ),
    "momentum": lambda lr: osa.lazy(optax.sgd(lr, momentum=0.9)),
    "rmsprop": lambda lr: osa.lazy(optax.rmsprop(lr)),
    "lion": lambda lr: osa.lazy(optax.lion(lr)),
    "adagrad": lambda lr: osa.lazy(optax.adagrad(lr)),
    "adadelta": lambda lr: osa.lazy(optax.adadelta(lr)),
    "if finite": lambda lr: osa.lazy(optax.apply_if_finite(optax.adam(lr), 3)),
    "injected": lambda lr: optax.inject_hyperparams(osa.sparse_adam)(learning_rate=lr),
    "frozen": lambda lr: optax.partition(
        {"rows": optax.set_to_zero(), "others": osa.sparse_adam(lr)}, LABELS
    ),
}
MAKERS = {name: x.make for name, x in OPTIMIZERS.items()} | MORE


@pytest.mark.parametrize("name", slow_but(MAKERS, "sparse_adam"))
def test_a_pipeline_has_the_bits_of_memory(name, as_optax_expects):
    rows, w = begin()
    tx = MAKERS[name](1e-2)
    steps = 8 if name == "sparse_adam" else 50
    expected = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, steps))
    trainer = host.HostTrainer(loss, tx, host_params(rows, w))
    values = list(trainer.run(batches(0, steps)))
    assert_trained_alike(trainer, values, expected)
    assert trainer.steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact_adam", "sparse_adam", "rowwise_adagrad"])
def test_with_the_kernel(name, kernel):
    rows, w = begin((ROWS, 64))
    tx = MAKERS[name](1e-2)
    expected = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 20))
    trainer = host.HostTrainer(loss, tx, host_params(rows, w))
    assert_trained_alike(trainer, list(trainer.run(batches(0, 20))), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam", "rounded"])
def test_low_precision(name, dtype, as_optax_expects):
    rows, w = begin((ROWS, 7), dtype)  # an odd width: two numbers lie in a word
    rounded = osa.lazy(osa.stochastic_rounding(optax.adam(1e-2), jax.random.key(3)))
    tx = rounded if name == "rounded" else MAKERS[name](1e-2)

    def cast(params, ids, y):
        table = params["table"].astype(jnp.float32)
        return loss(params | {"table": table}, ids, y)

    expected = train_in_memory(cast, tx, {"table": rows, "w": w}, batches(0, 20))
    trainer = host.HostTrainer(cast, tx, host_params(rows, w))
    assert_trained_alike(trainer, list(trainer.run(batches(0, 20))), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse_adam", "exact_adamw"])
def test_float64(name, as_optax_expects):
    with jax.enable_x64(True):
        rows, w = begin(dtype=np.float64)

        def cast(params, ids, y):
            rows = params["table"][ids] @ params["w"].astype(float)
            return jnp.mean((rows.sum(1) - y.astype(float)) ** 2)

        tx = MAKERS[name](1e-2)
        expected = train_in_memory(cast, tx, {"table": rows, "w": w}, batches(0, 9))
        trainer = host.HostTrainer(cast, tx, host_params(rows, w))
        assert_trained_alike(trainer, list(trainer.run(batches(0, 9))), expected)


@pytest.mark.slow
def test_a_batch_of_one_row(as_optax_expects):
    """`adaptive_grad_clip` takes a table of one row for a vector; here it is none."""
    tx = optax.chain(osa.lazy(optax.adaptive_grad_clip(0.1)), osa.exact_adam(0.05))

    def loss(params, ids):
        def of_table():
            return jnp.sum((params["table"][ids] - 1) ** 2)

        def of_memory():
            return jnp.sum(params["memory"][ids % 13] ** 2)

        return lax.cond(ids[0] >= 0, of_table, of_memory)

    rows, memory = begin()[0], jnp.ones((13, DIM))
    made = [(np.full(6, 3),), (np.array([3, 7, 9, 9, 9, 9]),)]
    params = {"table": rows, "memory": memory}
    expected = train_in_memory(loss, tx, params, made)
    params = {"table": host_params(rows, memory)["table"], "memory": memory}
    trainer = host.HostTrainer(loss, tx, params)
    assert_trained_alike(trainer, list(trainer.run(made)), expected)


# Models: functions of the table, ids [IDS] and targets.


def _scan(t, ids, y):
    def body(total, x):
        return total + jnp.sum(t[x[0]] * x[1]), None

    return lax.scan(body, jnp.float32(0), (ids, y))[0]


def _checkpointed_scan(t, ids, y):
    @jax.checkpoint
    def body(total, x):
        return total + jnp.sum(jnp.tanh(t[x[0]]) * x[1]), None

    return lax.scan(body, jnp.float32(0), (ids.reshape(-1, 4), y.reshape(-1, 4, 1)))[0]


def _cond(t, ids, y):
    return lax.cond(y[0] > 0, lambda: (t[ids] ** 2).sum(), lambda: t[ids[:5]].sum())


def _bag(mode, t, ids, y):
    bags = osa.embedding_bag(t, ids.reshape(-1, 4), mode=mode)
    return jnp.sum(bags**2)


def _weighted_bag(t, ids, y):
    offsets = jnp.array([0, 5, 5, 20])
    return jnp.sum(osa.embedding_bag(t, ids, offsets=offsets, weights=y) ** 2)


def _bags_of_each(t, ids, y):
    """Those of many examples, each with its weights; a `HostTable` is not broadcast."""

    def one(ids, y):
        summed = osa.embedding_bag(t, ids[None], weights=y[None])
        by_segment = osa.embedding_bag(
            t, ids, segment_ids=jnp.array([0, 1, 1, 3]), num_segments=3
        )
        return jnp.sum(summed) ** 2 + jnp.sum(by_segment**2)

    return jnp.sum(jax.vmap(one)(ids.reshape(-1, 4), y.reshape(-1, 4)))


def _hashed(t, ids, y):
    mixed = (ids.astype(jnp.uint32) * jnp.uint32(2654435761)) % jnp.uint32(ROWS)
    return jnp.sum(t[mixed.astype(jnp.int32)] ** 2)


def _padded(t, ids, y):
    # Ids out of bounds on purpose: what reads zeros has no gradient.
    ids = jnp.where(y > 0, ids, ROWS)
    return jnp.sum(t.at[ids].get(mode="fill", fill_value=0) ** 2)


MODELS = {
    "jit": lambda t, ids, y: jax.jit(lambda a, i: a[i])(t, ids).sum(),
    "two lookups": lambda t, ids, y: (t[ids] * t[ids[::-1]]).sum(),
    "take": lambda t, ids, y: (jnp.take(t, ids, axis=0) ** 2).sum(),
    "take, clipped": lambda t, ids, y: jnp.take(t, ids - 3, 0, mode="clip").sum(),
    "negative ids": lambda t, ids, y: (t[ids - ROWS] ** 2).sum(),
    "filled": _padded,
    "dynamic slice": lambda t, ids, y: lax.dynamic_slice(t, (ids[0], 2), (1, 3)).sum(),
    "windows": lambda t, ids, y: (
        jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 3))(ids) ** 2
    ).sum(),
    "single row": lambda t, ids, y: (t[ids[0]] ** 2).sum(),
    "columns": lambda t, ids, y: (t[ids, ids % DIM] ** 2).sum(),
    "scaled": lambda t, ids, y: (jnp.tanh(2 * t)[ids] ** 2).sum(),
    "by a dense array": lambda t, ids, y: ((t * jnp.full(t.shape, 0.5))[ids]).sum(),
    "cast": lambda t, ids, y: t.astype(jnp.bfloat16)[ids].astype(jnp.float32).sum(),
    "hashed": _hashed,
    "scan": _scan,
    "fori loop": lambda t, ids, y: lax.fori_loop(
        0, 5, lambda k, total: total + (t[ids[k]] ** 2).sum(), jnp.float32(0)
    ),
    "checkpointed scan": _checkpointed_scan,
    "checkpoint": lambda t, ids, y: jax.checkpoint(lambda a: jnp.sin(a[ids]).sum())(t),
    "cond": _cond,
    "vmap": lambda t, ids, y: jax.vmap(lambda i, z: (t[i] * z).sum())(ids, y).sum(),
    "bag": functools.partial(_bag, "sum"),
    "bag, mean": functools.partial(_bag, "mean"),
    "bag, max": functools.partial(_bag, "max"),
    "weighted bag": _weighted_bag,
    "bags of each": _bags_of_each,
    "stopped": lambda t, ids, y: (t[ids] * lax.stop_gradient(t[ids[::-1]])).sum(),
    "2-d ids": lambda t, ids, y: (t[ids.reshape(4, -1)] ** 2).sum(),
    "sorted, unique": lambda t, ids, y: (
        t.at[jnp.arange(5)].get(unique_indices=True, indices_are_sorted=True) ** 2
    ).sum(),
    "narrow ids": lambda t, ids, y: (t[ids.astype(jnp.uint16)] ** 2).sum(),
    "more ids than rows": lambda t, ids, y: (jnp.tile(t[jnp.tile(ids, 9)], 2)).sum(),
    "no ids": lambda t, ids, y: t[ids[:0]].sum() + y.sum(),
    "shown": lambda t, ids, y: _show(t[ids]).sum(),
    "aux": lambda t, ids, y: t[ids].sum(),
}


def _show(x):
    jax.debug.callback(lambda _: None, x.sum())
    return x


def _of_model(model, params, ids, y):
    return model(params["table"], ids, y) * 0.1 + jnp.sum(params["w"] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("of_floats", [False, True])
@pytest.mark.parametrize("name", slow_but(MODELS, "cond", "bags of each"))
def test_models(name, of_floats):
    rows, w = begin()
    tx = osa.exact_adam(1e-2) if name in ("scan", "bag") else osa.sparse_adam(1e-2)

    def fun(params, ids, y):
        # A step looks up the ids that were fetched: see `test_ids_of_floats.py`.
        ids = jnp.exp(jnp.log(ids + 0.5)).astype(jnp.int32) if of_floats else ids
        return _of_model(MODELS[name], params, ids, y)

    dtype = np.float32 if of_floats else np.int32
    made = [(ids.astype(dtype), y) for ids, y in batches(0, 6)]
    expected = train_in_memory(fun, tx, {"table": rows, "w": w}, made)
    trainer = host.HostTrainer(fun, tx, host_params(rows, w))
    assert_trained_alike(trainer, list(trainer.run(made)), expected)


@pytest.mark.slow
def test_two_tables_none_leaves_more_axes_aux_and_keywords():
    rows, w = begin()
    other = np.random.default_rng(5).normal(size=(40, 2, 3)).astype(jnp.bfloat16)

    def fun(params, ids, *, scale, square=True):
        a, b = params["tables"]
        x = a[ids["a"]].sum(1) + b[ids["b"]].astype(jnp.float32).sum((1, 2))
        x = (x**2 if square else x) * scale
        return x.sum() + params["w"].sum(), {"x": x, "n": 3}

    def params(tables):
        return {"tables": tables, "w": jnp.array(w), "none": None}

    tx = osa.sparse_adam(1e-2)
    plain = params((jnp.array(rows), jnp.array(other)))
    state, step = tx.init(plain), osa.make_train_step(fun, tx, True)
    a = host.HostTable(rows.shape, init=lambda i, j: rows[i:j])
    b = host.HostTable(other.shape, "bfloat16", init=lambda i, j: other[i:j])
    trainer = host.HostTrainer(fun, tx, params((a, b)), has_aux=True)
    for ids, _ in batches(0, 4):
        batch = {"a": ids, "b": ids[::-1] % 40}  # not contiguous
        for square in (True, False):
            keywords = {"scale": 0.5, "square": square}
            plain, state, value = step(plain, state, batch, **keywords)
            own = trainer.step(batch, **keywords)
            assert_identical(own, value)
    assert_trained_alike(trainer, [], (plain, state, []))


@pytest.mark.slow
def test_ids_that_depend_on_parameters_are_steps_one_by_one():
    rows, w = begin()

    def fun(params, ids, y):
        nearest = jnp.argmax(params["w"][:, 0]) + ids
        return jnp.sum(params["table"][nearest % ROWS] ** 2) + jnp.sum(
            jnp.abs(params["w"] - 1)
        )

    tx = osa.sparse_adam(0.3)
    expected = train_in_memory(fun, tx, {"table": rows, "w": w}, batches(0, 9))
    trainer = host.HostTrainer(fun, tx, host_params(rows, w))
    assert_trained_alike(trainer, list(trainer.run(batches(0, 9))), expected)


def test_the_second_step_is_the_program_of_the_first(compilations):
    """Its parameters are results of the first, on the device of the rows."""
    rows, w = begin()
    trainer = host.HostTrainer(loss, osa.sparse_adam(1e-2), host_params(rows, w))
    batch = next(batches(0, 1))
    trainer.step(*batch)
    count = len(compilations)
    trainer.step(*batch)
    assert len(compilations) == count


@pytest.mark.slow
def test_batches_of_several_shapes_compile_once_each(compilations):
    rows, w = begin()
    tx = osa.sparse_adam(1e-2)
    trainer = host.HostTrainer(loss, tx, host_params(rows, w))
    sizes = [IDS, 16, IDS, 16, 1, IDS]
    made = [next(batches(k, k + 1, ids=n)) for k, n in enumerate(sizes)]
    expected = train_in_memory(loss, tx, {"table": rows, "w": w}, made)
    assert_trained_alike(trainer, list(trainer.run(made)), expected)
    list(trainer.run(made))
    count = len(compilations)
    list(trainer.run(made))
    assert len(compilations) == count


@pytest.mark.slow
def test_one_row_and_fewer_rows_than_ids():
    for size in (1, 2, 5):
        rows, w = begin((size, DIM))
        tx = osa.rowwise_adam(1e-2)
        made = [*batches(0, 5, rows=size)]
        expected = train_in_memory(loss, tx, {"table": rows, "w": w}, made)
        trainer = host.HostTrainer(loss, tx, host_params(rows, w))
        assert_trained_alike(trainer, list(trainer.run(made)), expected)
