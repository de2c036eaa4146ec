"""The kernel's bags against plain JAX, and against a sum in float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._rows import bag_sums, coalesce
from optax_sparse_adam._rows.bag_gradient import BagEntries
from optax_sparse_adam._rows.canary import CanaryBCOO
from optax_sparse_adam._rows.entries import sum_entries
from optax_sparse_adam._rows.lookups import sum_bags
from optax_sparse_adam._rows.source import Source
from optax_sparse_adam.native import _calls

from ..helpers.native import calls_in, needs_compiler
from ..helpers.support import TOLERANCE, assert_close, assert_identical


@st.composite
def problems(draw):
    """`(table, ids, segments, weights, num_bags)`, in order, mixed up, and regular."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    num_rows = draw(st.sampled_from([1, 7, 3000]))
    row_shape = draw(st.sampled_from([(), (1,), (5,), (64,), (127,), (2, 3)]))
    num_bags, length = draw(st.sampled_from([(1, 1), (3, 7), (200, 9), (2, 900)]))
    table = rng.standard_normal((num_rows, *row_shape))
    ids = rng.integers(-2, num_rows + 2, (num_bags, length)).astype("int32")
    weights = rng.standard_normal(ids.shape).astype("float32")
    weights = weights if draw(st.booleans()) else None
    segments = None
    if draw(st.booleans()):
        segments = rng.integers(-1, num_bags + 2, ids.size).astype("int32")
        segments = np.sort(segments) if draw(st.booleans()) else segments
        ids = ids.ravel()
        weights = None if weights is None else weights.ravel()
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return jnp.asarray(table, dtype), ids, segments, weights, num_bags


def in_float64(table, ids, segments, weights, num_bags):
    """The sums, and those of the absolute values."""
    table = np.asarray(table).astype(np.float64)
    if segments is None:
        segments = np.repeat(np.arange(num_bags), ids.shape[1])
    weights = np.ones(ids.size) if weights is None else weights.ravel()
    sums = np.zeros((2, num_bags, *table.shape[1:]))
    for i, segment, weight in zip(ids.ravel(), segments, weights, strict=True):
        if 0 <= i < len(table) and 0 <= segment < num_bags:
            sums[0, segment] += weight * table[i]
            sums[1, segment] += abs(weight * table[i])
    return sums


@needs_compiler
@hypothesis.settings(max_examples=12)
@hypothesis.given(problems())
def test_reading(cache, problem):
    table, ids, segments, weights, num_bags = problem
    args = table, ids, segments, weights
    actual = jax.jit(lambda *args: _calls.read_bags(*args, num_bags))(*args)
    expected, magnitude = in_float64(*problem)
    tol = TOLERANCE["float32"].sum * max(ids.shape)
    assert_close(actual, expected, tol, magnitude=magnitude)


@needs_compiler
@hypothesis.settings(max_examples=12)
@hypothesis.given(problems(), st.sampled_from([1, 12_345]))
def test_gradients(cache, problem, num_rows):
    """The sums of rows, bit for bit those of the expanded gradient."""
    table, ids, segments, weights, num_bags = problem
    table = table.astype(jnp.float32)
    if segments is None:
        segments = np.repeat(np.arange(num_bags, dtype=np.int32), ids.shape[1])
    values = np.random.default_rng(0).standard_normal((num_bags, *table.shape[1:]))
    weights = None if weights is None else jnp.asarray(weights.ravel())
    grad = BagEntries(
        jnp.asarray(values, jnp.float32),
        jnp.asarray(ids.reshape(-1, 1)),
        jnp.asarray(np.where(segments < 0, num_bags, segments)),
        weights,
        (num_rows, *table.shape[1:]),
        jnp.dtype("float32"),
    )
    actual = jax.jit(lambda grad: coalesce.Rows(*_calls.sum_rows(grad)))(grad)
    assert_identical(
        actual, jax.jit(lambda grad: sum_entries(grad, "search"))(grad), "sums"
    )


def in_loop(table, ids):
    def body(total, part):
        return total + jnp.sum(osa.embedding_bag(table, part)), None

    return jax.lax.scan(body, 0.0, ids)[0]


def in_branches(table, ids):
    """Bags of another length in each."""

    def branch(ids):
        return lambda: jnp.sum(osa.embedding_bag(table, ids))

    ids = ids[:2].ravel()
    long, short = branch(ids.reshape(4, 6)), branch(ids.reshape(8, 3))
    return jax.lax.cond(ids[0] > 0, long, short)


def with_segments(table, ids):
    segments = jnp.repeat(jnp.array([1, 0]), ids.size // 2)
    flat = ids.ravel()
    bags = osa.embedding_bag(table, flat, segment_ids=segments, num_segments=2)
    return jnp.sum(bags)


@pytest.mark.parametrize(
    ("loss", "length"),
    [
        (lambda table, ids: jnp.sum(osa.embedding_bag(table, ids[0])), 3),
        (lambda table, ids: jnp.sum(osa.embedding_bag(table, ids[0, :, :1])), 1),
        (in_loop, 3),
        (in_branches, None),
        (with_segments, None),
        (lambda table, ids: osa.embedding_bag(table, ids[0])[0] * table[0], None),
    ],
)
def test_bags_of_one_length(loss, length):
    """Where all bags have one length, the bag of an entry is its place by that."""
    ids, table = jnp.arange(5 * 4 * 3).reshape(5, 4, 3), jnp.ones((200, 2))
    lengths = []

    @jax.jit
    def segments_of(table):
        grad = osa.grad(lambda table: jnp.sum(loss(table, ids)))(table)
        assert isinstance(grad, CanaryBCOO)
        lengths.append(grad.bags.length)
        return grad.bags.segments

    segments = segments_of(table)
    assert lengths == [length]
    if length is not None:
        np.testing.assert_array_equal(segments, np.arange(len(segments)) // length)


@needs_compiler
@pytest.mark.parametrize("by_hand", [True, False])
def test_program_of_one_device(kernel, by_hand):
    """A step reads bags, and adds rows up, by the kernel.

    By hand nothing is `[N, D]` but the update, and in `make_train_step` nothing at all.
    """
    tx, ids = osa.sparse_adam(0.1), jnp.zeros([64, 50], jnp.int32)

    def loss(table):
        return jnp.sum(osa.embedding_bag(table, ids) ** 2)

    def step(table, state):
        updates, state = tx.update(osa.grad(loss)(table), state, table)
        return osa.apply_updates(table, updates), state

    made = jax.jit(step, donate_argnums=(0, 1))
    made = made if by_hand else osa.make_train_step(loss, tx)
    table = jax.ShapeDtypeStruct((5000, 64), jnp.float32)
    lowered = made.lower(table, jax.eval_shape(tx.init, table))
    expected = ["read bags", "update order", "update adam"]
    assert calls_in(lowered.as_text()) == expected + ["update add"] * by_hand
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < (1.2 if by_hand else 0.1) * ids.size * 64 * 4


@needs_compiler
def test_derivatives_of_sums_by_the_kernel(kernel):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((9, 4)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 10, (3, 4)))
    weights = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)

    def function(sums):
        def loss(table, weights):
            return jnp.sum(jnp.tanh(sums(table, ids, None, weights)))

        return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0)))

    batch = jnp.stack([weights, 2 * weights])
    actual = function(lambda t, *args: sum_bags(3, Source(t), *args))(table, batch)
    expected = function(lambda *args: bag_sums.pool(3, *args))(table, batch)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_close(a, e, 1e-5, magnitude=np.abs(e).max())


@pytest.mark.slow
@needs_compiler
def test_nnx_keeps_bags(kernel):
    """From the gradient to the update no array has a row for each id."""
    nnx = pytest.importorskip("flax.nnx")
    from optax_sparse_adam import flax_nnx

    embed = nnx.Embed(5000, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(embed, osa.rowwise_adagrad(0.1), wrt=nnx.Param)
    ids = jnp.zeros([64, 50], jnp.int32)

    @nnx.jit(donate_argnums=(0, 1))
    def step(embed, optimizer):
        def loss(embed):
            return jnp.sum(osa.embedding_bag(embed.embedding[...], ids) ** 2)

        flax_nnx.update(optimizer, embed, flax_nnx.grad(loss)(embed))

    compiled = step.lower(embed, optimizer).compile().compiled
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.15 * ids.size * 64 * 4
