"""exact_adam by the optional kernel: the numbers of the plain path, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.native import _calls

from ..helpers.native import needs_compiler
from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
    bcoo,
    slow_but,
)

pytestmark = needs_compiler

ROWS, STEPS = 40, 12
SCHEDULE = optax.linear_schedule(0.1, 0.0, 30)
OPTIMIZERS = {
    "adam": lambda: osa.exact_adam(0.1),
    "adamw": lambda: osa.exact_adamw(SCHEDULE, weight_decay=0.1),
    "nadam": lambda: osa.exact_adam(SCHEDULE, nesterov=True),
    "z of roots": lambda: osa.exact_adam(SCHEDULE, b2=0.95),
    "short ways": lambda: osa.exact_adam(0.1, b1=1e-3),
}


def train(tx, width):
    """Rows of all ages; those of a step before a flush hold values.

    Their gradients are of size 1 to 1e-9, so that roots are far above `eps`, and below.
    """
    weights = 10.0 ** -(jnp.arange(ROWS, dtype="float32") % 10)

    def loss(table, ids):
        rows = jnp.take(table, ids, axis=0, mode="fill", fill_value=2.0)
        weight = jnp.take(weights, ids, mode="clip")
        return jnp.sum(weight[:, None] * jnp.sin(rows) ** 2), rows

    def step(carry, ids):
        table, state = carry
        both = osa.value_and_grad(loss, has_aux=True, read=state)
        (_, rows), grad = both(table, ids)
        updates, state = tx.update(grad, state, table)
        return (osa.apply_updates(table, updates), state), rows

    def steps(carry, ids):
        carry, rows = jax.lax.scan(step, carry, ids)
        return osa.flush(*carry), (carry, rows)

    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((ROWS, width)), "float32")
    ids = rng.integers(-2, ROWS + 2, (STEPS, 25), "int32")
    ids[:, :5] = 7  # read more than once in a step
    return jax.lax.scan(steps, (table, tx.init(table)), ids.reshape(3, -1, 25))


@pytest.mark.parametrize(
    ("name", "width"),
    slow_but([("adamw", 1), *((n, 70) for n in OPTIMIZERS)], ("nadam", 70)),
)
def test_numbers_of_the_plain_path(cache, monkeypatch, name, width):
    """Rows of one number, and of more than one part of the loops over a row."""

    def run(uses_kernel):
        monkeypatch.setattr(_calls, "available", lambda: uses_kernel)
        jax.clear_caches()  # what was traced with another answer
        traced = jax.jit(lambda: train(OPTIMIZERS[name](), width)).trace()
        for target in ("take_rows_now", "exact_adam_rows"):
            found = f"optax_sparse_adam.{target}" in str(traced.jaxpr)
            assert found == uses_kernel
        return traced.lower().compile()()

    actual, expected = run(True), run(False)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            # Steps of about 0.1 each, whose rounding errors add up.
            assert_close(a, b, STEPS * TOLERANCE["float32"].torch, magnitude=1.0)
        else:
            assert_identical(a, b)


@pytest.mark.parametrize("fill", slow_but([2.0, None], 2.0))
@pytest.mark.parametrize("num_rows", [40, 200_000])
def test_many_lookups(cache, fill, num_rows):
    """A row that was read before is copied; there are fewer places than 200,000."""
    rng = np.random.default_rng(0)
    table, mu, nu = (rng.standard_normal((num_rows, 3), "float32") for _ in range(3))
    last = rng.integers(1, 9, num_rows).astype("int32")
    numbers = np.array([-0.1, -5e-4, 1e-9, 2e-9, 0, 0, 0, 0, 1, 0.5], "float32")

    @jax.jit
    def look_up(ids):
        args = (mu, nu**2, last), numbers, np.array([9, 0], "int32")
        return _calls.look_up_rows_now(jnp.asarray(table), *args, ids, fill)

    once = np.asarray(look_up(np.arange(num_rows, dtype="int32")))  # none is copied
    ids = rng.integers(-3, num_rows + 3, 100_000).astype("int32")
    ids[1::2] = rng.choice(ids, 50_000)
    expected = once[np.clip(ids, 0, num_rows - 1)]
    if fill is not None:
        expected[(ids < 0) | (ids >= num_rows)] = fill
    assert np.all(np.any(once != table, axis=1))
    assert_identical(look_up(ids), expected)


@pytest.mark.parametrize("decays", [False, True])
def test_rows_that_have_arrived(cache, decays):
    """Their moments are not read: NaN there does not show. Those before are read."""
    arrive = 644 if decays else 322  # steps: 64 or 32 by 0.1 - 5e-4
    last = np.array([1, 2, 1], "int32")
    high = np.zeros(3, "float32")
    tables = [np.full((3, 5), np.nan, "float32")] * 2 + [last]
    tables += [high, high] * decays
    numbers = [-0.1, -5e-4, 1e-9, 2e-9, -0.5 * decays, 0, 0, 0, 1, 0.5]
    args = np.array(numbers, "float32"), np.array([1 + arrive, 0], "int32")
    table, ids = jnp.ones((3, 5)), np.arange(3, dtype="int32")
    rows = np.asarray(_calls.look_up_rows_now(table, (*tables,), *args, ids, None))
    assert_close(rows[[0, 2]], np.full((2, 5), np.exp(-0.5 * decays)), 1e-6)
    assert np.isnan(rows[1]).all()


@pytest.mark.parametrize("nodes", [2, 3])
def test_no_way_to_go(cache, nodes):
    """Rows without momentum, or with an infinite second moment, stay where they are."""
    table = jnp.ones((2, 5))
    mu, nu = np.zeros((2, 2, 5), "float32")
    mu[1], nu[1] = 1.0, np.inf
    args = np.array([9, 0], "int32"), np.arange(2, dtype="int32"), None
    for way in (np.nan, 1.0):  # a run that has failed leaves no trace
        numbers = [-0.1, -5e-4, 1e-9, 2e-9, 0, 0, *[0.0] * nodes, *[way] * nodes]
        tables = mu, nu, np.full(2, 8, "int32")
        numbers = np.array(numbers, "float32")
        rows = _calls.look_up_rows_now(table, tables, numbers, *args)
    assert_identical(rows, table)


def test_where_it_is_not_used(cache, monkeypatch):
    """Other types, and rows whose vectors have a state each."""
    monkeypatch.setattr(_calls, "available", lambda: True)
    jax.clear_caches()
    for table in (jnp.ones((9, 3, 20)), jnp.ones((9, 20), "bfloat16")):
        tx = osa.exact_adam(0.1)

        def step(table, state, tx=tx):
            ids = jnp.arange(3)
            grad = osa.grad(lambda t: jnp.sum(t[ids] ** 2), read=state)(table)
            return tx.update(grad, state, table)

        program = str(jax.make_jaxpr(step)(table, tx.init(table)))
        assert "exact_adam_rows" not in program
        assert "take_rows_now" not in program


# Each array of both calls.
SHAPES = {
    "indices": ((6, 1), "int32"),
    "data": ((6, 3), "float32"),
    "mu": ((9, 3), "float32"),
    "nu": ((9, 3), "float32"),
    "last": ((9,), "int32"),
    "high": ((9,), "float32"),
    "low": ((9,), "float32"),
    "param": ((9, 3), "float32"),
    "steps": ((2,), "int32"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("how", ["rows", "type"])
def test_every_wrong_array_is_refused_while_tracing(name, how):
    arrays = {key: jnp.zeros(*value) for key, value in SHAPES.items()}
    wrong = arrays[name]
    other = "uint32" if wrong.dtype == jnp.int32 else "float16"
    arrays[name] = wrong[1:] if how == "rows" else wrong.astype(other)
    grad = bcoo(np.ones((6, 3), np.float32), np.zeros((6, 1), np.int32), (9, 3))
    grad.data, grad.indices = arrays["data"], arrays["indices"]
    tables = tuple(arrays[key] for key in ("mu", "nu", "last", "high", "low"))
    param, steps = arrays["param"], arrays["steps"]
    words = r"The kernel takes .*, got .*`init`"
    with pytest.raises(ValueError, match=words):
        _calls.exact_adam_rows(grad, tables, (param,), jnp.zeros(18), steps)
    if name in ("indices", "data", "param"):
        return
    with pytest.raises(ValueError, match=words):
        _calls.look_up_rows_now(
            jnp.zeros((9, 3)), tables, jnp.zeros(8), steps, arrays["indices"], None
        )
