"""Wrappers of a user's own, as in `wrappers.py`: what they do to updates, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa

from .wrappers import (
    Case,
    after,
    before,
    changing,
    first_key,
    halve,
    in_chain,
    is_rows,
    norm,
    on_rows,
    passes,
    with_data,
    zero,
)

# What is done to updates; with the loss, for those that ask for it.


def on_data(function):
    """Of the values of rows; padding stays zeros."""

    def change(updates, state, params, seen):
        return on_rows(lambda x: with_data(x, function(x.data)), updates), state

    return change


def on_entries(function):
    """Of values and indices, into any number of entries."""

    def change(updates, state, params, seen):
        def entries(x):
            return BCOO(function(x.data, x.indices), shape=x.shape)

        return on_rows(entries, updates), state

    return change


def of_leaf(name, function):
    def change(updates, state, params, seen):
        new = dict(updates.items())
        new[name] = function(updates[name])
        return type(updates)(new), state

    return change


def by_count(factor):
    """`factor(count)` times the rows; it counts the steps itself."""

    def change(updates, state, params, seen):
        scaled = lambda x: with_data(x, x.data * factor(state))  # noqa: E731
        return on_rows(scaled, updates), state + 1

    return after(change, zero)


def rows_at(table, x):
    return table.at[x.indices[:, 0]].get(mode="fill", fill_value=0)


def row_norms(x):
    return jnp.sqrt(jnp.sum(x**2, -1, keepdims=True)) + 1e-6


def all_clipped(updates, state, params, seen):
    scale = jnp.minimum(1, 0.1 / jnp.sqrt(norm(updates)))
    scaled = lambda x: with_data(x, x.data * scale) if is_rows(x) else x * scale  # noqa: E731
    return jax.tree.map(scaled, updates, is_leaf=is_rows), state


def own_ema(updates, state, params, seen):
    x = updates["table"]
    new = state.at[x.indices[:, 0]].add(0.1 * (x.data - rows_at(state, x)), mode="drop")
    moved = lambda x: with_data(x, rows_at(new, x))  # noqa: E731
    return on_rows(moved, updates), new


def of_parameters(updates, state, params, seen):
    return updates, 0.9 * state + 0.1 * params["table"]


def lookahead(updates, state, params, seen):
    """Dense updates of the table, to a slow copy of it in every second step."""
    slow, count = state
    moved = params["table"] + updates["table"].todense()
    is_sync = count % 2 == 1
    slow = jnp.where(is_sync, slow + 0.5 * (moved - slow), slow)
    dense = jnp.where(is_sync, slow, moved) - params["table"]
    return on_rows(lambda x: dense, updates), (slow, count + 1)


def in_a_ball(updates, state, params, seen):
    def inside(x):
        rows = rows_at(params["table"], x)
        moved = rows + x.data
        return with_data(x, moved / jnp.maximum(1, row_norms(moved)) - rows)

    return on_rows(inside, updates), state


def nonnegative(updates, state, params, seen):
    def bounded(x):
        return with_data(x, jnp.maximum(x.data, -rows_at(params["table"], x)))

    return on_rows(bounded, updates), state


def drop_rows(updates, state, params, seen):
    key, own = jax.random.split(jax.random.wrap_key_data(state))

    def thinned(x):
        is_kept = jax.random.bernoulli(own, 0.5, x.data.shape[:1])
        return with_data(x, x.data * is_kept[:, None])

    return on_rows(thinned, updates), jax.random.key_data(key)


def histogram(updates, state, params, seen):
    x = updates["table"]
    return updates, state.at[x.indices[:, 0]].add(1, mode="drop")


def refuse_nan(updates, state, params, seen):
    def check(x):
        assert np.isfinite(x), "a NaN in the updates"
        seen.values.append(np.asarray(x))

    jax.debug.callback(check, norm(updates))
    return updates, state


def scale_on_host(updates, state, params, seen):
    def scale(x):
        return with_data(x, jax.pure_callback(lambda x: x / 2, x.data, x.data))

    return on_rows(scale, updates), state


def log_if_large(updates, state, params, seen):
    size = norm(updates)
    lax.cond(size > 0, seen.log, lambda x: None, size)
    return updates, state


def log_paths(updates, state, params, seen):
    def log(path, x):
        seen.log(jnp.float32(len(jax.tree_util.keystr(path))) + norm(x))

    jax.tree_util.tree_map_with_path(log, updates, is_leaf=is_rows)
    return updates, state


def log_arrays(updates, state, params, seen):
    on_rows(lambda x: [seen.log(x.data), seen.log(x.indices)], updates)
    return updates, state


def two_effects(updates, state, params, seen):
    seen.log(norm(updates))
    return updates, state + seen.log_in_order(jnp.float32(state))


def of_value(change, init=lambda params: ()):
    """A wrapper that takes the loss: `change(updates, own_state, value)`."""

    def wrapper(tx, seen):
        def update(grads, state, params=None, *, value, **extra):
            seen.traces += 1
            updates, inner = tx.update(grads, state[0], params)
            updates, own = change(updates, state[1], value)
            return updates, (inner, own)

        begin = lambda params: (tx.init(params), init(params))  # noqa: E731
        return optax.GradientTransformationExtraArgs(begin, update)

    return wrapper


def scaled_rows(updates, factor):
    return on_rows(lambda x: with_data(x, x.data * factor), updates)


def plateau(updates, state, value):
    best, scale = state
    scale = jnp.where(value < best, scale, scale / 2)
    return scaled_rows(updates, scale), (jnp.minimum(best, value), scale)


def first_plateau(params):
    return jnp.float32(jnp.inf), jnp.float32(1)


# What is done to gradients.


def on_gradients(function):
    return before(lambda grads, params, seen: on_rows(function, grads))


def without_far_rows(x):
    """Rows from 6 on become padding, which a lazy optimiser does not touch."""
    is_near = x.indices < 6
    data = jnp.where(is_near, x.data, 0)
    return BCOO((data, jnp.where(is_near, x.indices, 12)), shape=x.shape)


def mean_of_duplicates(x):
    times = jnp.zeros(x.shape[0]).at[x.indices[:, 0]].add(1, mode="drop")
    return with_data(x, x.data / jnp.maximum(1, rows_at(times[:, None], x)))


def noisy(x):
    noise = jax.random.normal(jax.random.key(0), x.data.shape)
    return with_data(x, x.data + 0.1 * noise)


def half(data):
    return data / 2


ORDER = np.array([2, 0, 1])


OF_USERS = {
    "decaying": changing(by_count(lambda count: 1 / (1 + count))),
    "every second step": changing(by_count(lambda count: count % 2)),
    "one step only": changing(by_count(lambda count: jnp.where(count < 1, 1.0, 0.0))),
    "own ema": changing(after(own_ema, lambda params: jnp.zeros((12, 3)))),
    "average of parameters": Case(after(of_parameters, lambda p: p["table"] + 0.0)),
    "own lookahead": changing(after(lookahead, lambda p: (p["table"] + 0.0, zero(p)))),
    "row norms": changing(
        in_chain(on_data(lambda x: x / jnp.maximum(1, 9 * row_norms(x))))
    ),
    "norm of the leaf": changing(
        in_chain(on_data(lambda x: x / jnp.maximum(1, 9 * jnp.sqrt(jnp.sum(x**2)))))
    ),
    "norm of all": changing(in_chain(all_clipped)),
    "signs": changing(in_chain(on_data(lambda x: 0.01 * jnp.sign(x)))),
    "low precision": changing(
        in_chain(on_data(lambda x: x.astype(jnp.bfloat16).astype(x.dtype)))
    ),
    "drop rows": changing(after(drop_rows, first_key)),
    "coalesce": changing(in_chain(lambda u, s, p, seen: (on_rows(osa.coalesce, u), s))),
    "sort_indices": changing(
        in_chain(lambda u, s, p, seen: (on_rows(lambda x: x.sort_indices(), u), s))
    ),
    "two halves": changing(
        in_chain(
            on_entries(
                lambda d, i: (jnp.concatenate([d / 2, d / 2]), jnp.concatenate([i, i]))
            )
        )
    ),
    "more padding": changing(
        in_chain(
            on_entries(
                lambda d, i: (
                    jnp.pad(d, [(0, 2), (0, 0)]),
                    jnp.pad(i, [(0, 2), (0, 0)], constant_values=99),
                )
            )
        )
    ),
    "turned": changing(in_chain(on_entries(lambda d, i: (d[::-1], i[::-1])))),
    "arrays in another order": changing(
        in_chain(
            lambda u, s, p, seen: (
                on_rows(lambda x: jax.tree.map(lambda y: y[ORDER], x), u),
                s,
            )
        )
    ),
    "first entry": changing(in_chain(on_entries(lambda d, i: (d[:1], i[:1])))),
    "other rows": changing(
        in_chain(on_entries(lambda d, i: (d, jnp.where(i < 12, 11 - i, 12))))
    ),
    "few rows": changing(
        in_chain(on_entries(lambda d, i: (d, jnp.where(i < 6, i, 12))))
    ),
    "from a dense one": changing(
        in_chain(
            lambda u, s, p, seen: (
                on_rows(lambda x: BCOO.fromdense(x.todense(), nse=12, n_dense=1), u),
                s,
            )
        )
    ),
    "rows_of a dense one": changing(
        in_chain(
            lambda u, s, p, seen: (
                on_rows(lambda x: osa.rows_of(x.todense(), jnp.arange(8)), u),
                s,
            )
        )
    ),
    "drop w": changing(in_chain(of_leaf("w", lambda x: None))),
    "zero w": changing(in_chain(of_leaf("w", jnp.zeros_like))),
    "negated table": changing(in_chain(of_leaf("table", lambda x: -x))),
    "in a ball": changing(after(in_a_ball)),
    "nonnegative": changing(after(nonnegative)),
    "histogram": Case(after(histogram, lambda params: jnp.zeros(12, jnp.int32))),
    "refuse NaN": Case(in_chain(refuse_nan)),
    "scale on the host": changing(in_chain(scale_on_host)),
    "log if large": Case(in_chain(log_if_large)),
    "log paths": Case(in_chain(log_paths)),
    "log arrays": Case(in_chain(log_arrays)),
    "two effects": Case(after(two_effects, zero)),
    "scaled by the loss": changing(
        of_value(lambda u, s, value: (scaled_rows(u, jnp.tanh(value)), s)), value=True
    ),
    "best loss": Case(
        of_value(
            lambda u, s, value: (u, jnp.minimum(s, value)),
            lambda p: jnp.float32(jnp.inf),
        ),
        value=True,
    ),
    "plateau": changing(of_value(plateau, first_plateau), value=True),
    "negated gradients": changing(on_gradients(lambda x: -x)),
    "coalesced gradients": Case(on_gradients(osa.coalesce)),
    "dense gradients": changing(on_gradients(lambda x: x.todense())),
    "gradients of few rows": changing(on_gradients(without_far_rows)),
    "means of duplicates": changing(on_gradients(mean_of_duplicates)),
    "noisy gradients": changing(on_gradients(noisy)),
    "centred rows": changing(
        on_gradients(lambda x: with_data(x, x.data - x.data.mean(-1, keepdims=True)))
    ),
    "no gradient of w": changing(
        before(lambda g, params, seen: type(g)(dict(g.items()) | {"w": None}))
    ),
    "halved twice": changing(in_chain(halve, passes, on_data(half))),
}
