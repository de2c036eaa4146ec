"""Trains with checkpoints, resuming from the latest; as a program, until killed.

python _checkpoint_worker.py FOLDER EVENT NAME
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

import optax_sparse_adam as osa

ROWS, EVERY, STEPS = 64, 2, 8
OPTIMISERS = {
    "adam": osa.sparse_adam(optax.linear_schedule(0.1, 0.0, STEPS)),
    "lazy": osa.lazy(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1))
    ),
    "adafactor": osa.sparse_adafactor(0.1),
    "exact": osa.exact_adamw(optax.linear_schedule(0.1, 0.0, STEPS)),
}


def init():
    """For each optimiser, parameters and its state."""
    table = jax.random.normal(jax.random.key(0), (ROWS, 8))
    params = {"table": table, "w": jnp.ones(8)}
    return {name: (params, tx.init(params)) for name, tx in OPTIMISERS.items()}


def loss(params, ids):
    return jnp.sum((params["table"][ids].sum(axis=1) @ params["w"] - 1) ** 2)


@jax.jit(donate_argnums=0)
def step(train, ids):
    def one(tx, params, state):
        read = state if isinstance(state, osa.ExactAdamState) else None
        grads = osa.grad(loss, read=read)(params, ids)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    return {name: one(OPTIMISERS[name], *both) for name, both in train.items()}


def batch(number):
    """Known by its number, so that a resumed run sees the same."""
    rng = np.random.default_rng(number)
    return rng.integers(0, ROWS, (8, 3)).astype(np.int32)


def run(folder):
    """Trains on, saving every few steps."""
    start = jax.jit(init, out_shardings=SingleDeviceSharding(jax.devices()[0]))
    with ocp.training.Checkpointer(folder) as saved:
        if saved.latest is None:
            train, first = start(), 0
        else:
            train = saved.load(abstract_state=start.eval_shape())
            first = saved.latest.step
        for number in range(first + 1, STEPS + 1):
            train = step(train, batch(number))
            if number % EVERY == 0:
                saved.save(number, train)
    return train


def die_at(event, name):
    """Kills this process right before something happens to a file."""

    def hook(happening, args):
        if happening == event and str(args[0]).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    folder, event, name = sys.argv[1:]
    die_at(event, name)
    run(folder)
