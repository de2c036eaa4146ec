"""Row-sparse gradients of plain losses: JAX's numbers, and the kind of each leaf."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_sparse_adam as osa

from ..helpers.function_cases import FUNCTIONS
from ..helpers.gradients import (
    ROWS,
    Case,
    assert_row_sparse,
    assert_same,
    check,
    dense,
    is_bcoo,
    square,
)
from ..helpers.lookup_cases import DENSE, LOOKUPS
from ..helpers.support import (
    assert_identical,
    slow_but,
)
from ..helpers.transform_cases import UNDER
from .test_cost import assert_no_table_sized_operation

ROW_SPARSE = {**LOOKUPS, **UNDER, **FUNCTIONS}
CASES = {**ROW_SPARSE, **{f"dense: {name}": case for name, case in DENSE.items()}}


def both(loss):
    """Our result and JAX's in one program, as that compiles in half the time."""
    ours, theirs = jax.jit(osa.value_and_grad(loss)), jax.value_and_grad(loss)
    return jax.jit(lambda *inputs: (ours(*inputs), theirs(*inputs)))


@pytest.mark.parametrize("name", slow_but(CASES, *list(CASES)[::11]))
def test_same_as_jax(name):
    """The numbers, and nothing of a table's size computed for them."""
    case = CASES[name]
    inputs = case.inputs()
    program = both(case.loss).trace(*inputs)
    result, expected = program.lower().compile()(*inputs)
    check(case, result, expected, "jit")
    if name in ROW_SPARSE and case.has_table:
        ours, rows = program.jaxpr.eqns[0].params["jaxpr"], ROWS
        if ROWS in (*inputs[1].shape, inputs[1].size):  # what else is so large?
            rows = 30_011
            ours = jax.make_jaxpr(osa.value_and_grad(case.loss))(*case.abstract(rows))
        assert_no_table_sized_operation(name, ours.jaxpr, rows)


@pytest.mark.parametrize(
    "name",
    slow_but(
        dict.fromkeys([*list(ROW_SPARSE)[::5], "tanh of the table"]),
        "scalar id",
        "tanh of the table",
    ),
)
def test_eagerly(name):
    """By rules that have been traced above, and of arrays of NumPy."""
    case = CASES[name]
    inputs = jax.tree.map(np.asarray, case.inputs())
    expected = jax.jit(jax.value_and_grad(case.loss))(*inputs)
    check(case, osa.value_and_grad(case.loss)(*inputs), expected, "eager")


WIDE = [
    "matrix of ids",
    "more ids than rows",
    "dynamic_slice",
    "i and i j",
    "take clip",
    "map",
    "checkpoint, dots",
    "branches, fewer ids",
    "tanh of the table",
    "shard_map",
]


@pytest.mark.parametrize("dtype", slow_but(["float32", "float64"], "float64"))
@pytest.mark.parametrize("name", slow_but(WIDE, *WIDE[::3]))
def test_with_64_bit_types(name, dtype):
    with jax.enable_x64(True):
        case = CASES[name]._replace(dtype=dtype, id_dtype="int64")
        result, expected = both(case.loss)(*case.inputs())
        check(case, result, expected, dtype)


PARAMS, IDS_ARRAY = Case(None).inputs()
TABLE, WEIGHTS = PARAMS["t"], PARAMS["w"]


class Pair(NamedTuple):
    t: jax.Array
    w: jax.Array | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["t", "w"], meta_fields=["name"]
)
@dataclasses.dataclass(frozen=True)
class Frozen:
    t: jax.Array
    w: jax.Array
    name: str


def plain(t, i):
    return square(t[i], WEIGHTS)


def swapped(i, t):
    return plain(t, i)


def product(t, i, s):
    return plain(t * s, i)


def with_statics(mode, t, function, nothing, *, ids, scale):
    assert (mode, nothing) == ("mode", None)
    return jnp.sum(function(t[ids])) * scale


STATICS = ("mode", TABLE, jnp.square, None)
BOTH = (TABLE, IDS_ARRAY, 2 * TABLE)
# (function, argnums, arguments, keyword arguments, which leaves are row-sparse)
CALLS = {
    "int": (plain, 0, (TABLE, IDS_ARRAY), {}, [True]),
    "second": (swapped, 1, (IDS_ARRAY, TABLE), {}, [True]),
    "last": (swapped, -1, (IDS_ARRAY, TABLE), {}, [True]),
    "numpy int": (swapped, np.int64(1), (IDS_ARRAY, TABLE), {}, [True]),
    "one in a tuple": (plain, (0,), (TABLE, IDS_ARRAY), {}, [True]),
    "one in a list": (plain, [0], (TABLE, IDS_ARRAY), {}, [True]),
    "two": (product, (0, 2), BOTH, {}, [True, True]),
    "two, backwards": (product, (-1, 0), BOTH, {}, [True, True]),
    "one array twice": (product, (0, 2), (TABLE, IDS_ARRAY, TABLE), {}, [True, True]),
    "static and keyword": (
        with_statics,
        1,
        STATICS,
        {"ids": IDS_ARRAY, "scale": 2.0},
        [True],
    ),
    "nested": (
        lambda p, i: square(p["a"][0][i], p["b"]["c"]),
        0,
        ({"a": [TABLE, None], "b": {"c": WEIGHTS, "none": None}}, IDS_ARRAY),
        {},
        [True, False],
    ),
    "named tuple": (
        lambda p, i: plain(p.t, i),
        0,
        (Pair(TABLE, None), IDS_ARRAY),
        {},
        [True],
    ),
    "frozen dataclass": (
        lambda p, i: square(p.t[i], p.w),
        0,
        (Frozen(TABLE, WEIGHTS, "name"), IDS_ARRAY),
        {},
        [True, False],
    ),
    "Python number": (
        lambda p, i: plain(p[0], i) * p[1],
        0,
        ([TABLE, 2.0], IDS_ARRAY),
        {},
        [True, False],
    ),
    "nothing": (lambda p, i: jnp.sum(i).astype(float), 0, ({}, IDS_ARRAY), {}, []),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name):
    function, argnums, args, kwargs, kinds = CALLS[name]
    value, grads = osa.value_and_grad(function, argnums)(*args, **kwargs)
    expected_value, expected = jax.value_and_grad(function, argnums)(*args, **kwargs)
    leaves = jax.tree.leaves(grads, is_leaf=is_bcoo)
    assert [is_bcoo(leaf) for leaf in leaves] == kinds
    assert jax.tree.structure(dense(grads)) == jax.tree.structure(expected)
    assert_same(value, expected_value, what="value")
    for leaf, like in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert_same(leaf, like)
    alone = osa.grad(function, argnums)(*args, **kwargs)
    assert_identical(alone, grads, "grad")


def with_aux(t, i):
    return plain(t, i), {
        "arrays": (t, 2 * t, t[i], i, jnp.arange(3), jax.random.key(0)),
        "static": (3, 2.5, "text", square, None, np.arange(2)),
    }


def test_aux():
    """Arrays, keys, and what is no array; under jit in test_random_programs."""
    (value, aux), grads = osa.value_and_grad(with_aux, has_aux=True)(TABLE, IDS_ARRAY)
    (expected_value, expected_aux), expected = jax.value_and_grad(
        with_aux, has_aux=True
    )(TABLE, IDS_ARRAY)
    assert_row_sparse(grads, TABLE.shape, TABLE.dtype, 6)
    assert_same(value, expected_value)
    assert_same(grads, expected)
    assert jax.tree.structure(aux) == jax.tree.structure(expected_aux)
    pairs = zip(jax.tree.leaves(aux), jax.tree.leaves(expected_aux), strict=True)
    for leaf, like in pairs:
        assert type(leaf) is type(like)
        if callable(like) or isinstance(like, str):
            assert leaf is like
        elif jnp.issubdtype(getattr(like, "dtype", None), jax.dtypes.prng_key):
            assert_identical(jax.random.key_data(leaf), jax.random.key_data(like))
        else:
            assert_identical(leaf, like)
    grads_again, aux_again = osa.grad(with_aux, has_aux=True)(TABLE, IDS_ARRAY)
    assert_same(grads_again, expected)
    assert jax.tree.structure(aux_again) == jax.tree.structure(expected_aux)


@pytest.mark.parametrize("lift", slow_but([jax.jit, lambda f: f], jax.jit))
def test_evaluated_once(lift):
    """Rules that look at a jaxpr twice do not run it twice."""
    calls = []

    def function(t, i):
        jax.debug.callback(lambda rows: calls.append("outside"), t[i])

        def step(total, j):
            jax.debug.callback(lambda rows: calls.append("scan"), t[j])
            return total + plain(t, j), None

        def taken():
            jax.debug.callback(lambda: calls.append("branch"))
            return lax.scan(step, 0.0, i)[0]

        return lax.cond(i[0, 0] == 0, taken, lambda: 0.0)

    grads = lift(osa.grad(function))(TABLE, IDS_ARRAY)
    jax.effects_barrier()
    assert sorted(calls) == ["branch", "outside", "scan", "scan"]
    assert_row_sparse(grads, TABLE.shape, TABLE.dtype, 6)


@jax.custom_vjp
def times_sum(x, t):
    return x * t.sum()


def times_sum_back(t, g):
    total = jax.lax.fori_loop(0, len(t), lambda i, carry: carry + t[i], 0.0)
    return g * total, jnp.zeros_like(t)


times_sum.defvjp(lambda x, t: (times_sum(x, t), t), times_sum_back)


@pytest.mark.parametrize("wrap", [jax.jit, lambda x: x])
def test_a_rule_of_the_users_that_indexes_a_constant(wrap):
    """By a counter, which an array of NumPy cannot be: one of JAX is what it gets."""

    def loss(table, ids):
        return jnp.sum(times_sum(table[ids], jnp.array([1.0, 2.0])) ** 2)

    table, ids = jnp.arange(12.0).reshape(4, 3), jnp.array([1, 3, 1])
    value, grad = wrap(osa.value_and_grad(loss))(table, ids)
    expected = jax.value_and_grad(loss)(table, ids)
    assert value == expected[0]
    np.testing.assert_allclose(grad.todense(), expected[1], rtol=1e-6)
