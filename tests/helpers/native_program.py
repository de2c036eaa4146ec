"""Run by test_native.py with one CPU device: what a user's process does."""

import functools
import json
import os
import re
import sys

if "--one-core" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa

SHAPE, NSE = (5000, 24), 3000
ROWS = 30_000_000  # so many that one byte for each is more than a step may hold
EXACT = {"exact_adam": osa.exact_adam, "exact_adamw": osa.exact_adamw}


def gradient(seed, shape=SHAPE, nse=NSE, n_sparse=1, dtype="float32", **flags):
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((nse, *shape[n_sparse:])).astype(dtype)
    columns = [rng.integers(-2, n + 2, nse) for n in shape[:n_sparse]]
    indices = np.stack(columns, axis=1).astype("int32")
    return BCOO((jnp.asarray(data), jnp.asarray(indices)), shape=shape, **flags)


def stepper(tx):
    def step(table, state, grad):
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def trained(tx, steps=5):
    table = jnp.ones(SHAPE)
    state = tx.init(table)
    step = stepper(tx)
    for seed in range(steps):
        table, state = step(table, state, gradient(seed))
    return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves((table, state))]


def lowered(shape, **kwargs):
    tx = osa.sparse_adam(0.1)
    grad = jax.eval_shape(lambda: gradient(0, shape, **kwargs))
    table = jax.ShapeDtypeStruct(shape, grad.dtype)
    return stepper(tx).trace(table, jax.eval_shape(tx.init, table), grad)


def squares(table, ids):
    return jnp.sum(jnp.square(table[ids]))


def training(shape=SHAPE, nse=NSE, tx=None, dtype=jnp.float32):
    """A step with lookups, traced; by default of `sparse_adam`."""
    tx = tx or osa.sparse_adam(0.1)

    def step(table, state, ids):
        read = state if isinstance(state, osa.ExactAdamState) else None
        grad = osa.grad(squares, read=read)(table, ids)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct(shape, dtype)
    ids = jax.ShapeDtypeStruct((nse,), jnp.int32)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.trace(table, jax.eval_shape(tx.init, table), ids)


def looked_up():
    """A gradient that is twice the rows, some of ids out of bounds."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal(SHAPE).astype("float32")
    ids = rng.integers(-2, SHAPE[0], 50).astype("int32")
    grad = jax.jit(osa.grad(squares))(table, ids)
    return np.asarray(grad.data).tobytes().hex()


def memory(traced):
    sizes = traced((ROWS, 64), nse=4096).lower().compile().memory_analysis()
    return sizes.temp_size_in_bytes, sizes.alias_size_in_bytes - 3 * ROWS * 64 * 4


def low_precision():
    """Temporary bytes of a step, by optimiser."""
    bfloat16 = jnp.bfloat16
    rounded = osa.stochastic_rounding(osa.sparse_adam(0.1), 0, state_dtype=bfloat16)
    cases = {
        "sparse_adam": (osa.sparse_adam(0.1), bfloat16),
        "sparse_adam, mu": (osa.sparse_adam(0.1, mu_dtype=bfloat16), jnp.float32),
        "lazy(adam)": (osa.lazy(optax.adam(0.1)), bfloat16),
        "lazy(adam), mu": (osa.lazy(optax.adam(0.1, mu_dtype=bfloat16)), jnp.float32),
        "rowwise_adam": (osa.rowwise_adam(0.1, mu_dtype=bfloat16), bfloat16),
        "rounded": (osa.lazy(rounded), bfloat16),
        "exact_adam": (osa.exact_adam(0.1), bfloat16),
        "sparse_adafactor": (osa.sparse_adafactor(), bfloat16),
    }
    found = {}
    for name, (tx, dtype) in cases.items():
        traced = functools.partial(training, tx=tx, dtype=dtype)
        found[name] = memory(traced)[0]
    return found


def targets(lowering):
    return re.findall(r"@optax_sparse_adam\.(\w+)", lowering.as_text())


def many(nse=NSE):
    """The update of two tables, to be called under vmap, and its arguments."""
    tx = osa.sparse_adam(0.1)
    grads = [gradient(seed, nse=nse) for seed in (0, 1)]
    both = jax.tree.map(lambda *x: jnp.stack(x), *[(g.data, g.indices) for g in grads])

    def update(data, indices, table):
        grad = BCOO((data, indices), shape=SHAPE)
        return osa.apply_updates(table, tx.update(grad, tx.init(table))[0])

    return update, (*both, jnp.ones((2, *SHAPE)))


def ensemble():
    """How far two tables at once are from one after the other."""
    update, args = many()
    at_once = jax.jit(jax.vmap(update))(*args)
    alone = [jax.jit(update)(*(x[i] for x in args)) for i in (0, 1)]
    return float(jnp.max(jnp.abs(at_once - jnp.stack(alone))))


def gradient_of_many():
    """Through vmap, with respect to what has an axis and what has none."""
    update, (data, indices, tables) = many(nse=30)

    def loss(data, table):
        out = jax.vmap(update, (0, None, None))(data, indices[0], table)
        return jnp.sum(jnp.sin(out))

    grads = jax.jit(jax.grad(loss, (0, 1)))(data, tables[0])
    return [float(jnp.sum(jnp.abs(x))) for x in grads]


def exported(*targets):
    """The error of `jax.export`, if any, when these targets are allowed for."""
    checks = map(jax.export.DisabledSafetyCheck.custom_call, targets)
    export = jax.export.export(jax.jit(osa.coalesce), disabled_checks=[*checks])
    try:
        export(gradient(0))
    except ValueError as error:
        return str(error)
    return ""


def derivative():
    """Of the loss after a step with respect to the learning rate."""

    def loss(rate):
        tx = osa.sparse_adam(rate)
        grad = gradient(0)
        table = jnp.ones(SHAPE)
        updates, _ = tx.update(grad, tx.init(table))
        return jnp.sum(osa.apply_updates(table, updates))

    return float(jax.jvp(loss, (jnp.float32(0.1),), (jnp.float32(1.0),))[1])


def both_ways():
    """What can be compared with the plain path."""
    lazy = osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)))
    return {
        "uses": targets(lowered(SHAPE).lower()),
        "training uses": targets(training().lower()),
        "uses of exact Adam": [
            targets(training(tx=make(0.1)).lower()) for make in EXACT.values()
        ],
        "looked up": looked_up(),
        "sparse_adam": trained(osa.sparse_adam(0.1, maximize=True)),
        "lazy": trained(lazy),
        "rowwise_adam": trained(osa.rowwise_adam(0.1)),
        "export": [exported(), exported("optax_sparse_adam.sum_rows")],
        "gradient of many": gradient_of_many(),
        "derivative": derivative(),
    }


def with_the_kernel():
    """Where it is not used, and memory: the plain path's is tested elsewhere."""
    cuda = {"lowering_platforms": ("cuda",)}
    exact = {name: make(0.1) for name, make in EXACT.items()}
    flags = {"unique_indices": True, "indices_sorted": True}
    return {
        "uses on a GPU": targets(lowered(SHAPE).lower(**cuda)),
        "training uses on a GPU": targets(training().lower(**cuda)),
        "uses of exact Adam on a GPU": targets(
            training(tx=exact["exact_adam"]).lower(**cuda)
        ),
        "uses for others": [
            targets(lowered(*args, **kwargs).lower())
            for args, kwargs in (
                [(SHAPE,), {"dtype": "float16"}],
                [(SHAPE,), flags],
                [((50, 100, 24),), {"n_sparse": 2}],
                [(SHAPE,), {"nse": 0}],
                [((2**31 - 9, 1),), {}],
            )
        ],
        "uses under vmap": targets(jax.jit(jax.vmap(many()[0])).lower(*many()[1])),
        "ensemble": ensemble(),
        "memory": memory(lowered),
        "training memory": memory(training),
        "memory of exact Adam": [
            memory(functools.partial(training, tx=tx))[0] for tx in exact.values()
        ],
        "low precision": low_precision(),
    }


def main():
    if "--one-core" in sys.argv:
        print(json.dumps({"sparse_adam": trained(osa.sparse_adam(0.1, maximize=True))}))
        return
    kernel = both_ways() | with_the_kernel()
    os.environ["OPTAX_SPARSE_ADAM_NATIVE"] = "0"
    jax.clear_caches()  # what was traced with it
    print(json.dumps([kernel, both_ways()]))


if __name__ == "__main__":
    main()
