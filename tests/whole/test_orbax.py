"""Orbax saves and restores parameters and state, whatever mesh they are on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import optax_sparse_adam as osa

from ..helpers.support import assert_identical

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_optax_expects")]

ROWS = 64
OPTIMIZERS = {
    "adam": osa.sparse_adam(optax.linear_schedule(0.1, 0.0, 8)),
    "lazy": osa.lazy(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1))
    ),
    "adafactor": osa.sparse_adafactor(0.1),
    "exact": osa.exact_adamw(optax.linear_schedule(0.1, 0.0, 8)),
}


def init():
    """For each optimiser, parameters and its state."""
    table = jax.random.normal(jax.random.key(0), (ROWS, 8))
    params = {"table": table, "w": jnp.ones(8)}
    return {name: (params, tx.init(params)) for name, tx in OPTIMIZERS.items()}


def loss(params, ids):
    return jnp.sum((params["table"][ids].sum(axis=1) @ params["w"] - 1) ** 2)


@jax.jit
def step(train, number):
    """A batch is known by its number, so that a resumed run sees the same."""
    ids = jax.random.randint(jax.random.key(number), (8, 3), 0, ROWS)

    def one(tx, params, state):
        read = state if isinstance(state, osa.ExactAdamState) else None
        grads = osa.grad(loss, read=read)(params, ids)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    return {name: one(OPTIMIZERS[name], *both) for name, both in train.items()}


def shardings(mesh, rows, columns):
    """Tables and what is shaped like them, or has their rows, split; else whole."""

    def one(x):
        if x.shape[:1] != (ROWS,):
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(rows, columns) if x.ndim == 2 else P(rows))

    return jax.tree.map(one, jax.eval_shape(init))


def on_mesh(shape, names, rows, columns):
    axis_types = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, axis_types=axis_types)
    return shardings(mesh, rows, columns)


LAYOUTS = {
    "8 rows": lambda: on_mesh((8,), ("d",), "d", None),
    "4 x 2": lambda: on_mesh((4, 2), ("d", "m"), "d", "m"),
    "2 x 2 x 2": lambda: on_mesh((2, 2, 2), ("d", "m", "n"), ("d", "n"), "m"),
    "one device": lambda: jax.tree.map(
        lambda _: SingleDeviceSharding(jax.devices()[0]), jax.eval_shape(init)
    ),
}


@pytest.fixture(scope="module")
def trained():
    train = jax.jit(init, out_shardings=SingleDeviceSharding(jax.devices()[0]))()
    for number in range(3):
        train = step(train, number)
    return train


@pytest.mark.parametrize("layout", ["8 rows", "one device"])
def test_restored_on_another_mesh(layout, trained, tmp_path):
    """The resumed run is the uninterrupted one."""
    train = jax.tree.map(jax.device_put, trained, LAYOUTS[layout]())
    with ocp.training.Checkpointer(tmp_path) as saved:
        saved.save(3, train)
    with ocp.training.Checkpointer(tmp_path) as saved:
        assert saved.latest.step == 3
        for other, make in LAYOUTS.items():
            wanted = make()
            like = jax.jit(init, out_shardings=wanted).eval_shape()
            restored = saved.load(3, like)
            assert_identical(restored, trained, f"{layout} to {other}")
            assert jax.tree.map(lambda x: x.sharding, restored) == wanted, other
    resumed = jax.tree.map(np.asarray, step(restored, 3))
    assert_identical(resumed, jax.tree.map(np.asarray, step(trained, 3)))
