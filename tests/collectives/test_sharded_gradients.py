"""Row-sparse gradients on meshes, against the same gradients on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from ..helpers.routed import exact
from ..helpers.support import assert_close, slow_but, to_dense

ROWS, WIDTH = 16, 4
EXPLICIT = AxisType.Explicit


def start(mesh, spec):
    """A table and ids, on the mesh and on one device; products of them are exact."""
    rng = np.random.default_rng(0)
    table = exact(rng, (ROWS, WIDTH))
    ids = rng.integers(0, ROWS, (8, 3)).astype(np.int32)  # more ids than rows
    many = jax.device_put(table, NamedSharding(mesh, spec))
    return (many, jax.device_put(ids, NamedSharding(mesh, P("x")))), (table, ids)


def make_mesh(axis_type):
    return jax.make_mesh((4, 2), ("x", "y"), (axis_type,) * 2)


def sparse_grad(loss):
    """Raises where the gradient would be dense."""
    return jax.jit(osa.grad(loss, sparse=lambda path, leaf: True))


@pytest.mark.parametrize("spec", [P("x"), P("x", "y")], ids=str)
def test_function_of_an_explicit_table(spec):
    """Its derivative is computed at the rows that are looked up."""

    def loss(lookup, table, ids):
        return jnp.sum(lookup(table * table, ids))

    def lookup(table, ids):
        return table.at[ids].get(out_sharding=P("x", None, None))

    mesh = make_mesh(EXPLICIT)
    many, one = start(mesh, spec)
    with jax.set_mesh(mesh):
        grad = sparse_grad(partial(loss, lookup))(*many)
    expected = jax.jit(jax.grad(partial(loss, lambda table, ids: table[ids])))(*one)
    np.testing.assert_array_equal(to_dense(grad), expected)


# What is done with the gradients of a batch.
OF_BATCH = {
    "sum": lambda grad: grad.sum(0).todense(),
    "twice": lambda grad: (2 * grad + grad).sum(0).todense(),
    "coalesced": lambda grad: jax.vmap(osa.coalesce)(grad).sum(0).todense(),
    "laid end to end": lambda grad: jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), grad
    ).todense(),
}


@pytest.mark.parametrize("name", slow_but(OF_BATCH, "twice"))
def test_gradients_of_an_explicit_batch(name):
    """An axis splits the batch; a canary is a constant, and lies whole."""

    def loss(table, ids):
        return jnp.sum(table.at[ids].get(out_sharding=P()) ** 2)

    def grads_of(table, ids):
        return jax.vmap(osa.grad(loss), (None, 0))(table, ids)

    mesh = make_mesh(EXPLICIT)
    many, one = start(mesh, P())
    with jax.set_mesh(mesh):
        dense = jax.jit(lambda *args: OF_BATCH[name](grads_of(*args)))(*many)
        data = jax.jit(lambda *args: grads_of(*args).data)(*many)
        assert jax.typeof(data).sharding.spec == P("x", None, None)
    expected = jax.grad(lambda table: jnp.sum(table[one[1]] ** 2))(one[0])
    np.testing.assert_array_equal(dense, expected * (3 if name == "twice" else 1))


ADDED_UP = {
    "sum": lambda grad: grad.sum(0),
    "mean": lambda grad: (grad / 8).sum(0) * 8,
    "negative": lambda grad: -(-grad).sum(0),
    "twice": lambda grad: 0.5 * (grad + grad).sum(0),
    "laid out": lambda grad: grad.update_layout(n_batch=1).sum(0),
    "coalesced": lambda grad: jax.vmap(osa.coalesce)(grad).sum(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED_UP)
def test_steps_by_gradients_of_an_explicit_batch(name):
    """They know of which step their rows are, as others do."""
    tx = osa.exact_adam(0.1)

    def train(place, **out):
        def loss(table, ids):
            return jnp.sum(table.at[ids].get(**out) ** 2)

        @jax.jit
        def step(table, state, ids):
            grad_of = osa.grad(loss, read=state)
            grad = ADDED_UP[name](jax.vmap(grad_of, (None, 0))(table, ids))
            updates, state = tx.update(grad, state, table)
            return osa.apply_updates(table, updates), state

        table = place(exact(np.random.default_rng(0), (ROWS, WIDTH)), P())
        state = tx.init(table)
        for ids in batches:
            table, state = step(table, state, place(ids, P("x")))
        return osa.flush(table, state)[0]

    batches = np.random.default_rng(0).integers(0, ROWS, (3, 8, 3), np.int32)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), (EXPLICIT,))):
        table = train(jax.device_put, out_sharding=P())
    # Of numbers about 1; XLA adds them up in another order.
    assert_close(table, train(lambda x, _: jnp.asarray(x)), 1e-6, magnitude=1.0)


@pytest.mark.slow
def test_ensemble_over_an_explicit_axis():
    """By vmap, of whose members each device has one."""
    tx = osa.exact_adam(0.1)

    def step(table, state, ids):
        def loss(table):
            return jnp.sum(osa.embedding_bag(table, ids) ** 2)

        updates, state = tx.update(osa.grad(loss, read=state)(table), state, table)
        return osa.apply_updates(table, updates), state

    def train(place):
        tables = place(exact(np.random.default_rng(0), (8, ROWS, WIDTH)))
        states = jax.tree.map(place, jax.vmap(tx.init)(tables))
        for ids in batches:
            tables, states = jax.jit(jax.vmap(step))(tables, states, place(ids))
        return jax.jit(jax.vmap(osa.flush))(tables, states)[0]

    batches = np.random.default_rng(0).integers(0, ROWS, (3, 8, 3, 2), np.int32)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), (EXPLICIT,))):
        tables = train(lambda x: jax.device_put(x, P("x")))
    assert_close(tables, train(jnp.asarray), 1e-6)


@pytest.mark.slow
def test_loops_that_end_each_by_itself():
    """Over Explicit axes what they carry lies as the table does, and their test not."""

    def loss(table, ids):
        def walk(row):
            def step(carry):
                place, found = carry
                return place + 1, found + table[place]

            zeros = jnp.zeros_like(table[row])
            return lax.while_loop(lambda c: c[0] < row, step, (0, zeros))[1]

        return jnp.sum(jax.vmap(walk)(ids) ** 2)

    mesh, read = make_mesh(EXPLICIT), jax.jit(osa.evaluate(loss))
    ids = np.asarray([3, 7, 2])
    (table, _), (same, _) = start(mesh, P(None, "y"))
    with jax.numpy_dtype_promotion("standard"):
        expected = loss(jnp.asarray(same), ids)
        with jax.set_mesh(mesh):
            assert_close(read(table, ids), expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, EXPLICIT])
def test_loops_that_end_each_by_itself_on_each_device(axis_type):
    """What they carry varies over less axes than their test, where nobody varies it."""

    def walk(table, row):
        def goes_on(carry):
            return (carry[0] < 6) & (table[carry[1], 0] < 1)

        def step(carry):
            return carry[0] + 1, (carry[1] * 3 + 1) % ROWS

        return lax.while_loop(goes_on, step, (0, row))[1]

    def walks(read, table, ids):
        return read(jax.vmap(partial(walk, table)))(ids)

    def on_each(read, table, ids):
        fun, specs = partial(walks, read), (P(), P("x"))
        return jax.shard_map(fun, in_specs=specs, out_specs=P("x"))(table, ids)

    def as_it_is(fun):
        return fun

    def loss(table, ids):
        found = on_each(as_it_is, table, ids)
        out = P("x") if axis_type == EXPLICIT else None
        return jnp.sum(table.at[found].get(out_sharding=out) ** 3)

    _, (same, ids) = start(make_mesh(axis_type), P())
    expected = walks(as_it_is, jnp.asarray(same), ids[:, 0])
    with jax.set_mesh(make_mesh(axis_type)):
        table = jax.device_put(same, P())
        begin = jax.device_put(ids[:, 0], P("x"))
        for fun in (
            osa.evaluate(partial(on_each, as_it_is)),
            partial(on_each, osa.evaluate),
        ):
            np.testing.assert_array_equal(jax.jit(fun)(table, begin), expected)
        grad = sparse_grad(loss)(table, begin)
    dense = jax.grad(lambda t: jnp.sum(t[expected] ** 3))(jnp.asarray(same))
    assert_close(to_dense(grad), dense, 1e-6)


ENSEMBLE = {
    "rows": lambda t, i: t[i],
    "fill": lambda t, i: jnp.take(t, i, axis=0, fill_value=2),
    "windows": lambda t, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 3))(i),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENSEMBLE)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, EXPLICIT])
def test_an_ensemble_that_is_split_by_its_members(name, axis_type):
    """A table and a batch for each; a step of `exact_adam`, and what it leaves."""
    read, tx = jax.vmap(ENSEMBLE[name]), osa.exact_adam(0.1)

    def loss(tables, ids):
        return jnp.sum(jnp.sin(read(tables, ids)))

    def trained(tables, ids):
        step, state = osa.make_train_step(loss, tx), tx.init(tables)
        for shift in range(3):
            tables, state, _ = step(tables, state, ids + 3 * shift)
        return tables, jax.jit(osa.evaluate(read, read=state))(tables, ids)

    rng = np.random.default_rng(0)
    args = (
        rng.normal(size=(8, ROWS, WIDTH)).astype(np.float32),
        rng.integers(0, ROWS + 1, (8, 5), np.int32),
    )
    expected = trained(*map(jnp.asarray, args))
    with jax.set_mesh(make_mesh(axis_type)):
        got = trained(*(jax.device_put(x, P("x")) for x in args))
        grad = jax.jit(osa.grad(loss))(*(jax.device_put(x, P("x")) for x in args))
        assert isinstance(grad, BCOO)
    for x, y in zip(got, expected, strict=True):
        assert_close(np.asarray(x), np.asarray(y), 1e-5)


LAYOUTS = [((), P("x")), ((), P(("x", "y"))), ((WIDTH,), P("x", "y")), ((WIDTH,), P())]


@pytest.mark.slow
@pytest.mark.parametrize("read", ["slice", "two slices", "bags"])
@pytest.mark.parametrize(("row_shape", "spec"), LAYOUTS, ids=str)
def test_dense_gradient_of_an_explicit_table(row_shape, spec, read):
    """As an array it lies as JAX's does; through functions of trees, too."""

    def loss(table, start):
        if read == "bags":
            ids = jnp.stack([start, start + 1])
            return jnp.sum(osa.embedding_bag(table, ids[None]) ** 2)
        begins = [start] if read == "slice" else [start, start + 4]
        rest = (0,) * len(row_shape)
        parts = [lax.dynamic_slice(table, (i, *rest), (8, *row_shape)) for i in begins]
        return sum(jnp.sum(part**2) for part in parts)

    mesh = make_mesh(EXPLICIT)
    table = exact(np.random.default_rng(0), (ROWS, *row_shape))
    with jax.set_mesh(mesh):
        table = jax.device_put(table, NamedSharding(mesh, spec))
        expected = jax.jit(jax.grad(loss))(table, jnp.int32(3))
        for grad in (osa.grad(loss), jax.jit(osa.grad(loss))):
            found = grad(table, jnp.int32(3))
            for made in (found, osa.coalesce(found), jax.jit(lambda g: -g)(-found)):
                dense = made.todense()
                assert dense.sharding == expected.sharding
                assert jax.typeof(dense) == jax.typeof(expected)
                np.testing.assert_array_equal(dense, expected)
        # Whoever maps over a gradient and its update needs one structure.
        tx = osa.lazy(optax.scale(1.0))
        update, _ = tx.update(found, tx.init(table), table)
        assert jax.tree.structure(update) == jax.tree.structure(osa.coalesce(found))
    assert found.todense().sharding == expected.sharding


def test_sharded_by_jit_alone():
    """Over Explicit axes, of arrays that lie on no mesh before."""
    mesh = make_mesh(EXPLICIT)
    _, (table, ids) = start(mesh, P("x"))
    split, whole = NamedSharding(mesh, P("x")), P(None, None, None)

    def loss(table, ids):
        return jnp.sum(jnp.square(table.at[ids].get(out_sharding=whole)))

    grad = osa.grad(loss, sparse=lambda path, leaf: True)
    with jax.set_mesh(mesh):
        grad = jax.jit(grad, in_shardings=(split, None))(table, ids)
    expected = jax.jit(jax.grad(lambda table: jnp.sum(jnp.square(table[ids]))))(table)
    np.testing.assert_array_equal(to_dense(grad), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_lazy_outside_of_programs():
    """Of a gradient from a mesh, and a table and state that lie on one device."""
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    _, (table, ids) = start(make_mesh(AxisType.Auto), P())

    def part(table, ids):
        return lax.psum(jnp.sum(jnp.square(table[ids])), "x")

    loss = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    tx, dense = osa.lazy(optax.adam(0.1)), optax.adam(0.1)
    updates, state = tx.update(osa.grad(loss)(table, ids), tx.init(table), table)
    grad = jax.grad(lambda table: jnp.sum(jnp.square(table[ids])))(table)
    expected, expected_state = dense.update(grad, dense.init(table))
    assert_close(to_dense(updates), expected, 1e-6)
    assert_close(state[0].nu, expected_state[0].nu, 1e-6)


@pytest.mark.parametrize("capacity", slow_but([1, 99], 1))
def test_training_inside_shard_map_over_some_axes(capacity):
    """The other axis splits the columns, and is left to JAX's partitioner."""
    tx, mesh = osa.sparse_adam(0.1), make_mesh(AxisType.Auto)
    many, one = start(mesh, P("x", "y"))

    def step(lookup, table, ids):
        grad = osa.grad(lambda table: jnp.sum(jnp.square(lookup(table, ids))))(table)
        updates, _ = tx.update(grad, tx.init(table))
        return osa.apply_updates(table, updates)

    lookup = partial(osa.sharded_lookup, axis_name="x", capacity=capacity)
    kwargs = {"in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
    mapped = jax.shard_map(partial(step, lookup), mesh=mesh, **kwargs)
    table = jax.jit(mapped)(*many)
    expected = jax.jit(partial(step, lambda table, ids: table[ids]))(*one)
    assert_close(table, expected, 1e-6)


def test_rows_that_all_devices_look_up():
    """Beside those of the batch: only these are summed over the mesh axis `y`.

    A gradient that became dense would move rows which the batch does not hold.
    """

    def loss(lookup, table, ids):
        always = lookup(table, jnp.arange(2, dtype=jnp.int32))
        return jnp.sum(jnp.square(lookup(table, ids))) + ids.size * jnp.sum(always)

    mesh = make_mesh(AxisType.Auto)
    _, (table, ids) = start(mesh, P("x"))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("x"), P(("x", "y"))), out_specs=P("x")
    )
    def gradient(table, ids):
        lookup = partial(osa.sharded_lookup, axis_name="x")
        grad = osa.grad(partial(loss, lookup))(table, ids)
        assert isinstance(grad, BCOO)
        return grad.todense()

    expected = jax.jit(jax.grad(partial(loss, lambda table, ids: table[ids])))(
        table, ids
    )
    np.testing.assert_array_equal(gradient(table, ids), expected)


def test_apply_if_finite_inside_lazy():
    """Over Explicit axes both of its branches need rows of one type."""
    mesh = make_mesh(EXPLICIT)
    (table, _), (same, _) = start(mesh, P(None, "y"))
    tx = osa.lazy(optax.apply_if_finite(optax.adam(0.1), 3))
    grad = BCOO((jnp.ones((2, WIDTH)), jnp.array([[3], [5]])), shape=(ROWS, WIDTH))

    def step(table):
        updates, _ = tx.update(grad, tx.init(table), table)
        return osa.apply_updates(table, updates)

    with jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(step)(jnp.asarray(same))
        with jax.set_mesh(mesh):
            assert_close(jax.jit(step)(table), expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bags", [False, True], ids=["rows", "bags"])
@pytest.mark.parametrize("spec", [P(None, "y"), P("x", "y"), P(None, "x")])
@pytest.mark.parametrize("make", [osa.sparse_adam, osa.exact_adam])
def test_wrappers_of_tables_that_are_split_by_columns(make, spec, bags):
    """`apply_if_finite` wants updates of the type of gradients, with their layout."""
    mesh = make_mesh(EXPLICIT)
    (many, ids), one = start(mesh, spec)
    tx = optax.apply_if_finite(make(0.1), 3)

    def loss(layout, table, ids):
        if bags:
            return jnp.sum(osa.embedding_bag(table, ids) ** 2)
        if layout is None:
            return jnp.sum(table[ids] ** 2)
        return jnp.sum(table.at[ids].get(out_sharding=layout) ** 2)

    def trained(table, ids, layout):
        step = osa.make_train_step(partial(loss, layout), tx)
        state = tx.init(table)
        for _ in range(2):
            table, state, _ = step(table, state, ids)
        return table

    with jax.numpy_dtype_promotion("standard"):
        expected = trained(*map(jnp.asarray, one), None)
        with jax.set_mesh(mesh):
            assert_close(trained(many, ids, P("x")), expected, 1e-6)


def psum_of_weighted(table, own, same):
    return lax.psum(table * own, "x")


# Functions of a table, of a number that each device has its own of, and of one that is
# the same on all devices.
PLAIN = {
    "scaled": lambda t, own, same: t * same,
    "divided": lambda t, own, same: t / same,
    "scaled by its own": lambda t, own, same: t * own,
    "scaled by a mean": lambda t, own, same: t * lax.pmean(own, "x"),
    "and its own number": lambda t, own, same: 2 * t + own,
    "tanh": lambda t, own, same: jnp.tanh(t * same) + jnp.tanh(t) * own,
    "chosen": lambda t, own, same: jnp.where(same > 0, t, 2 * t),
    "chosen by its own": lambda t, own, same: jnp.where(own > 0, t, 2 * t),
    "chosen by row": lambda t, own, same: jnp.where(t * same > 0, t, jnp.sin(t)),
}
SUMS = {
    "psum": psum_of_weighted,
    "psum, scaled": lambda *args: psum_of_weighted(*args) * args[2],
    "psum, scaled by its own": lambda *args: psum_of_weighted(*args) * args[1],
    "psum, tanh": lambda *args: jnp.tanh(psum_of_weighted(*args)) - args[0],
    "psum of chosen": lambda t, own, same: lax.psum(jnp.where(own > 0, t, t * t), "x"),
    "psum of two": lambda t, own, same: sum(lax.psum((t * own, jnp.sin(t)), "x")),
    "psum of psum": lambda *args: lax.psum(psum_of_weighted(*args) * args[1], "x"),
}
CASES = [(name, P()) for name in PLAIN | SUMS] + [(name, P("x")) for name in SUMS]


def of_devices(table, own, same, ids, function, spec, check_vma):
    """The mean over devices of each one's loss of `function(table)[ids]`."""

    def local(table, own, same, ids):
        rows = function(table, own[0], same)[ids]
        return lax.pmean(jnp.sum(jnp.sin(rows) * own[0]), "x")

    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = (spec, P("x"), P(), P("x"))
    kwargs = {"in_specs": specs, "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(local, mesh=mesh, **kwargs)(table, own, same, ids)


def of_one_device(table, own, same, ids, function, spec):
    """The same without `shard_map`: `vmap` has names of axes, and no types of them."""

    def local(table, own, ids):
        return jnp.sum(jnp.sin(function(table, own, same)[ids]) * own)

    tables = table.reshape(2, -1, table.shape[1]) if spec else table
    split = (0 if spec else None, 0, 0)
    mapped = jax.vmap(local, split, axis_name="x")
    return jnp.mean(mapped(tables, own, ids.reshape(2, -1)))


@pytest.mark.parametrize("check_vma", slow_but([True, False], True))
@pytest.mark.parametrize(("name", "spec"), slow_but(CASES, *CASES[::8]), ids=str)
def test_function_of_a_table_inside_shard_map(name, spec, check_vma):
    """Each device computes it of the rows that it looks up."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.uniform(-1, 1, (ROWS, WIDTH)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, ROWS // 2, 8), jnp.int32)
    args = table, jnp.asarray([0.75, -0.5]), jnp.float32(0.5), ids
    kwargs = {"function": (PLAIN | SUMS)[name], "spec": spec}
    split = partial(of_devices, check_vma=check_vma, **kwargs)
    whole = partial(of_one_device, **kwargs)

    @jax.jit
    def gradients(*args):
        # A sum over devices needs all rows: the gradient is dense.
        wanted = (name in PLAIN, False, False)
        grad = partial(osa.grad, argnums=(0, 1, 2), sparse=wanted)
        others = (jax.grad(loss, argnums=(0, 1, 2))(*args) for loss in (split, whole))
        return (grad(split)(*args), *others)

    (of_table, *of_numbers), *expected = gradients(*args)
    for others in expected:
        ours = to_dense(of_table) if name in PLAIN else of_table
        for one, other in zip((ours, *of_numbers), others, strict=True):
            assert_close(one, other, 2e-6, magnitude=1)
