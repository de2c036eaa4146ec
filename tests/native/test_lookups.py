"""Lookups by the optional kernel: the rows of JAX's gather, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_sparse_adam as osa
from optax_sparse_adam._gradients import walk
from optax_sparse_adam.native import _calls

from ..helpers.gradients import dense
from ..helpers.native import needs_compiler
from ..helpers.support import assert_identical, compile_for_users, slow_but

pytestmark = needs_compiler

ROWS = 9
IDS = np.int32([3, 8, 1, -2])
FAR = np.int32([[0, 8, -1], [9, -(10**9), 2**31 - 1]])


@pytest.fixture(autouse=True)
def one_device(cache, monkeypatch):
    """The kernel is used as in a process of one device."""
    monkeypatch.setattr(_calls, "available", lambda: True)


def calls_kernel(function, *args):
    return "optax_sparse_adam.read" in str(jax.make_jaxpr(function)(*args))


def rows_by_library(read):
    """What a loss reads, which it returns as an auxiliary output."""

    def loss(table, ids):
        rows = read(table, ids)
        return jnp.sum(rows), rows

    both = osa.value_and_grad(loss, has_aux=True)
    return lambda table, ids: both(table, ids)[0][1]


def assert_rows_of_jax(cases):
    """In one program each: it is compiling that takes time."""
    args = {name: case[1:] for name, case in cases.items()}

    def rows(way):
        reads = {name: way(case[0]) for name, case in cases.items()}
        return jax.jit(lambda args: {name: reads[name](*args[name]) for name in args})

    actual, expected = rows(rows_by_library)(args), rows(lambda read: read)(args)
    for name in cases:
        assert_identical(actual[name], expected[name], name)
        assert actual[name].weak_type == expected[name].weak_type, name


def table(*row_shape, dtype="float32"):
    """Small multiples of 1/8: sums and products of a few are exact in any order."""
    rng = np.random.default_rng(0)
    return np.asarray(rng.integers(1, 9, (ROWS, *row_shape)) / 8, dtype)


def special(*row_shape):
    """With payloads of NaN, signs of zeros, infinity, subnormal and any numbers."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (ROWS, *row_shape), "uint32")
    some = np.uint32([0x7FC12345, 0xFFC00000, 0x80000000, 0x7F800000, 0x00000001])
    chosen = rng.choice(some, bits.shape)
    return np.where(rng.random(bits.shape) < 0.5, bits, chosen).view("float32")


def take(mode=None, **kwargs):
    return lambda t, ids: jnp.take(t, ids, axis=0, mode=mode, **kwargs)


def of_each_id(t, ids):
    return jax.vmap(lambda i: t[i])(ids)


def without_first_axis(t, ids):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0,), collapsed_slice_dims=(0, 1), start_index_map=(0,)
    )
    return lax.gather(t, ids, numbers, (1, *t.shape[1:]), mode="clip")


MANY = np.random.default_rng(0).integers(-2, ROWS + 2, 5000, "int32")
READ = {
    "indexing": (lambda t, ids: t[ids], (17,), FAR),
    "take": (take(), (79,), FAR),
    "fill": (take("fill"), (2, 3, 4), FAR[None]),
    "fill_value": (take("fill", fill_value=-0.0), (64,), FAR),
    "clip": (take("clip"), (20,), FAR),
    "scalar": (take("clip"), (20,), FAR[1, 2]),
    "promise": (lambda t, ids: t.at[ids].get(mode="promise_in_bounds"), (20,), FAR[0]),
    "vmap": (of_each_id, (20,), FAR[1]),
    "vmap, two axes": (of_each_id, (5, 4), FAR[0]),
    "row with an axis of one": (without_first_axis, (1, 20), FAR[1, 1:2]),
    "in parts": (take("clip"), (64,), MANY),
    "in parts, filled": (take("fill"), (64,), MANY),
    "wide": (take("fill"), (200,), MANY),
    "very wide": (take("fill"), (40_000,), FAR),
}
READ = {name: (read, special(*row), ids) for name, (read, row, ids) in READ.items()}


def low_bits(*row_shape):
    """Numbers of bfloat16 of all kinds, and one NaN, as XLA rounds to one."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (ROWS, *row_shape), "uint16")
    is_nan = (bits & 0x7FFF) > 0x7F80
    return np.where(is_nan, 0x7FC0, bits).astype("uint16").view(jnp.bfloat16)


LOW = {
    "bfloat16": (take(), low_bits(5), FAR),
    "bfloat16, filled": (take("fill", fill_value=-2.5), low_bits(64), FAR),
    "bfloat16, wide": (take("clip"), low_bits(100), MANY),
}


def test_rows_are_those_of_jax():
    weak = LOW | {"weak type": (take(), jnp.full((ROWS, 64), 0.5), IDS)}
    assert_rows_of_jax(READ | weak)
    for name, (read, *args) in (READ | weak).items():
        assert calls_kernel(rows_by_library(read), *args), name


NOT_USED = {
    "narrow": (take(), table(16), IDS),
    "float16": (take(), table(64, dtype="float16"), IDS),
    "uint8": (take(), table(64), IDS[:3].astype("uint8")),
    "no ids": (take(), table(64), IDS[:0]),
    "parts of rows": (lambda t, ids: t[ids, :32], table(64), IDS),
    "columns": (lambda t, ids: jnp.take(t, ids, axis=1), table(64), IDS),
    "two indices": (lambda t, ids: t[ids, ids], table(64), IDS),
    "two of three": (lambda t, ids: t[ids, ids], table(9, 64), IDS),
    "cast": (lambda t, ids: t.astype("bfloat16")[ids], table(64), IDS),
    "scaled": (lambda t, ids: (2 * t)[ids], table(64), IDS),
    "also dense": (lambda t, ids: t[ids] + jnp.sum(t), table(64), IDS),
}


def test_where_xla_reads():
    assert_rows_of_jax(NOT_USED)
    for name, (read, *args) in NOT_USED.items():
        assert not calls_kernel(rows_by_library(read), *args), name
    with jax.enable_x64(True):
        ids = IDS.astype("int64")
        assert not calls_kernel(rows_by_library(take()), table(64), ids)


def square(t, ids):
    return jnp.sum(jnp.square(t[ids]))


def in_scan(t, ids):
    return lax.scan(lambda c, i: (c + square(t, i), None), 0.0, ids[:, None])[0]


def in_branches(t, ids):
    return lax.cond(ids[0] > 0, square, lambda t, ids: square(t, ids + 1), t, ids)


def squared_gradient(vg):
    return lambda t, ids: jnp.sum(jnp.square(dense(vg(square)(t, ids)[1])))


# A function of `value_and_grad`, and whether the kernel is called in the end.
UNDER = {
    "scan": (lambda vg: vg(in_scan), True),
    "cond": (lambda vg: vg(in_branches), True),
    "checkpoint": (lambda vg: vg(jax.checkpoint(square)), True),
    "vmap": (
        lambda vg: lambda t, ids: jax.vmap(vg(square), (None, 0))(t, ids[:, None]),
        True,
    ),
    "vmap of tables": (
        lambda vg: (
            lambda t, ids: jax.vmap(vg(square), (0, None))(jnp.stack([t, t + 1]), ids)
        ),
        False,
    ),
    "derivative": (
        lambda vg: (
            lambda t, ids: jax.jvp(
                lambda t: dense(vg(square)(t, ids)), (t,), (t[::-1],)
            )
        ),
        True,
    ),
    "gradient": (lambda vg: jax.grad(squared_gradient(vg)), True),
    "row-sparse gradient": (lambda vg: vg(squared_gradient(vg)), True),
}


@pytest.mark.parametrize("name", slow_but(UNDER, *list(UNDER)[::2]))
def test_under(name):
    transformed, there = UNDER[name]
    function, args = transformed(osa.value_and_grad), (table(20), IDS)
    assert calls_kernel(function, *args) == there
    expected = jax.jit(transformed(jax.value_and_grad))(*args)
    assert_identical(dense(jax.jit(function)(*args)), expected)
    if name == "cond":
        assert_identical(dense(function(*args)), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_of_a_batch_of_gradients(axis):
    """Row-sparse, though the program of each holds lookups of the kernel."""
    ids, t = np.arange(9).reshape(3, 3) % 7, table(20)

    def batch(vg):
        each = jax.vmap(squared_gradient(vg), (None, axis))
        return lambda t, ids: each(t, ids) @ jnp.arange(1.0, 4)

    value, grad = jax.jit(osa.value_and_grad(batch(osa.value_and_grad)))(t, ids)
    expected = jax.jit(jax.value_and_grad(batch(jax.value_and_grad)))(t, ids)
    assert grad.nse == 9
    assert_identical((value, dense(grad)), expected)


@pytest.mark.parametrize("name", ["exact_adam", "function"])
def test_memory_of_loops(name):
    """Over a bfloat16 table, all of which XLA would widen before the loop."""
    rows, state = 200_000, None
    like = jax.ShapeDtypeStruct((rows, 16), "bfloat16")
    if name == "exact_adam":
        state = jax.eval_shape(osa.exact_adam(0.1).init, like)

    def read(t, ids):
        t = jnp.tanh(t) if name == "function" else t
        return lax.map(lambda i: t[i], ids)

    def evaluated(t, state, ids):
        return osa.evaluate(read, read=state)(t, ids)

    lowered = jax.jit(evaluated).lower(like, state, jnp.zeros((3, 5), "int32"))
    assert compile_for_users(lowered).memory_analysis().temp_size_in_bytes < rows


@pytest.mark.parametrize(
    "name", slow_but(["indexing", "fill_value", "vmap"], "indexing")
)
def test_eagerly(name, compilations):
    """Also of NumPy's arrays; what was compiled serves again."""
    read, table, ids = READ[name]
    expected = jax.jit(read)(table, ids)
    function = rows_by_library(read)
    for kind in (jnp.asarray, np.asarray):
        assert_identical(function(kind(table), ids), expected)
        compilations.clear()
        assert_identical(function(kind(table), ids), expected)
        assert not compilations


def in_a_loop(t, ids):
    return lax.scan(lambda total, i: (total + jnp.tanh(t[i]), None), t[0], ids)[0]


# Uses of a table that is no argument: lookups, functions of rows, and of all of it.
USES = {
    "rows": lambda t, ids: t[ids],
    "take": lambda t, ids: jnp.take(t, ids, axis=0, mode="clip"),
    "filled": lambda t, ids: t.at[ids].get(mode="fill", fill_value=2.0),
    "function": lambda t, ids: jnp.tanh(2 * t)[ids],
    "columns": lambda t, ids: t[ids, 1:3],
    "one": lambda t, ids: t[3],
    "slice": lambda t, ids: lax.dynamic_slice(t, (ids[0], 0), (2, 24)),
    "all": lambda t, ids: t @ t[ids[0]] + jnp.sum(jnp.exp(t)),
    "tied": lambda t, ids: t[ids] @ t.T,
    "transposed": lambda t, ids: t.T[:, ids],
    "loop": in_a_loop,
    "jit": lambda t, ids: jax.jit(lambda t: t[ids] + t[:1])(t),
    "branch": lambda t, ids: lax.cond(ids[0] > 2, lambda: t[ids], lambda: 2 * t[ids]),
    "remat": lambda t, ids: jax.checkpoint(lambda t: jnp.sin(t[ids]))(t),
    "vmap": lambda t, ids: jax.vmap(lambda i: t[i])(ids),
    "bags": lambda t, ids: osa.embedding_bag(t, ids[None]),
    "sorted": lambda t, ids: jnp.sort(t, axis=0)[ids],
}


@pytest.mark.parametrize("name", slow_but(USES, "rows", "tied", "loop"))
def test_a_table_that_is_no_argument(name, monkeypatch):
    """A large one is read by the kernel, too; the numbers are those of JAX."""
    monkeypatch.setattr(walk, "_LARGE", 1)
    other = jnp.concatenate([table(24), table(24) + 2])

    def loss(own, ids):
        used = USES[name](other, ids)
        return jnp.sum(own[ids]) * jnp.sum(used * used), used

    args = table(24) + 1, jnp.asarray(IDS)
    (value, used), grad = jax.jit(osa.value_and_grad(loss, has_aux=True))(*args)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
    (jax_value, jax_used), jax_grad = expected
    np.testing.assert_allclose(value, jax_value, rtol=1e-5)
    np.testing.assert_allclose(used, jax_used, rtol=1e-6)
    np.testing.assert_allclose(dense(grad), jax_grad, rtol=1e-5)
    if name == "rows":
        assert (
            str(jax.make_jaxpr(osa.grad(loss, has_aux=True))(*args)).count(
                "optax_sparse_adam.read"
            )
            == 2
        )
