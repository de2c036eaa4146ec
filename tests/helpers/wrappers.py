"""What stands around an optimiser of rows: how it is made, and what it has seen.

A wrapper is a function of an optimiser and of `Seen`, in which it leaves its marks: how
often its Python code has run, and how often its effects occurred. What it does is a
change, `change(updates, state, params, seen)`, of the updates and of a state behind
that of the optimiser. `wrapper_changes` has these, `wrapper_cases` the table of all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.experimental.sparse import BCOO


def start():
    """The parameters of a model with a table."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(12, 3)), jnp.float32)
    return {"table": table, "w": jnp.ones(3)}


def loss(params, ids):
    return jnp.sum(jnp.sin(params["table"][ids] @ params["w"]))


class Seen:
    """What a wrapper has seen, outside of the program."""

    def __init__(self):
        self.traces, self.values = 0, []

    def log(self, x):
        jax.debug.callback(lambda x: self.values.append(np.asarray(x)), x)

    def log_in_order(self, x):
        def append(x):
            self.values.append(np.asarray(x))
            return np.int32(len(self.values))

        return io_callback(append, jax.ShapeDtypeStruct((), jnp.int32), x, ordered=True)


# Trees of updates and gradients, as the docs teach it: BCOO leaves are known.


def is_rows(x):
    return isinstance(x, BCOO)


def with_data(x, data):
    flags = {"indices_sorted": x.indices_sorted, "unique_indices": x.unique_indices}
    return BCOO((data, x.indices), shape=x.shape, **flags)


def on_rows(function, tree):
    """`function` of each BCOO leaf; others are passed on."""
    return jax.tree.map(
        lambda x: function(x) if is_rows(x) else x, tree, is_leaf=is_rows
    )


def on_data(function, tree):
    """`function` of the values of rows; padding stays zeros."""
    return on_rows(lambda x: with_data(x, function(x.data)), tree)


def norm(tree):
    leaves = jax.tree.leaves(tree, is_leaf=is_rows)
    return sum(jnp.sum((x.data if is_rows(x) else x) ** 2) for x in leaves)


def rows_at(table, x):
    return table.at[x.indices[:, 0]].get(mode="fill", fill_value=0)


# Changes of updates alone.


def of_rows(function):
    return lambda updates, state, params, seen: (on_rows(function, updates), state)


def of_data(function):
    return lambda updates, state, params, seen: (on_data(function, updates), state)


def of_entries(function):
    """Of values and indices, into any number of entries."""
    return of_rows(lambda x: BCOO(function(x.data, x.indices), shape=x.shape))


def of_leaf(name, function):
    def change(updates, state, params, seen):
        new = dict(updates.items())
        new[name] = function(updates[name])
        return type(updates)(new), state

    return change


# Wrappers.


def none(params):
    return ()


def after(change, init=none):
    """Behind the optimiser, with a state that begins with `init(params)`."""

    def wrapper(tx, seen):
        tx = optax.with_extra_args_support(tx)

        def init_fn(params):
            return tx.init(params), init(params)

        def update_fn(grads, state, params=None, **extra):
            seen.traces += 1
            updates, inner = tx.update(grads, state[0], params, **extra)
            updates, behind = change(updates, state[1], params, seen)
            return updates, (inner, behind)

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)

    return wrapper


def in_chain(*changes):
    """Behind the optimiser, as parts of a chain."""

    def wrapper(tx, seen):
        parts = [after(x)(optax.identity(), seen) for x in changes]
        return optax.chain(tx, *parts)

    return wrapper


def before(change):
    """In front of the optimiser: `change(grads, params, seen)`."""

    def wrapper(tx, seen):
        tx = optax.with_extra_args_support(tx)

        def update_fn(grads, state, params=None, **extra):
            seen.traces += 1
            return tx.update(change(grads, params, seen), state, params, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update_fn)

    return wrapper


def around(change):
    """`change(update, grads, state, params)`, of the update of the optimiser."""

    def wrapper(tx, seen):
        def update(grads, state, params=None, **extra):
            seen.traces += 1
            return change(functools.partial(tx.update, **extra), grads, state, params)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return wrapper


def of_value(change, init=none):
    """Asks for the loss: `change(updates, state, value)`."""

    def wrapper(tx, seen):
        def update(grads, state, params=None, *, value, **extra):
            seen.traces += 1
            updates, inner = tx.update(grads, state[0], params)
            updates, behind = change(updates, state[1], value)
            return updates, (inner, behind)

        def init_fn(params):
            return tx.init(params), init(params)

        return optax.GradientTransformationExtraArgs(init_fn, update)

    return wrapper
