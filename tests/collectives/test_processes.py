"""Two processes of two devices each give one process's numbers."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from ..helpers import process_worker as worker
from ..helpers.processes import free_port, run_processes
from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    assert_same_on_devices,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the two processes have left."""
    folder = tmp_path_factory.mktemp("processes")
    program = [sys.executable, worker.__file__, f"127.0.0.1:{free_port()}", "2"]
    run_processes([[*program, str(process), str(folder)] for process in range(2)])
    return folder


def of_process(folder, process):
    return dict(np.load(folder / f"{process}.npz"))


@pytest.mark.parametrize("form", worker.FORMS)
@pytest.mark.parametrize("devices", [4, 1])
def test_two_processes_are_one(folder, form, devices):
    actual = of_process(folder, 0)
    expected = {form: worker.train(form, jax.devices()[:devices])}
    for path, leaf in jax.tree.leaves_with_path(worker.to_numpy(expected)):
        name = jax.tree_util.keystr(path)
        if "['exact']" in name or "count" in name:
            assert_same_on_devices(actual[name], leaf, name)
        else:
            # Other orders of sums; and a sum of terms that cancel keeps their rounding.
            tol, largest = TOLERANCE["float32"].numpy, np.abs(leaf).max()
            assert_close(actual[name], leaf, tol, magnitude=largest, what=name)


def test_two_processes_have_and_save_the_same(folder):
    """Their common checkpoint is restored by one process on one device."""
    arrays = of_process(folder, 0)
    assert_identical(of_process(folder, 1), arrays, "the other process")
    here = SingleDeviceSharding(jax.devices()[0])
    like = {
        form: (worker.start(), tx.init(worker.start()))
        for form, (_, tx) in worker.FORMS.items()
    }
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like
    )
    with ocp.training.Checkpointer(folder / "saved") as saved:
        restored = saved.load(worker.STEPS, like)
    leaves = jax.tree.leaves_with_path(restored)
    restored = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    assert_identical(restored, arrays, "the checkpoint")
