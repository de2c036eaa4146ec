"""Optimisers that read or change rows of which a gradient stores nothing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.sparse import BCOO

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
    return BCOO(
        (values, grad.indices), shape=grad.shape, unique_indices=grad.unique_indices
    )


def swapped(grad, state, table):
    return grad, {"a": state["b"], "b": state["a"].at[grad.indices[:, 0]].add(1)}


def touched(grad):
    return jnp.zeros(grad.shape[0]).at[grad.indices[:, 0]].max(1.0)


def row_0(grad):
    ids = jnp.zeros((1, 1), grad.indices.dtype)
    return BCOO((jnp.ones((1, DIM)), ids), shape=grad.shape)


def to_w(grads, state, params):
    """Its update has the entries of the table's gradient."""
    ids, data = grads["table"].indices, grads["table"].data[:, :4]
    new = BCOO((data, ids), shape=params["w"].shape)
    return grads | {"w": new}, state


def lazily(grad, factor):
    scaled = optax.stateless(lambda u, _: jax.tree.map(lambda x: x * factor, u))
    return osa.lazy(scaled).update(grad, optax.EmptyState())[0]


def restarted(tx):
    """Begins its state again."""

    def update(grads, state, params):
        count, inner = state
        inner = lax.cond(count % 3 == 0, lambda _: tx.init(params), lambda s: s, inner)
        updates, inner = tx.update(grads, inner, params)
        return updates, (count + 1, inner)

    init = lambda params: (jnp.zeros((), jnp.int32), tx.init(params))  # noqa: E731
    return optax.GradientTransformation(init, update)


def copied(tx, part):
    """Keeps a part of its state every third step."""

    def update(grads, state, params):
        count, inner, copy = state
        updates, inner = tx.update(grads, inner, params)
        copy = jax.tree.map(
            lambda x, y: jnp.where(count % 3 == 0, x, y), part(inner), copy
        )
        return updates, (count + 1, inner, copy)

    def init(params):
        inner = tx.init(params)
        return jnp.zeros((), jnp.int32), inner, part(inner)

    return optax.GradientTransformation(init, update)


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
    "a lookup": optax.chain(
        of_rows(lambda g, s, table: (of_values(g, table[g.indices[:, 0]]), s)), ADAM
    ),
    "a count by rows": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data * jnp.sum(touched(g) == 0)), s
            )
        ),
        ADAM,
    ),
    "an earlier gradient": optax.chain(
        of_rows(
            lambda g, s, table: (BCOO(s, shape=g.shape), (g.data, g.indices)),
            lambda p: (jnp.zeros((IDS, DIM)), jnp.full((IDS, 1), ROWS)),
        ),
        ADAM,
    ),
    "one row": optax.chain(of_rows(lambda g, s, table: (row_0(g), s)), ADAM),
    "a restart": restarted(ADAM),
    "a restart of lazy": restarted(osa.lazy(optax.adam(0.1))),
    "a moment, copied": copied(ADAM, lambda state: state.mu),
    "indices of a dense leaf": optax.chain(
        optax.GradientTransformation(optax.init_empty_state, to_w), ADAM
    ),
    "its number of entries": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data * jnp.mean(table)) if g.nse > 2 else g, s
            )
        ),
        ADAM,
    ),
    "stats of the table": optax.chain(
        of_rows(
            lambda g, s, table: (
                of_values(g, g.data * osa.gradient_stats(table).norm), s
            )
        ),
        ADAM,
    ),
    "updates of one row": optax.chain(
        of_rows(lambda g, s, table: (g, osa.apply_updates(s, row_0(g))), zeros), ADAM
    ),
    "lazy around it": optax.chain(
        of_rows(lambda g, s, table: (lazily(g, jnp.mean(table)), s)), ADAM
    ),
}  # fmt: skip


BY_NUMBER = {
    *("rates by row", "a number", "the first rows", "neighbours", "row 0"),
    *("the last row", "swapped", "a lookup"),
    *("its number of entries", "a count by rows"),
}


@pytest.mark.usefixtures("as_optax_expects")
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


def decayed(grads, state, params):
    """What a part does with rows, inside of `lazy`: there it has those of the batch."""
    new = jax.tree.map(lambda g, p: g + 0.1 * p, grads, params)
    return new, jax.tree.map(lambda s: s + 1, state)


def chosen(grads, state, params):
    """As what skips a step does: the old array or the new one."""
    count, inner = state
    updates, new = ADAM.update(grads, inner, params)
    new = lax.cond(
        count % 3 == 1, lambda new, old: new, lambda new, old: old, new, inner
    )
    new = jax.tree.map(lambda x, y: jnp.where(count % 2 == 0, x, y), new, inner)
    return updates, (count + 1, new)


def by_functions(grad, state, table):
    """Of this package."""
    grad = osa.coalesce(grad)
    stats = osa.gradient_stats(grad)
    return of_values(grad, grad.data / (1 + stats.touched + stats.norm)), state


def halved():
    return of_rows(lambda g, s, table: (of_values(g, 0.5 * g.data), s))


def stays(tx):
    """Its update of a parameter is `None`."""

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return updates | {"w": None}, state

    return optax.GradientTransformation(tx.init, update)


FEW_ROWS = {
    "by functions": optax.chain(of_rows(by_functions), ADAM),
    "inside of lazy": optax.chain(
        osa.lazy(optax.GradientTransformation(optax.tree.zeros_like, decayed)), ADAM
    ),
    "a choice": optax.GradientTransformation(
        lambda p: (jnp.zeros((), jnp.int32), ADAM.init(p)), chosen
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
    "behind what skips": optax.chain(optax.apply_if_finite(ADAM, 3), halved()),
    "a parameter that stays": stays(ADAM),
}


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", slow_but(FEW_ROWS, "a choice"))
def test_what_needs_rows_of_the_batch_trains_as_in_memory(name):
    rows, w = begin()
    tx, made = FEW_ROWS[name], [*batches(0, 5)]
    known = train_in_memory(loss, tx, {"table": rows, "w": w}, made)
    with host.HostTrainer(loss, tx, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize(
    "inner",
    [
        osa.lazy(optax.adamax(0.1)),
        pytest.param(osa.exact_adamw(0.1), marks=pytest.mark.slow),
    ],
)
def test_a_large_batch_whose_rows_are_updated_in_blocks(inner):
    """By a loop, where no kernel does it: here of rows of bfloat16."""
    rows, w = begin((9000, 128), jnp.bfloat16)
    tx = optax.apply_if_finite(inner, 3)
    made = [*batches(0, 2, 9000, 3000)]
    made = [(jnp.arange(3000) + 7 * i, y) for i, (_, y) in enumerate(made)]
    known = train_in_memory(loss, tx, {"table": rows, "w": w}, made)
    with host.HostTrainer(loss, tx, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)


BY_HEIGHT = {
    "its shape": lambda g: 1 / g.shape[0],
    "its size": lambda g: lax.rsqrt(jnp.sum(jnp.square(g.data)) / g.size),
    "an array": lambda g: np.full((1, DIM), 1 / g.shape[0], np.float32),
    "in a loop": lambda g: lax.fori_loop(0, 3, lambda i, x: x / g.shape[0], 1.0),
    "of ones": lambda g: lax.scan(
        lambda c, _: (c + jnp.sum(jnp.ones(g.shape[0])), None), 0.0, None, 2
    )[0],
    "as many as entries": lambda g: 1 / jnp.sum(jnp.ones(g.size)),
    "a threshold": lambda g: 0.1 if g.shape[0] > 20 else 0.01,
}


@pytest.mark.parametrize("name", BY_HEIGHT)
def test_numbers_of_rows_that_a_part_computes_with(name):
    scale = BY_HEIGHT[name]
    part = of_rows(lambda g, s, table: (of_values(g, g.data * scale(g)), s))
    with pytest.raises(ValueError, match="it depends on the number of rows"):
        host.HostTrainer(loss, optax.chain(part, ADAM), host_params(*begin()))


BY_OTHERS = {
    "how many": lambda x: jnp.float32(1 / x.shape[0]),
    "a norm": optax.tree.norm,
    "numbers": lambda x: lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "noise": lambda x: jax.random.normal(jax.random.key(0), x.shape),
    "a mean": lambda x: x - x.mean(0, keepdims=True),
    "the row before": lambda x: jnp.roll(x, 1, axis=0),
    "large ones": lambda x: x * jnp.minimum(1, 100 / jnp.linalg.norm(x)),
    "small noise": lambda x: 1e-6 * jax.random.normal(jax.random.key(0), x.shape),
    "what is shown": lambda x: (jax.debug.print("?"), x - x.mean(0, keepdims=True))[1],
}


@pytest.mark.parametrize(
    ("name", "is_lazy"),
    slow_but(
        [*itertools.product(BY_OTHERS, [False, True])],
        *((name, k % 2 == 0) for k, name in enumerate(BY_OTHERS)),
    ),
)
def test_a_state_that_begins_with_other_rows_is_refused(name, is_lazy):
    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(BY_OTHERS[name], params),
        lambda grads, state, params=None: (grads, state),
    )
    with pytest.raises(ValueError, match="begins rows of tables some at a time"):
        host.HostTrainer(
            loss, osa.lazy(tx) if is_lazy else optax.chain(tx, ADAM),
            host_params(*begin()),
        )  # fmt: skip


def test_a_state_that_begins_with_its_own_row():
    rows, w = begin()
    tx = osa.lazy(optax.GradientTransformation(
        lambda params: jax.tree.map(jax.nn.softmax, params),
        lambda grads, state, params=None: (grads, state),
    ))  # fmt: skip
    with host.HostTrainer(loss, tx, host_params(rows, w)) as trainer:
        np.testing.assert_allclose(
            np.asarray(trainer.state["table"]), jax.nn.softmax(rows), rtol=1e-6
        )


def clipped(grads, state, params=None):
    for name in "table", "small":
        grads = grads | {
            name: of_values(grads[name], jnp.clip(grads[name].data, -1, 1))
        }
    return grads, state


def reads_if_both_are_sparse(grads, state, params):
    if isinstance(grads["small"], BCOO):
        mean = jnp.mean(params["table"])
        table = of_values(grads["table"], grads["table"].data * mean)
        grads = grads | {"table": table}
    return grads, state


@pytest.mark.slow
@pytest.mark.parametrize("part", slow_but([clipped, reads_if_both_are_sparse], clipped))
def test_a_part_beside_a_table_in_memory(part):
    """Whose gradient is row-sparse as well: a step asks with all gradients it has."""

    def of_both(params, ids):
        return jnp.mean(params["table"][ids] * params["small"][ids % 3])

    tx = optax.chain(optax.GradientTransformation(optax.init_empty_state, part), ADAM)
    rows, small, made = begin()[0], np.ones((200, DIM), np.float32), np.arange(6)
    with host.HostTrainer(
        of_both, tx, {"table": host_params(*begin())["table"], "small": small}
    ) as trainer:
        if part is clipped:
            known = train_in_memory(
                of_both, tx, {"table": rows, "small": small}, [(made,)] * 3
            )
            assert_trained_alike(trainer, list(trainer.run([(made,)] * 3)), known)
            return
        for _ in range(2):  # also where the step was traced before
            with pytest.raises(ValueError, match="needs more than these of"):
                trainer.step(made)


@pytest.mark.slow
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
