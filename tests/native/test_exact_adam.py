"""exact_adam by the optional kernel: the numbers of the plain path, and its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.native import _build, _calls

from ..helpers.native import calls_in, needs_compiler
from ..helpers.support import (
    TOLERANCE,
    assert_close,
    assert_identical,
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
    "short updates": lambda: osa.exact_adam(0.1, b1=1e-3),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width"),
    slow_but(
        [("adamw", 1), ("adam", 4), ("adamw", 16), *((n, 70) for n in OPTIMIZERS)],
        ("nadam", 70),
    ),
)
def test_numbers_of_the_plain_path(cache, monkeypatch, name, width):
    """Rows of one number, and of more than one part of the loops over a row."""

    def run(uses_kernel):
        monkeypatch.setattr(_calls, "available", lambda: uses_kernel)
        jax.clear_caches()  # what was traced with another answer
        lowered = jax.jit(lambda: train(OPTIMIZERS[name](), width)).lower()
        calls = {"read exact_adam", "update exact_adam"} if uses_kernel else set()
        assert calls <= {*calls_in(lowered.as_text())}
        assert uses_kernel or not calls_in(lowered.as_text())
        return lowered.compile()()

    actual, expected = run(True), run(False)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            # Steps of about 0.1 each, whose rounding errors add up.
            assert_close(a, b, STEPS * TOLERANCE["float32"].torch, magnitude=1.0)
        else:
            assert_identical(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "z of roots", "sparse_adam"])
def test_a_column_is_the_same_at_any_width(cache, monkeypatch, name):
    """In parts of 16, 8 and 4 numbers, and among the last ones of a row."""
    monkeypatch.setattr(_calls, "available", lambda: True)
    jax.clear_caches()  # what was traced with another answer
    make, call = OPTIMIZERS.get(name), "update exact_adam"
    if make is None:
        make, call = lambda: osa.sparse_adam(0.1), "update adam"
    rng = np.random.default_rng(0)
    table, weights = rng.standard_normal((2, ROWS, 48), "float32")
    batches = jnp.asarray(rng.integers(0, ROWS, (STEPS, 9)), "int32")

    def trained(width):
        def loss(table, ids):
            return jnp.sum(jnp.asarray(weights[:1, :width]) * table[ids])

        def step(carry, ids):
            table, state = carry
            grad = osa.grad(loss, read=state)(table, ids)
            updates, state = tx.update(grad, state, table)
            return (osa.apply_updates(table, updates), state), None

        tx, own = make(), jnp.asarray(table[:, :width])
        train = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), batches)[0])
        assert call in calls_in(train.lower(own).as_text())
        table_then, state = train(own)
        return table_then, state.mu, state.nu

    widest = trained(48)
    for width in (1, 2, 7, 13, 28):
        for narrow, wide in zip(trained(width), widest, strict=True):
            assert_identical(narrow, wide[:, :width])


def stale_rows(tables, step, decay=0.0, polynomials=((0, 0), (1, 0.5)), of_roots=False):
    """Rows of a state, of which none holds a value, and scalars of some schedule."""
    scalars = _calls.StaleScalars(-0.1, -5e-4, 1e-9, 2e-9, decay, 0.0)
    floats = (np.asarray(x, "float32") for x in (scalars, polynomials))
    arrays = *floats, np.array([step, 0], "int32")
    of_two = (np.stack([np.zeros_like(x), x]) for x in arrays)
    return _calls.Stale(tables, of_roots, *of_two, np.int32(1))


@pytest.mark.slow
@pytest.mark.parametrize("fill", [2.0, None])
@pytest.mark.parametrize("num_rows", [40, 99_999])
def test_many_lookups(cache, fill, num_rows):
    """Each as if it were read alone; ids out of bounds read `fill` or the next row."""
    rng = np.random.default_rng(0)
    table, mu, nu = (rng.standard_normal((num_rows, 9), "float32") for _ in range(3))
    last = rng.integers(1, 9, num_rows).astype("int32")
    stale = stale_rows((mu, nu**2, last), 9)

    @jax.jit
    def look_up(ids):
        return _calls.look_up_stale_rows(jnp.asarray(table), stale, ids, fill)

    once = np.asarray(look_up(np.arange(num_rows, dtype="int32")))
    ids = rng.integers(-3, num_rows + 3, 100_000).astype("int32")
    ids[1::2] = rng.choice(ids, 50_000)
    expected = once[np.clip(ids, 0, num_rows - 1)]
    if fill is not None:
        expected[(ids < 0) | (ids >= num_rows)] = fill
    assert np.all(np.any(once != table, axis=1))
    assert_identical(look_up(ids), expected)


def test_rows_of_all_ages(cache):
    """Powers of the betas, of which the kernel has 64 at hand."""
    ages = np.arange(100, dtype="int32")
    ones = np.ones((100, 5), "float32")
    stale = stale_rows((ones, ones, 101 - ages), 101)
    rows = _calls.look_up_stale_rows(jnp.zeros((100, 5)), stale, ages, None)
    root, centre = np.exp(-5e-4 * ages), 2e-9
    z = (root - centre) / (root + centre)
    expected = np.exp(-0.1 * ages) / (root + centre) * (1 + 0.5 * z)
    assert_close(rows, expected[:, None] * ones, 1e-5)


@pytest.mark.parametrize("decays", [False, True])
def test_rows_that_have_arrived(cache, decays):
    """Their moments are not read: NaN there does not show. Those before are read."""
    arrive = 644 if decays else 322  # steps: 64 or 32 by 0.1 - 5e-4
    last = np.array([1, 2, 1], "int32")
    high = np.zeros(3, "float32")
    tables = [np.full((3, 5), np.nan, "float32")] * 2 + [last]
    tables += [high, high] * decays
    stale = stale_rows((*tables,), 1 + arrive, -0.5 * decays)
    table, ids = jnp.ones((3, 5)), np.arange(3, dtype="int32")
    rows = np.asarray(_calls.look_up_stale_rows(table, stale, ids, None))
    assert_close(rows[[0, 2]], np.full((2, 5), np.exp(-0.5 * decays)), 1e-6)
    assert np.isnan(rows[1]).all()


@pytest.mark.parametrize("of_roots", [False, True])
def test_nothing_remains(cache, of_roots):
    """Rows without momentum, or with an infinite second moment, stay where they are."""
    table = jnp.ones((2, 5))
    mu, nu = np.zeros((2, 2, 5), "float32")
    mu[1], nu[1] = 1.0, np.inf
    tables, ids = (mu, nu, np.full(2, 8, "int32")), np.arange(2, dtype="int32")
    for size in (np.nan, 1.0):  # a run that has failed leaves no trace
        polynomials = [3 * [0.0], 3 * [size]]
        stale = stale_rows(tables, 9, polynomials=polynomials, of_roots=of_roots)
        rows = _calls.look_up_stale_rows(table, stale, ids, None)
    assert_identical(rows, table)


def test_where_it_is_not_used(kernel):
    """Other types, and rows whose vectors have a state each."""
    for table in (jnp.ones((9, 3, 20)), jnp.ones((9, 20), "bfloat16")):
        tx = osa.exact_adam(0.1)

        def step(table, state, tx=tx):
            ids = jnp.arange(3)
            grad = osa.grad(lambda t: jnp.sum(t[ids] ** 2), read=state)(table)
            return tx.update(grad, state, table)

        program = str(jax.make_jaxpr(step)(table, tx.init(table)))
        assert "'exact_adam'" not in program


def test_scalars_are_those_of_the_sources():
    """The fields of the structs in C++ are those in Python, in their order."""
    paths = sorted(_build.SOURCE.parent.glob("*.h"))
    text = "".join(path.read_text() for path in paths)
    for scalars in (
        _calls.StaleScalars,
        _calls.StepScalars,
        _calls.RowwiseAdagradScalars,
        _calls.RowwiseAdamScalars,
    ):
        fields = re.search(rf"struct {scalars.__name__} {{\s*float ([^;]*);", text)[1]
        assert tuple(re.split(r",\s*", fields)) == scalars._fields
