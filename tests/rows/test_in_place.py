"""A step costs what the batch costs: memory, copies, compilations, large tables.

Programs are compiled for shapes alone; nothing of the size of the tables is allocated,
but for the test of a table with more than 2**31 elements.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._rows import gather_scatter, map_rows
from optax_sparse_adam._rows.with_ops import with_ops
from optax_sparse_adam.native import available

from ..helpers.support import (
    abstract_bcoo,
    assert_identical,
    assert_same_memory,
    bcoo,
    compile_for_users,
    slow_but,
)
from ..helpers.versions import COPIES_BRANCHES, WIDENS_BFLOAT16

TALL = 30_000_000  # with 64 columns just below 2**31 numbers


def table_shape(rows, n_sparse):
    return (rows, 64) if n_sparse == 1 else (rows // 100, 100, 64)


def compiled(shape, grad, *, apply=None, tx=None):
    """The update, or with `apply` the whole step, with everything old donated."""
    tx = tx or osa.sparse_adam(0.1)
    table = jax.ShapeDtypeStruct(shape, grad.dtype)
    state = jax.eval_shape(tx.init, table)
    if apply is None:
        update = jax.jit(lambda state, grad: tx.update(grad, state), donate_argnums=0)
        return compile_for_users(update.lower(state, grad))

    def step(table, state, grad):
        updates, state = tx.update(grad, state)
        return apply(table, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    return compile_for_users(step.lower(table, state, grad))


APPLY = {"update": None, "step": osa.apply_updates, "optax": optax.apply_updates}


@pytest.mark.usefixtures("backend")
# Without and with the loop over blocks.
@pytest.mark.parametrize("nse", slow_but([1024, 65_536], 65_536))
@pytest.mark.parametrize(
    ("apply", "n_sparse"),
    slow_but([("update", 1), ("step", 1), ("step", 2), ("optax", 1)], ("step", 1)),
)
def test_memory(apply, n_sparse, nse):
    heights = (TALL // 100, TALL) if (apply, n_sparse) == ("step", 1) else (TALL,)
    temporary = []
    for rows in heights:
        shape = table_shape(rows, n_sparse)
        grad = abstract_bcoo(shape, nse, n_sparse)
        memory = compiled(shape, grad, apply=APPLY[apply]).memory_analysis()
        tables = 2 if apply == "update" else 3
        count = 4
        assert memory.alias_size_in_bytes == tables * rows * 64 * 4 + count
        temporary.append(memory.temp_size_in_bytes)
    assert_same_memory(temporary[0], temporary[-1])
    assert_is_of_the_entries(temporary[-1], nse, n_sparse, is_applied=apply != "update")


def assert_is_of_the_entries(temporary, nse, n_sparse=1, itemsize=4, is_applied=True):
    """Bytes for the entries: two bytes for each row of a tall table were more."""
    # The sums (which are the result where nothing is applied), some vectors of ids to
    # sort and to search, and five operands of a block: gradient, old moments, update,
    # and one of the new moments, which are gathered, computed and scattered.
    row = 64 * max(itemsize, 4)
    # Narrow types are summed in float32, to which the gradient is converted.
    sums = (is_applied + (itemsize < 4)) * nse * row
    ids = nse * n_sparse * 4
    block = min(nse * row, map_rows._BLOCK_BYTES)
    limit, much = sums + 8 * ids + 5 * block, 2 * TALL
    if jax.default_backend() != "cpu":
        # There the formula is one fusion of all entries: it gathers the old rows, and
        # writes the update and both moments, three arrays of all entries beside their
        # sums. Measured on an H100: 4.20 of the gradient (float64 4.17), in rows of
        # float32 where it is narrower. No array of four bytes a row is among them.
        limit, much = int(4.25 * nse * row), 5 * TALL
    assert limit < much
    assert temporary <= limit, f"{temporary} bytes, more than {limit}"


@pytest.mark.slow
def test_rows_in_parts(without_kernel):
    """A CPU reads each old row once, 16 columns at a time; their bits are the same."""
    read = jax.jit(functools.partial(gather_scatter.take_rows, in_parts=True))
    ids = jnp.asarray([[7], [0], [29], [7]])
    for columns in (32, 40, 64):
        table = jax.random.normal(jax.random.key(0), (30, columns))
        table = table.at[0].set(-0.0).at[7, :2].set(jnp.asarray([jnp.nan, jnp.inf]))
        bits = [np.asarray(x).view("int32") for x in (read(table, ids), table)]
        np.testing.assert_array_equal(bits[0], bits[1][ids[:, 0]])
    widths = []
    for columns in (64, 128):  # the longer loop is not unrolled, and is left alone
        grad = abstract_bcoo((100_000, columns), 4096)
        text = compiled((100_000, columns), grad).as_text()
        # Of a table, or of rows of the gradient.
        widths.append(re.findall(r" gather\(.*slice_sizes=\{1,(\d\d+)\}", text))
    assert widths == [["16"] * 12, ["128"] * 3]  # the gradient, `mu` and `nu`


BFLOAT16 = pytest.param(
    "bfloat16",
    marks=[
        pytest.mark.slow,
        pytest.mark.xfail(
            WIDENS_BFLOAT16 and jax.default_backend() == "cpu" and not available(),
            reason="XLA widened bfloat16 on CPUs: each scatter converted the table",
        ),
    ],
)


@pytest.mark.parametrize("nse", slow_but([1024, 65_536], 65_536))
@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        pytest.param("float64", marks=pytest.mark.slow),
        BFLOAT16,
    ],
)
def test_memory_of_other_types(dtype, nse):
    with jax.enable_x64(dtype == "float64"):
        shape = table_shape(TALL, 1)
        grad = abstract_bcoo(shape, nse, 1, dtype)
        memory = compiled(shape, grad, apply=osa.apply_updates).memory_analysis()
    itemsize = jnp.dtype(dtype).itemsize
    assert_is_of_the_entries(memory.temp_size_in_bytes, nse, itemsize=itemsize)


APPLY_IF_FINITE = pytest.param(
    optax.apply_if_finite(osa.sparse_adam(0.1), 3),
    marks=pytest.mark.xfail(
        COPIES_BRANCHES and jax.default_backend() != "cpu",
        reason="XLA for GPUs copied each table that passed through a conditional",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        osa.sparse_adam(optax.linear_schedule(0.1, 0.0, 10), maximize=True),
        optax.inject_hyperparams(osa.sparse_adam)(0.1, b1=0.5),
        APPLY_IF_FINITE,
    ],
    ids=["schedule", "inject", "apply_if_finite"],
)
def test_memory_of_compositions(tx):
    shape = table_shape(TALL, 1)
    flags = {"unique_indices": True, "indices_sorted": True}
    grad = abstract_bcoo(shape, 1024, 1, **flags)
    memory = compiled(shape, grad, apply=osa.apply_updates, tx=tx).memory_analysis()
    assert_is_of_the_entries(memory.temp_size_in_bytes, 1024)


def operations_on(text, shape):
    """The names of the operations whose result is one array of this shape."""
    dims = ",".join(map(str, shape))
    return set(re.findall(rf"= \w+\[{dims}\]\S* ([\w-]+)\(", text))


@pytest.mark.parametrize("apply", slow_but(["update", "step"], "step"))
@pytest.mark.parametrize("nse", slow_but([1024, 65_536], 65_536))
def test_no_operation_makes_a_table(without_kernel, apply, nse):
    """Of XLA's; what the kernel does, no text of a program shows."""
    shape = table_shape(TALL, 1)
    grad = abstract_bcoo(shape, nse, 1)
    text = compiled(shape, grad, apply=APPLY[apply]).as_text()
    # A fusion is a scatter; the others only name what is there.
    names = {"parameter", "scatter", "fusion", "get-tuple-element", "bitcast"}
    names |= {"dynamic-update-slice"}  # a scatter of one row
    operations = operations_on(text, shape)
    assert "scatter" in operations
    assert operations <= names
    copied = compiled(shape, grad, apply=lambda p, u: osa.apply_updates(2 * p, u))
    assert not operations_on(copied.as_text(), shape) <= names


def test_old_rows_of_another_table():
    """Are gathered before that one is written, or XLA would copy it."""

    def function(data, rows):
        first, second = rows
        return 2 * data, (first + data, second + first)

    def updated(ops, *operands):
        return ops.update(function, *operands)

    table = jax.ShapeDtypeStruct((1_000_000, 4), "float32")
    data = jax.ShapeDtypeStruct((50, 4), "float32")
    indices = jax.ShapeDtypeStruct((50, 1), "int32")
    step = jax.jit(
        lambda tables, *args: with_ops(updated, *args, tables, ()), donate_argnums=0
    )
    memory = compile_for_users(step.lower((table, table), data, indices))
    assert memory.memory_analysis().temp_size_in_bytes < 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "index_type"),
    [
        ((2**25 + 1, 64), "int32"),  # elements beyond int32
        ((2**31 + 8,), "uint32"),  # rows beyond int32
    ],
)
def test_more_elements_than_int32_counts(shape, index_type):
    """The last rows are read and written; no row that a wrapped number would hit is."""
    rows = shape[0]
    ids = np.array([rows - 1, 3, rows - 2, rows - 1], index_type)[:, None]
    grad = bcoo(np.ones((4, *shape[1:]), np.float32), ids, shape)
    # One byte an element: 2 GB, copied, as a loop that LLVM does not optimize is slow.
    table = jax.device_put(np.zeros(shape, np.int8), may_alias=False)
    add = jax.jit(osa.apply_updates, donate_argnums=0)
    for _ in range(2):  # the second time, what is read is not zero
        table = add(table, grad)
    ids = jnp.asarray(np.array([rows - 1, rows - 2, rows - 3, 3, rows], index_type))
    read = np.asarray(gather_scatter.gather_rows(table, ids[:, None])).reshape(5, -1)
    expected = np.array([4, 2, 0, 2, 0], np.int8)
    assert_identical(read, np.repeat(expected[:, None], read.shape[1], axis=1))
    everything = np.asarray(table).reshape(-1)
    written = np.flatnonzero(everything.view(np.int64)) * 8 // read.shape[1]
    assert set(written.tolist()) <= {3, rows - 2, rows - 1, 0, (rows - 1) // 8 * 8}


@pytest.mark.parametrize("ids", [[3], [3, 1, 3]])
def test_derivative_of_a_read_has_duplicates(ids):
    """Without a promise that it has none, for which a GPU would add without atomics."""

    def loss(table):
        return jnp.sum(gather_scatter.take_rows(table, jnp.array(ids)[:, None]))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.zeros((5, 2)))
    assert "scatter-add" in str(jaxpr)
    assert "unique_indices=True" not in str(jaxpr)
