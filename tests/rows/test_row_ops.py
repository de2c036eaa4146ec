"""A kernel for another platform is one class and one registration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam._gradients import value_and_grad
from optax_sparse_adam._rows import with_ops
from optax_sparse_adam._rows.row_ops import RowOps, Update, where
from optax_sparse_adam.native import _calls

from ..helpers.support import assert_close

pytestmark = pytest.mark.usefixtures("as_optax_expects")


class MadeUp(RowOps):
    """The step of Adam on a platform of which this machine knows no more."""

    @staticmethod
    def available():
        return True

    def step(self, formula, entries, tables, read, targets, *args):
        if formula.name is None:  # such as `lazy` finds: any, of one row at a time
            one = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
                   for x in (entries.data, *tables, *read)]  # fmt: skip
            data, *rows = one
            change, news = jax.eval_shape(formula.rows, data, tuple(rows), *args)
            assert [x.shape for x in (change, *news)] == [x.shape for x in one[:3]]
            call = jax.ffi.ffi_call("made_up.any", [jax.typeof(x) for x in tables])
            change, tables = entries.data, tuple(call(*tables, *targets))
            return (
                Update(param=targets[0])
                if targets
                else Update((entries.indices, change)),
                tables,
            )
        if formula.name != "adam" or targets:
            return super().step(formula, entries, tables, read, targets, *args)
        operands = entries.indices, entries.data, *tables, *args[0]
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        results = like[: 2 + len(tables)]
        call = jax.ffi.ffi_call("made_up.adam", results)
        indices, change, *tables = call(*operands)
        return Update((indices, change)), tuple(tables)

    def add(self, table, indices, rows, *, is_unique):
        call = jax.ffi.ffi_call("made_up.add", jax.typeof(table))
        return call(table, indices, rows)

    @where(lambda source, ids, *, bounds: source.stale is not None)
    def look_up(self, source, ids, *, bounds):
        """Stale rows in one kernel, which is made of the formula of a single row."""
        array, stale = source
        row, *rows = (x[0] for x in (array, *stale.tables))
        formula = functools.partial(stale.value_of, shared=stale.shared)
        assert jax.eval_shape(formula, row, tuple(rows)).shape == row.shape
        result = jax.ShapeDtypeStruct((*ids.shape, *row.shape), row.dtype)
        call = jax.ffi.ffi_call("made_up.read", result)
        return call(array, *stale.tables, *jax.tree.leaves(stale.shared), ids)

    def look_up_bags(self, source, ids, segments, weights, *, num_bags):
        row_shape = source.array.shape[1:]
        result = jax.ShapeDtypeStruct((num_bags, *row_shape), jnp.float32)
        operands = jax.tree.leaves((source, ids, segments, weights))
        return jax.ffi.ffi_call("made_up.bags", result)(*operands)


@pytest.fixture(autouse=True)
def without_kernel_for_cpus(monkeypatch):
    """A process that uses it leaves other platforms out."""
    jax.clear_caches()  # what was traced with it
    monkeypatch.setattr(_calls, "available", lambda: False)
    yield
    jax.clear_caches()


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(with_ops.KERNELS, "cuda", MadeUp)


def programs(function, *args):
    """The program of each platform."""
    traced = jax.jit(function).trace(*args)
    return {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "rocm", "tpu")
    }


CLIPPED = osa.lazy(optax.chain(optax.clip_by_global_norm(9.0), optax.adamw(0.1)))
TABLE = jnp.ones((20, 4))
GRAD = BCOO((jnp.ones((3, 4)), jnp.array([[3], [7], [3]])), shape=(20, 4))


@pytest.mark.parametrize(
    ("tx", "calls"),
    [
        (osa.sparse_adam(0.1), ["adam", "add"]),
        (osa.lazy(optax.adam(0.1)), ["any", "add"]),
        (osa.lazy(optax.chain(optax.clip(9.0), optax.adamw(0.1))), ["any", "add"]),
        (CLIPPED, ["any", "add"]),
        (osa.lazy(optax.lamb(0.1)), ["add"]),  # reads all rows before it updates one
        (osa.exact_adam(0.1), ["add"]),
    ],
    ids=["sparse_adam", "lazy", "of the rows", "of a norm", "lamb", "exact_adam"],
)
def test_kernel_of_a_third_platform(registered, tx, calls):
    def step(grad, state, table):
        update, state = tx.update(grad, state, table)
        return osa.apply_updates(table, update), state

    for platform, text in programs(step, GRAD, tx.init(TABLE), TABLE).items():
        called = [x for x in ("adam", "any", "add") if f"made_up.{x}" in text]
        assert called == (calls if platform == "cuda" else [])


IDS = jnp.array([[3, 7, -1], [2, 3, 25]])


def of_rows(table, ids=IDS):
    return jnp.sum(table[ids] ** 2)


def of_bags(table, ids=IDS):
    return jnp.sum(osa.embedding_bag(table, ids) ** 2)


@pytest.mark.parametrize(
    ("loss", "is_stale", "calls"),
    [
        (of_rows, False, []),  # the kernel leaves it to XLA: no fork
        (of_rows, True, ["read"]),
        pytest.param(of_bags, False, ["bags"], marks=pytest.mark.slow),
        (of_bags, True, ["bags"]),
    ],
)
def test_lookups_of_a_third_platform(registered, loss, is_stale, calls):
    """A kernel replaces two methods, and meets nothing else of a gradient."""
    state = osa.exact_adam(0.1).init(TABLE) if is_stale else None
    for take in (osa.grad, osa.evaluate):
        function = take(loss, read=state)
        for platform, text in programs(function, TABLE).items():
            found = [x for x in ("read", "bags") if f"made_up.{x}" in text]
            assert found == (calls if platform == "cuda" else [])


@pytest.mark.slow
def test_what_a_kernel_reads_of_a_stale_table(monkeypatch):
    """One row, by the formula that it prints, is that of XLA's lookup."""
    rng = np.random.default_rng(0)
    tx, table = osa.exact_adamw(0.1), jnp.asarray(rng.standard_normal((20, 4)))
    state = tx.init(table)

    @jax.jit
    def step(table, state, index):
        grad = BCOO((jnp.ones((1, 4)), index), shape=(20, 4))
        update, state = tx.update(grad, state, table)
        return osa.apply_updates(table, update), state

    for row in (3, 7, 3):
        table, state = step(table, state, np.array([[row]]))
    sources = []

    class Watching(MadeUp):
        @where(lambda source, ids, *, bounds: sources.append(source))
        def look_up(self, source, ids, *, bounds):
            raise AssertionError("declined")

    monkeypatch.setitem(with_ops.KERNELS, "cuda", Watching)

    @jax.jit
    def by_xla(table, state):
        return osa.evaluate(lambda t: t[IDS], read=state)(table)

    expected = by_xla(table, state)
    assert sources

    @jax.jit
    def one_by_one(table, ids):
        array, stale = value_and_grad.current_tables(table, state)[0]

        def of(i):
            rows = tuple(x[i] for x in stale.tables)
            return stale.value_of(array[i], rows, stale.shared)

        return jnp.stack([of(i) for i in ids])

    ids = np.clip(np.where(IDS < 0, IDS + 20, IDS), 0, 19).ravel()
    actual = one_by_one(table, ids).reshape(2, 3, 4)
    assert_close(actual, expected, 1e-6)
    assert np.abs(actual - table[ids].reshape(2, 3, 4)).max() > 0.01  # they were stale


@pytest.mark.slow
def test_no_kernel_under_vmap_and_derivatives(registered):
    """They would have no rule for it."""
    tx = osa.sparse_adam(0.1)

    def moved(data, state, table):
        grad = BCOO((data, GRAD.indices), shape=GRAD.shape)
        update, _ = tx.update(grad, state)
        return jnp.sum(osa.apply_updates(table, update) ** 2)

    state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(TABLE))
    batch = jnp.stack([GRAD.data, 2 * GRAD.data]), state, jnp.stack([TABLE, TABLE])
    for function in (jax.vmap(moved), jax.vmap(jax.grad(moved))):
        assert "made_up" not in programs(function, *batch)["cuda"]


# Optimisers, and how often a step by hand chooses the operations of a table.
FORKS = {
    "sparse_adam": (osa.sparse_adam(0.1), ["step", "add"]),
    "rowwise_adagrad": (osa.rowwise_adagrad(0.1), ["step", "add"]),
    "sparse_adafactor": (osa.sparse_adafactor(0.1), ["step", "add"]),
    "lazy": (osa.lazy(optax.adam(0.1)), ["step", "add"]),
    "of a norm": (CLIPPED, ["sum", "step", "add"]),
    "of all rows": (osa.lazy(optax.lamb(0.1)), ["look up", "put", "add"]),
}


@pytest.fixture
def forks(monkeypatch):
    """A list that gets the platforms with operations of their own, of each fork."""
    asked, inside = [], []
    original = with_ops.by_platform

    def counted(special, default, *args, **kwargs):
        assert not inside, "a fork in a fork"
        asked.append(set(special))

        def guarded(function):
            def call(*args):
                inside.append(1)
                try:
                    return function(*args)
                finally:
                    inside.pop()

            return call

        special = {
            name: (guarded(own), base and guarded(base))
            for name, (own, base) in special.items()
        }
        return original(special, guarded(default), *args, **kwargs)

    monkeypatch.setattr(with_ops, "by_platform", counted)
    jax.clear_caches()
    return asked


def test_operations_are_chosen_once_for_a_lookup(forks, registered):
    """Each lookup in one place; where no kernel takes it, in none."""
    table = jnp.ones((23, 5))  # of a shape that was not traced yet
    state = osa.exact_adam(0.1).init(table)
    for loss, read, expected in (
        (of_rows, None, 0),
        (of_rows, state, 1),
        (of_bags, None, 1),
        (of_bags, state, 1),
    ):
        forks.clear()
        program = jax.make_jaxpr(osa.grad(loss, read=read))(table, IDS)
        assert str(program).count("platform_index") == expected
        assert forks in ([{"cuda"}] * n for n in (expected, expected + 1)), (
            "a bag of the loss, as JAX traces it, is there before that of the gradient"
        )


@pytest.mark.parametrize("name", FORKS)
def test_operations_are_chosen_once_for_a_step(forks, name):
    """At the top, for a leaf: nothing below asks for the platform again."""
    tx, expected = FORKS[name]
    table = jnp.ones((23, 5))  # of a shape that was not traced yet
    grad = BCOO((jnp.ones((3, 5)), GRAD.indices), shape=(23, 5))

    def step(grad, state, table):
        update, state = tx.update(grad, state, table)
        return osa.apply_updates(table, update), state

    jax.make_jaxpr(step)(grad, tx.init(table), table)
    assert forks == [set() if x in ("put", "add") else {"cpu"} for x in expected]


@pytest.mark.parametrize("name", ["sparse_adam", "lazy", "of a norm"])
def test_operations_are_chosen_once_for_a_training_step(forks, name):
    """Which adds the update where it is computed, of two tables of one size."""
    tx, by_hand = FORKS[name]
    params, ids = {"a": jnp.ones((23, 5)), "b": jnp.ones((23, 5))}, GRAD.indices
    step = osa.make_train_step(lambda p, ids: jnp.sum(p["a"][ids] * p["b"][ids]), tx)
    step.trace(params, tx.init(params), ids)
    assert forks == [{"cpu"}] * (len(by_hand) - 1)  # JAX traces one of both
