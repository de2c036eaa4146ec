"""The optional kernel: the numbers of the plain path, in place, and only where it may.

The tests' process has eight devices, so nothing in it uses the kernel by itself: the
functions are called directly, or it is said to be available.
"""

import functools
import os
import re
import socket
import unittest.mock
from pathlib import Path

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam._optimizers import sparse_adam
from optax_sparse_adam._rows import coalesce, kernel_ops
from optax_sparse_adam._rows.canary import copy_with
from optax_sparse_adam._rows.entries import sum_entries
from optax_sparse_adam.native import _calls, _library

from ..helpers import kernel_cases
from ..helpers.native import (
    calls_in,
    flags_of_memory,
    needs_compiler,
    python,
    sanitized,
)
from ..helpers.support import (
    TOLERANCE,
    WEEKLY,
    NumpyAdam,
    abstract_bcoo,
    assert_close,
    assert_identical,
    bcoo,
    compile_for_users,
    random_entries,
    row_sums,
    slow_but,
)


def sums(grad):
    return coalesce.Rows(*_calls.sum_rows(grad))


@st.composite
def gradients(draw):
    """Tables of one to three radix digits, few and many duplicates, all ranks."""
    num_rows = draw(st.sampled_from([1, 2, 7, 2048, 2049, 5_000_000]))
    row_shape = draw(st.sampled_from([(), (1,), (5,), (64,), (2, 3)]))
    nse = draw(st.sampled_from([1, 2, 40, 700]))
    seed = draw(st.integers(0, 999))
    used = draw(st.sampled_from([1, 30, num_rows]))
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((nse, *row_shape)).astype(np.float32)
    values[rng.random(nse) < 0.2] = draw(st.sampled_from([0.0, -0.0, np.inf, np.nan]))
    low, high = draw(st.sampled_from([(0, 0), (-3, 3)]))
    indices = rng.integers(low, min(used, num_rows) + high, (nse, 1)).astype(np.int32)
    return bcoo(values, indices, (num_rows, *row_shape))


@pytest.mark.slow
@needs_compiler
@hypothesis.settings(max_examples=12)
@hypothesis.given(gradients())
def test_sums_are_those_of_the_plain_path(cache, grad):
    assert_identical(
        jax.jit(sums)(grad),
        jax.jit(lambda grad: sum_entries(grad, "search"))(grad),
        "sums",
    )


ADAM = [
    (*case, sign)
    for case in [((60, 5), 700), ((9, 2, 64), 3000)]
    for sign in (1.0, -1.0)
]


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "nse", "sign"),
    slow_but(ADAM, ((60, 5), 700, -1.0), ((9, 2, 64), 3000, 1.0)),
)
def test_adam(cache, shape, nse, sign):
    """Against the formula in float64; rows that are not touched bit for bit."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(shape).astype(np.float32)
    expected = NumpyAdam(np.zeros(shape), lr=1.0, b1=0.8, b2=0.9, eps=1e-3)
    mu, nu = start, np.square(start)
    expected.mu, expected.nu = np.float64(mu), np.float64(nu)
    values, indices = random_entries(rng, shape, 1, nse, outside=True)
    indices[indices == 4] = 5
    rows = row_sums(values, indices, shape)
    expected.step({row: sign * value for row, value in rows.items()})
    size = np.sqrt(1 - 0.9) / (1 - 0.8)
    numbers = map(jnp.float32, (sign, 1 - 0.8, 1 - 0.9, 1e-3, -size))
    factors = sparse_adam.AdamScalars(*numbers)
    grad = bcoo(values, indices, shape)
    (ids, update), moments = adam_rows(grad, (mu, nu), factors)
    # Each row where its first entry was; the other slots are padding.
    inside = (indices[:, 0] >= 0) & (indices[:, 0] < shape[0])
    _, first = np.unique(np.where(inside, indices[:, 0], -1), return_index=True)
    slot = first[inside[first]]
    assert [(row,) for row in ids[slot, 0].tolist()] == list(rows)
    padding = np.setdiff1d(np.arange(nse), slot)
    assert_identical(ids[padding, 0], np.int32(padding) + shape[0])
    tol = TOLERANCE["float32"].numpy
    # A sum of two numbers is rounded relative to the larger one.
    assert_close(moments[0], expected.mu, tol, magnitude=np.abs(start) + 1)
    assert_close(moments[1], expected.nu, tol)
    touched = [row for (row,) in rows]
    assert_close(update[slot], expected.table[touched], 3 * tol, magnitude=5.0)
    assert not np.asarray(update)[padding].any()
    assert_identical((moments[0][4], moments[1][4]), (start[4], np.square(start[4])))


@needs_compiler
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_adam_of_low_precision(cache, types):
    """The update of float32 moments of the same value, and these rounded once."""
    rng = np.random.default_rng(0)
    shape = (50, 24)
    values, indices = random_entries(rng, shape, 1, 300, outside=True)
    start = np.abs(rng.standard_normal((2, *shape))) * 2.0 ** rng.integers(-90, 2)
    start[0, 3], values[indices[:, 0] == 5] = np.nan, np.inf
    moments = [jnp.asarray(x, t) for x, t in zip(start, types, strict=True)]
    wide = [x.astype("float32") for x in moments]
    factors = sparse_adam.AdamScalars(*map(jnp.float32, (1, 0.2, 0.1, 1e-3, -0.5)))
    grad = bcoo(values, indices, shape)
    update, low = adam_rows(grad, moments, factors)
    expected, new = adam_rows(grad, wide, factors)
    rounded = [x.astype(t) for x, t in zip(new, types, strict=True)]
    assert_identical((update, low), (expected, (*rounded,)))


@jax.jit
def adam_rows(grad, moments, factors):
    return _calls.update_by_formula("adam", grad, moments, (), (), factors)


def by_both(monkeypatch, step, *args):
    """What a program gives with the kernel and without, and its text with it."""
    results = []
    for uses in (True, False):
        monkeypatch.setattr(_calls, "available", lambda uses=uses: uses)
        jax.clear_caches()  # what was traced with the other answer
        lowered = jax.jit(step).lower(*args)
        results.append(lowered.compile()(*args))
        if uses:
            text = lowered.as_text()
    jax.clear_caches()
    assert "@optax_sparse_adam." not in lowered.as_text()
    return *results, text


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", slow_but(["adam", "exact_adam"], "adam"))
def test_unique_rows(cache, monkeypatch, name):
    """Rows that a transformation before has added up, padding among them: in place."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((60, 24)), "float32")
    tx = {"adam": osa.sparse_adam(0.1), "exact_adam": osa.exact_adam(0.1)}[name]
    indices = rng.permutation(np.arange(-20, 80, dtype="int32"))[:70, None]
    values = rng.standard_normal((70, 24)).astype("float32")
    grad = BCOO((values, indices), shape=table.shape, unique_indices=True)

    def steps(data, table):
        state, changed = tx.init(table), copy_with(BCOO, grad, data, indices)
        for _ in range(3):
            update, state = tx.update(changed, state, table)
        return update.indices, update.data, state

    if name == "adam":  # the plain path's, in the same order
        args = monkeypatch, lambda x: jax.jvp(lambda x: steps(x, table)[1], (x,), (x,))
        (data, changes), (expected, more), _ = by_both(*args, values)
        for a, b in ((data, expected), (changes, more)):
            assert_close(a, b, TOLERANCE["float32"].torch, magnitude=np.abs(b) + 1)
    *results, text = by_both(monkeypatch, steps, values, table)
    assert f"update {name}" in calls_in(text)
    (ids, *found), (expected_ids, *expected) = results
    assert_identical(ids, expected_ids)
    inside = (indices >= 0) & (indices < 60)
    padding = 60 + np.arange(70, dtype="int32")
    assert_identical(ids, np.where(inside, indices, padding[:, None]))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(a, b, TOLERANCE["float32"].torch, magnitude=np.abs(b) + 1)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", slow_but(["lazy", "sparse_adafactor"], "lazy"))
def test_others_of_low_precision(cache, monkeypatch, name):
    """Rows of bfloat16 that the kernel reads and writes are those of XLA."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((60, 24)), "bfloat16")
    ids = jnp.asarray(rng.integers(-3, 63, 300), "int32")
    tx = {
        "lazy": osa.lazy(optax.adam(0.1, mu_dtype="bfloat16")),
        "sparse_adafactor": osa.sparse_adafactor(0.1),
    }[name]

    def steps(table, ids):
        state = tx.init(table)
        for _ in range(3):
            grad = osa.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table)
            update, state = tx.update(grad, state, table)
            table = osa.apply_updates(table, update)
        return table, state

    with jax.numpy_dtype_promotion("standard"):  # as optax.adam needs
        found, expected, text = by_both(monkeypatch, steps, table, ids)
    assert {"read rows", "update add"} <= {*calls_in(text)}
    assert_identical(found, expected)
    assert np.any(found[0] != table)


ROWWISE = {
    "adagrad": osa.rowwise_adagrad(0.1),
    "adagrad, decay": osa.rowwise_adagrad(0.1, weight_decay=0.1),
    "adam": osa.rowwise_adam(0.1),
    "adam, decay": osa.rowwise_adam(optax.linear_schedule(0.1, 0, 9), weight_decay=0.1),
    "adam, small betas": osa.rowwise_adam(0.1, b1=0.0, b2=0.3),
    "adam, low mu": osa.rowwise_adam(0.1, mu_dtype="bfloat16"),
}


ROWWISE_CASES = [(name, width) for name in ROWWISE for width in (3, 64)]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "width"),
    slow_but(ROWWISE_CASES, ("adam, low mu", 3)),
)
def test_rowwise(cache, monkeypatch, name, width):
    """The numbers of the plain path; gradients of rows and of bags."""
    rng, tx = np.random.default_rng(0), ROWWISE[name]
    table = jnp.asarray(rng.standard_normal((300, width)), "float32")
    ids = jnp.asarray(rng.integers(-3, 303, (5, 8, 10)), "int32")

    def loss(table, ids, of_bags):
        sums = osa.embedding_bag(table, ids) if of_bags else table[ids[:, 0] % 300]
        return jnp.sum(jnp.sin(sums))

    def steps(table, ids):
        state = tx.init(table)
        for i, batch in enumerate(ids):
            grad = osa.grad(loss)(table, batch, i % 2 == 0)
            update, state = tx.update(grad, state, table)
            table = osa.apply_updates(table, update)
        return table, state

    found, expected, text = by_both(monkeypatch, steps, table, ids)
    kind = "rowwise_adam" if name.startswith("adam") else "rowwise_adagrad"
    assert calls_in(text).count(f"update {kind}") == 2  # of rows, and of bags
    tol = TOLERANCE["float32"].torch if "low" not in name else 2.0**-8
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        a, b = np.asarray(a, "float32"), np.asarray(b, "float32")
        assert_close(a, b, len(ids) * tol, magnitude=np.abs(b) + 1)
    assert np.any(found[0] != table)


@needs_compiler
@pytest.mark.parametrize("types", ["bb", "bf", "ff"])
def test_rows_are_added_and_put(cache, types):
    """Like XLA's scatter; sums in float32, rounded once. Padding is dropped."""
    rng = np.random.default_rng(0)
    table_type, type_ = ({"b": "bfloat16", "f": "float32"}[x] for x in types)
    bits = rng.integers(0, 2**32, (2, 3000, 5), "uint32")  # all kinds of numbers
    table = jnp.asarray(bits[0].view("float32")).astype(table_type)
    near = table.astype("float32") * rng.choice([2.0**-8, 2.0**-9, 1.0], table.shape)
    rows = jnp.where(rng.random((3000, 1)) < 0.5, near, bits[1].view("float32"))
    # Of two NaN the payload is left to the compiler.
    rows = jnp.where(jnp.isnan(rows), 1.0, rows).astype(type_)
    indices = rng.permutation(np.arange(-500, 5500))[:3000, None].astype(np.int32)

    def add(table, indices, rows):
        wide, at = table.astype("float32"), table.at[indices[:, 0]]
        old = wide.at[indices[:, 0]].get(mode="clip")
        return at.set((old + rows.astype("float32")).astype(table.dtype), mode="drop")

    def put(table, indices, rows):
        return table.at[indices[:, 0]].set(rows, mode="drop")

    indices[0] = -(2**31)  # if this were a row, it would be in no memory
    above = np.where(indices < 0, 10**9, indices)  # for JAX, where -1 is the last
    assert_identical(
        jax.jit(_calls.add_rows)(table, indices, rows),
        jax.jit(add)(table, above, rows),
    )
    rows = rows.astype(table.dtype)
    assert_identical(
        jax.jit(_calls.put_rows)(table, indices, rows),
        jax.jit(put)(table, above, rows),
    )


@needs_compiler
@pytest.mark.parametrize("nse", [1, 300_000])
def test_large_gradients(cache, nse):
    """Pieces of the sort, rows of several parts, and long chains of moves."""
    rng = np.random.default_rng(0)
    shape = (5_000_000, 3)
    indices = rng.zipf(1.3, (nse, 1)).clip(max=shape[0] + 9).astype(np.int32) - 1
    values = rng.standard_normal((nse, 3)).astype(np.float32)
    grad = bcoo(values, indices, shape)
    actual = jax.jit(sums)(grad)
    assert_identical(actual, jax.jit(lambda grad: sum_entries(grad, "search"))(grad))
    assert_identical(grad.data, values)


@pytest.mark.slow
@needs_compiler
def test_wrong_arrays_are_refused_when_it_runs(cache, tmp_path):
    """Where there are sanitizers, no call has left its buffers either."""
    every, number = (1, 4626) if WEEKLY else (5, 926)
    (library,) = cache.glob("optax_sparse_adam/*.so")
    library, variables = sanitized(tmp_path) or (library, {})
    program = str(Path(__file__).parents[1] / "helpers" / "kernel_cases.py")
    done = python(program, str(library), str(every), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{number} wrong calls refused\n"
    assert not done.stderr


def test_every_formula_is_everywhere():
    """In C++, in the types that a step asks for, and in the calls with wrong arrays."""
    source = (Path(_calls.__file__).parent / "rows.cc").read_text()
    table = source[source.index("const Known all[]") :]
    table = table[: table.index("};")]
    in_cpp = re.findall(r'\{"(\w+)"', table)
    called = [
        name.split()[1]
        for name, operands, _ in kernel_cases.specifications()
        if any(x.name == "values" for x in operands)
    ]
    assert sorted(in_cpp) == sorted(called) == sorted(["sum", *kernel_ops.CALLS])


@needs_compiler
def test_new_states(kernel):
    """Zeros of its own for each leaf, large ones in huge pages."""
    init = osa.sparse_adam(0.1, mu_dtype="bfloat16").init
    shapes = {"large": (200_000, 16), "as large": (200_000, 16), "small": (9, 2)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    state = init(params)
    arrays = jax.tree.leaves((state.mu, state.nu))
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays) == 6
    for name, shape in shapes.items():
        assert_identical(state.mu[name], np.zeros(shape, jnp.bfloat16))
        assert_identical(state.nu[name], np.zeros(shape, np.float32))
        place = state.nu[name].unsafe_buffer_pointer() + state.nu[name].nbytes // 2
        if "large" in name and Path("/sys/kernel/mm/transparent_hugepage").exists():
            assert "hg" in flags_of_memory(place)


@needs_compiler
def test_new_states_without_it(kernel, monkeypatch):
    """Inside of programs, and of what is no array of floats on a CPU."""
    monkeypatch.setattr(_calls, "zeros", None)
    init, size = osa.sparse_adam(0.1).init, (200_000, 16)
    params = {
        "numpy": np.ones(size, "float32"),
        "small numbers": jnp.zeros((20_000_000,), "int4"),
        "keys": jax.random.split(jax.random.key(0), 3),
    }
    state = init(params)
    assert jax.tree.map(jnp.shape, state.nu) == jax.tree.map(jnp.shape, params)
    wide = jnp.ones(size)
    assert jax.eval_shape(init, wide).nu.shape == size
    assert "zeros" not in jax.jit(init).lower(wide).as_text()
    assert init(jax.ShapeDtypeStruct(size, "float32")).nu.shape == size


def updated(shape=(5000, 24), nse=3000, n_sparse=1, dtype="float32", **flags):
    """A step of `sparse_adam`, traced."""
    tx, grad = osa.sparse_adam(0.1), abstract_bcoo(shape, nse, n_sparse, dtype, **flags)
    return traced(tx, lambda table, state, grad: grad, shape, dtype, grad)


def trained(tx=None, shape=(5000, 24), nse=3000, dtype="float32"):
    """A step that looks rows up, traced."""

    def gradient(table, state, ids):
        read = state if isinstance(state, osa.ExactAdamState) else None
        loss = osa.grad(lambda table: jnp.sum(jnp.square(table[ids])), read=read)
        return loss(table)

    ids = jax.ShapeDtypeStruct((nse,), jnp.int32)
    return traced(tx or osa.sparse_adam(0.1), gradient, shape, dtype, ids)


def traced(tx, gradient, shape, dtype, batch):
    def step(table, state, batch):
        grad = gradient(table, state, batch)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct(shape, dtype)
    state = jax.eval_shape(tx.init, table)
    return jax.jit(step, donate_argnums=(0, 1)).trace(table, state, batch)


UNIQUE = {"unique_indices": True, "indices_sorted": True}
EXACT = ["read exact_adam", "update order", "update exact_adam", "update add"]
# What calls which functions of the kernel.
USES = {
    "update": (updated, {}, ["update order", "update adam", "update add"]),
    "training": (
        trained,
        {},
        ["read rows", "update order", "update adam", "update add"],
    ),
    "exact_adam": (trained, {"tx": osa.exact_adam(0.1)}, EXACT),
    "exact_adamw": (trained, {"tx": osa.exact_adamw(0.1)}, EXACT),
    # The sums of float16 values are float32, its moments and its table are not.
    "float16": (
        updated,
        {"dtype": "float16"},
        ["update order", "update sum", "read rows", "update put"],
    ),
    "unique rows": (updated, UNIQUE, ["update order", "update adam", "update add"]),
    # It reads and writes the values of a block, by slots.
    "two sparse axes": (
        updated,
        {"shape": (50, 100, 24), "n_sparse": 2},
        ["read rows", "update put"],
    ),
    "no entries": (updated, {"nse": 0}, []),
    "too many rows": (updated, {"shape": (2**31 - 9, 1)}, []),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", slow_but(USES, *(x for x in USES if x not in ("update", "exact_adam")))
)
def test_where_it_is_called(kernel, name, monkeypatch):
    step, kwargs, expected = USES[name]
    assert calls_in(step(**kwargs).lower().as_text()) == expected
    monkeypatch.setattr(_library, "has_cpus_only", lambda: False)
    jax.clear_caches()
    for_gpus = step(**kwargs).lower(lowering_platforms=("cuda",))
    assert "@optax_sparse_adam." not in for_gpus.as_text()


@needs_compiler
def test_only_cpus_trace_no_other_branch(kernel, monkeypatch):
    """Until the kernel is turned off: then programs are for every platform."""
    jax.clear_caches()
    assert _library.has_cpus_only()  # by JAX_PLATFORMS
    assert "platform_index" not in str(updated().jaxpr)
    monkeypatch.setattr(_calls, "available", lambda: False)
    jax.clear_caches()
    text = updated().lower(lowering_platforms=("cuda",)).as_text()
    assert "@optax_sparse_adam." not in text


def two_updates(nse):
    """The update of one of two tables, and its arguments for both."""
    rng, tx, shape = np.random.default_rng(0), osa.sparse_adam(0.1), (5000, 24)
    ids = rng.integers(-2, shape[0] + 2, (2, nse, 1)).astype("int32")
    values = rng.standard_normal((2, nse, shape[1])).astype("float32")

    def update(values, ids, table):
        grad = bcoo(values, ids, shape)
        return osa.apply_updates(table, tx.update(grad, tx.init(table))[0])

    return update, (values, ids, jnp.ones((2, *shape)))


@pytest.mark.slow
@needs_compiler
def test_vmap_and_derivatives(kernel, monkeypatch):
    """Many tables at once take the plain path: those of the kernel would be copied."""
    update, args = two_updates(3000)
    lowered = jax.jit(jax.vmap(update)).lower(*args)
    assert calls_in(lowered.as_text()) == []
    alone = jnp.stack([jax.jit(update)(*(x[i] for x in args)) for i in (0, 1)])
    assert_close(lowered.compile()(*args), alone, TOLERANCE["float32"].torch)
    update, (values, (ids, _), (table, _)) = two_updates(30)

    def loss(values, table):
        return jnp.sum(jnp.sin(jax.vmap(update, (0, None, None))(values, ids, table)))

    found, expected, _ = by_both(monkeypatch, jax.grad(loss, (0, 1)), values, table)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@needs_compiler
def test_export(kernel):
    """Only where its user has said that the kernel will be there."""
    grad = bcoo(np.ones((3, 2), "float32"), np.zeros((3, 1), "int32"), (9, 2))
    export = functools.partial(jax.export.export, jax.jit(osa.coalesce))
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        export()(grad)
    allowed = jax.export.DisabledSafetyCheck.custom_call("optax_sparse_adam.update")
    export(disabled_checks=[allowed])(grad)


@needs_compiler
def test_turned_off_after_a_first_step(cache, alone, monkeypatch):
    """What has been traced keeps the kernel, until JAX forgets it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    jax.clear_caches()
    grad = bcoo(np.ones((3, 2), "float32"), np.zeros((3, 1), "int32"), (9, 2))
    export = functools.partial(jax.export.export, jax.jit(osa.coalesce))
    for value in ("", "0"):
        monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", value)
        with pytest.raises(ValueError, match="no compatibility guarantees"):
            export()(grad)
    jax.clear_caches()
    found = export()(grad).call(grad)
    assert_identical(found.data[:1], np.full((1, 2), 3.0, np.float32))


BFLOAT16, BATCH = jnp.bfloat16, 4096 * 64 * 4  # bytes of a gradient
ROUNDED = osa.stochastic_rounding(osa.sparse_adam(0.1), 0, state_dtype=BFLOAT16)
# The optimiser, the type of the table, and how much a step may hold. Of 30 million rows
# a byte each, or more, would be seen.
MEMORY = {
    "sparse_adam": (osa.sparse_adam(0.1), "float32", 3 * BATCH),
    # And the numbers of some hundred steps to come.
    "exact_adam": (osa.exact_adam(0.1), "float32", 3 * BATCH + 20_000),
    "exact_adamw": (osa.exact_adamw(0.1), "float32", 3 * BATCH + 20_000),
    "low sparse_adam": (osa.sparse_adam(0.1), BFLOAT16, 12 * BATCH),
    "low mu": (osa.sparse_adam(0.1, mu_dtype=BFLOAT16), "float32", 12 * BATCH),
    "low lazy(adam)": (osa.lazy(optax.adam(0.1)), BFLOAT16, 12 * BATCH),
    "low lazy(adam), mu": (
        osa.lazy(optax.adam(0.1, mu_dtype=BFLOAT16)),
        "float32",
        12 * BATCH,
    ),
    "low rowwise_adam": (
        osa.rowwise_adam(0.1, mu_dtype=BFLOAT16),
        BFLOAT16,
        12 * BATCH,
    ),
    "low rounded": (osa.lazy(ROUNDED), BFLOAT16, 12 * BATCH),
    "low exact_adam": (osa.exact_adam(0.1), BFLOAT16, 12 * BATCH),
    "low sparse_adafactor": (osa.sparse_adafactor(), BFLOAT16, 12 * BATCH),
}
CORE = ("sparse_adam", "low lazy(adam)")


@needs_compiler
@pytest.mark.parametrize("name", slow_but(MEMORY, *CORE))
def test_memory_of_a_step(kernel, as_optax_expects, name):
    tx, dtype, limit = MEMORY[name]
    step = trained(tx, (30_000_000, 64), 4096, dtype)
    memory = compile_for_users(step.lower()).memory_analysis()
    assert memory.temp_size_in_bytes < limit
    if name == "sparse_adam":
        assert memory.alias_size_in_bytes == 3 * 30_000_000 * 64 * 4 + 4  # the count
        update = compile_for_users(updated((30_000_000, 64), 4096).lower())
        # The gradient's buffer, which becomes the update; its indices; vectors of ids.
        temporary = update.memory_analysis().temp_size_in_bytes
        assert temporary <= BATCH + 4096 * 3 * 4 + 1024


ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
import jax, optax_sparse_adam as osa
from jax.experimental.sparse import BCOO
from optax_sparse_adam.native import available

rng, tx, shape = np.random.default_rng(0), osa.sparse_adam(0.1), (5000, 24)
ids = rng.integers(0, 5000, (3000, 1), "int32")
grad = BCOO((np.ones((3000, 24), "float32"), ids), shape=shape)
table = jax.numpy.ones(shape)
jax.block_until_ready(jax.jit(tx.update)(grad, tx.init(table), table))
assert available()
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not on Linux")
def test_one_core(cache):
    """There is no other thread to wait for."""
    done = python("-c", ONE_CORE, XDG_CACHE_HOME=str(cache), XLA_FLAGS="")
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_where_it_is_not_used(cache, alone, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert _library.available()
    assert _library.status().startswith("Used on CPUs: ")
    monkeypatch.setenv("XLA_FLAGS", "--a=b --xla_force_host_platform_device_count=2")
    assert not _library.available()
    assert "several CPU devices" in _library.status()
    monkeypatch.setenv("XLA_FLAGS", "file")  # which JAX has read: it is asked
    assert _library.available() == (jax.device_count() == 1)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_count", unittest.mock.Mock(side_effect=RuntimeError))
        assert not _library.available()  # no CPU among `jax_platforms`
    monkeypatch.delenv("XLA_FLAGS")
    assert _library.available()
    with monkeypatch.context() as patch:
        patch.setattr(jax.distributed, "is_initialized", lambda: True)
        assert not _library.available()
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", "0")
    assert not _library.available()
    assert "turns it off" in _library.status()


TRACED_FIRST = """
import sys
import jax
from jax.experimental.sparse import BCOO
import optax_sparse_adam as osa
from optax_sparse_adam.native import available

def update(data, indices, table):
    grad = BCOO((data, indices), shape=table.shape)
    tx = osa.sparse_adam(0.1)
    return tx.update(grad, tx.init(table))

array = jax.ShapeDtypeStruct
args = array((3, 2), "float32"), array((3, 1), "int32"), array((9, 2), "float32")
assert "('formula', 'adam')" in str(jax.jit(update).trace(*args).jaxpr)
jax.distributed.initialize("localhost:" + sys.argv[1], num_processes=1, process_id=0)
assert not available()  # other processes may hold parts of the tables
"""


@pytest.mark.slow
@needs_compiler
def test_tracing_starts_no_backend(cache):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"XDG_CACHE_HOME": str(cache), "XLA_FLAGS": ""}
    done = python("-c", TRACED_FIRST, str(port), **variables)
    assert done.returncode == 0, done.stderr
