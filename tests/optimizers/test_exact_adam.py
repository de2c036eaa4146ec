"""exact_adam and exact_adamw give the numbers of optax's Adam on dense gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.support import (
    assert_close,
    assert_identical,
    bcoo,
    slow_but,
    to_dense,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

ROWS, WIDTH, BATCH, STEPS = 1000, 4, 16, 1000


def schedule(count):
    """In float64 where that is on: of an int32 optax computes a float32, which two
    programs may round otherwise."""
    cosine = optax.warmup_cosine_decay_schedule(0.0, 0.01, 100, STEPS)
    return cosine(jnp.asarray(count, float))


@functools.cache
def problem():
    """A table, targets, and batches of Zipf ids; one row rests for 900 steps."""
    rng = np.random.default_rng(0)
    weights = 1 / (1 + np.arange(ROWS))
    ids = rng.choice(ROWS - 1, (STEPS, BATCH), p=weights[:-1] / weights[:-1].sum())
    ids[[50, 950], 0] = ROWS - 1
    table, targets = rng.normal(size=(2, ROWS, WIDTH)) * [[[0.1]], [[0.5]]]
    return table, targets, ids.astype(np.int32), rng.normal(size=(*ids.shape, WIDTH))


def loss(table, targets, ids, noise, size):
    """Its gradient, about as large as `size`, depends on what is read."""
    rows = table[ids]
    values = jnp.sin(rows - targets[ids]) ** 2 + noise * rows
    return size * jnp.sum(values), rows


def train(tx, value_and_grad, apply_updates, table, targets, ids, noise, size):
    """The table in the end, and the rows that each step has read."""

    def step(carry, batch):
        table, state = carry
        fun = functools.partial(value_and_grad, read=state) if is_exact else dense
        (_, rows), grad = fun(loss, has_aux=True)(table, targets, *batch, size)
        updates, state = tx.update(grad, state, table)
        return (apply_updates(table, updates), state), rows

    is_exact, dense = value_and_grad is osa.value_and_grad, value_and_grad
    carry, rows = jax.lax.scan(step, (table, tx.init(table)), (ids, noise))
    return osa.flush(*carry)[0] if is_exact else carry[0], rows


OURS = osa.value_and_grad, osa.apply_updates
OPTAX = jax.value_and_grad, optax.apply_updates
OPTIMIZERS = {
    "adam": (osa.exact_adam(schedule), optax.adam(schedule)),
    "adamw": (
        osa.exact_adamw(schedule, weight_decay=0.1),
        optax.adamw(schedule, weight_decay=0.1),
    ),
    # Poles near z = 1, and the z of roots.
    "b2 = 0.95": (osa.exact_adam(schedule, b2=0.95), optax.adam(schedule, b2=0.95)),
    "nadamw": (
        osa.exact_adamw(0.003, 0.8, 0.95, 1e-4, weight_decay=0.1, nesterov=True),
        optax.adamw(0.003, 0.8, 0.95, 1e-4, weight_decay=0.1, nesterov=True),
    ),
}


@functools.cache
def results(name, which, dtype, size, backend=None):
    with jax.enable_x64(dtype == "float64"):
        run = compiled(name, which, dtype, backend)
        table, targets, ids, noise = problem()
        arrays = (jnp.asarray(x, dtype) for x in (table, targets, noise))
        table, targets, noise = arrays
        out = run(table, targets, jnp.asarray(ids), noise, jnp.asarray(size, dtype))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), out)


@functools.cache
def compiled(name, which, dtype, backend):
    ours, optaxs = OPTIMIZERS[name]
    tx, functions = (ours, OURS) if which == "exact" else (optaxs, OPTAX)
    return jax.jit(functools.partial(train, tx, *functions))


# Without and with the kernel in turns.
RUNS = [
    (name, size, ("kernel", "plain")[(i + j) % 2])
    for i, name in enumerate(OPTIMIZERS)
    for j, size in enumerate((1.0, 1e-4, 1e-7))
]


@pytest.mark.parametrize(
    ("name", "size", "backend"),
    slow_but(RUNS, ("adamw", 1.0, "plain")),
    indirect=["backend"],
)
def test_against_dense(name, size, backend):
    """After 1,000 steps, and at each read in between.

    In float64 to 1e-10. In float32, the dense run's own rounding is measured against
    the dense run in float64, and allowed.
    """
    expected = results(name, "dense", "float64", size)
    for actual, wanted in zip(
        results(name, "exact", "float64", size, backend), expected, strict=True
    ):
        assert_close(actual, wanted, 1e-10, magnitude=1.0)
    dense, exact = (
        [a - b for a, b in zip(found, expected, strict=True)]
        for found in (
            results(name, "dense", "float32", size),
            results(name, "exact", "float32", size, backend),
        )
    )
    for a, b, what in zip(exact, dense, ("table", "reads"), strict=True):
        for measure in (lambda x: np.abs(x).max(), np.std):
            assert measure(a) <= 2 * measure(b), (what, measure(a), measure(b))


SHAPES = {"table": (12, 3), "deep": (5, 4, 2), "vector": (9,), "dense": (3, 2)}
DEPTHS = {"table": 1, "deep": 2, "vector": 1}


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def start():
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=s)) for name, s in SHAPES.items()}


def gradients(steps, kinds):
    """Trees of gradients for each step, of the kinds that `kinds(step, name)` says."""
    rng = np.random.default_rng(2)
    for step in range(steps):
        grads = {}
        for name, shape in SHAPES.items():
            kind = kinds(step, name)
            depth = DEPTHS.get(name, 1)
            indices = np.stack([rng.integers(0, n + 1, 4) for n in shape[:depth]], 1)
            values = rng.normal(size=(4, *shape[depth:]))
            rows = bcoo(values, indices.astype(np.int32), shape)
            whole = rng.normal(size=shape)
            grads[name] = {"rows": rows, "whole": whole, "none": None}[kind]
        yield grads


def densify(grads):
    """What dense Adam gets: zeros where nothing is stored."""

    def one(name, grad):
        if grad is None:
            return np.zeros(SHAPES[name])
        return to_dense(grad) if hasattr(grad, "indices") else grad

    return {name: one(name, grad) for name, grad in grads.items()}


def mostly_rows(step, name):
    return "whole" if name == "dense" else "rows"


def mixed(step, name):
    """Each kind after each: three trees of kinds, that is three programs, in turns."""
    turns = (0, 0, 1, 2, 2, 1, 1, 0, 2)
    kinds = ("rows", "none", "whole")
    kind = kinds[(turns[step % 9] + list(SHAPES).index(name)) % 3]
    return "whole" if name == "dense" and kind == "rows" else kind


def compare(tx, reference, kinds=mostly_rows, steps=40, visit=None):
    """The flushed parameters and moments after each step equal those of dense Adam."""
    params, state = start(), tx.init(start())
    wanted, wanted_state = start(), reference.init(start())

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        params = osa.apply_updates(params, updates)
        return params, state, osa.flush(params, state)

    @jax.jit
    def wanted_update(grads, state, params):
        updates, state = reference.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step, grads in enumerate(gradients(steps, kinds)):
        if kinds is mixed:
            whole = [isinstance(grads[name], np.ndarray) for name in sorted(SHAPES)]
            if np.any(whole & np.asarray(state.values_until != state.clock)):
                params, state = osa.flush(params, state)
        params, state, flushed = update(grads, state, params)
        wanted, wanted_state = wanted_update(densify(grads), wanted_state, wanted)
        assert_trees_close(flushed[0], wanted)
        if visit is not None:
            params, state = visit(step, params, state)
    return flushed, wanted_state


assert_trees_close = functools.partial(
    chex.assert_trees_all_close, rtol=0.0, atol=1e-12
)


ADAMW = {"weight_decay": 0.1, "mask": lambda params: {n: n != "deep" for n in params}}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", slow_but([mostly_rows, mixed], mixed))
@pytest.mark.usefixtures("double")
def test_kinds_of_gradients(kinds):
    """Rows of any depth, `None`, and behind a flush dense gradients, in turns."""
    (_, state), wanted = compare(
        osa.exact_adamw(0.05, **ADAMW), optax.adamw(0.05, **ADAMW), kinds
    )
    assert_trees_close(state.mu, wanted[0].mu)
    assert_trees_close(state.nu, wanted[0].nu)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_what_params_hold():
    """Values where gradients are dense, projected final values elsewhere."""
    tx = osa.exact_adam(0.05)
    params, state = start(), tx.init(start())

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state

    for grads in gradients(5, mostly_rows):
        params, state = update(grads, state, params)
    flushed, _ = osa.flush(params, state)
    assert_identical(params["dense"], flushed["dense"])
    none = dict.fromkeys(SHAPES)
    skip = lambda _, state: tx.update(none, state)[1]  # noqa: E731
    state = jax.lax.fori_loop(0, 700, skip, state)  # until no remaining update is left
    final, _ = osa.flush(params, state)
    for name in DEPTHS:
        assert np.abs(flushed[name] - params[name]).max() > 0.01
        assert_identical(final[name], params[name])


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_flush_in_between():
    """It changes nothing but what the parameters hold; twice is once."""

    def flush(step, params, state):
        if step not in (7, 8, 20):
            return params, state
        once = osa.flush(params, state)
        assert_identical(osa.flush(*once), once)
        return once

    compare(
        osa.exact_adamw(0.05, **ADAMW), optax.adamw(0.05, **ADAMW), mixed, visit=flush
    )


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_in_company():
    """Clipping before it; beside it other optimisers; masks; chains of all."""
    clip = optax.clip_by_global_norm(0.5)
    labels = {name: "other" if name == "vector" else "exact" for name in SHAPES}

    def build(adam, clip, other):
        parts = {"exact": adam(0.05), "other": other}
        chain = optax.chain(clip, optax.partition(parts, labels))
        return optax.chain(optax.masked(optax.identity(), dict(ADAMW)["mask"]), chain)

    compare(
        build(osa.exact_adam, osa.lazy(clip), osa.lazy(optax.sgd(0.1))),
        build(optax.adam, clip, optax.sgd(0.1)),
    )


def scan_steps(tx, table, steps, row_of, is_dense=False):
    """Table and state after a gradient for one row, or for none, in each step."""

    def step(carry, number):
        table, state = carry
        value = jnp.sin(number.astype(table.dtype)) * jnp.ones_like(table[:1])
        row = row_of(number).astype("int32").reshape(1, 1)
        grad = bcoo(value, row, table.shape)
        updates, state = tx.update(grad.todense() if is_dense else grad, state, table)
        return (osa.apply_updates(table, updates), state), None

    numbers = jnp.arange(steps, dtype="int32")
    return jax.lax.scan(step, (table, tx.init(table)), numbers)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but(["float32", "float64"], "float32"))
def test_long_rest(dtype):
    """After a few gradients, 10,000 steps without any."""
    decay = {"weight_decay": 0.1}
    decay["learning_rate"] = optax.exponential_decay(0.01, 1000, 0.7)

    def run(tx, dtype, **kwargs):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), dtype)
        row_of = lambda number: jnp.where(number < 5, number, 6)  # noqa: E731
        return scan_steps(tx, table, 10_000, row_of, **kwargs)

    with jax.enable_x64(dtype == "float64"):
        actual = jax.jit(lambda: osa.flush(*run(osa.exact_adamw(**decay), dtype)))()
    with jax.enable_x64(True):
        expected = jax.jit(
            lambda: run(optax.adamw(**decay), "float64", is_dense=True)
        )()
    # In float32 the dense run would be off by 1e-6.
    tol = {"float32": 2e-7, "float64": 1e-13}[dtype]
    assert_close(actual[0], expected[0], tol, magnitude=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_promoted_with_wide_types(dtype):
    """To the bits of the ordinary promotion, eager and compiled."""
    tx = osa.exact_adamw(0.1, weight_decay=0.1)

    def step(params, state):
        grad = osa.grad(lambda t: t[jnp.array([1, 3])].sum(), read=state)(params)
        updates, state = tx.update(grad, state, params)
        return osa.apply_updates(params, updates), state

    def run(step):
        params = jnp.ones((5, 2), dtype)
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state)
        return osa.flush(params, state)

    with jax.enable_x64(True):
        expected = [run(step), run(jax.jit(step))]
        with jax.numpy_dtype_promotion("strict"):
            assert_identical([run(step), run(jax.jit(step))], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", slow_but(["plain", "kernel"], "kernel"), indirect=True
)
def test_decay_of_a_long_training(backend):
    """Its sum is kept in two floats: one would lose a part of what a step adds."""
    decay = {"learning_rate": 0.48, "weight_decay": 0.1}

    def run(tx, **kwargs):
        row_of = lambda number: jnp.where(number % 2 == 0, 1, 99)  # noqa: E731
        return scan_steps(tx, 5 * jnp.ones((3, 20)), 4000, row_of, **kwargs)

    actual = jax.jit(lambda: osa.flush(*run(osa.exact_adamw(**decay))))()
    expected = jax.jit(lambda: run(optax.adamw(**decay), is_dense=True))()
    assert_close(actual[0][1], expected[0][1], 5e-7, magnitude=1.0)


# Of parameters near 1 at a rate of 0.1: in float32, optax's `1 - b2**t` has lost up to
# 1e-4 of itself to cancellation after the first steps, ours nothing.
FIRST_STEPS = 1e-5


def flax_model():
    model = nnx.Embed(12, 3, rngs=nnx.Rngs(0))
    return model, jnp.array([[1, 4, 4], [4, 7, 0], [1, 1, 0], [9, 4, 1]])


def flax_loss(model, ids):
    return jnp.mean(jnp.sin(model(ids)) ** 2)


@pytest.mark.slow
def test_nnx_optimizer():
    """A donated step of Flax NNX, which keeps its states in its own containers."""

    def run(tx, step):
        model, batches = flax_model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        train = nnx.jit(step, donate_argnums=(0, 1))
        for ids in batches:
            train(model, optimizer, ids)
        state = nnx.as_pure(optimizer.opt_state)
        return nnx.as_pure(nnx.state(model, nnx.Param)), state

    def dense(model, optimizer, ids):
        optimizer.update(model, nnx.grad(flax_loss)(model, ids))

    def split(model, optimizer, ids):
        graph, params = nnx.split(model)

        def loss(params):
            return flax_loss(nnx.merge(graph, params), ids)

        read = nnx.as_pure(optimizer.opt_state)
        optimizer.update(model, osa.grad(loss, read=read)(params))

    def whole(model, optimizer, ids):
        grads = flax_nnx.grad(flax_loss, read=optimizer)(model, ids)
        optimizer.update(model, grads)
        flax_nnx.flush(model, optimizer)

    expected, _ = run(optax.adamw(0.1), dense)
    for step in (split, whole):
        actual, _ = osa.flush(*run(osa.exact_adamw(0.1), step))
        actual, expected = map(jax.tree.leaves, (actual, expected))
        chex.assert_trees_all_close(actual, expected, atol=FIRST_STEPS)


@pytest.mark.slow
def test_nnx_optimizer_of_a_part():
    """`optax.masked` leaves holes in the state, in containers that are not NNX's."""

    def loss(both, ids):
        return flax_loss(both["embed"], ids) + jnp.sum(both["scale"][...])

    def run(adam, gradient):
        model, batches = flax_model()
        both = nnx.Dict(embed=model, scale=nnx.Param(jnp.ones(3)))
        mask = jax.tree_util.tree_map_with_path(
            lambda path, _: "embed" in jax.tree_util.keystr(path),
            nnx.as_pure(nnx.state(both, nnx.Param)),
        )
        optimizer = nnx.Optimizer(both, optax.masked(adam, mask), wrt=nnx.Param)

        @nnx.jit
        def train(both, optimizer, ids):
            optimizer.update(both, gradient(optimizer)(both, ids))

        for ids in batches:
            train(both, optimizer, ids)
        return both, optimizer

    actual = run(osa.exact_adam(0.1), lambda read: flax_nnx.grad(loss, read=read))
    flax_nnx.flush(*actual)
    expected = run(optax.adam(0.1), lambda _: nnx.grad(loss))
    actual, expected = (both["embed"].embedding[...] for both, _ in (actual, expected))
    assert_close(actual, expected, FIRST_STEPS, magnitude=1.0)


@pytest.mark.slow
def test_train_state():
    """Flax's own state of training, donated."""

    def run(tx, gradient):
        @functools.partial(jax.jit, donate_argnums=0)
        def train(state, ids):
            grad = gradient(lambda p: jnp.sum(p["t"][ids] ** 2), state.opt_state)
            return state.apply_gradients(grads=grad(state.params))

        params = {"t": jnp.ones((9, 2))}
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        for ids in np.array([[1, 4, 4], [4, 7, 0], [1, 1, 0]]):
            state = train(state, ids)
        return state

    state = run(osa.exact_adam(0.1), lambda loss, read: osa.grad(loss, read=read))
    expected = run(optax.adam(0.1), lambda loss, _: jax.grad(loss)).params["t"]
    assert_close(
        osa.flush(state.params, state.opt_state)[0]["t"], expected, FIRST_STEPS
    )


@pytest.mark.slow
def test_shard_map():
    """Each device keeps its rows, reads them up to date and updates them."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = osa.exact_adamw(0.1, weight_decay=0.1)
    one = many = jnp.asarray(np.random.default_rng(0).normal(size=(32, 2)), "float32")
    one_state = many_state = tx.init(one)
    specs = jax.tree.map(
        lambda x: P("x") if x.shape[:1] == (32,) else P(), (one, one_state)
    )

    def step(table, state, ids):
        loss = lambda table: jnp.sum(table[ids] ** 2)  # noqa: E731
        grad = osa.grad(loss, read=state)(table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    local = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, P("x")), out_specs=specs, check_vma=False
    )
    local, alone, flush = jax.jit(local), jax.jit(step), jax.jit(osa.flush)
    # Where results lie: else the first step is another program.
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    many, many_state = jax.device_put((many, many_state), places)
    for batch in range(4):
        ids = np.random.default_rng(batch).integers(0, 4, (8, 3)).astype(np.int32)
        many, many_state = local(many, many_state, ids.reshape(-1))
        everywhere = (ids + 4 * np.arange(8)[:, None]).reshape(-1)
        one, one_state = alone(one, one_state, everywhere)
    assert_close(flush(many, many_state)[0], flush(one, one_state)[0], 1e-6)


@pytest.mark.slow
def test_low_precision():
    """Arithmetic in float32: a bfloat16 table rounds where it is stored."""
    tx = osa.exact_adamw(0.01, weight_decay=0.1)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), "bfloat16")
    wide = table.astype("float32")
    states = tx.init(table), tx.init(wide)._replace(nu=jnp.zeros_like(wide))
    assert (states[0].mu.dtype, states[0].last.dtype) == (jnp.bfloat16, jnp.int32)
    grad = bcoo(jnp.ones((2, 4), "bfloat16"), np.array([[1], [5]], np.int32), (8, 4))
    update, state = jax.jit(tx.update)(grad, states[0], table)
    assert update.dtype == jnp.bfloat16
    table, state = jax.jit(osa.flush)(osa.apply_updates(table, update), state)
    assert table.dtype == state.nu.dtype == jnp.bfloat16
    full = jnp.zeros((8, 4)).at[np.array([1, 5])].add(1.0)
    reference = optax.adamw(0.01, weight_decay=0.1)
    expected, _ = reference.update(full, reference.init(wide), wide)
    # The projected value, the value, and what is between are rounded to eight bits.
    assert_close(table, wide + expected, 3 * 2.0**-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mu_dtype", "nu_dtype", "scale"),
    slow_but(
        [
            ("bfloat16", "float32", 1.0),
            ("bfloat16", "bfloat16", 1.0),
            ("float16", "float32", 1e-4),  # which float16 has as subnormal numbers
            ("float32", "float16", 0.1),
        ],
        ("bfloat16", "bfloat16", 1.0),
    ),
)
def test_rounded_moments(mu_dtype, nu_dtype, scale):
    """Rows that are touched in every step: the moments' rounding moves none of them."""
    tx = osa.exact_adam(0.1, mu_dtype=mu_dtype)
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=(8, 64)), "float32")
    ids = np.array([[1], [5]], np.int32)
    state = tx.init(start)
    state = state._replace(nu=state.nu.astype(nu_dtype))
    expected = np.float64(start)
    mu, nu = np.zeros((2, 2, 64))
    table, step, flush = start, jax.jit(tx.update), jax.jit(osa.flush)
    for t in range(1, 6):
        # No small ones, whose squares float16 would have as zeros.
        values = scale * np.sign(rng.normal(size=(2, 64))) * rng.uniform(1, 2, (2, 64))
        values = values.astype("float32")
        update, state = step(bcoo(values, ids, start.shape), state, table)
        table = osa.apply_updates(table, update)
        mu, nu = 0.9 * mu + 0.1 * values, 0.999 * nu + 0.001 * np.square(values)
        size = np.sqrt(nu / (1 - 0.999**t)) + 1e-8
        expected[[1, 5]] -= 0.1 * mu / (1 - 0.9**t) / size
        mu, nu = np.float64(mu.astype(mu_dtype)), np.float64(nu.astype(nu_dtype))
        assert_close(flush(table, state)[0], expected, 1e-6, magnitude=10.0)


@pytest.mark.parametrize(
    "changed", slow_but([{"b1": 0.8}, {"b2": 0.99}, {"eps": 1e-7}], {"b2": 0.99})
)
def test_state_of_other_constants(changed):
    """Other decay rates or another epsilon raise; the learning rate may change."""
    table = jnp.ones((3, 4))
    grad = bcoo(np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32), (3, 4))
    table, state = jax.jit(osa.flush)(table, osa.exact_adam(0.1).init(table))
    update, _ = jax.jit(osa.exact_adam(0.2).update)(grad, state)
    assert np.isfinite(update.data).all()
    other = osa.exact_adam(0.1, **changed)
    with pytest.raises(ValueError, match="its own b1, b2 and eps"):
        other.update(grad, state)
    if "b2" not in changed:  # a program knows only when it runs
        update, _ = jax.jit(other.update)(grad, state)
        assert np.isnan(update.data).all()


NEAREST = {0.5: 0.584, 0.9: 0.928, 0.99: 0.9929}


@pytest.mark.parametrize("b1", slow_but(NEAREST, 0.9))
def test_nearest_betas(b1):
    """Rounding stays small with as many nodes as there may be: with 61 rows were off by
    1e6."""
    b2 = NEAREST[b1]
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.integers(-6, 4, (200, 1))
    table = rng.normal(size=(200, 8)).astype(np.float32)
    slopes = jnp.asarray(rng.normal(size=(200, 8)) * sizes, jnp.float32)
    batches = rng.integers(0, 200, (30, 40)).astype(np.int32)
    tx = osa.exact_adam(1e-3, b1, b2)
    step = osa.make_train_step(lambda t, ids: jnp.sum(t[ids] * slopes[ids]), tx)
    params, mu, nu = table.astype(np.float64), 0.0, 0.0
    exact, state = jnp.asarray(table), tx.init(jnp.asarray(table))
    for t, ids in enumerate(batches, 1):
        grad = np.zeros_like(params)
        np.add.at(grad, ids, np.asarray(slopes)[ids])
        mu, nu = b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * grad**2
        root = np.sqrt(nu / (1 - b2**t)) + 1e-8
        params = params - 1e-3 * mu / (1 - b1**t) / root
        exact, state, _ = step(exact, state, jnp.asarray(ids))
        values, _ = osa.flush(exact, state)
        np.testing.assert_allclose(values, params, rtol=0, atol=2e-6)


@pytest.mark.parametrize("b2", slow_but([0.95, 0.999, 0.9999], 0.999))
def test_smallest_epsilon(b2):
    tx = osa.exact_adam(0.1, b2=b2, eps=1e-36 / np.sqrt(1 - b2))
    table, step = jnp.ones((3, 4)), jax.jit(tx.update)
    grad = bcoo(np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32), (3, 4))
    state = tx.init(table)
    for _ in range(3):
        update, state = step(grad, state)
        table = osa.apply_updates(table, update)
    expected = np.array([[0.7], [1.0], [1.0]]) * np.ones(4)
    assert_close(osa.flush(table, state)[0], expected, 1e-5)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: osa.exact_adam(jnp.ones([])), TypeError, "known for all steps"),
        (lambda: osa.exact_adam(0.1, eps=1e-37), ValueError, "eps of at least"),
        (lambda: osa.exact_adam(-1.0), ValueError, "at least 0"),
        (lambda: osa.exact_adamw(0.1, weight_decay=-1), ValueError, "weight decay: -1"),
        (lambda: osa.exact_adam(0.1, 0.9, 0.8), ValueError, r"b1 < sqrt\(b2\)"),
        (lambda: osa.exact_adam(0.1, 0.9, 0.925), ValueError, "about 0.7 of 1 - b1"),
        (lambda: osa.exact_adam(0.1, 0.9, 0.85).init(jnp.ones(2)), ValueError, "full"),
        (lambda: osa.exact_adam(0.1, jnp.ones([])), TypeError, "needs b1 as a Python"),
        (lambda: osa.exact_adam(0.1, eps=0), ValueError, "epsilon"),
        (lambda: osa.exact_adam(0.1, eps_root=1e-8), ValueError, "eps_root=0.0 only"),
        (lambda: osa.exact_adamw(1.0, weight_decay=0.1), ValueError, "at most"),
        (
            lambda: optax.inject_hyperparams(osa.exact_adam)(0.1).init(jnp.ones(2)),
            TypeError,
            "inject_hyperparams",
        ),
        (
            lambda: osa.exact_adam(0.1).init(jnp.arange(3)),
            ValueError,
            "masked",
        ),
        (lambda: osa.flush(1.0, osa.exact_adam(0.1)), ValueError, "flush needs"),
        (
            lambda: osa.flush({}, osa.exact_adam(0.1).init(jnp.ones(2))),
            ValueError,
            "must belong to the parameters",
        ),
        (
            lambda: osa.exact_adamw(0.1).update(
                jnp.ones(2), osa.exact_adamw(0.1).init(jnp.ones(2))
            ),
            ValueError,
            "needs the parameters",
        ),
        (
            lambda: jax.eval_shape(
                osa.exact_adam(0.1).update,
                bcoo(jnp.ones(1), np.zeros((1, 2), np.int32), (3, 2)),
                osa.exact_adam(0.1).init(jnp.ones((3, 2))),
            ),
            ValueError,
            "2 sparse axes",
        ),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_too_much_decay_later():
    """A schedule shows only when it is called that rows lose too much in a step."""
    tx = osa.exact_adamw(optax.linear_schedule(0, 0.6, 100), weight_decay=0.1)
    table = jnp.ones((3, 1))
    grad = bcoo(np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32), (3, 1))
    update, _ = jax.jit(tx.update)(grad, tx.init(table), table)
    assert np.isnan(update.data).all()
