"""exact_adam: gradients taken at other parameters or steps, and in the loss itself."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.exact_adam import RATE, gradient, start
from ..helpers.support import assert_close, slow_but

pytestmark = pytest.mark.usefixtures("as_optax_expects")

DECAY, SIZE = 0.1, 0.3
BATCHES = np.random.default_rng(1).integers(8, size=(6, 4))
MAKERS = {
    "exact_adam": (osa.exact_adam(RATE), optax.adam(RATE)),
    "exact_adamw": (
        osa.exact_adamw(RATE, weight_decay=DECAY),
        optax.adamw(RATE, weight_decay=DECAY),
    ),
}


def table():
    return jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)))


def loss_of_rows(rows):
    return jnp.sum(jnp.sin(rows) * rows[::-1] ** 2)


def loss(table, ids):
    return loss_of_rows(table[ids])


def to_array(grad):
    return grad.todense() if hasattr(grad, "todense") else grad


def unit(grad):
    return SIZE * grad / jnp.linalg.norm(grad)


MOMENTUM = osa.lazy(optax.trace(0.8))

# Each takes the gradient `grad(table)`, a table, and one of some steps ago.
COPIES = {
    "fgm": lambda grad, t, old: grad(t + unit(to_array(grad(t)))),
    "sam": lambda grad, t, old: grad(t + unit(jnp.sign(to_array(grad(t))))),
    "some rows": lambda grad, t, old: grad(t.at[::2].add(0.1)),
    "some columns": lambda grad, t, old: grad(t.at[:, 1].multiply(1.1)),
    "average": lambda grad, t, old: grad(0.5 * (t + old)),
    "lookahead": lambda grad, t, old: grad(t + 0.5 * (t - old)),
    "of before": lambda grad, t, old: grad(old),
    "quantized": lambda grad, t, old: grad(jnp.round(8 * t) / 8),
    "clean and adversarial": lambda grad, t, old: grad(t) + grad(t + 0.1),
    "coalesced": lambda grad, t, old: osa.coalesce(grad(t + 0.1)),
    "noise": lambda grad, t, old: grad(t + 0.1 * jnp.sin(9 * t)),
    "rows of a norm": lambda grad, t, old: grad(
        t / jnp.linalg.norm(t, axis=1, keepdims=True)
    ),
    "turned": lambda grad, t, old: grad(t[::-1]),
    "mean of two": lambda grad, t, old: (grad(t + 0.1) + grad(t - 0.1)) / 2,
    "a row-sparse shift": lambda grad, t, old: grad(osa.apply_updates(t, grad(t))),
    "clipped": lambda grad, t, old: osa.lazy(optax.clip_by_global_norm(1.0)).update(
        grad(t + 0.1), (optax.EmptyState(),), t
    )[0],
    "with momentum": lambda grad, t, old: MOMENTUM.update(
        grad(t + 0.1), MOMENTUM.init(t), t
    )[0],
}


@functools.cache
def after_two_steps(kind):
    """The parameters, those of before, and the state."""
    tx, old = MAKERS[kind][0], table()
    step = osa.make_train_step(loss, tx)
    params, state = jnp.copy(old), tx.init(old)
    for ids in BATCHES[:2]:
        params, state, _ = step(params, state, jnp.asarray(ids))
    return params, old, state


# Each copy in both ways, and with both optimisers.
KINDS = tuple(MAKERS)
OF_COPIES = [
    (name, KINDS[(number + compiled) % 2], bool(compiled))
    for number, name in enumerate(COPIES)
    for compiled in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "compiled"), slow_but(OF_COPIES, ("fgm", KINDS[1], True))
)
def test_gradients_of_a_copy(name, kind, compiled):
    """Raise, or are NaN in a program; those of the same values are right."""
    tx = MAKERS[kind][0]

    def step(params, old, state, ids):
        grad = osa.grad(functools.partial(loss, ids=ids), read=state)
        grads = COPIES[name](grad, params, old)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    params, old, state = after_two_steps(kind)
    ids = jnp.asarray(BATCHES[2])
    if not compiled:
        with pytest.raises(ValueError, match="taken at the parameters that it updates"):
            step(params, old, state, ids)
        return
    params, _ = jax.jit(step)(params, old, state, ids)
    assert np.isnan(params[ids]).any()


WAYS = {
    "added up": lambda grads: grads.sum(0),
    "by index": lambda grads: grads[0] + grads[1],
    "one by one": lambda grads: functools.reduce(operator.add, grads),
    "a slice": lambda grads: +grads[:2].sum(axis=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_gradients_of_a_batch(name):
    """Of `jax.vmap`: they know as much as others."""
    tx, dense = MAKERS["exact_adamw"]

    def gradient_at(params, ids, **read):
        def one(ids):
            return osa.grad(functools.partial(loss, ids=ids), **read)(params)

        return WAYS[name](jax.vmap(one)(ids.reshape(2, -1)))

    @jax.jit
    def step(params, state, ids):
        grad = gradient_at(params, ids, read=state)
        updates, state = tx.update(grad, state, params)
        return osa.apply_updates(params, updates), state

    @jax.jit
    def dense_step(params, state, ids):
        grad = sum(jax.grad(loss)(params, x) for x in ids.reshape(2, -1))
        updates, state = dense.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    params = table()
    state = tx.init(params)
    for ids in map(jnp.asarray, BATCHES):
        params, state = step(params, state, ids)
    found = np.asarray(osa.flush(params, state)[0])
    with jax.enable_x64(True):  # dense Adam in float32 is off by 2e-6 itself
        expected = table().astype("float64")
        dense_state = dense.init(expected)
        for wide_ids in map(jnp.asarray, BATCHES):
            expected, dense_state = dense_step(expected, dense_state, wide_ids)
    # In float32, of parameters about 1, in six steps.
    np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=1e-6)

    with pytest.raises(ValueError, match="made without"):
        tx.update(gradient_at(params, ids), state, params)
    grad = gradient_at(params, ids, read=state)
    updates, later = tx.update(grad, state, params)
    with pytest.raises(ValueError, match="the state of another step"):
        tx.update(grad, later, osa.apply_updates(params, updates))
    decays = optax.chain(osa.lazy(optax.add_decayed_weights(0.1)), tx)
    with pytest.raises(ValueError, match="lazy got rows of exact_adam"):
        decays.update(grad, (decays.init(params)[0], state), params)


PADDED = WAYS | {
    "coalesced": lambda grads: jax.vmap(osa.coalesce)(grads).sum(0),
    "scaled": lambda grads: (2 * grads).sum(0) * 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("size", slow_but([3, 12, 5], 12), ids=lambda n: f"{n} ids")
@pytest.mark.parametrize("name", slow_but(PADDED, "added up"))
def test_gradients_of_a_batch_with_padding(name, size, x64):
    """Ids out of bounds, duplicates, more ids than rows, which are padded."""
    tx, dense = MAKERS["exact_adamw"]
    ids = np.random.default_rng(2).integers(8, size=(5, 2, size))
    ids[:, 0, -1] = 8  # padding
    ids[1, 1] = 9

    def loss(table, ids):
        return loss_of_rows(table.at[ids].get(mode="fill", fill_value=0))

    @jax.jit
    def step(params, state, ids):
        grads = jax.vmap(lambda i: osa.grad(loss, read=state)(params, i))(ids)
        updates, state = tx.update(PADDED[name](grads), state, params)
        return osa.apply_updates(params, updates), state

    @jax.jit
    def dense_step(params, state, ids):
        grad = jax.vmap(lambda i: jax.grad(loss)(params, i))(ids).sum(0)
        updates, state = dense.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    params = table().astype("float32")
    state = tx.init(params)
    for batch in ids:
        params, state = step(params, state, batch)
    with jax.enable_x64(True):
        expected = table().astype("float64")
        dense_state = dense.init(expected)
        for batch in ids:
            expected, dense_state = dense_step(expected, dense_state, batch)
    # In float32, of parameters about 1, in five steps.
    np.testing.assert_allclose(
        np.asarray(osa.flush(params, state)[0]), np.asarray(expected), rtol=0, atol=1e-6
    )


def members(grads):
    return [grads[k] for k in range(2)]


OF_MEMBERS = {
    "by index": members,
    "a sum of one": lambda grads: [grads[k : k + 1].sum(0) for k in range(2)],
    "by a traced index": lambda grads: members(
        jax.vmap(lambda k: grads[k])(jnp.arange(2))
    ),
    "micro-batches": lambda grads: members(grads.sum(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_MEMBERS)
def test_gradients_of_members_at_different_steps(name):
    """Of an ensemble by vmap, of which one has been trained by itself before."""
    tx = MAKERS["exact_adamw"][0]

    def gradient(params, state, ids):
        return osa.grad(lambda t: jnp.sum(t[ids] ** 3), read=state)(params)

    def step(params, state, ids):
        updates, state = tx.update(gradient(params, state, ids), state, params)
        return osa.apply_updates(params, updates), state

    @jax.jit
    def steps_of_members(members, ids):
        grads_of = jax.vmap(gradient)
        if name == "micro-batches":
            ids = ids.reshape(2, 2, -1)
            grads_of = jax.vmap(jax.vmap(gradient, (None, None, 0)))
        grads = OF_MEMBERS[name](
            grads_of(*jax.tree.map(lambda *x: jnp.stack(x), *members), ids)
        )
        trained = []
        for (params, state), grad in zip(members, grads, strict=True):
            updates, state = tx.update(grad, state, params)
            trained.append(osa.flush(osa.apply_updates(params, updates), state)[0])
        return trained

    ids = jnp.asarray(BATCHES[:2])
    ages = [(table(), tx.init(table())), step(table(), tx.init(table()), ids[0])]
    found = steps_of_members(ages, ids)
    for member, i, values in zip(ages, ids, found, strict=True):
        assert_close(values, osa.flush(*step(*member, i))[0], 1e-6)


EMPTY = [((8, 3), (2, 0)), ((8, 3), (0, 2)), ((8, 0), (2, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "ids"), slow_but(EMPTY, EMPTY[0]), ids=str)
def test_gradients_of_an_empty_batch(shape, ids):
    """No entries, no members, or no columns: rows move by their momentum alone."""
    tx, params = MAKERS["exact_adamw"][0], jnp.ones(shape)
    state, ids = tx.init(params), jnp.zeros(ids, int)
    grad = jax.vmap(lambda i: osa.grad(loss, read=state)(params, i))(ids).sum(0)
    updates, state = tx.update(grad, state, params)
    assert np.isfinite(osa.flush(osa.apply_updates(params, updates), state)[0]).all()


SAME = {
    "copied": jnp.array,
    "a barrier": jax.lax.optimization_barrier,
    "computed": lambda t: jnp.where(t > 0, t, t),
    "lower precision": lambda t: t.astype(jnp.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_of_the_same_values(name, compiled):
    (tx, _), params = MAKERS["exact_adamw"], table().astype(jnp.float32)
    state, ids = tx.init(params), jnp.asarray(BATCHES[0])

    def step(params, state, same):
        grad = osa.grad(functools.partial(loss, ids=ids), read=state)(same(params))
        grad = jax.tree.map(lambda x: x, grad) if same is None else grad
        updates, state = tx.update(grad, state, params)
        return osa.apply_updates(params, updates), state

    wrap = functools.partial(jax.jit, static_argnums=2) if compiled else lambda f: f
    found, expected = (
        wrap(step)(params, state, x)[0] for x in (SAME[name], lambda t: t)
    )
    tolerance = 1e-2 if name == "lower precision" else 0
    assert not np.isnan(found).any()
    assert_close(found, expected, tolerance, magnitude=1.0)


def penalty(inner):
    """A loss with a gradient penalty, whose gradient `inner` takes."""

    def of_table(table, ids):
        grad = osa.coalesce(g).data if hasattr(g := inner(table, ids), "nse") else g
        return loss(table, ids) + 0.1 * jnp.sum(grad**2)

    return of_table


def dense_penalty(table, ids):
    return penalty(jax.grad(loss))(table, ids)


def with_rows(table, ids):
    rows = table[ids]
    return loss_of_rows(rows) + 0.1 * jnp.sum(jax.grad(loss_of_rows)(rows) ** 2)


NESTED = {
    "a gradient in the loss": (
        lambda state: penalty(osa.grad(loss, read=state)),
        dense_penalty,
    ),
    "a gradient without read": (lambda state: penalty(osa.grad(loss)), dense_penalty),
    "a dense gradient": (
        lambda state: penalty(osa.grad(loss, read=state, sparse=False)),
        dense_penalty,
    ),
    "a value in the loss": (
        lambda state: (
            lambda t, ids: loss(t, ids) * osa.evaluate(loss, read=state)(t, ids + 1)
        ),
        lambda t, ids: loss(t, ids) * loss(t, ids + 1),
    ),
    "a gradient of rows": (lambda state: with_rows, with_rows),
}


IN_LOSS = list(zip(NESTED, (KINDS[::-1]) * len(NESTED), strict=False))
IN_LOSS.append(("a gradient in the loss", KINDS[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), slow_but(IN_LOSS, IN_LOSS[0]))
def test_gradients_in_the_loss(name, kind):
    """Rows are brought up to date once: the numbers of dense Adam, in float64."""
    make, dense_loss = NESTED[name]
    tx, dense_tx = MAKERS[kind]
    with jax.enable_x64():
        ours = dense = table()
        state, dense_state = tx.init(ours), dense_tx.init(dense)

        @jax.jit
        def step(params, state, ids):
            grads = osa.grad(make(state), read=state)(params, ids)
            updates, state = tx.update(grads, state, params)
            return osa.apply_updates(params, updates), state

        @jax.jit
        def dense_step(params, state, ids):
            grads = jax.grad(dense_loss)(params, ids)
            updates, state = dense_tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for ids in jnp.asarray(BATCHES % 7):
            ours, state = step(ours, state, ids)
            dense, dense_state = dense_step(dense, dense_state, ids)
        assert_close(osa.flush(ours, state)[0], dense, 1e-10, magnitude=1.0)


@pytest.mark.slow
def test_a_copy_in_the_loss():
    """What is outside may be read by the state; what the loss has computed, may not."""
    tx, params = osa.exact_adamw(RATE), table()
    params, state, _ = osa.make_train_step(loss, tx)(
        params, tx.init(params), jnp.asarray(BATCHES[0])
    )
    ids = jnp.asarray(BATCHES[1])
    look_up = osa.evaluate(lambda t: t[ids], read=state)

    def with_a_target(t):  # a constant, that of the outside
        return jnp.sum((t[ids] - look_up(params)) ** 2) + loss(t, ids)

    value, grad = osa.value_and_grad(with_a_target, read=state)(params)
    flushed = osa.flush(params, state)[0]
    expected = jax.jit(jax.value_and_grad(loss))(flushed, ids)
    assert_close(value, expected[0], 1e-5, magnitude=1.0)
    assert_close(to_array(grad), expected[1], 1e-5, magnitude=10.0)
    for function in (osa.grad, osa.evaluate):
        with pytest.raises(ValueError, match="that was computed in the loss"):
            function(lambda t: jnp.sum(look_up(2 * t)), read=state)(params)
    assert look_up(params).shape == (4, 3)  # as outside of a loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_perturbed_rows(kind):
    """Adversarial steps as in docs/exact_adam.md, beside those of dense Adam."""
    tx, dense_tx = MAKERS[kind]

    def up(rows):
        return unit(jax.grad(loss_of_rows)(rows))

    @jax.jit
    def step(params, state, ids):
        shift = osa.evaluate(lambda t: up(t[ids]), read=state)(params)
        grad = osa.grad(lambda t: loss_of_rows(t[ids] + shift), read=state)(params)
        updates, state = tx.update(grad, state, params)
        return osa.apply_updates(params, updates), state

    @jax.jit
    def dense_step(params, state, ids):
        shift = up(params[ids])
        grad = jax.grad(lambda t: loss_of_rows(t[ids] + shift))(params)
        updates, state = dense_tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    with jax.enable_x64():
        ours = dense = table()
        state, dense_state = tx.init(ours), dense_tx.init(dense)
        for ids in jnp.asarray(BATCHES):
            ours, state = step(ours, state, ids)
            dense, dense_state = dense_step(dense, dense_state, ids)
        assert_close(osa.flush(ours, state)[0], dense, 1e-10, magnitude=1.0)


LATER = r"made with the state of another step|of two of its steps"


@pytest.mark.slow
@pytest.mark.parametrize("look_up", [lambda t, i: t[i], osa.embedding_bag])
def test_read_of_no_step_and_of_another(look_up):
    """A gradient function that was made before the loop, and gradients used twice."""
    params, tx = table(), osa.exact_adam(RATE)
    ids = jnp.array([[3, 7], [7, 5]])
    state = tx.init(params)

    def loss(table):
        return jnp.sum(look_up(table, ids))

    for change in (lambda grad: grad, lambda grad: 0.5 * grad, osa.coalesce):
        with pytest.raises(ValueError, match="made with read="):
            tx.update(change(jax.jit(osa.grad(loss))(params)), state, params)
    gradient_of = jax.jit(osa.grad(loss, read=state))
    grad = gradient_of(params)
    update, new_state = jax.jit(tx.update)(grad, state, params)
    params = osa.apply_updates(params, update)
    with pytest.raises(ValueError, match=LATER):
        tx.update(gradient_of(params), new_state, params)
    update, _ = jax.jit(tx.update)(2.0 * grad, new_state, params)
    after = np.isnan(jax.jit(osa.apply_updates)(params, update)).all(axis=1)
    assert sorted(np.flatnonzero(after)) == [3, 5, 7]
    newer = jax.jit(osa.grad(loss, read=new_state))(params)
    with pytest.raises(ValueError, match=LATER):
        tx.update(newer + grad, new_state, params)
    nothing = jax.tree.map(jnp.zeros_like, grad)
    for good in (newer + nothing, osa.coalesce(newer)):
        update, _ = jax.jit(tx.update)(good, new_state, params)
        assert np.isfinite(update.data).all()


def halved(tx):
    """What its state does not show."""

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return {name: 0.5 * x for name, x in updates.items()}, state

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.slow
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
