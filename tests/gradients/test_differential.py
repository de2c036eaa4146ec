"""Programs with mutable arrays, effects, extended types and rules, against `jax.grad`.

Each is differentiated by its table, which is looked up, and by other parameters.
"""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.differential_programs import (
    AROUND,
    DENSE_AROUND,
    LOG,
    PROGRAMS,
    REFS,
)
from ..helpers.gradients import ROUNDED, assert_same, is_bcoo
from ..helpers.support import WEEKLY, assert_close, assert_identical, slow_but

CORE = [
    "read in a later step, alone",
    "recurrent, in a scan",
    "written by a checkpoint, alone",
    "whole table, in a branch",
    "scale in a loop",
    "shown of a ref",
]


def is_run(name):
    """Each alone and in two of four surroundings, in turns; once a week in all."""
    program, _, around = name.rpartition(", ")
    if WEEKLY or name in CORE or program not in REFS or around not in AROUND:
        return True
    turn = [*REFS].index(program) + [*AROUND].index(around)
    return around == "alone" or turn % 2 == 0 or (program, around) in DENSE_AROUND


RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.integers(1, 9, (8, 4)) / 8, jnp.float32)
WEIGHTS = jnp.asarray([0.5, -1.0, 2.0, 0.25])
IDS = jnp.asarray([0, 5, 0])


def run(value_and_grad, loss):
    """The result, and what the host has seen."""
    LOG.clear()
    result = jax.jit(value_and_grad(loss, (0, 2)))(TABLE, IDS, WEIGHTS)
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result, list(LOG)


@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("name", slow_but(filter(is_run, PROGRAMS), *CORE))
def test_same_as_jax(name):
    program = PROGRAMS[name]
    (value, (of_table, of_weights)), seen = run(osa.value_and_grad, program.loss)
    (like, likes), also_seen = run(jax.value_and_grad, program.like or program.loss)
    assert seen == also_seen
    assert_same(value, like, ROUNDED, "value")
    assert_same(of_table, likes[0], ROUNDED, "table")
    if jnp.any(likes[1]) or not is_bcoo(of_weights):  # else they are not used
        assert_same(of_weights, likes[1], ROUNDED, "weights")
    assert is_bcoo(of_table) == program.is_sparse
    assert not is_bcoo(of_table) or 0 < of_table.nse <= len(TABLE)


def with_outside(t, ids, w, count, mean):
    """A counter and a running mean, which the caller has made."""
    count[...] += 1

    def body(k, total):
        rows = t[ids[k]]
        mean[...] = 0.5 * mean[...] + 0.5 * jax.lax.stop_gradient(rows)
        return total + jnp.sum((rows - mean[...]) ** 2 * w)

    return jax.lax.fori_loop(0, 3, body, 0.0) * count[...].astype(float)


def outside():
    return jax.new_ref(jnp.int32(0)), jax.new_ref(jnp.zeros(4))


@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("lift", slow_but([jax.jit, lambda f: f], jax.jit))
@pytest.mark.parametrize("is_argument", slow_but([True, False], False))
def test_mutable_arrays_from_outside(is_argument, lift):
    """What the loss does to them happens once, as under `jax.grad`."""
    found = []
    for grad in (osa.grad, jax.grad):
        refs = outside()
        if is_argument:
            grads = lift(grad(with_outside))(TABLE, IDS, WEIGHTS, *refs)
        else:
            closed = functools.partial(with_outside, count=refs[0], mean=refs[1])
            grads = lift(grad(closed))(TABLE, IDS, WEIGHTS)
        found.append((grads, *(x[...] for x in refs)))
    (grads, *after), (like, *after_like) = found
    assert is_bcoo(grads)
    assert_same(grads, like, ROUNDED)
    assert_identical(after, after_like, "mutable arrays")
    assert after[0] == 1


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("make", [osa.sparse_adam, osa.exact_adam])
def test_step_and_evaluation(make):
    """A step that is given mutable arrays, and a loss that makes one."""

    def loss(t, count, mean):
        ref = jax.new_ref(with_outside(t, IDS, WEIGHTS, count, mean))
        ref[...] += refs_program(t, IDS, WEIGHTS)
        return ref[...]

    def plain(t, number):
        mean, total = jnp.zeros(4), 0.0
        for i in IDS:
            mean = 0.5 * mean + 0.5 * jax.lax.stop_gradient(t[i])
            total += jnp.sum((t[i] - mean) ** 2 * WEIGHTS)
        return total * number + refs_program(t, IDS, WEIGHTS)

    refs_program = PROGRAMS["recurrent, alone"].loss
    tx = make(0.1)
    one, two = jnp.copy(TABLE), jnp.copy(TABLE)
    state, state_two = tx.init(one), tx.init(two)
    step, step_two = osa.make_train_step(loss, tx), osa.make_train_step(plain, tx)
    read = make is osa.exact_adam
    for number in (1.0, 2.0):
        count, mean = outside()
        count[...] = int(number) - 1
        one, state, value = step(one, state, count, mean)
        two, state_two, like = step_two(two, state_two, number)
        assert_close(value, like, 1e-5, what="value")
        assert_close(one, two, 1e-5, what="table")
    count, mean = outside()
    evaluated = osa.evaluate(loss, read=state if read else None)(one, count, mean)
    like = osa.evaluate(plain, read=state_two if read else None)(two, 1.0)
    assert_close(evaluated, like, 1e-5, what="evaluation")
    assert count[...] == 1


def rows_to_outside(t, ref):
    ref[...] = t[IDS[0]]
    return jnp.sum(t[IDS])


def rows_to_the_host(t, ref):
    jax.experimental.io_callback(lambda x: None, None, t[IDS])
    return jnp.sum(t[IDS])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (rows_to_outside, "differentiated value on a non-differentiated array"),
        (rows_to_the_host, "IO callbacks do not support JVP"),
    ],
)
def test_refused_as_by_jax(loss, words):
    for grad in (osa.grad, jax.grad):
        with pytest.raises(Exception, match=words):
            grad(loss)(TABLE, jax.new_ref(jnp.zeros(4)))


def test_mutable_arrays_among_parameters():
    """They have no gradient, and are read as they are."""

    def loss(params):
        params["count"][...] += 1
        return jnp.sum(params["t"][IDS]) * params["count"][...]

    params = {"t": TABLE, "count": jax.new_ref(jnp.float32(1))}
    with pytest.raises(TypeError, match=r"\['count'\] is `Ref\{float32\[\]\}`"):
        osa.grad(loss)(params)
    with pytest.raises(Exception, match="Ref"):
        jax.grad(loss)(params)
    value = osa.evaluate(loss)({"t": TABLE, "count": jax.new_ref(jnp.float32(1))})
    assert_close(value, 2 * jnp.sum(TABLE[IDS]), 1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
def test_float8_of_flax():
    """The scales of `nn.Fp8DotGeneralOp` are handed over as gradients."""
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            rows = nn.Embed(40, 16)(ids)
            dense = functools.partial(nn.Dense, dot_general_cls=nn.Fp8DotGeneralOp)
            return dense(16)(nn.relu(dense(16)(rows)))

    model, ids = Model(), jnp.arange(16) % 7

    def loss(variables):
        return jnp.mean(jnp.square(model.apply(variables, ids)))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = model.init(jax.random.key(0), ids)
        grads = jax.jit(osa.grad(loss))(variables)
        likes = jax.jit(jax.grad(loss))(variables)
    assert is_bcoo(grads["params"]["Embed_0"]["embedding"])
    pairs = zip(
        jax.tree.leaves(grads, is_leaf=is_bcoo), jax.tree.leaves(likes), strict=True
    )
    for leaf, like in pairs:
        assert_same(leaf, like, 64)
