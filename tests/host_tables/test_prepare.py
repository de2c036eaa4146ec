"""`prepare`: keys get rows for a step, and lose them if it never comes."""

import dataclasses
import functools
import gc
import itertools
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam._vocabulary import history, vocabulary
from optax_sparse_adam.host_tables import _host_rows, _pipeline, _prepare

from ..helpers.host_keys import by_key, in_memory, stream_of
from ..helpers.host_tables import (
    DIM,
    assert_trained_alike,
    begin,
    host_params,
    loss,
)
from ..helpers.support import (
    WEEKLY,
    assert_identical,
    ran,
    slow_but,
)
from ..helpers.system_calls import interrupted_at_line

TX = osa.sparse_adam(0.1)
OPTIMIZERS = {"sparse": TX, "exact": osa.exact_adamw(0.1)}
LAST = 12


def rows_of(vocab, step, keys, y):
    """As a user's `prepare`."""
    rows, fresh, _ = assignment = vocab.assign(keys, step)
    new = {"table": by_key(assignment.fresh_keys), "w": None}
    return host.BatchWithReset((rows, y), {"table": fresh, "w": None}, new)


class Run:
    """A trainer and its vocabulary, which is full soon."""

    def __init__(self, tx=TX, prepare=rows_of, restore=None, steps=0, **where):
        self.vocab = osa.Vocabulary(31)
        options = {"stateful": {"keys": self.vocab}}
        if prepare is not None:
            options["prepare"] = functools.partial(prepare, self.vocab)
        mesh = where.pop("mesh", None)
        args = loss, tx, host_params(*begin((31, DIM)), **where)
        if mesh is not None:
            options["mesh"] = mesh
        if restore is None:
            self.trainer = host.HostTrainer(*args, steps=steps, **options)
        else:
            self.trainer = host.HostTrainer.restore(restore, *args, **options)
        self.values = []

    def train(self, stream, stop=None):
        """Leaves it by `break`."""
        for value in self.trainer.run(stream):
            self.values.append(value)
            if self.trainer.steps == stop:
                break

    def goes_on(self):
        self.train(stream_of(self.trainer.steps, LAST))
        return self


@functools.cache
def trained(last=LAST, tx=TX):
    """In memory: parameters, state and values; and the arrays of the vocabulary."""
    rows, w = begin((31, DIM))
    vocab = osa.Vocabulary(31)
    params = jax.tree.map(jnp.array, {"table": rows, "w": w})
    return in_memory(tx, params, stream_of(0, last), vocab), vocab.arrays


def known(last, prepare=rows_of):
    """A vocabulary that has seen so many batches."""
    vocab = osa.Vocabulary(31)
    for step, batch in enumerate(stream_of(0, last)):
        prepare(vocab, step, *batch)
    return vocab.arrays


def assert_knows(run, steps):
    """The vocabulary has seen what was trained, and nothing else."""
    assert run.trainer.steps == steps
    assert_identical(run.vocab.arrays, known(steps))


def assert_done(run, tx=TX):
    expected, arrays = trained(LAST, tx)
    assert_trained_alike(run.trainer, run.values, expected)
    assert_identical(run.vocab.arrays, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([*OPTIMIZERS], "exact"))
@pytest.mark.parametrize("where", slow_but(["memory", "cold", "mesh"], "cold"))
def test_a_pipeline_left_and_gone_on_with(where, name, tmp_path):
    """To the bits of memory, with what was drawn or with another iterator."""
    tx, options = OPTIMIZERS[name], {}
    if where == "mesh":
        axes = (jax.sharding.AxisType.Auto,)
        options["mesh"] = jax.make_mesh((jax.device_count(),), ("x",), axes)
    elif where == "cold":
        options["file"] = tmp_path / "table.bin"
    run = Run(tx, **options)
    if where == "cold":
        run.trainer._rows.stores[0]._cold_for = 99  # so that six batches are drawn
    stream = stream_of(0, LAST)
    run.train(stream, stop=3)
    assert len(run.trainer.drawn) > (4 if where == "cold" else 0)
    assert all(isinstance(x, tuple) for x in run.trainer.drawn)
    assert_knows(run, 3)
    run.train(itertools.chain(run.trainer.drawn, stream), stop=7)
    assert_knows(run, 7)
    run.goes_on()
    if where == "mesh":  # sums of a mesh are in another order
        chex.assert_trees_all_close(run.values, trained(LAST, tx)[0][2], rtol=2e-5)
        assert_knows(run, LAST)
    else:
        assert_done(run, tx)
    run.trainer.close()


@pytest.mark.slow
def test_steps_between_the_values_of_a_run():
    """What was drawn gets the rows of a later step."""
    run, made = Run(), [*stream_of(0, LAST)]
    values = run.trainer.run(made[:3] + made[5:])
    run.values += [next(values), next(values), next(values)]
    run.values += [run.trainer.step(*made[3]), run.trainer.step(*made[4])]
    assert_knows(run, 5)
    run.values += values
    assert_done(run)


@pytest.mark.slow
def test_two_runs_beside_each_other():
    run, made = Run(), [*stream_of(0, LAST)]
    pair = run.trainer.run(made[::2]), run.trainer.run(made[1::2])
    run.values = [next(pair[k % 2]) for k in range(LAST)]
    assert_done(run)
    assert list(pair[0]) == list(pair[1]) == []


@pytest.mark.slow
def test_a_step_of_another_thread_while_a_batch_is_drawn():
    run, made = Run(), [*stream_of(0, LAST)]

    def drawn():
        for number, batch in enumerate(made[:4] + made[5:]):
            if number == 5:  # while it is drawn, four steps are done
                thread = threading.Thread(
                    target=lambda: between.append(run.trainer.step(*made[4]))
                )
                thread.start()
                thread.join()
            yield batch

    between = []
    values = [*run.trainer.run(drawn())]
    run.values = values[:4] + between + values[4:]
    assert_done(run)


class Stop(Exception):
    pass


def broken(at, error):
    for number, batch in enumerate(stream_of(0, LAST)):
        if number == at:
            raise error
        yield batch


def breaks(vocab, step, keys, y, *, at, early):
    if step == at[0] and early:
        raise Stop
    made = rows_of(vocab, step, keys, y)
    if step == at[0]:
        raise Stop
    return made


@pytest.mark.parametrize("at", slow_but([0, 1, 5], 5))
@pytest.mark.parametrize(
    "end",
    slow_but(
        ["iterator", "interrupt", "before", "after", "ids", "close", "collected"],
        *("after", "ids"),
    ),
)
def test_ends_of_a_run(end, at):
    """Whatever ends it, the vocabulary is that of the steps that were done."""
    where = [at]
    prepare = functools.partial(breaks, at=where, early=end == "before")
    run = Run(prepare=prepare if end in ("before", "after") else rows_of)
    stream = stream_of(0, LAST)
    if end in ("iterator", "interrupt"):
        stream = broken(at, OSError() if end == "iterator" else KeyboardInterrupt())
    if end == "ids":
        stream = ((x, y if k != at else y[:5]) for k, (x, y) in enumerate(stream))
    if end in ("close", "collected"):
        values = run.trainer.run(stream)
        run.values += itertools.islice(values, at)
        if end == "close":
            values.close()
        else:
            cycle = [values]
            cycle.append(cycle)
            del values, cycle
            gc.collect()
    else:
        with pytest.raises((OSError, KeyboardInterrupt, Stop, TypeError)):
            run.train(stream)
    where[0] = None
    # An iterator that ends by a KeyboardInterrupt may leave steps for another run.
    assert run.trainer.steps == at or end == "interrupt"
    assert_knows(run, run.trainer.steps)
    assert_done(run.goes_on())


SCRIPT = """
import gc, sys
from tests.host_tables.test_prepare import *
run, seen = Run(), []
def see(end):
    seen.append((end, run.trainer.steps))
    assert_knows(run, run.trainer.steps)
for _ in run.trainer.run(stream_of(0, 20)):
    if run.trainer.steps == 3:
        break
see("break")
values = run.trainer.run(stream_of(3, 20))
next(values)
values.close()
see("close")
values = run.trainer.run(stream_of(4, 20))
next(values)
values = None
see("dropped")
values = run.trainer.run(stream_of(5, 20))
next(values)
cycle = [values]
cycle.append(cycle)
values = cycle = None
def collect(vocab):
    gc.collect()
type(run.vocab).collect = collect  # as in the middle of a call of the package's
exec(compile("def find(v): v.collect()", osa.__file__, "exec"))
find(run.vocab)
assert run.vocab.last_step == 6
run.trainer.params
see("collected")
print(seen)
"""


def test_runs_that_are_collected_one_after_the_other(monkeypatch):
    """In calls of the package: the next one of the trainer takes back."""
    monkeypatch.setattr(_pipeline, "_is_left_by_user", lambda: False)
    run, made = Run(), [*stream_of(0, LAST)]
    pair = run.trainer.run(made), run.trainer.run(made[1:])
    run.values += [next(pair[0])]
    next(pair[1])
    run.trainer.step(*made[2])
    next(pair[0])
    for values in pair:
        values.close()
    assert run.vocab.last_step == 4
    assert run.trainer.state is not None
    assert run.vocab.last_step == 3


@pytest.mark.slow
def test_ends_of_a_run_in_a_script():
    """There is no frame of a function of the user's. What is collected in a call of
    the package waits for the next call of the trainer."""
    done = ran(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") == 4


def test_what_is_in_a_batch_and_no_array():
    """It is given on as it is: it may hold a lock."""
    lock, seen = threading.Lock(), []

    def prepare(vocab, step, x, y, held, numbers):
        seen.append((held, next(numbers)))
        return rows_of(vocab, step, x, y)

    run, numbers = Run(prepare=prepare), iter(range(99))
    run.train((*batch, lock, numbers) for batch in stream_of(0, LAST))
    assert_done(run)
    assert seen == [(lock, k) for k in range(LAST)]


@pytest.mark.parametrize("early", slow_but([True, False], False))
def test_a_step_that_raises_takes_its_keys_back(early):
    run, made = Run(), [*stream_of(0, LAST)]
    run.values += [run.trainer.step(*x) for x in made[:4]]
    before = run.vocab.arrays
    keys, y = made[4]
    with pytest.raises(TypeError, match=r"integers|broadcast"):
        # Before there are rows, and after them: labels that do not fit.
        run.trainer.step(*((0.5 * keys, y) if early else (keys, y[:5])))
    assert_identical(run.vocab.arrays, before)
    run.values += [run.trainer.step(*x) for x in made[4:]]
    assert_done(run)


def test_batches_that_are_not_tuples_and_what_prepare_returns():
    """One argument; a tuple, one argument or rows to begin."""
    seen = []

    def prepare(step, keys):
        seen.append((step, type(keys)))
        rows = vocab.assign(keys, step).rows
        return [rows, (rows,), host.BatchWithReset(rows, {"table": None}, params)][step]

    def fun(params, ids):
        return jnp.sum(params["table"][ids])

    vocab, params = osa.Vocabulary(9), {"table": host.HostTable((9, 2))}
    options = {"prepare": prepare, "stateful": {"keys": vocab}}
    with host.HostTrainer(fun, osa.lazy(optax.sgd(-1.0)), params, **options) as trainer:
        keys = np.array([2**40, 5])
        assert trainer.step(keys) == 0
        assert [*map(float, trainer.run([(keys,), keys]))] == [4.0, 8.0]
    assert seen == [(k, np.ndarray) for k in range(3)]
    with pytest.raises(TypeError, match="needs `prepare`, a function of"):
        host.HostTrainer(fun, TX, params, prepare=3)


@pytest.mark.parametrize("name", ["keys", "stream"])
def test_a_vocabulary_that_is_not_the_one_that_is_saved(name):
    """As where a cell of a notebook makes it again, and `prepare` reads a global."""

    def prepare(step, keys):
        rows, fresh, _ = vocab.assign(keys, step)
        values = np.zeros((len(fresh), 2), np.float32)
        return host.BatchWithReset(rows, {"table": fresh}, {"table": values})

    class Stream:
        def arrays_before(self, step):
            return {"step": np.asarray(step)}

        def restore(self, arrays):
            raise NotImplementedError

    def fun(params, ids):
        return jnp.sum(params["table"][ids])

    vocab, params = osa.Vocabulary(9), {"table": host.HostTable((9, 2))}
    stateful = {"keys": vocab} | ({"stream": Stream()} if name == "stream" else {})
    with host.HostTrainer(
        fun, TX, params, prepare=prepare, stateful=stateful
    ) as trainer:
        trainer.step(np.array([5, 7]))
        saved, vocab = vocab, osa.Vocabulary(9)
        with pytest.raises(ValueError, match=r"not in `stateful`.*made again"):
            trainer.step(np.array([5, 8]))
        vocab = saved
        trainer.step(np.array([5, 8]))
        assert trainer.steps == 2
    with host.HostTrainer(fun, TX, params, stateful=stateful) as trainer:
        vocab = osa.Vocabulary(9)  # by hand
        with pytest.raises(ValueError, match=r"not in `stateful`.*made again"):
            trainer.step(prepare(0, np.array([5, 8])))
    with host.HostTrainer(fun, TX, params, prepare=prepare) as trainer:
        vocab = osa.Vocabulary(9)  # which somebody else saves
        trainer.step(np.array([5, 7]))


def test_keywords_of_a_step_go_to_the_loss():
    def fun(params, ids, scale):
        return scale * jnp.sum(params["table"][ids])

    vocab, params = osa.Vocabulary(9), {"table": host.HostTable((9, 2))}
    trainer = host.HostTrainer(
        fun,
        osa.lazy(optax.sgd(-1.0)),
        params,
        prepare=lambda step, keys: vocab.assign(keys, step).rows,
        stateful={"keys": vocab},
    )
    assert [float(trainer.step(np.array([7]), scale=2.0)) for _ in range(2)] == [0, 8]


def twice(vocab, step, keys, y):
    """Two calls for one batch."""
    parts = [rows_of(vocab, step, x, y) for x in np.split(keys, 2)]
    rows = np.concatenate([x.batch[0] for x in parts])
    ids = np.concatenate([x.ids["table"] for x in parts])
    new = np.concatenate([x.rows["table"] for x in parts])
    # A key of the first call may have lost its row to one of the second.
    _, last = np.unique(ids[::-1], return_index=True)
    last = len(ids) - 1 - last
    table, values = {"table": ids[last], "w": None}, {"table": new[last], "w": None}
    return host.BatchWithReset((rows, y), table, values)


@pytest.mark.slow
def test_more_calls_ahead_than_undo_remembers(tmp_path):
    """Forty of them; a checkpoint in between, and all but five steps taken back.

    What is remembered is what is ahead, however many steps there are.
    """
    run = Run(prepare=twice, file=tmp_path / "table.bin")
    run.trainer._rows.stores[0]._cold_for = 99
    expected = []
    for value in run.trainer.run(stream_of(0, 40), ahead=19):
        run.values.append(value)
        if run.trainer.steps == 5:
            run.trainer.checkpoint(tmp_path / "run")
            break
    assert len(run.trainer.drawn) == 20
    expected = run.vocab.arrays
    run.trainer.close()
    again = Run(prepare=twice, file=tmp_path / "table.bin", restore=tmp_path / "run")
    assert_identical(again.vocab.arrays, expected)
    with again.trainer:
        again.train(stream_of(5, 10))
        assert len(again.vocab.history._calls) <= 8 + 2 * 2
    vocab = osa.Vocabulary(31)
    for step, (keys, _) in enumerate(stream_of(0, 10)):
        for part in np.split(keys, 2):
            vocab.assign(part, step)
    assert_identical(again.vocab.arrays, vocab.arrays)
    for _ in range(8):
        vocab.undo()
    with pytest.raises(RuntimeError, match="none left"):
        vocab.undo()


def test_keys_that_are_known_before(tmp_path):
    """Of the same step as the first batch, and in a checkpoint before it ends."""
    vocabs = [osa.Vocabulary(31) for _ in range(3)]
    for x in vocabs[:2]:
        x.assign([3, 4, 5], 0)
    params = host_params(*begin((31, DIM)), file=tmp_path / "table.bin")
    prepare = functools.partial(rows_of, vocabs[0])
    args = loss, TX, params
    with host.HostTrainer(
        *args, prepare=prepare, stateful={"keys": vocabs[0]}
    ) as trainer:
        values = trainer.run(stream_of(0, 4))
        next(values)
        trainer.checkpoint(tmp_path / "run")
        next(values)
    stateful = {"keys": vocabs[2]}
    host.HostTrainer.restore(tmp_path / "run", *args, stateful=stateful).close()
    rows_of(vocabs[1], 0, *next(stream_of(0, 1)))
    assert_identical(vocabs[2].arrays, vocabs[1].arrays)


def test_one_vocabulary_by_two_names_and_by_none():
    """It is taken back once; it forgets what the trainer needed, when that ends."""
    run = Run()
    rows, w = begin((31, DIM))
    options = {"prepare": functools.partial(rows_of, run.vocab)}
    options["stateful"] = {"user": run.vocab, "item": run.vocab}
    run.trainer = host.HostTrainer(loss, TX, host_params(rows, w), **options)
    run.train(stream_of(0, LAST), stop=4)
    assert_knows(run, 4)
    run.train(stream_of(4, LAST), stop=7)
    values = run.trainer.run(stream_of(7, LAST))
    next(values)
    run.trainer.close()
    assert_knows(run, 8)
    for step in range(20, 40):
        run.vocab.assign([step], step)
    assert len(run.vocab.history._calls) == 8


def test_a_stop_iteration_of_prepare_is_no_end_of_the_batches():
    weights = iter([1.0] * 5)
    run = Run(prepare=lambda vocab, n, x, y: rows_of(vocab, n, x, y * next(weights)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        run.train(stream_of(0, LAST))
    assert_knows(run, 5)
    run = Run(prepare=lambda vocab, *batch: None)
    with pytest.raises(TypeError, match="`prepare` returns what the loss takes besid"):
        run.train(stream_of(0, LAST))


def in_place(vocab, step, keys, y):
    """Writes to what it gets."""
    made = rows_of(vocab, step, keys.copy(), y.copy())
    keys *= 3
    y[:] = 0
    return made


class Refilled:
    """One buffer for the labels that it returns."""

    def __init__(self):
        self.labels = np.zeros(24, np.float32)

    def __call__(self, vocab, step, keys, y):
        self.labels[:] = y
        return rows_of(vocab, step, keys, self.labels)


class RefilledOfJax(Refilled):
    """Arrays of JAX, which may be the same memory."""

    def __call__(self, *args):
        made = super().__call__(*args)
        return dataclasses.replace(made, batch=tuple(map(jnp.asarray, made.batch)))


def of_torch(vocab, step, keys, y):
    return rows_of(vocab, step, keys.numpy(), y.numpy())


def refilled_tensors(first, last):
    torch = pytest.importorskip("torch")
    keys, labels = torch.zeros(24, dtype=torch.int64), torch.zeros(24)
    for x, y in stream_of(first, last):
        keys[:], labels[:] = torch.tensor(x), torch.tensor(y)
        yield keys, labels


WRITES = {
    "in place": in_place,
    "refilled": Refilled(),
    "of JAX": RefilledOfJax(),
    "tensors": of_torch,
}


@pytest.mark.parametrize("way", slow_but(WRITES, "in place"))
def test_arrays_that_are_written_to(way):
    """By `prepare`, or by the loader: what is drawn and prepared is copied."""
    run = Run(prepare=WRITES[way])
    made = refilled_tensors if way == "tensors" else stream_of
    run.train(made(0, LAST), stop=4)
    if way == "in place":
        assert_identical(run.trainer.drawn[0], next(stream_of(4, 5)))
    run.train(itertools.chain(run.trainer.drawn, made(5, LAST)))
    assert_done(run)


@pytest.mark.slow
def test_a_vocabulary_that_saves_more(tmp_path):
    """A subclass, by its own methods."""

    class More(osa.Vocabulary):
        def arrays_before(self, step):
            return super().arrays_before(step) | {"more": np.array(step)}

        def restore(self, arrays):
            self.more = int(arrays["more"])
            super().restore({k: x for k, x in arrays.items() if k != "more"})

    table = host_params(*begin((31, DIM)), file=tmp_path / "table.bin")
    args = loss, TX, table
    vocab = More(31)
    options = {"prepare": functools.partial(rows_of, vocab)}
    with host.HostTrainer(*args, stateful={"keys": vocab}, **options) as trainer:
        for _ in trainer.run(stream_of(0, LAST)):
            if trainer.steps == 5:
                trainer.checkpoint(tmp_path / "run")
    vocab = More(31)
    stateful = {"keys": vocab}
    host.HostTrainer.restore(tmp_path / "run", *args, stateful=stateful).close()
    assert vocab.more == 5
    assert_identical(vocab.arrays, known(5))


def assigned(vocab, first, last):
    """A loader that does what `prepare` should do."""
    for number, batch in enumerate(stream_of(first, last), first):
        yield rows_of(vocab, number, *batch)


REFUSED = r"stateful\['keys'\] has changed otherwise than by keys of the batch of st"


@pytest.mark.parametrize("has_prepare", slow_but([True, False], False))
def test_keys_that_the_iterator_of_a_run_assigns(has_prepare):
    """It is drawn ahead, and nobody would take them back."""

    def prepare(vocab, step, x):
        return x

    run = Run(prepare=prepare if has_prepare else None)
    with pytest.raises(ValueError, match=REFUSED):
        run.train(assigned(run.vocab, 0, 4))
    assert run.trainer.steps == 0


def by_undo(vocab, _):
    vocab.undo()


def by_two_undos(vocab, step):
    vocab.undo()
    vocab.undo()
    vocab.assign([1], step)


def by_restore(vocab, step):
    vocab.restore(vocab.arrays_before(step))


def by_a_call(vocab, step):
    vocab.assign([1], step)


@pytest.mark.parametrize("way", ["step", "run", "between"])
@pytest.mark.parametrize(
    "change",
    slow_but([by_undo, by_two_undos, by_restore, by_a_call], by_two_undos, by_a_call),
)
def test_other_changes_are_refused(change, way):
    """A call and an `undo` of it are none."""
    run, made = Run(), [*stream_of(0, LAST)]
    run.values += [run.trainer.step(*x) for x in made[:3]]
    if way == "between":
        values = run.trainer.run(made[3:])
        next(values)
        change(run.vocab, 4)
        with pytest.raises(ValueError, match=REFUSED):
            list(values)
        return
    run.vocab.assign([1], 3)
    run.vocab.undo()
    change(run.vocab, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            run.trainer.step(*made[3]) if way == "step" else list(
                run.trainer.run(made[3:])
            )
    if change is by_a_call:
        run.vocab.undo()
        run.goes_on()
        assert_done(run)


def test_prepare_takes_no_keys_back():
    def prepare(vocab, step, keys, y):
        if step == 2:
            vocab.undo()
        return rows_of(vocab, step, keys, y)

    run, made = Run(prepare=prepare), [*stream_of(0, 4)]
    with pytest.raises(ValueError, match="`prepare` has taken back what stateful"):
        list(run.trainer.run(made))
    assert run.trainer.steps == 2
    with pytest.raises(ValueError, match=REFUSED):
        run.trainer.step(*made[2])


def test_a_vocabulary_that_grows(tmp_path):
    """Between steps it is the same; where batches are drawn they are not taken back."""
    run, made = Run(), [*stream_of(0, LAST)]
    run.trainer.step(*made[0])
    run.vocab.grow(40)
    run.vocab.grow(41)
    with pytest.raises(IndexError, match="looks up row 3"):  # the table has not grown
        list(run.trainer.run(made[1:]))
    run = Run()
    values = run.trainer.run(made)
    next(values)
    run.vocab.grow(40)
    with pytest.raises(ValueError, match="does not know what it was before step 1"):
        run.trainer.checkpoint(tmp_path / "run")


@pytest.mark.parametrize("rows", slow_but([rows_of, twice], twice))
def test_keys_of_steps_by_hand(rows, tmp_path):
    """Without `prepare`: right before a step, by its number; taken back by `undo`."""
    calls, made = 1 + (rows is twice), [*stream_of(0, LAST)]
    run = Run(prepare=None, file=tmp_path / "table.bin")
    step = run.trainer.step
    for number, batch in enumerate(made[:6]):
        if number == 4:
            rows(run.vocab, number, *made[7])  # a batch that is not trained
            for _ in range(calls):
                run.vocab.undo()
        step(rows(run.vocab, number, *batch))
    prepared = rows(run.vocab, 6, *made[6])
    run.trainer.checkpoint(tmp_path / "run")  # without those
    for _ in range(calls + 1):  # once too often
        run.vocab.undo()
    with pytest.raises(ValueError, match=REFUSED):
        step(prepared)
    run.vocab.assign([1], 6)
    with pytest.raises(ValueError, match=REFUSED):
        step(prepared)
    run.trainer.close()
    again = Run(prepare=None, file=tmp_path / "table.bin", restore=tmp_path / "run")
    assert_identical(again.vocab.arrays, known(6, rows))
    with again.trainer:
        rows(again.vocab, 7, *made[6])  # by another number
        with pytest.raises(ValueError, match=REFUSED):
            again.trainer.step(prepared)
        for _ in range(calls):
            again.vocab.undo()
        again.trainer.step(rows(again.vocab, 6, *made[6]))


EACH = 1 if WEEKLY else 7


# Those of `one_writer` are tried in tests/vocabulary/test_interrupts.py.
def test_many_calls_by_hand_for_one_step():
    """One for each feature: more than `undo` takes back."""
    run, y = Run(prepare=None), np.ones(24, np.float32)
    for step in range(3):
        rows = [run.vocab.assign([step + k], step).rows for k in range(24)]
        run.trainer.step(np.concatenate(rows), y)


MODULES = _pipeline, _prepare, _host_rows, vocabulary, history


@pytest.mark.parametrize("every", slow_but([EACH, 83], 83))
@pytest.mark.parametrize("way", slow_but(["run", "step"], "run"))
def test_interrupts(way, every):
    """At any line: keys are of the steps that are done, after the next call at latest.

    As the trainer and the vocabulary go on, one run does for all lines.
    """
    run, made = Run(), [*stream_of(0, 5)]
    oracle, lines, seen, at = osa.Vocabulary(31), [0, 0], 0, 0
    run.train(made)
    while len(lines) == 2:
        before, iterator = run.trainer.steps, iter(made)
        seen += every
        with interrupted_at_line(seen, *MODULES) as lines:
            if way == "run":
                for _ in run.trainer.run(iterator):
                    pass
            else:
                for batch in iterator:
                    run.trainer.step(*batch)
        done = run.trainer.steps - before
        run.train(made[done:])
        for step in range(at, run.trainer.steps):
            oracle.assign(made[step % 5][0], step)
        at = run.trainer.steps
        assert at == before + 5, lines[1:]
        assert_identical(run.vocab.arrays, oracle.arrays)
    assert seen > 500
