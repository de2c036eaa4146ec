"""Files that were damaged, moved or deleted, and folders that a process left."""

import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import (
    Dictionary,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)

pytestmark = pytest.mark.slow

TX = osa.sparse_adam(1e-2)


def new(where):
    return host.HostTrainer(loss, TX, host_params(*begin(), **where))


@pytest.fixture
def run(tmp_path):
    """A folder with a file of rows, `table.bin`, and a checkpoint, `run`."""
    with new({"file": tmp_path / "table.bin"}) as trainer:
        values = list(trainer.run(batches(0, 3)))
        trainer.checkpoint(tmp_path / "run")
    assert len(values) == 3
    return tmp_path


def restored(folder):
    params = host_params(*begin(), file=folder / "table.bin")
    return host.HostTrainer.restore(folder / "run", loss, TX, params)


def without_about(path):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "about"}
    np.savez(path, **arrays)


def with_one_array(path):
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def with_other_bytes(path):
    data = bytearray(path.read_bytes())
    at = data.rindex(b"array0.npy", 0, data.rindex(b"array0.npy")) + 150
    data[at] ^= 255
    path.write_bytes(data)


ARCHIVES = {
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_text("a" * 1000),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "array": with_one_array,
    "another archive": without_about,
    "other bytes": with_other_bytes,
}


@pytest.mark.parametrize("how", ARCHIVES)
def test_a_checkpoint_that_was_damaged(run, how):
    ARCHIVES[how](run / "run" / "checkpoint.npz")
    with pytest.raises(ValueError, match=r"checkpoint.npz .*was damaged"):
        restored(run)
    if how == "other bytes":  # its name can be read, and it is another run's
        return
    with (
        new({"file": run / "another.bin"}) as trainer,
        pytest.raises(ValueError, match="was damaged"),
    ):
        trainer.checkpoint(run / "run")


def test_a_file_whose_header_was_damaged(run):
    data = bytearray((run / "table.bin").read_bytes())
    data[40:80] = bytes(40)
    (run / "table.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"table.bin was damaged"):
        restored(run)


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_file_that_has_gone_while_it_was_trained(run, how):
    """A checkpoint of it would be one that nobody can restore."""
    with restored(run) as trainer:
        path = run / "table.bin"
        if how == "deleted":
            path.unlink()
        else:
            shutil.copy(path, run / "copy.bin")
            path.rename(run / "moved.bin")
        if how == "replaced":
            shutil.copy(run / "copy.bin", path)
        values = list(trainer.run(batches(3, 5)))
        with pytest.raises(
            FileNotFoundError, match=r"\['table'\] has been deleted, mo"
        ):
            trainer.checkpoint(run / "run")
        rows, w = begin()
        expected = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 5))
        expected = (*expected[:2], expected[2][3:])
        assert_trained_alike(trainer, values, expected)
    if how == "moved":  # the last checkpoint is as it was
        (run / "moved.bin").rename(path)
        with restored(run) as trainer:
            assert trainer.steps == 3


def test_a_folder_that_was_deleted_is_made_again(run):
    with restored(run) as trainer:
        shutil.rmtree(run / "run")
        list(trainer.run(batches(3, 4)))
        trainer.checkpoint(run / "run")
    with restored(run) as trainer:
        assert trainer.steps == 4


@pytest.mark.parametrize("what", ["file", "storage"])
def test_another_working_directory(tmp_path, monkeypatch, what):
    """Relative paths mean what they meant when they were given."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    where = {"file": "table.bin"} if what == "file" else {"storage": Dictionary()}
    params = host_params(*begin(), **where)
    with host.HostTrainer(loss, TX, params) as trainer:
        list(trainer.run(batches(0, 2)))
        trainer.checkpoint("run")
        monkeypatch.chdir(tmp_path / "two")
        list(trainer.run(batches(2, 4)))
        trainer.checkpoint("run")
        list(trainer.run(batches(4, 5)))
    # The journal of the first one has ended, and nobody may go back to it.
    assert [x.name for x in (tmp_path / "one" / "run").iterdir()] == ["checkpoint.npz"]
    monkeypatch.chdir(tmp_path / "one")
    with pytest.raises(ValueError, match="has changed since the checkpoint"):
        host.HostTrainer.restore("run", loss, TX, params)
    with host.HostTrainer.restore("../two/run", loss, TX, params) as trainer:
        assert trainer.steps == 4


def test_a_file_that_cannot_be_made(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"makes a file for \['table'\], but: No"
    ):
        new({"file": tmp_path / "missing" / "table.bin"})
    with pytest.raises(ValueError, match="needs the path of a file, got ''"):
        host.HostTable((3, 2), file="")


@pytest.mark.parametrize("dtype", ["complex64", "S4", object])
def test_numbers_that_are_none(dtype):
    table = host.HostTable((3, 2), init=lambda a, b: np.zeros((b - a, 2), dtype))
    with pytest.raises(TypeError, match=r"`init` of \['t'\] .* the table has float32"):
        host.HostTrainer(lambda p, i: jnp.sum(p["t"][i]), TX, {"t": table})


@pytest.mark.parametrize(
    "error", [TimeoutError("late"), ExceptionGroup("", [OSError()])]
)
def test_what_a_signal_raises_while_an_archive_is_read(run, error, monkeypatch):
    """It says nothing of the archive."""

    def loads(text):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", loads)
        with pytest.raises(type(error)) as raised:
            restored(run)
    assert raised.value is error
    restored(run).close()
