"""Trains a table whose keys have owners: in one process, or as one of several.

python vocabulary_worker.py ADDRESS PROCESSES PROCESS FOLDER
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

ROWS_EACH, WIDTH, BATCH, STEPS, OWNERS = 16, 4, 24, 20, 2


def owner_of(codes):
    """The place on the mesh of the device that has a key's row."""
    return (codes * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) % np.uint64(OWNERS)


def assign(vocabs, keys, step):
    """Rows of this process's keys in the whole table, and fresh ones of its devices."""
    words = multihost_utils.process_allgather(keys.view(np.uint32))  # no 64 bits in JAX
    everybody = np.ascontiguousarray(words).view(np.uint64).ravel()
    rows, fresh = np.zeros(everybody.shape, np.int32), []
    for owner, vocab in vocabs.items():
        own = owner_of(everybody) == owner
        found = vocab.assign(everybody, step, mask=own)
        rows[own] = found.rows[own] + owner * vocab.rows
        fresh.append(found.fresh.padded(everybody.size))  # always of one shape
    rows = multihost_utils.process_allgather(rows)
    rows = rows.reshape(jax.process_count(), -1).sum(axis=0, dtype=np.int32)
    rows = rows.reshape(jax.process_count(), *keys.shape)
    return rows[jax.process_index()], np.concatenate(fresh)


def batch(step):
    """The keys of all processes; there are ever more of them."""
    rng = np.random.default_rng(step)
    numbers = (60 ** rng.random(BATCH)).astype(np.uint64) + np.uint64(2 * step)
    keys = numbers * np.uint64(0xD1342543DE82EF95)
    return keys, (keys >> np.uint64(63)).astype(np.float32)


def train():
    """The losses, the table, and the vocabularies of this process, by owner."""
    mesh = jax.make_mesh((OWNERS,), ("x",))
    split, tx = NamedSharding(mesh, P("x")), osa.sparse_adam(0.1)
    devices = mesh.devices.ravel().tolist()
    vocabs = {
        owner: osa.Vocabulary(ROWS_EACH)
        for owner, device in enumerate(devices)
        if device.process_index == jax.process_index()
    }

    def local_step(table, state, fresh, rows, labels):
        begin = jnp.zeros((len(fresh), WIDTH))
        table, state = osa.reset_rows(tx, table, state, fresh, begin)

        def loss(table):
            logits = osa.sharded_lookup(table, rows, "x").sum(axis=1)
            return jnp.sum(jnp.logaddexp(0, logits) - labels * logits)

        value, grad = osa.value_and_grad(loss)(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state, jax.lax.psum(value, "x")

    specs = P("x"), osa.ScaleBySparseAdamState(count=P(), mu=P("x"), nu=P("x"))
    sharded = jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(*specs, P("x"), P("x"), P("x")),
        out_specs=(*specs, P()),
    )
    step = jax.jit(sharded, donate_argnums=(0, 1))
    table = jnp.ones((OWNERS * ROWS_EACH, WIDTH), device=split)
    state, losses = tx.init(table), []
    for number in range(STEPS):
        keys, labels = batch(number)
        at = jax.process_index()
        keys, labels = (np.split(x, jax.process_count())[at] for x in (keys, labels))
        rows, fresh = assign(vocabs, keys, number)
        fresh, rows, labels = (
            jax.make_array_from_process_local_data(split, x)
            for x in (fresh, rows, labels)
        )
        table, state, value = step(table, state, fresh, rows, labels)
        losses.append(float(value))
    whole = multihost_utils.process_allgather(table, tiled=True)
    return np.array(losses), np.asarray(whole), vocabs


def main(address, processes, process, folder):
    jax.config.update("jax_num_cpu_devices", OWNERS // int(processes))
    jax.distributed.initialize(address, int(processes), int(process))
    losses, table, vocabs = train()
    held = {
        f"{owner} {name}": x
        for owner, vocab in vocabs.items()
        for name, x in vocab.arrays.items()
    }
    np.savez(Path(folder, process), losses=losses, table=table, **held)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
