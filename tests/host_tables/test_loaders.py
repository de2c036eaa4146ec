"""Batches of `run`: arrays that are refilled, what raises, who waits for whom."""

import _thread
import contextlib
import itertools
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _access, _pipeline, _worker
from optax_sparse_adam.host_tables._pipeline import Pipeline
from optax_sparse_adam.host_tables._store import Memory

from ..helpers.host_tables import (
    ROWS,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_identical, need_devices, ran, slow_but
from ..helpers.system_calls import interrupted_at_line

TX = osa.sparse_adam(1e-2)


def new_trainer(**where):
    return host.HostTrainer(loss, TX, host_params(*begin(), **where))


@pytest.fixture(scope="module")
def expected():
    rows, w = begin()
    return train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 6))


def refilled(first, last, what):
    """Batches by one array, as of `np.load(..., out)`, shared memory, a C++ loader."""
    shared = [np.zeros_like(x) for x in next(batches(0, 1))]
    for batch in batches(first, last):
        for own, x in zip(shared, batch, strict=True):
            own[:] = x
        ids, y = shared
        if what == "labels alone":
            ids = ids.copy()
        if what == "arrays of JAX":  # which may be the same memory
            ids, y = jnp.asarray(ids), jnp.asarray(y)
        yield ids, y
        shared[0][:], shared[1][:] = 0, 99


CASES = ["ids and labels", "labels alone", "arrays of JAX", "a file", "a cold file"]


@pytest.mark.parametrize("what", slow_but(CASES, "ids and labels"))
def test_a_loader_that_refills_its_arrays(what, tmp_path, expected, monkeypatch):
    where = {"file": tmp_path / "x"} if "file" in what else {}
    with new_trainer(**where) as trainer:
        if what == "a cold file":
            monkeypatch.setattr(type(trainer._rows), "looks_ahead", True)
        values = list(trainer.run(refilled(0, 6, what), ahead=2))
        assert_trained_alike(trainer, values, expected)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_a_loader_that_donates_what_it_has_given(devices):
    """As one that draws batches on the device; over a mesh, too."""
    need_devices(devices)
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("x")) if devices > 1 else None
    following = jax.jit(
        lambda ids, y: ((ids * 7 + 3) % ROWS, -y), donate_argnums=(0, 1)
    )

    def drawn(is_copied):
        batch = jax.tree.map(jnp.array, jax.device_put(next(batches(0, 1)), split))
        for _ in range(4):
            yield batch
            batch = following(*(jax.tree.map(jnp.copy, batch) if is_copied else batch))

    values = []
    for is_copied in (True, False):
        parts = loss, TX, host_params(*begin())
        mesh_of_trainer = {"mesh": mesh} if devices > 1 else {}
        with host.HostTrainer(*parts, **mesh_of_trainer) as trainer:
            values.append([*map(float, trainer.run(drawn(is_copied)))])
    assert values[0] == values[1]


def test_no_batch_is_lost_where_the_ids_of_the_next_one_raise(expected):
    """What is wrong with a batch is raised when all steps before are done."""
    trainer, (good, next_one) = new_trainer(), batches(0, 2)
    for k, wrong in enumerate([np.int64(2**32 + 5), "shape"]):
        ids = np.array(next_one[0], np.int64)
        ids[3] = 2**32 + 5
        bad = (ids, next_one[1]) if wrong != "shape" else (next_one[0][:5], next_one[1])
        run = trainer.run([good if k == 0 else next_one, bad])
        assert np.array_equal(next(run), expected[2][k])
        assert trainer.steps == k + 1
        with pytest.raises((IndexError, TypeError)):
            next(run)
    values = [*expected[2][:2], *trainer.run(batches(2, 6))]
    assert_trained_alike(trainer, values, expected)


def test_an_interrupt_while_run_waits_for_another_thread(request, expected):
    """The trainer can be used, and closed, as before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    trainer, has_lock = new_trainer(), threading.Event()

    def hold():
        with trainer._rows.access.alone():
            has_lock.set()
            time.sleep(0.3)
            _thread.interrupt_main()
            time.sleep(0.3)

    def drawn():
        for number, batch in enumerate(batches(0, 6)):
            if number == 3:
                threading.Thread(target=hold).start()
                has_lock.wait()
            yield batch

    run, values = trainer.run(drawn()), []
    with pytest.raises(KeyboardInterrupt):
        values.extend(run)
    done = trainer.steps
    assert done in (2, 3)
    values = [trainer.step(*batch) for batch in batches(done, 6)]
    assert_trained_alike(trainer, [*expected[2][:done], *values], expected)
    trainer.close()


@pytest.mark.parametrize("which", slow_but([1, 2], 2))
def test_an_interrupt_before_and_after_a_batch_is_drawn(which, monkeypatch, expected):
    """The trainer does not believe for ever that batches are being drawn."""
    trainer, draws, seen = new_trainer(), _access.Access.draws, []

    def interrupted(access, code):
        seen.append(1)
        if len(seen) == 4 + which:  # of the third batch
            if which == 1:  # it has begun
                draws(access, code)
            raise KeyboardInterrupt
        draws(access, code)

    monkeypatch.setattr(_access.Access, "draws", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(trainer.run(batches(0, 6)))
    done = trainer.steps
    values = [trainer.step(*batch) for batch in batches(done, 6)]
    assert_trained_alike(trainer, [*expected[2][:done], *values], expected)
    trainer.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_run_that_ends_before_a_batch_is_drawn(error, expected):
    """As where the workers of a loader start; drawn are no batches of a run before."""

    class Loader:
        def __iter__(self):
            raise error

    trainer, iterator = new_trainer(), batches(0, 6)
    values = [next(trainer.run(iterator))]
    assert len(trainer.drawn) == 1
    values.append(trainer.step(*trainer.drawn[0]))
    with pytest.raises(error):
        list(trainer.run(Loader()))
    assert trainer.drawn == []
    while trainer.steps < 6:  # each of these runs is left again
        iterator = itertools.chain(trainer.drawn, iterator)
        values.append(next(trainer.run(iterator)))
    assert_trained_alike(trainer, values, expected)


@pytest.mark.slow
def test_a_step_of_another_thread_while_a_batch_is_drawn():
    """It comes before the drawn one, and neither is refused nor forgotten."""
    trainer, order = new_trainer(), [0, 1, 2, 9, 3, 4]

    def drawn():
        for number, batch in enumerate(batches(0, 5)):
            if number == 4:  # while it is drawn, three steps are done
                (extra,) = batches(9, 10)
                thread = threading.Thread(target=trainer.step, args=extra)
                thread.start()
                thread.join()
            yield batch

    values = list(trainer.run(drawn()))
    rows, w = begin()
    made = [next(batches(k, k + 1)) for k in order]
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, made)
    assert_trained_alike(trainer, values, (*known[:2], known[2][:3] + known[2][4:]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])
def test_a_step_of_another_thread_where_a_batch_has_raised(number, monkeypatch):
    """The batch is left, and is not taken for the one that was trained since."""

    def fun(params, ids, y):
        return loss(params, ids + (0 * params["w"][0, 0]).astype(int), y)

    trainer = host.HostTrainer(fun, TX, host_params(*begin()))
    made = [*batches(0, 4)]
    right, made[number][0][3] = made[number][0].copy(), ROWS
    iterator, raised = iter(made), []

    class Worker(_worker.Worker):
        def end(self, **how):
            if not raised:
                raised.append(trainer.steps)
                trainer.step(*next(batches(9, 10)))
            super().end(**how)

    monkeypatch.setattr(_pipeline, "Worker", Worker)
    with pytest.raises(IndexError):
        list(trainer.run(iterator))
    assert raised == [number]
    left = trainer.drawn
    assert_identical(left[0], made[number])
    left[0][0][:] = right
    list(trainer.run(itertools.chain(left, iterator)))
    assert trainer.steps == 1 + len(made)


@pytest.mark.slow
def test_ids_of_some_batches_alone_depend_on_parameters():
    """Those of a later step do not exist before the one in front of it."""

    def fun(params, ids, y):
        if len(ids) > 20:
            ids = (ids + jnp.argmax(params["w"][:, 0])) % ROWS
            ids = ids + (params["w"].sum() * 1000).astype(int) % 7
        rows = params["table"][ids % ROWS]
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    rows, w = begin()
    tx = osa.sparse_adam(0.3)
    made = [next(batches(k, k + 1, ids=(48, 7, 7, 48, 48, 7)[k])) for k in range(6)]
    expected = train_in_memory(fun, tx, {"table": rows, "w": w}, made)
    trainer = host.HostTrainer(fun, tx, host_params(rows, w))
    assert_trained_alike(trainer, list(trainer.run(made)), expected)


def test_interrupts_inside_of_locks(expected):
    """None comes inside of locks in Python, which it would leave taken for ever."""
    trainer, seen = new_trainer(), set()
    folder = _worker.__file__.rpartition("/")[0]

    def profile(frame, event, _):
        code, caller = frame.f_code, frame.f_back
        of = code.co_filename.rpartition("/")[2]
        is_called_here = caller and caller.f_code.co_filename.startswith(folder)
        if of in ("threading.py", "_base.py", "thread.py") and is_called_here:
            seen.add(code.co_qualname)

    sys.setprofile(profile)
    try:
        values = list(trainer.run(batches(0, 6)))
    finally:
        sys.setprofile(None)
    assert seen <= {"Condition.notify"}  # which takes none
    assert_trained_alike(trainer, values, expected)


def test_what_the_thread_raises_is_raised_here():
    worker = _worker.Worker()
    job, after = worker.submit(int, "no"), worker.submit(int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        job.result()
    after._told.acquire()  # a word that an interrupt has lost
    assert after.result() == 7
    worker.end()
    worker.end()


def test_jobs_that_were_interrupted_while_they_were_given():
    """Whoever waits for them finds the thread idle, and waits for no other one."""

    def beside(number):
        at_work.append(number)
        time.sleep(1e-3)
        done.append(number)

    for seen in itertools.count(1):
        worker, at_work, done = _worker.Worker(), [], []
        with interrupted_at_line(seen, _worker) as lines:
            for number in range(2):
                worker.submit(beside, number)
        for _ in range(2):
            worker.wait()
            assert at_work == done == [*range(len(done))]
        worker.end(waits=False)
        worker.wait()
        worker.end()
        if len(lines) == 1:
            break
    assert done == [0, 1]
    assert seen > 20


@pytest.mark.parametrize("number", range(3))
def test_programs_that_are_interrupted_when_they_begin(number):
    """While JAX lowers them: those of ids, of rows that begin again, and the step."""
    trainer, seen = new_trainer(), []

    def listener(event, _, **__):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            seen.append(event)
            if len(seen) == number + 1:
                raise KeyboardInterrupt

    rows = begin()[0]
    ids, new = {"table": np.arange(2), "w": None}, {"table": rows[:2], "w": None}
    given = [host.BatchWithReset(batch, ids, new) for batch in batches(0, 8)]
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(trainer.run(given[:4]))
        left = [*given[trainer.steps : 4]]
        list(trainer.run(left))
        seen.append("from here on")
        list(trainer.run(given[4:]))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert trainer.steps == 8
    assert seen[-1] == "from here on"


@pytest.mark.parametrize("verb", ["reset_rows", "evaluate"])
def test_verbs_that_are_interrupted_when_they_begin(verb):
    """Of each shape that they are first called with, as above."""
    lowered, number = [], [0]

    def listener(event, _, **__):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            lowered.append(event)
            if len(lowered) == number[0]:
                raise KeyboardInterrupt

    rows, _ = begin()
    with new_trainer() as trainer:
        predict = trainer.evaluate(lambda params, ids: params["table"][ids])

        def call(count):
            ids = np.arange(count)
            if verb == "evaluate":
                return np.asarray(predict(ids))
            trainer.reset_rows(
                {"table": ids, "w": None}, {"table": 2 * rows[ids], "w": None}
            )
            return trainer.params["table"][ids] / 2

        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            for count in (5, 100):
                for place in (1, 2):
                    number[0] = len(lowered) + place
                    with contextlib.suppress(KeyboardInterrupt):
                        call(count)
                number[0] = 0
                call(count)
                before = len(lowered)
                for _ in range(3):
                    assert_identical(call(count), rows[:count])
                assert len(lowered) == before
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)


AT_THE_END = """
import sys, threading, numpy as np
import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from tests.helpers.host_tables import *
def train():
    threading.main_thread().join()
    trainer = host.HostTrainer(loss, osa.sparse_adam(1e-2), host_params(*begin()))
    print(len([*trainer.run(batches(0, 3))]))
    trainer.close()
threading.Thread(target=train).start()
"""


@pytest.mark.slow
def test_a_run_in_a_thread_after_the_main_thread_has_ended():
    done = ran(AT_THE_END)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "3\n")


LEFT = """
import time
import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from tests.helpers.host_tables import *
trainer = host.HostTrainer(loss, osa.sparse_adam(1e-2), host_params(*begin()))
write = trainer._rows.write
def slowly(results):
    print("begins", flush=True)
    time.sleep(0.5)
    write(results)
    print("ends", flush=True)
trainer._rows.write = slowly
for _ in trainer.run(batches(0, 9)):
    if trainer.steps == 3:
        break
"""


@pytest.mark.slow
def test_a_run_that_was_left_when_the_process_ends():
    """What its thread has begun is done: Python would end it wherever it is."""
    done = ran(LEFT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("begins") == done.stdout.count("ends") > 2


OPEN = """
import sys, numpy as np
import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from tests.helpers.host_tables import *
trainer = host.HostTrainer(loss, osa.sparse_adam(1e-2), host_params(*begin(),
    file=sys.argv[1]))
run = trainer.run(batches(0, 9))
next(run), next(run)
"""


@pytest.mark.slow
def test_a_run_that_is_open_when_the_process_ends(tmp_path):
    done = ran(OPEN, tmp_path / "table.bin")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_rows_that_are_written_beside_the_step_are_there_between_two_values(
    monkeypatch,
):
    """For whoever reads them there, however long the thread takes."""
    trainer, seen = new_trainer(), []
    put = Memory.put_fields
    monkeypatch.setattr(
        Memory,
        "put_fields",
        lambda *args: (time.sleep(0.01), put(*args), seen.append(1)),
    )
    run = trainer.run(batches(0, 4))
    for k in range(1, 5):
        next(run)
        assert int(trainer.state.count) == k
        assert len(seen) == k


def test_a_batch_is_drawn_while_rows_are_written_and_read(monkeypatch, expected):
    """So a vocabulary that assigns in the loader has the time of the thread, too."""
    drawn, changed, seen = [], threading.Condition(), []
    beside = Pipeline._beside

    def waits(self, *args):
        with changed:
            wanted = min(6, len(seen) + 3)  # this step, the next one, one more
            seen.append(changed.wait_for(lambda: len(drawn) >= wanted, timeout=5))
        return beside(self, *args)

    def loader():
        for batch in batches(0, 6):
            with changed:
                drawn.append(batch)
                changed.notify_all()
            yield batch

    monkeypatch.setattr(Pipeline, "_beside", waits)
    trainer = new_trainer()
    values = [*trainer.run(loader())]
    assert seen == [True] * 6
    assert_trained_alike(trainer, values, expected)


def test_tensors_of_another_library_are_refused():
    """torch itself is not needed to know one."""

    class Tensor:
        detach = None

    rows, w = begin()
    batch = Tensor(), np.ones(3, np.float32)
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(rows, w)) as trainer:
        uses = trainer.step, lambda *x: [*trainer.run([x])], trainer.evaluate(loss)
        for use in uses:
            with pytest.raises(TypeError, match=r"Tensor; HostTrainer .*x\.numpy\(\)"):
                use(*batch)
        for own in (Tensor(), rows[:3]), (np.arange(3), Tensor()):
            ids, new = ({"table": x, "w": None} for x in own)
            with pytest.raises(TypeError, match=r"reset_rows takes .*x\.numpy\(\)"):
                trainer.reset_rows(ids, new)


def test_masked_arrays_are_refused():
    """NumPy takes what is masked for values, where JAX refuses it."""
    (rows, w), words = begin(), "takes plain arrays, got a masked one"
    batch = np.ma.array([1, 2, 3], mask=[0, 1, 0]), np.ones(3, np.float32)
    own, tx = host_params(rows, w), osa.sparse_adam(0.1)
    ids, new = {"table": batch[0], "w": None}, {"table": rows[:3], "w": None}
    with host.HostTrainer(loss, tx, own) as trainer:
        of_reset = host.BatchWithReset((np.arange(3), batch[1]), ids, new)
        for use in (
            lambda: trainer.step(*batch),
            lambda: [*trainer.run([batch])],
            lambda: trainer.evaluate(loss)(*batch),
            lambda: [*trainer.run([of_reset])],
            lambda: trainer.reset_rows(ids, new),
            lambda: host.HostTrainer(loss, tx, host_params(np.ma.array(rows), w)),
            lambda: host.HostTrainer(
                loss, tx, own, state=jax.tree.map(np.ma.array, trainer.state)
            ),
        ):
            with pytest.raises(TypeError, match=words):
                use()
        assert np.array_equal(trainer.params["table"], rows)
        for row in (2**31 - 1, 2**31 + 3, 2**32 - 1):  # the last two negative for JAX
            with pytest.raises(IndexError, match=f"Batch 0 looks up row {row} of"):
                trainer.step(np.array([row, 1, 2], np.uint32), batch[1])
