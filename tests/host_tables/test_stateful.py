"""One checkpoint of a trainer and its vocabularies: of one step, or refused."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import DIM, batches, begin, host_params, loss
from ..helpers.support import assert_identical, slow_but

TX = osa.sparse_adam(0.1)


def stream(first, last):
    for keys, y in batches(first, last, 2**60, 24):
        yield keys.astype(np.int64) % 60 * 2**40, y


def prepare_with(vocab):
    def prepare(step, keys, y):
        rows, fresh, _ = vocab.assign(keys, step)
        new = {"table": np.ones((len(fresh), DIM), np.float32), "w": None}
        return host.BatchWithReset((rows, y), {"table": fresh, "w": None}, new)

    return prepare


class Losses:
    """What a user counts, by step."""

    def __init__(self):
        self.values = []

    def arrays_before(self, step):
        return {"values": np.array(self.values[:step], np.float32)}

    def restore(self, arrays):
        self.values = [*map(float, arrays["values"])]


def trainer_of(folder, stateful, restore=None, prepare=None):
    rows, w = begin((31, DIM))
    args = loss, TX, host_params(rows, w, file=folder / "table.bin")
    options = {"stateful": stateful, "prepare": prepare}
    if restore is None:
        return host.HostTrainer(*args, **options)
    return host.HostTrainer.restore(restore, *args, **options)


@pytest.mark.parametrize("ahead", slow_but(["warm", "cold"], "warm"))
def test_a_checkpoint_in_a_pipeline_is_of_one_step(ahead, tmp_path):
    """Batches are drawn ahead: two, or six where rows come from a disk.

    Rows and keys go on as those of a vocabulary that has seen what was trained.
    """
    vocab, losses, other = osa.Vocabulary(31), Losses(), osa.Vocabulary(31)
    stateful, prepare = {"keys": vocab, "losses": losses}, prepare_with(vocab)
    with trainer_of(tmp_path, stateful, prepare=prepare) as trainer:
        for value in trainer.run(stream(0, 14)):
            losses.values.append(float(value))
            if ahead == "cold":
                trainer._rows.stores[0]._cold_for = 9
            if trainer.steps == 9:
                trainer.checkpoint(tmp_path / "run")
        whole = [np.array(trainer.params["table"]), vocab.arrays, losses.values]
    for step, (keys, _) in enumerate(stream(0, 9)):
        other.assign(keys, step)
    again, losses = osa.Vocabulary(31), Losses()
    stateful, prepare = {"losses": losses, "keys": again}, prepare_with(again)
    with trainer_of(tmp_path, stateful, tmp_path / "run", prepare) as trainer:
        assert trainer.steps == len(losses.values) == 9
        assert_identical(again.arrays, other.arrays)
        for value in trainer.run(stream(9, 14)):
            losses.values.append(float(value))
        assert_identical([trainer.params["table"], again.arrays, losses.values], whole)


def test_what_is_of_another_step_is_refused(tmp_path):
    """And the last checkpoint stays as it was."""
    vocab, batch = osa.Vocabulary(100), (np.arange(3), np.ones(3, np.float32))
    with trainer_of(tmp_path, {"keys": vocab}) as trainer:
        vocab.assign([0, 1], 0)
        trainer.step(*batch)
        trainer.checkpoint(tmp_path / "run")
        saved = (tmp_path / "run" / "checkpoint.npz").read_bytes()
        for number in range(1, 10):  # by hand, and more than undo takes back
            vocab.assign([number], number)
        vocab.restore(vocab.arrays)
        with pytest.raises(ValueError, match="what it was before step 1: it was rest"):
            trainer.checkpoint(tmp_path / "run")
        assert (tmp_path / "run" / "checkpoint.npz").read_bytes() == saved
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [TX, pytest.param(osa.exact_adam(0.1), marks=pytest.mark.slow)],
    ids=["sparse", "exact"],
)
def test_keys_that_are_known_before_the_training(tx, tmp_path):
    """Of whatever step: in a checkpoint, in a snapshot, of another run."""
    vocab, again, served = osa.Vocabulary(31), osa.Vocabulary(31), osa.Vocabulary(31)
    vocab.assign(["to", "be", "or"], 0)
    rows, w = begin((31, DIM))

    def params():
        return host_params(rows, w, file=tmp_path / "table.bin")

    stateful = {"keys": vocab}
    with host.HostTrainer(loss, tx, params(), stateful=stateful) as trainer:
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
    again.assign([], 7)
    params = {"table": host.HostTable((31, DIM)), "w": w}
    new = host.HostTrainer(loss, tx, params, steps=8, stateful=stateful)
    with new as trainer:
        trainer.checkpoint(tmp_path / "other")
        again.assign(["not"], trainer.steps)
        trainer.step(found, np.ones(2, np.float32))


@pytest.mark.slow
def test_a_table_and_its_vocabulary_grow(tmp_path):
    """Into a new trainer, whose steps go on as those of the keys do."""
    vocab = osa.Vocabulary(31)
    prepare = prepare_with(vocab)
    with trainer_of(tmp_path, {"keys": vocab}, prepare=prepare) as trainer:
        assert len([*trainer.run(stream(0, 5))]) == 5
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
    options = {"state": state, "steps": steps, "prepare": prepare}
    with host.HostTrainer(*args, **options, stateful=stateful) as trainer:
        for _ in trainer.run(stream(5, 12)):
            if trainer.steps == 9:
                trainer.checkpoint(tmp_path / "run")
        whole = [np.array(trainer.params["table"]), vocab.arrays]
    again = osa.Vocabulary(61)
    options = {"stateful": {"keys": again}, "prepare": prepare_with(again)}
    restored = host.HostTrainer.restore(tmp_path / "run", *args, **options)
    with restored as trainer:
        assert trainer.steps == 9
        assert len([*trainer.run(stream(9, 12))]) == 3
        assert_identical([trainer.params["table"], again.arrays], whole)


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


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"rows": np.zeros(2, object)}, r"rows of stateful\['others'\]"),
        ({"rows": np.zeros(2, [("a", "<i4")])}, r"rows of stateful\['others'\]"),
        (None, r"by name of stateful\['others'\], .* got None of NoneType"),
    ],
    ids=["objects", "fields", "none"],
)
def test_a_checkpoint_holds_numbers_only(state, words, tmp_path):
    """Not what could be saved and not be read again."""

    class Others(Losses):
        def arrays_before(self, step):
            return state

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

    def __init__(self, folder):
        self.folder = folder

    def arrays_before(self, step):
        if self.trainer is None:
            return {"norm": np.float32(self.norm)}
        rows = self.trainer.params["table"]
        assert self.trainer.evaluate(lambda p: p["w"].sum())() == self.trainer.steps
        # As a signal's handler might, that comes here.
        for change in (
            lambda: self.trainer.step(np.array([1, 2])),
            lambda: self.trainer.checkpoint(self.folder),
            lambda: self.trainer.map_rows(lambda *both: both),
            self.trainer.close,
        ):
            with pytest.raises(RuntimeError, match="in the middle of it"):
                change()
        return {"norm": np.linalg.norm(rows)}

    def restore(self, arrays):
        self.norm = float(arrays["norm"])


def test_what_is_stateful_may_read_the_trainer(tmp_path):
    norm = Norm(tmp_path / "run")
    params = {"table": host.HostTable((5, 2)), "w": jnp.zeros(())}
    tx = osa.lazy(optax.sgd(-1.0))

    def fun(params, ids):
        return jnp.sum(params["table"][ids]) / 2 + params["w"]

    with host.HostTrainer(fun, tx, params, stateful={"norm": norm}) as norm.trainer:
        norm.trainer.step(np.array([1, 2]))
        norm.trainer.checkpoint(tmp_path / "run")
    norm = Norm(tmp_path / "run")
    options = {"stateful": {"norm": norm}}
    host.HostTrainer.restore(tmp_path / "run", fun, tx, params, **options).close()
    assert norm.norm == 1.0


@pytest.mark.slow
def test_keys_between_two_values_of_a_run(tmp_path):
    """As keys.md has it: the vocabulary is ahead of the rows by what is drawn."""
    keys, seen = np.arange(60) * 2**40, {}
    for way in "step", "run":
        vocab, now = osa.Vocabulary(31), osa.Vocabulary(31)
        (tmp_path / way).mkdir()
        options = {"stateful": {"keys": vocab}, "prepare": prepare_with(vocab)}
        with trainer_of(tmp_path / way, **options) as trainer:
            rows_of = trainer.evaluate(lambda params, ids: params["table"][ids])
            made, step = stream(0, 9), trainer.step
            values = trainer.run(made) if way == "run" else (step(*x) for x in made)
            for _ in values:
                now.restore(vocab.arrays_before(trainer.steps))
                found = now.find(keys)
                known = np.asarray(rows_of(found))[found != 0], found != 0
                seen.setdefault(trainer.steps, []).append(known)
    for (rows, is_known), (others, are_known) in seen.values():
        assert_identical(is_known, are_known)
        assert_identical(rows, others)
