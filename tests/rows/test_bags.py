"""`embedding_bag` against torch and a loop in float64, and what takes its gradient."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.sparse import BCOO
from jax.test_util import check_grads

import optax_sparse_adam as osa

from ..helpers.gradients import dense
from ..helpers.support import (
    assert_close,
    assert_identical,
    program_environment,
    slow_but,
)
from ..helpers.versions import FAST_TO_COMPILE

ROWS, DIM, BAGS, LENGTH = 40, 3, 6, 5
bag = osa.embedding_bag


def numbers(seed=0, *, rows=ROWS):
    """A table, ids of which some are padding, weights, and the bag of each id."""
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.standard_normal((rows, DIM)), jnp.float32)
    ids = jnp.asarray(rng.integers(-2, rows + 2, (BAGS, LENGTH)))
    weights = jnp.asarray(rng.standard_normal(ids.shape), jnp.float32)
    segments = jnp.asarray(rng.integers(-1, BAGS + 1, ids.size))
    return table, ids, weights, segments


def loop(table, ids, segments, weights, mode, num_bags=BAGS):
    """In float64."""
    table = np.asarray(table, np.float64)
    found = np.zeros((num_bags, *table.shape[1:]))
    weights = np.ones(len(ids)) if weights is None else np.float64(weights)
    for k in range(num_bags):
        of = [n for n, i in enumerate(ids) if segments[n] == k and 0 <= i < len(table)]
        if not of:
            continue
        rows, own = table[np.asarray(ids)[of]], weights[of]
        total = np.tensordot(own, rows, 1)
        size = {"sum": 1, "mean": own.sum(), "sqrtn": np.sqrt((own**2).sum())}
        found[k] = rows.max(axis=0) if mode == "max" else total / size[mode]
    return found


MODES = [("sum", 0), ("sum", 1), ("mean", 0), ("sqrtn", 0), ("sqrtn", 1), ("max", 0)]


@pytest.mark.parametrize(("mode", "has_weights"), MODES)
@pytest.mark.parametrize("form", ["matrix", "offsets", "segments"])
def test_values(mode, has_weights, form):
    table, ids, weights, segments = numbers()
    weights = weights if has_weights else None
    flat = None if weights is None else weights.ravel()
    if form == "matrix":
        actual = bag(table, ids, weights=weights, mode=mode)
        segments = np.repeat(np.arange(BAGS), LENGTH)
    elif form == "offsets":
        offsets = jnp.array([0, 4, 4, 11, 20, 20])
        actual = bag(table, ids.ravel(), offsets=offsets, weights=flat, mode=mode)
        segments = np.searchsorted(offsets, np.arange(ids.size), side="right") - 1
    else:
        kinds = {"segment_ids": segments, "num_segments": BAGS}
        actual = bag(table, ids.ravel(), **kinds, weights=flat, mode=mode)
    expected = loop(table, ids.ravel(), segments, flat, mode)
    assert_close(actual, expected, 2e-5, magnitude=1 + np.abs(expected))


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["matrix", "offsets", "last offset"])
def test_torch(mode, form):
    """Values and gradients, with empty bags, padding and ties."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    table = rng.integers(-2, 3, (9, DIM)).astype(np.float32)  # with ties
    ids = rng.integers(0, 9, (BAGS, LENGTH))
    cotangent = rng.standard_normal((BAGS, DIM)).astype(np.float32)
    weights = rng.standard_normal(ids.shape).astype(np.float32)
    weights, offsets, kwargs = (weights if mode == "sum" else None), None, {}
    if form != "matrix":
        ids, weights = ids.ravel(), None if weights is None else weights.ravel()
        offsets = np.array([0, 4, 4, 11, 20, 20])
        if form == "last offset":
            # With padding behind, but where torch counts that.
            offsets = np.append(offsets, len(ids) - (2 if mode == "max" else 0))
            kwargs = {"include_last_offset": True}
    leaves = [torch.tensor(table, requires_grad=True)]
    if weights is not None:
        leaves.append(torch.tensor(weights, requires_grad=True))
    expected = torch.nn.functional.embedding_bag(
        torch.tensor(ids),
        leaves[0],
        None if offsets is None else torch.tensor(offsets),
        mode=mode,
        per_sample_weights=None if weights is None else leaves[1],
        padding_idx=-7,
        **kwargs,
    )
    expected.backward(torch.tensor(cotangent))

    ids = np.where(ids == len(table) - 7, len(table), ids)  # padding

    def function(table, weights):
        return bag(table, ids, offsets=offsets, weights=weights, mode=mode, **kwargs)

    args = jnp.asarray(table), None if weights is None else jnp.asarray(weights)
    value, pullback = jax.vjp(function, *args)
    assert_close(value, expected.detach(), 1e-6, magnitude=8.0)
    for actual, leaf in zip(jax.tree.leaves(pullback(cotangent)), leaves, strict=True):
        assert_close(actual, leaf.grad, 1e-6, magnitude=8.0)


@pytest.mark.slow
@jax.enable_x64(True)
@jax.numpy_dtype_promotion("standard")  # for optax
def test_exact_adam_is_dense_adam():
    def loss(table, ids):
        return jnp.sum(jnp.tanh(bag(table, ids, mode="mean")))

    table, tx = numbers()[0].astype("float64"), osa.exact_adam(0.01)
    reference = optax.adam(0.01)
    ours, theirs = (jnp.copy(table), tx.init(table)), (table, reference.init(table))
    step = osa.make_train_step(loss, tx)
    dense_step = osa.make_train_step(loss, reference, sparse=False)
    for seed in range(40):
        ids = numbers(seed)[1]
        *ours, value = step(*ours, ids)
        *theirs, expected = dense_step(*theirs, ids)
        assert_close(value, expected, 1e-10, magnitude=1.0)
    table, _ = osa.flush(*ours)
    assert_close(table, theirs[0], 1e-10, magnitude=1.0)


def scanned(table, ids, weights, segments, copies=1):
    def body(carry, ids):
        return carry + jnp.sum(jnp.tanh(bag(table, ids, weights=weights) * carry)), None

    stack = jnp.stack([ids, ids[::-1]] * copies)
    return lax.scan(body, jnp.float32(1), stack)[0]


def mapped(table, ids, weights, segments):
    def one(ids, segments):
        return bag(table, ids, segment_ids=segments, num_segments=4)

    both = jnp.stack([ids.ravel(), ids[::-1].ravel()])
    return jnp.sum(jnp.tanh(jax.vmap(one, (0, None))(both, segments)))


def branched(table, ids, weights, segments, larger):
    def one(table):
        return jnp.sum(jnp.tanh(bag(table, ids, weights=weights)))

    def other(table):
        flat = bag(table, ids.ravel(), segment_ids=segments, num_segments=4)
        return jnp.sum(flat) + jnp.sum(bag(table, ids[:2], mode="mean"))

    return lax.cond((jnp.sum(weights) > 0) == larger, one, other, table)


def several(table, ids, weights, segments):
    product = bag(table, ids) * bag(table, ids[::-1], weights=weights)
    return jnp.sum(product) + jnp.sum(table[ids[0]] ** 2)


def of_function(table, ids, weights, segments):
    """Each row is looked up, as tanh of a sum is no sum."""
    return jnp.sum(bag(jnp.tanh(2 * table), ids, weights=weights) ** 2)


PROGRAMS = {
    "weights": lambda t, i, w, s: jnp.sum(jnp.tanh(bag(t, i, weights=w))),
    "sqrtn": lambda t, i, w, s: jnp.sum(bag(t, i, weights=w, mode="sqrtn") ** 2),
    "max": lambda t, i, w, s: jnp.sum(jnp.tanh(bag(t, i, mode="max"))),
    "remat": lambda t, i, w, s: jax.checkpoint(PROGRAMS["weights"])(t, i, w, s),
    "scan": scanned,
    "long scan": functools.partial(scanned, copies=9),  # more lookups than rows
    "vmap": mapped,
    "one branch": functools.partial(branched, larger=True),
    "another branch": functools.partial(branched, larger=False),
    "several": several,
    "function of a table": of_function,
}
EXPANDED = ("max", "long scan", "function of a table")


def check_gradients(function, argnums, args):
    """Returns that of the table, after a comparison with JAX's."""
    ours, theirs = (
        f(function, argnums) for f in (osa.value_and_grad, jax.value_and_grad)
    )
    actual, expected = jax.jit(lambda *args: (ours(*args), theirs(*args)))(*args)
    (found, (grad, of_other)), (value, (table, other)) = actual, expected
    assert_close(found, value, 1e-5, magnitude=abs(value) + 1)
    assert_close(dense(grad), table, 1e-5, magnitude=np.abs(table).max())
    assert_close(dense(of_other), other, 1e-5, magnitude=np.abs(other).max() + 1)
    return grad


def is_by_bags(function, *args):
    """Whether an optimiser in the same program finds the bags of the gradient."""
    found = []

    def program(*args):
        found.append(osa.grad(function)(*args).bags is not None)

    jax.eval_shape(program, *args)
    return found[0]


@pytest.mark.parametrize(
    "name",
    slow_but(PROGRAMS, "weights", "max", "scan", "vmap", "one branch", "several"),
)
def test_gradients(name):
    """Those of JAX, of table and weights; kept by bags."""
    args = numbers(rows=150)
    if name == "long scan":
        args = numbers()
    grad = check_gradients(PROGRAMS[name], (0, 2), args)
    assert isinstance(grad, BCOO)
    assert is_by_bags(PROGRAMS[name], *args) == (name not in EXPANDED)


@pytest.mark.slow
def test_second_derivatives_by_differences():
    table, ids, weights, segments = numbers(rows=6)
    kinds = {"segment_ids": segments, "num_segments": BAGS, "mode": "mean"}

    def function(table, weights):
        return jnp.tanh(bag(table, ids.ravel() % 6, weights=weights, **kinds))

    weights = jnp.abs(weights.ravel()) + 1
    check_grads(jax.jit(function), (table, weights), 2, atol=1e-2, rtol=1e-2)


@pytest.mark.slow
def test_second_derivatives():
    table, ids, weights, _ = numbers(rows=6)
    weights = jnp.abs(weights) + 1

    def squares(gradient, weights):
        def loss(table):
            return jnp.sum(jnp.tanh(bag(table, ids, weights=weights)) ** 2)

        grad = gradient(loss)(table)
        grad = osa.coalesce(grad).data if isinstance(grad, BCOO) else grad
        return jnp.sum(grad**2)

    actual, expected = (
        jax.jit(jax.grad(functools.partial(squares, lib.grad)))(weights)
        for lib in (osa, jax)
    )
    assert_close(actual, expected, 1e-5, magnitude=np.abs(expected).max())


def test_weights_are_differentiated_on_demand():
    """Their derivative would read all rows once more."""
    table, ids, weights, _ = numbers()

    def gathers(argnums):
        def loss(table, weights):
            return jnp.sum(bag(table, ids, weights=weights) ** 2)

        text = str(jax.make_jaxpr(osa.grad(loss, argnums))(table, weights))
        return text.count(" gather[")

    assert gathers((0, 1)) == gathers(0) + 1


TRANSFORMATIONS = {
    "sparse_adam": osa.sparse_adam(0.1),
    "exact_adam": osa.exact_adam(0.1),
    "lazy": osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "sparse_adafactor": osa.sparse_adafactor(),
    "rowwise_adagrad": osa.rowwise_adagrad(0.1),
}


def bag_loss(seed=0):
    _, ids, weights, _ = numbers(seed)
    return lambda table: jnp.sum(jnp.tanh(bag(table, ids, weights=weights)))


def factored(seed=0, read=None):
    """A gradient by bags, and the same with a row for each entry."""
    grad = osa.grad(bag_loss(seed), read=read)(numbers(seed)[0])
    assert grad.bags is not None
    return grad, BCOO((grad.data, grad.indices), shape=grad.shape)


TAKES = [(name, way) for name in TRANSFORMATIONS for way in ("plain", "kernel")]


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(
        TAKES,
        ("exact_adam", "plain"),
        ("rowwise_adagrad", "kernel"),
    ),
    indirect=["backend"],
)
@jax.numpy_dtype_promotion("standard")  # for optax
def test_optimizers_take_it(name, backend):
    tx, table = TRANSFORMATIONS[name], numbers()[0]
    read = tx.init(table) if name == "exact_adam" else None

    @functools.partial(jax.jit, static_argnums=0)
    def updated(has_bags, table):
        grad = osa.grad(bag_loss(), read=read)(table)
        assert grad.bags is not None
        grad = grad if has_bags else BCOO((grad.data, grad.indices), shape=grad.shape)
        updates, state = tx.update(grad, tx.init(table), table)
        return osa.apply_updates(table, updates), state

    actual, expected = updated(True, table), updated(False, table)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_close(a, e, 1e-6, magnitude=np.abs(e).max())


@pytest.mark.slow
def test_row_arithmetic_takes_it():
    (grad, rows), table = factored(), numbers()[0]
    assert_identical(osa.coalesce(grad).data, osa.coalesce(rows).data)
    assert_identical(osa.apply_updates(table, -grad), osa.apply_updates(table, -rows))
    assert_identical(osa.apply_updates(table, grad), osa.apply_updates(table, rows))
    grad.data = 2 * grad.data
    assert_identical(osa.coalesce(grad).data, 2 * osa.coalesce(rows).data)
    (grad, rows), other = factored(), jnp.zeros_like(rows.indices)
    rows.indices = grad.indices = other
    assert_identical(osa.coalesce(grad).data, osa.coalesce(rows).data)


@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_floats_alone_are_scaled(factor):
    """The gradient is scaled once."""
    grad, _ = factored()
    scaled = jax.tree.map(lambda x: factor * x if x.dtype == "float32" else x, grad)
    np.testing.assert_array_equal(scaled.data, factor * grad.data)
    summed, expected = osa.coalesce(scaled).data, factor * osa.coalesce(grad).data
    np.testing.assert_array_equal(summed, expected)


def test_a_gradient_without_values():
    """Its form is known of shapes alone, as that of other gradients."""
    grad, _ = factored()
    shapes = jax.eval_shape(lambda: grad)
    assert repr(shapes) == repr(grad)
    assert shapes.data.shape == grad.data.shape
    for empty in (None, (), []):
        for grads in (grad, osa.coalesce(grad)):
            mapped = jax.tree.map(lambda _: empty, grads)  # noqa: B023
            assert repr(mapped) == "BCOO(<invalid>)"
    assert repr(jax.tree.map(jnp.shape, grad)) == "BCOO(<invalid>)"
    assert_identical(jax.device_get(grad).data, grad.data)


BAD = {
    "ids": ({"ids": jnp.ones((2, 3))}, TypeError, "ids of integers"),
    "table": ({"table": jnp.ones((4, 2), int)}, TypeError, "table of floating point"),
    "weights": ({"weights": jnp.ones((2, 3), int)}, TypeError, "weights of floating"),
    "shape of weights": ({"weights": jnp.ones(6)}, ValueError, "a weight for each id"),
    "module": (
        {"table": object()},
        TypeError,
        "an array of a type that JAX has, got a object",
    ),
    "no rows": ({"table": jnp.ones((0, 2))}, ValueError, "a table of rows"),
    "masked": ({"ids": np.ma.ones((2, 3), int)}, TypeError, "got a masked one"),
    "no array": ({"ids": None}, TypeError, "of numbers, got a NoneType"),
    "mode": ({"mode": "median"}, ValueError, "has the modes"),
    "max": ({"mode": "max", "weights": jnp.ones((2, 3))}, ValueError, "no weights"),
    "vector": ({"ids": jnp.arange(3)}, ValueError, "takes ids"),
    "matrix": ({"offsets": jnp.arange(2)}, ValueError, "takes ids"),
    "both": (
        {
            "ids": jnp.arange(3),
            "offsets": jnp.arange(2),
            "segment_ids": jnp.arange(3),
            "num_segments": 3,
        },
        ValueError,
        "takes ids",
    ),
    "number": (
        {"ids": jnp.arange(3), "segment_ids": jnp.arange(3)},
        ValueError,
        "num_segments=None",
    ),
    "segments": (
        {"ids": jnp.arange(3), "segment_ids": jnp.arange(2), "num_segments": 3},
        ValueError,
        "takes ids",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_while_tracing(name):
    changes, error, words = BAD[name]
    kwargs = {"table": jnp.ones((4, 2)), "ids": jnp.zeros((2, 3), int)} | changes
    arrays = {k: v for k, v in kwargs.items() if isinstance(v, jax.Array)}
    rest = {k: v for k, v in kwargs.items() if k not in arrays}
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda arrays: bag(**arrays, **rest), arrays)


NONE = {
    "no bags": ((0, 3), {}, 0),
    "no ids": ((2, 0), {}, 2),
    "an id of no bag": ((1,), {"segment_ids": jnp.zeros(1, int), "num_segments": 0}, 0),
    "no offsets": ((0,), {"offsets": jnp.zeros(0, int)}, 0),
    "offsets of no ids": ((0,), {"offsets": jnp.zeros(3, int)}, 3),
    "no segments": ((0,), {"segment_ids": jnp.zeros(0, int), "num_segments": 3}, 3),
}


@pytest.mark.parametrize(
    "mode", slow_but(["sum", "mean", "sqrtn", "max"], "mean", "max")
)
@pytest.mark.parametrize("name", NONE)
def test_nothing_to_add_up(name, mode):
    shape, kwargs, bags = NONE[name]
    table, ids = jnp.ones((4, 2)), jnp.zeros(shape, "int32")
    pool = functools.partial(bag, ids=ids, mode=mode, **kwargs)
    assert_identical(pool(table), jnp.zeros((bags, 2)))
    for grad in (osa.grad, jax.grad):
        found = dense(jax.jit(grad(lambda t: jnp.sum(pool(t))))(table))
        assert_identical(found, np.zeros((4, 2), np.float32))


def test_ids_of_numpy_that_the_program_holds():
    table, ids = numbers()[0], np.array([[0, 2, 2], [1, 3, 0]])
    grad = jax.jit(osa.grad(lambda t: jnp.sum(bag(t, ids, mode="max") ** 2)))(table)
    expected = jax.jit(jax.grad(lambda t: jnp.sum(jnp.max(t[ids], axis=1) ** 2)))(table)
    assert_close(dense(grad), expected, 1e-6)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_offsets_that_do_not_ascend(mode):
    table, ids, offsets = numbers()[0], jnp.arange(4), jnp.array([2, 0])
    pool = functools.partial(bag, table, ids, mode=mode)
    with pytest.raises(ValueError, match="must be ascending"):
        pool(offsets=offsets)
    pool = jax.jit(lambda offsets: bag(table, ids, offsets=offsets, mode=mode))
    assert np.isnan(pool(offsets)).all()
    segments = jnp.array([0, 0, 1, 1])
    assert_close(
        pool(jnp.array([0, 2])), loop(table, ids, segments, None, mode, 2), 1e-5
    )


LAST = [(m, w) for m in ("sum", "mean", "sqrtn", "max") for w in ("eager", "jit")]


@pytest.mark.parametrize(
    ("mode", "way"), slow_but(LAST, ("mean", "jit"), ("max", "eager"))
)
def test_last_offset(mode, way):
    """What is behind it belongs to no bag, whatever it holds; as a loop has it."""
    table, ids = numbers()[0], jnp.array([3, 7, 9, 7, 7, 5, 1])
    segments = np.array([0, 0, 0, 2, 2, -1, -1])  # a bag is empty
    pool = functools.partial(bag, mode=mode, include_last_offset=True)
    pool = pool if way == "eager" else jax.jit(pool)
    found = pool(table, ids, offsets=jnp.array([0, 3, 3, 5]))
    expected = loop(table, ids, segments, None, mode, 3)
    assert_close(found, expected, 1e-5, magnitude=1 + np.abs(expected))
    assert pool(table, ids, offsets=jnp.array([2])).shape == (0, DIM)
    for offsets in ([0, 8], [0, 3, 2]):
        if way == "eager":
            with pytest.raises(ValueError, match="offsets must be"):
                pool(table, ids, offsets=jnp.array(offsets))
        else:
            assert np.isnan(pool(table, ids, offsets=jnp.array(offsets))).all()
    for kwargs in ({}, {"offsets": jnp.zeros(0, int)}):
        with pytest.raises(ValueError, match="include_last_offset is for offsets"):
            pool(table, ids if kwargs else ids[None], **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "sqrtn"])
def test_weights_that_add_up_to_zero(mode):
    """Zeros, as by TensorFlow's `div_no_nan`, and no gradient."""
    table, ids = numbers()[0], jnp.array([[0, 3], [1, 2]])
    signs = [1.0, -1.0] if mode == "mean" else [0.0, 0.0]
    weights = jnp.array([signs, [1.0, 2.0]])
    pool = functools.partial(bag, ids=ids, weights=weights, mode=mode)
    found, pull = jax.vjp(pool, table)
    assert_identical(found[0], jnp.zeros(DIM))
    assert (found[1] != 0).all()
    (grad,) = pull(jnp.ones_like(found))
    assert_identical(grad[jnp.array([0, 3])], jnp.zeros((2, DIM)))


@pytest.mark.slow
@pytest.mark.parametrize("form", slow_but(["matrix", "segments"], "segments"))
def test_largest_of_infinities(form):
    """A row of -inf is larger than padding, and the first NaN than everything."""
    inf, nan = np.inf, np.nan
    table = jnp.float32([[-inf, 2], [-inf, -inf], [nan, 1], [3, inf], [5, nan]])
    ids = np.array([[-1, 1, 0], [3, 2, 4], [9, -1, -1], [0, 3, 1]], "int32")
    kwargs: dict = {}
    if form == "segments":
        ids, kwargs = ids.ravel(), {"segment_ids": np.repeat(np.arange(4), 3)}
        kwargs["num_segments"] = 4
    found, pull = jax.vjp(lambda t: bag(t, ids, mode="max", **kwargs), table)
    assert_identical(found, np.float32([[-inf, 2], [nan, nan], [0, 0], [3, inf]]))
    (grad,) = pull(jnp.float32([[1, 2], [4, 8], [16, 32], [64, 128]]))
    assert_identical(grad, np.float32([[0, 2], [1, 0], [4, 0], [64, 128], [0, 8]]))


# Stale rows are computed where they are looked up, and LLVM, without optimisation,
# contracts multiply and add in some kernels of a program and not in others.
ONE_ROUNDING = """
import jax, optax, numpy as np, jax.numpy as jnp, optax_sparse_adam as osa

def padded(table, ids):
    return osa.embedding_bag(table, ids, mode="max")

def ragged(table, ids):
    begins = jnp.arange(0, ids.size, ids.shape[1])
    return osa.embedding_bag(table, ids.ravel(), offsets=begins, mode="max")

def plain(table, ids):
    return jnp.max(table[ids], axis=1)

def loss(table, ids, pool):
    bags = enumerate(pool(table, i) for i in ids)
    return sum(jnp.sum(jnp.tanh(bag + k / 10) ** 2) for k, bag in bags)

for pool, num_lookups, shape in ((padded, 3, (40, 16)), (ragged, 2, (40, 3))):
    rng = np.random.default_rng(0)
    table = dense = jnp.asarray(rng.normal(size=shape), "float32")
    tx, adam = osa.exact_adam(0.1), optax.adam(0.1)
    state, dense_state = tx.init(table), adam.init(dense)
    step = osa.make_train_step(lambda *args, pool=pool: loss(*args, pool), tx)
    reference = jax.jit(jax.value_and_grad(lambda *args: loss(*args, plain)))
    table = jnp.copy(table)
    for _ in range(4):
        ids = [rng.integers(0, len(table), (3, 5)) for _ in range(num_lookups)]
        expected, grads = reference(dense, ids)
        updates, dense_state = adam.update(grads, dense_state)
        dense = optax.apply_updates(dense, updates)
        table, state, value = step(table, state, ids)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(osa.flush(table, state)[0], dense, rtol=0, atol=1e-5)
"""


@pytest.mark.slow
def test_one_rounding():
    """The largest number is one of the bag's, however often XLA computes it."""
    flags = ["--xla_backend_optimization_level=0", *FAST_TO_COMPILE.split()[:1]]
    settings = program_environment() | {"XLA_FLAGS": " ".join(flags)}
    subprocess.run([sys.executable, "-c", ONE_ROUNDING], env=settings, check=True)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64"])
def test_types_of_ids(dtype):
    with jax.enable_x64(True):
        table = jnp.arange(300, dtype=jnp.float32)[:, None]
        ids = np.array([[1, 255], [7, np.iinfo(dtype).max]]).astype(dtype)
        expected = [[256.0], [262.0 if dtype == "uint8" else 7.0]]
        assert_identical(bag(table, jnp.asarray(ids)), np.float32(expected))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but(["int64", "uint64"], "uint64"))
def test_wide_ids_of_numpy(dtype):
    """Out of bounds, also where JAX has no such type and would wrap them around."""
    table = jnp.arange(9.0)[:, None]
    ids = np.array([3, 2**32 + 3, 2**31, 4], dtype)
    assert bag(table, ids[None]).tolist() == [[7]]
    assert bag(table, ids, offsets=np.array([0, 2], dtype)).tolist() == [[3], [4]]
    assert bag(table, ids, offsets=ids[[0, 1]]).tolist() == [[4], [0]]
    kwargs = {"segment_ids": ids - ids[0], "num_segments": 2}
    assert bag(table, np.arange(4), **kwargs).tolist() == [[0], [3]]
    for offsets in ([2, 0], [-1, 0]):
        with pytest.raises(ValueError, match="ascending"):
            bag(table, ids, offsets=offsets)
        with pytest.raises(ValueError, match="ascending"):
            jax.jit(lambda table: bag(table, ids, offsets=offsets))(table)  # noqa: B023
    begins = jax.jit(lambda begins: bag(table, ids, offsets=begins))
    for offsets in ([-1, 0], [-1]):  # what raises is NaN in a program
        assert np.isnan(begins(jnp.array(offsets))).all()


def test_low_precision_is_rounded_once():
    table = jnp.asarray(numbers()[0], jnp.bfloat16)
    ids = jnp.arange(20).reshape(2, 10)
    wide = bag(table.astype(jnp.float32), ids, mode="mean")
    assert_identical(bag(table, ids, mode="mean"), wide.astype(jnp.bfloat16))


def test_psum():
    """Of gradients by bags, over devices that share a batch."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    table, ids, *_ = numbers()

    def loss(table, ids):
        return jnp.sum(jnp.tanh(bag(table, ids)))

    def total(table, ids):
        return osa.psum(osa.grad(loss)(table, ids), "data")

    specs = {"in_specs": (spec(), spec("data")), "out_specs": spec()}
    grad = jax.jit(jax.shard_map(total, mesh=mesh, **specs, check_vma=False))(
        table, ids
    )
    expected = jax.jit(jax.grad(loss))(table, ids)
    assert_close(dense(grad), expected, 1e-6, magnitude=np.abs(expected).max())


def test_partial_sums_of_a_table_split_by_rows():
    """Between devices, bags travel and no rows; their gradient is by bags as well."""
    mesh = jax.make_mesh((2, 2), ("rows", "data"), (jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    table, ids, *_ = numbers(rows=150)

    def lookup(table, ids):
        first = lax.axis_index("rows") * len(table)
        return lax.psum(bag(table, jnp.where(ids < 0, -1000, ids) - first), "rows")

    specs = {"in_specs": (spec("rows"), spec("data")), "out_specs": spec("data")}
    sharded = jax.shard_map(lookup, mesh=mesh, **specs)

    def loss(lookup, table):
        return jnp.sum(jnp.tanh(lookup(table, ids)))

    grad = jax.jit(osa.grad(functools.partial(loss, sharded)))(table)
    expected = jax.jit(jax.grad(functools.partial(loss, bag)))(table)
    assert is_by_bags(functools.partial(loss, sharded), table)
    assert_close(dense(grad), expected, 1e-6, magnitude=np.abs(expected).max())


@pytest.mark.slow
def test_explicit_mesh_axes():
    """A step of a table split by rows is that of one device."""
    mesh = jax.make_mesh((4,), ("rows",), (jax.sharding.AxisType.Explicit,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    (table, ids, *_), tx = numbers(), osa.sparse_adam(0.1)

    @jax.jit
    def step(table, state, ids):
        grad = osa.grad(lambda t: jnp.sum(jnp.tanh(bag(t, ids))))(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates)

    expected = step(table, tx.init(table), ids)
    sharded = jax.device_put(table, rows)
    with jax.set_mesh(mesh):
        whole = jax.device_put(ids, jax.sharding.PartitionSpec())
        actual = step(sharded, tx.init(sharded), whole)
    assert_close(actual, expected, 1e-6, magnitude=1.0)


# Each form with each mode, alone, in a checkpoint, under vmap and in a scan.
COMBINATIONS = [
    (form, mode, wrapper)
    for form in ("matrix", "offsets", "segments")
    for mode in MODES
    for wrapper in range(4)
]


def random_program(rng, first):
    """A loss of a combination, and of none to two random ones."""
    others = rng.integers(len(COMBINATIONS), size=rng.integers(3))
    parts = []
    for number in (first, *others):
        form, (mode, has_weights), wrapper = COMBINATIONS[number]
        length = rng.integers(1, 7)
        ids = rng.integers(-2, ROWS + 2, (4, length))
        kwargs = {"mode": mode}
        if form == "offsets":
            begins = np.sort(rng.integers(0, ids.size + 1, 4))
            kwargs["offsets"] = jnp.asarray(np.append(0, begins[1:]))
        elif form == "segments":
            kwargs["segment_ids"] = jnp.asarray(rng.integers(-1, 6, ids.size))
            kwargs["num_segments"] = 4
        ids = jnp.asarray(ids if form == "matrix" else ids.ravel())
        parts.append((ids, bool(has_weights), kwargs, wrapper))

    def one(table, scale, part):
        ids, has_weights, kwargs, wrapper = part
        weights = jnp.full(ids.shape, scale) if has_weights else None

        def look_up(table, ids):
            return jnp.tanh(bag(table, ids, weights=weights, **kwargs) * scale)

        if wrapper == 1:
            return jnp.sum(jax.checkpoint(look_up)(table, ids))
        if wrapper == 2:
            both = jnp.stack([ids, ids[::-1]])
            return jnp.sum(jax.vmap(look_up, (None, 0))(table, both))
        if wrapper == 3:
            both = jnp.stack([ids, ids[::-1]])
            return lax.scan(
                lambda c, i: (c + jnp.sum(look_up(table, i) * c), None),
                jnp.float32(1),
                both,
            )[0]
        return jnp.sum(look_up(table, ids))

    return lambda table, scale: sum(one(table, scale, part) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(COMBINATIONS)))
def test_random_programs(seed):
    rng = np.random.default_rng(seed)
    args = numbers(seed)[0], jnp.float32(1.5)
    check_gradients(random_program(rng, seed), (0, 1), args)


def test_expanded_in_a_program_and_after_it():
    """What is expanded in a program is no value of the gradient around it."""
    table, ids, *_ = numbers()
    grad = osa.grad(lambda t: jnp.sum(bag(t, ids) ** 2))(table)
    inside = jax.jit(lambda: grad.data)()
    assert_identical(grad.data, inside)
    assert not isinstance(grad.data, jax.core.Tracer)


def test_expanded_once_in_the_program_that_made_it():
    """`jax.jit` asks for the arrays of a result more than once."""
    table, ids, *_ = numbers()
    grad = jax.jit(osa.grad(lambda t: jnp.sum(bag(t, ids) ** 2)))
    jaxpr = grad.trace(table).jaxpr.jaxpr
    kind = jaxpr.outvars[0].aval.shape, "gather"
    made = [(eqn.outvars[0].aval.shape, eqn.primitive.name) for eqn in jaxpr.eqns]
    assert made.count(kind) == 1, made


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", slow_but(["scan", "cond", "jit", "checkpoint", "vmap"], "scan")
)
def test_expanded_in_a_program_inside(way):
    """What a part of a program expands is not the gradient's, outside of that part."""
    table, ids, *_ = numbers()

    @jax.jit
    def both(table):
        grad = osa.grad(lambda t: jnp.sum(bag(t, ids) ** 2))(table)
        inside = {
            "scan": lambda: lax.scan(lambda c, _: (c, grad.data), 0, None, 1)[1][0],
            "cond": lambda: lax.cond(
                table[0, 0] < 9, lambda: grad.data, lambda: -grad.data
            ),
            "jit": lambda: jax.jit(lambda: grad.data)(),
            "checkpoint": lambda: jax.checkpoint(lambda: grad.data)(),
            "vmap": lambda: jax.vmap(lambda x: x * grad.data)(jnp.ones(1))[0],
        }[way]()
        return inside, grad.data, grad

    with jax.checking_leaks():
        inside, data, grad = both(table)
    assert_identical(inside, data)
    assert_identical(grad.data, data)
