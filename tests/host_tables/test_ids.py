"""Ids are those of the step: as JAX computes them there, once, and for whom else."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._host_rows import BatchRows
from optax_sparse_adam.host_tables._pipeline import Pipeline

from ..helpers.host_tables import (
    DIM,
    ROWS,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_identical, slow_but

TX = osa.sparse_adam(1e-2)


def of_ids(compute):
    def fun(params, ids, y, *rest):
        return loss(params, compute(params, ids, *rest), y)

    return fun


def as_in_memory(fun, made, rows=ROWS):
    rows, w = begin((rows, DIM))
    known = train_in_memory(fun, TX, {"table": rows, "w": w}, made)
    with host.HostTrainer(fun, TX, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)
    with host.HostTrainer(fun, TX, host_params(rows, w)) as trainer:
        values = [trainer.step(*batch) for batch in made]
        assert_trained_alike(trainer, values, known)


# An int8 times a Python number wraps around; a bfloat16 is rounded.
WEAK = {
    "int8": (np.int8, 3, lambda _, ids, k: (ids * k) % 100),
    "bfloat16": (jnp.bfloat16, 2.3, lambda _, ids, k: (ids * k).astype(jnp.int32)),
    "float16": (np.float16, 0.37, lambda _, ids, k: (ids * k).astype(jnp.int32)),
}


@pytest.mark.parametrize("name", slow_but(WEAK, "int8"))
def test_python_numbers_are_weak_types(name):
    dtype, number, compute = WEAK[name]
    made = [
        ((ids % 110).astype(dtype), y, number) for ids, y in batches(0, 3, rows=ROWS)
    ]
    as_in_memory(of_ids(compute), made, rows=120 if name == "int8" else ROWS)


@pytest.mark.slow
def test_unique_ids_out_of_bounds_are_filled():
    """Their padding is distinct, and was taken for rows that are none."""

    def fun(params, ids, y):
        unique = jnp.where(y > 0, jnp.arange(len(ids)), ROWS + jnp.arange(len(ids)))
        options = {"mode": "fill", "fill_value": 0, "unique_indices": True}
        rows = params["table"].at[unique].get(**options)
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    as_in_memory(fun, [*batches(0, 3)])


@pytest.mark.parametrize("what", slow_but(["step", "run", "evaluate"], "run"))
def test_ids_that_are_others_in_each_program_are_refused(what, tmp_path):
    """`np.random` while tracing: rows of neighbours would be trained, in silence."""
    is_random = []

    def compute(_, ids):
        shift = np.random.default_rng(len(is_random)).integers(1, 99)
        is_random.append(1)
        return (ids + (shift if is_random[1:] else 0)) % ROWS

    fun = of_ids(compute)
    where = {"file": tmp_path / "x"}
    rows, w = begin()
    calm, words = of_ids(lambda _, ids: ids), "rows .*np.random.*round floats"
    with host.HostTrainer(calm, TX, host_params(rows, w, **where)) as trainer:
        trainer.checkpoint(tmp_path / "run")
    again = fun, TX, host_params(rows, w, **where)
    with host.HostTrainer.restore(tmp_path / "run", *again) as trainer:
        batch = next(batches(0, 1))
        if what == "evaluate":
            with pytest.raises(RuntimeError, match=words):
                trainer.evaluate(fun)(*batch)
            assert trainer.steps == 0  # nothing has changed
            return
        with pytest.raises(RuntimeError, match=f"Batch 0 has looked up {words}"):
            trainer.step(*batch) if what == "step" else list(trainer.run([batch] * 2))
        # The dense parameters have learned from them, and the rows have not.
        with pytest.raises(
            RuntimeError, match="Close this HostTrainer, and go on from"
        ):
            trainer.checkpoint(tmp_path / "run")
        assert_identical(trainer._rows.stores[0].fields(_layout(trainer))[0][:], rows)
    with host.HostTrainer.restore(tmp_path / "run", calm, *again[1:]) as trainer:
        assert_identical(np.array(trainer.params["w"]), np.asarray(w))


def _layout(trainer):
    return trainer._rows.plan.layouts[0]


@pytest.mark.parametrize("ordered", slow_but([False, True], False))
def test_callbacks_are_called_once(ordered, capfd):
    calls = []

    def seen(x):
        calls.append(float(x))

    def doubled(x):
        seen(x)
        return np.float32(2)

    def fun(params, ids, y):
        value = loss(params, ids, y)
        shown = jax.lax.stop_gradient(value)
        io_callback(seen, None, shown, ordered=ordered)
        jax.debug.print("shown {}", ids[0], ordered=ordered)
        jax.debug.callback(seen, shown, ordered=ordered)
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return value * io_callback(doubled, result, shown, ordered=ordered)

    rows, w = begin()
    trainer = host.HostTrainer(fun, TX, host_params(rows, w))
    values = [trainer.step(*batch) for batch in batches(0, 3)]
    jax.effects_barrier()
    assert len(calls) == 9
    assert capfd.readouterr().out.count("shown") == 3
    known = train_in_memory(fun, TX, {"table": rows, "w": w}, batches(0, 3))
    assert_trained_alike(trainer, values, known)


class Later:
    """As JAX tells of a device that works by itself."""

    def __init__(self):
        self.is_seen = threading.Event()

    def __int__(self):
        self.is_seen.wait()
        raise jax.errors.JaxRuntimeError("of the device")


@pytest.mark.parametrize("what", slow_but(["step", "run", "later"], "run", "later"))
def test_a_step_that_fails_while_it_runs(what, tmp_path, monkeypatch):
    """A callback raises, or the device has no memory: what was donated is gone."""
    is_on = [what != "later"]

    def failing(x):
        if x == 2 and is_on[0]:
            raise OverflowError("of the user")
        return x

    def fun(params, ids, y):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        number = jax.pure_callback(failing, shape, y[0])
        return loss(params, ids, y + number)

    made = [(ids, np.full(48, k, "f")) for k, (ids, _) in enumerate(batches(0, 4))]
    rows, w = begin()
    own = host_params(rows, w, file=tmp_path / "x")
    trainer = host.HostTrainer(fun, TX, own)
    trainer.checkpoint(tmp_path / "run")
    if what == "later":
        later = Later()
        later.is_seen.set()
        trainer._rows._keep(BatchRows([], [], [], 2, looked_up=later))
        with pytest.raises(jax.errors.JaxRuntimeError, match="of the device"):
            trainer.step(*made[3])
    else:
        steps = (
            trainer.run(made)
            if what == "run"
            else map(trainer.step, *zip(*made, strict=True))
        )
        with pytest.raises(Exception, match="of the user"):
            list(steps)
    for use in (
        lambda: trainer.params,
        lambda: trainer.step(*made[3]),
        lambda: trainer.checkpoint(tmp_path / "run"),
    ):
        with pytest.raises(RuntimeError, match=r"batch 2 has .* last check") as error:
            use()
        reason = "of the device" if what == "later" else "of the user"
        assert reason in str(error.value.__cause__)
    trainer.close()
    is_on[0] = False
    with host.HostTrainer.restore(tmp_path / "run", fun, TX, own) as trainer:
        values = [*trainer.run(made)]
        plain = {"table": rows, "w": w}
        assert_trained_alike(trainer, values, train_in_memory(fun, TX, plain, made))


@pytest.mark.parametrize("when", ["in the next step", "after it"])
def test_a_step_that_the_thread_of_a_run_finds_to_have_failed(when, monkeypatch):
    rows, w = begin()
    trainer = host.HostTrainer(loss, TX, host_params(rows, w))
    unstored, advance, later = trainer._rows._unstored, Pipeline._advance, Later()

    def wait():
        later.is_seen.set()
        while unstored:
            time.sleep(0.001)

    def failing(self, *args):
        value = advance(self, *args)
        if trainer.steps == 2:
            unstored[-1] = unstored[-1]._replace(looked_up=later)
        elif trainer.steps == 3 and when == "in the next step":
            wait()
        return value

    monkeypatch.setattr(Pipeline, "_advance", failing)
    values = trainer.run(batches(0, 6))
    for _ in range(3):
        next(values)
    wait()
    with pytest.raises(jax.errors.JaxRuntimeError, match="of the device"):
        next(values)
    with pytest.raises(RuntimeError, match=r"batch 1 has raised .* last check"):
        trainer.step(*next(batches(0, 1)))


def test_a_step_after_one_that_has_failed_is_forgotten(tmp_path, monkeypatch):
    rows, w = begin()
    trainer = host.HostTrainer(loss, TX, host_params(rows, w))
    unstored, advance, later = trainer._rows._unstored, Pipeline._advance, Later()

    def failing(self, *args):
        if trainer.steps == 2:  # the thread sees that the last one has failed
            later.is_seen.set()
            while unstored:
                time.sleep(0.001)
        value = advance(self, *args)
        if trainer.steps >= 2:
            unstored[-1] = unstored[-1]._replace(looked_up=later)
        return value

    monkeypatch.setattr(Pipeline, "_advance", failing)
    values = trainer.run(batches(0, 6))
    for _ in range(3):
        next(values)
    with pytest.raises(RuntimeError, match="batch 1 has raised"):
        trainer.checkpoint(tmp_path / "run")
    values.close()
    trainer.close()


@pytest.mark.slow
def test_ids_of_callbacks():
    """Of a pure one, which may be called twice; not of an io_callback."""

    def compute(callback):
        def ids_of(_, ids):
            result = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
            return callback(lambda x: (x * 7 % ROWS).astype(np.int32), result, ids)

        return ids_of

    as_in_memory(of_ids(compute(jax.pure_callback)), [*batches(0, 3)])
    rows, w = begin()
    trainer = host.HostTrainer(of_ids(compute(io_callback)), TX, host_params(rows, w))
    with pytest.raises(ValueError, match="must not depend on the result of an io_call"):
        trainer.step(*next(batches(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bags", "rows"])
def test_without_jit(what):
    """`jax.disable_jit`, to look into a loss: a bag is known by a jit inside of it."""

    def fun(params, ids, y):
        if what == "rows":
            return loss(params, ids, y)
        bags = osa.embedding_bag(params["table"], ids.reshape(-1, 4), mode="mean")
        return jnp.sum((bags @ params["w"]) ** 2) + jnp.mean(y)

    rows, w = begin()
    known = train_in_memory(fun, TX, {"table": rows, "w": w}, batches(0, 2))
    with jax.disable_jit():
        trainer = host.HostTrainer(fun, TX, host_params(rows, w))
        values = [trainer.step(*batch) for batch in batches(0, 2)]
    for mine, other in zip(values, known[2], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    found = trainer.params["table"]
    np.testing.assert_allclose(found, known[0]["table"], rtol=0, atol=1e-6)
    assert_identical((found == rows).all(1), (known[0]["table"] == rows).all(1))


# Mutable arrays.


@pytest.mark.slow
def test_mutable_arrays_that_a_loss_closes_over():
    """It writes them once in a step, as in memory, and once in an evaluation."""
    rows, w = begin()
    zeros = jnp.zeros((), jnp.int32), jnp.zeros(w.shape)
    steps, mean = map(jax.new_ref, zeros)

    def fun(params, ids, y):
        steps[...] += 1
        mean[...] = 0.9 * mean[...] + 0.1 * jax.lax.stop_gradient(params["w"])
        return loss(params, ids, y) * mean[0, 0]

    made = [*batches(0, 4)]
    known = train_in_memory(fun, TX, {"table": rows, "w": w}, made)
    in_memory = steps[...], mean[...]
    steps[...], mean[...] = zeros
    with host.HostTrainer(fun, TX, host_params(rows, w)) as trainer:
        assert_trained_alike(trainer, list(trainer.run(made)), known)
        assert_identical((steps[...], mean[...]), in_memory)
        trainer.evaluate(fun)(*made[0])
    assert steps[...] == 5


def test_ids_of_mutable_arrays():
    offset = jax.new_ref(jnp.zeros((), jnp.int32))

    def by_another(params, ids):
        inner = jax.new_ref(ids)
        inner[0] = offset[...]
        return params["table"][inner[...]].sum()

    for fun in (lambda p, ids: p["table"][ids + offset[...]].sum(), by_another):
        trainer = host.HostTrainer(fun, TX, {"table": host.HostTable((9, 2))})
        with pytest.raises(
            ValueError, match=r"a mutable array .* they do at .*test_ids.py:"
        ):
            trainer.step(np.arange(3))
    with pytest.raises(
        TypeError, match=r"Batch 0 has a mutable array, `Ref{int32\[\]}`"
    ):
        trainer.step(offset)
    params = {"table": host.HostTable((9, 2)), "w": jax.new_ref(jnp.ones(2))}
    with pytest.raises(TypeError, match=r"\['w'\] is a mutable array, `Ref{float32"):
        host.HostTrainer(fun, TX, params)


@pytest.mark.slow
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_large_table_that_the_loss_holds(is_eager):
    """As frozen embeddings that came from elsewhere; and ids of a callback beside."""
    held = jnp.asarray(np.random.default_rng(1).normal(size=(40_000, 8)), jnp.float32)

    def loss(params, ids, y):
        more = jax.pure_callback(lambda x: np.asarray(x) % 7, ids, ids)
        rows = params["table"][ids] + held[ids * 9] + params["table"][more]
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    made, (rows, w) = [*batches(0, 2)], begin()
    known = train_in_memory(loss, TX, {"table": rows, "w": w}, made)
    with (
        jax.disable_jit(is_eager),
        host.HostTrainer(loss, TX, host_params(rows, w)) as trainer,
    ):
        values = [trainer.step(*batch) for batch in made]
        np.testing.assert_allclose(np.array(values), known[2], rtol=1e-6)
        np.testing.assert_allclose(trainer.params["w"], known[0]["w"], atol=1e-6)
