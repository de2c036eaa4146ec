"""A snapshot to serve: rows of now, of one step, in files; nothing changes by it."""

import multiprocessing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _snapshot
from optax_sparse_adam.host_tables._budget import keep, resident_bytes

from ..helpers.host_tables import (
    DIM,
    ROWS,
    arrays,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_identical, slow_but


def predict(params, ids):
    # On a GPU the default keeps ten bits of what is multiplied.
    return jnp.matmul(params["table"][ids], params["w"], precision="highest")


def declared(dtype):
    return {"table": host.HostTable((ROWS, DIM), dtype), "w": jnp.zeros((DIM, 4))}


OPTIMIZERS = {"sparse_adam": osa.sparse_adam(0.1), "exact_adamw": osa.exact_adamw(0.1)}


@pytest.mark.parametrize("name", slow_but([*OPTIMIZERS], "exact_adamw"))
@pytest.mark.parametrize("where", slow_but(["memory", "file"], "file"))
def test_it_answers_as_evaluate_and_changes_nothing(name, where, tmp_path, monkeypatch):
    """In the middle of a pipeline, in parts of 70 rows, some of them stale."""
    monkeypatch.setattr(_snapshot, "CHUNK", 70 * DIM * 4)
    rows, w = begin()
    tx = OPTIMIZERS[name]
    known = train_in_memory(loss, tx, {"table": rows, "w": w}, batches(0, 8))
    file = {"file": tmp_path / "x"} if where == "file" else {}
    ids = np.arange(ROWS).reshape(3, 100)
    with host.HostTrainer(loss, tx, host_params(rows, w, **file)) as trainer:
        values = []
        for value in trainer.run(batches(0, 8)):
            values.append(value)
            if len(values) == 5:
                trainer.snapshot(tmp_path / "five")
                named = trainer.evaluate(lambda params, x: ("a", 1, predict(params, x)))
                for _ in range(2):  # what is no array of JAX is as it is in memory
                    *others, expected = named(ids)
                    assert repr(others) == "['a', 1]"
        assert_trained_alike(trainer, values, known)
    snapshot = host.Snapshot(tmp_path / "five", declared("float32"))
    assert snapshot.steps == 5
    assert_identical(snapshot.evaluate(predict)(ids), expected)
    table, w = snapshot.params["table"], snapshot.params["w"]
    assert isinstance(table, np.memmap)
    assert not table.flags.writeable
    np.testing.assert_allclose(table[ids] @ w, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_steps_are_padded_as_if_they_were_alone(tmp_path):
    """A mean over rows counts padding, where a batch has more ids than rows.

    What is read between steps, drawn and not trained, or refused, has changed nothing.
    """
    parts = optax.scale_by_adam(), optax.clip_by_block_rms(0.5), optax.scale(-0.01)
    tx, (rows, w) = osa.lazy(optax.chain(*parts)), begin((40, DIM))
    made = list(batches(0, 6, rows=12, ids=64))
    wide = np.arange(64) % 40, made[0][1]

    def begun():
        return host_params(rows, w)

    def trained(trainer, made):
        values = [*map(np.asarray, trainer.run(made))]
        return values, np.array(trainer.params["table"])

    with host.HostTrainer(loss, tx, begun()) as trainer:
        values, expected = trained(trainer, made)
    with host.HostTrainer(loss, tx, begun()) as trainer:
        seen = []
        for value in trainer.run([*made[:2], wide]):
            seen.append(np.asarray(value))
            if len(seen) == 2:
                break
        trainer.evaluate(predict)(wide[0])
        trainer.snapshot(tmp_path / "new")
        with pytest.raises(TypeError):
            trainer.step(wide[0], wide[1][1:])
        trainer.checkpoint(tmp_path / "run")
        rest = trained(trainer, made[2:])
        assert_identical((seen, rest), (values[:2], (values[2:], expected)))
    with host.HostTrainer.restore(tmp_path / "run", loss, tx, begun()) as trainer:
        assert_identical(trained(trainer, made[2:]), rest)


def begin_with(rows, dtype):
    params = {
        "table": host.HostTable(rows.shape, dtype, init=lambda a, b: rows[a:b]),
        "w": jnp.ones((DIM, 4)),
    }
    with host.HostTrainer(loss, osa.sparse_adam(0.1), params) as trainer:
        return np.array(trainer.params["table"])


@pytest.mark.parametrize(
    "dtype", slow_but(["bfloat16", "float16", "float8_e5m2"], "bfloat16")
)
def test_types_and_stateful(dtype, tmp_path):
    rows, w = begin(dtype=dtype)
    vocab = osa.Vocabulary(ROWS)
    stateful = {"keys": vocab, "others": osa.Vocabulary(9)}
    params = host_params(rows, w)
    vocab.assign([7], 0)
    tx, more = osa.sparse_adam(0.1), {"steps": 1, "stateful": stateful}
    trainer = host.HostTrainer(loss, tx, params, **more)
    vocab.assign([2**50], 1)  # of a batch that is drawn and not trained
    trainer.snapshot(tmp_path / "new" / "x")
    again = osa.Vocabulary(ROWS)
    again.assign([1, 2], 3)
    args = tmp_path / "new" / "x", declared(dtype)
    of_file = np.load(args[0] / "table0.npy")
    assert_identical(begin_with(of_file.view(dtype), dtype), np.asarray(rows))
    if of_file.dtype != dtype:  # bits, which look like numbers
        with pytest.raises(TypeError, match="may be numbers, or the bits of"):
            begin_with(of_file, dtype)
    snapshot = host.Snapshot(*args, stateful={"keys": again})
    assert len(again) == again.find([7]) == 1
    assert_identical(arrays(snapshot.params["table"]), arrays(jnp.asarray(rows)))
    with pytest.raises(ValueError, match=r"stateful=\['keys', 'others'\]"):
        host.Snapshot(*args, stateful={"key": again})
    with pytest.raises(FileExistsError, match=r"is there.* another name"):
        trainer.snapshot(args[0])
    with pytest.raises(FileNotFoundError, match="no snapshot in"):
        host.Snapshot(tmp_path, declared(dtype))
    other = {"table": host.HostTable((ROWS, DIM + 1), dtype), "w": w}
    with pytest.raises(ValueError, match="is a snapshot of other parameters: tables"):
        host.Snapshot(args[0], other)
    vocab.restore(vocab.arrays)
    with pytest.raises(ValueError, match="does not know what it was before step 1"):
        trainer.snapshot(tmp_path / "new" / "y")
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["x"]


VALUES = {"number": 0.5, "array": np.full(3, 0.5), "scalar": np.float64(0.5)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(VALUES, "number"))
def test_parameters_are_of_the_types_of_jax(kind, tmp_path):
    """As the trainer has them, whatever made them: also a Python number, float64."""

    def fun(params, ids):
        return jnp.sum(params["table"][ids]) * jnp.sum(params["w"])

    table, value = host.HostTable((9, 2)), VALUES[kind]
    trainer = host.HostTrainer(fun, osa.sparse_adam(0.1), {"table": table, "w": value})
    trainer.step(np.array([1]))
    trainer.snapshot(tmp_path / "x")
    held = jnp.asarray(trainer.params["w"])
    assert held.dtype == jnp.float32
    for like in (value, held, jax.ShapeDtypeStruct(held.shape, held.dtype)):
        snapshot = host.Snapshot(tmp_path / "x", {"table": table, "w": like})
        assert_identical(snapshot.params["w"], held)
        answer = snapshot.evaluate(fun)(np.array([1]))
        assert_identical(answer, trainer.evaluate(fun)(np.array([1])))


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("given", ["weak", "strong", "declared"])
def test_a_number_of_a_weak_type(given, steps, tmp_path):
    """bfloat16 rows times it are bfloat16, times another one float32."""
    rows, _ = begin((9, 2), jnp.bfloat16)
    values = {"weak": jnp.asarray(1.3), "strong": jnp.float32(1.3)}
    values["declared"] = jax.ShapeDtypeStruct((), jnp.float32)
    tx = osa.sparse_adam(0.1)

    def product(params, ids):
        return params["table"][ids] * params["w"]

    def fun(params, ids):
        return jnp.sum(product(params, ids).astype(jnp.float32) ** 2)

    ids = [np.array([number, 3, 8]) for number in range(6)]
    params = host_params(rows, 1.3) | {"w": values["weak"]}
    with host.HostTrainer(fun, tx, params) as trainer:
        list(trainer.run(ids[:steps]))
        trainer.checkpoint(tmp_path / "run")
        trainer.snapshot(tmp_path / "served")
        expected = trainer.evaluate(product)(ids[0])
        values_of_run = list(trainer.run(ids[steps:]))
    params["w"] = values[given]
    snapshot = host.Snapshot(tmp_path / "served", params)
    assert_identical(snapshot.evaluate(product)(ids[0]), expected)
    # A step makes it strong.
    assert expected.dtype == (jnp.float32 if steps else jnp.bfloat16)
    args = tmp_path / "run", fun, tx, params
    with host.HostTrainer.restore(*args) as again:
        assert_identical(list(again.run(ids[steps:])), values_of_run)


def serve(folder, ids, answers):
    snapshot = host.Snapshot(folder, declared("float32"))
    answers.put(np.asarray(snapshot.evaluate(predict)(ids)))


@pytest.mark.slow
def test_a_server_in_another_process(tmp_path):
    """To the bits of `evaluate`, while the trainer goes on; two servers at a time."""
    rows, w = begin()
    given, ids = host_params(rows, w, file=tmp_path / "x"), np.arange(90)
    tx, spawn = osa.exact_adam(0.1), multiprocessing.get_context("spawn")
    with host.HostTrainer(loss, tx, given) as trainer:
        assert [*trainer.run(batches(0, 6))]
        trainer.snapshot(tmp_path / "served")
        expected = np.asarray(trainer.evaluate(predict)(ids))
        answers = spawn.Queue()
        args = tmp_path / "served", ids, answers
        servers = [spawn.Process(target=serve, args=args) for _ in range(2)]
        for server in servers:
            server.start()
        assert [*trainer.run(batches(6, 12))]
        for _ in servers:
            assert_identical(answers.get(timeout=300), expected)
        for server in servers:
            server.join()


def test_a_full_disk_leaves_no_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    rows, w = begin()
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(rows, w)) as trainer:
        monkeypatch.setattr(_snapshot, "write_archive", full)
        with pytest.raises(OSError, match="No space"):
            trainer.snapshot(tmp_path / "x")
        assert not list(tmp_path.iterdir())
        monkeypatch.undo()
        trainer.snapshot(tmp_path / "x")
    snapshot = host.Snapshot(tmp_path / "x", declared("float32"))
    assert_identical(jax.tree.map(np.asarray, snapshot.params), {"table": rows, "w": w})


def test_a_file_of_other_rows_is_refused(tmp_path):
    rows, w = begin()
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(rows, w)) as trainer:
        trainer.snapshot(tmp_path / "x")
    file = tmp_path / "x" / "table0.npy"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:9], whole.replace(b"<f4", b"<i4"), b""):
        file.write_bytes(damaged)
        words = r"table0\.npy does not hold float32\[300, 8\], or was damaged"
        with pytest.raises(ValueError, match=words):
            host.Snapshot(tmp_path / "x", declared("float32"))


def test_the_last_part_of_the_largest_table():
    """Of 2**31 - 2 rows, in parts of ten: numbers of rows do not begin again."""
    ids = _snapshot._ids_of_part(2**31 - 4, 10, 2**31 - 2)
    assert ids.tolist() == [2**31 - 4] + 9 * [2**31 - 3]


def test_what_is_refused_is_refused_before_rows_are_read(tmp_path, monkeypatch):
    vocab = osa.Vocabulary(ROWS)
    params = host_params(*begin())
    trainer = host.HostTrainer(
        loss, osa.sparse_adam(0.1), params, stateful={"keys": vocab}
    )
    vocab.restore(vocab.arrays)
    monkeypatch.setattr(_snapshot, "evaluated", None)
    with pytest.raises(ValueError, match="what it was before step 0"):
        trainer.snapshot(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_servers_are_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="Snapshot got one of 2 processes of"):
        host.Snapshot(tmp_path, declared("float32"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says it")
def test_its_pages_are_given_back_over_a_budget(tmp_path):
    """Of a trainer in the same process: 64 MB of a table that was read."""
    params = {"table": host.HostTable((1_000_000, 16))}
    trainer = host.HostTrainer(
        lambda p, ids: p["table"][ids].sum(), osa.sparse_adam(0.1), params
    )
    trainer.snapshot(tmp_path / "x")
    served = host.Snapshot(tmp_path / "x", params)
    assert served.params["table"].sum() == 0
    keep(resident_bytes() - 32e6)
    assert served.params["table"].sum() == 0


@pytest.mark.parametrize("is_link", [True, False])
def test_another_is_put_in_its_place_while_it_is_opened(is_link, tmp_path, monkeypatch):
    """A link is followed once; with a folder of another time nothing is served."""
    with host.HostTrainer(loss, osa.sparse_adam(0.1), host_params(*begin())) as trainer:
        for folder in (tmp_path / "old", tmp_path / "new"):
            trainer.snapshot(folder)
            list(trainer.run(batches(0, 2)))
    expected = host.Snapshot(tmp_path / "old", declared("float32")).params
    current, mapped = tmp_path / "current", _snapshot._mapped
    if is_link:
        current.symlink_to(tmp_path / "old")
    else:
        (tmp_path / "old").rename(current)

    def replaced(*args):
        if is_link:
            current.unlink()
            current.symlink_to(tmp_path / "new")
        else:
            current.rename(tmp_path / "old")
            (tmp_path / "new").rename(current)
        return mapped(*args)

    monkeypatch.setattr(_snapshot, "_mapped", replaced)
    if is_link:
        params = host.Snapshot(current, declared("float32")).params
        assert_identical(arrays(params), arrays(expected))
        return
    with pytest.raises(FileNotFoundError, match="was replaced while it was opened"):
        host.Snapshot(current, declared("float32"))
    monkeypatch.undo()
    assert host.Snapshot(current, declared("float32")).steps == 2
