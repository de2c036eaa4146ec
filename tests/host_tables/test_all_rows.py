"""Optimisers that read or change rows of which a gradient stores nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import (
    ROWS,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import slow_but

ADAM = osa.sparse_adam(0.1)
schedule_free = optax.contrib.schedule_free


def of_rows(update, init=lambda params: optax.EmptyState()):
    """A transformation: of `update(table's gradient, state, table)`, others stay."""

    def of_all(grads, state, params):
        new, state = update(grads["table"], state, params["table"])
        return grads | {"table": new}, state

    return optax.GradientTransformation(init, of_all)


def zeros(params):
    return jnp.zeros_like(params["table"])


def momentum(grads, state, params=None):
    new = jax.tree.map(lambda m, u: 0.9 * m + u, state, grads)
    return new, new


def of_values(grad, values):
    """The gradient with other entries."""
    return jax.experimental.sparse.BCOO(
        (values, grad.indices), shape=grad.shape, unique_indices=grad.unique_indices
    )


def swapped(grad, state, table):
    return grad, {"a": state["b"], "b": state["a"].at[grad.indices[:, 0]].add(1)}


RATES = jnp.linspace(0.1, 1, ROWS)
ALL_ROWS = {
    "schedule_free": schedule_free(ADAM, 0.1),
    "schedule_free of lazy": schedule_free(osa.lazy(optax.sgd(0.1)), 0.1),
    "momentum of updates": optax.chain(
        osa.lazy(optax.sgd(0.1)),
        optax.GradientTransformation(optax.tree.zeros_like, momentum),
    ),
    "an average": optax.chain(
        of_rows(lambda g, s, table: (g, 0.9 * s + 0.1 * table), zeros), ADAM
    ),
    "the last table": optax.chain(of_rows(lambda g, s, table: (g, table), zeros), ADAM),
    "begins again": optax.chain(
        of_rows(lambda g, s, table: (g, jnp.zeros_like(table)), zeros), ADAM
    ),
    "a norm": optax.chain(
        of_rows(lambda g, s, table: (of_values(g, g.data * jnp.sum(table**2)), s)), ADAM
    ),
    "a row": optax.chain(
        of_rows(lambda g, s, table: (of_values(g, g.data + table[:1]), s)), ADAM
    ),
    "neighbours": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data + table[(g.indices[:, 0] + 1) % ROWS]), s
            )
        ),
        ADAM,
    ),
    "rates by row": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data * RATES[g.indices[:, 0]][:, None]), s
            )
        ),
        ADAM,
    ),
    "a number": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data * jnp.sum(g.indices.astype(float))), s
            )
        ),
        ADAM,
    ),
    "the first rows": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data + table[jnp.minimum(g.indices[:, 0], 5)]), s
            )
        ),
        ADAM,
    ),
    "row 0": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, jnp.where(g.indices != 0, g.data, 0)), s
            )
        ),
        ADAM,
    ),
    "the last row": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, jnp.where(g.indices < ROWS - 1, g.data, 0)), s
            )
        ),
        ADAM,
    ),
    "a copy": optax.chain(
        of_rows(lambda g, s, table: (g, osa.apply_updates(table, g)), zeros), ADAM
    ),
    "a copy of a step": optax.chain(
        of_rows(
            lambda g, s, table: (
                g, jnp.where(jnp.sum(g.data) > 0, osa.apply_updates(table, g), s)
            ),
            zeros,
        ),
        ADAM,
    ),
    "in a branch": optax.chain(
        of_rows(
            lambda g, s, table: (
                g, lax.cond(s[0, 0] > 0, lambda s: s * 2, lambda s: s, s)
            ),
            zeros,
        ),
        ADAM,
    ),
    "in a scan": optax.chain(
        of_rows(
            lambda g, s, table: (g, lax.scan(lambda c, _: (c, 0), s, None, 2)[0]), zeros
        ),
        ADAM,
    ),
    "swapped": optax.chain(
        of_rows(swapped, lambda p: {"a": zeros(p), "b": zeros(p)}), ADAM
    ),
}  # fmt: skip


BY_NUMBER = {
    *("rates by row", "a number", "the first rows", "neighbours", "row 0"),
    "the last row",
}


@pytest.mark.parametrize("name", ALL_ROWS)
def test_what_needs_all_rows_is_refused(name):
    words = (
        r"HostTrainer trains .* this optimiser needs more than these of \['table'\]: "
    )
    params = host_params(*begin())
    if name in BY_NUMBER:  # not known of the trainer alone
        refused = host.HostTrainer(loss, ALL_ROWS[name], params).step
        args = next(batches(0, 1))
    else:
        refused, args = host.HostTrainer, (loss, ALL_ROWS[name], params)
    with pytest.raises(ValueError, match=words):
        refused(*args)


def decayed(grad, state, table):
    """Of rows of the gradient, by its indices; some of them are padding."""
    rows = grad.indices[:, 0]
    squares = jnp.zeros(len(table)).at[rows].max(jnp.square(grad.data[:, 0]))
    count = jnp.sum((rows >= 0) & (rows < len(table)))
    scale = (jnp.max(squares) + squares.at[rows].get(mode="clip")) / (1 + count)
    decay = 0.1 * table.at[rows].get(mode="fill", fill_value=0)
    new = of_values(grad, grad.data * scale[:, None] + decay)
    return new, state.at[rows].add(1)


def chosen(grad, state, table):
    """As what skips a step does: the old array or the new one."""
    count, rows = state
    new = rows.at[grad.indices[:, 0]].set(count.astype(rows.dtype))
    new = lax.cond(
        count % 3 == 1, lambda new, old: new, lambda new, old: old, new, rows
    )
    return grad, (count + 1, jnp.where(count % 2 == 0, new, rows))


def by_functions(grad, state, table):
    """Of this package and of JAX, which look rows up in other ways."""
    grad = osa.coalesce(grad)
    rows = jnp.clip(grad.indices[:, 0], 0, len(table) - 1)
    some = jax.vmap(lambda row: table[row])(rows)
    scale = 1 / (1 + osa.gradient_stats(grad).touched)
    return of_values(grad, grad.data * scale + 0.01 * some), state


FEW_ROWS = {
    "by functions": optax.chain(of_rows(by_functions), ADAM),
    "by indices": optax.chain(of_rows(decayed, zeros), ADAM),
    "a choice": optax.chain(
        of_rows(chosen, lambda p: (jnp.zeros((), jnp.int32), zeros(p))), ADAM
    ),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "apply_if_finite of exact_adam": optax.apply_if_finite(osa.exact_adam(0.1), 3),
    "frozen": optax.partition(
        {"a": ADAM, "b": optax.set_to_zero()}, {"table": "b", "w": "a"}
    ),
    "inject_hyperparams": optax.inject_hyperparams(osa.sparse_adam)(
        optax.cosine_decay_schedule(0.1, 9)
    ),
    "in front": optax.chain(osa.lazy(optax.clip_by_global_norm(0.1)), ADAM),
    "conditionally": optax.conditionally_transform(
        ADAM, lambda step, **_: step % 2 == 0
    ),
    "two": optax.chain(osa.lazy(optax.trace(0.9)), osa.rowwise_adagrad(0.1)),
}


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", slow_but(FEW_ROWS, "by indices", "a choice"))
def test_what_needs_rows_of_the_batch_trains_as_in_memory(name):
    rows, w = begin()
    tx, made = FEW_ROWS[name], [*batches(0, 5)]
    known = train_in_memory(loss, tx, {"table": rows, "w": w}, made)
    with host.HostTrainer(loss, tx, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)


BY_HEIGHT = {
    "its shape": lambda g: 1 / g.shape[0],
    "its size": lambda g: lax.rsqrt(jnp.sum(jnp.square(g.data)) / g.size),
    "a mean": lambda g: jnp.mean(jnp.zeros(g.shape[0]).at[g.indices[:, 0]].max(1.0)),
}


@pytest.mark.parametrize("name", BY_HEIGHT)
def test_numbers_of_rows_that_a_part_computes_with(name):
    scale = BY_HEIGHT[name]
    part = of_rows(lambda g, s, table: (of_values(g, g.data * scale(g)), s))
    with pytest.raises(ValueError, match="it depends on the number of rows"):
        host.HostTrainer(loss, optax.chain(part, ADAM), host_params(*begin()))


def test_a_keyword_that_decides():
    """Asked again in each compiled step, with all that it gives."""

    def update(grads, state, params=None, *, factor, **_):
        (table,) = jax.tree.leaves(state)
        return grads, {"table": factor * table, "w": None}

    part = optax.GradientTransformationExtraArgs(
        lambda p: {"table": jnp.ones_like(p["table"]), "w": None}, update
    )
    trainer = host.HostTrainer(loss, optax.chain(part, ADAM), host_params(*begin()))
    with pytest.raises(
        ValueError, match=r"needs more than these .* `mul` at .*_rows\.py"
    ):
        trainer.step(*next(batches(0, 1)), factor=np.float32(2))
