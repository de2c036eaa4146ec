"""A run of a `HostTrainer` in several processes, or in one with the same mesh.

python -m tests.helpers.host_process_worker ADDRESS PROCESSES PROCESS DEVICES LOSS \
    FOLDER MOMENT

It goes on from its checkpoint if there is one, and makes one every five steps. With a
moment the process kills itself there: see `host_worker`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from tests.helpers.host_tables import DIM, arrays, begin
from tests.helpers.host_tables import batches as batches_of
from tests.helpers.host_worker import Moments, interrupt_files

STEPS, EVERY, ROWS, SMALL = 50, 5, 90, 7
TX = osa.exact_adamw(1e-2, weight_decay=0.1)


def loss(params, ids, y):
    """A table in files, and one in memory with fewer rows than there are ids.

    Ids of this one are computed of floats, which are sent with the rows.
    """
    small = jnp.floor((ids % SMALL).astype(jnp.float32) + 0.5).astype(jnp.int32)
    rows = params["file"][ids] * params["memory"][small]
    return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)


def exact_loss(params, ids, y):
    """A loss whose gradient has no rounding: sums of it are equal in any order."""
    rows = params["file"][ids] + params["memory"][ids % SMALL]
    signs = jnp.sign(y)[:, None] / 32
    exact = jnp.sum(signs * rows) + jnp.sum(signs[..., None] * params["w"])
    return exact + jax.lax.stop_gradient(loss(params, ids, y))


def params_in(folder):
    rows, w = begin((ROWS, DIM))
    small = host.HostTable((SMALL, DIM), init=lambda first, last: 1 + rows[first:last])
    file = host.HostTable(
        rows.shape, file=folder / "table.bin", init=lambda a, b: rows[a:b]
    )
    return {"file": file, "memory": small, "w": w}


def mesh():
    return jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))


def share(x):
    """A global array, of which each process gives its own part."""
    part = np.split(x, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(NamedSharding(mesh(), P("x")), part)


def batches(first, last):
    for batch in batches_of(first, last, rows=ROWS, ids=24):
        yield tuple(map(share, batch))


def between_steps(trainer, number):
    """What may be done with rows between two steps, at some of them."""
    if number % 20 == 10:
        ids = np.array([3, ROWS - 1, ROWS, 8, -1])
        new = np.full((5, DIM), 0.25, np.float32)
        ids, new = {"file": ids, "memory": None}, {"file": new, "memory": None}
        trainer.reset_rows(ids | {"w": None}, new | {"w": None})
    if number % 20 == 15:
        trainer.map_rows(osa.flush)
    if number % EVERY == 0:
        trainer.checkpoint(trainer.folder)


def train(loss, folder, start):
    """To the end; what this process has then."""
    args = loss, TX, params_in(folder)
    if (folder / "run" / "checkpoint.npz").exists():
        start()
        trainer = host.HostTrainer.restore(folder / "run", *args, mesh=mesh())
    else:
        trainer = host.HostTrainer(*args, mesh=mesh())
        trainer.checkpoint(folder / "run")
        start()
    trainer.folder = folder / "run"
    with trainer:
        first, values = trainer.steps, []
        for number, value in enumerate(trainer.run(batches(first, STEPS)), first + 1):
            values.append(np.asarray(value))
            between_steps(trainer, number)
        mean = trainer.evaluate(lambda p, ids: jnp.mean(p["file"][ids] @ p["w"]))
        values.append(np.asarray(mean(share(np.arange(40)))))
        trained = arrays((trainer.params, trainer.state))
        return {"values": values, "trained": trained}


def main(address, processes, process, devices, name, folder, moment):
    jax.config.update("jax_num_cpu_devices", int(devices) // int(processes))
    if int(processes) > 1:
        jax.distributed.initialize(address, int(processes), int(process))
    moments = Moments(int(moment))
    fun = {"loss": loss, "exact_loss": exact_loss}[name]
    result = train(fun, Path(folder), lambda: interrupt_files(moments))
    leaves = jax.tree.leaves_with_path(result)
    named = {jax.tree_util.keystr(path): np.array(x) for path, x in leaves}
    np.savez(Path(folder, f"result-{process}.npz"), **named)


if __name__ == "__main__":
    main(*sys.argv[1:])
