"""A kernel for another platform is one class and one registration."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam._rows import with_ops
from optax_sparse_adam._rows.row_ops import RowOps, Update
from optax_sparse_adam.native import _calls

pytestmark = pytest.mark.usefixtures("as_optax_expects")


class MadeUp(RowOps):
    """The step of Adam on a platform of which this machine knows no more."""

    @staticmethod
    def available():
        return True

    def step(self, formula, entries, tables, read, targets, *args):
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


TABLE = jnp.ones((20, 4))
GRAD = BCOO((jnp.ones((3, 4)), jnp.array([[3], [7], [3]])), shape=(20, 4))


@pytest.mark.parametrize(
    ("tx", "calls"),
    [
        (osa.sparse_adam(0.1), ["adam", "add"]),
        (osa.lazy(optax.adam(0.1)), ["add"]),
        (osa.exact_adam(0.1), ["add"]),
    ],
    ids=["sparse_adam", "lazy", "exact_adam"],
)
def test_kernel_of_a_third_platform(registered, tx, calls):
    def step(grad, state, table):
        update, state = tx.update(grad, state, table)
        return osa.apply_updates(table, update), state

    for platform, text in programs(step, GRAD, tx.init(TABLE), TABLE).items():
        found = [x for x in ("adam", "add") if f"made_up.{x}" in text]
        assert found == (calls if platform == "cuda" else [])


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


def test_operations_are_chosen_once_for_a_step(monkeypatch):
    """At the top, for a leaf: nothing below asks for the platform again."""
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
    for make in (osa.sparse_adam, osa.rowwise_adagrad, osa.sparse_adafactor):
        tx, table = make(0.1), jnp.ones((23, 5))  # of a shape that was not traced yet
        grad = BCOO((jnp.ones((3, 5)), GRAD.indices), shape=(23, 5))

        def step(grad, state, table, tx=tx):
            update, state = tx.update(grad, state, table)
            return osa.apply_updates(table, update), state

        asked.clear()
        jax.clear_caches()
        jax.make_jaxpr(step)(grad, tx.init(table), table)
        assert asked == [{"cpu"}, set()]  # the step, and the addition
