"""What one of two processes cannot do: python -m ... ADDRESS PROCESS FOLDER."""

import contextlib
import os
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _checkpoint
from tests.helpers.host_process_worker import mesh, share
from tests.helpers.host_tables import (
    ROWS,
    Dictionary,
    arrays,
    batches,
    begin,
    host_params,
    loss,
)
from tests.helpers.support import assert_identical

TX = osa.sparse_adam(0.1)


def begun(**where):
    return host.HostTrainer(loss, TX, host_params(*begin(), **where), mesh=mesh())


def restored(folder, **where):
    params = host_params(*begin(), **where)
    return host.HostTrainer.restore(folder, loss, TX, params, mesh=mesh())


def some(first, last):
    return [tuple(map(share, batch)) for batch in batches(first, last)]


@contextlib.contextmanager
def raises_in_process_1(function, error, match):
    """Process 1 says what is wrong, process 0 where."""
    if jax.process_index() == 1:
        with pytest.raises(error, match=match):
            yield
        return
    words = rf"{function} has raised in the processes \[1\] of 2"
    with pytest.raises(RuntimeError, match=words):
        yield


def ids_that_are_no_global_array():
    """They raise before anything is sent."""
    with begun() as trainer:
        (batch,) = some(0, 1)
        for ids in (next(batches(0, 1))[0], jax.numpy.arange(48)):
            with pytest.raises(ValueError, match=r"which need not be the same in all"):
                trainer.step(ids, batch[1])
        assert np.isfinite(trainer.step(*batch))


def a_file_that_one_has_already(folder):
    file = folder / "begun.bin"
    if jax.process_index() == 1:
        Path(f"{file}-1-of-2").write_text("mine")
    with raises_in_process_1("HostTrainer", FileExistsError, "to begin again"):
        begun(file=file)
    if jax.process_index() == 1:
        assert Path(f"{file}-1-of-2").read_text() == "mine"
    else:
        assert not Path(f"{file}-0-of-2").exists()


def a_part_that_cannot_be_written(folder, monkeypatch):
    """Nor read: the checkpoint before is that of both, and nothing has changed."""
    where = {"file": folder / "table.bin"}
    full = OSError(28, "No space left on device")

    def no_room(folder, arrays, about, name):
        assert name.startswith("rows-")
        raise full

    with begun(**where) as trainer:
        list(trainer.run(some(0, 3)))
        trainer.checkpoint(folder / "run")
        saved = arrays((trainer.params, trainer.state))
        list(trainer.run(some(3, 5)))
        if jax.process_index() == 1:
            monkeypatch.setattr(_checkpoint, "write_archive", no_room)
        with raises_in_process_1("HostTrainer.checkpoint", OSError, "No space left"):
            trainer.checkpoint(folder / "run")
        monkeypatch.undo()
        list(trainer.run(some(5, 6)))
    (part,) = (folder / "run").glob("rows-*-1")
    jax.experimental.multihost_utils.sync_global_devices("found")
    if jax.process_index() == 1:
        part.rename(folder / "hidden")
    with raises_in_process_1("HostTrainer.restore", FileNotFoundError, "rows-"):
        restored(folder / "run", **where)
    if jax.process_index() == 1:
        (folder / "hidden").rename(part)
    with restored(folder / "run", **where) as trainer:
        assert trainer.steps == 3
        assert_identical(arrays((trainer.params, trainer.state)), saved)


def a_checkpoint_that_one_cannot_mark(folder, monkeypatch):
    """It has come to be, and the next call says so in the file; but all raise."""
    broken, run = OSError(5, "Input/output error"), folder / "marked"
    where = {"file": folder / "marked.bin"}

    def set_mark(mark):
        if not mark.pending:
            raise broken
        mark_it(mark)

    with begun(**where) as trainer:
        list(trainer.run(some(0, 3)))
        (store,) = trainer._rows.stores[:1]
        mark_it = store.set_mark
        if jax.process_index() == 1:
            monkeypatch.setattr(store, "set_mark", set_mark)
        with raises_in_process_1("HostTrainer.checkpoint", OSError, "Input/output"):
            trainer.checkpoint(run)
        monkeypatch.undo()
        saved = arrays((trainer.params, trainer.state))
        list(trainer.run(some(3, 5)))
    with restored(run, **where) as trainer:
        assert trainer.steps == 3
        assert_identical(arrays((trainer.params, trainer.state)), saved)
        trainer.checkpoint(run)


def a_folder_that_one_does_not_see(folder, monkeypatch):
    monkeypatch.setattr(_checkpoint, "_SECONDS", 1)
    own = folder / f"of-{jax.process_index()}"
    with begun() as trainer:
        words = "which process 1 does not see"
        with raises_in_process_1("HostTrainer.checkpoint", FileNotFoundError, words):
            trainer.checkpoint(own)
        trainer.checkpoint(folder / "of-all")


def a_storage_has_the_numbers_of_the_table(folder):
    storage = Dictionary()
    with begun(storage=storage) as trainer, begun() as other:
        for batch in some(0, 3):
            trainer.step(*batch)
            other.step(*batch)
        rows = [*range(jax.process_index(), ROWS, 2)]
        assert sorted(storage.rows) == rows
        trainer.checkpoint(folder / "storage")
        own = other.params["table"]
        assert_identical(np.asarray(trainer.params["table"]), own)
        with pytest.raises(ValueError, match=r"needs float32\[300, 8\]\."):
            host.HostTrainer(
                *(loss, TX, host_params(*begin())), state=other.state, mesh=mesh()
            )


class Own:
    """What is another one in each process."""

    def __init__(self, value):
        self.value = np.array(value)

    def arrays_before(self, step):
        return {"value": self.value + step}

    def restore(self, arrays):
        self.value = arrays["value"]


def what_is_stateful_is_of_its_process(folder):
    params, process = host_params(*begin()), jax.process_index()
    options = {"mesh": mesh(), "stateful": {"own": Own(10 * process)}}
    with host.HostTrainer(loss, TX, params, **options) as trainer:
        (batch,) = some(0, 1)
        trainer.step(*batch)
        trainer.checkpoint(folder / "stateful")
    options["stateful"]["own"].value = None
    args = folder / "stateful", loss, TX, params
    host.HostTrainer.restore(*args, **options).close()
    assert options["stateful"]["own"].value == 10 * process + 1


def what_one_process_alone_has(folder):
    ids, rows = np.array([1, 2]), np.zeros((2, 8), np.float32)
    reset = {"table": ids, "w": None}, {"table": rows, "w": None}
    (batch,) = some(0, 1)
    with begun() as trainer:
        with pytest.raises(NotImplementedError, match="BatchWithReset is for one proc"):
            trainer.step(host.BatchWithReset(batch, *reset))
        with pytest.raises(NotImplementedError, match="snapshot is for one process"):
            trainer.snapshot(folder / "snapshot")
        assert np.isfinite(trainer.step(*batch))


def main(address, process, folder):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, int(process))
    folder = Path(folder)
    with pytest.raises(ValueError, match="in one of 2 processes, so it needs a `mesh`"):
        host.HostTrainer(loss, TX, host_params(*begin()))
    ids_that_are_no_global_array()
    a_file_that_one_has_already(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        a_part_that_cannot_be_written(folder, monkeypatch)
        a_checkpoint_that_one_cannot_mark(folder, monkeypatch)
        a_folder_that_one_does_not_see(folder, monkeypatch)
    a_storage_has_the_numbers_of_the_table(folder)
    what_is_stateful_is_of_its_process(folder)
    what_one_process_alone_has(folder)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other process
