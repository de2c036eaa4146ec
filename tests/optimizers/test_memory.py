"""What each optimiser holds and needs: state bytes, temporary memory, compilations.

Programs are compiled for shapes alone; nothing of the size of the tables is allocated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.support import bcoo, compile_for_users, random_entries

WIDTH = 64
MILLION = 1_000_000
TALL = 30 * MILLION  # just below 2**31 numbers

# The optimiser, and the bytes of its state for a table of 1,000,000 x 64 float32. (On
# CPUs, XLA widens bfloat16, and with it the table; float16 stands for both.)
OPTIMIZERS = {
    "sparse_adam": (osa.sparse_adam(0.1), 512_000_004),
    "sparse_adam, float16 mu": (
        osa.sparse_adam(0.1, mu_dtype="float16"),
        384_000_004,
    ),
    "lazy(adamw)": (
        osa.lazy(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda count: 0.1))
        ),
        512_000_008,
    ),
    "lazy(per_row(adam))": (osa.lazy(osa.per_row(optax.adam(0.1))), 516_000_000),
    "lazy(sgd, momentum)": (osa.lazy(optax.sgd(0.1, momentum=0.9)), 256_000_000),
    "lazy(adagrad)": (osa.lazy(optax.adagrad(0.1)), 256_000_000),
    "rowwise_adam": (osa.rowwise_adam(0.1, weight_decay=0.1), 260_000_004),
    "rowwise_adam, float16 mu": (
        osa.rowwise_adam(0.1, mu_dtype="float16"),
        132_000_004,
    ),
    "rowwise_adagrad": (osa.rowwise_adagrad(0.1, weight_decay=0.1), 4_000_000),
    # Twelve bytes a row beside the moments; and the numbers that all rows share.
    "exact_adamw": (osa.exact_adamw(lambda count: 0.1), 524_000_120),
    "exact_adam": (osa.exact_adam(0.1), 516_000_112),
    "sparse_adafactor": (osa.sparse_adafactor(weight_decay=0.1), 4_000_260),
}


@pytest.fixture(autouse=True)
def as_optax_expects():
    with jax.numpy_dtype_promotion("standard"):
        yield


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def abstract(tx, rows, nse=1024):
    table = jax.ShapeDtypeStruct((rows, WIDTH), "float32")
    data = jax.ShapeDtypeStruct((nse, WIDTH), "float32")
    indices = jax.ShapeDtypeStruct((nse, 1), "int32")
    grad = jax.eval_shape(lambda *args: bcoo(*args, table.shape), data, indices)
    return table, jax.eval_shape(tx.init, table), grad


def step_of(tx):
    def step(table, state, grad):
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_bytes(name):
    tx, expected = OPTIMIZERS[name]
    _, state, _ = abstract(tx, MILLION)
    assert size(state) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory(name):
    """The whole step is in place, and its scratch memory knows nothing of the rows."""
    tx, _ = OPTIMIZERS[name]
    # Gradient, sums, parameter, two moments, update, results: some of each at a time.
    assert_in_place(step_of(tx), abstract(tx, TALL), 9 * 1024 * (WIDTH + 1) * 4)


def assert_in_place(step, arguments, limit):
    """A program for a table so tall that a bit for each row were more than allowed."""
    assert limit < TALL / 8
    memory = compile_for_users(step.lower(*arguments)).memory_analysis()
    assert memory.alias_size_in_bytes == size(arguments[:2])
    temporary = memory.temp_size_in_bytes
    assert temporary <= limit, f"{temporary} bytes, more than {limit}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_compilation(name):
    """Other ids, other duplicates, nothing but padding: the same program."""
    tx, _ = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    shape, nse = (50, 3), 20
    step = step_of(tx)
    table = jnp.zeros(shape)
    state = tx.init(table)
    for low, high in ((0, 50), (7, 8), (50, 99), (-9, 60)):
        values, _ = random_entries(rng, shape, 1, nse)
        indices = rng.integers(low, high, (nse, 1)).astype(np.int32)
        table, state = step(table, state, bcoo(values, indices, shape))
    assert step._cache_size() == 1


def reading_step(tx):
    """A step that looks rows up as they are now, and a flush after it."""

    def step(table, state, ids):
        fun = osa.value_and_grad(lambda table: jnp.sum(table[ids] ** 2), read=state)
        _, grad = fun(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    return step


def test_memory_of_reading_and_flushing():
    """In place, too; a flush in blocks of rows."""
    tx, _ = OPTIMIZERS["exact_adamw"]
    table, state, _ = abstract(tx, TALL)
    ids = jax.ShapeDtypeStruct((1024,), "int32")
    reading = jax.jit(reading_step(tx), donate_argnums=(0, 1))
    assert_in_place(reading, (table, state, ids), 10 * 1024 * WIDTH * 4)
    flushing = jax.jit(osa.flush, donate_argnums=(0, 1))
    assert_in_place(flushing, (table, state), 5 * 1024 * WIDTH * 4)
