"""The programs of tests/gradients/test_differential, each a `loss(t, ids, w)`.

`PROGRAMS` has those of `differential_refs.py`, each alone and in each surrounding of
`AROUND`, and the others below. What a sibling module adds goes there, too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from . import differential_refs as refs
from .differential_refs import loop, odd, read, through_ref, tripled, zeros


class Program(NamedTuple):
    """A loss, and what is known of it.

    Attributes:
      loss: `loss(t, ids, w)`.
      is_sparse: Whether the gradient of `t` is row-sparse.
      like: The same loss, as JAX differentiates it right; `None` for itself.
    """

    loss: Callable[..., Any]
    is_sparse: bool = True
    like: Callable[..., Any] | None = None


def in_a_scan(f):
    def scanned(t, ids, w):
        def step(total, shift):
            return total * 0.5 + f(t, (ids + shift) % t.shape[0], w), None

        return lax.scan(step, 0.0, jnp.arange(2))[0]

    return scanned


def in_steps(f):
    """`in_a_scan` without a loop: JAX reads mutable arrays of its body too early."""

    def one_by_one(t, ids, w):
        first = f(t, ids, w)
        return first * 0.5 + f(t, (ids + 1) % t.shape[0], w)

    return one_by_one


def in_a_branch(f):
    def chosen(t, ids, w):
        return lax.cond(
            ids[0] == 0, lambda t: f(t, ids, w), lambda t: jnp.sum(t[ids[1:]]), t
        )

    return chosen


def under_vmap(f):
    def mapped(t, ids, w):
        both = jnp.stack([ids, ids[::-1]])
        return jnp.sum(jax.vmap(f, (None, 0, None))(t, both, w))

    return mapped


def of_tanh(f):
    return lambda t, ids, w: f(jnp.tanh(t), ids, w) + jnp.sum(t[ids[:1]])


AROUND = {
    "alone": lambda f: f,
    "in a scan": in_a_scan,
    "in a branch": in_a_branch,
    "under vmap": under_vmap,
    "of tanh of the table": of_tanh,
}


def named(functions, is_sparse=True):
    names = [f.__name__.replace("_", " ") for f in functions]
    return {
        name: Program(f, is_sparse) for name, f in zip(names, functions, strict=True)
    }


REFS = {**named(refs.SPARSE), **named(refs.DENSE, is_sparse=False)}
# What JAX 0.10 cannot differentiate: branches with effects on a mutable array outside,
# whose predicate is not known, and a mutable array in `xs` under `vmap`.
NOT_BY_JAX = {
    "written by a branch": {"in a scan", "under vmap"},
    "read by a branch": {"in a scan", "under vmap"},
    "scanned over": {"under vmap"},
    "rows scanned over": {"under vmap"},
}
DENSE_AROUND = {("made in a branch", "under vmap")}  # a branch for each id


# Extended types: Flax's scales for float8 add up by the maximum.


def scale_type():
    from flax.linen import fp8_ops

    return fp8_ops.fp32_max_grad


def to_scale(x):
    return lax.convert_element_type(x, scale_type())


def from_scale(x):
    return lax.convert_element_type(x, jnp.float32)


@jax.custom_vjp
def scaled(x, scale):
    return x * from_scale(scale)


def _scaled_bwd(saved, g):
    x, scale = saved
    return g * from_scale(scale), to_scale(jnp.sum(g * x)[None])


scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), _scaled_bwd)


@jax.custom_vjp
def doubled_back(x):
    return from_scale(x)


doubled_back.defvjp(lambda x: (from_scale(x), None), lambda _, g: (to_scale(2 * g),))


def scale_used_twice(t, ids, w):
    scale = to_scale(w[:1])
    return jnp.sum(scaled(t[ids], scale)) + jnp.sum(scaled(3 * t[ids[0]], scale))


def scale_in_a_loop(t, ids, w):
    scale = to_scale(w[:1])

    def step(total, i):
        return (total + jnp.sum(scaled(t[i], scale)), None)

    return lax.scan(step, 0.0, ids)[0]


def scale_carried(t, ids, w):
    def step(scale, i):
        return scale, jnp.sum(scaled(t[i], scale))

    scale, sums = lax.scan(step, to_scale(w[:1]), ids)
    return jnp.sum(sums) + jnp.sum(scaled(t[ids[0]], scale))


def scale_in_a_checkpoint(t, ids, w):
    function = jax.checkpoint(lambda t, scale: jnp.sum(scaled(t[ids], scale) ** 2))
    return function(t, to_scale(w[:1]))


def scale_in_a_branch(t, ids, w):
    return lax.cond(
        ids[0] == 0,
        lambda scale: jnp.sum(scaled(t[ids], scale)),
        lambda scale: jnp.sum(scaled(t[ids[:1]], scale)),
        to_scale(w[:1]),
    )


def scale_in_a_jit(t, ids, w):
    function = jax.jit(lambda t, scale: jnp.sum(scaled(t[ids], scale) ** 2))
    return function(t, to_scale(w[:1]))


def scale_of_rows(t, ids, w):
    return jnp.sum(doubled_back(to_scale(t[ids])) ** 2 * w)


def scale_that_is_looked_up(t, ids, w):
    return jnp.sum(scaled(w, to_scale(t[ids[0], :1])))


def scale_in_a_ref(t, ids, w):
    ref = jax.new_ref(to_scale(w[:1]))
    return jnp.sum(scaled(t[ids], ref[...]))


def scale_of_the_table(t, ids, w):
    return jnp.sum(doubled_back(to_scale(t))[ids] ** 2)


def random_keys(t, ids, w):
    keys = jax.random.split(jax.random.key(0), 3)

    def draw(key, i):
        return jax.random.normal(key, (4,)) * t[i]

    return jnp.sum(jax.vmap(draw)(keys, ids) ** 2 * w)


def keys_in_a_ref(t, ids, w):
    ref = jax.new_ref(jax.random.key(0))
    total = jnp.float32(0)
    for k in range(3):
        ref[...], own = jax.random.split(ref[...])
        total += jnp.sum(jax.random.normal(own, (4,)) * t[ids[k]])
    return total


EXTENDED = {
    **named(
        [
            scale_used_twice,
            scale_in_a_loop,
            scale_carried,
            scale_in_a_checkpoint,
            scale_in_a_branch,
            scale_in_a_jit,
            scale_of_rows,
            scale_that_is_looked_up,
            scale_in_a_ref,
            random_keys,
            keys_in_a_ref,
        ]
    ),
    **named([scale_of_the_table], is_sparse=False),
}


# Functions with a rule of their own.


@jax.custom_vjp
def own_lookup(t, i):
    return t[i]


own_lookup.defvjp(
    lambda t, i: (t[i], (t, i)),
    lambda saved, g: (jnp.zeros_like(saved[0]).at[saved[1]].add(3 * g), None),
)


@jax.custom_vjp
def with_statistics(x):
    return x, jnp.mean(x)


with_statistics.defvjp(
    lambda x: (with_statistics(x), x),
    lambda x, g: (2 * g[0] + g[1] * jnp.ones_like(x),),
)


@jax.custom_vjp
def of_a_tree(tree):
    return tree["a"] * tree["b"]


of_a_tree.defvjp(
    lambda tree: (of_a_tree(tree), tree),
    lambda tree, g: ({"a": 3 * g * tree["b"], "b": g * tree["a"]},),
)


def rule_in_a_loop(t, ids, w):
    def step(total, i):
        return (total + jnp.sum(tripled(t[i]) * w), None)

    return lax.scan(step, 0.0, ids)[0]


def rule_in_a_checkpoint(t, ids, w):
    return jax.checkpoint(lambda t: jnp.sum(tripled(t[ids]) * odd(t[ids[0]])))(t)


def rule_in_a_branch(t, ids, w):
    def yes():
        return jnp.sum(tripled(t[ids]) * w)

    return lax.cond(ids[0] == 0, yes, lambda: jnp.sum(odd(t[ids])))


def rule_under_vmap(t, ids, w):
    return jnp.sum(jax.vmap(lambda i: tripled(t[i]) * odd(t[i]))(ids) * w)


def rule_of_two_results(t, ids, w):
    rows, mean = with_statistics(t[ids])
    return jnp.sum(rows * w) * mean


def rule_of_a_tree(t, ids, w):
    return jnp.sum(of_a_tree({"a": t[ids], "b": t[ids[::-1]]}) * w)


def rule_in_a_rule(t, ids, w):
    return jnp.sum(through_ref(tripled(odd(t[ids]))) * w)


def rule_of_rows(t, ids, w):
    return jnp.sum(jax.nn.softplus(jax.nn.relu(t[ids]) - 0.5) * w)


def rule_that_takes_the_table(t, ids, w):
    return jnp.sum(own_lookup(t, ids) * w) + jnp.sum(t[ids])


def relu_of_the_table(t, ids, w):
    return jnp.sum(jax.nn.relu(t)[ids] * w)


def inner_gradient(t, ids, w):
    def energy(x):
        return jnp.sum(jnp.tanh(x * w) ** 2)

    return jnp.sum(jax.grad(energy)(t[ids]) ** 2)


def inner_gradient_by_the_table(t, ids, w):
    def energy(t):
        return jnp.sum(jnp.tanh(t[ids] * w) ** 2)

    return jnp.sum(jax.grad(energy)(t)[ids])


def inner_jvp(t, ids, w):
    primal, tangent = jax.jvp(lambda x: odd(x) * w, (t[ids],), (t[ids[::-1]],))
    return jnp.sum(primal * tangent)


def linear_solve(t, ids, w):
    matrix = jnp.eye(4) * 4 + jnp.outer(w, w) / 8

    def solve(b):
        return lax.custom_linear_solve(
            lambda x: matrix @ x,
            b,
            lambda mv, b: jnp.linalg.solve(matrix, b),
            lambda mv, b: jnp.linalg.solve(matrix.T, b),
        )

    return jnp.sum(jax.vmap(solve)(t[ids]) ** 2)


def root(t, ids, w):
    def f(x):
        return x**3 + x - jnp.sum(t[ids] * w)

    def solve(f, x):
        return lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x**2 + 1), x)

    return lax.custom_root(f, 1.0, solve, lambda g, y: y / g(1.0))


CUSTOM = {
    **named(
        [
            rule_in_a_loop,
            rule_in_a_checkpoint,
            rule_in_a_branch,
            rule_under_vmap,
            rule_of_two_results,
            rule_of_a_tree,
            rule_in_a_rule,
            rule_of_rows,
            inner_gradient,
            inner_jvp,
            linear_solve,
            inner_gradient_by_the_table,
        ]
    ),
    **named([rule_that_takes_the_table, relu_of_the_table], is_sparse=False),
}


# Checkpoints and nested control flow.


def checkpoint_with_a_policy(t, ids, w):
    policy = jax.checkpoint_policies.save_only_these_names("rows")

    def function(t):
        rows = checkpoint_name(jnp.sin(t[ids]), "rows")
        return jnp.sum(jnp.cos(rows) * w)

    return jax.checkpoint(function, policy=policy)(t)


def checkpoint_of_checkpoint(t, ids, w):
    inner = jax.checkpoint(lambda t, i: jnp.sin(t[i]) * w)
    return jax.checkpoint(lambda t: jnp.sum(inner(t, ids) * inner(t, ids[::-1])))(t)


def checkpoint_that_returns_the_table(t, ids, w):
    return jnp.sum(jax.checkpoint(jnp.tanh)(t)[ids] * w)


def steps_of_checkpoints(t, ids, w):
    @jax.checkpoint
    def step(h, i):
        h = jnp.tanh(h * w + t[i])
        return h, jnp.sum(h)

    return jnp.sum(lax.scan(step, jnp.zeros(4), ids)[1])


def branch_in_a_loop_in_a_checkpoint(t, ids, w):
    @jax.checkpoint
    def function(t):
        def step(total, i):
            rows = lax.cond(i > 2, lambda: t[i] * w, lambda: jnp.sin(t[i - 1]))
            return total + jnp.sum(rows**2), None

        return lax.scan(step, 0.0, ids)[0]

    return function(t)


def loop_in_a_branch_in_a_loop(t, ids, w):
    def inner(k):
        def step(total, i):
            return (total + jnp.sum(t[i] * w), None)

        return lax.scan(step, 0.0, (ids + k) % t.shape[0])[0]

    def outer(total, k):
        own = lax.switch(k, [inner, lambda k: jnp.sum(t[ids[k]] ** 2)], k)
        return total + own, None

    return lax.scan(outer, 0.0, jnp.arange(2))[0]


def loop_that_stops_early(t, ids, w):
    """A `while_loop` over integers; what it finds is looked up."""
    place = lax.while_loop(lambda k: ids[k] < 3, lambda k: k + 1, 0)
    return jnp.sum(t[ids[place]] ** 2 * w)


def associative(t, ids, w):
    sums = lax.associative_scan(lambda a, b: a * w + b, t[ids])
    return jnp.sum(sums**2)


def mapped(t, ids, w):
    return jnp.sum(lax.map(lambda i: jnp.sin(t[i]) * w, ids, batch_size=2))


def reduced(t, ids, w):
    def add(a, b):
        return a + b

    sums = lax.reduce(jnp.sin(t[ids]), np.float32(0), add, (0,))
    return jnp.sum(sums * w)


def barrier(t, ids, w):
    table, i = lax.optimization_barrier((t, ids))
    return jnp.sum(table[i] ** 2 * w)


def platforms(t, ids, w):
    def function(t):
        return jnp.sum(t[ids] * w)

    return lax.platform_dependent(t, cpu=function, default=function)


NESTED = {
    **named(
        [
            checkpoint_with_a_policy,
            checkpoint_of_checkpoint,
            checkpoint_that_returns_the_table,
            steps_of_checkpoints,
            branch_in_a_loop_in_a_checkpoint,
            loop_in_a_branch_in_a_loop,
            loop_that_stops_early,
            associative,
            mapped,
            reduced,
            barrier,
            platforms,
        ]
    )
}


# Effects. `log` is called by the host, once each, in order.

LOG: list[Any] = []


def log(x):
    LOG.append(np.asarray(x).tolist())


def log_and_double(x):
    log(x)
    return np.float32(2)


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def shown(t, ids, w):
    jax.debug.callback(log, t[ids])
    return jnp.sum(t[ids] ** 2 * w)


def shown_whole(t, ids, w):
    jax.debug.callback(log, t)
    return jnp.sum(t[ids] ** 2 * w)


def shown_in_order(t, ids, w):
    def step(total, i):
        jax.debug.callback(log, t[i], ordered=True)
        return total + jnp.sum(t[i] ** 2 * w), None

    return lax.scan(step, 0.0, ids)[0]


def shown_by_a_branch(t, ids, w):
    def yes():
        jax.debug.callback(log, t[ids[1]])
        return jnp.sum(t[ids] * w)

    return lax.cond(ids[0] == 0, yes, lambda: 0.0)


def shown_by_a_jit(t, ids, w):
    @jax.jit
    def show(t):
        jax.debug.callback(log, t[ids])

    show(t)
    return jnp.sum(t[ids] ** 2 * w)


def shown_of_a_ref(t, ids, w):
    ref = zeros(4)

    def body(k):
        ref[...] += t[ids[k]]
        jax.debug.callback(log, ref[...], ordered=True)

    loop(body)
    return read(ref, w)


def asked(t, ids, w):
    number = io_callback(log_and_double, NUMBER, ids[0], ordered=True)
    return jnp.sum(t[ids] ** 2 * w) * number


def asked_of_stopped_rows(t, ids, w):
    io_callback(log, None, lax.stop_gradient(t[ids]), ordered=True)
    return jnp.sum(t[ids] ** 2 * w)


def asked_in_a_loop(t, ids, w):
    def step(total, i):
        number = io_callback(log_and_double, NUMBER, i, ordered=True)
        return total + jnp.sum(t[i] * w) * number, None

    return lax.scan(step, 0.0, ids)[0]


def asked_for_ids(t, ids, w):
    def reverse(ids):
        return (log(ids), np.asarray(ids)[::-1].copy())[1]

    kind = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    return jnp.sum(t[io_callback(reverse, kind, ids)] * w)


def asked_for_pure_ids(t, ids, w):
    def reverse(ids):
        return np.asarray(ids)[::-1].copy()

    kind = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    return jnp.sum(t[jax.pure_callback(reverse, kind, ids)] ** 2 * w)


EFFECTS = named(
    [
        shown,
        shown_whole,
        shown_in_order,
        shown_by_a_branch,
        shown_by_a_jit,
        shown_of_a_ref,
        asked,
        asked_of_stopped_rows,
        asked_in_a_loop,
        asked_for_ids,
        asked_for_pure_ids,
    ]
)

PROGRAMS: dict[str, Program] = {
    **{
        f"{name}, {around}": Program(
            wrap(program.loss),
            program.is_sparse and (name, around) not in DENSE_AROUND,
            in_steps(program.loss) if around == "in a scan" else None,
        )
        for name, program in REFS.items()
        for around, wrap in AROUND.items()
        if around not in NOT_BY_JAX.get(name, ())
    },
    **EXTENDED,
    **CUSTOM,
    **NESTED,
    **EFFECTS,
}
