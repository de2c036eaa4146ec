"""Trains on a mesh: in one process, or as one of several processes, run as a program.

python _process_worker.py ADDRESS PROCESSES PROCESS FOLDER
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import optax_sparse_adam as osa

ROWS, WIDTH, BATCH, STEPS, DEVICES_EACH = 64, 8, 16, 20, 2


def loss(params, ids, labels):
    """The gradient of `exact` has no rounding: sums of it are equal in any order."""
    logits = params["table"][ids].sum(axis=1) @ params["w"]
    signs = jnp.sign(labels)[:, None, None] / BATCH
    return jnp.sum((logits - labels) ** 2) / BATCH + jnp.sum(
        signs * params["exact"][ids]
    )


def start():
    table = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return {"exact": table[0], "table": table[1], "w": np.ones(WIDTH, np.float32)}


def batch(step):
    """Ids from half of the table: many duplicates, within a device and across."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, ROWS // 2, (BATCH, 3)).astype(np.int32) * 2
    return ids, rng.normal(size=BATCH).astype(np.float32)


def sharded_jit(mesh, step):
    """The table by rows, the batch by examples, on one axis; jit does the rest."""
    return jax.jit(step, donate_argnums=(0, 1)), P("d")


def shard_map(mesh, step):
    """Replicated parameters; the gradient of each is that of all devices together."""
    specs = (P(), P(), P("d"), P("d"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(mapped, donate_argnums=(0, 1)), P()


ADAM, EXACT_ADAM = osa.sparse_adam(0.05), osa.exact_adamw(0.05, weight_decay=0.1)
FORMS = {
    "sharded_jit": (sharded_jit, ADAM),
    "shard_map": (shard_map, ADAM),
    "exact_adam": (sharded_jit, EXACT_ADAM),
}


def train(form, devices, steps=STEPS):
    """Trains on these devices.

    Returns:
      The parameters and the state of the optimiser.
    """
    layout, tx = FORMS[form]
    mesh = jax.make_mesh(
        (len(devices),), ("d",), devices=devices, axis_types=(AxisType.Auto,)
    )

    def step(params, state, ids, labels):
        read = state if isinstance(state, osa.ExactAdamState) else None
        grads = osa.grad(loss, read=read)(params, ids, labels)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    run, table_spec = layout(mesh, step)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, table_spec)
    shardings = {"exact": rows, "table": rows, "w": whole}
    params = jax.tree.map(jax.device_put, start(), shardings)
    state = tx.init(params)
    along = NamedSharding(mesh, P("d"))
    for number in range(steps):
        ids, labels = map(partial(share, along), batch(number))
        params, state = run(params, state, ids, labels)
    kept = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, shardings
    )
    assert all(jax.tree.leaves(kept)), kept
    return params, state


def share(sharding, array):
    """A global array, of which each process gives its own part."""
    part = np.split(array, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(sharding, part)


def to_numpy(tree):
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def main(address, processes, process, folder):
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.distributed.initialize(address, int(processes), int(process))
    assert jax.device_count() == DEVICES_EACH * jax.process_count()
    trained = {form: train(form, jax.devices()) for form in FORMS}
    with ocp.training.Checkpointer(Path(folder, "saved")) as saved:
        saved.save(STEPS, trained)  # each process its part, into one checkpoint
    leaves = jax.tree.leaves_with_path(to_numpy(trained))
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    np.savez(Path(folder, process), **arrays)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
