"""`lazy` in blocks: with what results and memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._rows import map_rows

from ..helpers.blocks import at_once, lower
from ..helpers.identity import assert_identity, make_task
from ..helpers.support import (
    TOLERANCE,
    abstract_bcoo,
    assert_close,
    bcoo,
    compile_for_users,
    random_entries,
    slow_but,
)

FLAGSHIP = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.5, 2, 5), weight_decay=0.1),
)
CHAINS = {
    "flagship": FLAGSHIP,
    "centred": optax.chain(optax.centralize(), optax.zero_nans(), optax.yogi(0.1)),
    "injected": optax.inject_hyperparams(optax.nadamw)(0.1, b1=0.5),
    "partition": optax.partition(
        {"a": optax.amsgrad(0.1), "b": optax.sgd(0.1)}, {"table": "a", "bias": "b"}
    ),
    "adagrad": optax.adagrad(0.1),
    "a clock a row": osa.per_row(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two rows or three, of the tables here."""
    monkeypatch.setattr(map_rows, "_BLOCK_BYTES", 120)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def trees(shapes, nse=8, n_sparse=1, dtype="float32"):
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
    grads = {
        k: bcoo(*random_entries(rng, s, n_sparse, nse, dtype, outside=True), s)
        for k, s in shapes.items()
    }
    return grads, params


def jitted(tx):
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


@pytest.mark.parametrize("name", slow_but(CHAINS, "a clock a row"))
def test_touched_rows_are_a_table(name):
    """The chain sees all leaves together, norms and all; other rows keep every bit."""
    with jax.enable_x64():
        tx, task = CHAINS[name], make_task((2, 5, 7, 11))
        _, tables = lower(osa.lazy(tx), task.grads[0], task.params, "trace")
        assert tables == {"table"}
        lifted = jitted(osa.lazy(tx))
        assert_identity(lifted, jitted(tx), task, 1e-13, compiled=False)
    assert lifted.update._cache_size() == 1


TREES = {
    "rows of one number": trees({"table": (50,)}, 40),
    "matrices": trees({"table": (20, 2, 3)}),
    "two sparse axes": trees({"table": (5, 4, 6)}, n_sparse=2),
    "nothing but ids": trees({"table": (5, 4)}, 40, n_sparse=2),
    "alike and another": trees({"a": (20, 6), "b": (20, 6), "c": (9, 3, 2)}),
    "half precision": trees({"table": (20, 6)}, 40, dtype="float16"),
}


def assert_all_close(actual, expected):
    """The same formulas; XLA contracts and fuses those of two programs otherwise."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == e.dtype
        tol = 4e-3 if a.dtype == "float16" else 10 * TOLERANCE["float32"].numpy
        assert_close(a, e, tol, magnitude=np.nanmax(np.abs(e), initial=0.0))


@pytest.mark.parametrize("name", slow_but(TREES, "two sparse axes"))
def test_shapes(name):
    grads, params = TREES[name]
    tx = osa.lazy(FLAGSHIP)
    lowered, tables = lower(tx, grads, params)
    assert tables == set(params)
    arguments = grads, tx.init(params), params
    assert_all_close(lowered.compile()(*arguments), at_once(tx.update, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("with_params", slow_but([True, False], True))
def test_trees_with_holes(with_params):
    """Small tables, None and dense leaves; or no parameters at all."""
    grads, params = trees({"a": (20, 6), "b": (20, 6)})
    grads["dense"] = params["dense"] = jnp.ones(3)
    if with_params:
        grads["small"] = bcoo(np.ones((2, 6), np.float32), [[3], [3]], (20, 6))
        grads["none"] = None
        params |= {"small": params["a"], "none": params["b"]}
    tx = osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    state, kept = tx.init(params), params if with_params else None
    lowered, tables = lower(tx, grads, kept, state=state)
    assert tables == ({"a", "b", "small"} if with_params else {"a", "b"})
    actual = lowered.compile()(grads, state, kept)
    assert_all_close(actual, at_once(tx.update, grads, state, kept))


@pytest.mark.slow
def test_what_rows_and_others_need_is_computed_once():
    """Such as the norm of all gradients, which a block takes as a number."""
    grads, params = trees({"table": (20, 6)})
    for name in "abc":
        grads[name] = params[name] = jnp.ones(7)
    lowered, tables = lower(osa.lazy(FLAGSHIP), grads, params)
    assert tables == {"table"}
    text = compile_for_users(lowered).as_text()
    sums = re.findall(r"= f32\[\]\S* reduce\(", text)
    assert len(sums) == len(grads)


def test_what_a_transformation_says_it_says_once():
    said, traced = [], []

    def update(updates, state, params=None):
        traced.append("update")
        jax.debug.callback(lambda: said.append("updated"))
        return jax.tree.map(jnp.add, updates, state), state

    grads, params = trees({"table": (20, 6)})
    inner = optax.GradientTransformation(lambda params: params, update)
    tx = osa.lazy(inner)
    lowered, tables = lower(tx, grads, params)
    assert not tables
    jax.block_until_ready(lowered.compile()(grads, tx.init(params), params))
    jax.effects_barrier()
    assert said == ["updated"]
    assert len(traced) == 3  # two of them to compare sizes, see `row_owners`


@pytest.mark.slow
def test_derivatives_and_vmap():
    """Those of all rows at once, and no loop over copies of tables."""
    grads, params = trees({"table": (20, 6)}, nse=12)
    (grad,), (table,) = grads.values(), params.values()

    def update(rate, values):
        tx = osa.lazy(optax.adam(rate))
        new = bcoo(values, grad.indices, grad.shape)
        updates, state = tx.update(new, tx.init(table), table)
        return jnp.sum(jnp.sin(updates.data)) + jnp.sum(state[0].mu ** 2)

    def derivatives(rate, values):
        forward = jax.jvp(update, (rate, values), (rate, values))
        return forward, jax.grad(update, (0, 1))(rate, values)

    for function, batch in (derivatives, ()), (jax.vmap(update, (None, 0)), (2,)):
        values = jnp.broadcast_to(grad.data + 3, (*batch, *grad.data.shape))
        program = jax.jit(function).lower(0.1, values)
        assert_all_close(program.compile()(0.1, values), at_once(function, 0.1, values))
    loops = [x for x in program.as_text().splitlines() if "stablehlo.while" in x]
    assert not any("20x6x" in loop for loop in loops)


def test_memory(monkeypatch):
    """Blocks, and nothing of the size of the gradient but the results."""
    monkeypatch.undo()
    nse, width = 65_536, 64
    rows = 30_000_000  # a bit for each were more than is allowed
    table = jax.ShapeDtypeStruct((rows, width), "float32")
    grad = abstract_bcoo(table.shape, nse)
    lowered, tables = lower(osa.lazy(FLAGSHIP), grad, table, donate=1)
    assert tables == {""}
    memory = compile_for_users(lowered).memory_analysis()
    assert memory.alias_size_in_bytes == 2 * rows * width * 4 + 8
    # Vectors of ids to sort and to search; gradient, update, moments, decay of a block.
    limit = 8 * nse * 4 + 6 * map_rows._BLOCK_BYTES
    assert limit < rows / 8
    temporary = memory.temp_size_in_bytes
    assert temporary <= limit, f"{temporary} bytes, more than {limit}"


def test_memory_of_rows_that_meet():
    """A state that is replaced, not changed, is read before it is written in place."""
    change = optax.GradientTransformation(
        lambda params: jnp.zeros_like(params),
        lambda grad, last, params: (grad - last, grad),
    )
    table = jax.ShapeDtypeStruct((1_000_000, 5), "float32")
    grad = abstract_bcoo(table.shape, 8)
    tx = osa.lazy(optax.chain(change, optax.scale_by_trust_ratio()))
    lowered, tables = lower(tx, grad, table, donate=1)
    assert not tables  # the norm is that of all rows
    assert compile_for_users(lowered).memory_analysis().temp_size_in_bytes < 20_000


@pytest.mark.slow
def test_memory_of_many_tables(monkeypatch):
    """The gradients, their sums, and rows of the moments: XLA holds those of all."""
    monkeypatch.undo()
    number, nse, width = 8, 512, 32
    tables = [jax.ShapeDtypeStruct((9999, width), "float32")] * number
    grad = abstract_bcoo(tables[0].shape, nse)
    lowered, taken = lower(osa.lazy(FLAGSHIP), [grad] * number, tables, donate=1)
    assert len(taken) == number
    temporary = compile_for_users(lowered).memory_analysis().temp_size_in_bytes
    gradients = number * nse * width * 4
    # From 0.12 on XLA stores the columns that a CPU reads in parts, and then lays them
    # together: one more, of as many rows as are updated at once.
    most = 3.5 if jax.__version_info__ < (0, 12) else 5
    assert temporary <= most * gradients, f"{temporary}, more than {most} * {gradients}"


def test_small_gradients(monkeypatch):
    """Take no loop; nor do larger ones, if their state is one number a row."""
    monkeypatch.undo()
    table = jax.ShapeDtypeStruct((100_000, 64), "float32")
    for nse, tx, has_loop, analysed in (
        (1024, osa.lazy(optax.adam(0.1)), False, {""}),
        (1025, osa.lazy(optax.adam(0.1)), True, {""}),
        (65_536, osa.rowwise_adagrad(0.1), False, set()),  # known to treat rows alone
    ):
        grad = abstract_bcoo(table.shape, nse)
        traced, tables = lower(tx, grad, table, "trace")
        assert tables == analysed
        assert (" while[" in str(traced.jaxpr)) == has_loop


@pytest.mark.slow
def test_no_tracer_outlives_its_trace():
    """And what JAX checks of each equation holds for those of a block, too."""
    grads, params = trees({"table": (20, 6)})
    tx = osa.lazy(optax.adamw(0.1))
    arguments = grads, tx.init(params), params
    with jax.checking_leaks(), jax.enable_checks(True):
        lines = jax.jit(tx.update).lower(*arguments).as_text().splitlines()
    assert any("stablehlo.while" in line and "20x6x" in line for line in lines)


def test_vmap_of_cond():
    """Where JAX makes batched operands of all that the branches close over."""
    grads, params = trees({"table": (20, 6)})
    grad, tx = osa.coalesce(grads["table"]), osa.lazy(optax.adam(0.1))
    state = tx.init(params["table"])

    def step(is_taken):
        take = functools.partial(tx.update, grad, state)
        return jax.tree.leaves(jax.lax.cond(is_taken, take, lambda: (grad, state)))

    actual = jax.jit(jax.vmap(step))(jnp.array([True, False]))
    taken, left = at_once(tx.update, grad, state), (grad, state)
    for i, expected in enumerate((taken, left)):
        assert_all_close([leaf[i] for leaf in actual], jax.tree.leaves(expected))


@pytest.mark.parametrize("how", [lambda f, *x: jax.jit(f)(*x), at_once])
def test_booleans_of_rows(how):
    """State that says of each element whether a gradient has been there."""

    def update(updates, seen, params=None):
        return jax.tree.map(jnp.multiply, updates, ~seen), jnp.ones_like(seen)

    inner = optax.GradientTransformation(lambda p: jnp.zeros(p.shape, bool), update)
    grads, params = trees({"table": (20, 6)})
    tx, grad = osa.lazy(inner), osa.coalesce(grads["table"])
    state, sums = tx.init(params["table"]), []
    for _ in range(2):
        new, state = how(tx.update, grad, state)
        sums.append(np.abs(new.data).sum())
    np.testing.assert_allclose(sums, [np.abs(grad.data).sum(), 0.0], rtol=1e-6)
