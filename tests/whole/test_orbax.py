"""Orbax saves and restores parameters and state, whatever mesh they are on."""

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from ..helpers import checkpoint_worker as worker
from ..helpers.support import assert_identical, program_environment

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_optax_expects")]

# Before what, to which file: while the arrays are written; when they are, and their
# folder gets its name; and when only the name of the checkpoint itself is missing.
MOMENTS = [
    ("open", "4.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/_METADATA"),
    ("os.rename", "6.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp"),
    ("os.rename", "8.orbax-checkpoint-tmp"),
]


def start():
    return jax.jit(worker.init, out_shardings=SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_killed_while_saving(tmp_path):
    """The last good checkpoint is readable, and the resumed run the uninterrupted."""
    env = program_environment()
    train, uninterrupted = start()(), {}
    for number in range(1, worker.STEPS + 1):
        train = worker.step(train, worker.batch(number))
        uninterrupted[number] = jax.tree.map(np.array, train)
    for number, (event, name) in enumerate(MOMENTS, 1):
        command = [sys.executable, worker.__file__, str(tmp_path), event, name]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        good = number * worker.EVERY
        assert (tmp_path / f"{good + worker.EVERY}.orbax-checkpoint-tmp").is_dir()
        with ocp.training.Checkpointer(tmp_path) as saved:
            assert saved.latest.step == good
            train = saved.load(abstract_state=start().eval_shape())
        assert_identical(train, uninterrupted[good], f"step {good}")
    train = worker.run(tmp_path)
    assert_identical(train, uninterrupted[worker.STEPS], "the resumed run")


def shardings(mesh, rows, columns):
    """Tables and what is shaped like them, or has their rows, split; else whole."""

    def one(x):
        if x.shape[:1] != (worker.ROWS,):
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(rows, columns) if x.ndim == 2 else P(rows))

    return jax.tree.map(one, jax.eval_shape(worker.init))


def on_mesh(shape, names, rows, columns):
    axis_types = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, axis_types=axis_types)
    return shardings(mesh, rows, columns)


LAYOUTS = {
    "8 rows": lambda: on_mesh((8,), ("d",), "d", None),
    "4 x 2": lambda: on_mesh((4, 2), ("d", "m"), "d", "m"),
    "2 x 2 x 2": lambda: on_mesh((2, 2, 2), ("d", "m", "n"), ("d", "n"), "m"),
    "one device": lambda: jax.tree.map(
        lambda _: SingleDeviceSharding(jax.devices()[0]), jax.eval_shape(worker.init)
    ),
}


@pytest.fixture(scope="module")
def trained():
    train = start()()
    for number in range(3):
        train = worker.step(train, worker.batch(number))
    return train


@pytest.mark.parametrize("layout", ["8 rows", "one device"])
def test_restored_on_another_mesh(layout, trained, tmp_path):
    train = jax.tree.map(jax.device_put, trained, LAYOUTS[layout]())
    with ocp.training.Checkpointer(tmp_path) as saved:
        saved.save(3, train)
        for other, make in LAYOUTS.items():
            wanted = make()
            like = jax.jit(worker.init, out_shardings=wanted).eval_shape()
            restored = saved.load(3, like)
            assert_identical(restored, trained, f"{layout} to {other}")
            assert jax.tree.map(lambda x: x.sharding, restored) == wanted, other
