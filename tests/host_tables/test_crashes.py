"""SIGKILL and Ctrl-C at every system call of a checkpoint, a restore and a `map_rows`.

Each leaves what restores to the bits of a run that was not stopped, or what says what
to do; then that is done.
"""

import fcntl
import itertools
import os
import shutil
import signal
import threading

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
    _checkpoint,
    _file,
    _host_rows,
    _journal,
    _ledger,
    _opening,
    _pipeline,
    _snapshot,
    _stateful,
    _store,
    _together,
    _trainer,
    _worker,
)
from optax_sparse_adam.native import _records

from ..helpers.host_tables import (
    DIM,
    assert_trained_alike,
    batches,
    begin,
    train_in_memory,
)
from ..helpers.support import WEEKLY, slow_but
from ..helpers.system_calls import (
    Snapshots,
    content_of,
    interrupted,
    interrupted_at_line,
)

EACH = 1 if WEEKLY else 19  # line or call

# What is interrupted may leave a file to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

TX = osa.sparse_adam(1e-2)
ROWS = 60
SMALL = np.ones((7, 2), np.float32)
OF_CHECKPOINTS = (
    *(_archive, _checkpoint, _file, _host_rows, _journal, _ledger, _pipeline, _store),
    *(_opening, _together, _trainer),
)
OF_RUNS = _pipeline, _host_rows, _worker
OF_SNAPSHOTS = _archive, _between, _host_rows, _snapshot, _stateful, _trainer


def loss(params, ids, y):
    """Tables in two files and one in memory."""
    rows = params["a"][ids] * params["b"][ids[::-1]]
    return jnp.mean((rows @ params["w"]).sum(1) ** 2 - y) + params["c"][ids % 7].sum()


def params_in(folder):
    rows, w = begin((ROWS, DIM))

    def table(path=None, rows=rows):
        return host.HostTable(rows.shape, file=path, init=lambda a, b: rows[a:b])

    files = {"a": table(folder / "a.bin"), "b": table(folder / "b.bin")}
    return {**files, "c": table(rows=SMALL), "w": jnp.asarray(w)}


def doubled(params, state):
    return jax.tree.map(lambda x: 2 * x, (params, state))


def some(first, last):
    return list(batches(first, last, rows=ROWS, ids=9))


def restored(folder):
    return host.HostTrainer.restore(folder / "run", loss, TX, params_in(folder))


@pytest.fixture(scope="module")
def expected():
    """What a run that nobody stops has after each number of steps."""
    rows, w = begin((ROWS, DIM))
    begun = {"a": rows, "b": rows, "c": SMALL, "w": w}
    return [train_in_memory(loss, TX, begun, some(0, k)) for k in range(8)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder of a run that has ended: a checkpoint, and two steps after it."""
    folder = tmp_path_factory.mktemp("run")
    with host.HostTrainer(loss, TX, params_in(folder)) as trainer:
        trainer.step(*some(0, 1)[0])
        trainer.checkpoint(folder / "run")
        list(trainer.run(some(1, 3)))
    return folder


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run, tmp_path / "folder")


def assert_as_never_stopped(trainer, expected):
    params, state, _ = expected[trainer.steps]
    assert_trained_alike(trainer, [], (params, state, []))


def assert_goes_on(folder, expected, steps):
    """A checkpoint is restored, of one of these steps, and another one is made of it.

    (No step is done: each new trainer would compile one.)
    """
    with restored(folder) as trainer:
        assert trainer.steps in steps
        assert_as_never_stopped(trainer, expected)


@pytest.fixture(params=["NumPy", "library"])
def copies(request, monkeypatch):
    """Who copies records: both count as calls at which a process may be stopped."""
    if request.param == "library":
        if _records._functions() is None:
            pytest.skip("needs the library")
        monkeypatch.setattr(_records, "_FEWEST_BYTES", 0)
    return request.param


def killed(call, folder, tmp_path, monkeypatch):
    with Snapshots(folder, tmp_path / "copies").taken(monkeypatch) as snapshots:
        call()
    return snapshots


def test_a_checkpoint_that_is_killed(folder, tmp_path, expected, monkeypatch):
    with restored(folder) as trainer:
        list(trainer.run(some(1, 3)))
        call = lambda: trainer.checkpoint(folder / "run")  # noqa: E731
        snapshots = killed(call, folder, tmp_path, monkeypatch)
    assert snapshots.calls > 50
    assert len(snapshots.folders) > 8
    steps = []
    for copy in snapshots.folders:
        with restored(copy) as trainer:
            steps.append(trainer.steps)
            assert_as_never_stopped(trainer, expected)
    assert steps == sorted(steps)
    assert {*steps} == {1, 3}


@pytest.mark.slow
@pytest.mark.usefixtures("copies")
def test_a_restore_that_is_killed(folder, tmp_path, expected, monkeypatch):
    call = lambda: restored(folder).close()  # noqa: E731
    snapshots = killed(call, folder, tmp_path, monkeypatch)
    for copy in snapshots.folders:
        assert_goes_on(copy, expected, {1})


@pytest.mark.slow
def test_killed_twice_in_a_row(folder, tmp_path, expected, monkeypatch):
    """A checkpoint, and then the restore of what it has left."""
    with restored(folder) as trainer:
        list(trainer.run(some(1, 3)))
        call = lambda: trainer.checkpoint(folder / "run")  # noqa: E731
        first = killed(call, folder, tmp_path, monkeypatch)
    for copy in first.folders[:: 1 if WEEKLY else 4]:
        call = lambda: restored(copy).close()  # noqa: B023, E731
        again = killed(call, copy, copy.with_suffix(".again"), monkeypatch)
        for other in again.folders:
            assert_goes_on(other, expected, {1, 3})


@pytest.mark.slow
@pytest.mark.usefixtures("copies")
def test_a_map_rows_that_is_killed(folder, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(_between, "CHUNK", 23 * 3 * DIM * 4)
    with restored(folder) as trainer:
        list(trainer.run(some(1, 3)))
        call = lambda: trainer.map_rows(doubled)  # noqa: E731
        snapshots = killed(call, folder, tmp_path, monkeypatch)
    assert len(snapshots.folders) > 8
    for copy in snapshots.folders:
        assert_goes_on(copy, expected, {1})


# Ctrl-C.


@pytest.mark.slow
def test_a_beginning_that_is_interrupted(tmp_path):
    """No file is left by the tables before it; perhaps the empty one of a name."""

    def begun(folder):
        return host.HostTrainer(loss, TX, params_in(folder))

    begun(tmp_path).close()  # what JAX compiles, it reads from files
    trainer, number = None, 0
    while trainer is None:
        number += min(EACH, 7)  # few are where a file has a name and no bytes
        folder = tmp_path / str(number)
        folder.mkdir()
        with interrupted(number):
            trainer = begun(folder)
        if trainer is None:
            left = [*folder.iterdir()]
            assert not any(x.stat().st_size for x in left)
            assert len(left) <= 1
    trainer.close()
    assert number > 80
    left = [x for x in tmp_path.glob("*/*.bin") if not x.stat().st_size]
    assert left
    for path in left:
        begun(path.parent).close()


def test_a_checkpoint_that_is_interrupted(folder, tmp_path, expected):
    """At some of its calls; in the slow part at more, and at each every week."""
    assert _interrupt_checkpoints(folder, tmp_path, expected, 31) > 50


@pytest.mark.slow
def test_a_checkpoint_that_is_interrupted_anywhere(folder, tmp_path, expected):
    assert _interrupt_checkpoints(folder, tmp_path, expected, EACH) > 50


def _interrupt_checkpoints(folder, tmp_path, expected, every):
    """The trainer goes on, whatever is killed next; a later checkpoint is made."""
    trainer, number = restored(folder), 1
    while True:
        with interrupted(number) as calls:
            trainer.checkpoint(folder / "run")
        if len(calls) < number:
            break
        done = trainer.steps
        copies = [shutil.copytree(folder, tmp_path / f"{number} before")]
        if done < 6:
            trainer.step(*some(done, done + 1)[0])
            assert_as_never_stopped(trainer, expected)
            copies.append(shutil.copytree(folder, tmp_path / f"{number} after"))
        for copy in copies:
            with restored(copy) as other:
                assert other.steps <= trainer.steps
                assert_as_never_stopped(other, expected)
        if done == 6:  # begins again
            trainer.close()
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "1 before", folder)
            trainer = restored(folder)
        number += every
    trainer.close()
    with restored(folder) as other:
        assert other.steps == trainer.steps
    return number


def assert_is_left_alone(folder):
    """Nobody holds a file any more."""
    for path in folder.glob("*.bin"):
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_restore_that_is_interrupted(run, tmp_path, expected, copies):
    """At each call; with the library at those about its puts, as the others are alike.

    What is left is restored once: most calls are reads, and leave what the one before
    has left.
    """
    if copies == "NumPy" and not WEEKLY:
        pytest.skip("ten times as many calls: OPTAX_SPARSE_ADAM_TEST_WEEKLY=1")
    for first in ("once", "again"):  # what is made once in a process is made by then
        with interrupted(0) as calls:
            trainer = restored(shutil.copytree(run, tmp_path / first))
        trainer.close()
    left, stopped = set(), 0
    for number in range(1, len(calls) + 1):
        if copies == "library" and not any(calls[max(0, number - 3) : number + 2]):
            continue
        folder, trainer = shutil.copytree(run, tmp_path / str(number)), None
        with interrupted(number):
            trainer = restored(folder)
        if trainer is not None:
            trainer.close()
            continue
        stopped += 1
        assert_is_left_alone(folder)
        if (content := content_of(folder)) not in left:
            left.add(content)
            assert_goes_on(folder, expected, {1})
    assert stopped > (100 if copies == "NumPy" else 10)
    assert len(left) > 3, len(left)


def assert_refuses(trainer, folder):
    words = r"map_rows has ended half way.*Close this.*by HostTrainer\.restore"
    for use in (
        lambda: trainer.params,
        lambda: trainer.step(*some(3, 4)[0]),
        lambda: list(trainer.run(some(3, 4))),
        lambda: trainer.map_rows(doubled),
        lambda: trainer.checkpoint(folder / "run"),
    ):
        with pytest.raises(RuntimeError, match=words):
            use()


@pytest.mark.slow
@pytest.mark.usefixtures("copies")
def test_a_map_rows_that_is_interrupted(run, tmp_path, expected, monkeypatch):
    """It has changed nothing, or all, or the trainer says what to do."""
    monkeypatch.setattr(_between, "CHUNK", 23 * 3 * DIM * 4)
    seen, left, number = set(), set(), 0
    while "all" not in seen:
        number += EACH
        folder = shutil.copytree(run, tmp_path / str(number))
        with restored(folder) as trainer:
            with interrupted(number):
                trainer.map_rows(doubled)
            if trainer._rows.torn is None:
                is_all = not np.array_equal(trainer.params["a"], expected[1][0]["a"])
                seen.add("all" if is_all else "nothing")
                known = doubled(*expected[1][:2]) if is_all else expected[1][:2]
                assert_trained_alike(trainer, [], (*known, []))
            else:
                seen.add("half")
                assert_refuses(trainer, folder)
        assert_is_left_alone(folder)
        if (content := content_of(folder)) not in left:
            left.add(content)
            assert_goes_on(folder, expected, {1})
    assert seen == {"nothing", "half", "all"}


# Between any two lines of a run.


def of_one_row(params, ids, _):
    return jnp.sum(params["a"][ids])


class Preempted(Exception):
    """What a signal's handler raises, as of a cluster."""


ERRORS = pytest.mark.parametrize(
    "error", slow_but([KeyboardInterrupt, Preempted], KeyboardInterrupt)
)


@ERRORS
@pytest.mark.parametrize("every", slow_but([EACH, 23], 23))
def test_a_run_that_is_interrupted_anywhere(every, error):
    """Each batch is trained once: `steps` and `drawn` know of it from the first on."""
    tx, count = osa.lazy(optax.sgd(1.0)), 5
    batches = [(np.array([2 * k, 2 * k + 1]), np.zeros(3)) for k in range(count)]
    trainer = host.HostTrainer(of_one_row, tx, {"a": host.HostTable((12, 2))})
    list(trainer.run(batches))
    lines, seen = [0, 0], 0
    while len(lines) == 2:
        seen += every
        iterator, steps = iter(batches), trainer.steps
        with interrupted_at_line(seen, *OF_RUNS, error=error) as lines:
            for _ in trainer.run(iterator):
                pass
        where = lines[1:]
        done, drawn = trainer.steps - steps, trainer.drawn
        left = [int(batch[0][0]) // 2 for batch in drawn]
        assert left == [*range(done, done + len(left))], where
        list(trainer.run(itertools.chain(drawn, iterator)))
        assert trainer.steps == steps + count, where
        rows = trainer.params["a"]
        np.testing.assert_array_equal(rows[:10], -trainer.steps // count, str(where))
    assert seen > 500


@ERRORS
def test_a_step_that_is_interrupted_anywhere(error):
    """`steps` says at once whether it has been done."""
    tx = osa.lazy(optax.sgd(1.0))
    trainer = host.HostTrainer(of_one_row, tx, {"a": host.HostTable((3, 2))})
    trainer.step(np.array([1]), np.zeros(3))
    lines, seen = [0, 0], 0
    while len(lines) == 2:
        seen += 1
        of = {"error": error}
        with interrupted_at_line(seen, _pipeline, _host_rows, **of) as lines:
            trainer.step(np.array([1]), np.zeros(3))
        steps = trainer.steps
        assert int(-trainer.params["a"][1, 0]) == steps == trainer.steps, lines[1:]
    assert 0 < steps < seen


def test_a_handler_that_uses_the_trainer(tmp_path):
    """Wherever it comes: done between two calls, refused in the middle of one."""
    tx, folder, came = osa.lazy(optax.sgd(1.0)), tmp_path / "run", []
    params = {"a": host.HostTable((12, 2), file=tmp_path / "a.bin")}
    trainer = host.HostTrainer(of_one_row, tx, params)
    batch = np.array([1]), np.zeros(3)
    trainer.step(*batch)
    trainer.checkpoint(folder)

    def handler(*_):
        try:
            trainer.checkpoint(folder)
            came.append("done")
        except RuntimeError as error:
            came.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(60):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-4 * number)
            trainer.step(*batch)
            trainer.checkpoint(folder)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    trainer.close()
    assert any("make the checkpoint between two steps" in x for x in came)
    with host.HostTrainer.restore(folder, of_one_row, tx, params) as trainer:
        assert trainer.steps == 61
        assert (trainer.params["a"][1] == -61).all()


@pytest.mark.parametrize("where", ["in a step", "in the thread of another run"])
def test_a_run_that_is_collected_elsewhere(where, monkeypatch):
    """It waits for nobody, and settles nothing: the next call does."""
    tx, params = osa.lazy(optax.sgd(1.0)), {"a": host.HostTable((3, 2))}
    trainer = host.HostTrainer(of_one_row, tx, params)
    batches = [(np.array([1]), np.zeros(3))] * 4
    values, closed = trainer.run(iter(batches)), []
    next(values)
    fetch = trainer._rows.fetch

    def collected(*args):
        is_worker = threading.current_thread() is not threading.main_thread()
        if not closed and is_worker == (where != "in a step"):
            closed.append(values.close())
        return fetch(*args)

    monkeypatch.setattr(trainer._rows, "fetch", collected)
    if where == "in a step":
        trainer.step(*batches[0])
        assert len(trainer.drawn) == 1
    else:
        list(trainer.run(batches[:3]))
    assert closed
    assert (
        trainer.steps
        == -trainer.params["a"][1, 0]
        == (2 if where == "in a step" else 4)
    )


@pytest.mark.parametrize("every", slow_but([EACH, 97], 97))
def test_a_run_with_checkpoints_that_is_interrupted_anywhere(every, tmp_path):
    """Each batch is trained once; a kill after the interrupt leaves a checkpoint."""
    tx, count = osa.lazy(optax.sgd(1.0)), 4
    folder, copy = tmp_path / "own", tmp_path / "copy"
    batches = [(np.array([2 * k, 2 * k + 1]), np.zeros(3)) for k in range(count)]
    folder.mkdir()

    def params_of(folder):
        return {"a": host.HostTable((12, 2), file=folder / "a.bin")}

    trainer = host.HostTrainer(of_one_row, tx, params_of(folder))
    list(trainer.run(batches))
    trainer.checkpoint(folder / "run")
    lines, seen = [0, 0], 0
    while len(lines) == 2:
        seen += every
        iterator, steps = iter(batches), trainer.steps
        with interrupted_at_line(seen, *OF_CHECKPOINTS) as lines:
            for number, _ in enumerate(trainer.run(iterator)):
                if number % 2:
                    trainer.checkpoint(folder / "run")
        where, drawn = lines[1:], trainer.drawn
        shutil.copytree(folder, copy)
        restore = copy / "run", of_one_row, tx, params_of(copy)
        with host.HostTrainer.restore(*restore) as other:
            assert steps <= other.steps <= trainer.steps, where
            trained = [2 * (k % count) + j for k in range(other.steps) for j in (0, 1)]
            rows = -np.bincount(trained, minlength=12).astype(np.float32)
            np.testing.assert_array_equal(other.params["a"][:, 0], rows, str(where))
        shutil.rmtree(copy)
        list(trainer.run(itertools.chain(drawn, iterator)))
        assert trainer.steps == steps + count, where
        rows = trainer.params["a"]
        np.testing.assert_array_equal(rows[:8], -trainer.steps // count, str(where))
        trainer.checkpoint(folder / "run")
    assert seen > 1000
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("every", slow_but([EACH, 149], 149))
def test_a_snapshot_that_is_interrupted_anywhere(every, tmp_path):
    """It is there as a whole, or it is not; then the next one is."""
    params = {"a": host.HostTable((12, 2)), "b": jnp.ones(3)}
    tx = osa.lazy(optax.sgd(1.0))
    trainer = host.HostTrainer(of_one_row, tx, params)
    trainer.step(np.array([1]), np.zeros(3))
    rows, lines, seen = np.array(trainer.params["a"]), [0, 0], 0
    while len(lines) == 2:
        seen += every
        folder = tmp_path / str(seen)
        with interrupted_at_line(seen, *OF_SNAPSHOTS) as lines:
            trainer.snapshot(folder)
        left = [x for x in tmp_path.iterdir() if x.name.endswith(".new")]
        # One may have been made, with the file that says who writes it.
        assert not any(x.stat().st_size for new in left for x in new.iterdir()), lines
        if not folder.exists():
            trainer.snapshot(folder)
        np.testing.assert_array_equal(host.Snapshot(folder, params).params["a"], rows)
        assert not [*tmp_path.glob("*.new")]
    assert seen > 250


@pytest.mark.slow
def test_a_close_that_is_interrupted_anywhere(tmp_path):
    """A second one gives the files back."""
    params = {"a": host.HostTable((3, 2), file=tmp_path / "a.bin")}
    lines, seen = [0, 0], 0
    while len(lines) == 2:
        seen += 1
        trainer = host.HostTrainer(of_one_row, osa.lazy(optax.sgd(1.0)), params)
        with interrupted_at_line(seen, _file, _host_rows, _ledger, _trainer) as lines:
            trainer.close()
        trainer.close()
        (tmp_path / "a.bin").rename(tmp_path / "before.bin")
        with (tmp_path / "before.bin").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert seen > 20


class Disk:
    """What a disk may have of journals: what was synced, and any of later writes."""

    def __init__(self, monkeypatch, folder, copies):
        self._synced, self._later, self._all = {}, [], {}
        self._folder, self._copies, self.images = folder, copies, []
        self._numbers = itertools.count()
        write_at, fsync = _journal.write_at, os.fsync

        def write(file, place, data):
            write_at(file, place, data)
            self._later.append(
                (str(file.name), place, bytes(memoryview(data).cast("B")))
            )
            self.fails()

        def sync(file):
            self.fails()
            fsync(file)
            name = str(getattr(file, "name", ""))
            for x in [x for x in self._later if x[0] == name]:
                self._later.remove(x)
                self._write(self._synced, x)

        monkeypatch.setattr(_journal, "write_at", write)
        monkeypatch.setattr(_journal.os, "fsync", sync)

    @staticmethod
    def _write(contents, later):
        name, place, data = later
        old = contents.get(name, b"").ljust(place, b"\0")
        contents[name] = old[:place] + data + old[place + len(data) :]

    def fails(self):
        """The machine does, now."""
        for some in itertools.product([False, True], repeat=len(self._later)):
            contents = {**self._synced}
            for later in itertools.compress(self._later, some):
                self._write(contents, later)
            copy = self._copies / str(next(self._numbers))
            shutil.copytree(self._folder, copy)
            for path in (copy / "run").glob("journal-*"):
                name = str(self._folder / "run" / path.name)
                path.write_bytes(contents.get(name, b""))
            self.images.append(copy)


@pytest.mark.parametrize("fsync", slow_but([False, True], False))
def test_a_machine_that_fails(fsync, tmp_path, monkeypatch):
    """Between any two writes or syncs; without `fsync` when a checkpoint was made."""
    folder, rows = tmp_path / "own", begin((ROWS, DIM))[0]
    folder.mkdir()

    def params(place):
        init = lambda first, last: rows[first:last]  # noqa: E731
        return {"table": host.HostTable(rows.shape, file=place / "t.bin", init=init)}

    def fun(params, ids):
        return jnp.sum(params["table"][ids] ** 2)

    disk = Disk(monkeypatch, folder, tmp_path)
    values = {}
    with host.HostTrainer(fun, TX, params(folder), fsync=fsync) as trainer:
        for number in range(4):
            trainer.step(np.arange(number, 3 * number + 2))
            if number != 2:
                if not fsync:
                    disk.images.clear()
                trainer.checkpoint(folder / "run")
                values[trainer.steps] = np.array(trainer.params["table"])
            disk.fails()
            if not fsync:
                break
    monkeypatch.undo()
    count = 0
    for image in disk.images:
        if (image / "run" / "checkpoint.npz").exists():
            with host.HostTrainer.restore(
                image / "run", fun, TX, params(image)
            ) as trainer:
                expected = values[trainer.steps]
                np.testing.assert_array_equal(trainer.params["table"], expected)
            count += 1
    assert count >= (20 if fsync else 1)


def test_an_interrupt_that_zipfile_replaces(tmp_path, monkeypatch):
    """What it raises instead is no interrupt; a caller waits for that."""

    def savez(*_, **__):
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("Can't close the ZIP file while there is an open handle")

    rows, w = begin()
    params = {"table": host.HostTable(rows.shape, init=lambda a, b: rows[a:b]), "w": w}
    with host.HostTrainer(loss, TX, params) as trainer:
        monkeypatch.setattr(_archive.np, "savez", savez)
        with pytest.raises(KeyboardInterrupt):
            trainer.checkpoint(tmp_path / "run")
        monkeypatch.undo()
        trainer.checkpoint(tmp_path / "run")
