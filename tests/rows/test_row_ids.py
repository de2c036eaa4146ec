"""Ids of NumPy that no 32 bits hold are out of bounds at every door: never wrapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import optax_sparse_adam as osa

from ..helpers.support import slow_but

ROWS = 10
# What a cut to 32 bits would make a row of: 3, 0, 9, 3 from the end, and so on.
FAR = {
    "int64": [2**32 + 3, -(2**32) + 3, 2**33, -(2**63), 2**63 - 1, -(2**40) + 9, -3],
    "uint64": [2**32 + 3, 2**33, 2**63, 2**64 - 1, 2**40 + 9, 2**31, 2**32],
}
SPARSE = osa.sparse_adam(0.1)


def table_of(kind, folder):
    table = np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4)
    if kind == "memmap":
        file = np.memmap(folder / "table", np.float32, "w+", shape=table.shape)
        file[...] = table
        return file
    return jnp.asarray(table) if kind != "numpy" else table


def begun(table):
    """Parameters and state; where the table is NumPy's, the state is, too."""
    state = SPARSE.init(jnp.asarray(table))
    return jax.tree.map(np.array, state) if isinstance(table, np.ndarray) else state


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("kind", ["jax", "jit", "numpy", "memmap"])
def test_row_verbs(kind, dtype, tmp_path):
    """Beside a NumPy loop over the ids: one of them is a row, all others padding."""
    table = table_of(kind, tmp_path)
    state, start = begun(table), np.array(table)
    ids = np.array([*FAR[dtype][:4], 7, *FAR[dtype][4:]], dtype)
    rows = np.arange(4.0 * len(ids), dtype=np.float32).reshape(-1, 4) + 100
    expected = start.copy()
    for i, row in zip(ids.tolist(), rows, strict=True):
        if 0 <= i < ROWS:
            expected[i] = row
    compiled = jax.jit if kind == "jit" else lambda function: function

    def all_of_them(table, state, rows):
        taken, row_state = osa.take_rows(SPARSE, table, state, ids)
        row_state = row_state._replace(nu=row_state.nu + 2)
        put = osa.put_rows(SPARSE, table, state, ids, rows, row_state)
        return taken[4] + 0, put

    read, (new, new_state) = compiled(all_of_them)(table, state, rows)
    np.testing.assert_array_equal(read, start[7])
    np.testing.assert_array_equal(new, expected)
    moments = np.zeros_like(start)
    moments[7] = 2
    np.testing.assert_array_equal(new_state.nu, moments)

    reset = compiled(lambda *args: osa.reset_rows(SPARSE, *args[:2], ids, args[2]))
    again = reset(new, new_state, rows + 1)
    expected[7] += 1
    np.testing.assert_array_equal(again[0], expected)
    assert not np.any(again[1].nu)

    grad = compiled(lambda grads: osa.rows_of(grads, ids).todense())(jnp.asarray(start))
    np.testing.assert_array_equal(
        grad, np.where(np.arange(ROWS)[:, None] == 7, start, 0)
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64"])
def test_ids_of_every_type(dtype):
    """In a table of more rows than an id of 8 bits can name."""
    table = jnp.arange(300.0)[:, None]
    ids = np.array([5, 100, 2], dtype)
    found = osa.rows_of(table, ids)
    np.testing.assert_array_equal(found.data[:, 0], [5, 100, 2])
    np.testing.assert_array_equal(found.todense()[:, 0].nonzero()[0], [2, 5, 100])


@pytest.mark.parametrize("dtype", FAR)
def test_bags(dtype):
    table = jnp.arange(10.0)[:, None] + 1
    ids = np.array([[7, *FAR[dtype]]], dtype)
    np.testing.assert_array_equal(osa.embedding_bag(table, ids), [[8.0]])
    flat, segments = ids.ravel(), np.zeros(ids.size, dtype)
    for forms in (
        {"offsets": np.array([0], dtype)},
        {"segment_ids": segments, "num_segments": 1},
    ):
        found = osa.embedding_bag(table, flat, **forms)
        np.testing.assert_array_equal(found, [[8.0]])


@pytest.mark.parametrize("dtype", FAR)
def test_frozen_lookup(dtype):
    """Ids that no 32 bits hold are padding, and no rows that are trained."""
    frozen, rows = jnp.arange(10.0)[:, None], np.array([2, 10], dtype)
    look_up = functools.partial(osa.frozen_lookup, jnp.full((2, 1), 99.0))
    ids = np.array([7, 2, 10, *FAR[dtype]], dtype)
    found = look_up(ids, frozen=frozen, rows=rows)[:, 0]
    np.testing.assert_array_equal(found, [7, 99, 99] + [0] * len(FAR[dtype]))
    far = np.array([2, 2**32 + 3], dtype)
    function = functools.partial(look_up, frozen=frozen, rows=far)
    for way in (function, jax.jit(function)):
        with pytest.raises(ValueError, match="takes `rows` below 2147483647"):
            way(ids)
    given = jnp.array([2, 2**32 - 1], jnp.uint32)
    found = jax.jit(look_up)(ids[:3], frozen=frozen, rows=given)
    assert np.isnan(found).all()


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("capacity", slow_but([None, 4], 4))
def test_lookups_on_a_mesh(dtype, capacity):
    """As `table[ids]` has them: the nearest row, or counted from the end."""
    mesh = jax.make_mesh(
        (2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    table = jnp.arange(10.0)[:, None]
    ids = np.array([7, *FAR[dtype]], dtype)
    whole = [int(i) for i in ids]
    expected = [table[np.clip(i + ROWS if i < 0 else i, 0, 9), 0] for i in whole]

    def look_up(table):
        return osa.sharded_lookup(table, ids, "d", capacity=capacity)

    along = PartitionSpec("d")
    shard_map = functools.partial(jax.shard_map, mesh=mesh, in_specs=along)
    found = jax.jit(shard_map(look_up, out_specs=along))(table)
    np.testing.assert_array_equal(found[: len(ids), 0], expected)

    def rounds(table):
        return osa.lookup_rounds(ids, ROWS, "d", capacity=1)

    # Rows below the table, above it and 7, on two owners; with the wrapped 0, 3 and 9
    # they would be more.
    distinct = len({min(max(i + ROWS if i < 0 else i, -1), ROWS) for i in whole})
    found = jax.jit(shard_map(rounds, out_specs=PartitionSpec()))(table)
    assert int(found) <= distinct


@pytest.mark.torch
def test_torch_tensors():
    torch = pytest.importorskip("torch")
    from optax_sparse_adam.torch_compat import Parameter

    table = Parameter(np.zeros((ROWS, 2), np.float32))
    ids = torch.tensor([[3, 2**32 + 3]])
    grad = torch.sparse_coo_tensor(
        ids, torch.ones(2, 2), (ROWS, 2), check_invariants=False
    )
    table.grad = grad._coalesced_(True)  # torch itself would write to another place
    np.testing.assert_array_equal(table.grad.todense()[3], [1.0, 1.0])


def test_a_table_without_rows():
    table = np.zeros((0, 3), np.float32)
    state = jax.tree.map(np.array, SPARSE.init(jnp.asarray(table)))
    for ids in (np.array([0, -1, 2**40]), np.array([], np.int64)):
        rows, row_state = osa.take_rows(SPARSE, table, state, ids)
        assert rows.shape == row_state.nu.shape == (len(ids), 3)
        osa.put_rows(SPARSE, table, state, ids, rows, row_state)
        osa.reset_rows(SPARSE, table, state, ids, rows)


def test_an_order_of_bytes():
    """A file of another machine is read and written as it is."""
    start = np.arange(8.0, dtype=">f4").reshape(4, 2)
    table, ids = start.copy(), np.array([1, 3], ">i8")
    state = jax.tree.map(np.array, SPARSE.init(jnp.zeros((4, 2))))
    rows, row_state = osa.take_rows(SPARSE, table, state, ids)
    np.testing.assert_array_equal(jnp.asarray(rows), start[[1, 3]])
    assert rows.dtype.isnative
    osa.put_rows(SPARSE, table, state, ids, jnp.asarray(rows) + 1, row_state)
    np.testing.assert_array_equal(table, start + np.array([[0], [1], [0], [1]]))
    osa.reset_rows(SPARSE, table, state, ids, start[:2])
    np.testing.assert_array_equal(table, start[[0, 0, 2, 1]])
    found = osa.rows_of(table, ids)
    np.testing.assert_array_equal(found.data, table[[1, 3]])
    for function in (
        lambda: osa.grad(lambda t: jnp.sum(t[ids]))(table),
        lambda: osa.embedding_bag(table, ids[None]),
    ):  # elsewhere JAX takes no such array, and the error prints none
        with pytest.raises(TypeError, match=r"ndarray`? of >f4"):
            function()


@pytest.mark.parametrize("table", [np.array([["a"]]), np.array([[None]])])
def test_no_numbers(table):
    """The error says the type, and prints no table."""
    with pytest.raises(
        TypeError, match=r"take_rows takes arrays of types that JAX has"
    ):
        osa.take_rows(SPARSE, table, SPARSE.init(jnp.ones((1, 1))), np.array([0]))
