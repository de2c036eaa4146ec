"""What each optimiser holds and needs: state bytes, temporary memory, compilations.

Programs are compiled for shapes alone; nothing of the size of the tables is allocated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.native import available

from ..helpers.optimizers import OPTIMIZERS
from ..helpers.support import (
    abstract_bcoo,
    bcoo,
    compile_for_users,
    random_entries,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

WIDTH = 64
MILLION = 1_000_000
TALL = 30 * MILLION  # just below 2**31 numbers


def rounded(**kwargs):
    return osa.lazy(osa.stochastic_rounding(optax.adam(0.1), 0, **kwargs))


# (On CPUs, XLA widens bfloat16, and with it the table; float16 stands for both.)
STATES = {name: (opt.make(0.1), opt.state_bytes) for name, opt in OPTIMIZERS.items()}
STATES |= {
    "sparse_adam, float16 mu": (
        osa.sparse_adam(0.1, mu_dtype="float16"),
        384_000_004,
    ),
    "rowwise_adam, float16 mu": (
        osa.rowwise_adam(0.1, mu_dtype="float16"),
        132_000_004,
    ),
    "lazy, schedule": (osa.lazy(optax.adamw(lambda count: 0.1)), 512_000_008),
    "lazy(sgd, momentum)": (osa.lazy(optax.sgd(0.1, momentum=0.9)), 256_000_000),
    "lazy(adagrad)": (osa.lazy(optax.adagrad(0.1)), 256_000_000),
    # The last eight bytes are those of a key.
    "float16, rounded": (rounded(), 256_000_012),
    "float16, float32 moments": (rounded(state_dtype="float32"), 512_000_012),
}


EXACT = "exact_adam", "exact_adamw"
# One for each way in which state is laid out and written.
CORE = "sparse_adam, float16 mu", "lazy", "exact_adam"


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def abstract(tx, rows, nse=1024, dtype="float32"):
    table = jax.ShapeDtypeStruct((rows, WIDTH), dtype)
    grad = abstract_bcoo(table.shape, nse, dtype=dtype)
    return table, jax.eval_shape(tx.init, table), grad


def step_of(tx):
    def step(table, state, grad):
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    "name",
    slow_but(STATES, *CORE),
)
def test_memory(name):
    """The whole step is in place, and its scratch memory knows nothing of the rows."""
    tx, expected = STATES[name]
    # Gradient, sums, parameter, two moments, update, results: some of each at a time.
    dtype, operands = ("float16", 24) if name.startswith("float16") else ("float32", 9)
    _, state, _ = abstract(tx, MILLION, dtype=dtype)
    assert size(state) == expected
    arguments = abstract(tx, TALL, dtype=dtype)
    assert_in_place(step_of(tx), arguments, operands * 1024 * (WIDTH + 1) * 4)


def assert_in_place(step, arguments, limit, row_bytes=0, copied=0):
    """A table so tall that two bits for each row were more than allowed.

    Unless `row_bytes` are, for each row; `copied` are bytes that are not in place.
    """
    assert limit < TALL / 4
    limit += row_bytes * TALL
    memory = compile_for_users(step.lower(*arguments)).memory_analysis()
    assert memory.alias_size_in_bytes == size(arguments[:2]) - copied
    temporary = memory.temp_size_in_bytes
    assert temporary <= limit, f"{temporary} bytes, more than {limit}"


@pytest.mark.parametrize(
    "name", slow_but(STATES, "exact_adamw", "lazy", "rowwise_adam")
)
def test_one_compilation(name):
    """Other ids, other duplicates, nothing but padding: the same program."""
    tx, _ = STATES[name]
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


@pytest.mark.slow
def test_memory_of_reading_and_flushing():
    """In place, too; a flush in blocks of rows on a CPU."""
    tx = OPTIMIZERS["exact_adamw"].make(0.1)
    table, state, _ = abstract(tx, TALL)
    ids = jax.ShapeDtypeStruct((1024,), "int32")
    reading = jax.jit(reading_step(tx), donate_argnums=(0, 1))
    assert_in_place(reading, (table, state, ids), 10 * 1024 * WIDTH * 4)
    flushing = jax.jit(osa.flush, donate_argnums=(0, 1))
    # Rows that the kernel reads lie in memory; XLA computes with them as it reads them.
    blocks = 6 if available() else 5
    options = {}
    if jax.default_backend() != "cpu":
        # There all rows are flushed at once: in place, with five numbers of each row
        # and a byte that are computed first; and a number of all rows is a constant.
        options = {"row_bytes": 21, "copied": 4}
    assert_in_place(flushing, (table, state), blocks * 1024 * WIDTH * 4, **options)


def average():
    """Keeps one of the values of rows; its updates do not depend on them."""

    def update(updates, state, params):
        return updates, jax.tree.map(lambda a, x: 0.9 * a + 0.1 * x, state, params)

    return optax.GradientTransformation(optax.tree.zeros_like, update)


IN_FRONT = {
    "decay": optax.add_decayed_weights(0.1),
    "clipping": osa.per_row(optax.adaptive_grad_clip(0.1)),
    "average": average(),
}
ROWS_IN_FRONT = (WIDTH,), (4, WIDTH // 4)
FRONTS = [
    (*x, y) for x in zip(IN_FRONT, EXACT * 2, strict=False) for y in ROWS_IN_FRONT
]


@pytest.mark.parametrize(
    ("front", "name", "row"),
    slow_but(FRONTS, ("average", "exact_adam", (4, WIDTH // 4))),
)
def test_memory_of_what_reads_in_front(without_kernel, front, name, row):
    """Rows of now are read before those that keep their state are written."""
    tx = optax.chain(osa.lazy(IN_FRONT[front]), OPTIMIZERS[name].make(0.1))
    table = jax.ShapeDtypeStruct((TALL, *row), "float32")
    state = jax.eval_shape(tx.init, table)
    ids = jax.ShapeDtypeStruct((1024,), "int32")
    reading = jax.jit(reading_step(tx), donate_argnums=(0, 1))
    assert_in_place(reading, (table, state, ids), 10 * 1024 * WIDTH * 4)
