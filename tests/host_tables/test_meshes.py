"""A `HostTrainer` over a mesh does what tables do that are sharded by their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._partition import Partition
from optax_sparse_adam.host_tables._spread import Spread

from ..helpers.host_tables import (
    DIM,
    ROWS,
    arrays,
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import (
    assert_identical,
    assert_same_on_devices,
    need_devices,
    slow_but,
)

ADAM = osa.sparse_adam(0.1)


def mesh_of(shape=(8,), *, backwards=False):
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(
        shape,
        ("x", "y")[: len(shape)],
        (AxisType.Auto,) * len(shape),
        devices=devices[::-1] if backwards else devices,
    )


def split_over(mesh, batches):
    split = NamedSharding(mesh, P(mesh.axis_names))
    return [jax.device_put(batch, split) for batch in batches]


def train_on_mesh(tx, mesh, batches):
    """In memory, on the same mesh. (JAX has no shards of different lengths.)"""
    rows, w = begin()
    rows = np.pad(rows, [(0, -ROWS % mesh.size), (0, 0)])
    by_rows, whole = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
    params = {"table": jax.device_put(rows, by_rows), "w": jax.device_put(w, whole)}
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
    values = []
    for batch in split_over(mesh, batches):
        params, state, value = step(params, state, *batch)
        values.append(np.asarray(value))

    def own(x):
        return x[:ROWS] if x.shape[:1] == rows.shape[:1] else x

    return *jax.tree.map(own, arrays((params, state))), values


@pytest.mark.parametrize(
    ("name", "shape", "backwards", "where"),
    slow_but(
        [
            ("sparse_adam", (4, 2), False, "memory"),
            ("sparse_adam", (4, 2), True, "file"),
            ("exact_adam", (8,), False, "memory"),
            ("rowwise_adagrad", (2,), True, "memory"),
            ("rowwise_adam", (3,), False, "file"),
        ],
        ("sparse_adam", (4, 2), False, "memory"),
    ),
)
def test_as_in_memory_on_the_same_mesh(name, shape, backwards, where, tmp_path):
    tx, mesh = getattr(osa, name)(0.1), mesh_of(shape, backwards=backwards)
    expected = train_on_mesh(tx, mesh, batches(0, 12))
    where = {"file": tmp_path / "x"} if where == "file" else {}
    params = host_params(*begin(), **where)
    with host.HostTrainer(loss, tx, params, mesh=mesh) as trainer:
        values = list(trainer.run(split_over(mesh, batches(0, 10))))
        values += [trainer.step(*x) for x in split_over(mesh, batches(10, 12))]
        assert_trained_alike(trainer, values, expected)
        assert trainer._rows.rest[0].sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_checkpoint_goes_to_another_mesh(where, tmp_path):
    """Rows lie in memory and in files as those of one device do."""
    where = {"file": tmp_path / "x"} if where == "file" else {}
    params, meshes = host_params(*begin(), **where), [mesh_of((4,)), None, mesh_of()]
    values, trainer = [], host.HostTrainer(loss, ADAM, params, mesh=mesh_of((2,)))
    for number, mesh in enumerate(meshes):
        with trainer:
            first = 3 * number
            values += [*map(float, trainer.run([*batches(first, first + 3)]))]
            trainer.checkpoint(tmp_path / "run")
            trainer.step(*next(batches(77, 78)))  # is undone
        options = tmp_path / "run", loss, ADAM, params
        trainer = host.HostTrainer.restore(*options, mesh=mesh)
    rows, w = begin()
    expected = train_in_memory(loss, ADAM, {"table": rows, "w": w}, batches(0, 9))
    with trainer:
        np.testing.assert_allclose(values, expected[2], rtol=1e-5)
        pairs = zip(
            jax.tree.leaves(arrays((trainer.params, trainer.state))),
            jax.tree.leaves(arrays(expected[:2])),
            strict=True,
        )
        for x, y in pairs:  # other orders of sums
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.slow
def test_a_step_of_another_mesh_has_no_more_rows_than_its_own(tmp_path):
    """One device had all rows of a batch, of which each of eight has a part."""
    need_devices(8)
    rows, w = begin((4_000, DIM))
    ids = np.random.default_rng(0).integers(0, 4_000, (2, 600))
    made = [(x[:400], x[400:], np.float32(1)) for x in ids]

    def fun(params, ids, others, goal):
        looked_up = params["table"][jnp.concatenate([ids, others])] @ params["w"]
        return jnp.mean((looked_up - goal) ** 2)

    def sizes(trainer):
        list(trainer.run(made))
        return {key: x for key, x in trainer._rows.sizes.items() if key[-1] == 8}

    with host.HostTrainer(fun, ADAM, host_params(rows, w)) as trainer:
        list(trainer.run(made))
        trainer.checkpoint(tmp_path / "one")
    mesh = mesh_of()
    with host.HostTrainer(fun, ADAM, host_params(rows, w), mesh=mesh) as trainer:
        expected = sizes(trainer)
    assert expected
    with host.HostTrainer.restore(
        tmp_path / "one", fun, ADAM, host_params(rows, w), mesh=mesh
    ) as trainer:
        assert sizes(trainer) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_of_two_axes", [False, True])
def test_between_steps_all_is_as_on_one_device(is_of_two_axes):
    """What treats rows one by one has the same bits, however they are spread."""
    tx, ids = osa.exact_adam(0.1), {"table": np.array([7, 299, ROWS, 0, -1]), "w": None}
    new = {"table": np.full((5, DIM), 0.5, np.float32), "w": None}
    results = []
    # One step for each: later ones have other orders of sums.
    several = mesh_of((2, 2), backwards=True) if is_of_two_axes else mesh_of()
    for mesh in (None, several):
        with host.HostTrainer(loss, tx, host_params(*begin()), mesh=mesh) as trainer:
            batch = np.arange(48), np.zeros(48, np.float32)  # each row once
            trainer.step(*batch)
            predict = trainer.evaluate(lambda params, ids: params["table"][ids])
            stale = np.asarray(predict(np.arange(ROWS)))
            trainer.map_rows(osa.flush)
            np.testing.assert_array_equal(stale, trainer.params["table"])
            trainer.reset_rows(ids, new)
            results.append(arrays((trainer.params, trainer.state)))
    one, other = results
    assert_array = np.testing.assert_array_equal
    assert_array(one[0]["table"][[0, 7, 299]], new["table"][:3])
    jax.tree.map(assert_same_on_devices, other, one)


@pytest.mark.parametrize("num_rows", slow_but([1, 7, 12, 41], 1, 41))
@pytest.mark.parametrize(
    "blocks", [[[0]], [[0, 1, 2, 3]], [[2, 3], [0, 1]], [[3], [1], [0], [2]]]
)
def test_each_row_has_one_place(num_rows, blocks):
    """On all processes the same position, and on one of them a place in its store."""
    rows, stored, table = np.arange(num_rows, dtype=np.int32), [], {}
    for process in range(len(blocks)):
        spread = Spread()
        spread.process, spread.blocks = process, np.array(blocks, np.int32)
        part = Partition(num_rows, spread)
        cut = part.cut(rows)
        size = max(map(len, cut))
        padded = part.padded(cut, size)
        assert np.all(np.diff(padded) >= 0)
        back = np.asarray(part.rows_at(jnp.asarray(part.position(rows))))
        np.testing.assert_array_equal(back, rows)
        at = np.searchsorted(padded, part.position(rows))
        np.testing.assert_array_equal(
            np.asarray(part.rows_at(jnp.asarray(padded)))[at], rows
        )
        own = part.own(cut)
        assert [*map(len, own)] == [len(cut[b]) for b in blocks[process]]
        joined = np.sort(np.concatenate(own))
        np.testing.assert_array_equal(joined, np.arange(part.count))
        np.testing.assert_array_equal(
            np.sort(np.concatenate(part.between(0, part.block_rows))), joined
        )
        here = part.rows_here(rows)
        at_home = np.flatnonzero(here >= 0)
        table |= {int(row): (process, int(here[row])) for row in at_home}
        pieces = [
            (first, rows[first : first + 5, None]) for first in range(0, num_rows, 5)
        ]
        for first, records in part.pieces(pieces):
            stored += [
                (int(x), (process, first + k)) for k, x in enumerate(records[:, 0])
            ]
    assert dict(stored) == table
    assert len(stored) == num_rows == len(set(table.values()))


def test_axes_that_are_explicit_are_refused():
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    with pytest.raises(ValueError, match="needs a `mesh` of Auto axes"):
        host.HostTrainer(loss, ADAM, host_params(*begin()), mesh=mesh)


@pytest.mark.slow
def test_parameters_on_a_mesh_of_another_order():
    """Whole ones are moved; ones that are split are refused; a mesh is a mesh."""
    mesh, backwards = mesh_of((2,)), mesh_of((2,), backwards=True)
    whole, split = (NamedSharding(backwards, spec) for spec in (P(), P("x")))
    params, (batch,) = host_params(*begin()), batches(0, 1)

    def train(w):
        trainer = host.HostTrainer(loss, ADAM, params | {"w": w}, mesh=mesh)
        return np.asarray(trainer.step(*batch)), trainer.params["w"]

    w = params["w"]
    assert_identical(train(jax.device_put(w, whole)), train(w))
    with pytest.raises(ValueError, match=r"Pass that mesh, or jax\.device_put them"):
        train(jax.device_put(w, split))
    with pytest.raises(TypeError, match=r"needs a jax\.sharding\.Mesh as `mesh`, got"):
        host.HostTrainer(loss, ADAM, params, mesh=whole)


@pytest.mark.slow
def test_a_batch_on_other_devices():
    """The first one says where all are, if nobody has; then others are refused."""
    need_devices(8)
    rows, w = begin()
    made, devices = [*batches(0, 3)], jax.devices()
    *_, known = train_in_memory(loss, ADAM, {"table": rows, "w": w}, made)
    first = jax.device_put(made[0], devices[3])
    trainer = host.HostTrainer(loss, ADAM, host_params(rows, w))
    trainer.map_rows(lambda *trees: trees)
    assert_identical([*map(np.asarray, trainer.run([first, *made[1:]]))], known)
    assert trainer._rows.rest[0].devices() == {devices[3]}
    for mesh, elsewhere in [
        (None, devices[0]),
        (mesh_of(), devices[3]),
        (mesh_of(), NamedSharding(mesh_of((4,)), P("x"))),
        (mesh_of(), NamedSharding(mesh_of(backwards=True), P("x"))),
    ]:
        if mesh is not None:
            trainer = host.HostTrainer(loss, ADAM, host_params(rows, w), mesh=mesh)
        ids, y = jax.device_put(made[0], elsewhere)
        words = r"atch.* has {}\[48\] on .*trains on .*device_put"
        for batch, kind in [((ids, y), "int32"), ((made[0][0], y), "float32")]:
            with pytest.raises(ValueError, match=words.format(kind)):
                trainer.evaluate(loss)(*batch)
            with pytest.raises(ValueError, match=words.format(kind)):
                list(trainer.run([batch]))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["device", "mesh"])
def test_tables_alone_are_where_their_batches_are(where, tmp_path):
    """Without other parameters the state alone says where the first batch was."""
    need_devices(8)

    def of_rows(params, ids):  # each row once: sums have one order
        return jnp.sum(jnp.tanh(params["rows"][ids]))

    devices = jax.devices()
    place = devices[3] if where == "device" else NamedSharding(mesh_of((2,)), P("x"))
    ids, new = np.arange(10, 50), {"rows": np.full((2, DIM), 0.5, np.float32)}
    results = []
    for put in (lambda x: x, lambda x: jax.device_put(x, place)):
        params = {"rows": host_params(*begin())["table"]}
        with host.HostTrainer(of_rows, osa.exact_adam(0.1), params) as trainer:
            trainer.map_rows(osa.flush)  # names no device
            trainer.step(put(ids))
            list(trainer.run([put(ids + 3), ids]))
            seen = trainer.evaluate(lambda params, ids: params["rows"][ids])(ids)
            trainer.reset_rows({"rows": np.array([12, 60])}, new)
            trainer.map_rows(osa.flush)
            folder = tmp_path / f"served{len(results)}"
            trainer.snapshot(folder)
            served = host.Snapshot(folder, params).params
            trainer.step(put(ids))
            if results:
                with pytest.raises(ValueError, match=r"trains on .*device_put it th"):
                    trainer.step(jax.device_put(ids, devices[5]))
            trainer.step(ids)
            results.append(arrays((trainer.params, trainer.state, seen, served)))
    assert_identical(*results)


def _times(x, tree):
    return jax.tree.map(lambda y: x * y, tree)


@pytest.mark.slow
def test_calls_in_a_program_that_is_traced_change_nothing():
    """With a mesh nothing else is known to be traced: what is kept would be no rows."""
    batch, ids = next(batches(0, 1)), {"table": np.array([3]), "w": None}
    new = {"table": np.ones((1, DIM), np.float32), "w": None}
    tx = optax.inject_hyperparams(osa.sparse_adam)(0.1)
    trainer = host.HostTrainer(loss, tx, host_params(*begin()), mesh=mesh_of((2,)))
    trainer.step(*batch)

    def slower(params, state):
        return params, optax.tree.set(state, learning_rate=jnp.float32(0.01))

    before = arrays((trainer.params, trainer.state))
    for call in (
        lambda: trainer.reset_rows(ids, new),
        lambda: trainer.map_rows(slower),
        lambda: trainer.map_rows(lambda *trees: jax.tree.map(jnp.square, trees)),
        lambda: trainer.step(*batch),
        lambda x: trainer.map_rows(lambda *trees: (_times(x, trees[0]), trees[1])),
    ):
        numbers = call.__code__.co_argcount
        with pytest.raises(TypeError, match=r"a function that JAX traces|traced array"):
            jax.jit(lambda x: (call(*[x] * numbers), x)[1])(1.0)  # noqa: B023
        assert_identical(arrays((trainer.params, trainer.state)), before)
    trainer.step(*batch)
    trainer.close()


@pytest.mark.slow
def test_rows_are_mapped_while_explicit_axes_are_set():
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    tx, made = osa.exact_adam(0.1), [*batches(0, 3)]
    rows, w = begin()
    known = train_in_memory(loss, tx, {"table": rows, "w": w}, made)
    with jax.set_mesh(mesh):
        trainer = host.HostTrainer(loss, tx, host_params(rows, w))
        values = list(trainer.run(made))
        trainer.map_rows(osa.flush)
    assert_trained_alike(trainer, values, (*osa.flush(*known[:2]), known[2]))


@pytest.mark.slow
def test_a_batch_over_explicit_axes():
    """As `jax.make_mesh` makes them: JAX asks how rows lie, and the note says how."""
    need_devices(8)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    (batch,) = split_over(mesh, batches(0, 1))

    def of_axes(params, ids, y):
        rows = params["table"].at[ids].get(out_sharding=P("x"))
        return jnp.mean((jnp.tanh(rows @ params["w"]).sum(1) - y) ** 2)

    with host.HostTrainer(loss, ADAM, host_params(*begin())) as trainer:
        with pytest.raises(ValueError, match="Resource axis") as raised:
            trainer.step(*batch)
        assert "AxisType.Auto" in "".join(raised.value.__notes__)
        value = trainer.evaluate(loss)(*next(batches(0, 1)))
    with (
        jax.set_mesh(mesh),
        host.HostTrainer(of_axes, ADAM, host_params(*begin())) as trainer,
    ):
        np.testing.assert_allclose(trainer.step(*batch), value, rtol=1e-6)
