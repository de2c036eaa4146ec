"""exact_adam beside the documented way: right, an error, or NaN; never in silence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.support import assert_close, slow_but

ROWS, WIDTH = 30, 3
RATE = 0.05
_SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def start(rows=ROWS):
    rng = np.random.default_rng(0)
    return {"table": jnp.asarray(rng.normal(size=(rows, WIDTH))), "w": jnp.ones(WIDTH)}


def loss(params, ids):
    return jnp.mean(jnp.sin(params["table"][ids] @ params["w"] + ids))


def batches(steps, seed=1):
    ids = np.random.default_rng(seed).zipf(1.5, (steps, 4)) % ROWS
    return jnp.asarray(ids, "int32")


def exact_run(tx, params, state, ids):
    step = osa.make_train_step(loss, tx)
    values = []
    params, state = jax.tree.map(jnp.copy, (params, state))
    for batch in ids:
        params, state, value = step(params, state, batch)
        values.append(value)
    return params, state, jnp.stack(values)


@functools.cache
def dense_step(tx):
    @jax.jit
    def step(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def dense_run(tx, params, state, ids):
    values = []
    for batch in ids:
        params, state, value = dense_step(tx)(params, state, batch)
        values.append(value)
    return params, state, jnp.stack(values)


def assert_trees(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-11, magnitude=1.0)


def trained(tx):
    params, state, _ = exact_run(tx, start(), tx.init(start()), batches(20))
    return params, state


# 1. Gradients made without read=.


def gradient(params, **kwargs):
    return jax.jit(osa.grad(loss, **kwargs))(params, batches(1)[0])


def of_table(change):
    return lambda grads: {**grads, "table": change(grads["table"])}


GRADIENT_CHANGES = {
    "nothing": lambda grads: grads,
    "coalesce": of_table(osa.coalesce),
    "scale": of_table(lambda grad: 0.5 * grad),
    "sum_duplicates": of_table(lambda grad: grad.sum_duplicates(nse=4)),
    "astype": of_table(lambda grad: grad.astype("float32")),
    "jit": of_table(jax.jit(lambda grad: grad)),
    "lazy": lambda g: osa.lazy(optax.clip(1.0)).update(g, optax.EmptyState())[0],
}
OPTIMIZER_AROUND = {
    "nothing": lambda tx: tx,
    "chain": lambda tx: optax.chain(osa.lazy(optax.clip(1.0)), tx),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(0.1)}, {"table": "a", "w": "b"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, max_consecutive_errors=3),
}
# What is around is passed through before a gradient is looked at: each with each change
# of the core, and all changes without.
WITHOUT_READ = [("nothing", change) for change in GRADIENT_CHANGES]
WITHOUT_READ += [
    (around, change)
    for around in list(OPTIMIZER_AROUND)[1:]
    for change in ("nothing", "lazy")
]


@pytest.mark.parametrize(
    ("around", "change"),
    slow_but(
        WITHOUT_READ,
        *(("nothing", change) for change in ("nothing", "coalesce", "lazy")),
        ("partition", "nothing"),
    ),
)
def test_gradients_without_read(around, change):
    params, tx = start(), OPTIMIZER_AROUND[around](osa.exact_adam(RATE))
    state = tx.init(params)
    update = functools.partial(jax.eval_shape, tx.update)
    with pytest.raises(ValueError, match=r"made with read=.*'table'.*without"):
        update(GRADIENT_CHANGES[change](gradient(params)), state, params)
    grads = gradient(params, read=state)
    update({**grads, "table": osa.coalesce(grads["table"])}, state, params)


def test_read_of_another_state():
    """That of a part of the parameters is none of the others."""
    params = start()
    some = osa.exact_adam(RATE).init({"table": None, "w": params["w"]})
    grads = gradient(params, read=some)
    tx = osa.exact_adam(RATE)
    with pytest.raises(ValueError, match=r"made with read="):
        tx.update(grads, tx.init(params), params)


LATER = r"made with the state of another step|of two of its steps"


@pytest.mark.slow
@pytest.mark.parametrize("look_up", [lambda t, i: t[i], osa.embedding_bag])
def test_read_of_no_step_and_of_another(look_up):
    """A gradient function that was made before the loop, and gradients used twice."""
    table, tx = start()["table"], osa.exact_adam(RATE)
    ids = jnp.array([[3, 7], [7, 5]])
    state = tx.init(table)

    def loss(table):
        return jnp.sum(look_up(table, ids))

    for change in (lambda grad: grad, lambda grad: 0.5 * grad, osa.coalesce):
        with pytest.raises(ValueError, match="made with read="):
            tx.update(change(jax.jit(osa.grad(loss))(table)), state, table)
    gradient_of = jax.jit(osa.grad(loss, read=state))
    grad = gradient_of(table)
    update, new_state = jax.jit(tx.update)(grad, state, table)
    table = osa.apply_updates(table, update)
    with pytest.raises(ValueError, match=LATER):
        tx.update(gradient_of(table), new_state, table)
    update, _ = jax.jit(tx.update)(2.0 * grad, new_state, table)
    after = np.isnan(jax.jit(osa.apply_updates)(table, update)).all(axis=1)
    assert sorted(np.flatnonzero(after)) == [3, 5, 7]
    newer = jax.jit(osa.grad(loss, read=new_state))(table)
    with pytest.raises(ValueError, match=LATER):
        tx.update(newer + grad, new_state, table)
    nothing = jax.tree.map(jnp.zeros_like, grad)
    for good in (newer + nothing, osa.coalesce(newer)):
        update, _ = jax.jit(tx.update)(good, new_state, table)
        assert np.isfinite(update.data).all()


def halved(tx):
    """What its state does not show to be behind."""
    return optax.named_chain(("a", tx), ("b", osa.lazy(optax.scale(0.5))))


@pytest.mark.parametrize("around", [halved, lambda tx: tx])
def test_changed_updates(around):
    params, tx = start(), around(osa.exact_adam(RATE))
    state = tx.init(params)

    updates, _ = jax.jit(tx.update)(gradient(params, read=state), state, params)
    if around is not halved:
        osa.apply_updates(params, {**updates, "table": osa.coalesce(updates["table"])})
        updates["table"] = 0.5 * updates["table"]
    with pytest.raises(ValueError, match="Nothing may change the updates"):
        osa.apply_updates(params, updates)
    after = jax.jit(osa.apply_updates)(params, updates)
    assert np.isnan(after["table"]).any()


def test_nnx_without_read():
    model = nnx.Embed(ROWS, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, osa.exact_adam(RATE), wrt=nnx.Param)
    grads = flax_nnx.grad(lambda m: jnp.sum(m(batches(1)[0]) ** 2))(model)
    with pytest.raises(ValueError, match=r"made with read="):
        optimizer.update(model, grads)


@pytest.mark.slow
def test_evaluation():
    """The rows as they are now, with and without a gradient, and by whole tables."""
    params, state = trained(osa.exact_adam(RATE))
    flushed, _ = jax.jit(osa.flush)(params, state)
    ids = jnp.arange(ROWS)

    def rows(params, ids):
        return {"rows": params["table"][ids], "sum": params["table"].sum(), "name": "x"}

    found = osa.evaluate(rows, read=state)(params, ids)
    assert_close(found["rows"], flushed["table"], 1e-13)
    assert_close(found["sum"], flushed["table"].sum(), 1e-12)
    assert found["name"] == "x"
    assert np.abs(rows(params, ids)["rows"] - found["rows"]).max() > 0.01
    plain = osa.evaluate(rows)(flushed, ids)
    assert_close(plain["rows"], flushed["table"], 0.0)
    second = osa.evaluate(lambda i, p: p["table"][i], argnums=1, read=state)
    assert_close(jax.jit(second)(ids, params), flushed["table"], 1e-13)


# 2 and 3. The count and the schedule.

COSINE = optax.cosine_decay_schedule(RATE, 100)
# The new optimiser, what it is in optax, and the new count.
CHANGES = {
    "count": (osa.exact_adam(RATE), optax.adam(RATE), 0),
    "count, later": (osa.exact_adam(RATE), optax.adam(RATE), 100_000),
    "rate": (osa.exact_adam(0.3 * RATE), optax.adam(0.3 * RATE), 20),
    "one percent": (osa.exact_adam(1.01 * RATE), optax.adam(1.01 * RATE), 20),
    "schedule": (osa.exact_adam(COSINE), optax.adam(COSINE), 20),
    "nesterov": (
        osa.exact_adam(RATE, nesterov=True),
        optax.adam(RATE, nesterov=True),
        20,
    ),
    "decay": (
        osa.exact_adamw(RATE, weight_decay=0.3),
        optax.adamw(RATE, weight_decay=0.3),
        20,
    ),
}


def before_change(name):
    tx = osa.exact_adamw(RATE, weight_decay=0.1) if name == "decay" else None
    return trained(tx or osa.exact_adam(RATE))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(CHANGES, "count", "schedule", "nesterov"))
def test_changes_after_flush(name):
    tx, reference, count = CHANGES[name]
    params, state = osa.flush(*before_change(name))
    state = optax.tree.set(state, count=jnp.int32(count))
    adam = optax.ScaleByAdamState(state.count, state.mu, state.nu)
    dense = optax.tree.set(reference.init(params), count=state.count)
    dense = (adam, *dense[1:])
    ids = batches(25, seed=3)
    actual, state, values = exact_run(tx, params, state, ids)
    wanted, _, expected = dense_run(reference, params, dense, ids)
    assert_trees(values, expected)
    assert_trees(osa.flush(actual, state)[0], wanted)


@pytest.mark.parametrize("name", slow_but(CHANGES, "count", "one percent"))
def test_changes_without_flush(name):
    """NaN in a program, for all to see; an error outside."""
    tx, _, count = CHANGES[name]
    params, state = before_change(name)
    changed = optax.tree.set(state, count=jnp.int32(count))
    after, changed_state, values = exact_run(tx, params, changed, batches(3, seed=3))
    assert np.isnan(values[1:]).all()
    flushed = osa.flush(after, changed_state)[0]["table"]
    assert np.isnan(flushed[batches(3, seed=3).reshape(-1)]).all()
    grads = gradient(params, read=changed)
    with pytest.raises(ValueError, match="Call params, state = flush"):
        tx.update(grads, changed, params)
    # The state as it is can still be flushed, and then all is well.
    params, state = osa.flush(params, changed)
    _, _, values = exact_run(tx, params, state, batches(3, seed=3))
    assert np.isfinite(values).all()


@pytest.mark.parametrize("dtype", ["float32", _SLOW("float64")])
def test_rows_later_than_their_table(dtype):
    """A state restored in part has rows from after its clock; the kernel in float32."""
    tx, params, ids = osa.exact_adam(RATE), start(), batches(12)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    older = exact_run(tx, params, tx.init(params), ids[:6])[1]
    params, newer, _ = exact_run(tx, params, tx.init(params), ids)
    names = "count", "clock", "origin", "values_until", "remaining"
    state = newer._replace(**{name: getattr(older, name) for name in names})
    read = jax.jit(lambda p, s: osa.evaluate(lambda p: p["table"][ids[6:]], read=s)(p))
    assert np.isnan(read(params, state)).all()


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


@pytest.mark.parametrize(
    ("schedule", "way", "dtype"), slow_but(STAYING, (SCHEDULES[3], jax.jit, "float32"))
)
def test_schedules_that_stay(dtype, schedule, way):
    """Nothing changes, in a step and in its parts: no false alarm."""
    with jax.enable_x64(dtype == "float64"):
        tx = osa.exact_adam(schedule)
        params = jax.tree.map(lambda x: x.astype(dtype), start())
        step = osa.make_train_step(loss, tx)
        state, update = tx.init(params), way(tx.update)
        gradient_of = way(lambda p, i, s: osa.grad(loss, read=s)(p, i))
        for i, ids in enumerate(batches(400)):
            if i % 50 == 49:
                grads = gradient_of(params, ids, state)
                updates, state = update(grads, state, params)
                params = osa.apply_updates(params, updates)
            else:
                params, state, value = step(params, state, ids)
                assert np.isfinite(value), i


# 4. States in part.


@pytest.mark.parametrize("name", ["mu", "nu", "last", "log_decay"])
@pytest.mark.parametrize("size", [ROWS - 1, _SLOW(ROWS + 5)])
def test_states_of_another_height(name, size):
    tx, params = osa.exact_adamw(RATE), start()
    state, other = tx.init(params), tx.init(start(size))
    mixed = state._replace(**{name: getattr(other, name)})
    grads = gradient(params, read=state)
    for use in (
        lambda: tx.update(grads, mixed, params),
        lambda: gradient(params, read=mixed),
        lambda: osa.flush(params, mixed),
        lambda: osa.evaluate(loss, read=mixed)(params, batches(1)[0]),
    ):
        with pytest.raises(ValueError, match=rf"`{name}.*must have the shape"):
            use()


@pytest.mark.parametrize(
    "name", ["values_until", "remaining", "decay", "count", "clock"]
)
def test_states_of_other_parameters(name):
    tx, params = osa.exact_adamw(RATE), start()
    state, other = tx.init(params), tx.init({**start(), "more": jnp.ones(2)})
    value = getattr(other, name)
    value = jnp.ones(3, "int32") if name in ("count", "clock") else value
    with pytest.raises(ValueError, match=f"`{name}` of shape"):
        osa.flush(params, state._replace(**{name: value}))


# 5 and 6. What follows.


@pytest.mark.parametrize(
    "behind",
    [
        optax.freeze({"table": True, "w": False}),
        optax.scale(0.5),
        optax.ema(0.9),
        optax.add_decayed_weights(0.1),
        osa.lazy(optax.clip(0.1)),
    ],
)
@pytest.mark.parametrize("place", [lambda x: x, lambda x: optax.chain(x)])
def test_what_follows_in_a_chain(behind, place):
    params = start()
    tx = optax.chain(place(osa.exact_adam(RATE)), behind)
    state = tx.init(params)
    for use in (
        lambda: gradient(params, read=state),
        lambda: osa.flush(params, state),
        lambda: osa.make_train_step(loss, tx)(start(), tx.init(params), batches(1)[0]),
    ):
        with pytest.raises(ValueError, match=r"Nothing may follow exact_adam"):
            use()


PARTS = {"exact": osa.exact_adam(RATE), "rest": optax.sgd(RATE)}
MASKS = {"exact": {"table": True, "w": False}, "rest": {"table": False, "w": True}}
AROUND = {
    "schedule_free": (
        lambda tx: optax.contrib.schedule_free(tx, RATE),
        "Nothing may change the updates",
    ),
    "MultiSteps": (
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        r"inside optax\.MultiSteps.*gradient span the micro-batches.*lax\.scan",
    ),
    "mechanize": (optax.contrib.mechanize, "Nothing may change the updates"),
    "flatten": (optax.flatten, r"optax\.flatten.*without it"),
    "masks in a chain": (
        lambda _: optax.chain(*(optax.masked(PARTS[k], MASKS[k]) for k in PARTS)),
        r"groups of parameters.*optax\.partition",
    ),
    "rounding": (lambda tx: osa.stochastic_rounding(tx, 0), "cannot be around"),
    "per_row": (osa.per_row, "per_row cannot be around exact_adam"),
    # Its rows would not move: another optimiser, and nothing would say so.
    "lazy": (
        lambda tx: osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), tx)),
        "exact Adam advances all rows",
    ),
    "lazy(per_row)": (lambda tx: osa.lazy(osa.per_row(tx)), "advances all rows|around"),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around(name):
    around, words = AROUND[name]
    with pytest.raises(ValueError, match=words):
        gradient(start(), read=around(osa.exact_adam(RATE)).init(start()))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["conditionally_mask", "conditionally_transform"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_that_are_left_out(wrap, decay):
    """What is left out for both, and a gradient that is added as it is."""

    def around(tx):
        return getattr(optax, wrap)(tx, lambda step, **_: step % 2 == 0)

    own, theirs = osa.exact_adam(RATE), optax.adam(RATE)
    if decay:
        own = osa.exact_adamw(RATE, weight_decay=decay)
        theirs = optax.adamw(RATE, weight_decay=decay)
    tx, reference = around(own), around(theirs)
    if decay and wrap == "conditionally_transform":
        with pytest.raises(ValueError, match=r"Use optax\.conditionally_mask"):
            gradient(start(), read=tx.init(start()))
        return
    params, state, values = exact_run(tx, start(), tx.init(start()), batches(6))
    dense, other = start(), reference.init(start())
    for ids, value in zip(batches(6), values, strict=True):
        dense, other, expected = dense_step(reference)(dense, other, ids)
        assert_close(value, expected, 1e-8)
    assert_close(osa.flush(params, state)[0]["table"], dense["table"], 1e-7)


# 7. Labels, schedules, states of others.


@pytest.mark.parametrize("kind", ["partition", _SLOW("masked")])
def test_prefix_labels(kind):
    """One label for a branch of the parameters."""

    def nested():
        dense = {"w": jnp.ones(WIDTH), "more": [jnp.ones(2), jnp.ones(())]}
        return {"a": dense, "b": {"x": {"table": start()["table"]}}, "c": jnp.ones(2)}

    def loss(params, ids):
        rows = params["b"]["x"]["table"][ids] @ params["a"]["w"]
        extra = jnp.sum(params["c"]) + jnp.sum(params["a"]["more"][0])
        return jnp.mean(jnp.sin(rows + ids)) * extra * params["a"]["more"][1]

    def build(adam):
        if kind == "masked":
            return optax.masked(adam(RATE), {"a": True, "b": True, "c": False})
        parts = {
            "exact": adam(RATE),
            "sgd": optax.sgd(0.1),
            "none": optax.set_to_zero(),
        }
        return optax.partition(parts, {"a": "sgd", "b": "exact", "c": "none"})

    tx, reference = build(osa.exact_adam), build(optax.adam)
    params, wanted = nested(), nested()
    state, dense = tx.init(params), reference.init(wanted)
    step = osa.make_train_step(loss, tx)
    other = osa.make_train_step(loss, reference, sparse=False)
    for ids in batches(15):
        params, state, value = step(params, state, ids)
        wanted, dense, expected = other(wanted, dense, ids)
        assert_close(value, expected, 1e-11)
    assert_trees(osa.flush(params, state)[0], wanted)


@pytest.mark.parametrize("other", [optax.adam(RATE), osa.sparse_adam(RATE)])
def test_states_of_other_optimizers(other):
    """One sentence, without the tree."""
    params, tx = start(), osa.exact_adam(RATE)
    grads = gradient(params, read=tx.init(params))
    with pytest.raises(TypeError, match="takes its own state") as error:
        tx.update(grads, other.init(params), params)
    assert len(str(error.value)) < 400
    many = {f"layer {i}": jnp.ones(2) for i in range(50)}
    with pytest.raises(ValueError, match="belong to the parameters") as error:
        osa.flush(many, tx.init(params))
    assert len(str(error.value)) < 300


def tied(table, ids):
    return jnp.sum(table[ids] @ table.T) + jnp.sum(table[ids] ** 2)


DENSE_GRADIENTS = {
    "tied weights": lambda loss, table, ids: osa.grad(tied)(table, ids),
    "jax.grad": lambda loss, table, ids: jax.grad(loss)(table, ids),
    "todense": lambda loss, table, ids: osa.grad(loss)(table, ids).todense(),
    "sparse": lambda loss, table, ids: osa.grad(loss, sparse=False)(table, ids),
}


# How a gradient is made dense is nothing to the optimiser: each way for one of them.
DENSE_CASES = [
    (osa.exact_adam, "jax.grad"),
    (osa.exact_adamw, "todense"),
    (osa.exact_adam, "sparse"),
    (osa.exact_adamw, "tied weights"),
]


@pytest.mark.parametrize(
    ("make", "name"), slow_but(DENSE_CASES, DENSE_CASES[0], DENSE_CASES[3])
)
def test_dense_gradient_of_a_stale_table(make, name):
    """Raises, and in a program is NaN; behind a flush it is that of dense Adam."""
    tx, reference = make(0.1), getattr(optax, make.__name__[6:])(0.1)

    def loss(table, ids):
        return jnp.sum(table[ids] ** 2)

    # Among 64-bit types, too, a table may be of float32.
    table, ids = jnp.ones((5, 2), "float32"), jnp.array([3, 1])
    wanted, wanted_state = table, reference.init(table)
    step = osa.make_train_step(loss, tx)
    table, state, _ = step(jnp.copy(table), tx.init(table), ids)
    grad = jax.grad(loss)(wanted, ids)
    updates, wanted_state = reference.update(grad, wanted_state, wanted)
    wanted = optax.apply_updates(wanted, updates)

    def update(table, state):
        grad = DENSE_GRADIENTS[name](loss, table, ids)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    with pytest.raises(ValueError, match=r"params, state = flush\(params, state\)"):
        update(table, state)
    assert np.isnan(jax.jit(update)(table, state)[0]).all()
    table, _ = jax.jit(update)(*osa.flush(table, state))
    grad = jax.grad(tied if name == "tied weights" else loss)(wanted, ids)
    updates, _ = reference.update(grad, wanted_state, wanted)
    assert_close(table, optax.apply_updates(wanted, updates), 1e-6)
