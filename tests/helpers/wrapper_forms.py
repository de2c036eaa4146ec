"""How a wrapper may be made, in ways of Python, of JAX and of optax; see `wrappers`."""

import dataclasses
import functools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree

import optax_sparse_adam as osa

from .wrapper_changes import halve, log_norm
from .wrappers import after, is_rows, norm, of_data, with_data


def logged(tx, seen):
    return after(log_norm)(tx, seen)


def halved(updates):
    return halve(updates, (), None, None)[0]


# A transformation by another type, or with another function in it.


class Pair(NamedTuple):
    init: Any
    update: Any


@dataclasses.dataclass(frozen=True)
class Record:
    init: Any
    update: Any


def pair_of(change):
    """With `change(update)` in the place of its update."""
    return lambda tx, seen: Pair(tx.init, change(tx.update))


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


def update_replaced(tx, seen):
    """Behind it in `update` itself, as one patches an optimiser."""

    def update(*args, **kwargs):
        updates, state = tx.update(*args, **kwargs)
        return halved(updates), state

    return tx._replace(update=update)


def update_wrapped(tx, seen):
    """With a copy of all attributes of what it wraps."""

    @functools.wraps(tx.update)
    def update(*args, **kwargs):
        seen.traces += 1
        updates, state = tx.update(*args, **kwargs)
        seen.log(norm(updates))
        return halved(updates), state

    vars(update).update(vars(tx.update))
    return optax.GradientTransformationExtraArgs(tx.init, update)


def update_subclassed(tx, seen):
    class Logged(type(tx.update)):
        def __call__(self, *args, **kwargs):
            updates, state = super().__call__(*args, **kwargs)
            seen.log(norm(updates))
            return halved(updates), state

    update = object.__new__(Logged)
    vars(update).update(vars(tx.update))
    return tx._replace(update=update)


def init_replaced(tx, seen):
    """In the place of `init` alone: `update` is the optimiser's own."""

    def warm(x):
        return x + 0.5 if x.dtype == jnp.float32 else x

    def init(params):
        seen.traces += 1
        return jax.tree.map(warm, tx.init(params))

    return tx._replace(init=init)


def mocked(tx, seen):
    def count(*args, **kwargs):
        seen.traces += 1
        return mock.DEFAULT

    update = mock.Mock(wraps=tx.update, side_effect=count)
    return optax.GradientTransformationExtraArgs(tx.init, update)


# Calls it in another way.


def jitted_log(tx, seen):
    inner = logged(tx, seen)
    return Pair(inner.init, jax.jit(inner.update))


def in_scope(update, grads, state, params):
    with jax.named_scope("wrapped"):
        return update(grads, state, params)


def in_scan(update, grads, state, params):
    def body(state, grads):
        updates, state = update(grads, state, params)
        return state, updates

    grads = jax.tree.map(lambda x: x[None], grads)
    state, updates = lax.scan(body, state, grads)
    return jax.tree.map(lambda x: x[0], updates), state


def in_vmap(update, grads, state, params):
    args = jax.tree.map(lambda x: x[None], (grads, state, params))
    return jax.tree.map(lambda x: x[0], jax.vmap(update)(*args))


def in_cond(update, grads, state, params):
    """Takes gradients of the structure of updates, as `apply_if_finite` does."""

    def skip(grads, state):
        return jax.tree.map(jnp.zeros_like, grads), state

    def step(grads, state):
        return update(grads, state, params)

    return lax.cond(norm(grads) > 0, step, skip, grads, state)


def at_other_parameters(update, grads, state, params):
    return update(grads, state, jax.tree.map(lambda x: x + 1, params))


def mean_of_two(update, grads, state, params):
    """Calls it twice, and takes the mean of both updates."""
    pairs = [update(grads, state, params) for _ in range(2)]
    first, second = (updates for updates, _ in pairs)

    def mean(a, b):
        return with_data(a, (a.data + 3 * b.data) / 4) if is_rows(a) else b

    return jax.tree.map(mean, first, second, is_leaf=is_rows), pairs[0][1]


def sum_of_two(tx, seen):
    parts = tx, osa.lazy(optax.sgd(0.05))

    def init(params):
        return tuple(part.init(params) for part in parts)

    def update(grads, states, params=None):
        pairs = zip(parts, states, strict=True)
        made = [part.update(grads, state, params) for part, state in pairs]

        def added(a, b):
            if not is_rows(a):
                return a + b
            pairs = (a.data, b.data), (a.indices, b.indices)
            return BCOO(tuple(map(jnp.concatenate, pairs)), shape=a.shape)

        updates, states = zip(*made, strict=True)
        return jax.tree.map(added, *updates, is_leaf=is_rows), states

    return optax.GradientTransformation(init, update)


# Keeps its state in another form.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    inner: Any


def kept(pack, unpack):
    """As `pack(state)`; `unpack(packed, shapes of the state)`."""

    def wrapper(tx, seen):
        def init(params):
            return pack(tx.init(params))

        def update(grads, state, params=None, **extra):
            seen.traces += 1
            inner = unpack(state, jax.eval_shape(tx.init, params))
            updates, inner = tx.update(grads, inner, params, **extra)
            return updates, pack(inner)

        return optax.GradientTransformationExtraArgs(init, update)

    return wrapper


def low(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree
    )


def like(tree, other):
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


def as_vector(state):
    return ravel_pytree(state)[0]


def unravel(vector, shapes):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return ravel_pytree(zeros)[1](vector)


def unflatten(leaves, shapes):
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


# Is one of optax's.

LABELS = {"table": "rows", "w": "rest"}
IS_TABLE, IS_W = {"table": True, "w": False}, {"table": False, "w": True}


def behind(*parts):
    return lambda tx, seen: optax.chain(tx, *parts)


def in_front(*parts):
    return lambda tx, seen: optax.chain(*parts, tx)


def finite(times):
    """Updates if all is finite, around a log; so many times."""

    def wrapper(tx, seen):
        tx = logged(tx, seen)
        for _ in range(times):
            tx = optax.apply_if_finite(tx, 3)
        return tx

    return wrapper


def always(conditionally):
    return lambda tx, seen: conditionally(logged(tx, seen), lambda step, **_: step >= 0)


def extra_args_twice(tx, seen):
    once = optax.with_extra_args_support(logged(tx, seen))
    return optax.with_extra_args_support(once)


def monitor(tx, seen):
    metrics = {"size": norm, "ema": optax.measure_with_ema(norm, 0.9)}
    return optax.chain(tx, optax.monitor(metrics))


def partition(tx, seen):
    parts = {"rows": logged(tx, seen), "rest": osa.lazy(optax.adam(0.1))}
    return optax.partition(parts, LABELS)


def partition_and_halve(tx, seen):
    return after(halve)(partition(tx, seen), seen)


def finite_in_a_partition(tx, seen):
    parts = {"rows": optax.apply_if_finite(tx, 3), "rest": optax.sgd(0.1)}
    return optax.partition(parts, LABELS)


def with_labels(labels):
    def wrapper(tx, seen):
        parts = {"rows": logged(tx, seen), "rest": optax.sgd(0.1)}
        return optax.multi_transform(parts, labels)

    return wrapper


def masked(tx, seen):
    rest = optax.masked(optax.sgd(0.1), IS_W)
    return optax.chain(optax.masked(tx, IS_TABLE), rest)


def mask_by_names(tx, seen):
    table = optax.masked(logged(tx, seen), lambda tree: IS_TABLE)
    return optax.chain(table, optax.masked(optax.scale(-0.1), IS_W))


def selective_transform(tx, seen):
    return optax.selective_transform(logged(tx, seen), freeze_mask=IS_W)


def injected(tx, seen):
    return optax.inject_hyperparams(lambda lr: logged(tx, seen))(lr=0.1)


def inject_factor(rate):
    def wrapper(tx, seen):
        def make(factor):
            scale = of_data(lambda data: data * factor)
            return optax.chain(tx, after(scale)(optax.identity(), seen))

        return optax.inject_hyperparams(make)(factor=rate)

    return wrapper


def named_chain(tx, seen):
    return optax.named_chain(("rows", tx), ("log", logged(optax.identity(), seen)))


def chain_of_chains(tx, seen):
    log = logged(optax.identity(), seen)
    return optax.chain(optax.chain(optax.chain(tx), log))
