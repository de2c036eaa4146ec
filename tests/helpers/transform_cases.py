"""Cases for the gradient tests: a lookup under every transformation of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from .gradients import (
    ROUNDED,
    SMALL_IDS,
    SMALL_TABLE,
    TABLES,
    THROUGH_BFLOAT16,
    Case,
    square,
)


def loss(p, ids):
    return square(p["t"][ids], p["w"])


def first(p, ids):
    return square(p["t"][ids[0]], p["w"])


def cast(p, ids):
    return square(p["t"].astype(jnp.bfloat16)[ids].astype(jnp.float32), p["w"])


def none(p, ids):
    return jnp.sum(p["w"])


def of_table(function, ulps=0.0, **kwargs):
    """The case of `function(table)[ids]`."""
    return Case(
        lambda p, ids: square(function(p["t"])[ids], p["w"]), ulps=ulps, **kwargs
    )


def summed(step, **kwargs):
    """The loss of a scan that adds up `step(params, ids)` over the rows of ids."""

    def scanned(p, ids):
        return lax.scan(lambda c, i: (c + step(p, i), None), 0.0, ids, **kwargs)[0]

    return scanned


def halved(p, ids):
    """A loop in which the order of the steps matters."""

    def step(total, i):
        return 0.5 * total + loss(p, i), None

    return lax.scan(step, 0.0, ids, reverse=True)[0]


def delayed(p, ids):
    """Rows of which the loss is computed in the step after."""

    def step(carry, i):
        total, rows = carry
        return (total + square(rows, p["w"]), p["t"][i]), None

    start = jnp.float32(0), jnp.zeros((3, 4))
    return lax.scan(step, start, ids)[0][0]


def checkpointed(function, **kwargs):
    return lambda p, ids: jax.checkpoint(function, **kwargs)(p, ids)


def returned(program):
    """The loss of rows of a table that a program returns, and of those inside of it."""

    def looked_up(table, ids):
        return table[ids], table

    def lookups(p, ids):
        rows, table = program(looked_up)(p["t"], ids)
        return square(rows, p["w"]) + square(table[ids], p["w"])

    return lookups


def in_branches(function):
    checkpointed = jax.checkpoint(function)
    return lambda *args: lax.cond(args[1][0, 0] == 0, checkpointed, function, *args)


def branch(*branches):
    """The loss of the branch `ids[0, 0]`, which is 0 in the cases."""
    return lambda p, ids: lax.switch(ids[0, 0], branches, p, ids)


def named(p, ids):
    return square(checkpoint_name(p["t"][ids], "rows"), p["w"])


def carried_table(p, ids):
    def step(carry, i):
        table, total = carry
        return (table, total + square(table[i], p["w"])), None

    return lax.scan(step, (p["t"], 0.0), ids)[0][1]


def carried_and_halved(p, ids):
    """Of two tables one changes from step to step: its gradient is dense."""

    def step(carry, i):
        table, total = carry
        return (table / 2, total + square(table[i] * p["s"][i], p["w"])), None

    return lax.scan(step, (p["t"], 0.0), ids)[0][1]


@jax.jit
def looped(t, ids):
    """One jaxpr for all tables of a shape, with a loop in it."""
    return lax.scan(lambda c, i: (c + jnp.sum(t[i] ** 2), None), 0.0, ids)[0]


def fori(p, ids):
    return lax.fori_loop(
        0, 2, lambda k, c: c + first(p, jnp.asarray(ids)[k][None]), 0.0
    )


def rows_as_outputs(p, ids):
    return square(lax.scan(lambda c, i: (c, p["t"][i]), 0, ids)[1], p["w"])


def rnn(p, ids):
    def step(h, i):
        h = jnp.tanh(h @ jnp.diag(p["w"]) + p["t"][i])
        return h, jnp.sum(h)

    return jnp.sum(lax.scan(step, jnp.zeros((3, 4)), ids)[1])


def nested(p, ids):
    return summed(summed(lambda p, i: square(p["t"][i], p["w"])))(p, ids)


def mixed(p, i):
    return square(p["t"][i], p["w"]) + p["t"][i[0], 2]


def in_branch_of_scan(p, i):
    return lax.cond(i[0] > 1, lambda: loss(p, i), lambda: loss(p, i[:1]))


def devices(p, ids):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")
    return jax.shard_map(
        lambda p, i: lax.psum(loss(p, i), "d"),
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=PartitionSpec(),
    )(p, ids)


def split_in_two_ways(p, ids):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")
    return jax.shard_map(
        lambda part, t, i: lax.psum(jnp.sum(part[i] * t[i]), "d"),
        mesh=mesh,
        in_specs=(spec, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )(p["t"], p["t"], ids % 8)


policies = jax.checkpoint_policies
# Everything below looks up `IDS`, six of them, unless it says otherwise.
UNDER = {
    "jit": Case(lambda p, i: jax.jit(jax.jit(loss))(p, i)),
    "jit of the lookup": of_table(jax.jit(lambda t: 2 * t)),
    "traced before": Case(lambda p, i: jax.jit(loss).trace(p, i)(p, i)),
    # checkpoint
    **{
        f"checkpoint, {name}": Case(checkpointed(named, policy=policy))
        for name, policy in {
            "no policy": None,
            "nothing": policies.nothing_saveable,
            "dots": policies.dots_saveable,
        }.items()
    },
    "checkpoint, prevent_cse=False": Case(checkpointed(loss, prevent_cse=False)),
    "checkpoint of checkpoint": Case(checkpointed(checkpointed(loss))),
    "checkpoint of tanh": Case(
        checkpointed(of_table(jnp.tanh).loss, policy=None), ulps=ROUNDED
    ),
    "checkpoint of checkpoint, returned": Case(
        returned(lambda f: jax.checkpoint(jax.checkpoint(f))), 12
    ),
    # loops
    "scan": Case(summed(loss)),
    "scan, reverse": Case(halved),
    "scan, needed a step later": Case(delayed, touches_more=True),
    "scan over rows": Case(
        lambda p, ids: lax.scan(
            lambda c, rows: (c + square(rows, p["w"]), None), 0.0, p["t"][ids]
        )[0]
    ),
    "scan, rows as outputs": Case(rows_as_outputs),
    "scan, table carried": Case(carried_table),
    "scan, table halved": Case(carried_and_halved, {"s": 6}, TABLES, ulps=8),
    "scan without steps": Case(summed(loss), 0, ids=np.zeros((0, 3))),
    "scan, no ids in a step": Case(summed(loss), 0, ids=np.zeros((3, 0))),
    "scan, recurrent": Case(rnn, ulps=ROUNDED),
    "scan, two lookups": Case(
        summed(lambda p, i: square(p["t"][i] * p["t"][i - 1], p["w"])), 12
    ),
    "scan, two tables": Case(
        summed(lambda p, i: square(p["t"][i] * p["s"][i - 1], p["w"])),
        {"t": 6, "s": 5},
        {**TABLES, "s": (5, 4)},
        SMALL_IDS,
    ),
    "scan in a jit, of two tables": Case(
        lambda p, i: looped(p["t"], i) + 2 * looped(p["s"], i),
        {"t": 6, "s": 6},
        TABLES,
    ),
    "scan of scan": Case(nested),
    "scan of cast": Case(summed(cast), ulps=THROUGH_BFLOAT16),
    "scan of tanh": Case(summed(of_table(jnp.tanh).loss), ulps=ROUNDED),
    "scan of scaling": Case(
        summed(lambda p, i: square((p["t"] * i[1].astype(float))[i], p["w"]))
    ),
    "scan, i and i j": Case(summed(mixed), 8),
    "scan, more ids than rows": Case(summed(loss), 5, SMALL_TABLE, SMALL_IDS),
    "scan, i and i j, more than rows": Case(summed(mixed), 5, SMALL_TABLE, SMALL_IDS),
    "scan and lookup, more ids than rows": Case(
        lambda p, ids: summed(loss)(p, ids) + loss(p, ids),
        9,
        {"t": (9, 4), "w": (4,)},
        touches_more=True,
    ),
    "scan of checkpoint": Case(summed(jax.checkpoint(loss))),
    "checkpoint of scan": Case(checkpointed(summed(loss))),
    "fori_loop": Case(fori),
    "map": Case(lambda p, ids: jnp.sum(lax.map(lambda i: loss(p, i), ids))),
    "micro-batches": Case(lambda p, ids: sum(loss(p, i) for i in ids)),
    # branches
    "branches, fewer ids": Case(branch(first, loss)),
    "branches, no ids": Case(branch(none, loss)),
    "branches, none with ids i j": Case(
        branch(lambda p, i: jnp.sum(jnp.square(p["t"][i, 1])), none), n_sparse=2
    ),
    "branches, i and i j": Case(branch(loss, lambda p, i: jnp.sum(p["t"][i, 1]))),
    "branches, two lookups": Case(
        branch(lambda p, i: first(p, i) * first(p, i[::-1]), none)
    ),
    "branches of three": Case(branch(first, loss, none)),
    "branches, more ids than rows": Case(
        branch(loss, first), 5, SMALL_TABLE, SMALL_IDS
    ),
    "branches of cast": Case(branch(cast, first), ulps=THROUGH_BFLOAT16),
    "branches of scaling": Case(branch(of_table(lambda t: t * 2).loss, first)),
    "branches of tanh": Case(branch(of_table(jnp.tanh).loss, first), ulps=ROUNDED),
    "branches, returned": Case(returned(in_branches), 12),
    "branches in a branch": Case(branch(branch(first, loss), none)),
    "branches in a scan": Case(summed(in_branch_of_scan), touches_more=True),
    "branches under checkpoint": Case(checkpointed(branch(loss, first))),
    # vmap
    "vmap": Case(lambda p, i: jnp.mean(jax.vmap(loss, (None, 0))(p, i))),
    "vmap of scan": Case(lambda p, i: jnp.sum(jax.vmap(summed(loss), (None, 0))(p, i))),
    "vmap of checkpoint": Case(
        lambda p, i: jnp.sum(jax.vmap(jax.checkpoint(loss), (None, 0))(p, i))
    ),
    "vmap, other axes": Case(
        lambda p, i: square(
            jax.vmap(lambda t, j: t[j], (None, 1), 1)(p["t"], i), p["w"]
        )
    ),
    # devices
    "shard_map": Case(devices),
    "shard_map, split in two ways": Case(split_in_two_ways, None, ulps=8),
}
