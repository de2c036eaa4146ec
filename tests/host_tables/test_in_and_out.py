"""From memory to a trainer and back, to a larger table, and out of `run`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

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

TX = osa.exact_adam(1e-2)
FOUND = ["memory", "file", "storage"]


def place(where, tmp_path, name="x"):
    kinds = {"file": {"file": tmp_path / name}, "storage": {"storage": Dictionary()}}
    return kinds.get(where, {})


def continued(params, state, *batches, tx=TX, fun=loss):
    step, values = osa.make_train_step(fun, tx), []
    for batch in batches:
        params, state, value = step(params, state, *batch)
        values.append(np.asarray(value))
    return params, state, values


def grid(params, ids, others, x, y):
    """A point between two rows, and another row: XLA adds it up by the size of K."""
    table, part = params["table"], x[:, None]
    rows = table[ids] * (1 - part) + table[ids + 1] * part + table[others]
    return jnp.mean((jnp.tanh(rows).sum(1) - y) ** 2)


def grid_batches(first, last, spread=32):
    for number in range(first, last):
        rng = np.random.default_rng(number)
        ids = (spread ** rng.random((2, 12))).astype(int) - 1
        yield *ids, *rng.random((2, 12), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["step", "run"])
def test_a_restored_step_has_as_many_rows_as_one_that_was_not_stopped(rule, tmp_path):
    """The most that a batch had: with fewer the program is another one."""
    rows = np.random.default_rng(0).normal(size=(33, 4)).astype(np.float32)
    tx = osa.sparse_adam(0.02)

    def params():
        return {"table": host.HostTable(rows.shape, init=lambda a, b: rows[a:b])}

    def train(trainer, first, last):
        made = grid_batches(first, last)
        if rule == "run":
            return list(trainer.run(made))
        return [trainer.step(*batch) for batch in made]

    with host.HostTrainer(grid, tx, params()) as trainer:
        train(trainer, 0, 11)
        trainer.checkpoint(tmp_path / "run")
        expected = train(trainer, 11, 20)
        trees = jax.tree.map(np.array, (trainer.params, trainer.state))
    restored = host.HostTrainer.restore(tmp_path / "run", grid, tx, params())
    with restored as trainer:
        assert_identical(np.array(train(trainer, 11, 20)), np.array(expected))
        assert_identical((trainer.params, trainer.state), trees)


@pytest.mark.parametrize("where", slow_but(FOUND, "file"))
def test_trained_in_memory_then_on_the_host_and_back(where, tmp_path):
    rows, w = begin()
    plain = {"table": rows, "w": w}
    known = train_in_memory(loss, TX, plain, batches(0, 12))
    params, state, values = train_in_memory(loss, TX, plain, batches(0, 4))
    own = host_params(np.asarray(params["table"]), params["w"])
    own["table"] = host.HostTable(
        rows.shape, init=own["table"].init, **place(where, tmp_path)
    )
    trainer = host.HostTrainer(loss, TX, own, state=state)
    values += list(trainer.run(batches(4, 8)))
    params, state = jax.tree.map(jnp.array, (trainer.params, trainer.state))
    trainer.close()
    *trees, last = continued(params, state, *batches(8, 12))
    pairs = zip(jax.tree.leaves(trees), jax.tree.leaves(list(known[:2])), strict=True)
    for found, expected in pairs:
        assert_identical(np.asarray(found), np.asarray(expected))
    assert_identical(np.array([*values, *last]), np.array(known[2]))


@pytest.mark.slow
@pytest.mark.parametrize("where", FOUND)
def test_a_table_that_grows(where, tmp_path):
    """As one that grows in memory: docs/rows.md. New rows do not decay before."""
    tx = osa.exact_adamw(1e-2, weight_decay=0.1)
    rows, w = begin((ROWS + 700, DIM))
    plain = {"table": rows[:ROWS], "w": w}
    params, state, known = train_in_memory(loss, tx, plain, batches(0, 4))
    small = host.HostTrainer(
        loss, tx, host_params(rows[:ROWS], w, **place(where, tmp_path))
    )
    values = list(small.run(batches(0, 4)))

    def grown(first, last):
        held = small.params["table"][first : min(last, ROWS)]
        return np.concatenate([held, rows[max(first, ROWS) : last]])

    table = host.HostTable(rows.shape, init=grown, **place(where, tmp_path, "y"))
    own = {"table": table, "w": small.params["w"]}
    trainer = host.HostTrainer(loss, tx, own, state=small.state)
    small.close()
    values += list(trainer.run(batches(4, 8, ROWS + 700)))

    old, new = np.split(np.arange(ROWS + 700), [ROWS])
    old, new = ({"table": x, "w": None} for x in (old, new))
    taken = osa.take_rows(tx, params, state, old)
    larger = params | {"table": jnp.asarray(rows)}
    larger, state = osa.put_rows(tx, larger, tx.init(larger), old, *taken)
    begun = {"table": rows[ROWS:], "w": None}
    larger, state = osa.reset_rows(tx, larger, state, new, begun)
    *trees, last = continued(larger, state, *batches(4, 8, ROWS + 700), tx=tx)
    assert_trained_alike(trainer, values, (*trees, [*known, *last]))
    trainer.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state[0], "needs a `state` of this optimiser"),
        (
            lambda state: jax.tree.map(lambda x: x[:, :3] if x.ndim > 1 else x, state),
            "",
        ),
        (lambda state: jax.tree.map(lambda x: np.resize(x, (999, 9)), state), ""),
        (lambda state: jax.tree.map(lambda x: np.asarray(x, np.int8), state), "int8"),
    ],
)
def test_a_state_of_something_else_is_refused(change, words, tmp_path):
    rows, w = begin()
    state = TX.init({"table": jnp.array(rows), "w": jnp.array(w)})
    own = host_params(rows, w, file=tmp_path / "x")
    with pytest.raises(ValueError, match=words or "or fewer rows|HostTrainer needs"):
        host.HostTrainer(loss, TX, own, state=change(state))
    assert not list(tmp_path.iterdir())


class Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", slow_but(["break", "raise", "bad ids", "end"], "bad ids")
)
def test_what_was_drawn_ahead_is_given_back(way):
    rows, w = begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 8))
    trainer = host.HostTrainer(loss, TX, host_params(rows, w))
    made = [*batches(0, 8)]
    wrong = (np.array([ROWS + 5]), np.zeros(1, np.float32))
    iterator = iter([*made[:3], wrong, *made[3:]] if way == "bad ids" else made)
    values = []

    def left():
        for value in trainer.run(iterator):
            values.append(value)
            if len(values) == 3 and way == "break":
                return
            if len(values) == 3 and way == "raise":
                raise Stopped

    error = {"raise": Stopped, "bad ids": IndexError}.get(way)
    if error is None:
        left()
    else:
        with pytest.raises(error):
            left()
    drawn = trainer.drawn
    assert (len(drawn) > 0) == (way != "end")
    if way == "bad ids":
        assert_identical(drawn.pop(0)[0], wrong[0])
    values += trainer.run(itertools.chain(drawn, iterator))
    assert trainer.drawn == []
    assert_trained_alike(trainer, values, known)


@pytest.mark.slow
def test_drawn_of_a_run_that_is_still_open():
    """As a notebook, or a progress bar, has a name for it; whenever that goes."""
    rows, w = begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, 8))
    trainer = host.HostTrainer(loss, TX, host_params(rows, w))
    iterator = batches(0, 8)
    first = trainer.run(iterator)
    values = [next(first)]
    second = trainer.run(itertools.chain(trainer.drawn, iterator))
    values += [next(second), next(second)]
    drawn = trainer.drawn
    first.close()
    assert [x[1].tolist() for x in trainer.drawn] == [x[1].tolist() for x in drawn]
    values += trainer.run(itertools.chain(trainer.drawn, iterator))
    second.close()
    assert trainer.drawn == []
    assert_trained_alike(trainer, values, known)


def squares(params, ids):
    rows = params["table"][ids].astype(jnp.float32)
    return jnp.mean((rows @ params["w"].astype(jnp.float32) - 1) ** 2)


def of_types(table, w, **place):
    """Parameters in memory, and the same with a table on the host."""
    rows = np.random.default_rng(0).normal(size=(50, 4)).astype(table)
    init = {"init": lambda first, last: rows[first:last]} | place
    plain = {"table": jnp.asarray(rows), "w": jnp.ones(4, w)}
    table = host.HostTable(rows.shape, rows.dtype, **init)
    return plain, {"table": table, "w": jnp.ones(4, w)}


def lazy_adam(rate, b1):
    return osa.lazy(optax.adam(rate, b1=b1))


INJECTED = osa.lazy(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
CHANGE_TYPES = {
    "injected": INJECTED,
    "around": optax.inject_hyperparams(lazy_adam)(rate=0.1, b1=0.8),
    "an array": osa.lazy(optax.adam(0.1, b1=jnp.float32(0.9))),
}


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", slow_but(CHANGE_TYPES, "injected"))
def test_a_step_that_changes_the_types_of_rows_is_refused(name):
    """It would write float32 into fields of bfloat16, and over the next ones."""
    _, params = of_types("bfloat16", "float32")
    ids = np.arange(5)
    words = r"mu\['table'\] as float32, which is bfloat16.*static_args=\("
    with host.HostTrainer(squares, CHANGE_TYPES[name], params) as trainer:
        before = np.array(trainer.params["table"])
        for call in (trainer.step, lambda ids: list(trainer.run([(ids,)]))):
            with pytest.raises(TypeError, match=words):
                call(ids)
        assert_identical(np.array(trainer.params["table"]), before)
        assert trainer.steps == 0


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_injected_numbers_around_lazy_change_no_type():
    """As the refusal advises."""
    make = optax.inject_hyperparams(lazy_adam, static_args=("b1",))
    tx, ids = make(rate=0.1, b1=0.8), np.arange(5)
    plain, params = of_types("bfloat16", "float32")
    *_, values = continued(plain, tx.init(plain), *[(ids,)] * 4, tx=tx, fun=squares)
    with host.HostTrainer(squares, tx, params) as trainer:
        assert_identical([np.asarray(trainer.step(ids)) for _ in range(4)], values)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_a_step_that_changes_the_type_of_other_state(tmp_path):
    """As in memory; and it is restored in that type, of shapes alone."""
    tx, ids = INJECTED, np.arange(5)
    plain, params = of_types("float32", "bfloat16", file=tmp_path / "table")
    *_, values = continued(plain, tx.init(plain), *[(ids,)] * 6, tx=tx, fun=squares)
    with host.HostTrainer(squares, tx, params) as trainer:
        found = [trainer.step(ids) for _ in range(3)]
        trainer.checkpoint(tmp_path / "run")
    of_w = params["w"]
    params["w"] = jax.ShapeDtypeStruct(of_w.shape, of_w.dtype, sharding=of_w.sharding)
    with host.HostTrainer.restore(tmp_path / "run", squares, tx, params) as trainer:
        assert trainer.state.inner_state[0].mu["w"].dtype == jnp.float32
        found += [trainer.step(ids) for _ in range(3)]
    assert_identical([*map(np.asarray, found)], values)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_other_state_whose_type_a_step_in_memory_has_changed():
    tx, ids = INJECTED, np.arange(5)
    plain, _ = of_types("float32", "bfloat16")
    *trees, _ = continued(plain, tx.init(plain), *[(ids,)] * 2, tx=tx, fun=squares)
    params, state = jax.tree.map(np.array, trees)
    *_, values = continued(*trees, *[(ids,)] * 2, tx=tx, fun=squares)
    rows = params["table"]
    params["table"] = host.HostTable(rows.shape, init=lambda a, b: rows[a:b])
    with host.HostTrainer(squares, tx, params, state=state, steps=2) as trainer:
        assert_identical([np.asarray(trainer.step(ids)) for _ in range(2)], values)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_other_state_that_becomes_float64(tmp_path):
    dense = optax.adam(0.1, b1=np.float64(0.9))
    tx = optax.partition({"t": TX, "w": dense}, {"table": "t", "w": "w"})
    with jax.enable_x64(True):
        _, params = of_types("float32", "float32")
        with host.HostTrainer(squares, tx, params) as trainer:
            trainer.step(np.arange(5))
            trainer.checkpoint(tmp_path / "run")
            expected = jax.tree.map(np.array, trainer.state)
        assert expected.inner_states["w"].inner_state[0].mu["w"].dtype == np.float64
        with host.HostTrainer.restore(tmp_path / "run", squares, tx, params) as trainer:
            assert_identical(jax.tree.map(np.array, trainer.state), expected)
    with pytest.raises(ValueError, match="or another jax_enable_x64"):
        host.HostTrainer.restore(tmp_path / "run", squares, tx, params)
