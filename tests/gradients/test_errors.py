"""What `osa.value_and_grad` refuses, in whose words, and what `sparse=` asks for."""

import functools
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import optax_sparse_adam as osa

from ..helpers.function_cases import tripled
from ..helpers.gradients import Case, assert_same, is_bcoo, square
from ..helpers.support import assert_identical, slow_but

PARAMS, IDS = Case(None).inputs()
TABLE, WEIGHTS = PARAMS["t"], PARAMS["w"]
SHAPE, DTYPE = TABLE.shape, TABLE.dtype
INTEGERS = jnp.arange(4)


def loss(p, ids):
    return square(p["t"][ids], p["w"])


# What JAX refuses, we refuse in its words: (function, keyword arguments, arguments).
LIKE_JAX = {
    "loss is an array": (lambda p, i: p["t"][i], {}, (PARAMS, IDS)),
    "loss is an integer": (lambda p, i: i[0, 0], {}, (PARAMS, IDS)),
    "loss is complex": (lambda p, i: lax.complex(loss(p, i), 1.0), {}, (PARAMS, IDS)),
    "loss is None": (lambda p, i: None, {}, (PARAMS, IDS)),
    "argnums too large": (loss, {"argnums": 2}, (PARAMS, IDS)),
    "argnums too small": (loss, {"argnums": -3}, (PARAMS, IDS)),
    "one of argnums too large": (loss, {"argnums": (0, 5)}, (PARAMS, IDS)),
    "argnums is a number": (loss, {"argnums": 0.5}, (PARAMS, IDS)),
    "argnums is text": (loss, {"argnums": "p"}, (PARAMS, IDS)),
    "argnums is None": (loss, {"argnums": None}, (PARAMS, IDS)),
    "argnums is empty": (loss, {"argnums": ()}, (PARAMS, IDS)),
    "no arguments": (loss, {}, ()),
    "not a function": (3, {}, (PARAMS, IDS)),
    "wrong number of arguments": (loss, {}, (PARAMS, IDS, IDS)),
    "has_aux of a number": (loss, {"has_aux": True}, (PARAMS, IDS)),
    "has_aux of three": (
        lambda p, i: (loss(p, i), 1, 2),
        {"has_aux": True},
        (PARAMS, IDS),
    ),
    "loss raises": (lambda p, i: loss(p, i) / (1 // 0), {}, (PARAMS, IDS)),
}


def raised(lib, function, kwargs, args):
    with pytest.raises(Exception) as info:  # noqa: PT011 - compared below
        lib.value_and_grad(function, **kwargs)(*args)
    # Tracers print in their own ways.
    message = re.sub(r"(with value|Output was) .*", r"\1", str(info.value))
    return type(info.value), re.sub(r"<class '.*Tracer'>", "a tracer", message)


@pytest.mark.parametrize("name", LIKE_JAX)
def test_refused_like_jax(name):
    expected = raised(jax, *LIKE_JAX[name])
    assert raised(osa, *LIKE_JAX[name]) == expected
    assert expected[0] in (TypeError, ValueError, ZeroDivisionError)


class EqxModel(eqx.Module):
    embed: eqx.nn.Embedding
    activation: object


def lookup(model, ids):
    return jnp.sum(model(ids))


def sow(model, ids):
    model.calls = 1
    return lookup(model, ids)


NNX = ["flax_nnx.value_and_grad", "nnx.split"]
EQUINOX = ["eqx.partition(model, eqx.is_inexact_array)", "eqx.combine"]
EMBED = nnx.Embed(*SHAPE, rngs=nnx.Rngs(0))
# What JAX refuses in words that name neither the leaf nor a remedy, or does not refuse
# and loses: (function, argument, words of the message).
NOT_DIFFERENTIATED = {
    "integer leaf": (loss, {**PARAMS, "w": INTEGERS}, ["['w'] is `int32[4]`"]),
    "boolean leaf": (loss, {**PARAMS, "w": True}, ["['w'] is `bool[]`"]),
    "text leaf": (loss, {**PARAMS, "name": "x"}, ["['name'] is of the type `str`"]),
    "function leaf": (loss, {**PARAMS, "f": np.sum}, ["['f'] is of the type"]),
    "key leaf": (loss, {**PARAMS, "k": jax.random.key(0)}, ["['k'] is `key<fry>[]`"]),
    "bare": (lambda x, i: 0.0, INTEGERS, ["differentiated argument is `int32[4]`"]),
    "Equinox": (
        lambda model, i: 0.0,
        {"m": EqxModel(eqx.nn.Embedding(5, 4, key=jax.random.key(0)), jax.nn.tanh)},
        ["['m'].activation is of the type `PjitFunction`", *EQUINOX],
    ),
    "batch statistics": (
        lookup,
        {"m": nnx.BatchNorm(4, rngs=nnx.Rngs(0))},
        ["['m'].mean", "BatchStat", *NNX],
    ),
    "dropout": (
        lookup,
        nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        [".rngs.count", "RngCount", *NNX],
    ),
    "integer parameter": (lookup, nnx.Param(INTEGERS), ["`int32[4]`", "close over"]),
    "new attribute": (sow, nnx.clone(EMBED), ["a `Embed`", *NNX]),
}


@pytest.mark.parametrize("sparse", slow_but([None, True, False], True))
@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
def test_leaf_refused(name, sparse):
    """The message names the leaf, its type, and what its library offers."""
    function, argument, words = NOT_DIFFERENTIATED[name]
    with pytest.raises(TypeError, match="value_and_grad") as info:
        osa.value_and_grad(function, sparse=sparse)(argument, IDS)
    assert [word for word in words if word not in str(info.value)] == []
    assert "allow_int" not in str(info.value)


@pytest.mark.parametrize("sequence", [False, True])
def test_diff_state_refused(sequence):
    argnums = nnx.DiffState(0, nnx.Param)
    with pytest.raises(TypeError, match=r"DiffState.*flax_nnx\.value_and_grad"):
        osa.grad(lookup, (argnums,) if sequence else argnums)


def test_complex_leaf():
    """JAX gives the conjugate gradient of a complex leaf; so do we, and it is dense."""
    table = lax.complex(TABLE, TABLE)

    def real(t):
        return jnp.sum(jnp.square(t[IDS]).real)

    results = (lib.value_and_grad(real)(table) for lib in (osa, jax))
    assert_identical(*results)


# `sparse=` that does not fit: (sparse, words of the message).
MASKS = {
    "leaf missing": ({"t": True}, ["tree of booleans", "prefix"]),
    "leaf too many": ({"t": True, "w": False, "x": True}, ["tree of booleans"]),
    "other container": ([True, False], ["tree of booleans", "list"]),
    "None leaf": ({"t": True, "w": None}, ["tree of booleans", "['w']"]),
    "text": ("t", ["booleans", "'t'", "str"]),
    "integer leaf": ({"t": 1, "w": 0}, ["booleans", "1", "int", "['t']"]),
    "array leaf": ({"t": False, "w": jnp.array(True)}, ["booleans", "Array", "['w']"]),
    "predicate gives an array": (
        lambda path, leaf: jnp.max(leaf) > 0,
        ["predicate", "booleans", "Array", "['t']"],
    ),
    "predicate gives None": (
        lambda path, leaf: None,
        ["predicate", "booleans", "None"],
    ),
    "predicate gives a pair": (
        lambda path, leaf: (True, False),
        ["predicate", "booleans", "tuple", "['t']"],
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_refused(name):
    sparse, words = MASKS[name]
    with pytest.raises(ValueError, match="sparse") as info:
        osa.value_and_grad(loss, sparse=sparse)(PARAMS, IDS)
    assert [word for word in words if word not in str(info.value)] == []


def tied(p, i):
    return jnp.sum(p["t"][i] @ p["t"].T)  # stands in the way: transpose


def decay_in_scan(p, ids):
    def step(total, i):
        penalty = jnp.sum(p["t"])  # stands in the way: reduce_sum
        return total + square(p["t"][i], p["w"]) + penalty, None

    return lax.scan(step, 0.0, ids)[0]


def decay_in_branch(p, i):
    def taken():
        return jnp.sum(p["t"])  # stands in the way: reduce_sum

    return lax.cond(i[0, 0] == 0, taken, lambda: loss(p, i))


def decay_in_checkpoint(p, i):
    @jax.checkpoint
    def both(t):
        return square(t[i], p["w"]) + jnp.sum(t)  # stands in the way: reduce_sum

    return both(p["t"])


def static_slice(p, i):
    return square(p["t"][2:5], p["w"])  # stands in the way: slice


def product(p, i):
    return jnp.sum((p["t"] @ jnp.diag(p["w"]))[i])  # stands in the way: dot_general


def own_rule(p, i):
    return loss({**p, "t": tripled(p["t"])}, i)  # stands in the way: custom_vjp_call


def rows_of_scan(p, i):
    step = lambda c, row: (c + square(row, p["w"]), None)  # noqa: E731
    return lax.scan(step, 0.0, p["t"])[0]  # stands in the way: scan


DENSE_USES = [
    tied,
    decay_in_scan,
    decay_in_branch,
    decay_in_checkpoint,
    static_slice,
    product,
    own_rule,
    rows_of_scan,
]


def obstacle(function):
    """The operation and the line that a comment in the function's source names."""
    lines, start = inspect.getsourcelines(function)
    for number, line in enumerate(lines, start):
        if "# stands in the way: " in line:
            return line.split(": ")[-1].strip(), number
    raise AssertionError(f"{function.__name__} says nothing")


@pytest.mark.parametrize("function", DENSE_USES, ids=lambda f: f.__name__)
def test_dense_use_refused(function):
    """The message names the leaf, the operation, its line here, and the ways out."""
    operation, line = obstacle(function)
    params = {"model": {"embed": PARAMS}}
    mask = {"model": {"embed": {"t": True, "w": False}}}
    with pytest.raises(ValueError, match="sparse") as info:
        osa.value_and_grad(lambda p, i: function(p["model"]["embed"], i), sparse=mask)(
            params, IDS
        )
    message = str(info.value)
    assert "['model']['embed']['t']" in message
    assert f"`{operation}`" in message
    assert f"{__file__}:{line}" in message
    for way_out in ("dense gradient", "jax.lax.stop_gradient", "weight decay"):
        assert way_out in message


def test_bare_table_refused():
    with pytest.raises(ValueError, match="the differentiated argument"):
        osa.grad(lambda t: jnp.sum(t @ t.T), sparse=lambda path, leaf: True)(TABLE)


@pytest.mark.parametrize("used", [True, False])
def test_scalar_leaf_refused(used):
    def scaled(p, i):
        return loss(p, i) * p["s"] if used else loss(p, i)

    params = {**PARAMS, "s": jnp.float32(2)}
    with pytest.raises(ValueError, match=r"sparse.*\['s'\]"):
        osa.grad(scaled, sparse={"t": True, "w": False, "s": True})(params, IDS)


# `sparse=` that fits: (sparse, whether the table's gradient is row-sparse).
FITTING = {
    "None": (None, True),
    "False": (False, False),
    "mask": ({"t": True, "w": False}, True),
    "mask, other way": ({"t": False, "w": False}, False),
    "NumPy boolean": ({"t": np.bool_(True), "w": False}, True),
    "predicate on path": (lambda path, leaf: path[0].key == "t", True),
    "predicate on leaf": (lambda path, leaf: leaf.ndim == 2, True),
    "predicate, nowhere": (lambda path, leaf: False, False),
}


@pytest.mark.parametrize("name", FITTING)
def test_masks_met(name):
    sparse, expected = FITTING[name]
    grads = jax.jit(osa.grad(loss, sparse=sparse))(PARAMS, IDS)
    assert is_bcoo(grads["t"]) == expected
    assert not is_bcoo(grads["w"])
    assert_same(grads["t"], jax.jit(jax.grad(loss))(PARAMS, IDS)["t"])


def test_true_requires():
    """Of every real leaf; of a complex one nothing can be required."""

    def of_tables(p, i):
        return square(p["t"][i], WEIGHTS) + jnp.abs(p["z"])

    params = {"t": TABLE, "z": jnp.complex64(1j)}
    grads = osa.grad(of_tables, sparse=True)(params, IDS)
    assert is_bcoo(grads["t"])
    assert not is_bcoo(grads["z"])
    with pytest.raises(ValueError, match=r"\['w'\].*`dot_general`"):
        osa.grad(loss, sparse=True)(PARAMS, IDS)
    with pytest.raises(ValueError, match=r"`dot_general`"):
        osa.make_train_step(loss, osa.sparse_adam(0.1), sparse=True)(
            jax.tree.map(jnp.copy, PARAMS), osa.sparse_adam(0.1).init(PARAMS), IDS
        )


def test_prefix():
    def two_tables(p, i):
        return loss({"t": p["a"]["t"] * p["a"]["s"], "w": p["w"]}, i)

    params = {"a": {"t": TABLE, "s": TABLE}, "w": WEIGHTS}
    for mark in (True, False):
        grads = osa.grad(two_tables, sparse={"a": mark, "w": False})(params, IDS)
        assert [is_bcoo(grads["a"][name]) for name in "ts"] == [mark, mark]


def test_tuple_of_masks():
    grad = osa.grad(lambda t, i, w: square(t[i], w), (0, 2), sparse=(True, False))
    grads = grad(TABLE, IDS, WEIGHTS)
    assert list(map(is_bcoo, grads)) == [True, False]
    with pytest.raises(ValueError, match=r"\[1\].*`dot_general`"):
        osa.grad(lambda t, w: square(t[IDS], w), (0, 1), sparse=(True, True))(
            TABLE, WEIGHTS
        )


@pytest.mark.parametrize("mark", [True, False])
def test_unused_leaf(mark):
    """Row-sparse with nothing stored, unless `sparse` says that it is dense."""
    unused = osa.grad(lambda p: jnp.sum(p["w"]), sparse={"t": mark, "w": False})
    grads = unused(PARAMS)
    assert is_bcoo(grads["t"]) == mark
    assert_same(grads["t"], jnp.zeros_like(TABLE))


def test_python_control_flow():
    """As under `jax.jit`, and as the documentation says."""
    with pytest.raises(jax.errors.TracerBoolConversionError):
        osa.grad(lambda t: jnp.sum(t[IDS]) if t[0, 0] > 0 else 0.0)(TABLE)


@pytest.mark.parametrize(
    "adam", slow_but([osa.exact_adam, osa.sparse_adam], osa.sparse_adam)
)
def test_errors_of_jax_say_what_to_do(adam):
    """They name the type of a gradient; nothing else of this package is called."""
    decay = optax.add_decayed_weights(0.1)

    def by_hand(tx, change, state):
        grads = osa.grad(loss, read=state)(PARAMS, IDS)
        return tx.update(change(grads), state, PARAMS)

    def refused(tx):
        """Outside of a program, of gradients as they are."""
        by_hand(tx, lambda grads: grads, tx.init(PARAMS))

    def taken(tx, change=lambda grads: grads):
        jax.eval_shape(functools.partial(by_hand, tx, change), tx.init(PARAMS))

    with pytest.raises(ValueError, match=r"(?s)different types.*add_dec.*inside.*lazy"):
        refused(optax.chain(decay, adam(0.1)))
    taken(optax.chain(osa.lazy(decay), adam(0.1)))
    skips = optax.apply_if_finite(adam(0.1), 3)
    with pytest.raises(TypeError, match=r"(?s)cond.*apply_if_finite.*coalesce has"):
        refused(skips)
    taken(skips, lambda grads: grads | {"t": osa.coalesce(grads["t"])})
