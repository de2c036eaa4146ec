"""Transformations that see the updates of an optimiser of rows, and their effects.

Each wrapper is a function of an optimiser and of `Seen`, in which it leaves its marks:
how often its Python code has run, and how often its effects occurred.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa


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


def is_rows(x):
    return isinstance(x, BCOO)


def with_data(x, data):
    flags = {"indices_sorted": x.indices_sorted, "unique_indices": x.unique_indices}
    return BCOO((data, x.indices), shape=x.shape, **flags)


def on_rows(function, tree):
    """As the docs teach it: BCOO leaves are known, others passed on."""
    return jax.tree.map(
        lambda x: function(x) if is_rows(x) else x, tree, is_leaf=is_rows
    )


def norm(tree):
    leaves = jax.tree.leaves(tree, is_leaf=is_rows)
    return sum(jnp.sum((x.data if is_rows(x) else x) ** 2) for x in leaves)


def after(change, init=lambda params: ()):
    """A wrapper: `change(updates, own_state, params, seen)` behind the optimiser."""

    def wrapper(tx, seen):
        tx = optax.with_extra_args_support(tx)

        def init_fn(params):
            return tx.init(params), init(params)

        def update_fn(grads, state, params=None, **extra):
            seen.traces += 1
            updates, inner = tx.update(grads, state[0], params, **extra)
            updates, own = change(updates, state[1], params, seen)
            return updates, (inner, own)

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)

    return wrapper


def before(change):
    """A wrapper: `change(grads, params, seen)` in front of the optimiser."""

    def wrapper(tx, seen):
        tx = optax.with_extra_args_support(tx)

        def update_fn(grads, state, params=None, **extra):
            seen.traces += 1
            return tx.update(change(grads, params, seen), state, params, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update_fn)

    return wrapper


# What is done with updates.


def passes(updates, state, params, seen):
    return updates, state


def halve(updates, state, params, seen):
    return on_rows(lambda x: with_data(x, x.data / 2), updates), state


def halve_by_operator(updates, state, params, seen):
    return on_rows(lambda x: x * 0.5, updates), state


def cap(updates, state, params, seen):
    return on_rows(lambda x: with_data(x, jnp.clip(x.data, -0.01, 0.01)), updates), ()


def freeze(updates, state, params, seen):
    def frozen(x):
        return with_data(x, jnp.where(x.indices == 3, 0.0, x.data))

    return on_rows(frozen, updates), state


def by_path(updates, state, params, seen):
    def change(path, x):
        is_table = "table" in jax.tree_util.keystr(path) and is_rows(x)
        return with_data(x, -x.data) if is_table else x

    tree_map = jax.tree_util.tree_map_with_path
    return tree_map(change, updates, is_leaf=is_rows), state


def count(updates, state, params, seen):
    return updates, state + sum(map(is_rows, jax.tree.leaves(updates, is_leaf=is_rows)))


def log_norm(updates, state, params, seen):
    seen.log(norm(updates))
    return updates, state


def log_in_order(updates, state, params, seen):
    return updates, state + seen.log_in_order(norm(updates))


def log_each(updates, state, params, seen):
    on_rows(lambda x: seen.log(x.indices), updates)
    return updates, state


def print_step(updates, state, params, seen):
    jax.debug.print("a step")
    seen.log(jnp.zeros(()))
    return updates, state


def store(updates, state, params, seen):
    return updates, updates


def store_norm(updates, state, params, seen):
    return updates, norm(updates)


def store_sum(updates, state, params, seen):
    dense = on_rows(lambda x: x.todense(), updates)
    return updates, jax.tree.map(jnp.add, state, dense)


def store_params(updates, state, params, seen):
    return updates, params["table"][:4] + 0.0


def make_dense(updates, state, params, seen):
    return on_rows(lambda x: x.todense(), updates), state


def make_zeros(updates, state, params, seen):
    return on_rows(lambda x: with_data(x, jnp.zeros_like(x.data)), updates), state


def drop(updates, state, params, seen):
    return on_rows(lambda x: None, updates), state


def replace(updates, state, params, seen):
    def other(x):
        rows = jnp.array([[1], [2]])
        return BCOO((jnp.ones((2, *x.shape[1:])), rows), shape=x.shape)

    return on_rows(other, updates), state


def add_noise(updates, state, params, seen):
    key, own = jax.random.split(jax.random.wrap_key_data(state))

    def noisy(x):
        is_row = x.indices < x.shape[0]
        noise = jax.random.normal(own, x.data.shape)
        return with_data(x, jnp.where(is_row, x.data + 0.01 * noise, 0.0))

    return on_rows(noisy, updates), jax.random.key_data(key)


def decay(updates, state, params, seen):
    """Reads the parameters after the optimiser has computed its updates."""

    def decayed(x):
        rows = params["table"].at[x.indices[:, 0]].get(mode="fill", fill_value=0)
        return with_data(x, x.data - 0.1 * rows)

    return on_rows(decayed, updates), state


# What is around an optimiser in one way only.


def clip_rows(grads, params, seen):
    seen.log(norm(grads))
    return on_rows(lambda x: with_data(x, jnp.clip(x.data, -0.1, 0.1)), grads)


def log_gradient(grads, params, seen):
    seen.log(norm(grads))
    return grads


def replaced(tx, seen):
    """Behind it in `update` itself, as one patches an optimiser."""

    def update(*args, **kwargs):
        updates, state = tx.update(*args, **kwargs)
        return halve(updates, (), None, seen)[0], state

    return tx._replace(update=update)


def wrapped(tx, seen):
    """With a copy of all attributes of what it wraps."""

    @functools.wraps(tx.update)
    def update(*args, **kwargs):
        seen.traces += 1
        updates, state = tx.update(*args, **kwargs)
        seen.log(norm(updates))
        return halve(updates, (), None, seen)[0], state

    vars(update).update(vars(tx.update))
    return optax.GradientTransformationExtraArgs(tx.init, update)


def subclassed(tx, seen):
    class Logged(type(tx.update)):
        def __call__(self, *args, **kwargs):
            updates, state = super().__call__(*args, **kwargs)
            seen.log(norm(updates))
            return halve(updates, (), None, seen)[0], state

    update = object.__new__(Logged)
    vars(update).update(vars(tx.update))
    return tx._replace(update=update)


class Slots:
    __slots__ = ("seen", "tx")

    def __init__(self, tx, seen):
        self.tx, self.seen = tx, seen

    def init(self, params):
        return self.tx.init(params)

    def update(self, grads, state, params=None):
        updates, state = self.tx.update(grads, state, params)
        self.seen.log(norm(updates))
        return updates, state


def mean_of_two(tx, seen):
    """Calls it twice, and takes the mean of both updates."""

    def update(grads, state, params=None):
        pairs = [tx.update(grads, state, params) for _ in range(2)]
        first, second = (updates for updates, _ in pairs)

        def mean(a, b):
            return with_data(a, (a.data + 3 * b.data) / 4) if is_rows(a) else b

        return jax.tree.map(mean, first, second, is_leaf=is_rows), pairs[0][1]

    return optax.GradientTransformation(tx.init, update)


def other_parameters(tx, seen):
    def update(grads, state, params=None, **extra):
        moved = jax.tree.map(lambda x: x + 1, params)
        return tx.update(grads, state, moved, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def partition(tx, seen):
    labels = {"table": "rows", "w": "rest"}
    parts = {"rows": after(log_norm)(tx, seen), "rest": osa.lazy(optax.adam(0.1))}
    return optax.partition(parts, labels)


def partition_and_halve(tx, seen):
    return after(halve)(partition(tx, seen), seen)


def masked(tx, seen):
    rest = optax.masked(optax.sgd(0.1), {"table": False, "w": True})
    return optax.chain(optax.masked(tx, {"table": True, "w": False}), rest)


def injected(tx, seen):
    return optax.inject_hyperparams(lambda lr: after(log_norm)(tx, seen))(lr=0.1)


def in_chain(*changes):
    def wrapper(tx, seen):
        parts = [after(x)(optax.identity(), seen) for x in changes]
        return optax.chain(tx, *parts)

    return wrapper


def named_chain(tx, seen):
    behind = after(log_norm)(optax.identity(), seen)
    return optax.named_chain(("rows", tx), ("log", behind))


class Case(NamedTuple):
    """A wrapper, and whether it takes gradients whose duplicates are added up.

    `changes` says that updates are changed, which those of exact Adam must not be;
    `value` that it asks for the loss; `in_flax` that Flax takes it (it takes no state
    whose structure changes, and labels and masks of its own trees only).
    """

    wrapper: object
    changes: bool = False
    sums: bool = False
    value: bool = False
    in_flax: bool = True


def changing(wrapper, **fields):
    return Case(wrapper, **({"changes": True} | fields))


def zero(params):
    return jnp.zeros((), jnp.int32)


def first_key(params):
    return jax.random.key_data(jax.random.key(0))


def conditionally(function):
    def wrapper(tx, seen):
        inner = after(log_norm)(tx, seen)
        return function(inner, lambda step, **_: step >= 0)

    return wrapper


CASES = {
    "nothing": Case(lambda tx, seen: tx),
    "extra args": Case(lambda tx, seen: optax.with_extra_args_support(tx)),
    "chain of one": Case(lambda tx, seen: optax.chain(tx)),
    "chain and identity": Case(lambda tx, seen: optax.chain(tx, optax.identity())),
    "passes": Case(after(passes)),
    "halve": Case(in_chain(halve), changes=True),
    "halve around": Case(after(halve), changes=True),
    "halve by an operator": Case(in_chain(halve_by_operator), changes=True),
    "cap": Case(in_chain(cap), changes=True),
    "freeze": Case(in_chain(freeze), changes=True),
    "by path": Case(in_chain(by_path), changes=True),
    "count": Case(after(count, zero)),
    "log": Case(in_chain(log_norm)),
    "log in order": Case(after(log_in_order, zero)),
    "log each": Case(in_chain(log_each)),
    "print": Case(in_chain(print_step)),
    "log twice and halve": Case(in_chain(log_norm, halve, log_norm), changes=True),
    "store": Case(after(store)),
    "store the norm": Case(after(store_norm, lambda params: jnp.zeros(()))),
    "store the sum": Case(after(store_sum, lambda p: jax.tree.map(jnp.zeros_like, p))),
    "store parameters": Case(after(store_params, lambda params: jnp.zeros((4, 3)))),
    "make dense": Case(in_chain(make_dense), changes=True),
    "make zeros": Case(in_chain(make_zeros), changes=True),
    "drop": Case(in_chain(drop), changes=True),
    "replace": Case(in_chain(replace), changes=True),
    "noise": Case(after(add_noise, first_key), changes=True),
    "decay": Case(after(decay), changes=True),
    "clip rows before": Case(before(clip_rows), changes=True),
    "log before": Case(before(log_gradient)),
    "update replaced": Case(replaced, changes=True),
    "update wrapped": Case(wrapped, changes=True),
    "update subclassed": Case(subclassed, changes=True),
    "slots": Case(Slots),
    "mean of two": Case(mean_of_two, changes=True),
    "other parameters": Case(other_parameters, changes=True),
    "partition": Case(partition),
    "partition and halve": Case(partition_and_halve, changes=True),
    "masked": Case(masked),
    "inject_hyperparams": Case(injected),
    "named_chain": Case(named_chain),
    "apply_if_finite": Case(
        lambda tx, seen: optax.apply_if_finite(after(log_norm)(tx, seen), 3), sums=True
    ),
    "conditionally_mask": Case(conditionally(optax.conditionally_mask), sums=True),
    "conditionally_transform": Case(
        conditionally(optax.conditionally_transform), sums=True
    ),
}
