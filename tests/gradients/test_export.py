"""Programs of `jax.export` with free sizes: what works, and what says which are known.

A program is exported once, and called at several sizes, against the program as it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import optax_sparse_adam as osa
from optax_sparse_adam.native import _library

from ..helpers.support import TOLERANCE, assert_close, slow_but

ROWS, COLUMNS = 50, 4
TABLE = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)


def ids(*shape):
    ids = np.random.default_rng(sum(shape)).integers(0, ROWS, shape)
    return jnp.asarray(ids, jnp.int32)


def exported(fun, args, shapes, constraints=()):
    """`fun` of arguments of these symbolic shapes, `""` for one that is known."""
    scope = export.SymbolicScope(constraints)
    leaves, treedef = jax.tree.flatten(args)
    specs = [
        jax.ShapeDtypeStruct(
            export.symbolic_shape(shape, scope=scope) if shape else x.shape, x.dtype
        )
        for shape, x in zip(shapes, leaves, strict=True)
    ]
    return export.export(jax.jit(fun))(*treedef.unflatten(specs))


def looked_up(table, ids):
    return table[ids] * 2.0


def entries(grad):
    return grad.data, grad.indices


def loss(table, ids):
    return jnp.sum(jnp.sin(table[ids]))


def sequence(table, ids):
    """As a recurrent model reads it."""

    def step(carry, i):
        return jnp.tanh(carry + table[i]), jnp.vdot(table[i], table[(i * 7) % ROWS])

    carry, values = jax.lax.scan(step, jnp.zeros(COLUMNS), ids)
    return jnp.sum(carry) + jnp.sum(values)


def loss_of_bags(table, ids):
    return jnp.sum(osa.embedding_bag(table, ids) ** 2)


def stale():
    tx = osa.exact_adam(0.1)
    table = jnp.asarray(TABLE)
    step = osa.make_train_step(loss, tx)
    table, state, _ = step(table, tx.init(table), ids(4))
    table, state, _ = step(table, state, ids(5))
    return table, state


def read_stale(table, ids, fun=looked_up):
    table, state = stale()
    return osa.evaluate(fun, read=state)(table, ids)


def with_mode(mode):
    return lambda t, i: osa.embedding_bag(t, i, mode=mode)


def with_offsets(t, i, offsets):
    return osa.embedding_bag(t, i, offsets=offsets)


def with_last_offset(t, i, offsets):
    return osa.embedding_bag(t, i, offsets=offsets, include_last_offset=True)


def with_weights(t, i, weights):
    return osa.embedding_bag(t, i, weights=weights)


def padded(b, n):
    return (ids(b, n),)


def flat(n):
    return (ids(n),)


def by_offsets(n, b):
    return ids(n), jnp.asarray(np.arange(b) * n // b, jnp.int32)


def by_segments(n):
    return ids(n), jnp.asarray(np.arange(n) // 3 % 5, jnp.int32)


def largest(t, i, segments):
    return osa.embedding_bag(t, i, segment_ids=segments, num_segments=5, mode="max")


TRAINED = np.array([2, 7, 90])


def beside_frozen(frozen, i, trained):
    return osa.frozen_lookup(trained, i, frozen=frozen, rows=TRAINED)


def gradient_beside_frozen(frozen, i, trained):
    def loss(trained):
        return jnp.sum(jnp.sin(beside_frozen(frozen, i, trained)))

    return entries(osa.grad(loss)(trained))


def beside_trained(n):
    return jnp.arange(n, dtype=jnp.int32) % 10 - 1, jnp.ones((3, COLUMNS))


def weighted(b, n):
    return ids(b, n), jnp.sin(jnp.arange(b * n, dtype=jnp.float32)).reshape(b, n)


FEW, BAGS, SEGMENTS = ["b <= 50"], ["b * n <= 50"], ["n <= 50"]
CORE = "sum", "mean", "frozen", "evaluate of pairs", "arithmetic on a gradient"
CORE += ("evaluate a sequence",)
# The function, its arguments but the table, their shapes, sizes, constraints.
PROGRAMS = {
    "sum": (with_mode("sum"), padded, ["b, n"], [(1, 3), (5, 2), (17, 8)]),
    "mean": (with_mode("mean"), padded, ["b, n"], [(1, 3), (5, 2)]),
    "sqrtn": (with_mode("sqrtn"), padded, ["b, n"], [(1, 3), (5, 2)]),
    "max": (with_mode("max"), padded, ["b, n"], [(1, 3), (5, 2)]),
    "largest": (largest, by_segments, ["n", "n"], [(1,), (20,), (17,)]),
    "gradient of the largest": (
        lambda t, *bags: entries(osa.grad(lambda t: jnp.sum(largest(t, *bags)))(t)),
        by_segments,
        ["n", "n"],
        [(1,), (20,)],
        SEGMENTS,
    ),
    "frozen": (beside_frozen, beside_trained, ["n", ""], [(3,), (20,)]),
    "gradient beside frozen": (
        gradient_beside_frozen,
        beside_trained,
        ["n", ""],
        [(1,), (3,)],
        ["n <= 3"],
    ),
    "length": (with_mode("sum"), padded, ["b, 3"], [(1, 3), (9, 3)]),
    "offsets": (with_offsets, by_offsets, ["n", "b"], [(8, 3), (20, 5)]),
    "last offset": (with_last_offset, by_offsets, ["n", "b"], [(8, 3), (20, 5)]),
    "weights": (with_weights, weighted, ["b, n", "b, n"], [(1, 3), (5, 2)]),
    "evaluate": (osa.evaluate(looked_up), flat, ["b"], [(1,), (64,)]),
    "evaluate of pairs": (osa.evaluate(looked_up), padded, ["b, n"], [(1, 3), (5, 2)]),
    "evaluate bags": (
        osa.evaluate(with_mode("sum")),
        padded,
        ["b, n"],
        [(1, 3), (5, 2)],
    ),
    "evaluate stale rows": (read_stale, flat, ["b"], [(1,), (64,)]),
    "evaluate a function": (
        osa.evaluate(lambda t, i: jnp.tanh(2 * t).at[i].get(mode="fill", fill_value=0)),
        flat,
        ["b"],
        [(1,), (64,)],
    ),
    "evaluate a sequence": (osa.evaluate(sequence), flat, ["b"], [(1,), (64,)]),
    "evaluate a sequence of stale rows": (
        lambda t, i: read_stale(t, i, sequence),
        flat,
        ["b"],
        [(1,), (64,)],
    ),
    "evaluate a map of sequences": (
        osa.evaluate(lambda t, i: jax.lax.map(lambda j: sequence(t, j), i)),
        padded,
        ["b, n"],
        [(1, 3), (5, 2)],
    ),
    "gradient of a sequence": (
        lambda t, i: entries(osa.grad(sequence)(t, i)),
        flat,
        ["b"],
        [(1,), (16,)],
        ["3 * b <= 50"],
    ),
    "gradient": (
        lambda t, i: entries(osa.grad(loss)(t, i)),
        flat,
        ["b"],
        [(1,), (40,)],
        FEW,
    ),
    "gradient of bags": (
        lambda t, i: entries(osa.grad(loss_of_bags)(t, i)),
        padded,
        ["b, n"],
        [(1, 3), (5, 2)],
        BAGS,
    ),
    "arithmetic on a gradient": (
        lambda t, i: entries(2 * osa.grad(loss)(t, i)),
        flat,
        ["b"],
        [(1,), (40,)],
        FEW,
    ),
    "dense gradient of bags": (
        lambda t, i: jax.grad(loss_of_bags)(t, i),
        padded,
        ["b, n"],
        [(1, 3), (5, 2)],
    ),
}


@jax.numpy_dtype_promotion("standard")  # a symbolic size is an int32 to JAX
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(PROGRAMS, *CORE))
def test_called_at_several_sizes(name, native, monkeypatch):
    if not native:
        monkeypatch.setattr(_library, "available", lambda: False)
    fun, make, shapes, sizes, *constraints = PROGRAMS[name]
    table = jnp.asarray(TABLE)
    of_table = "v, 4" if "frozen" in name else ""
    program = exported(
        fun, (table, *make(*sizes[0])), [of_table, *shapes], *constraints
    )
    for size in sizes:
        args = table, *make(*size)
        got, wanted = program.call(*args), jax.jit(fun)(*args)
        for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
            tol = TOLERANCE["float32"].numpy
            assert_close(one, other, tol, magnitude=max(1.0, abs(other).max()))


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", ["50, c", "50, 3, c"])
def test_free_columns(shape, mode, monkeypatch):
    monkeypatch.setattr(_library, "available", lambda: False)

    def table(columns):
        size = 50, *[3] * (shape.count(",") - 1), columns
        return jnp.asarray(
            np.random.default_rng(columns).normal(size=size), jnp.float32
        )

    program = exported(with_mode(mode), (table(4), ids(5, 2)), [shape, ""])
    for columns in (1, 4, 7):
        args = table(columns), ids(5, 2)
        expected = with_mode(mode)(*args)
        np.testing.assert_allclose(program.call(*args), expected, rtol=1e-6)


READS = {
    "rows": lambda t, i: t[i],
    "columns": lambda t, i: t[i, 1:3],
    "take": lambda t, i: jnp.nan_to_num(jnp.take(t, i + 30, axis=0), nan=3.0),
    "fill": lambda t, i: t.at[i + 30].get(mode="fill", fill_value=2),
    "slice": lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 4),
    "windows": lambda t, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 4))(i),
}


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", READS)
def test_free_rows(name):
    """Of a server whose table grows, with stale rows and without."""
    tx = osa.exact_adam(0.1)

    def trained(rows):
        values = np.random.default_rng(rows).normal(size=(rows, COLUMNS))
        table = jnp.asarray(values, jnp.float32)
        step, state = osa.make_train_step(loss, tx), tx.init(table)
        for number in (4, 5):
            table, state, _ = step(table, state, ids(number) % rows)
        return table, state

    def free(tree):
        """Its rows, in all arrays that have some."""
        shapes = [x.shape for x in jax.tree.leaves(tree)]
        names = [", ".join(["v", *map(str, x[1:])]) for x in shapes]
        return [x if y[:1] == (40,) else "" for x, y in zip(names, shapes, strict=True)]

    def reads(tree, ids):
        table, state = tree
        with_state = osa.evaluate(READS[name], read=state)(table, ids)
        return with_state, osa.evaluate(READS[name])(table, ids)

    known = trained(40)
    program = exported(reads, (known, ids(3)), [*free(known), ""], ["v >= 8"])
    for rows in (40, 50, 33):
        args = trained(rows), ids(3)
        got, wanted = program.call(*args), jax.jit(reads)(*args)
        for one, other in zip(got, wanted, strict=True):
            assert_close(one, other, TOLERANCE["float32"].numpy)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_free_rows_that_may_be_fewer_than_columns():
    table = jnp.arange(5.0 * 64).reshape(5, 64)

    def read(table, i):
        return osa.evaluate(lambda t: lax.dynamic_slice(t, (i, i), (1, 3)))(table)

    program = exported(read, (table, jnp.int32(3)), ["v, 64", ""])
    np.testing.assert_array_equal(program.call(table, jnp.int32(3)), table[3:4, 3:6])


@pytest.mark.slow
def test_round_trip():
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    args = jnp.asarray(TABLE), ids(5, 2)
    program = exported(with_mode("mean"), args, ["", "b, n"])
    again = export.deserialize(program.serialize())
    for shape in ((1, 3), (17, 8)):
        args = args[0], ids(*shape)
        np.testing.assert_array_equal(again.call(*args), program.call(*args))


REFUSED = {
    "whether there are more lookups than rows": (
        lambda t, i: entries(osa.grad(loss)(t, i)),
        ["", "b"],
        (),
        r'constraints=\["b <= 50"\]',
    ),
    "sums": (
        lambda t, i: entries(osa.coalesce(osa.grad(loss)(t, i))),
        ["", "b"],
        FEW,
        "added up.*got b of them",
    ),
    "updates": (
        lambda t, i: entries(
            osa.sparse_adam(0.1).update(
                osa.grad(loss)(t, i), osa.sparse_adam(0.1).init(t)
            )[0]
        ),
        ["", "b"],
        FEW,
        "added up.*got b of them",
    ),
    "sums of bags": (
        lambda t, i: entries(osa.coalesce(osa.grad(loss_of_bags)(t, i[:, None]))),
        ["", "b"],
        FEW,
        "added up.*got b of them",
    ),
    "rows of a gradient": (
        lambda t, i: entries(osa.grad(loss)(t, i)),
        ["v, 4", ""],
        ["4 <= v"],
        r"known number of rows, got v of .*sparse=False",
    ),
    "rows": (
        lambda t, i: osa.embedding_bag(t, i[:, None]),
        ["v, 4", "b"],
        (),
        "a known number of rows",
    ),
    "trained rows": (
        lambda t, i: osa.frozen_lookup(t, i, frozen=jnp.ones((9, COLUMNS)), rows=i),
        ["v, 4", "v"],
        (),
        "a known number of trained rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_must_be_known(name):
    fun, shapes, constraints, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        exported(fun, (jnp.asarray(TABLE), ids(4)), shapes, constraints)
