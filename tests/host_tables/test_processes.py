"""Several processes train, save, are killed and go on as one process does."""

import sys
from pathlib import Path

import numpy as np
import pytest

from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._store import Mark

from ..helpers import host_process_worker as worker
from ..helpers import host_refusals_worker as refusals
from ..helpers.host_tables import Dictionary, begin, host_params, loss
from ..helpers.processes import free_port, run_processes
from ..helpers.support import WEEKLY, assert_identical

pytestmark = pytest.mark.slow


LOSSES = {2: "loss", 4: "exact_loss"}


def run(folder, processes, devices, moments=()):
    """Runs to the end, or until one process is killed at its moment.

    Args:
      folder: Of the run.
      processes: How many.
      devices: Of all of them. Two add up to the same bits in any order; of four the
        gradient is one whose sums have no rounding.
      moments: When each process kills itself.
    """
    address, moments = f"127.0.0.1:{free_port()}", dict(moments)
    program = [sys.executable, "-m", worker.__name__, address, str(processes)]
    rest = [str(devices), LOSSES[devices], str(folder)]
    commands = [
        [*program, str(process), *rest, str(moments.get(process, 0))]
        for process in range(processes)
    ]
    run_processes(commands, killed=next(iter(moments), None))


def of_process(folder, process):
    with np.load(folder / f"result-{process}.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process with a mesh of as many devices has."""
    results = {}
    for devices in LOSSES:
        folder = tmp_path_factory.mktemp("one")
        run(folder, 1, devices)
        results[devices] = of_process(folder, 0)
    return results


def assert_has(folder, processes, expected):
    """Each process has its rows, and with all others what has no rows: to the bit.

    Losses are sums over devices, whose order differs.
    """
    for process in range(processes):
        result = of_process(folder, process)
        steps = sum(name.startswith("['values']") for name in result)
        skipped = worker.STEPS + 1 - steps  # before it was restored
        for name, x in expected.items():
            if name.startswith("['values']"):
                number = int(name.split("[")[-1][:-1])
                if number >= skipped:
                    now = result[f"['values'][{number - skipped}]"]
                    np.testing.assert_allclose(now, x, rtol=1e-6, err_msg=name)
                continue
            own = x.ndim and len(x) in {worker.ROWS, worker.SMALL}
            x = x[process::processes] if own else x
            assert_identical(result[name], x, f"{name} of process {process}")


@pytest.mark.parametrize("processes", [2, 4] if WEEKLY else [2])
def test_some_processes_are_one(processes, expected, tmp_path):
    run(tmp_path, processes, processes)
    assert_has(tmp_path, processes, expected[processes])


def test_processes_that_are_killed(expected, tmp_path):
    """One after the other, at moments of a step and of a checkpoint; then one ends."""
    rng = np.random.default_rng(0)
    for number, processes in enumerate([2, 2, 4, 1, 2, 2] if WEEKLY else [2, 4, 1, 2]):
        moment = {number % processes: int(rng.integers(5, 90))}
        run(tmp_path, processes, 4, moment)
    run(tmp_path, 1, 4)
    assert_has(tmp_path, 1, expected[4])
    # Those of four, of which the last run was not, are gone.
    assert not [*tmp_path.glob("table.bin-*-of-4")]


def test_what_one_process_cannot_do_no_other_does(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    program = [sys.executable, "-m", refusals.__name__, address]
    run_processes([[*program, str(process), str(tmp_path)] for process in range(2)])
    what_one_process_cannot_restore(tmp_path)


def interrupted_at_tables(unlink):
    def interrupted(path, **options):
        if path.name.startswith("table.bin-"):
            raise KeyboardInterrupt
        unlink(path, **options)

    return interrupted


def what_one_process_cannot_restore(folder):
    """Of what two have saved; what they have stays, to be restored by two or by one."""
    there = {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}

    def restore(name, stateful=None, **where):
        params = host_params(*begin(), **where)
        return host.HostTrainer.restore(
            folder / name, loss, refusals.TX, params, stateful=stateful
        )

    with pytest.raises(NotImplementedError, match="belongs to the process that has"):
        restore("stateful", {"own": refusals.Own(0)})
    with pytest.raises(NotImplementedError, match="rows belong to the processes"):
        restore("storage", storage=Dictionary())
    file = folder / "table.bin"
    with host.HostTrainer(
        loss, refusals.TX, host_params(*begin(), file=file)
    ) as trainer:
        trainer.checkpoint(folder / "other")
    with pytest.raises(FileExistsError, match="there is one, of another checkpoint"):
        restore("run", file=file)
    file.unlink()
    # A file of a first checkpoint elsewhere that was killed before it marked the file.
    with host.HostTrainer(loss, refusals.TX, host_params(*begin(), file=file)) as other:
        other._rows.stores[0].set_mark(Mark(pending="e" * 32))
        journal = folder / "run" / f"journal-{'e' * 32}-1"
        journal.touch()  # if it were here
        with pytest.raises(BlockingIOError, match="an earlier one has left"):
            restore("run", file=file)
        journal.unlink()
    with pytest.raises(FileExistsError, match="there is one, of another checkpoint"):
        restore("run", file=file)
    file.unlink()
    assert there == {x: x.read_bytes() for x in there}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", interrupted_at_tables(Path.unlink))
        with pytest.raises(KeyboardInterrupt):
            restore("run", file=file)
    assert len([*folder.glob("table.bin-*")]) == 2  # it is made, and they are there
    with restore("run", file=file) as trainer:
        assert trainer.steps == 3
        assert not [*folder.glob("table.bin-*")]
