"""Whatever is around an optimiser of rows sees its updates, and each effect once.

`make_train_step` and `flax_nnx.update` against the same steps by hand, bit for bit.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.support import WEEKLY, assert_identical, slow_but
from ..helpers.wrapper_cases import CASES, FORMS, USUAL
from ..helpers.wrapper_changes import halve
from ..helpers.wrappers import Seen, after, before, loss, on_rows, start

pytestmark = pytest.mark.usefixtures("as_optax_expects")

INNER = {
    "sparse_adam": lambda: osa.sparse_adam(0.1),
    "rowwise_adagrad": lambda: osa.rowwise_adagrad(0.1),
    "exact_adam": lambda: osa.exact_adam(0.1),
}
ALL = [(x, "sparse_adam") for x in CASES]
ALL += [(x, "rowwise_adagrad") for x in USUAL]
ALL += [(x, "exact_adam") for x in CASES if CASES[x].exact]
BACKENDS = "plain", "kernel"


def in_flax(wrapper):
    return CASES[wrapper].in_flax and not CASES[wrapper].sums


def is_its_turn(wrapper, inner):
    """Each wrapper meets one of its optimisers, by turns; once a week all."""
    inners = [x for name, x in ALL if name == wrapper]
    return WEEKLY or inner == inners[[*CASES].index(wrapper) % len(inners)]


def with_backends(pairs, first):
    """What calls an optimiser in another way, or is not in Flax, meets both at once.

    `first` is who begins: a step and Flax's update, and two optimisers in one wrapper,
    have different ones, so that each wrapper meets both all the same. Once a week all
    meet both.
    """
    for wrapper, inner in pairs:
        turn = [*CASES].index(wrapper) + [*INNER].index(inner) + first
        meets_one = wrapper not in USUAL and not in_flax(wrapper)
        has_both = WEEKLY or wrapper in FORMS or meets_one
        for backend in BACKENDS if has_both else [BACKENDS[turn % 2]]:
            yield wrapper, inner, backend


CORE = [("halve", "sparse_adam"), ("log", "rowwise_adagrad")]
CORE += [("apply_if_finite", "sparse_adam"), ("update wrapped", "sparse_adam")]
# Those that are not called as usual meet all; so do those of the core.
SOME = [x for x in ALL if is_its_turn(*x) or x[0] in FORMS or x in CORE]
STEPS = [*with_backends(SOME, 0)]
CORE = [x for x in STEPS if x[:2] in CORE]
assert {*BACKENDS} == {x[2] for x in CORE}
IDS = [np.array([3, 7, 3]), np.array([5, 7, 9])]


def made(wrapper, inner):
    seen = Seen()
    return CASES[wrapper].wrapper(INNER[inner](), seen), seen


def marks(seen):
    jax.effects_barrier()
    return [seen.traces, len(seen.values), *map(np.sum, seen.values)]


def extra_of(case, value):
    return {"value": value} if case.value else {}


@functools.cache
def by_hand(wrapper, inner, backend):
    """Parameters, state and marks after some steps."""
    case, (tx, seen) = CASES[wrapper], made(wrapper, inner)

    @jax.jit
    def step(params, state, ids):
        read = state if inner == "exact_adam" else None
        value, grads = osa.value_and_grad(loss, read=read)(params, ids)
        grads = on_rows(osa.coalesce, grads) if case.sums else grads
        updates, state = tx.update(grads, state, params, **extra_of(case, value))
        return osa.apply_updates(params, updates), state

    params = start()
    state = tx.init(params)
    for ids in IDS:
        params, state = step(params, state, ids)
    return params, state, marks(seen)


@pytest.mark.parametrize(
    ("wrapper", "inner", "backend"), slow_but(STEPS, *CORE), indirect=["backend"]
)
def test_a_step_is_that_by_hand(wrapper, inner, backend):
    tx, seen = made(wrapper, inner)
    params = start()
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    for ids in IDS:
        params, state, _ = step(params, state, ids)
    *trees, expected = by_hand(wrapper, inner, backend)
    assert_identical((params, state), tuple(trees))
    found = marks(seen)
    # Python code runs for each form of the gradients that is tried.
    assert found[0] == expected[0] * (1 + CASES[wrapper].sums)
    np.testing.assert_array_equal(found[1:], expected[1:])


class Model(nnx.Module):
    def __init__(self):
        for name, value in start().items():
            setattr(self, name, nnx.Param(value))


# `test_update_of_a_partition` has labels of Flax's own trees.
IN_FLAX = [x for x in ALL if in_flax(x[0]) and is_its_turn(*x)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "inner", "backend"), [*with_backends(IN_FLAX, 1)], indirect=["backend"]
)
def test_flax_nnx_update_is_that_by_hand(wrapper, inner, backend):
    case, (tx, seen) = CASES[wrapper], made(wrapper, inner)
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids):
        def of_model(model):
            return loss({"table": model.table[...], "w": model.w[...]}, ids)

        read = optimizer if inner == "exact_adam" else None
        value, grads = flax_nnx.value_and_grad(of_model, read=read)(model)
        flax_nnx.update(optimizer, model, grads, **extra_of(case, value))

    for ids in IDS:
        step(model, optimizer, ids)
    params, state, expected = by_hand(wrapper, inner, backend)
    assert_identical(nnx.to_pure_dict(nnx.state(model)), params)
    found = jax.tree.leaves(nnx.as_pure(optimizer.opt_state))
    assert_identical(found, jax.tree.leaves(state))
    found = marks(seen)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1:], expected[1:])


@pytest.mark.slow
def test_another_init_or_update_of_a_formula():
    """`lazy` takes what stands in their places."""
    inner = osa.scale_by_rowwise_rss()
    calls = []

    def init(params):
        calls.append("init")
        return inner.init(params)

    def update(grads, state, params=None):
        calls.append("update")
        updates, state = inner.update(grads, state, params)
        return jax.tree.map(lambda x: 2 * x, updates), state

    grads = osa.grad(loss)(start(), IDS[0])
    expected, _ = osa.lazy(inner).update(grads, inner.init(start()))
    for change in ({"init": init}, {"update": update}):
        tx = osa.lazy(inner._replace(**change))
        found, _ = tx.update(grads, tx.init(start()))
        assert set(change) <= set(calls)
        factor = 2 if "update" in change else 1
        found, dense = found["table"].todense(), expected["table"].todense()
        np.testing.assert_allclose(found, factor * dense, rtol=1e-6)


# Errors of what is around.


def raises_for_rows(error):
    def change(grads, params, seen):
        def fail(x):
            raise error("rows are not for me")

        return on_rows(fail, grads)

    return before(change)


@pytest.mark.parametrize(
    "tx", [osa.sparse_adam(0.1), optax.adam(0.1)], ids=["rows", "dense"]
)
@pytest.mark.parametrize(
    "error", slow_but([ValueError, TypeError, KeyError, RuntimeError], TypeError)
)
def test_what_a_user_raises_is_raised(tx, error):
    """As it is, after other forms of the gradients were tried, with a note."""
    seen = Seen()
    tx = raises_for_rows(error)(tx, seen)
    with pytest.raises(error) as info:
        osa.make_train_step(loss, tx)(start(), tx.init(start()), IDS[0])
    assert info.value.args == ("rows are not for me",)
    assert seen.traces == 3
    frames = [x.name for x in info.traceback]
    assert frames[-1] == "fail"  # where it was raised


@pytest.mark.slow
def test_a_state_of_exact_adam_that_nobody_finds():
    """Gradients are made without it, and the error says so."""
    tx, _ = made("leaves of the state", "exact_adam")
    with pytest.raises(ValueError, match="exact_adam needs gradients that are made"):
        osa.make_train_step(loss, tx)(start(), tx.init(start()), IDS[0])


def test_error_of_a_schedule_is_raised_once():
    calls = []

    def schedule(count):
        calls.append(0)
        assert count.ndim == 1, "a vector"
        return 0.1

    tx = osa.sparse_adam(schedule)
    with pytest.raises(AssertionError, match="a vector"):
        osa.make_train_step(loss, tx)(start(), tx.init(start()), IDS[0])
    assert len(calls) == 1


def test_effects_of_a_refused_form_are_left_out():
    """Of three attempts, none is in the program that is refused; of two, the second."""
    seen = Seen()
    loud = before(lambda grads, params, seen: (seen.log(1.0), grads)[1])
    tx = loud(optax.adam(0.1), seen)
    with pytest.raises(ValueError, match="sparse=False"):
        osa.make_train_step(loss, tx)(start(), tx.init(start()), IDS[0])
    assert (seen.traces, marks(seen)[1]) == (3, 0)


@pytest.mark.slow
def test_without_jit():
    """`jax.disable_jit` runs what is around an optimiser as Python does."""
    seen = Seen()

    def change(updates, state, params, seen):
        seen.values.append(float(updates["w"][0]))  # no tracer
        return halve(updates, state, params, seen)

    tx = after(change)(osa.sparse_adam(0.1), seen)
    params, state = start(), tx.init(start())
    with jax.disable_jit():
        params, state, _ = osa.make_train_step(loss, tx)(params, state, IDS[0])
    assert (seen.traces, len(seen.values)) == (1, 1)
    moved = np.abs(params["table"] - start()["table"])[[3, 7]]
    np.testing.assert_allclose(moved, 0.05, rtol=1e-3)
