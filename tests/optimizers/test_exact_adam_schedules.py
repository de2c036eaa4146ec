"""exact_adam under schedules: odd ones, those without an end, those that stay."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._exact_adam.schedule import outlook
from optax_sparse_adam._exact_adam.step import Betas

from ..helpers import exact_adam as model
from ..helpers.exact_adam import RATE
from ..helpers.exact_adam_table import ROWS, WIDTH, batches, runner, start
from ..helpers.support import assert_close, assert_identical, bcoo, slow_but


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        # Undefined after the last step.
        lambda count: 0.1 * (1 - count / 60) ** 0.9,
        lambda count: jnp.where(count < 60, 0.1, jnp.inf),
        # Still at first, and again in the end.
        lambda count: jnp.where((count < 30) | (count > 50), 0.0, 0.1),
        # Growing, with an end, and by less than momentum dies out.
        optax.exponential_decay(1e-7, 1, 1.2, end_value=0.1),
        optax.exponential_decay(1e-7, 1, 1.05),
    ],
)
def test_odd_schedules(schedule):
    def at(count):
        return schedule(jnp.asarray(count, float))

    ours, optaxs = osa.exact_adam(at), optax.adam(at)
    exact, dense, ids = runner(ours, True), runner(optaxs, False), batches(60)
    (table, state), values = exact(start(), ours.init(start()), ids)
    (wanted, _), expected = dense(start(), optaxs.init(start()), ids)
    assert_close(values, expected, 1e-11, magnitude=1.0)
    assert_close(osa.flush(table, state)[0], wanted, 1e-11, magnitude=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("factor", slow_but([1.1, 1.2, 10.0], 1.2))
def test_a_way_without_an_end(factor):
    """NaN at once, in place of a table that is wrong."""
    tx = osa.exact_adam(optax.exponential_decay(1e-3, 1, factor))
    grad = bcoo(np.ones((1, WIDTH)), np.zeros((1, 1), np.int32), (ROWS, WIDTH))
    update, _ = jax.jit(tx.update)(grad, tx.init(start()))
    assert np.isnan(update.data).all()


@pytest.mark.parametrize(
    ("rate", "decay"), slow_but([(1e-3, None), (0.3, 0.1)], (0.3, 0.1))
)
def test_a_constant_has_an_end(rate, decay):
    """Its sums are not searched for one, and are those of equal numbers that are."""
    betas, texts, views = Betas(0.9, 0.999, 1e-8, nesterov=False), [], []
    for add in (lambda value, count: value, lambda value, count: value + 0.0 * count):
        schedules = [x and functools.partial(add, x) for x in (rate, decay)]
        look = functools.partial(outlook, betas=betas, dtype="float32")
        look = jax.jit(lambda count, look=look, of=schedules: look(count, *of))
        views.append([look(jnp.asarray(count, "int32")) for count in (0, 7)])
        texts.append(look.lower(jnp.asarray(0, "int32")).as_text())
    assert_identical(*views)
    assert texts[0].count("maximum") < texts[1].count("maximum")


@pytest.mark.slow
def test_the_end_of_a_schedule_that_does_not_end_training():
    """A learning rate that is NaN when its step comes is used."""
    tx = osa.exact_adam(lambda count: 0.1 * (1 - count / 3) ** 0.5)
    (table, state), _ = runner(tx, True)(start(), tx.init(start()), batches(4))
    chex.assert_tree_all_finite(osa.flush(table, state))
    (table, state), _ = runner(tx, True)(table, state, batches(1))
    assert np.isnan(osa.flush(table, state)[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_a_schedule_that_is_no_number_at_this_step(name, steps):
    """The message names the schedule and the step, and speaks of no other state."""
    schedules = {"learning_rate": 0.1, "weight_decay": 0.1}
    schedules[name] = lambda count: jnp.where(count == steps, jnp.nan, 0.1)
    tx = osa.exact_adamw(**schedules)
    table, state = runner(tx, True)(start(), tx.init(start()), batches(steps))[0]
    grad = osa.grad(lambda table: jnp.sum(table[jnp.array([1, 2])]), read=state)(table)
    with pytest.raises(ValueError, match=f"finite {name} .*; got nan at step {steps} "):
        tx.update(grad, state, table)
    assert np.isnan(jax.jit(tx.update)(grad, state, table)[0].data).all()


SCHEDULES = [
    optax.warmup_cosine_decay_schedule(0.0, RATE, 50, 400),
    optax.polynomial_schedule(RATE, 0.0, 0.5, 400),
    optax.exponential_decay(RATE, 10, 0.5),
    lambda count: RATE * (1 - count / 400) ** 0.9,
    lambda count: jnp.where(count % 100 < 50, RATE, 1e-7 * RATE),
]


def eagerly(function):
    return function


# Each schedule in each type, and in each way.
STAYING = [
    pair
    for one, other, schedule in zip(
        (jax.jit, eagerly) * 3, (eagerly, jax.jit) * 3, SCHEDULES, strict=False
    )
    for pair in ((schedule, one, "float64"), (schedule, other, "float32"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "way", "dtype"), slow_but(STAYING, (SCHEDULES[3], jax.jit, "float32"))
)
def test_schedules_that_stay(dtype, schedule, way):
    """Nothing changes, in a step and in its parts: no false alarm."""
    with jax.enable_x64(dtype == "float64"):
        tx = osa.exact_adam(schedule)
        params = jax.tree.map(lambda x: x.astype(dtype), model.start())
        step = osa.make_train_step(model.loss, tx)
        state, update = tx.init(params), way(tx.update)
        gradient_of = way(lambda p, i, s: osa.grad(model.loss, read=s)(p, i))
        for i, ids in enumerate(model.batches(400)):
            if i % 50 == 49:
                grads = gradient_of(params, ids, state)
                updates, state = update(grads, state, params)
                params = osa.apply_updates(params, updates)
            else:
                params, state, value = step(params, state, ids)
                assert np.isfinite(value), i
