"""Tables in files: what a file says of itself, who has it, and checkpoints."""

import contextlib
import gc
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _journal

from ..helpers.examples import load_example
from ..helpers.host_tables import (
    DIM,
    ROWS,
    Dictionary,
    arrays,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_identical, program_environment, slow_but

TX = osa.sparse_adam(1e-2)
FILE = "optax_sparse_adam host table"
KEPT = r"(?s)rows.* are kept, and written by .*(journal|table)"


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def expected():
    rows, w = begin()
    return train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 12))


def params_in(folder, **other):
    rows, w = begin()
    return host_params(rows, w, **{"file": folder / "table.bin"} | other)


def trainer_in(folder, **options):
    return host.HostTrainer(loss, TX, params_in(folder), **options)


def restored_in(folder, tx=TX, params=None, **options):
    params = params or params_in(folder)
    return host.HostTrainer.restore(folder / "run", loss, tx, params, **options)


def test_a_run_goes_on_from_a_checkpoint_whatever_came_after(folder, expected):
    with trainer_in(folder) as trainer:
        run = trainer.run(batches(0, 12))
        values = [next(run) for _ in range(4)]
        trainer.checkpoint(folder / "run")
        more = [*values, next(run), next(run)]
        changed = np.array(trainer.params["table"])
    del run
    with restored_in(folder) as trainer:
        assert trainer.steps == 4
        assert not np.array_equal(trainer.params["table"], changed)
        values += list(trainer.run(batches(4, 12)))
        assert_trained_alike(trainer, values, expected)
        assert_identical(more, values[:6])
        assert trainer.steps == 12


@pytest.mark.slow
def test_without_the_journal_the_rows_would_be_others(folder, monkeypatch):
    monkeypatch.setattr(_journal.Journal, "append", lambda *_: None)
    with trainer_in(folder) as trainer:
        trainer.step(*next(batches(0, 1)))
        trainer.checkpoint(folder / "run")
        before = np.array(trainer.params["table"])
        trainer.step(*next(batches(1, 2)))
    with restored_in(folder) as trainer:
        assert not np.array_equal(trainer.params["table"], before)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["memory", "storage", "file, fsync"])
@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam"])
def test_checkpoints_of_tables_elsewhere(folder, what, name):
    tx = getattr(osa, name)(1e-2)
    where = {
        "memory": {},
        "storage": {"storage": Dictionary()},
        "file, fsync": {"file": folder / "x"},
    }[what]
    rows, w = begin()
    params = host_params(rows, w, **where)
    options = {"fsync": "fsync" in what}
    with host.HostTrainer(loss, tx, params, **options) as trainer:
        values = list(trainer.run(batches(0, 5)))
        trainer.checkpoint(folder / "run")
        list(trainer.run(batches(7, 9)))
    restore = host.HostTrainer.restore
    with restore(folder / "run", loss, tx, params, **options) as trainer:
        values += list(trainer.run(batches(5, 12)))
        known = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 12))
        assert_trained_alike(trainer, values, known)


@pytest.mark.slow
def test_a_table_in_lmdb(folder):
    """The recipe of docs/large_tables.md."""
    pytest.importorskip("lmdb")
    storage = load_example("lmdb_rows").LmdbRows(folder / "rows", size=1 << 24)
    rows, w = begin()
    params = host_params(rows, w, storage=storage)
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 50))
    with host.HostTrainer(loss, TX, params) as trainer:
        values = list(trainer.run(batches(0, 30)))
        trainer.checkpoint(folder / "run")
        kept = shutil.copytree(folder / "run", folder / "kept")
        list(trainer.run(batches(60, 62)))
    with pytest.raises(ValueError, match="has changed since the checkpoint"):
        host.HostTrainer.restore(kept, loss, TX, params)
    with host.HostTrainer.restore(folder / "run", loss, TX, params) as trainer:
        values += list(trainer.run(batches(30, 50)))
        assert_trained_alike(trainer, values, known)


def test_a_file_says_what_it_holds(folder):
    trainer_in(folder).close()
    text = (folder / "table.bin").read_bytes()[:1000].decode()
    assert text.startswith(FILE)
    for word in ("['table']", "state.mu", "float32", '"rows": 300', '"step": 0'):
        assert word in text


def test_no_file_but_its_own_is_written(folder):
    """Nor removed: of another run, whatever name it has."""
    whole = folder / "table.bin.new"
    with trainer_in(folder):
        (folder / "table.bin").rename(whole)
    there = whole.read_bytes()
    trainer_in(folder).close()
    assert whole.read_bytes() == there
    for content in (there, b"mine", bytes(5000)):
        (folder / "table.bin").write_bytes(content)
        with pytest.raises(FileExistsError, match=r"restore goes on.* remove the file"):
            trainer_in(folder)
        assert (folder / "table.bin").read_bytes() == content
    os.mkfifo(folder / "fifo")
    with pytest.raises(FileExistsError, match="which exists"):
        host.HostTrainer(loss, TX, params_in(folder, file=folder / "fifo"))
    assert (folder / "fifo").exists()


@pytest.mark.slow
def test_what_is_refused(folder):
    with trainer_in(folder) as trainer:
        trainer.checkpoint(folder / "run")
        with pytest.raises(BlockingIOError, match=r"Another HostTrainer.*'table'"):
            restored_in(folder)
    with pytest.raises(FileExistsError, match="restore goes on from a checkpoint"):
        trainer_in(folder)
    # Another optimiser's file, another table's, another width: by name.
    with pytest.raises(ValueError, match=r"table.bin.*state.*sum_of_squares"):
        restored_in(folder, osa.rowwise_adagrad(1e-2))
    other = params_in(folder)
    other = {"items": other["table"], "w": other["w"]}
    with pytest.raises(ValueError, match=r"\['table'\].*\['items'\]"):
        restored_in(folder, params=other)
    path = folder / "table.bin"
    fewer = host_params(*begin((ROWS - 1, DIM)), file=path)
    with pytest.raises(ValueError, match="rows are 300 in the file, and 299 here"):
        restored_in(folder, params=fewer)
    with pytest.raises(ValueError, match=r"and 301 here.*A table grows"):
        restored_in(folder, params=host_params(*begin((ROWS + 1, DIM)), file=path))
    with pytest.raises(ValueError, match=r"params\['w'\].*\[8, 4\].*\[8, 5\]"):
        restored_in(folder, params=params_in(folder) | {"w": jnp.ones((DIM, 5))})
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        host.HostTrainer.restore(folder / "none", loss, TX, params_in(folder))
    # What was refused has given the file back.
    restored_in(folder).close()
    (folder / "table.bin").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is no file of a HostTable"):
        restored_in(folder)
    (folder / "table.bin").unlink()
    with pytest.raises(FileNotFoundError, match="opens the file of"):
        restored_in(folder)


def test_a_checkpoint_of_another_run_stays(folder):
    """Its journal would go with it, and its file could not be brought back."""
    with trainer_in(folder) as trainer:
        trainer.step(*next(batches(0, 1)))
        trainer.checkpoint(folder / "run")
        before = np.array(trainer.params["table"])
        trainer.step(*next(batches(1, 2)))
    rows, w = begin()
    with host.HostTrainer(loss, TX, host_params(rows, w)) as another:
        with pytest.raises(FileExistsError, match=r"another run.*HostTrainer\.restore"):
            another.checkpoint(folder / "run")
        another.checkpoint(folder / "one")
        another.checkpoint(folder / "two")
        another.checkpoint(folder / "one")  # its own
    with restored_in(folder) as trainer:
        assert_identical(np.array(trainer.params["table"]), before)


@pytest.mark.slow
def test_a_file_that_cannot_be_written(folder):
    with trainer_in(folder) as trainer:
        trainer.checkpoint(folder / "run")
    (folder / "table.bin").chmod(0o444)
    if os.access(folder / "table.bin", os.W_OK):
        pytest.skip("this user may write everything")
    with pytest.raises(PermissionError, match="to read and write it"):
        restored_in(folder)


@pytest.mark.slow
def test_two_tables_in_one_place(folder):
    rows, w = begin()
    one = host_params(rows, w, file=folder / "x")["table"]
    link = host.HostTable(one.shape, file=folder / "run" / ".." / "x")
    for other in (one, link):
        with pytest.raises(ValueError, match="have the same one"):
            host.HostTrainer(loss, TX, {"table": one, "other": other})
    storage = Dictionary()
    table = host.HostTable(one.shape, storage=storage)
    with pytest.raises(ValueError, match="have the same one"):
        host.HostTrainer(loss, TX, {"table": table, "other": table})


@pytest.mark.slow
@pytest.mark.parametrize("what", ["journal", "table"])
def test_a_full_disk_tears_nothing(folder, what, monkeypatch, stack):
    rows, w = begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 6))
    file = folder / "table.bin"
    trainer = host.HostTrainer(loss, TX, host_params(rows, w, file=file))
    values = [trainer.step(*next(batches(0, 1)))]
    trainer.checkpoint(folder / "run")
    if what == "journal":
        own = trainer._rows.ledger._journal._file
        full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        stack.callback(full.close)
        trainer._rows.ledger._journal._file = Full(full, own)
    else:
        real = os.fstatvfs(0)
        sizes = [0 if k in (3, 4) else x for k, x in enumerate(real)]
        monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(sizes))
        monkeypatch.setattr(os, "fstat", Sparse(os.fstat))
    before = np.array(trainer.params["table"])
    records = np.array(trainer._rows.stores[0].records)
    with pytest.raises(OSError, match=KEPT):
        values.append(trainer.step(*next(batches(1, 2))))
    assert_identical(np.array(trainer._rows.stores[0].records), records)
    with pytest.raises(OSError, match=KEPT):
        _ = trainer.params
    # Room again: what was kept is written, and nothing is lost.
    if what == "journal":
        trainer._rows.ledger._journal._file = own
    else:
        monkeypatch.undo()
    assert not np.array_equal(trainer.params["table"], before)
    values.append(known[2][1])
    values += list(trainer.run(batches(2, 6)))
    assert_trained_alike(trainer, values, known)
    trainer.close()
    with restored_in(folder) as trainer:
        assert trainer.steps == 1
        assert_identical(np.array(trainer.params["table"]), before)


class Full:
    """A file on a full disk; cut where the real one would be."""

    def __init__(self, full, own):
        self.write, self.truncate, self.seek = full.write, own.truncate, own.seek


class Sparse:
    def __init__(self, fstat):
        self.fstat = fstat

    def __call__(self, file):
        class Stat:
            st_blocks, st_size = 0, self.fstat(file).st_size

        return Stat


def test_a_new_file_of_zeros_takes_no_room(folder):
    table = host.HostTable((1_000_000, 256), file=folder / "table.bin")
    params = {"table": table, "w": jnp.ones((256, 4))}
    with host.HostTrainer(loss, osa.rowwise_adagrad(0.1), params):
        stat = os.stat(folder / "table.bin")
        assert stat.st_size > 1_000_000_000
        assert stat.st_blocks * 512 < 1_000_000


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_a_closed_trainer_lets_its_file_go(folder):
    """Also where somebody has the trainer; arrays of the user's keep it until then."""

    def is_mapped(name="table.bin"):
        with open("/proc/self/maps") as file:
            maps = file.read()
        opened = (f"/proc/self/fd/{x}" for x in os.listdir("/proc/self/fd"))
        links = [os.readlink(x) for x in opened if os.path.lexists(x)]
        assert (name in maps) == any(name in x for x in links)
        return name in maps

    gc.disable()  # what it would free is to be free without it
    try:
        with trainer_in(folder) as trainer:
            trainer.step(*next(batches(0, 1)))
            table = trainer.params["table"]
            row = table[3].copy()
        assert is_mapped()
        np.testing.assert_array_equal(table[3], row)
        del table
        assert not is_mapped()
        trainer.close()
        with pytest.raises(FileNotFoundError, match="no checkpoint") as raised:
            restored_in(folder)
        assert not is_mapped()
        with pytest.raises(FileExistsError) as other:
            trainer_in(folder)
        assert not is_mapped()
        del raised, other
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("what", slow_but(["sparse_adam", "exact_adam"]))
def test_state_that_begins_with_other_numbers_than_zeros(folder, what):
    tx = osa.rowwise_adagrad(1e-2, initial_accumulator_value=0.5)
    for init in (None, lambda a, b: np.full((b - a, DIM), 0.25)):
        path = folder / f"table{init is None}"
        table = host.HostTable((ROWS, DIM), file=path, init=init)
        with host.HostTrainer(loss, tx, {"table": table, "w": jnp.ones(3)}) as trainer:
            whole = np.full((ROWS, DIM), 0.0 if init is None else 0.25, np.float32)
            state = tx.init({"table": jnp.asarray(whole), "w": jnp.ones(3)})
            assert_identical(arrays(trainer.state), arrays(state))
            assert_identical(np.array(trainer.params["table"]), whole)


@pytest.mark.slow
def test_a_file_that_was_begun_and_not_finished_is_begun_anew(folder):
    code = """
import os, numpy as np, jax.numpy as jnp, optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
init = lambda a, b: os.kill(os.getpid(), 9)
table = host.HostTable((300, 8), file="table.bin", init=init)
host.HostTrainer(lambda p: 0.0, osa.sparse_adam(1), {"table": table, "w": jnp.ones(1)})
"""
    environment = program_environment()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment)
    assert done.returncode == -9
    assert [x.name for x in folder.iterdir()] == ["table.bin"]
    begun = (folder / "table.bin").read_bytes()
    with trainer_in(folder) as trainer:
        assert_identical(np.asarray(trainer.params["table"]), begin()[0])
        trainer.checkpoint(folder / "run")
    (folder / "table.bin").write_bytes(begun)
    with pytest.raises(ValueError, match="was begun and not finished"):
        restored_in(folder)


def test_a_symbolic_link_stays_one(tmp_path):
    """Also to a place where no file is yet, as on a larger disk."""
    place, link = tmp_path / "large" / "table.bin", tmp_path / "table.bin"
    place.parent.mkdir()
    link.symlink_to(place)
    params = host_params(*begin(), file=link)
    with host.HostTrainer(loss, TX, params) as trainer:
        trainer.step(*next(batches(0, 1)))
        trainer.checkpoint(tmp_path / "run")
        rows = np.array(trainer.params["table"])
    assert link.is_symlink()
    assert place.stat().st_size > rows.nbytes
    with host.HostTrainer.restore(tmp_path / "run", loss, TX, params) as trainer:
        assert_identical(np.asarray(trainer.params["table"]), rows)
