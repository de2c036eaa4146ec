"""Times what docs/recipes.md says: micro-batches, constraints, rows that are replaced.

`python benchmarks/recipes.py`: a table of 1M x 64 under Adam, 8,192 Zipf ids a batch;
medians in milliseconds, and the temporary memory of the compiled program.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine import OtherPrograms, is_busy, num_cores, seconds
from problem import Problem, draw

import optax_sparse_adam as osa

PROBLEM = Problem(1_000_000, 64, 8_192, "float32")
PARTS, ROUNDS, REPLACED = 8, 15, 1_000


def loss(params, ids):
    hidden = jax.nn.relu(params["table"][ids].mean(axis=1) @ params["hidden"])
    return jnp.mean((hidden @ params["out"] - 1) ** 2)


def scanned(function):
    def mean(params, parts):
        def one(total, ids):
            return total + function(params, ids), None

        return jax.lax.scan(one, 0.0, parts)[0] / len(parts)

    return mean


def flat(params, parts):
    return loss(params, parts.reshape(-1, parts.shape[-1]))


def unit(rows):
    norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / jnp.maximum(norms, 1e-12)


def to_unit(updates, params):
    return jax.tree.map(lambda u, p: unit(p + u) - p, updates, params)


def init():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"table": (PROBLEM.rows, 64), "hidden": (64, 256), "out": (256,)}
    return {
        name: 0.1 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def report(name, step, params, state, batches):
    """Takes steps and prints their median, and the program's temporary memory."""
    compiled = step.lower(params, state, batches[0]).compile()
    taken, kept = [], [params, state]

    def run(batch):
        kept[:] = compiled(*kept, batch)[:2]
        jax.block_until_ready(kept)

    for turn in range(ROUNDS):
        taken.append(1e3 * seconds(run, batches[turn % len(batches)]))
    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    print(f"{name}: {statistics.median(taken[2:]):.1f} ms, {megabytes:.1f} MB")


def make_step(tx, function, value_and_grad=osa.value_and_grad, add=osa.apply_updates):
    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = value_and_grad(function)(params, batch)
        updates, state = tx.update(grads, state, params)
        return add(params, updates), state, value

    return step


def replace_rows(tx):
    @jax.jit(donate_argnums=(0, 1))
    def replace(params, state, batch):
        rows, new = batch
        fresh = tx.init(params | {"table": new})

        def put(old, new):
            same = old.shape == new.shape
            return old if same else old.at[rows].set(new, mode="drop")

        table = params["table"].at[rows].set(new, mode="drop")
        return params | {"table": table}, jax.tree.map(put, state, fresh)

    return replace


def main():
    others, tx = OtherPrograms(), osa.sparse_adam(1e-3)
    ids = [jnp.asarray(batch).reshape(PARTS, -1, 8) for batch in draw(PROBLEM).ids]
    forms = {
        "one flat batch": flat,
        "scan": scanned(loss),
        "scan of jax.checkpoint": scanned(jax.checkpoint(loss)),
    }
    for name, function in forms.items():
        params = init()
        report(name, make_step(tx, function), params, tx.init(params), ids)

    mask = {"table": True, "hidden": False, "out": False}
    project = optax.masked(optax.stateless(to_unit), mask)
    dense = jax.value_and_grad, optax.apply_updates
    for name, inner in {
        "adam": optax.adam(1e-3),
        "adam, norms of 1": optax.chain(optax.adam(1e-3), project),
    }.items():
        params, lazy = init(), osa.lazy(inner)
        report(f"lazy {name}", make_step(lazy, flat), params, lazy.init(params), ids)
        params = init()
        step = make_step(inner, flat, *dense)
        report(f"dense {name}", step, params, inner.init(params), ids)

    rng = np.random.default_rng(0)
    changes = [
        (
            jnp.asarray(rng.choice(PROBLEM.rows, REPLACED, replace=False)),
            jnp.asarray(rng.standard_normal((REPLACED, 64)), jnp.float32),
        )
        for _ in range(4)
    ]
    params = init()
    report(f"{REPLACED:,} rows", replace_rows(tx), params, tx.init(params), changes)
    params = init()
    params["table"] = params["table"][:-REPLACED]  # another shape
    state, step = tx.init(params), make_step(tx, flat)
    start = time.perf_counter()
    step.lower(params, state, ids[0]).compile()
    print(f"a step for another shape: {time.perf_counter() - start:.2f} s to compile")
    taken = others.cores()
    print(f"other programs took {taken} cores", end="")
    print(": the times mean nothing" if is_busy(taken, num_cores()) else "")


if __name__ == "__main__":
    main()
