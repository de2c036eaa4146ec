"""Indices that were treated as values: seen wherever a gradient or an update enters."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam._rows.canary_arrays import is_zero

from ..helpers.support import (
    assert_identical,
    bcoo,
    compile_for_users,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

SHAPE = (9, 4)
TABLE = jnp.arange(36.0).reshape(SHAPE)
IDS = np.array([3, 7, 3])
WEIGHTS = np.array([[1.0], [2.0], [4.0]], np.float32)
EXPECTED = np.float32([0, 0, 0, 5, 0, 0, 0, 2, 0])[:, None] + np.zeros(4, np.float32)


def loss(table):
    return jnp.sum(table[IDS] * WEIGHTS)


def gradient():
    return osa.grad(loss)(TABLE)


def bag_gradient():
    return osa.grad(lambda t: jnp.sum(osa.embedding_bag(t, IDS[None])))(TABLE)


def mapped(function):
    return lambda grad: jax.tree.map(function, grad)


def stock(tx):
    return lambda grad: tx.update(grad, tx.init(TABLE))[0]


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)

# What changes the indices, and whether a program sees it while it is traced.
CHANGES = {
    "scale": (stock(optax.scale(-0.5)), True),
    "a cast": (mapped(lambda x: x.astype(jnp.bfloat16)), True),
    "a mean over entries": (mapped(lambda x: jnp.mean(x, axis=0)), True),
    "a sum over entries": (mapped(lambda x: jnp.sum(x, axis=0)), True),
    "sgd with a schedule": (stock(optax.sgd(SCHEDULE)), False),
    "a sign": (stock(optax.scale(-1)), False),
    "sign_sgd's sign": (mapped(jnp.sign), False),
    "a sum": (lambda grad: jax.tree.map(jnp.add, grad, grad), False),
    "clip": (mapped(lambda x: jnp.clip(x, -1, 1)), False),
    "square": (mapped(jnp.square), False),
    "ones": (mapped(jnp.ones_like), False),
}

# Who takes a gradient or an update, and returns the table or one with NaN in it.
ADAM = osa.sparse_adam(0.1)
LAZY = osa.lazy(optax.sgd(0.1, momentum=0.9))


def updated(tx):
    return lambda grad: osa.apply_updates(
        TABLE, tx.update(grad, tx.init(TABLE), TABLE)[0]
    )


TAKERS = {
    "apply_updates": lambda grad: osa.apply_updates(TABLE, grad),
    "optax.apply_updates": lambda grad: optax.apply_updates(TABLE, grad),
    "coalesce": lambda grad: TABLE + osa.coalesce(grad).todense(),
    "sparse_adam": updated(ADAM),
    "lazy": updated(LAZY),
    "sparse_adafactor": updated(osa.sparse_adafactor()),
    "times a number": lambda grad: TABLE + (2.0 * grad).todense(),
}
FEW = ("apply_updates", "optax.apply_updates", "sparse_adam")


# Each change for one taker, and one change for each.
PAIRS = [(change, taker) for change in CHANGES for taker in TAKERS]
FEW_PAIRS = [(c, t) for c, t in PAIRS if t == "apply_updates" or c == "clip"]


@pytest.mark.parametrize(("change", "taker"), slow_but(PAIRS, *FEW_PAIRS))
def test_raises_outside_of_programs(change, taker):
    function, _ = CHANGES[change]
    grad = function(gradient())
    with pytest.raises((TypeError, ValueError), match="inside lazy: optax_sparse_adam"):
        TAKERS[taker](grad)


@pytest.mark.parametrize("taker", slow_but(FEW, "apply_updates"))
@pytest.mark.parametrize("change", CHANGES)
def test_nan_or_error_in_programs(change, taker):
    function, is_static = CHANGES[change]
    program = jax.jit(lambda: TAKERS[taker](function(gradient())))
    if is_static:
        with pytest.raises((TypeError, ValueError), match="inside lazy"):
            program()
    else:
        table = program()
        assert np.isnan(table[: len(IDS)]).all()  # the first nse rows
        assert_identical(table[len(IDS) :], TABLE[len(IDS) :])


@pytest.mark.slow
@pytest.mark.parametrize("make", [gradient, bag_gradient])
def test_every_taker_in_a_program(make):
    function, _ = CHANGES["clip"]
    tables = jax.jit(lambda grad: [take(function(grad)) for take in TAKERS.values()])(
        make()
    )
    for name, table in zip(TAKERS, tables, strict=True):
        assert np.isnan(table[: len(IDS)]).all(), name


# Every public way to read a BCOO, and what needs no values; JAX may add more.
OTHER = jnp.ones(SHAPE)
ONE_ROW = BCOO((jnp.ones((1, 4)), jnp.array([[2]])), shape=SHAPE)
READS = {
    "__abs__": abs,
    "__add__": lambda g: g + OTHER,
    "__getitem__": lambda g: g[0:9],
    "__iter__": lambda g: jnp.stack([x.todense() for x in g]),
    "__matmul__": lambda g: g.update_layout(n_dense=0) @ OTHER.T,
    "__mul__": lambda g: g * 2.0,
    "__neg__": lambda g: -g,
    "__pos__": lambda g: +g,
    "__pow__": lambda g: g**2,
    "__radd__": lambda g: OTHER + g,
    "__rmatmul__": lambda g: OTHER.T @ g,
    "__rmul__": lambda g: 2.0 * g,
    "__rsub__": lambda g: ONE_ROW - g,
    "__sub__": lambda g: g - ONE_ROW,
    "__truediv__": lambda g: g / 2.0,
    "_bufs": lambda g: BCOO(g._bufs, shape=g.shape),
    "astype": lambda g: g.astype(jnp.float16),
    "reshape": lambda g: g.update_layout(n_dense=0).reshape(36),
    "sort_indices": lambda g: g.sort_indices(),
    "sum": lambda g: g.sum(),
    "sum_duplicates": lambda g: g.sum_duplicates(nse=3),
    "todense": lambda g: g.todense(),
    "transpose": lambda g: g.transpose((0, 1)),
    "update_layout": lambda g: g.update_layout(n_dense=0),
}
REFUSED = ["T", "__rpow__", "__rtruediv__"]  # by JAX, of every BCOO
NO_VALUES = """
__abstractmethods__ __annotations__ __dict__ __len__ __module__ __slots__ __weakref__
_abc_impl _empty _eye _info block_until_ready dtype from_scipy_sparse fromdense n_batch
n_dense n_sparse ndim nse size tree_flatten tree_unflatten
"""
FUNCTIONS = {
    "bcoo_broadcast_in_dim": lambda f, g: f(
        g.update_layout(n_dense=0), shape=SHAPE, broadcast_dimensions=(0, 1)
    ),
    "bcoo_dynamic_slice": lambda f, g: f(g, (0, 0), SHAPE),
    "bcoo_multiply_dense": lambda f, g: f(g.update_layout(n_dense=0), OTHER),
    "bcoo_reduce_sum": lambda f, g: f(g, axes=(0,)),
    "bcoo_rev": lambda f, g: f(g, (0,)),
    "bcoo_slice": lambda f, g: f(g, start_indices=(0, 0), limit_indices=SHAPE),
    "bcoo_todense": lambda f, g: f(g),
    "bcoo_transpose": lambda f, g: f(g.update_layout(n_dense=0), permutation=(1, 0)),
    "bcoo_update_layout": lambda f, g: f(g, n_dense=0),
}


def read_by(name):
    if name in READS:
        return READS[name]
    return functools.partial(FUNCTIONS[name], getattr(sparse, name))


def test_every_way_to_read_is_known():
    # What Python 3.13 gives to every class.
    of_python = {"__firstlineno__", "__static_attributes__"}
    names = set(dir(BCOO)) - set(dir(object)) - of_python
    assert names == {*READS, *REFUSED, *NO_VALUES.split()}


FEW_READS = ["todense", "__getitem__", "update_layout", "_bufs", "bcoo_todense"]


@pytest.mark.parametrize("name", slow_but([*READS, *FUNCTIONS], *FEW_READS))
@pytest.mark.parametrize("make", [gradient, bag_gradient])
def test_every_way_to_read(name, make):
    """Right for a gradient as it was made; an error, or NaN, for one that was not."""
    read, plain = read_by(name), make()
    plain = BCOO((plain.data, plain.indices), shape=SHAPE)

    def dense(grad):
        found = read(grad)
        return found.todense() if isinstance(found, BCOO) else found

    for grad in (make(), mapped(lambda x: x + 0)(make())):
        for lift in (lambda f: f, jax.jit):
            assert_identical(lift(dense)(grad), dense(plain))
    for change in ("a sum", "clip"):
        changed = CHANGES[change][0](make())
        with pytest.raises(ValueError, match="must have the indices"):
            dense(changed)
        assert np.isnan(jax.jit(dense)(changed)).any()


# What leaves every entry as it is, or moves it together with its canary.
HARMLESS = {
    "identity": lambda grad: grad,
    "scale by 1": stock(optax.scale_by_schedule(optax.constant_schedule(1.0))),
    "sign and back": stock(optax.chain(optax.scale(-1), optax.scale(-1))),
    "added to zeros": lambda grad: jax.tree.map(
        jnp.add, jax.tree.map(jnp.zeros_like, grad), grad
    ),
    "where": mapped(lambda x: jnp.where(True, x, 0)),
    "nan_to_num": mapped(jnp.nan_to_num),
    "another order": mapped(lambda x: x[::-1]),
    "halves": lambda grad: jax.tree.map(
        lambda a, b: jnp.concatenate([a, b]),
        mapped(lambda x: x[:2])(grad),
        mapped(lambda x: x[2:])(grad),
    ),
    "padding": mapped(lambda x: jnp.pad(x, [(0, 5), (0, 0)])),
    "cond": lambda grad: jax.lax.cond(True, lambda g: g, lambda g: g * 2.0, grad),
    "scan": lambda grad: jax.lax.scan(lambda c, _: (c, None), grad, length=2)[0],
    "stack and vmap": lambda grad: jax.tree.map(
        lambda x: x[1],
        jax.vmap(lambda g: g * 1.0)(jax.tree.map(lambda x: jnp.stack([x, x]), grad)),
    ),
    "arithmetic": lambda grad: -(2.0 * grad - grad * 3.0) / 1.0,
    "coalesce": osa.coalesce,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(name):
    for way in (lambda f: f, jax.jit):
        grad = way(HARMLESS[name])(gradient())
        table = osa.apply_updates(jnp.zeros(SHAPE), grad)
        assert_identical(table, jnp.asarray(EXPECTED))
        assert type(grad) is type(gradient())


# More ids than rows: each micro-batch is added up, and has each row once.
MANY = np.random.default_rng(0).integers(0, SHAPE[0], (3, 12))


def many_gradients(ids):
    return jax.vmap(lambda x: osa.grad(lambda t: jnp.sum(t[x] ** 2))(TABLE))(ids)


JOINED = {
    "vmap": lambda: mapped(lambda x: x.reshape(-1, *x.shape[2:]))(many_gradients(MANY)),
    "scan": lambda: mapped(lambda x: x.reshape(-1, *x.shape[2:]))(
        jax.lax.scan(
            lambda _, ids: (
                0,
                osa.coalesce(osa.grad(lambda t: jnp.sum(t[ids] ** 2))(TABLE)),
            ),
            0,
            MANY[:, :5],
        )[1]
    ),
    "concatenate": lambda: jax.tree.map(
        lambda *x: jnp.concatenate(x),
        *(osa.grad(lambda t, x=x: jnp.sum(t[x] ** 2))(TABLE) for x in MANY),
    ),
    "repeated": lambda: mapped(lambda x: x[np.repeat(np.arange(9), 2)])(
        osa.grad(lambda t: jnp.sum(t[MANY[0]] ** 2))(TABLE)
    ),
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(lambda f: f, id="eager", marks=pytest.mark.slow), jax.jit],
    ids=["eager", "jit"],
)
@pytest.mark.parametrize("name", slow_but(JOINED, "vmap"))
def test_gradients_of_other_lengths_have_no_flags(name, way):
    """Laid end to end, rows of one are in another, too; a part of one keeps none."""

    def joined():
        grad = JOINED[name]()
        tx = osa.lazy(optax.adam(0.1))
        updates, _ = tx.update(grad, tx.init(TABLE), TABLE)
        return grad, osa.gradient_stats(grad), osa.apply_updates(TABLE, updates)

    grad, stats, table = way(joined)()
    assert not grad.unique_indices
    assert not grad.indices_sorted
    dense = np.zeros((100, SHAPE[1]))
    np.add.at(dense, np.asarray(grad.indices)[:, 0], np.asarray(grad.data, np.float64))
    dense = dense[: SHAPE[0]]  # all others are padding
    np.testing.assert_allclose(stats.norm, np.linalg.norm(dense), rtol=1e-6)
    assert stats.touched == np.count_nonzero(dense.any(axis=1))
    adam = optax.adam(0.1)
    updates, _ = adam.update(jnp.float32(dense), adam.init(TABLE))
    np.testing.assert_allclose(table, TABLE + updates, rtol=1e-6)


@pytest.mark.slow
def test_members_keep_their_flags():
    """Each has its own entries; so has what goes through a program as it is."""
    grads = many_gradients(MANY)
    for grad in (grads, jax.jit(lambda x: x)(grads), mapped(lambda x: x[1])(grads)):
        assert grad.unique_indices
        assert grad.nse == SHAPE[0]
    labels = mapped(lambda _: 1)(grads)
    assert jax.tree.structure(labels) == jax.tree.structure(grads)


def test_copies():
    grad = gradient()
    for other in (
        pickle.loads(pickle.dumps(grad)),
        copy.deepcopy(grad),
        jax.device_get(grad),
    ):
        assert_identical(osa.apply_updates(jnp.zeros(SHAPE), other), EXPECTED)
    assert repr(grad) == "BCOO(float32[9, 4], nse=3, n_dense=1)"
    assert isinstance(grad, BCOO)


@pytest.mark.parametrize("make", [gradient, bag_gradient])
def test_zeros_touch_nothing(make):
    """Zeros in place of all arrays are no entries: momentum moves no row."""
    grad, tx = make(), LAZY
    state = jax.tree.map(jnp.ones_like, tx.init(TABLE))
    zeros = jax.tree.map(jnp.zeros_like, grad)
    for way in (lambda f: f, jax.jit):
        updates, new = way(tx.update)(zeros, state)
        assert_identical(new, state)
        assert_identical(osa.apply_updates(TABLE, updates), TABLE)
        assert_identical(way(optax.apply_updates)(TABLE, zeros), TABLE)
        found = way(osa.coalesce)(zeros).indices
        assert (found >= SHAPE[0]).all()
        assert len(np.unique(found)) == len(IDS)


@pytest.mark.slow
def test_axes_of_devices():
    """The canary is split, gathered and stacked as the indices are."""
    mesh = jax.make_mesh((3,), ("x",), (AxisType.Auto,))
    grad = gradient()
    split = jax.shard_map(
        lambda grad: grad * 1.0,
        mesh=mesh,
        in_specs=(P("x", None),),
        out_specs=P("x", None),
    )
    assert_identical(osa.apply_updates(jnp.zeros(SHAPE), split(grad)), EXPECTED)
    for function, is_right in ((osa.psum, True), (jax.lax.psum, False)):
        total = jax.jit(
            jax.shard_map(
                lambda grad, psum=function: psum(grad, "x"),
                mesh=mesh,
                in_specs=(P("x"),),
                out_specs=P(),
                check_vma=function is jax.lax.psum,
            )
        )(grad)
        table = jax.jit(osa.apply_updates)(jnp.zeros(SHAPE), total)
        if is_right:
            assert_identical(table, EXPECTED)
        else:  # the ids of the devices were added up
            assert np.isnan(table[0]).all()
    many = jax.pmap(osa.grad(lambda t, ids: jnp.sum(t[ids])), in_axes=(None, 0))
    grads = many(TABLE, IDS[:, None])
    assert grads.shape == (3, *SHAPE)
    tables = jax.vmap(osa.apply_updates, (None, 0))(jnp.zeros(SHAPE), grads)
    assert_identical(tables, grads.todense())


def test_changed_before_it_is_sent():
    """Inside of a program on several devices, too."""
    mesh = jax.make_mesh((3,), ("x",), (AxisType.Auto,))

    def total(grad):
        return osa.pmean(jax.tree.map(lambda x: -x, grad), "x")

    step = jax.shard_map(
        total, mesh=mesh, in_specs=(P("x"),), out_specs=P(), check_vma=False
    )
    table = osa.apply_updates(TABLE, jax.jit(step)(gradient()))
    assert np.isnan(table[0]).all()


@pytest.mark.parametrize(
    "make",
    slow_but(
        [osa.sparse_adam, osa.exact_adam, lambda r: osa.lazy(optax.adam(r))],
        osa.sparse_adam,
    ),
)
def test_costs_nothing_in_a_program(make):
    """With gradient and update in one, the compiled text is that without a canary."""
    tx = make(0.1)

    def compiled(convert):
        def step(table, state, ids):
            read = state if make is osa.exact_adam else None
            grad = osa.grad(lambda t: jnp.sum(jnp.sin(t[ids])), read=read)(table)
            updates, state = tx.update(convert(grad), state)
            return osa.apply_updates(table, updates), state

        table = jax.ShapeDtypeStruct((5000, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((64,), jnp.int32)
        args = (table, jax.eval_shape(tx.init, table), ids)
        program = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        program = compile_for_users(program)
        text = program.as_text()
        sizes = program.memory_analysis()
        return text.count(" fusion("), text.count(" = "), sizes.temp_size_in_bytes

    def plain(grad):
        return BCOO((grad.data, grad.indices), shape=grad.shape)

    assert compiled(lambda grad: grad) == compiled(plain)


def test_constant_values_are_not_reduced_while_compiling():
    """XLA would take seconds for the gradient of a sum over a large batch."""
    empty = jax.jit(lambda indices: is_zero(jnp.ones((8, 4)), 0, indices))
    text = empty.lower(jax.ShapeDtypeStruct((8, 1), jnp.int32)).compile().as_text()
    assert "pred[8,4]" in text  # computed by the program


@pytest.mark.slow
def test_made_by_hand():
    """A BCOO of nobody's has no canary: it is believed, and stays what it is."""
    grad = bcoo(WEIGHTS * np.ones(4, np.float32), IDS[:, None], SHAPE)
    tx = osa.sparse_adam(0.1)
    updates, _ = tx.update(grad, tx.init(TABLE))
    for result in (osa.coalesce(grad), updates):
        assert type(result) is BCOO
    with pytest.raises(TypeError, match="integer indices"):
        osa.apply_updates(TABLE, jax.tree.map(lambda x: 0.5 * x, grad))
