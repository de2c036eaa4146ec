"""Training steps over a mesh, compiled ahead of time for abstract arrays.

The table is split by rows over all devices, the batch by examples.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

TX = osa.sparse_adam(1e-3)
_SPECS = {"table": P("d"), "w": P()}
_TRAIN_SPECS = (_SPECS, osa.ScaleBySparseAdamState(P(), _SPECS, _SPECS))


def partitioned(table, ids):
    return table[ids]


def all_gather(table, ids):
    """Every device sees all ids; what it has of their rows goes to who asked."""
    ids = jax.lax.all_gather(ids, "d", tiled=True)
    mine = ids - jax.lax.axis_index("d") * len(table)
    mine = jnp.where(mine < 0, len(table), mine)
    found = table.at[mine].get(mode="fill", fill_value=0)
    return jax.lax.psum_scatter(found, "d", tiled=True)


def routed(table, ids):
    return osa.sharded_lookup(table, ids, "d")


def one_round(table, ids):
    return osa.sharded_lookup(table, ids, "d", max_rounds=1)


# How rows are looked up, and whether in shard_map. The gradient goes the same way back.
FORMS = {
    "partitioned": (partitioned, False),
    "all-gather": (all_gather, True),
    "routed": (routed, True),
    "routed, one round": (one_round, True),
}


def step_of(lookup):
    """A step of `sparse_adam` with this lookup."""

    def loss(params, ids, labels):
        vectors = lookup(params["table"], ids).mean(axis=1)
        return jnp.sum(jnp.logaddexp(0, -labels * (vectors @ params["w"])))

    def step(train, ids, labels):
        params, state = train
        grads = osa.grad(loss)(params, ids, labels)
        updates, state = TX.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    return step


def compile_step(form, devices, rows, width, examples, ids_each):
    """The compiled step for so many devices, of so many examples each."""
    axis_types = (AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("d",), axis_types=axis_types)
    lookup, mapped = FORMS[form]
    step = step_of(lookup)
    if mapped:
        specs = (_TRAIN_SPECS, P("d"), P("d"))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=_TRAIN_SPECS)

    def abstract(shape, dtype, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def init():
        params = {"table": jnp.zeros((rows, width)), "w": jnp.zeros(width)}
        return params, TX.init(params)

    shapes = jax.eval_shape(init)
    train = jax.tree.map(
        lambda x, s: abstract(x.shape, x.dtype, s), shapes, _TRAIN_SPECS
    )
    ids = abstract((devices * examples, ids_each), "int32", P("d"))
    labels = abstract((devices * examples,), "float32", P("d"))
    kept = jax.tree.map(lambda x: x.sharding, train)
    step = jax.jit(step, donate_argnums=0, out_shardings=kept)
    return step.lower(train, ids, labels).compile()
