"""Losses that read rows up to date: the numbers of the flushed parameters."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.function_cases import FUNCTIONS
from ..helpers.gradients import ROUNDED, check, dense, square
from ..helpers.lookup_cases import DENSE, LOOKUPS
from ..helpers.optimizers import FINAL
from ..helpers.support import (
    assert_close,
    slow_but,
    to_dense,
)
from ..helpers.transform_cases import UNDER, first

pytestmark = pytest.mark.usefixtures("as_optax_expects")

CASES = {
    **LOOKUPS,
    **UNDER,
    **FUNCTIONS,
    **{f"dense: {name}": case for name, case in DENSE.items()},
}
# All of them pass; these read rows in different ways.
NAMES = [
    "matrix of ids",
    "fill of a scaled table",
    "rank 1",
    "rank 3, i j",
    "rank 3, i : j",
    "i j out of range, fill",
    "i :k",
    "dynamic_slice of columns",
    "two tables, one dense",
    "bfloat16 table",
    *[*UNDER][::6],
    *[*FUNCTIONS][::8],
    "dense: tied output weights",
    "dense: an id for each column",
    "dense: decay in a scan",
]


def trained(loss, params, *batches):
    """Parameters and state after steps; a row that rests is not up to date."""
    schedule = optax.linear_schedule(0.1, 0.0, 30)
    tx = osa.exact_adamw(schedule, weight_decay=0.1)
    step = osa.make_train_step(loss, tx)
    params = jax.tree.map(jnp.array, params)
    state = tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, *batch)
    return params, state


def trained_table(rows=6, width=3):
    """A table of which each row has had other gradients, and its state."""
    table = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    batches = np.random.default_rng(1).integers(rows, size=(8, rows // 2))
    weights = np.cos(np.arange(width, dtype=np.float32))
    return trained(lambda t, ids: square(t[ids], weights), table, *zip(batches))


# The kernel reads rows, however they are looked up: each kind of lookup in one way,
# and those of the core in both.
WAYS = ("plain", "kernel") * len(NAMES)
USES = list(zip(NAMES, WAYS, strict=False))
USES += list(zip((NAMES[1], NAMES[9]), WAYS, strict=False))
FEW = (USES[1], USES[12])


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(dict.fromkeys([*USES, *FEW]), *FEW),
    indirect=["backend"],
)
def test_every_use(name, backend):
    """Each kind of lookup sees the flushed table; what is used as a whole holds it."""
    case = CASES[name]
    params, ids = case.inputs()
    # Optimisers have no steps of single elements; these are only read.
    loss = first if name == "i j out of range, fill" else case.loss
    params, state = trained(loss, params, (ids,), (ids - 1,), (ids - 1,))

    @jax.jit
    def both(params, ids, state):
        # The flushed table is another array, as it is to any program.
        flushed = jax.lax.optimization_barrier(osa.flush(params, state)[0])
        ours = osa.value_and_grad(case.loss, read=state)(params, ids)
        value = osa.evaluate(case.loss, read=state)(params, ids)
        return ours, jax.value_and_grad(case.loss)(flushed, ids), value

    result, expected, value = both(params, ids, state)
    # The formula is compiled into other kernels; products lie in other orders.

    case = case._replace(ulps=4 * ROUNDED + case.ulps)
    check(case, result, expected, name)
    check(case, (value, result[1]), expected, f"{name}, evaluated")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [jax.lax.stop_gradient, lambda x: x])
def test_whole_table_in_a_loop_and_after_it(stop):
    """What a loop computes of a table is no value of the program around it."""

    def loss(table, ids):
        def step(total, i):
            return total + jnp.sum(table[i] * jnp.sum(stop(table), 0)), None

        return jax.lax.scan(step, 0.0, ids)[0] + jnp.sum(stop(table) ** 2)

    (table, state), ids = trained_table(), jnp.arange(3)
    flushed, held = jax.jit(osa.flush)(table, state)
    if stop is not jax.lax.stop_gradient:  # used as a whole
        with pytest.raises(ValueError, match="only where all rows hold their values"):
            osa.value_and_grad(loss, read=state)(table, ids)
        table, state = flushed, held
    value, grad = jax.jit(osa.value_and_grad(loss, read=state))(table, ids)
    expected = jax.jit(jax.value_and_grad(loss))(flushed, ids)
    assert_close(value, expected[0], 1e-5)
    grad = to_dense(grad) if hasattr(grad, "indices") else grad
    assert_close(grad, expected[1], 1e-5, magnitude=10.0)


@pytest.mark.slow
def test_what_a_loop_of_unknown_length_meets():
    """Random keys, a mutable array, and effects, each once and in order."""
    table, state = trained_table()
    shown = []

    def walk(table, key):
        total = jax.new_ref(jnp.zeros(()))

        def step(carry):
            key, row, steps = carry
            key, own = jax.random.split(key)
            total[...] += jnp.sum(table[row])
            jax.debug.callback(lambda x: shown.append(int(x)), row, ordered=True)
            return key, jax.random.randint(own, (), 0, len(table)), steps + 1

        jax.lax.while_loop(lambda c: c[2] < 5, step, (key, jnp.asarray(0), 0))
        return total[...]

    key = jax.random.key(0)
    expected = jax.block_until_ready(walk(osa.flush(table, state)[0], key))
    jax.effects_barrier()
    rows = [*shown]
    assert len(rows) == 5
    for way in (lambda f: f, jax.jit):
        shown.clear()
        read = way(lambda t, s, key: osa.evaluate(walk, read=s)(t, key))
        assert_close(read(table, state, key), expected, 1e-6)
        jax.effects_barrier()
        assert shown == rows


@pytest.mark.slow
def test_every_shape_is_evaluated():
    def loss(p, ids):
        return sum(jnp.sum(x[ids] ** 2) for x in p.values())

    params = {str(n): jnp.ones((6, 3, 2)[:n]) for n in (1, 2, 3)}
    batches = [(jnp.array(ids),) for ids in ([0, 1], [2, 3], [4, 5])]
    params, state = trained(loss, params, *batches)
    found = jax.jit(osa.evaluate(lambda p: p, read=state))(params)
    flushed = jax.jit(osa.flush)(params, state)[0]
    for name, value in found.items():
        assert_close(value, flushed[name], 1e-6, what=name)
        assert np.all(value[:4] != params[name][:4])


@pytest.mark.slow
def test_nothing_is_read():
    """Of a table with a dense gradient, whose rows hold their values."""
    (table, state), ids = trained_table(), jnp.arange(3)
    flushed, held = jax.jit(osa.flush)(table, state)

    def loss(table, ids):
        return jnp.sum(table[ids] ** 2), table[ids]

    read = functools.partial(osa.grad, loss, has_aux=True, sparse=False)
    with pytest.raises(ValueError, match="only where all rows hold their values"):
        read(read=state)(table, ids)
    lost, _ = jax.jit(lambda *args: read(read=args[1])(args[0], ids))(table, state)
    assert np.isnan(lost)[:3].all()
    grad, rows = read(read=held)(flushed, ids)
    assert_close(rows, flushed[ids], 1e-6)
    assert_close(grad, jax.jit(jax.grad(loss, has_aux=True))(flushed, ids)[0], 1e-6)


@pytest.mark.slow
def test_parts_of_a_tree(backend):
    """States anywhere in a tree, of some parameters; several arguments."""
    labels = {"a": "exact", "b": "other", "c": "decayed"}
    parts = {
        "exact": osa.exact_adam(0.1),
        "other": osa.sparse_adam(0.1),
        "decayed": osa.exact_adamw(0.2, weight_decay=0.1),
    }
    tx = optax.chain(optax.identity(), optax.partition(parts, labels))
    params = {name: jnp.ones((5, 2)) for name in labels}
    ids = jnp.array([1, 3])

    def loss(params, scale):
        rows = {name: table[ids] for name, table in params.items()}
        return scale * sum(jnp.sum(x**2) for x in rows.values()), rows

    def step(params, state):
        fun = osa.value_and_grad(loss, has_aux=True, read=state)
        (_, rows), grads = fun(params, 1.0)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state, rows

    state = tx.init(params)
    for _ in range(3):
        flushed, _ = osa.flush(params, state)
        params, state, rows = jax.jit(step)(params, state)
        for name in labels:
            assert_close(rows[name], flushed[name][ids], 1e-6, what=name)
    assert not np.array_equal(params["a"], osa.flush(params, state)[0]["a"])


@pytest.mark.slow
@pytest.mark.parametrize("spec", slow_but([P("x"), P("x", "y"), P()], P("x", "y")))
def test_inside_shard_map(spec):
    """A model's own shard_map: the rows that are looked up are brought up to date."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    (table, state), ids = trained_table(64, 6), jnp.array([3, 1, 3, 15])

    def loss(table, ids):
        rows = jax.shard_map(
            lambda table, ids: jnp.sin(table[ids]),
            mesh=mesh,
            in_specs=(spec, P()),
            out_specs=spec,
            check_vma=False,
        )(table, ids)
        return jnp.sum(rows**2)

    both = osa.value_and_grad(loss, read=state)
    value, grad = jax.jit(both)(table, ids)
    expected = jax.jit(jax.value_and_grad(loss))(osa.flush(table, state)[0], ids)
    assert_close(value, expected[0], 1e-5)
    assert_close(dense(grad), expected[1], 1e-5, magnitude=1.0)
    # A root is taken of what is looked up only.
    program = str(jax.make_jaxpr(both)(table, ids))
    roots = re.findall(r":f32\[([\d,]+)\] = sqrt", program)
    assert {shape.split(",")[0] for shape in roots if "," in shape} == {"4"}


@pytest.mark.slow
def test_resharded():
    """What is known of each row goes with a table that the loss lays out otherwise."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    (table, state), ids = trained_table(64, 6), jnp.array([3, 1, 3, 15])

    def loss(table, ids):
        table = jax.reshard(table, P(None, "y"))
        return jnp.sum(table.at[ids].get(out_sharding=P()) ** 2)

    with jax.set_mesh(mesh):
        value = jax.jit(osa.evaluate(loss, read=state))(jax.device_put(table, P()), ids)
    expected = jnp.sum(osa.flush(table, state)[0][ids] ** 2)
    assert_close(value, expected, 1e-5)


def test_errors():
    table, ids = jnp.ones((5, 2)), jnp.array([1, 3])
    with pytest.raises(ValueError, match="by position, got argnums=0 for 0"):
        osa.evaluate(lambda table: table[ids])(table=table)

    def loss(table):
        return jnp.sum(table[ids])

    state = osa.exact_adam(0.1).init({"a": table, "b": table})
    with pytest.raises(ValueError, match="must belong to the parameters"):
        osa.value_and_grad(loss, read=state)(table)
    state = osa.exact_adam(0.1).init(table)
    for two in ((state, state), {"a": state, "b": state}):
        grad = osa.grad(lambda a, b: loss(a) + loss(b), argnums=(0, 1), read=two)
        with pytest.raises(ValueError, match="several arguments"):
            grad(table, table)
    with pytest.raises(ValueError, match="Only row lookups"):
        osa.grad(lambda t: loss(t) + jnp.sum(t), sparse=lambda *_: True, read=state)(
            table
        )


STATES = {
    **{name: tx.make(0.1) for name, tx in FINAL.items()},
    "dense adam": optax.adam(0.1),
    "no state": optax.sgd(0.1),
    "adafactor": optax.adafactor(0.1),
    "hyperparameters": optax.inject_hyperparams(osa.sparse_adam)(0.1),
    "masked": optax.masked(optax.adam(0.1), {"table": False, "w": True}),
    "partition": optax.partition(
        {"a": osa.rowwise_adam(0.1), "b": optax.adamw(0.1)}, {"table": "a", "w": "b"}
    ),
    "chain": optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda _: 0.1)),
    "average": optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s)),
}


# Each state with both kinds of gradients, one of which asks for the kernel.
OF_STATES = [
    (name, sparse, way)
    for name in STATES
    for sparse, way in ((None, "kernel"), (False, "plain"))
]
OF_STATES.append(("sparse_adam", None, "plain"))


@pytest.mark.parametrize(
    ("name", "sparse", "backend"),
    slow_but(OF_STATES, OF_STATES[-1], ("partition", None, "kernel")),
    indirect=["backend"],
)
def test_states_without_stale_rows(name, sparse, backend):
    """Of any optimiser: nothing is brought up to date, and the program is the same."""

    def loss(params, ids):
        return jnp.sum((params["table"][ids] @ params["w"]) ** 2)

    params = {"table": jnp.ones((6, 3)), "w": jnp.ones(3)}
    state, ids = STATES[name].init(params), jnp.array([1, 4, 1])
    state = jax.tree.map(jnp.array, state)  # "average": not the parameters themselves

    def programs(**read):
        both = osa.value_and_grad(loss, sparse=sparse, **read)
        gradient = osa.grad(loss, sparse=sparse, **read)
        evaluated = osa.evaluate(loss, **read)
        return [
            str(jax.make_jaxpr(f)(params, ids)) for f in (both, gradient, evaluated)
        ]

    assert programs(read=state) == programs() == programs(read=None)
    result = osa.flush(params, state)
    for new, old in zip(*map(jax.tree.leaves, (result, (params, state))), strict=True):
        assert new is old


NO_STATES = {
    "the optimiser": (lambda tx, params: tx, "GradientTransformationExtraArgs"),
    "the parameters": (lambda tx, params: params, "got the parameters themselves"),
    "a function": (lambda tx, params: tx.init, "got function"),
    "a name": (lambda tx, params: "state", "got str"),
    "a smaller table": (
        lambda tx, params: tx.init({"table": jnp.ones((5, 2)), "w": jnp.ones(2)}),
        r"shape \(5, 2\) for a parameter of shape \(6, 2\)",
    ),
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_state(name):
    params = {"table": jnp.ones((6, 2)), "w": jnp.ones(2)}
    make, words = NO_STATES[name]
    state = make(osa.sparse_adam(0.1), params)
    for function, title in (
        (lambda: osa.grad(lambda p: jnp.sum(p["w"]), read=state)(params), "`read`"),
        (lambda: osa.evaluate(lambda p: p, read=state)(params), "`read`"),
        (lambda: osa.flush(params, state), "flush"),
    ):
        with pytest.raises(ValueError, match=f"^{title} needs the state.*{words}"):
            function()


def of_rows(table, ids):
    rows = table[ids]
    return jnp.sum(jnp.sin(rows) * rows[::-1] ** 2)


@pytest.mark.parametrize("is_whole", slow_but([False, True], True))
@pytest.mark.parametrize(
    "backend", slow_but(["plain", "kernel"], "kernel"), indirect=True
)
def test_derivatives_are_by_the_values(is_whole, backend):
    """Not by what is stored, which decays: those of the flushed table."""

    def loss(table, ids):
        return of_rows(table, ids) + (jnp.sum(table**3) if is_whole else 0)

    (table, state), ids = trained_table(), jnp.array([1, 4, 1])
    flushed, direction = osa.flush(table, state)[0], jnp.cos(table)
    found = jax.jit(jax.grad(osa.evaluate(loss, read=state)))(table, ids)
    expected = jax.jit(jax.grad(loss))(flushed, ids)
    assert_close(found, expected, 1e-5, magnitude=10.0)

    def product(gradient, table):
        of_table = functools.partial(gradient, ids=ids)
        return jax.jit(lambda t: jax.jvp(of_table, (t,), (direction,)))(table)

    def own(table, ids):
        grad = osa.grad(loss, read=state)(table, ids)
        return grad.todense() if hasattr(grad, "todense") else grad

    if not is_whole:
        pairs = zip(product(own, table), product(jax.grad(loss), flushed), strict=True)
        for found, expected in pairs:
            assert_close(found, expected, 1e-5, magnitude=10.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "convert", slow_but([jax.device_get, jnp.asarray], jax.device_get)
)
def test_state_of_numpy(convert):
    """As `pickle`, `jax.device_get` and flax's serialization give it."""

    def loss(params, ids):
        return jnp.sum(params["table"][ids] @ params["w"])

    params = {"table": jnp.ones((6, 3)), "w": jnp.ones(3)}
    ids, tx = jnp.array([1, 4, 1]), osa.exact_adamw(0.1, weight_decay=0.01)
    expected, stored = (jax.tree.map(jnp.copy, (params, tx.init(params))) for _ in "12")
    step = osa.make_train_step(loss, tx)
    *expected, _ = step(*expected, ids)
    before = jax.tree.map(convert, step(*stored, ids)[:2])

    @jax.jit  # the arrays of NumPy stay what they are, constants of the program
    def of_numpy(ids):
        value = osa.evaluate(loss, read=before[1])(before[0], ids)
        grads = osa.grad(loss, read=before[1])(before[0], ids)
        updates, state = tx.update(grads, before[1], before[0])
        return value, osa.flush(osa.apply_updates(before[0], updates), state)[0]

    value, found = of_numpy(ids)
    assert_close(value, osa.evaluate(loss, read=expected[1])(expected[0], ids), 1e-6)
    expected = jax.jit(osa.flush)(*step(*expected, ids)[:2])[0]
    for name in params:
        assert_close(found[name], expected[name], 1e-6)
