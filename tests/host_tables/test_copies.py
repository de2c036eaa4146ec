"""Copies of a checkpoint's folder, of its files, of both; journals that were damaged.

What is taken has the bits of the checkpoint; all else is refused, with what to do.
"""

import re
import shutil

import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._journal import read_journal

from ..helpers.host_tables import (
    DIM,
    Dictionary,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import slow_but

TX = osa.sparse_adam(1e-2)
ROWS = 40
REFUSED = r"has changed since the checkpoint.*restore the last.*goes with a copy of the"


def some(first, last):
    return list(batches(first, last, rows=ROWS, ids=9))


def params_of(file=None, **where):
    where = where if file is None else {"file": file}
    return host_params(*begin((ROWS, DIM)), **where)


def restored(folder, file=None, **where):
    return host.HostTrainer.restore(folder, loss, TX, params_of(file, **where))


@pytest.fixture(scope="module")
def expected():
    rows, w = begin((ROWS, DIM))
    return [
        train_in_memory(loss, TX, {"table": rows, "w": w}, some(0, k)) for k in range(4)
    ]


def assert_has(trainer, expected, steps):
    assert trainer.steps == steps
    params, state, _ = expected[steps]
    assert_trained_alike(trainer, [], (params, state, []))


class Place:
    """A run: a folder `run` and a file of rows, `table.bin`, in a folder."""

    def __init__(self, path):
        self.path, self.folder, self.file = path, path / "run", path / "table.bin"

    def copy(self, name):
        return Place(shutil.copytree(self.path, self.path.with_name(name)))


@pytest.fixture
def run(tmp_path):
    """After a step and a checkpoint of it."""
    run = Place(tmp_path / "own")
    run.path.mkdir()
    with host.HostTrainer(loss, TX, params_of(run.file)) as trainer:
        trainer.step(*some(0, 1)[0])
        trainer.checkpoint(run.folder)
    return run


def train_on(run, steps, *, checkpoint=False):
    """Steps after the checkpoint; its trainer ends as if it was killed."""
    with restored(run.folder, run.file) as trainer:
        list(trainer.run(some(1, 1 + steps)))
        if checkpoint:
            trainer.checkpoint(run.folder)


def test_a_copied_folder_is_refused_after_further_steps(run, expected):
    """Without a copy of the file; with it, it is restored, before and after."""
    train_on(run, 1)
    one = run.copy("one")  # has changed by one step
    with restored(one.folder, one.file) as trainer:
        assert_has(trainer, expected, 1)
    two = run.copy("two")
    with host.HostTrainer.restore(run.folder, loss, TX, params_of(run.file)) as trainer:
        alone = Place(shutil.copytree(run.folder, run.path / "kept").parent)
        trainer.step(*some(1, 2)[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            restored(alone.path / "kept", run.file)
    # What the message says is right, and what was refused has changed nothing.
    with restored(run.folder, run.file) as trainer:
        assert_has(trainer, expected, 1)
        list(trainer.run(some(1, 3)))
        assert_has(trainer, expected, 3)
    with pytest.raises(ValueError, match=REFUSED):
        restored(alone.path / "kept", run.file)
    with restored(two.folder, two.file) as trainer:
        assert_has(trainer, expected, 1)


def test_a_folder_of_which_nothing_has_changed_is_restored(run, expected):
    kept = shutil.copytree(run.folder, run.path / "kept")
    with restored(kept, run.file) as trainer:
        assert_has(trainer, expected, 1)
    # Now the file belongs to that folder.
    with pytest.raises(ValueError, match=REFUSED):
        restored(run.folder, run.file)
    with restored(kept, run.file) as trainer:
        assert_has(trainer, expected, 1)


@pytest.mark.slow
def test_a_copied_file_is_restored_with_the_folder(run, expected):
    """Its rows are of the same checkpoint, and the journal has more than they need."""
    train_on(run, 0)
    for steps in (0, 1):
        with restored(run.folder, run.file) as trainer:
            list(trainer.run(some(1, 1 + steps)))
            shutil.copy(run.file, run.path / "copy.bin")
            list(trainer.run(some(1 + steps, 3)))
        place = run.copy(f"copy {steps}")
        with restored(place.folder, place.path / "copy.bin") as trainer:
            assert_has(trainer, expected, 1)
        # The one in use until then is of an older checkpoint.
        with pytest.raises(ValueError, match=REFUSED):
            restored(place.folder, place.file)


@pytest.mark.slow
def test_a_copied_file_is_refused_after_a_further_checkpoint(run, expected):
    before = shutil.copy(run.file, run.path / "before.bin")
    train_on(run, 1, checkpoint=True)
    with pytest.raises(ValueError, match=REFUSED):
        restored(run.folder, before)
    with restored(run.folder, run.file) as trainer:
        assert_has(trainer, expected, 2)


@pytest.mark.slow
def test_copies_of_both_are_two_runs(run, expected):
    other = run.copy("other")
    train_on(run, 2)
    train_on(other, 1)
    for folder, file in ((run.folder, other.file), (other.folder, run.file)):
        with pytest.raises(ValueError, match=REFUSED):
            restored(folder, file)
    for place in (run, other):
        with restored(place.folder, place.file) as trainer:
            assert_has(trainer, expected, 1)


MEANWHILE = {
    "a step": lambda trainer, batch, folder: trainer.step(*batch),
    "a checkpoint": lambda trainer, batch, folder: trainer.checkpoint(folder),
    "both": lambda trainer, batch, folder: (
        trainer.step(*batch),
        trainer.checkpoint(folder),
        trainer.step(*batch),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", slow_but(["folder", "file"], "folder"))
@pytest.mark.parametrize("what", slow_but(MEANWHILE, "a step"))
def test_copies_that_are_made_while_it_trains(run, what, first):
    """After each page of the file: to the bits of the folder's checkpoint, or refused.

    Where no other checkpoint is made, a file that is copied first is restored.
    """
    batch, done = some(1, 2)[0], {}
    with restored(run.folder, run.file) as trainer:
        size, k = run.file.stat().st_size, 0
        assert size == 4096 + 3840 + 256 + 512
        while 512 * k < size:
            k += 1 if k != 1 else 7  # the rest of the first page does not change
            trainer.step(*batch)
            trainer.checkpoint(run.folder)
            values = np.array(trainer.params["table"])
            place = Place(run.path.with_name(str(k)))
            place.path.mkdir()
            if first == "folder":
                shutil.copytree(run.folder, place.folder)
            with run.file.open("rb") as old, place.file.open("wb") as new:
                new.write(old.read(512 * k))
                MEANWHILE[what](trainer, batch, run.folder)
                new.write(old.read())
            if first == "file":
                values = (
                    values if what == "a step" else np.array(trainer.params["table"])
                )
                shutil.copytree(run.folder, place.folder)
            done[k] = place, values
    restorable = set()
    for k, (place, values) in done.items():
        try:
            trainer = restored(place.folder, place.file)
        except ValueError as error:
            assert re.search(REFUSED, str(error), re.DOTALL)  # noqa: PT017
            continue
        with trainer:
            np.testing.assert_array_equal(trainer.params["table"], values)
        restorable.add(k)
    whole = {k} if first == "folder" else set()
    assert restorable == ({*done} if (what, first) == ("a step", "file") else whole)


def test_rows_of_another_run_are_refused(run, expected):
    """Both files are new: neither says a checkpoint."""
    new = host.HostTrainer(loss, TX, params_of(run.path / "new.bin"))
    new.step(*some(5, 6)[0])
    new.close()
    with pytest.raises(ValueError, match="another one than that of the checkpoint in"):
        restored(run.folder, run.path / "new.bin")
    with restored(run.folder, run.file) as trainer:
        assert_has(trainer, expected, 1)


@pytest.mark.slow
def test_an_archive_without_its_file_says_which_rows(run, expected):
    """A checkpoint whose name was never told to the file, and another new file."""
    place = Place(run.path / "x")
    place.path.mkdir()
    trainers = {
        name: host.HostTrainer(loss, TX, params_of(place.path / name)) for name in "ab"
    }
    for number, (name, trainer) in enumerate(trainers.items()):
        trainer.step(*some(number, number + 1)[0])
        trainer.checkpoint(place.path / f"run {name}")
        trainer.close()
    with pytest.raises(ValueError, match="another one than that"):
        restored(place.path / "run a", place.path / "b")
    with restored(place.path / "run a", place.path / "a") as trainer:
        assert_has(trainer, expected, 1)


# Journals.


def journal_of(run):
    (path,) = run.folder.glob("journal-*")
    return path


JOURNALS = {
    "empty": lambda data: b"",
    "its first page": lambda data: data[:512],
    "without its end": lambda data: data[:-1],
    "without its last entry": lambda data: data[: data.rindex(b"undo")],
    "a bit": lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:],
    "a number of rows": lambda data: data.replace(
        b"undo\0\0\0\0", b"undo\0\0\0\0\xff", 1
    ),
}


@pytest.mark.parametrize("what", slow_but(JOURNALS, "without its last entry", "a bit"))
def test_a_journal_that_was_damaged(run, what, expected):
    train_on(run, 2)
    path, data = journal_of(run), journal_of(run).read_bytes()
    rows = run.file.read_bytes()
    path.write_bytes(JOURNALS[what](data))
    with pytest.raises(ValueError, match="was damaged, or lacks its end"):
        restored(run.folder, run.file)
    assert run.file.read_bytes() == rows
    path.unlink()
    with pytest.raises(ValueError, match=REFUSED):
        restored(run.folder, run.file)
    path.write_bytes(data)
    with restored(run.folder, run.file) as trainer:
        assert_has(trainer, expected, 1)


class Marked(Dictionary):
    """A storage that keeps a mark, and one that is copied."""

    mark = None

    def write_mark(self, mark):
        self.mark = mark

    def read_mark(self):
        return self.mark


@pytest.mark.parametrize("what", slow_but(["cut", "flipped"], "flipped"))
def test_every_byte_of_a_journal(tmp_path, what, expected):
    """Restored to the bits of the checkpoint, or refused before anything is changed.

    Of a storage that knows nothing of checkpoints: the journal alone says so.
    """
    storage, folder = Dictionary(), tmp_path / "run"
    with host.HostTrainer(loss, TX, params_of(storage=storage)) as trainer:
        trainer.step(*some(0, 1)[0])
        trainer.checkpoint(folder)
        for batch in batches(1, 3, rows=3, ids=3):
            trainer.step(*batch)
        layouts = trainer._rows.plan.layouts
    (path,) = folder.glob("journal-*")
    data, rows = path.read_bytes(), dict(storage.rows)
    whole, accepted = read_journal(path, layouts), []
    for k in range(len(data)):
        path.write_bytes(
            data[:k]
            if what == "cut"
            else data[:k] + bytes([data[k] ^ 4]) + data[k + 1 :]
        )
        try:
            undo = read_journal(path, layouts)
        except ValueError as error:
            assert "was damaged, or lacks its end" in str(error)  # noqa: PT017
            continue
        assert undo == whole
        accepted.append(k)
    # The first page is padded, by bytes that say nothing.
    assert not accepted or (
        what == "flipped" and 100 < accepted[0] <= accepted[-1] < 512
    )
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="was damaged"):
        restored(folder, storage=storage)
    assert storage.rows == rows
    path.write_bytes(data)
    with restored(folder, storage=storage) as trainer:
        assert_has(trainer, expected, 1)


def test_an_empty_storage_is_not_that_of_the_checkpoint(tmp_path, expected):
    """As a database has none where its path is wrong; nor is one without its mark."""
    storage, folder = Marked(), tmp_path / "run"
    with host.HostTrainer(loss, TX, params_of(storage=storage)) as trainer:
        trainer.step(*some(0, 1)[0])
        trainer.checkpoint(folder)
        trainer.step(*some(1, 2)[0])
    for other in (Marked(), Dictionary()):
        with pytest.raises(ValueError, match="has no mark, and that of the checkpoint"):
            restored(folder, storage=other)
        assert not other.rows
    # The one that it was made with has lost nothing.
    with restored(folder, storage=storage) as trainer:
        assert_has(trainer, expected, 1)


def test_a_storage_that_learns_to_keep_a_mark(tmp_path, expected):
    """It has none at first, and says so; from then on it has."""
    storage, folder = Dictionary(), tmp_path / "run"
    with host.HostTrainer(loss, TX, params_of(storage=storage)) as trainer:
        trainer.step(*some(0, 1)[0])
        trainer.checkpoint(folder)
    marked = Marked()
    marked.rows = storage.rows
    with restored(folder, storage=marked) as trainer:
        trainer.step(*some(1, 2)[0])
    with pytest.raises(ValueError, match="has no mark"):
        restored(folder, storage=Marked())
    with restored(folder, storage=marked) as trainer:
        assert_has(trainer, expected, 1)


@pytest.mark.slow
def test_a_storage_that_keeps_a_mark_sees_copies(tmp_path, expected):
    storage, folder = Marked(), tmp_path / "run"
    with host.HostTrainer(loss, TX, params_of(storage=storage)) as trainer:
        trainer.step(*some(0, 1)[0])
        trainer.checkpoint(folder)
        kept = shutil.copytree(folder, tmp_path / "kept")
        trainer.step(*some(1, 2)[0])
    with pytest.raises(ValueError, match=REFUSED):
        restored(kept, storage=storage)
    with restored(folder, storage=storage) as trainer:
        assert_has(trainer, expected, 1)
    storage.mark = b'{"step": 1}'
    with pytest.raises(ValueError, match="not what `write_mark` got"):
        restored(folder, storage=storage)
    # A new run begins the same storage again, which says no more what it said.
    host.HostTrainer(loss, TX, params_of(storage=storage)).close()
    with pytest.raises(ValueError, match=REFUSED):
        restored(folder, storage=storage)
