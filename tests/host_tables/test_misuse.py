"""What goes wrong around a trainer: its batches, its ids, its storage, its process."""

import errno
import os
import signal
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam._gradients.value_and_grad import PartsOfTables
from optax_sparse_adam.host_tables import _archive, _host_rows, _snapshot, _spread
from optax_sparse_adam.host_tables._archive import name_in
from optax_sparse_adam.host_tables._records import Layout
from optax_sparse_adam.host_tables._store import Mark, UserStore, View

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
from ..helpers.support import assert_identical, program_environment
from ..helpers.versions import SEES_THROUGH_REFS

pytestmark = pytest.mark.slow

TX = osa.sparse_adam(1e-2)


def new_trainer(fun=loss, **where):
    return host.HostTrainer(fun, TX, host_params(*begin(), **where))


@pytest.fixture(scope="module")
def expected():
    rows, w = begin()
    return train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 6))


def test_under_a_transfer_guard(tmp_path):
    """What nobody has asked for is no transfer of rows, which is what it is for."""
    made = [jax.device_put(batch) for batch in batches(0, 4)]
    ids, rows = np.array([3, 7]), np.zeros((2, DIM), np.float32)
    parts = loss, osa.exact_adam(1e-2), host_params(*begin())
    with jax.transfer_guard("disallow"):
        with host.HostTrainer(*parts) as trainer:
            trainer.step(*made[0])
            list(trainer.run(made))
            trainer.map_rows(osa.flush)
            trainer.reset_rows({"table": ids, "w": None}, {"table": rows, "w": None})
            trainer.checkpoint(tmp_path / "run")
            trainer.snapshot(tmp_path / "now")
            value = trainer.evaluate(loss)(*made[0])
        with host.HostTrainer.restore(tmp_path / "run", *parts) as trainer:
            assert_identical(trainer.evaluate(loss)(*made[0]), value)
        snapshot = host.Snapshot(tmp_path / "now", parts[2])
        assert_identical(snapshot.evaluate(loss)(*made[0]), value)


# Batches.


def test_none_is_a_batch_as_any_other():
    def fun(params, ids):
        ids = jnp.arange(3) if ids is None else ids
        return jnp.sum(params["table"][ids] ** 2) + jnp.sum(params["w"])

    rows, w = begin()
    made = [(None,), (np.array([7, 1]),), (None,)]
    known = train_in_memory(fun, TX, {"table": rows, "w": w}, made)
    trainer = new_trainer(fun)
    values = list(trainer.run([None, np.array([7, 1]), None]))
    assert_trained_alike(trainer, values, known)


CHANGES = {
    "step": lambda trainer: trainer.step(*next(batches(9, 10))),
    "run": lambda trainer: list(trainer.run(batches(9, 10))),
    "map_rows": lambda trainer: trainer.map_rows(lambda *trees: trees),
    "reset_rows": lambda trainer: trainer.reset_rows(
        {"table": np.array([1]), "w": None},
        {"table": np.zeros((1, DIM), np.float32), "w": None},
    ),
    "close": lambda trainer: trainer.close(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_batches_may_not_change_the_trainer(what, expected):
    """They are drawn ahead: rows that are fetched already would come back as before."""
    trainer, values = new_trainer(), []

    def drawn():
        for number, batch in enumerate(batches(0, 6)):
            if number == 4:
                CHANGES[what](trainer)
            yield batch

    with pytest.raises(RuntimeError, match=r"may read the trainer.*not change it"):
        values.extend(trainer.run(drawn()))
    assert len(values) == trainer.steps == 4
    values += list(trainer.run(batches(4, 6)))
    assert_trained_alike(trainer, values, expected)


def test_batches_may_read_the_trainer_and_save_it(tmp_path, expected):
    trainer = new_trainer(file=tmp_path / "table.bin")
    looked_up = trainer.evaluate(lambda params, ids: params["table"][ids])
    seen = []

    def drawn():
        for batch in batches(0, 6):
            rows = looked_up(batch[0])
            assert_identical(np.asarray(rows), trainer.params["table"][batch[0]])
            trainer.checkpoint(tmp_path / "run")
            seen.append(trainer.steps)
            yield batch

    values = list(trainer.run(drawn()))
    assert_trained_alike(trainer, values, expected)
    trainer.close()
    params = host_params(*begin(), file=tmp_path / "table.bin")
    with host.HostTrainer.restore(tmp_path / "run", loss, TX, params) as trainer:
        assert trainer.steps == seen[-1]
        values = [*expected[2][: seen[-1]], *trainer.run(batches(seen[-1], 6))]
        assert_trained_alike(trainer, values, expected)


# Ids.


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("row", [2**32 + 5, 2**40, 2**33])
def test_ids_that_jax_takes_for_others_are_refused(dtype, row):
    """Without 64-bit types JAX looks up row 5 for 2**32 + 5."""

    def fun(params, ids, y):
        return loss(params, ids, y.astype(jnp.float32))

    trainer = new_trainer(fun)
    ids, y = next(batches(0, 1))
    ids = ids.astype(dtype)
    before = np.array(trainer.params["table"])
    trainer.step(ids, y)
    ids[3] = row
    after = np.array(trainer.params["table"])
    assert np.any(before != after)
    evaluate = trainer.evaluate(fun)
    for call in (trainer.step, lambda *x: list(trainer.run([x])), evaluate):
        with pytest.raises(IndexError, match=rf"atch.* has the integer {row}, of"):
            call(ids, y)
    assert_identical(np.array(trainer.params["table"]), after)
    # Numbers of which no ids are computed are the loss's own.
    trainer.step(ids.astype(np.int32) % ROWS, np.full(len(ids), row))


def _at_once(params, ids, ref):
    ref[0] += jnp.sum(params["table"][ids])


def _in_a_loop(params, ids, ref):
    def body(total, row):
        ref[1] = ref[1] + jnp.sum(params["table"][row] ** 2)
        return total, None

    lax.scan(body, 0, ids)


def _in_a_branch(params, ids, ref):
    def branch():
        ref[2] = jnp.sum(params["table"][ids])

    lax.cond(ids[0] > 3, branch, lambda: None)


@pytest.mark.parametrize("writes", [_at_once, _in_a_loop, _in_a_branch])
def test_rows_that_are_written_to_a_mutable_array(writes):
    """Refused, where what the loss computes of it is not known."""

    def fun(params, ids):
        ref = jax.new_ref(jnp.zeros(3))
        writes(params, ids, ref)
        return ref[...].sum()

    trainer = new_trainer(fun)
    if SEES_THROUGH_REFS:
        rows, w = begin()
        made = [(np.array([1, 2, 3 + k]),) for k in range(3)]
        known = train_in_memory(fun, TX, {"table": rows, "w": w}, made)
        assert_trained_alike(trainer, [trainer.step(*x) for x in made], known)
        return
    words = r"(?s)mutable array .*ids may depend on rows of \['table'\].*test_misuse.py"
    with pytest.raises(ValueError, match=words):
        trainer.step(np.array([1, 2, 3]))


def test_a_mutable_array_of_ids_is_read():
    def fun(params, ids, y):
        ref = jax.new_ref(ids)
        ref[0] = 7
        return loss(params, ref[...], y)

    rows, w = begin()
    known = train_in_memory(fun, TX, {"table": rows, "w": w}, batches(0, 3))
    trainer = new_trainer(fun)
    assert_trained_alike(trainer, list(trainer.run(batches(0, 3))), known)


# Where rows are.


def test_rows_that_travel_are_the_real_ones_in_eighths(monkeypatch):
    """As programs are compiled for each number of rows; it never becomes less."""
    sent, fetch = [], _host_rows.HostRows.fetch

    def fetched(self, batch, known):
        rows = fetch(self, batch, known)
        for k, (own, x) in enumerate(zip(rows.unique, rows.arrays, strict=True)):
            most = min(max(2, len(batch.ids[k])), batch.tables[k].shape[0])
            sent.append((sum(map(len, own)), len(x[0]), most, -(-most // 8)))
        return rows

    monkeypatch.setattr(_host_rows.HostRows, "fetch", fetched)
    rows, w = begin()
    other = rows[:40, :3].astype(jnp.bfloat16)

    def fun(params, ids, y):
        few = params["other"][ids[:9] % 40].astype(jnp.float32)
        return loss(params, ids, y) + jnp.mean(few**2)

    tx = osa.exact_adam(1e-2)
    plain = {"table": rows, "w": w, "other": other}
    known = train_in_memory(fun, tx, plain, batches(0, 8))
    table = host.HostTable(other.shape, "bfloat16", init=lambda a, b: other[a:b])
    trainer = host.HostTrainer(fun, tx, host_params(rows, w) | {"other": table})
    values = list(trainer.run(batches(0, 4)))
    values += [trainer.step(*batch) for batch in batches(4, 6)]
    values += list(trainer.run(batches(6, 8)))
    assert_trained_alike(trainer, values, known)
    found = trainer.evaluate(lambda params, ids: params["table"][ids])(np.arange(50))
    trainer.map_rows(osa.flush)
    assert_identical(np.asarray(found), trainer.params["table"][:50])
    assert all(own <= x <= most for own, x, most, _ in sent)
    assert all(x in (1, most) or x % part == 0 for _, x, most, part in sent)
    # The first batch of each table has as few as there may be, with room for others.
    assert all(x < own + 2 * own**0.5 + part for own, x, _, part in sent[:2])
    # 31 rows and 10 more, in eighths of 48: one program for batches of 26 to 31 rows.
    assert {x for _, x, most, _ in sent if most == 48} == {42}


def test_results_come_back_by_pinned_memory(monkeypatch):
    """The way from an accelerator, on a CPU that has such memory, too."""
    kinds, to_host = [], _spread._to_host

    def sent(arrays):
        back = to_host(arrays)
        kinds.extend(x.sharding.memory_kind for x in back)
        return back

    monkeypatch.setattr(_spread, "_has_pinned_memory", lambda _: True)
    monkeypatch.setattr(_spread, "_to_host", sent)
    rows, w = begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 6))
    trainer = new_trainer()
    values = list(trainer.run(batches(0, 4)))
    values += [trainer.step(*batch) for batch in batches(4, 6)]
    assert_trained_alike(trainer, values, known)
    assert set(kinds) == {"pinned_host"}


@pytest.mark.parametrize("count", [250, 2000])
def test_more_ids_than_rows_that_a_step_gets(count):
    """Duplicates of 7 rows add up as in memory: fewer than its rows, or more."""

    def many():
        for number in range(4):
            rng = np.random.default_rng(number)
            ids = rng.integers(0, 7, count).astype(np.int32) * 5
            yield ids, rng.normal(size=count).astype(np.float32)

    rows, w = begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, many())
    trainer = new_trainer()
    assert_trained_alike(trainer, list(trainer.run(many())), known)
    program = osa.value_and_grad(
        lambda table, ids: jnp.sum(table[ids] ** 2),
        sparse=PartsOfTables(None, {0: ROWS}),
    )
    nse = program(jnp.ones((38, DIM)), jnp.zeros(count, jnp.int32))[1].nse
    assert nse == (count if count < ROWS else 38)


def test_ids_where_jax_has_no_cpu(monkeypatch):
    """`JAX_PLATFORMS=cuda` leaves the CPU out, which then computes no ids."""
    local_devices = jax.local_devices

    def devices(*args, backend=None, **kwargs):
        assert backend != "cpu", "JAX raises there"
        return local_devices(*args, backend=backend, **kwargs)

    rows, w = begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 3))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", devices)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        trainer = host.HostTrainer(loss, TX, host_params(rows, w))
        assert_trained_alike(trainer, list(trainer.run(batches(0, 3))), known)
    finally:
        jax.config.update("jax_platforms", before)


def test_views_of_a_storage_take_what_is_asked_for():
    rows, _ = begin()
    with new_trainer(storage=Dictionary()) as trainer:
        view = trainer.params["table"]
        assert (view.shape, view.ndim, view.size) == (rows.shape, 2, rows.size)
        mask = np.arange(ROWS) % 7 == 0
        lists = (3, -1, np.int64(4), np.uint8(200), [3, 3, 1], [], [-1, 0], mask)
        for ids in (*lists, slice(5, 9), slice(None, None, -7), [[1, 2], [3, -300]]):
            assert_identical(np.asarray(view[ids]), rows[ids])
        for ids in (ROWS, -ROWS - 1, [1, ROWS], [1.0], (1, 2)):
            with pytest.raises(IndexError, match="Rows are integers from 0 to 299"):
                view[ids]
    layout = Layout([("table", (DIM,), np.float32)])
    store = UserStore(Zeros(), "table", 200_000_000, layout)
    view = View(store, layout, 0, 200_000_000)
    tracemalloc.start()
    assert [len(view[[5, -1]]), len(view[7]), len(view[-9:])] == [2, DIM, 9]
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


class Zeros:
    def take(self, rows):
        return np.zeros((len(rows), DIM), np.uint32)


def test_a_file_that_cannot_be_begun_leaves_nothing(tmp_path):
    def init(first, last):
        with pytest.raises(BlockingIOError, match="Another HostTrainer"):
            new_trainer(file=tmp_path / "table.bin")
        raise RuntimeError("no rows")

    table = host.HostTable((ROWS, DIM), file=tmp_path / "table.bin", init=init)
    with pytest.raises(RuntimeError, match="no rows"):
        host.HostTrainer(loss, TX, {"table": table, "w": begin()[1]})
    assert list(tmp_path.iterdir()) == []
    # Nor does the table before it.
    first = host_params(*begin(), file=tmp_path / "first.bin")
    with pytest.raises(RuntimeError, match="no rows"):
        host.HostTrainer(loss, TX, first | {"z": table})
    assert list(tmp_path.iterdir()) == []
    new_trainer(file=tmp_path / "table.bin").close()


def test_what_is_not_ours_stays(tmp_path):
    """Files and folders that have the names under which snapshots are begun."""
    folder = tmp_path / "shot.new"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with new_trainer(file=tmp_path / "table.bin") as trainer:
        with pytest.raises(FileExistsError, match=r"There is .*mine, which is no"):
            trainer.snapshot(tmp_path / "shot")
        assert (folder / "mine").read_text() == "mine"
        (folder / "mine").rename(folder / "table0.npy")
        trainer.snapshot(tmp_path / "shot")
        trainer.snapshot(tmp_path / "other.new")  # whole, by its name
        (tmp_path / "third.new").write_text("mine")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for name, words in [
            ("other", r"There is .*snapshot\.npz, which is no part"),
            ("third", r"There is .*third\.new, which is no part"),
            ("link", "link is there"),
        ]:
            with pytest.raises(FileExistsError, match=words):
                trainer.snapshot(tmp_path / name)
    assert (tmp_path / "other.new" / "snapshot.npz").exists()
    assert (tmp_path / "third.new").read_text() == "mine"


def test_two_snapshots_of_one_name_at_once(tmp_path, monkeypatch):
    write, refused = _snapshot._write_table, []

    def while_another_one_writes(*args):
        monkeypatch.setattr(_snapshot, "_write_table", write)
        with pytest.raises(BlockingIOError, match="snapshot writes this, and another"):
            second.snapshot(tmp_path / "served")
        refused.append(True)
        write(*args)

    with new_trainer() as first, new_trainer() as second:
        second.step(*next(batches(0, 1)))
        monkeypatch.setattr(_snapshot, "_write_table", while_another_one_writes)
        first.snapshot(tmp_path / "served")
        assert refused
        snapshot = host.Snapshot(tmp_path / "served", host_params(*begin()))
        assert_identical(arrays(snapshot.params), arrays(first.params))
    assert [x.name for x in tmp_path.iterdir()] == ["served"]


# Checkpoints.


def test_two_trainers_make_no_checkpoint_at_once(tmp_path):
    """As where a job was started twice: tables in memory have no lock."""
    with new_trainer() as trainer:
        trainer.checkpoint(tmp_path)
        there = {x: x.read_bytes() for x in tmp_path.iterdir()}
        with _archive.alone_in(tmp_path, "another trainer"):
            words = "checkpoint writes this, and another HostTrainer has it"
            with pytest.raises(BlockingIOError, match=words):
                trainer.checkpoint(tmp_path)
            with pytest.raises(BlockingIOError, match=words):
                host.HostTrainer.restore(tmp_path, loss, TX, host_params(*begin()))
            assert all(x.read_bytes() == there[x] for x in there)
        assert {*tmp_path.iterdir()} == {*there}
        host.HostTrainer.restore(tmp_path, loss, TX, host_params(*begin())).close()
        with pytest.raises(FileExistsError, match="a checkpoint of another run"):
            trainer.checkpoint(tmp_path)


def test_an_archive_that_got_its_name_is_not_written(tmp_path, monkeypatch):
    """Another trainer is done between the opening of its file here, and the lock."""
    new, whole = tmp_path / "checkpoint.npz.new", tmp_path / "checkpoint.npz"
    new.write_text("of another trainer")
    lock = _archive.lock

    def late(file, path, words):
        if not whole.exists():
            new.rename(whole)
        lock(file, path, words)

    monkeypatch.setattr(_archive, "lock", late)
    with _archive.alone_in(tmp_path, "a trainer"):
        new.write_text("of this one")
    assert [x.read_text() for x in tmp_path.iterdir()] == ["of another trainer"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def without(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(_archive, "lock", without)
    with new_trainer() as trainer:
        trainer.checkpoint(tmp_path)
    host.HostTrainer.restore(tmp_path, loss, TX, host_params(*begin())).close()


def test_a_checkpoint_removes_its_own_files_only(tmp_path):
    table = (
        f"rows-{'0123456789abcdef' * 2}"  # as the part of a process, but for its end
    )
    mine = [tmp_path / name for name in ("rows-1", "journal-of-mine", table)]
    for path in mine[:2]:
        path.write_text("mine")
    with new_trainer(file=mine[2]) as trainer:
        for batch in batches(0, 3):
            trainer.step(*batch)
            trainer.checkpoint(tmp_path)
    left = {x.name for x in tmp_path.iterdir()} - {x.name for x in mine}
    assert [x.split("-")[0] for x in sorted(left)] == ["checkpoint.npz", "journal"]
    assert mine[0].read_text() == mine[1].read_text() == "mine"


def test_a_restore_removes_files_that_no_checkpoint_needs(tmp_path):
    """Of two processes that were killed in a restore, as there is a journal alone."""
    file, run, killed = tmp_path / "rows", tmp_path / "run", "ab" * 16
    with new_trainer(file=file) as trainer:
        trainer.checkpoint(run)
    marks = {
        "-0-of-2": Mark(pending=killed),
        "-1-of-2": Mark(pending="cd" * 16),  # in another folder
        "-0-of-3": Mark(),
        "-1-of-3": Mark(1, "ef" * 16, pending=killed),
        "-of-mine": Mark(pending=killed),
        "-0-of-4": Mark(pending=f"rows of {name_in(run)}"),  # still moved
    }
    for name, mark in marks.items():
        with new_trainer(file=f"{file}{name}") as other:
            other._rows.stores[0].set_mark(mark)
    (tmp_path / "rows-2-of-3").write_text("mine")
    (tmp_path / "rows-3-of-4").touch()
    (run / f"journal-{killed}-0").touch()
    there = {x.name for x in tmp_path.iterdir()}
    params = host_params(*begin(), file=file)
    host.HostTrainer.restore(run, loss, TX, params).close()
    assert {x.name for x in tmp_path.iterdir()} == there - {
        "rows-0-of-2",
        "rows-0-of-4",
    }


@pytest.mark.parametrize("what", ["file", "storage", "memory"])
def test_an_older_checkpoint_of_the_same_rows(tmp_path, what, expected):
    """Refused where rows have changed since, whose journal is in another folder."""
    places = {"file": tmp_path / "table.bin", "storage": Dictionary()}
    params = host_params(*begin(), **{k: x for k, x in places.items() if k == what})
    with host.HostTrainer(loss, TX, params) as trainer:
        for number, folder in enumerate(["old", "run", "run"]):
            trainer.step(*next(batches(number, number + 1)))
            trainer.checkpoint(tmp_path / folder)
        trainer.step(*next(batches(3, 4)))
    restore = host.HostTrainer.restore
    if what != "memory":
        with pytest.raises(ValueError, match="has changed since the checkpoint"):
            restore(tmp_path / "old", loss, TX, params)
    first = "old" if what == "memory" else "run"
    with restore(tmp_path / first, loss, TX, params) as trainer:
        assert trainer.steps == (1 if what == "memory" else 3)
        list(trainer.run(batches(trainer.steps, 6)))
        assert_trained_alike(trainer, expected[2], expected)


def test_an_interrupt_while_a_checkpoint_is_made(tmp_path, monkeypatch, expected):
    """Its archive is there already: what changes from now on is in its journal."""
    trainer = new_trainer(file=tmp_path / "table.bin")
    trainer.step(*next(batches(0, 1)))
    trainer.checkpoint(tmp_path / "run")
    trainer.step(*next(batches(1, 2)))
    fsync = os.fsync

    def interrupted(file):
        if isinstance(file, int) and os.path.isdir(f"/proc/self/fd/{file}"):
            raise KeyboardInterrupt
        fsync(file)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.checkpoint(tmp_path / "run")
    monkeypatch.undo()
    list(trainer.run(batches(2, 5)))
    trainer.close()
    params = host_params(*begin(), file=tmp_path / "table.bin")
    with host.HostTrainer.restore(tmp_path / "run", loss, TX, params) as trainer:
        list(trainer.run(batches(trainer.steps, 6)))
        assert_trained_alike(trainer, expected[2], expected)


# Processes.

FORK = """
import os, sys, warnings
import numpy as np
import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from tests.helpers.host_tables import *

warnings.simplefilter("ignore")
rows, w = begin()
tx = osa.sparse_adam(1e-2)
params = host_params(rows, w, file=sys.argv[1])
try:
    with host.HostTrainer(loss, tx, params) as trainer:
        run = trainer.run(batches(0, 6))
        values = [next(run), next(run)]
        if (child := os.fork()) == 0:
            for use in (lambda: next(run), lambda: trainer.checkpoint("x")):
                try:
                    use()
                except RuntimeError as error:
                    assert "of the process that forked this one" in str(error)
                    print("refused", flush=True)
            raise SystemExit  # which leaves `with`
        os.waitpid(child, 0)
        try:
            host.HostTrainer.restore("none", loss, tx, params)
        except BlockingIOError:
            print("locked")
        values += list(run)
        known = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 6))
        assert_trained_alike(trainer, values, known)
except SystemExit:
    os._exit(0)  # JAX cannot end a process that was forked
"""


def test_a_fork_leaves_the_trainer_alone(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "table.bin")],
        cwd=root,
        env=program_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "refused", "locked"]


KILLED = """
import os, signal, sys, warnings
import numpy as np
import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from tests.helpers.host_tables import *

warnings.simplefilter("ignore")
trainer = host.HostTrainer(
    loss, osa.sparse_adam(1e-2), host_params(*begin(), file=sys.argv[1] + "/table.bin")
)
list(trainer.run(batches(0, 2)))
trainer.checkpoint(sys.argv[1] + "/run")
np.save(sys.argv[1] + "/rows.npy", trainer.params["table"])
list(trainer.run(batches(2, 4)))
view = trainer.params["table"]
if (child := os.fork()) == 0:
    sys.stdin.read()  # a worker, which lives for as long as the test
    os._exit(int(view[0, 0] == 1e9))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_is_restored_while_its_workers_live(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env=program_environment(),
        stdin=subprocess.PIPE,
    ) as process:
        assert process.wait(300) == -signal.SIGKILL
        params = host_params(*begin(), file=tmp_path / "table.bin")
        with host.HostTrainer.restore(tmp_path / "run", loss, TX, params) as trainer:
            rows = np.load(tmp_path / "rows.npy")
            assert_identical(np.array(trainer.params["table"]), rows)
