"""Tables in host memory, beside the same table on the device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from contestants import RATE

import optax_sparse_adam as osa
from gpu_parts import KERNEL
from gpu_parts.run import paths, switch
from gpu_parts.steps import batches, timed, timed_rounds
from optax_sparse_adam import host_tables

STEPS = 24


def loss(params, ids):
    """Two dense layers, which take some 7.5 ms on an H100 at the full size."""
    x = jax.nn.relu(params["table"][ids] @ params["first"])
    x = jax.nn.relu(x @ params["second"])
    return jnp.mean((x @ params["last"] - 1) ** 2)


def layers(dim, width):
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((dim, width)), rng.standard_normal((width,) * 2)
    return {
        "first": jnp.asarray(first / dim**0.5, jnp.float32),
        "second": jnp.asarray(second / width**0.5, jnp.float32),
        "last": jnp.ones(width) / width,
    }


def host(run):
    """A step with the table on the device, on the host, and with the pipeline."""
    rows, dim, ids, _ = run.sizes.host
    drawn, touched = batches("zipf", rows, ids)
    what = {"rows": rows, "dim": dim, "ids": ids, "touched": touched}
    switch(KERNEL in paths())

    def record(name, numbers):
        run.say(f"{name}: {numbers['best_ms']:.2f} ms a step")
        run.record(name=name, **what, **numbers)

    for place in (on_device, on_host):
        run.attempt(place, run, record, drawn, name=place.__name__)


def on_device(run, record, drawn):
    rows, dim, _, width = run.sizes.host
    tx, params = osa.sparse_adam(RATE), {"table": jnp.zeros((rows, dim))}
    params |= layers(dim, width)
    step = osa.make_train_step(loss, tx)
    train, turn = [params, tx.init(params), None], itertools.cycle(drawn)

    def call():
        train[:] = step(*train[:2], next(turn))

    record("on the device", timed(run, call, lambda: jax.block_until_ready(train)))


def on_host(run, record, drawn):
    rows, dim, _, width = run.sizes.host
    params = {"table": host_tables.HostTable((rows, dim)), **layers(dim, width)}
    tx, turn, last = osa.sparse_adam(RATE), itertools.cycle(drawn), [None]

    def wait():
        jax.block_until_ready(last)

    with host_tables.HostTrainer(loss, tx, params) as trainer:

        def call():
            last[0] = trainer.step(next(turn))

        def pipelined():
            for last[0] in trainer.run((next(turn),) for _ in range(STEPS)):
                run.alive()

        for _ in drawn:  # each may be compiled for another number of rows
            call()
        record("one by one", timed(run, call, wait))
        pipelined()
        record("pipelined", timed_rounds(run, pipelined, wait, STEPS))
