"""What wrappers do to updates and to gradients; see `wrappers`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO

from .wrappers import (
    after,
    is_rows,
    norm,
    of_data,
    on_data,
    on_rows,
    rows_at,
    with_data,
)

# Of updates alone.

halve = of_data(lambda data: data / 2)


def passes(updates, state, params, seen):
    return updates, state


def freeze_a_row(x):
    return with_data(x, jnp.where(x.indices == 3, 0.0, x.data))


def replace(x):
    rows = jnp.array([[1], [2]])
    return BCOO((jnp.ones((2, *x.shape[1:])), rows), shape=x.shape)


def in_another_order(x):
    return jax.tree.map(lambda array: array[np.array([2, 0, 1])], x)


def two_halves(data, ids):
    return jnp.concatenate([data / 2, data / 2]), jnp.concatenate([ids, ids])


def more_padding(data, ids):
    two = [(0, 2), (0, 0)]
    return jnp.pad(data, two), jnp.pad(ids, two, constant_values=99)


def row_norms(x):
    return jnp.sqrt(jnp.sum(x**2, -1, keepdims=True)) + 1e-6


def clip_leaf(data):
    return data / jnp.maximum(1, 9 * jnp.sqrt(jnp.sum(data**2)))


def from_dense(x):
    return BCOO.fromdense(x.todense(), nse=12, n_dense=1)


def by_path(updates, state, params, seen):
    def change(path, x):
        is_table = "table" in jax.tree_util.keystr(path) and is_rows(x)
        return with_data(x, -x.data) if is_table else x

    tree_map = jax.tree_util.tree_map_with_path
    return tree_map(change, updates, is_leaf=is_rows), state


def clip_all(updates, state, params, seen):
    scale = jnp.minimum(1, 0.1 / jnp.sqrt(norm(updates)))

    def scaled(x):
        return with_data(x, x.data * scale) if is_rows(x) else x * scale

    return jax.tree.map(scaled, updates, is_leaf=is_rows), state


# Of updates and parameters.


def decay(updates, state, params, seen):
    """Reads the parameters after the optimiser has computed its updates."""

    def decayed(x):
        return with_data(x, x.data - 0.1 * rows_at(params["table"], x))

    return on_rows(decayed, updates), state


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


# With a state, and what that begins with.


def zero(params):
    return jnp.zeros((), jnp.int32)


def zeros_like(params):
    return jax.tree.map(jnp.zeros_like, params)


def table_of(params):
    return params["table"] + 0.0


def table_and_count(params):
    return table_of(params), zero(params)


def infinity(params):
    return jnp.float32(jnp.inf)


def first_plateau(params):
    return infinity(params), jnp.float32(1)


def first_key(params):
    return jax.random.key_data(jax.random.key(0))


def by_count(factor):
    """A wrapper: `factor(count)` times the rows. It counts the steps itself."""

    def change(updates, state, params, seen):
        return on_data(lambda data: data * factor(state), updates), state + 1

    return after(change, zero)


def count(updates, state, params, seen):
    return updates, state + sum(map(is_rows, jax.tree.leaves(updates, is_leaf=is_rows)))


def histogram(updates, state, params, seen):
    x = updates["table"]
    return updates, state.at[x.indices[:, 0]].add(1, mode="drop")


def store(updates, state, params, seen):
    return updates, updates


def store_norm(updates, state, params, seen):
    return updates, norm(updates)


def store_sum(updates, state, params, seen):
    dense = on_rows(lambda x: x.todense(), updates)
    return updates, jax.tree.map(jnp.add, state, dense)


def store_params(updates, state, params, seen):
    return updates, params["table"][:4] + 0.0


def average_params(updates, state, params, seen):
    return updates, 0.9 * state + 0.1 * params["table"]


def average_updates(updates, state, params, seen):
    x = updates["table"]
    new = state.at[x.indices[:, 0]].add(0.1 * (x.data - rows_at(state, x)), mode="drop")
    return on_rows(lambda x: with_data(x, rows_at(new, x)), updates), new


def lookahead(updates, state, params, seen):
    """Dense updates of the table, to a slow copy of it in every second step."""
    slow, step = state
    moved = params["table"] + updates["table"].todense()
    is_sync = step % 2 == 1
    slow = jnp.where(is_sync, slow + 0.5 * (moved - slow), slow)
    dense = jnp.where(is_sync, slow, moved) - params["table"]
    return on_rows(lambda x: dense, updates), (slow, step + 1)


def add_noise(updates, state, params, seen):
    key, of_step = jax.random.split(jax.random.wrap_key_data(state))

    def noisy(x):
        is_row = x.indices < x.shape[0]
        noise = jax.random.normal(of_step, x.data.shape)
        return with_data(x, jnp.where(is_row, x.data + 0.01 * noise, 0.0))

    return on_rows(noisy, updates), jax.random.key_data(key)


def drop_rows(updates, state, params, seen):
    key, of_step = jax.random.split(jax.random.wrap_key_data(state))

    def thinned(data):
        is_kept = jax.random.bernoulli(of_step, 0.5, data.shape[:1])
        return data * is_kept[:, None]

    return on_data(thinned, updates), jax.random.key_data(key)


# With the loss.


def scale_by_loss(updates, state, value):
    return on_data(lambda data: data * jnp.tanh(value), updates), state


def store_best_loss(updates, state, value):
    return updates, jnp.minimum(state, value)


def plateau(updates, state, value):
    best, scale = state
    scale = jnp.where(value < best, scale, scale / 2)
    scaled = on_data(lambda data: data * scale, updates)
    return scaled, (jnp.minimum(best, value), scale)


# With effects.


def log_norm(updates, state, params, seen):
    seen.log(norm(updates))
    return updates, state


def log_in_order(updates, state, params, seen):
    return updates, state + seen.log_in_order(norm(updates))


def log_each(updates, state, params, seen):
    on_rows(lambda x: seen.log(x.indices), updates)
    return updates, state


def log_arrays(updates, state, params, seen):
    on_rows(lambda x: [seen.log(x.data), seen.log(x.indices)], updates)
    return updates, state


def log_paths(updates, state, params, seen):
    def log(path, x):
        seen.log(jnp.float32(len(jax.tree_util.keystr(path))) + norm(x))

    jax.tree_util.tree_map_with_path(log, updates, is_leaf=is_rows)
    return updates, state


def log_if_large(updates, state, params, seen):
    size = norm(updates)
    lax.cond(size > 0, seen.log, lambda x: None, size)
    return updates, state


def two_effects(updates, state, params, seen):
    seen.log(norm(updates))
    return updates, state + seen.log_in_order(jnp.float32(state))


def print_step(updates, state, params, seen):
    jax.debug.print("a step")
    seen.log(jnp.zeros(()))
    return updates, state


def refuse_nan(updates, state, params, seen):
    def check(x):
        assert np.isfinite(x), "a NaN in the updates"
        seen.values.append(np.asarray(x))

    jax.debug.callback(check, norm(updates))
    return updates, state


def scale_on_host(updates, state, params, seen):
    def scaled(data):
        return jax.pure_callback(lambda x: x / 2, data, data)

    return on_data(scaled, updates), state


# Of gradients.


def log_gradient(grads, params, seen):
    seen.log(norm(grads))
    return grads


def clip_rows(grads, params, seen):
    seen.log(norm(grads))
    return on_data(lambda data: jnp.clip(data, -0.1, 0.1), grads)


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


def centred(x):
    return with_data(x, x.data - x.data.mean(-1, keepdims=True))


def no_gradient_of_w(grads, params, seen):
    return type(grads)(dict(grads.items()) | {"w": None})
