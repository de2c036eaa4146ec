"""Where rows are kept: what a storage may keep, rows in any order, disks that are full,
files that others change, and what was damaged.
"""

import errno
import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import (
    _archive,
    _between,
    _budget,
    _file,
    _host_rows,
    _journal,
    _plan,
    _records,
)
from optax_sparse_adam.host_tables._records import Layout
from optax_sparse_adam.host_tables._store import ascending

from ..helpers.host_tables import (
    DIM,
    ROWS,
    Dictionary,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_identical, slow_but

TX = osa.sparse_adam(1e-2)


def new_trainer(**where):
    return host.HostTrainer(loss, TX, host_params(*begin(), **where))


@pytest.fixture(scope="module")
def expected():
    rows, w = begin()
    return train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 6))


# Storages.


class Keeps:
    """A storage that keeps the very arrays that it gets, and gives its own."""

    def __init__(self):
        self.pieces, self.at = [], {}

    def take(self, rows):
        return np.stack([self.pieces[k][i] for k, i in map(self.at.get, rows.tolist())])

    def put(self, rows, records):
        self.at |= {row: (len(self.pieces), i) for i, row in enumerate(rows.tolist())}
        self.pieces.append(records)


def test_a_storage_may_keep_what_it_gets(monkeypatch, expected):
    """Each piece of a new table is an array of its own, also where all are equal."""
    from optax_sparse_adam.host_tables import _plan

    monkeypatch.setattr(_plan, "_NUMBERS", 50 * DIM)
    storage = Keeps()
    table = host.HostTable((ROWS, DIM), storage=storage)  # all zeros
    with host.HostTrainer(loss, TX, {"table": table, "w": begin()[1]}):
        assert len(storage.pieces) == 6
        for k, x in enumerate(storage.pieces):
            assert x.flags.writeable
            assert not any(np.shares_memory(x, y) for y in storage.pieces[:k])
    with new_trainer(storage=Keeps()) as trainer:
        assert_trained_alike(trainer, list(trainer.run(batches(0, 6))), expected)


class Returns:
    def __init__(self, change):
        self.rows, self.change = {}, change

    def take(self, rows):
        return self.change(np.stack([self.rows[row] for row in rows.tolist()]))

    def put(self, rows, records):
        self.rows.update(zip(rows.tolist(), records, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:1], "uint32.1, 24. for"),
        (lambda x: x[:, :1], r"uint32\[\d+, 1\]"),
        (lambda x: x.view(np.float32), r"float32\["),
        (lambda x: x[0], r"uint32\[24\]"),
    ],
)
def test_what_a_storage_returns_is_looked_at(change, words):
    """A record of another shape would be that of every row."""
    with new_trainer(storage=Returns(lambda x: x)) as trainer:
        trainer._rows.stores[0]._storage.change = change
        with pytest.raises(ValueError, match=rf"`take` of the storage of .*{words}"):
            trainer.step(*next(batches(0, 1)))


# Rows in any order.


def test_rows_are_ascending_whatever_is_given():
    ids = np.array([9, 3, 2**40, -1, 3, 300, 299], np.int64)
    rows = ascending(ids, 300)
    assert rows.tolist() == [3, 9, 299]
    assert rows.dtype == np.int32


@pytest.mark.parametrize("what", slow_but(["a cold file", "memory"], "a cold file"))
def test_rows_that_are_reset_in_any_order(what, tmp_path):
    """As the fresh ones of a full vocabulary, also from a cold file."""
    where = {"file": tmp_path / "x"} if what == "a cold file" else {}
    ids = np.array([250, 5, ROWS, 7, -1])
    new = np.arange(5 * DIM, dtype=np.float32).reshape(5, DIM)
    rows, w = begin()
    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    state = TX.init(params)
    trees = {"table": ids, "w": None}, {"table": new, "w": None}
    with new_trainer(**where) as trainer:
        trainer.checkpoint(tmp_path / "run")
        if where:
            trainer._rows.stores[0]._cold_for = 9
        trainer.reset_rows(*trees)
        known = osa.reset_rows(TX, params, state, *trees)
        assert_trained_alike(trainer, [], (*known, []))
    given = host_params(rows, w, **where)
    with host.HostTrainer.restore(tmp_path / "run", loss, TX, given) as trainer:
        assert_identical(np.array(trainer.params["table"]), rows)


def test_a_small_batch_that_waits_for_a_page_makes_no_file_cold(tmp_path, monkeypatch):
    """As of a page of code: it would be asked for pages for ever."""
    layout = Layout([("row", (4,), np.uint32)])
    file = _file.File(tmp_path / "x", "table", 100, layout, None)
    file.begin([])
    reads = iter(range(1000))  # one page in each batch
    monkeypatch.setattr(_file, "_disk_reads", lambda: next(reads))
    for _ in range(5):
        file.take_into(ascending(np.arange(9), 100), np.empty((9, 4), np.uint32))
        assert not file.is_cold
    file.close()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_gives_the_lock_back_and_its_parent_keeps_it(tmp_path):
    """As a loader's worker, which may live for longer than a trainer that is killed."""
    layout = Layout([("row", (4,), np.uint32)])
    file = _file.File(tmp_path / "x", "table", 100, layout, None)
    file.begin([(3, np.full((2, 4), 7, np.uint32))])
    other = _file.File(tmp_path / "x", "table", 100, layout, None)
    (of_test, test), (child, of_child) = os.pipe(), os.pipe()
    if (number := os.fork()) == 0:
        os.close(test)
        os.write(of_child, b"-")
        os.read(of_test, 1)  # until the test has ended
        os._exit(0)
    try:
        os.read(child, 1)
        with pytest.raises(BlockingIOError):
            other.open()
        view = file.records[3]
        file._file.close()  # as the system, where a process is killed
        other.open()
        other.put(ascending(np.array([3]), 100), np.full((1, 4), 8, np.uint32))
        assert view.tolist() == [8] * 4  # a mapping needs no lock
        other.close()
    finally:
        for end in (of_test, test, child, of_child):
            os.close(end)
        os.waitpid(number, 0)


# Disks that are full.


class Disk:
    """A disk without room, or with some pages, for a file with holes."""

    def __init__(self, monkeypatch, pages=0):
        fstat, fstatvfs = os.fstat, os.fstatvfs

        def stat(file):
            own = fstat(file)

            class Stat:
                st_size, st_blocks = own.st_size, 0

            return Stat

        def statvfs(file):
            sizes = [4096, 4096, *fstatvfs(file)[2:]]
            sizes[3:5] = pages, pages
            return os.statvfs_result(sizes)

        monkeypatch.setattr(_file.os, "fstat", stat)
        monkeypatch.setattr(_file.os, "fstatvfs", statvfs)


def test_a_hole_on_a_full_disk_is_read_without_the_mapping(tmp_path, monkeypatch):
    """On tmpfs the system would end the process: a page of a hole is made there."""
    layout = Layout([("row", (4,), np.uint32)])
    file = _file.File(tmp_path / "x", "table", 100, layout, None)
    file.begin([(3, np.full((2, 4), 7, np.uint32))])
    rows, out = ascending(np.array([2, 3, 4, 99]), 100), np.ones((5, 4), np.uint32)
    Disk(monkeypatch)
    monkeypatch.setattr(file, "records", None)  # the mapping
    file.take_into(rows, out)
    assert out[:, 0].tolist() == [0, 7, 7, 0, 1]
    with pytest.raises(OSError, match="no room"):
        file.put(rows, out)
    file.close()


def test_no_more_room_is_asked_for_than_a_file_has_holes(tmp_path, monkeypatch):
    """Two pages for each of a hundred rows would be a hundred times the file."""
    layout = Layout([("row", (4,), np.uint32)])
    file = _file.File(tmp_path / "x", "table", 100, layout, None)
    file.begin([])
    Disk(monkeypatch, pages=3)
    rows, records = ascending(np.arange(100), 100), np.ones((100, 4), np.uint32)
    file.put(rows, records)
    np.testing.assert_array_equal(file.records, records)
    file.close()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="as macOS")
def test_a_checkpoint_for_which_there_is_no_room_leaves_nothing(tmp_path, monkeypatch):
    with new_trainer() as trainer:
        trainer.checkpoint(tmp_path / "run")
        before = sorted(x.name for x in (tmp_path / "run").iterdir())
        trainer.step(*next(batches(0, 1)))

        def fsync(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(_archive.os, "fsync", fsync)
        with pytest.raises(OSError, match="No space left"):
            trainer.checkpoint(tmp_path / "run")
        monkeypatch.undo()
        assert sorted(x.name for x in (tmp_path / "run").iterdir()) == before
        trainer.step(*next(batches(1, 2)))
        trainer.checkpoint(tmp_path / "run")


def test_a_map_rows_for_which_there_is_no_room_tears_nothing(tmp_path, monkeypatch):
    """Before the first row is written nothing has changed, and the trainer goes on."""
    rows, _ = begin()
    with new_trainer(file=tmp_path / "x") as trainer:
        Disk(monkeypatch)
        with pytest.raises(OSError, match=r"no room .* map_rows has changed nothing"):
            trainer.map_rows(lambda p, s: (jax.tree.map(jnp.negative, p), s))
        monkeypatch.undo()
        assert_identical(np.array(trainer.params["table"]), rows)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_what_is_beyond_a_quota_is_kept(tmp_path, monkeypatch, number):
    """As on a full disk: `close` does not give it up."""
    rows, _ = begin()
    trainer = new_trainer(file=tmp_path / "x")
    trainer.checkpoint(tmp_path / "run")

    def write_at(*_):
        raise OSError(number, "beyond the quota")

    monkeypatch.setattr(_journal, "write_at", write_at)
    with pytest.raises(OSError, match="beyond the quota"):
        trainer.step(*next(batches(0, 1)))
    with pytest.raises(OSError, match="beyond the quota"):
        trainer.close()
    monkeypatch.undo()
    assert not np.array_equal(trainer.params["table"], rows)
    trainer.close()


@pytest.mark.parametrize(
    ("progress", "error", "words"),
    [
        (True, TypeError, "such as tqdm.tqdm, got bool"),
        (lambda pieces: None, TypeError, "it returned NoneType"),
        (lambda pieces: list(pieces)[:2], ValueError, "returned 2 pieces, and there"),
        (lambda pieces: itertools.islice(pieces, 2), ValueError, "returned 2 pieces"),
    ],
)
def test_a_progress_that_drops_pieces(progress, error, words, tmp_path, monkeypatch):
    """Their rows would be zeros."""
    monkeypatch.setattr(_plan, "_NUMBERS", 1 << 10)
    rows, w = begin()

    def made(progress):
        params = host_params(rows, w, file=tmp_path / "x")
        return host.HostTrainer(loss, TX, params, progress=progress)

    with pytest.raises(error, match=words):
        made(progress)
    assert [*tmp_path.iterdir()] == []
    seen = []
    with made(lambda pieces: (seen.append(x) or x for x in pieces)) as trainer:
        np.testing.assert_array_equal(trainer.params["table"], rows)
    assert len(seen) == 3


def test_a_file_that_cannot_be_mapped(tmp_path, monkeypatch):
    """As under `ulimit -v`: it says which table and how much, and leaves no file."""

    def no_memory(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(_file.mmap, "mmap", no_memory)
    with pytest.raises(OSError, match=r"table.*[\d,]+ bytes of address space.*Cannot"):
        new_trainer(file=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_is_pending_on_a_full_disk_is_written_when_there_is_room(
    tmp_path, monkeypatch
):
    """Each call says whether it has changed something; close() does not give up."""
    params = {
        "table": host.HostTable((5000, DIM), file=tmp_path / "x"),
        "w": begin()[1],
    }
    trainer = host.HostTrainer(loss, TX, params)
    ids, values = {"table": np.array([7]), "w": None}, np.ones((1, DIM), np.float32)
    Disk(monkeypatch)
    with pytest.raises(OSError, match="these are kept, and written by the next call"):
        trainer.reset_rows(ids, {"table": values, "w": None})
    for change in (
        lambda: trainer.reset_rows(ids, {"table": 2 * values, "w": None}),
        lambda: trainer.map_rows(lambda params, state: (params, state)),
        lambda: trainer.step(*next(batches(0, 1))),
    ):
        with pytest.raises(
            OSError,
            match=r"calls before.* has changed nothing: make room, and call it ag",
        ):
            change()
    with pytest.raises(OSError, match="no room"), trainer:
        pass
    monkeypatch.undo()
    assert np.asarray(trainer.params["table"][7]).tolist() == values[0].tolist()
    trainer.reset_rows(ids, {"table": 3 * values, "w": None})
    assert np.asarray(trainer.params["table"][7]).tolist() == [3.0] * DIM
    trainer.close()


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_a_budget_is_one_without_files(where, monkeypatch):
    held, where = [0], {"storage": Dictionary()} if where == "storage" else {}
    monkeypatch.setattr(_budget, "resident_bytes", lambda: held[0])
    trainer = host.HostTrainer(loss, TX, host_params(*begin(), **where), budget=1e10)
    batch = next(batches(0, 1))
    trainer.step(*batch)
    held[0] = 2**40
    for call in (trainer.step, trainer.evaluate(loss)):
        with pytest.raises(MemoryError, match="more than the budget of its HostTraine"):
            call(*batch)
    held[0] = 0
    trainer.step(*batch)
    assert trainer.steps == 2
    trainer.close()


def test_pages_are_given_back_before_a_vocabulary_is_copied(tmp_path, monkeypatch):
    calls = []

    class Keys(osa.Vocabulary):
        def arrays_before(self, step):
            calls.append("copied")
            return super().arrays_before(step)

    monkeypatch.setattr(_host_rows, "give_back", lambda budget: calls.append(budget))
    params = host_params(*begin(), file=tmp_path / "x")
    options = {"budget": 1e12, "stateful": {"keys": Keys(9)}}
    with host.HostTrainer(loss, TX, params, **options) as trainer:
        trainer.checkpoint(tmp_path / "run")
        trainer.snapshot(tmp_path / "served")
    assert calls == [0, "copied"] * 2


@pytest.mark.slow
def test_few_large_rows_are_touched_between_two_looks(tmp_path, monkeypatch):
    """No more bytes of them than of 512 small ones."""
    looks = []
    monkeypatch.setattr(_budget, "_MAPPED", 4 << 20)
    monkeypatch.setattr(_file, "give_back", looks.append)
    params = {"x": host.HostTable((20, 1 << 18), file=tmp_path / "x")}
    tx = osa.lazy(optax.sgd(1.0))
    with host.HostTrainer(
        lambda params, ids: params["x"][ids].sum(), tx, params, budget=1e12
    ) as trainer:
        trainer.step(np.arange(12))
        del looks[:]
        trainer.evaluate(lambda params, ids: params["x"][ids].sum())(np.arange(12))
        assert len(looks) == 4  # before each four megabytes, and after the last
        assert (trainer.params["x"][:12] == -1).all()


def test_over_its_budget_what_was_made_is_written(tmp_path, monkeypatch):
    """The next step is refused. Then it goes on, or is closed: nothing is lost."""
    held, (rows, w) = [0], begin()
    monkeypatch.setattr(_budget, "resident_bytes", lambda: held[0])

    def loader():
        yield from batches(0, 3)
        held[0] = 2**40
        yield from batches(3, 6)

    def assert_has(steps):
        expected = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, steps))
        assert_trained_alike(trainer, values, expected)

    params, values = host_params(rows, w, file=tmp_path / "x"), []
    trainer = host.HostTrainer(loss, TX, params, budget=1e10)
    trainer.checkpoint(tmp_path / "run")  # whose journal keeps rows
    with pytest.raises(MemoryError, match="more than the budget of its HostTrainer"):
        values.extend(trainer.run(loader()))
    for refused in (
        lambda: trainer.step(*next(batches(3, 4))),
        lambda: trainer.map_rows(lambda params, state: (params, state)),
    ):
        with pytest.raises(MemoryError):
            refused()
    assert trainer.steps < 4  # how many of them, threads decide
    assert_has(trainer.steps)
    held[0] = 0
    values.extend(trainer.run(batches(trainer.steps, 5)))
    assert_has(5)
    trainer.step(*next(batches(5, 6)))

    def doubled(params, state):
        held[0] = 2**40
        return jax.tree.map(lambda x: 2 * x, params), state

    before = np.array(trainer.params["table"])
    monkeypatch.setattr(_between, "CHUNK", 50 * 3 * DIM * 4)
    trainer.map_rows(doubled)  # in parts, of which none is refused
    assert_identical(np.array(trainer.params["table"]), 2 * before)
    trainer.close()


# Files that others change, and what was damaged.


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    """A mapped page behind its end would end the process."""
    with new_trainer(file=tmp_path / "x") as trainer:
        size = (tmp_path / "x").stat().st_size
        os.truncate(tmp_path / "x", 8192)
        with pytest.raises(OSError, match="was cut by another program"):
            trainer.step(*next(batches(0, 1)))
        with pytest.raises(OSError, match="was cut by another program"):
            trainer.checkpoint(tmp_path / "run")
        os.truncate(tmp_path / "x", size)


def _first(text, name, value):
    about = json.loads(text)
    about[name] = value
    return json.dumps(about).encode()


HEADERS = {
    "a list": lambda mark, about: (b"[]", about),
    "no object": lambda mark, about: (mark, b"7"),
    "no id": lambda mark, about: (mark, b"{}"),
    "a step": lambda mark, about: (_first(mark, "step", [1]), about),
    "a name": lambda mark, about: (_first(mark, "checkpoint", 7), about),
    "a journal": lambda mark, about: (_first(mark, "journal", [1]), about),
    "a pending one": lambda mark, about: (_first(mark, "pending", None), about),
}


@pytest.mark.parametrize("what", slow_but(HEADERS, "no id", "a journal"))
def test_a_header_that_was_damaged(tmp_path, what):
    with new_trainer(file=tmp_path / "x") as trainer:
        trainer.checkpoint(tmp_path / "run")
    data = (tmp_path / "x").read_bytes()
    start = data.index(b"\n") + 1
    about = data[512:].partition(b"\0")[0]
    mark, other = HEADERS[what](data[start:512].rstrip(), about)
    head = (data[:start] + mark).ljust(512) + other.ljust(len(about), b"\0")
    (tmp_path / "x").write_bytes(head + data[len(head) :])
    params = host_params(*begin(), file=tmp_path / "x")
    with pytest.raises(ValueError, match="was damaged: what it says of its rows"):
        host.HostTrainer.restore(tmp_path / "run", loss, TX, params)


@pytest.mark.parametrize("name", slow_but(["rows", "fields", "version"], "fields"))
def test_a_header_of_another_table(tmp_path, name):
    """Also where it lacks what is asked, or says a number for a list."""
    with new_trainer(file=tmp_path / "x") as trainer:
        trainer.checkpoint(tmp_path / "run")
    data = (tmp_path / "x").read_bytes()
    about = data[512:].partition(b"\0")[0]
    other = _first(about, name, 7).ljust(len(about), b"\0")
    (tmp_path / "x").write_bytes(data[:512] + other + data[512 + len(other) :])
    params = host_params(*begin(), file=tmp_path / "x")
    with pytest.raises(ValueError, match=f"does not hold .*: {name} are 7 in the file"):
        host.HostTrainer.restore(tmp_path / "run", loss, TX, params)


def test_a_file_of_an_earlier_version(tmp_path):
    (tmp_path / "x").write_bytes(b"optax_sparse_adam host table\n{}".ljust(4096, b"\0"))
    (tmp_path / "run").mkdir()
    params = host_params(*begin(), file=tmp_path / "x")
    with pytest.raises(ValueError, match="of an earlier version; this one reads"):
        host.HostTrainer.restore(tmp_path / "run", loss, TX, params)


@pytest.mark.slow
def test_every_byte_of_an_archive(tmp_path, expected):
    """Restored to the bits of the checkpoint, or refused in our words."""
    table = host.HostTable((3, 2), init=lambda a, b: np.ones((b - a, 2)))
    params, refused = {"table": table}, 0

    def fun(params, ids):
        return jnp.sum(params["table"][ids] ** 2)

    with host.HostTrainer(fun, osa.rowwise_adagrad(0.1), params) as trainer:
        trainer.step(np.array([1]))
        trainer.checkpoint(tmp_path / "run")
        known = np.array(trainer.params["table"])
    path = tmp_path / "run" / "checkpoint.npz"
    data = path.read_bytes()
    for k in range(len(data)):
        path.write_bytes(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :])
        try:
            about, arrays = _archive.read_archive(path)
        except ValueError as error:
            assert "or was damaged" in str(error)  # noqa: PT017
            refused += 1
            continue
        assert about["step"] == 1
        if k % 20 == 0 and len(arrays) == len(about["arrays"]):
            restore = host.HostTrainer.restore
            with restore(tmp_path / "run", fun, osa.rowwise_adagrad(0.1), params) as x:
                assert_identical(np.array(x.params["table"]), known)
    assert refused > len(data) // 2


# The beginning.


def test_rows_of_bfloat16_that_numpy_has_written(tmp_path):
    rows = np.arange(8, dtype=np.float32).reshape(4, 2).astype(jnp.bfloat16)
    np.savez(tmp_path / "rows.npz", rows=rows)
    with np.load(tmp_path / "rows.npz") as file:
        read = file["rows"]
    assert read.dtype.kind == "V"
    table = host.HostTable((4, 2), "bfloat16", init=lambda a, b: read[a:b])
    trainer = host.HostTrainer(lambda p, i: jnp.sum(p["t"][i]), TX, {"t": table})
    assert_identical(np.array(trainer.params["t"]), rows)
    other = host.HostTable((4, 2), init=lambda a, b: read[a:b])
    with pytest.raises(TypeError, match="the table has float32"):
        host.HostTrainer(lambda p, i: jnp.sum(p["t"][i]), TX, {"t": other})


def test_an_optimiser_that_begins_with_a_norm_of_all_rows_is_refused():
    tx = osa.lazy(optax.contrib.dog())
    with pytest.raises(ValueError, match=r"computes of all rows, or of how .*norm"):
        host.HostTrainer(loss, tx, host_params(*begin()))


def test_the_folder_of_a_new_file_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def seen(file):
        if isinstance(file, int):
            synced.append(os.path.realpath(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(_records.os, "fsync", seen)
    (tmp_path / "rows").mkdir()
    with new_trainer(file=tmp_path / "rows" / "x") as trainer:
        assert synced == [str(tmp_path / "rows")]
        trainer.checkpoint(tmp_path / "run")
        assert {str(tmp_path), str(tmp_path / "run")} <= {*synced}
