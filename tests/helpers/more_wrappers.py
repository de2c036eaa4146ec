"""Further wrappers, as in `wrappers.py`: by how they are made, and those of optax."""

import copy
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

from .wrappers import (
    Case,
    after,
    changing,
    conditionally,
    halve,
    is_rows,
    log_norm,
    norm,
)
from .wrappers_of_users import on_data

# How a transformation is made.


class Pair(NamedTuple):
    init: Any
    update: Any


@dataclasses.dataclass(frozen=True)
class Record:
    init: Any
    update: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    inner: Any


def around(change):
    """The update by a function of the one that is inside."""

    def wrapper(tx, seen):
        def update(grads, state, params=None, **extra):
            seen.traces += 1
            return change(functools.partial(tx.update, **extra), grads, state, params)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return wrapper


def made_by(make, update=lambda update: update):
    return lambda tx, seen: make(tx.init, update(tx.update))


def jitted_log(tx, seen):
    inner = after(log_norm)(tx, seen)
    return Pair(inner.init, jax.jit(inner.update))


def mocked(tx, seen):
    def count(*args, **kwargs):
        seen.traces += 1
        return mock.DEFAULT

    update = mock.Mock(wraps=tx.update, side_effect=count)
    return optax.GradientTransformationExtraArgs(tx.init, update)


def lone_scan(update, grads, state, params):
    def body(state, grads):
        updates, state = update(grads, state, params)
        return state, updates

    grads = jax.tree.map(lambda x: x[None], grads)
    state, updates = lax.scan(body, state, grads)
    return jax.tree.map(lambda x: x[0], updates), state


def lone_vmap(update, grads, state, params):
    args = jax.tree.map(lambda x: x[None], (grads, state, params))
    return jax.tree.map(lambda x: x[0], jax.vmap(update)(*args))


def scoped(update, grads, state, params):
    with jax.named_scope("wrapped"):
        return update(grads, state, params)


def kept(pack, unpack):
    """The state of the inner one in another form, as `pack(state)`."""

    def wrapper(tx, seen):
        def update(grads, state, params=None, **extra):
            seen.traces += 1
            inner = unpack(state, jax.eval_shape(tx.init, params))
            updates, inner = tx.update(grads, inner, params, **extra)
            return updates, pack(inner)

        init = lambda params: pack(tx.init(params))  # noqa: E731
        return optax.GradientTransformationExtraArgs(init, update)

    return wrapper


def low(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree
    )


def like(tree, other):
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


def unravel(vector, shapes):
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return ravel_pytree(zeros)[1](vector)


def another_init(tx, seen):
    """In the place of `init` alone: `update` is the optimiser's own."""

    def init(params):
        seen.traces += 1
        warm = lambda x: x + 0.5 if x.dtype == jnp.float32 else x  # noqa: E731
        return jax.tree.map(warm, tx.init(params))

    return tx._replace(init=init)


def sum_of_two(tx, seen):
    second = osa.lazy(optax.sgd(0.05))

    def update(grads, state, params=None):
        (one, own), (two, other) = (
            each.update(grads, part, params)
            for each, part in zip((tx, second), state, strict=True)
        )

        def added(a, b):
            if not is_rows(a):
                return a + b
            pairs = (a.data, b.data), (a.indices, b.indices)
            return BCOO(tuple(map(jnp.concatenate, pairs)), shape=a.shape)

        return jax.tree.map(added, one, two, is_leaf=is_rows), (own, other)

    init = lambda params: (tx.init(params), second.init(params))  # noqa: E731
    return optax.GradientTransformation(init, update)


def own_skip(update, grads, state, params):
    """Takes gradients of the structure of updates, as `apply_if_finite` does."""

    def skip(grads, state):
        return jax.tree.map(jnp.zeros_like, grads), state

    def step(grads, state):
        return update(grads, state, params)

    return lax.cond(norm(grads) > 0, step, skip, grads, state)


def behind(*parts):
    return lambda tx, seen: optax.chain(tx, *parts)


def in_front(*parts):
    return lambda tx, seen: optax.chain(*parts, tx)


def logged_part(seen):
    return after(log_norm)(optax.identity(), seen)


def inject_factor(rate):
    def wrapper(tx, seen):
        def make(factor):
            scale = on_data(lambda data: data * factor)
            return optax.chain(tx, after(scale)(optax.identity(), seen))

        return optax.inject_hyperparams(make)(factor=rate)

    return wrapper


def with_labels(labels):
    def wrapper(tx, seen):
        parts = {"rows": after(log_norm)(tx, seen), "rest": optax.sgd(0.1)}
        return optax.multi_transform(parts, labels)

    return wrapper


def masked_by(mask):
    return lambda tx, seen: optax.chain(
        optax.masked(after(log_norm)(tx, seen), mask),
        optax.masked(optax.scale(-0.1), {"table": False, "w": True}),
    )


MASK = {"table": False, "w": True}

FORMS = {
    "tuple of own": Case(made_by(Pair)),
    "record": Case(made_by(Record)),
    "init and update again": Case(made_by(optax.GradientTransformation)),
    "partial": Case(made_by(Pair, functools.partial)),
    "lambda": Case(
        made_by(Pair, lambda update: lambda *args, **kw: update(*args, **kw))
    ),
    "bound method": Case(made_by(Pair, lambda update: update.__call__)),
    "shallow copy": Case(made_by(Pair, copy.copy)),
    "deep copy": Case(lambda tx, seen: copy.deepcopy(tx)),
    "jit": Case(made_by(Pair, jax.jit)),
    "jit of a log": Case(jitted_log),
    "checkpoint": Case(made_by(Pair, jax.checkpoint)),
    "mock": Case(mocked),
    "named_scope": Case(around(scoped)),
    "scan of one step": changing(around(lone_scan)),
    "vmap of one step": changing(around(lone_vmap)),
    "state in a dict": Case(kept(lambda x: {"a": x}, lambda x, _: x["a"])),
    "state in a record": Case(kept(Held, lambda x, _: x.inner), in_flax=False),
    "leaves of the state": Case(
        kept(
            jax.tree.leaves,
            lambda x, like: jax.tree.unflatten(jax.tree.structure(like), x),
        )
    ),
    "state of low precision": changing(kept(low, like)),
    "state as a vector": changing(
        kept(lambda x: ravel_pytree(x)[0], unravel), in_flax=False
    ),
    "another init": changing(another_init),
    "sum of two": changing(sum_of_two),
    "own skip": changing(around(own_skip), sums=True),
}
OF_OPTAX = {
    "multi_transform": Case(with_labels({"table": "rows", "w": "rest"}), in_flax=False),
    "labels by names": Case(
        with_labels(lambda tree: {"table": "rows", "w": "rest"}), in_flax=False
    ),
    "mask by names": Case(
        masked_by(lambda tree: {"table": True, "w": False}), in_flax=False
    ),
    "selective_transform": Case(
        lambda tx, seen: optax.selective_transform(
            after(log_norm)(tx, seen), freeze_mask=MASK
        ),
        in_flax=False,
    ),
    "freeze": changing(behind(optax.freeze(MASK)), in_flax=False),
    "freeze the table": changing(
        behind(optax.freeze({"table": True, "w": False})), in_flax=False
    ),
    "set_to_zero": changing(behind(optax.set_to_zero())),
    "identity in front": Case(in_front(optax.identity())),
    "chain of chains": Case(
        lambda tx, seen: optax.chain(optax.chain(optax.chain(tx), logged_part(seen)))
    ),
    "extra args twice": Case(
        lambda tx, seen: optax.with_extra_args_support(
            optax.with_extra_args_support(after(log_norm)(tx, seen))
        )
    ),
    "inject a factor": changing(inject_factor(0.5)),
    "inject a schedule": changing(inject_factor(optax.linear_schedule(1.0, 0.0, 4))),
    "snapshot": Case(behind(optax.snapshot("size", norm))),
    "monitor": Case(
        behind(optax.monitor({"size": norm, "ema": optax.measure_with_ema(norm, 0.9)}))
    ),
    "stateless": changing(
        behind(
            optax.stateless(lambda updates, params: halve(updates, (), params, None)[0])
        )
    ),
    "zero_nans": changing(behind(optax.zero_nans()), in_flax=False),
    "lazy clip in front": changing(in_front(osa.lazy(optax.clip(0.1)))),
    "lazy norm in front": changing(in_front(osa.lazy(optax.clip_by_global_norm(0.5)))),
    "lazy scale": changing(behind(osa.lazy(optax.scale(0.5)))),
    "lazy schedule": changing(
        behind(osa.lazy(optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 4))))
    ),
    "lazy decay": changing(behind(osa.lazy(optax.add_decayed_weights(-0.01)))),
    "lazy momentum": changing(behind(osa.lazy(optax.trace(0.9)))),
    "lazy ema": changing(behind(osa.lazy(optax.ema(0.9)))),
    "lazy trust ratio": changing(behind(osa.lazy(optax.scale_by_trust_ratio()))),
    "apply_if_finite twice": Case(
        lambda tx, seen: optax.apply_if_finite(
            optax.apply_if_finite(after(log_norm)(tx, seen), 3), 3
        ),
        sums=True,
    ),
    "finite in a partition": Case(
        lambda tx, seen: optax.partition(
            {"rows": optax.apply_if_finite(tx, 3), "rest": optax.sgd(0.1)},
            {"table": "rows", "w": "rest"},
        ),
        sums=True,
    ),
    "mask of a log": Case(conditionally(optax.conditionally_mask), sums=True),
}
