"""One checkpoint of a trainer and its vocabularies: of one step, or refused."""

import collections
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import DIM, batches, begin, host_params, loss
from ..helpers.support import assert_identical, slow_but

TX = osa.sparse_adam(0.1)


def stream(vocab, first, last):
    for number, (keys, y) in enumerate(batches(first, last, 2**60, 24), first):
        keys = keys.astype(np.int64) % 60 * 2**40
        rows, fresh, _ = vocab.assign(keys, number)
        new = {"table": np.ones((len(fresh), DIM), np.float32), "w": None}
        yield host.BatchWithReset((rows, y), {"table": fresh, "w": None}, new)


class Losses:
    """What a user counts, by step."""

    def __init__(self):
        self.values = []

    def arrays_before(self, step):
        return {"values": np.array(self.values[:step], np.float32)}

    def restore(self, arrays):
        self.values = [*map(float, arrays["values"])]


def trainer_of(folder, stateful, restore=None):
    rows, w = begin((31, DIM))
    params = host_params(rows, w, file=folder / "table.bin")
    if restore is None:
        return host.HostTrainer(loss, TX, params, stateful=stateful)
    return host.HostTrainer.restore(restore, loss, TX, params, stateful=stateful)


@pytest.mark.parametrize("ahead", slow_but(["warm", "cold"], "warm"))
def test_a_checkpoint_in_a_pipeline_is_of_one_step(ahead, tmp_path):
    """The loader has assigned ahead: two batches, or six where rows come from a disk.

    Rows and keys go on as those of a vocabulary that has seen what was trained.
    """
    vocab, losses, other = osa.Vocabulary(31), Losses(), osa.Vocabulary(31)
    stateful = {"keys": vocab, "losses": losses}
    with trainer_of(tmp_path, stateful) as trainer:
        for value in trainer.run(stream(vocab, 0, 14)):
            losses.values.append(float(value))
            if ahead == "cold":
                trainer._rows.stores[0]._cold_for = 9
            if trainer.steps == 9:
                trainer.checkpoint(tmp_path / "run")
        whole = [np.array(trainer.params["table"]), vocab.arrays, losses.values]
    assert [*stream(other, 0, 9)]
    again, losses = osa.Vocabulary(31), Losses()
    stateful = {"losses": losses, "keys": again}
    with trainer_of(tmp_path, stateful, tmp_path / "run") as trainer:
        assert trainer.steps == len(losses.values) == 9
        assert_identical(again.arrays, other.arrays)
        for value in trainer.run(stream(again, 9, 14)):
            losses.values.append(float(value))
        assert_identical([trainer.params["table"], again.arrays, losses.values], whole)


def test_what_is_of_another_step_is_refused(tmp_path):
    """And the last checkpoint stays as it was."""
    vocab = osa.Vocabulary(100)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        trainer.checkpoint(tmp_path / "run")
        saved = (tmp_path / "run" / "checkpoint.npz").read_bytes()
        trainer.step(np.arange(3), np.ones(3, np.float32))
        vocab.assign([5], 7)
        with pytest.raises(ValueError, match="last call of all had the step 7"):
            trainer.checkpoint(tmp_path / "run")
        vocab.undo()
        for number in range(10):  # more than can be taken back
            vocab.assign([number], number)
        with pytest.raises(ValueError, match="at most 8 calls ahead"):
            trainer.checkpoint(tmp_path / "run")
        assert (tmp_path / "run" / "checkpoint.npz").read_bytes() == saved
        trainer.step(np.arange(3), np.ones(3, np.float32))
        trainer.checkpoint(tmp_path / "run")
    words = r"made with stateful=\['keys'\], and here are "
    for names in ([], ["keys", "more"], ["other"]):
        stateful = {name: osa.Vocabulary(100) for name in names}
        with pytest.raises(ValueError, match=words):
            trainer_of(tmp_path, stateful, tmp_path / "run")
    with pytest.raises(ValueError, match="not larger than the vocabulary's"):
        trainer_of(tmp_path, {"keys": osa.Vocabulary(50)}, tmp_path / "run")
    again = osa.Vocabulary(100)
    trainer_of(tmp_path, {"keys": again}, tmp_path / "run").close()
    assert again.find(np.arange(10)).tolist() == [1, 2, *[0] * 8]


@pytest.mark.parametrize(
    "tx",
    [TX, pytest.param(osa.exact_adam(0.1), marks=pytest.mark.slow)],
    ids=["sparse", "exact"],
)
def test_keys_that_are_known_before_the_training(tx, tmp_path):
    """Those of step 0, of a trainer that counts from 1: in a checkpoint, a snapshot."""
    vocab, again, served = osa.Vocabulary(31), osa.Vocabulary(31), osa.Vocabulary(31)
    vocab.assign(["to", "be", "or"], 0)
    rows, w = begin((31, DIM))

    def params():
        return host_params(rows, w, file=tmp_path / "table.bin")

    with host.HostTrainer(loss, tx, params(), stateful={"keys": vocab}) as trainer:
        with pytest.raises(ValueError, match=r"HostTrainer\(\.\.\., steps=1\)"):
            trainer.checkpoint(tmp_path / "run")
        with pytest.raises(ValueError, match="cannot tell keys that had rows before"):
            trainer.snapshot(tmp_path / "served")
    (tmp_path / "table.bin").unlink()
    stateful = {"keys": vocab}
    with host.HostTrainer(loss, tx, params(), steps=1, stateful=stateful) as trainer:
        trainer.checkpoint(tmp_path / "run")
        trainer.snapshot(tmp_path / "served")
        found = vocab.assign(["not", "to"], trainer.steps).rows
        trainer.step(found, np.ones(2, np.float32))
        whole = np.array(trainer.params["table"])
    stateful = {"keys": again}
    args = (tmp_path / "run", loss, tx, params())
    with host.HostTrainer.restore(*args, stateful=stateful) as trainer:
        assert again.find(["to", "be", "or"]).tolist() == [1, 2, 3]
        assert again.assign(["not", "to"], trainer.steps).rows.tolist() == [*found]
        trainer.step(found, np.ones(2, np.float32))
        assert_identical(trainer.params["table"], whole)
        trainer.checkpoint(tmp_path / "run")
    host.Snapshot(tmp_path / "served", params(), stateful={"keys": served})
    assert served.find(["to", "be", "or"]).tolist() == [1, 2, 3]
    params = {"table": host.HostTable((31, DIM)), "w": w}
    new = host.HostTrainer(loss, tx, params, stateful=stateful)
    with new, pytest.raises(ValueError, match=r"HostTrainer\(\.\.\., steps=2\)"):
        new.checkpoint(tmp_path / "other")


@pytest.mark.slow
def test_a_table_and_its_vocabulary_grow(tmp_path):
    """Into a new trainer, whose steps go on as those of the keys do."""
    vocab = osa.Vocabulary(31)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        assert len([*trainer.run(stream(vocab, 0, 5))]) == 5
        old, state, steps = trainer.params, trainer.state, trainer.steps
        old = {name: np.array(x) for name, x in old.items()}
    vocab.grow(61)

    def init(first, last):
        rows = np.zeros((last - first, DIM), np.float32)
        there = old["table"][first:last]
        rows[: len(there)] = there
        return rows

    table = host.HostTable((61, DIM), file=tmp_path / "larger", init=init)
    args, stateful = (loss, TX, {"table": table, "w": old["w"]}), {"keys": vocab}
    new = host.HostTrainer(*args, state=state, steps=steps, stateful=stateful)
    with new as trainer:
        for _ in trainer.run(stream(vocab, 5, 12)):
            if trainer.steps == 9:
                trainer.checkpoint(tmp_path / "run")
        whole = [np.array(trainer.params["table"]), vocab.arrays]
    again = osa.Vocabulary(61)
    restored = host.HostTrainer.restore(
        tmp_path / "run", *args, stateful={"keys": again}
    )
    with restored as trainer:
        assert trainer.steps == 9
        assert len([*trainer.run(stream(again, 9, 12))]) == 3
        assert_identical([trainer.params["table"], again.arrays], whole)
    with pytest.raises(ValueError, match=r"arrays_before\(0\) needs"):
        host.HostTrainer(
            *(loss, TX, {"table": host.HostTable((61, DIM)), "w": old["w"]}),
            state=state,
            stateful=stateful,
        ).checkpoint(tmp_path / "other")


def test_what_has_no_state_is_refused(tmp_path):
    """When it is given; a vocabulary without keys is false, and is not nothing."""
    params = host_params(*begin((31, DIM)))
    makers = [
        lambda x: host.HostTrainer(loss, TX, params, stateful=x),
        lambda x: host.HostTrainer.restore(tmp_path, loss, TX, params, stateful=x),
        lambda x: host.Snapshot(tmp_path, params, stateful=x),
    ]
    names = "HostTrainer", r"HostTrainer\.restore", "Snapshot"
    for name, make in zip(names, makers, strict=True):
        for x in (osa.Vocabulary(9), {1: Losses()}, [Losses()]):
            with pytest.raises(TypeError, match=f"{name} needs what is .* by name, a"):
                make(x)
        with pytest.raises(TypeError, match=f"{name} .* methods .* got 3 of int for"):
            make({"a": 3})
    with pytest.raises(ValueError, match=r"a count of steps, got 2\.0"):
        host.HostTrainer(loss, TX, params, steps=2.0)
    for budget in ("2GB", float("nan"), 0):
        with pytest.raises(ValueError, match="a number of bytes, as budget=2e9, got"):
            host.HostTrainer(loss, TX, params, budget=budget)
    with host.HostTrainer(loss, TX, params) as trainer:
        for ahead in (None, "4", -1, 2.0):
            with pytest.raises(ValueError, match="`ahead`, a number of batches"):
                trainer.run([], ahead=ahead)


@pytest.mark.parametrize("dtype", [object, [("a", "<i4")]])
def test_a_checkpoint_holds_numbers_only(dtype, tmp_path):
    """Not what could be saved and not be read again."""

    class Others(Losses):
        def arrays_before(self, step):
            return {"rows": np.zeros(2, dtype)}

    words = r"rows of stateful\['others'\]"
    with (
        trainer_of(tmp_path, {"others": Others()}) as trainer,
        pytest.raises(TypeError, match=words),
    ):
        trainer.checkpoint(tmp_path / "run")


def test_arrays_of_all_types_come_back(tmp_path):
    some = {
        "number": np.asarray(7),
        "half": np.float64(0.5),
        "none": np.zeros((0, 3)),
        "flag": np.array([True]),
        "swapped": np.array(5, ">i4"),
        "bfloat16": np.ones(2, jnp.bfloat16),
    }

    class Some:
        def arrays_before(self, step):
            return some

        def restore(self, arrays):
            self.arrays = arrays

    with trainer_of(tmp_path, {"some": Some()}) as trainer:
        trainer.checkpoint(tmp_path / "run")
    again = Some()
    trainer_of(tmp_path, {"some": again}, tmp_path / "run").close()
    assert {k: x.dtype for k, x in again.arrays.items()} == {
        k: x.dtype for k, x in some.items()
    }
    assert_identical(again.arrays, some)


class Norm:
    """What is computed of the rows when it is saved."""

    trainer = None  # a restore makes a checkpoint before it returns one

    def arrays_before(self, step):
        if self.trainer is None:
            return {"norm": np.float32(self.norm)}
        rows = self.trainer.params["table"]
        assert self.trainer.evaluate(lambda p: p["w"].sum())() == self.trainer.steps
        return {"norm": np.linalg.norm(rows)}

    def restore(self, arrays):
        self.norm = float(arrays["norm"])


def test_what_is_stateful_may_read_the_trainer(tmp_path):
    norm = Norm()
    params = {"table": host.HostTable((5, 2)), "w": jnp.zeros(())}
    tx = osa.lazy(optax.sgd(-1.0))

    def fun(params, ids):
        return jnp.sum(params["table"][ids]) / 2 + params["w"]

    with host.HostTrainer(fun, tx, params, stateful={"norm": norm}) as norm.trainer:
        norm.trainer.step(np.array([1, 2]))
        norm.trainer.checkpoint(tmp_path / "run")
    norm = Norm()
    options = {"stateful": {"norm": norm}}
    host.HostTrainer.restore(tmp_path / "run", fun, tx, params, **options).close()
    assert norm.norm == 1.0


def test_keys_between_two_values_of_a_run(tmp_path):
    """As keys.md has it: the vocabulary is ahead of the rows by what is drawn."""
    keys, seen = np.arange(60) * 2**40, {}
    for way in "step", "run":
        vocab, now = osa.Vocabulary(31), osa.Vocabulary(31)
        (tmp_path / way).mkdir()
        with trainer_of(tmp_path / way, {"keys": vocab}) as trainer:
            rows_of = trainer.evaluate(lambda params, ids: params["table"][ids])
            made = stream(vocab, 0, 9)
            values = trainer.run(made) if way == "run" else map(trainer.step, made)
            for _ in values:
                now.restore(vocab.arrays_before(trainer.steps))
                found = now.find(keys)
                known = np.asarray(rows_of(found))[found != 0], found != 0
                seen.setdefault(trainer.steps, []).append(known)
    for (rows, is_known), (others, are_known) in seen.values():
        assert_identical(is_known, are_known)
        assert_identical(rows, others)


def test_an_iterator_that_raises_after_it_has_assigned(tmp_path):
    """As keys.md has it: another one goes on with the keys after what was drawn."""

    def broken(vocab, at):
        for number, batch in enumerate(stream(vocab, 0, 14)):
            if number == at:
                raise KeyboardInterrupt
            yield batch

    losses = []
    for at in None, 7:
        vocab = osa.Vocabulary(31)
        (tmp_path / str(at)).mkdir()
        with trainer_of(tmp_path / str(at), {"keys": vocab}) as trainer:
            values = []
            try:
                values += map(float, trainer.run(broken(vocab, at)))
            except KeyboardInterrupt:
                drawn, steps = trainer.drawn, trainer.steps
                number = steps + len(drawn)
                vocab.restore(vocab.arrays_before(number))
                rest = itertools.chain(drawn, stream(vocab, number, 14))
                values = [*losses[0][:steps], *map(float, trainer.run(rest))]
            losses.append(values)
    assert losses[0] == losses[1]


def with_number_of(number, vocab, trainer, first, last):
    """A loader that numbers keys otherwise than by its batches."""
    for n in range(first, last):
        keys = np.arange(4) + 2**40 * n
        rows, fresh, _ = vocab.assign(np.tile(keys, 6), number(trainer, n))
        new = {"table": np.ones((len(fresh), DIM), np.float32), "w": None}
        batch = rows, np.zeros(24, np.float32)
        yield host.BatchWithReset(batch, {"table": fresh, "w": None}, new)


@pytest.mark.parametrize("way", ["run", "step"])
@pytest.mark.parametrize("number", ["steps", "from 1"])
def test_a_loader_that_counts_otherwise(number, way, tmp_path):
    """Steps that are done are 0, 0, 1, 2 where batches are drawn ahead."""
    vocab = osa.Vocabulary(31)
    numbers = {"steps": lambda t, n: t.steps, "from 1": lambda t, n: n + 1}
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        made = with_number_of(numbers[number], vocab, trainer, 0, 9)
        values = trainer.run(made) if way == "run" else map(trainer.step, made)
        if (number, way) == ("steps", "step"):
            assert len(list(values)) == 9
            return
        with pytest.raises(
            ValueError, match=r"step \d for the keys of the batch of st"
        ):
            list(values)


@pytest.mark.parametrize("is_mended", slow_but([False, True], True))
def test_a_run_that_was_left_and_another_loader(is_mended, tmp_path):
    """One batch was drawn, and assigned: the same keys again would have no new rows."""
    losses = []
    for stop in None, 5:
        vocab = osa.Vocabulary(31)
        (tmp_path / str(stop)).mkdir()
        with trainer_of(tmp_path / str(stop), {"keys": vocab}) as trainer:
            values = []
            for value in trainer.run(stream(vocab, 0, 9)):
                values.append(float(value))
                if trainer.steps == stop:
                    break
            rest = trainer.run(stream(vocab, trainer.steps, 9))
            if stop and not is_mended:
                with pytest.raises(ValueError, match="keys of the batch of step 5 bef"):
                    list(rest)
                return
            if stop:
                vocab.restore(vocab.arrays_before(5))
                values += map(float, rest)
            losses.append(values)
    assert losses[0] == losses[1]


def by_steps(trainer, made):
    return map(trainer.step, made)


def by_a_thread(trainer, made):
    """A loader that assigns in a thread and waits for it."""

    def waited():
        with ThreadPoolExecutor(1) as thread:
            while (batch := thread.submit(next, made, None).result()) is not None:
                yield batch

    return trainer.run(waited())


@pytest.mark.parametrize(
    ("way", "stop"),
    slow_but(
        [*itertools.product([by_steps, by_a_thread], [0, 5])],
        (by_steps, 5),
        (by_a_thread, 0),
    ),
)
def test_keys_that_are_given_once_more(stop, way, tmp_path):
    """After a run that was left; at 0 by its iterator, before the first step."""

    def broken(made):
        yield from itertools.islice(made, stop)
        next(made)
        raise OSError("it is read no more")

    vocab = osa.Vocabulary(31)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        with pytest.raises(OSError, match="no more"):
            list(trainer.run(broken(stream(vocab, 0, 9))))
        assert trainer.steps == stop
        with pytest.raises(ValueError, match=f"keys of the batch of step {stop} befor"):
            list(way(trainer, stream(vocab, stop, 9)))
        if stop:  # as the words say
            vocab.restore(vocab.arrays_before(stop))
            assert len(list(way(trainer, stream(vocab, stop, 9)))) == 9 - stop


def test_the_same_loader_without_what_was_drawn(tmp_path):
    vocab = osa.Vocabulary(31)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        made = stream(vocab, 0, 9)
        for _ in trainer.run(made):
            if trainer.steps == 4:
                break
        with pytest.raises(ValueError, match=r"of step 4 before, .* is another batch"):
            list(trainer.run(made))
        assert trainer.drawn == []  # what is refused is not to be trained


@pytest.mark.parametrize("undone", [1, 2])
def test_keys_of_trained_batches_that_are_taken_back(undone, tmp_path):
    vocab = osa.Vocabulary(31)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        for batch in stream(vocab, 0, 5):
            trainer.step(batch)
        assert [*stream(vocab, 5, 6)]  # a batch that fails
        vocab.undo()
        for batch in stream(vocab, 5, 6):
            trainer.step(batch)
        for _ in range(undone):
            vocab.undo()
        made = stream(vocab, 6, 9)
        with pytest.raises(ValueError, match="not the keys of the batch of step 5 any"):
            trainer.step(next(made))


@pytest.mark.parametrize("way", ["undo", "arrays_before"])
@pytest.mark.parametrize(
    ("off", "words"),
    [
        (-1, "not the keys of the batch of step 3 any"),
        (0, None),
        (1, "of the batch of step 4 before"),
    ],
)
def test_what_was_drawn_is_taken_back(way, off, words, tmp_path):
    """Five batches, or four, or six: off by one is seen."""
    vocab = osa.Vocabulary(31)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        trainer._rows.stores[0]._cold_for = 99  # so that some are drawn
        for _ in trainer.run(stream(vocab, 0, 99)):
            if trainer.steps == 4:
                break
        assert len(trainer.drawn) > 1
        if way == "undo":
            for _ in range(len(trainer.drawn) - off):
                vocab.undo()
        else:
            vocab.restore(vocab.arrays_before(4 + off))
        again = stream(vocab, 4, 9)
        if words is None:
            assert len(list(trainer.run(again))) == 5
        else:
            with pytest.raises(ValueError, match=words):
                list(trainer.run(again))


def test_undone_calls_and_batches_without_keys(tmp_path):
    vocab = osa.Vocabulary(31)
    none = np.zeros(24, np.int32), np.zeros(24, np.float32)
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        for n in range(2):  # before there is any key
            vocab.assign([], n)
            trainer.step(*none)
        list(
            trainer.run(none for n in range(2, 4) if not vocab.assign([], n).fresh.size)
        )
        run = trainer.run(stream(vocab, 4, 9))
        next(run)
        run.close()
        for _ in trainer.drawn:
            vocab.undo()
        for batch in stream(vocab, 5, 7):
            trainer.step(batch)
        assert len(list(trainer.run(stream(vocab, 7, 9)))) == 2
        trainer.checkpoint(tmp_path / "run")


def test_two_calls_for_the_keys_of_a_batch_and_a_thread_ahead(tmp_path):
    """Both are numbers of batches."""
    vocab = osa.Vocabulary(31)

    def twice(first, last):
        for n in range(first, last):
            rows = [vocab.assign(np.arange(3) + 3 * n + i, n).rows for i in range(2)]
            yield np.tile(np.concatenate(rows), 4), np.zeros(24, np.float32)

    def ahead(first, last):
        with ThreadPoolExecutor(1) as thread:
            made, waiting = twice(first, last), collections.deque()
            for _ in range(3):
                waiting.append(thread.submit(next, made))
            for _ in range(first, last - 3):
                waiting.append(thread.submit(next, made))
                yield waiting.popleft().result()

    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        assert len(list(trainer.run(twice(0, 9)))) == 9
        assert len(list(trainer.run(ahead(9, 21)))) == 9
