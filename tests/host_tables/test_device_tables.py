"""Losses of host tables that look tables on the device up as well, as in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._host_rows import HostRows

from ..helpers.host_tables import DIM, ROWS, begin, host_params, train_in_memory
from ..helpers.support import need_devices, slow_but

COUNT, BAGS = 24, 6
TX = osa.lazy(optax.sgd(0.1, momentum=0.9))


def assert_as_in_memory(loss, more, made, tx=TX, rtol=1e-5):
    """Also rows that were not looked up: without a gradient none has momentum."""
    rows, w = begin()
    expected = train_in_memory(loss, tx, {"table": rows, "w": w} | more, made)
    with host.HostTrainer(loss, tx, host_params(rows, w) | more) as trainer:
        values = list(trainer.run(made))
        params = jax.tree.map(np.array, trainer.params)
    np.testing.assert_allclose(values, expected[2], rtol=rtol)
    for name, array in expected[0].items():
        np.testing.assert_allclose(params[name], array, rtol=rtol, atol=1e-6)


def batches(count=3):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(0, 40, COUNT), rng.normal(size=COUNT).astype(np.float32)


LOOKUPS = {
    "filled": lambda table, ids: table.at[ids].get(mode="fill", fill_value=0.5),
    "taken": lambda table, ids: jnp.take(table, ids, axis=0, fill_value=0.5),
    "clipped": lambda table, ids: table.at[ids].get(mode="clip"),
    "promised": lambda table, ids: table[ids],
    "wrapped": lambda table, ids: jnp.take(table, ids, axis=0, mode="wrap"),
    "one": lambda table, ids: jnp.broadcast_to(table[ids[3]], (COUNT, DIM)),
    "elements": lambda table, ids: table[ids[:, None], jnp.arange(DIM)[None]],
    "bags": lambda table, ids: jnp.repeat(
        osa.embedding_bag(table, ids.reshape(BAGS, -1)), COUNT // BAGS, 0
    ),
}


@pytest.mark.usefixtures("as_optax_expects")
@pytest.mark.parametrize("name", slow_but(LOOKUPS, "filled"))
@pytest.mark.parametrize(
    "function", slow_but(["itself", "tanh", "cast"], "tanh"), ids=str
)
def test_lookups(name, function):
    """Of a function of a table, also by ids out of bounds, which read no row."""
    functions = {
        "itself": lambda x, _: x,
        "tanh": lambda x, scale: jnp.tanh(2 * x) * scale,
        "cast": lambda x, scale: x.astype(jnp.float32) * scale,
    }

    def loss(params, ids, y):
        function_of_table = functions[function](params["feat"], params["scale"])
        rows = LOOKUPS[name](function_of_table, ids).astype(jnp.float32)
        router = jnp.argmax(rows, 1)
        return jnp.mean((params["table"][router * 9] * rows).sum(1) * y)

    dtype = jnp.bfloat16 if function == "cast" else np.float32
    feat = np.random.default_rng(1).normal(size=(40, DIM)).astype(dtype)
    made = [*batches()]
    for ids, _ in made:  # the last two are out of bounds, and no last row is read
        ids[:] = np.where(ids > 37, 41 if name in ("filled", "taken") else 0, ids)
    more = {"feat": feat, "scale": np.float32(0.7)}
    # A bfloat16 row is rounded once a step, and in the other program otherwise.
    assert_as_in_memory(loss, more, made, rtol=0.01 if function == "cast" else 1e-5)


BY_PARAMETERS = {
    "weights": lambda p, ids: osa.embedding_bag(p["table"], ids, weights=p["att"]),
    "of a function": lambda p, ids: osa.embedding_bag(
        jnp.tanh(p["table"]), ids, weights=jnp.exp(p["att"])
    ),
    "on the device": lambda p, ids: osa.embedding_bag(
        jnp.tanh(p["feat"]), ids, weights=p["att"]
    ),
    "ids": lambda p, ids: osa.embedding_bag(
        p["table"], jnp.abs(p["att"] * 9).astype(jnp.int32) + 0 * ids
    ),
    "segments": lambda p, ids: osa.embedding_bag(
        p["table"],
        ids.ravel(),
        segment_ids=jnp.abs(p["att"]).astype(jnp.int32).ravel(),
        num_segments=BAGS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_PARAMETERS)
def test_bags_by_parameters(name):
    """Weights, ids or segments that are functions of parameters."""

    def loss(params, ids, y):
        sums = BY_PARAMETERS[name](params, ids.reshape(BAGS, -1))
        return jnp.mean(sums.sum(1) * y[:BAGS]) + jnp.mean(params["table"][ids])

    rng = np.random.default_rng(1)
    more = {"att": rng.uniform(0, 5, (BAGS, COUNT // BAGS)).astype(np.float32)}
    more["feat"] = rng.normal(size=(40, DIM)).astype(np.float32)
    assert_as_in_memory(loss, more, [*batches()])


def test_a_checkpoint_that_returns_its_parameters_stays_one(monkeypatch):
    """As those of Flax NNX do: what it computes is computed again."""

    def layer(params, x):
        return jnp.tanh(x @ params["k"]), params

    def loss(params, ids):
        x, _ = jax.checkpoint(layer)(params["layer"], params["table"][ids])
        return jnp.mean(x)

    texts, advance = [], HostRows.advance

    def noted(self, program, args, rows):
        texts.append(program.lower(*args).as_text())
        return advance(self, program, args, rows)

    monkeypatch.setattr(HostRows, "advance", noted)
    rows, w = begin()
    params = host_params(rows, w) | {"layer": {"k": np.eye(DIM, dtype=np.float32)}}
    with host.HostTrainer(loss, TX, params) as trainer:
        trainer.step(np.arange(COUNT))
    assert "optimization_barrier" in texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "function", "product"])
def test_over_explicit_axes(name):
    """Rows that are handed over, where arrays say how they lie."""
    need_devices(8)
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Explicit,))
    split, whole = PartitionSpec("x"), PartitionSpec()
    ways = {
        "rows": lambda rows, w: rows,
        "function": lambda rows, w: jnp.tanh(rows),
        "product": lambda rows, w: rows @ w,
    }

    def loss(params, ids, y):
        rows = params["feat"].at[ids].get(out_sharding=PartitionSpec("x", None))
        logits = ways[name](rows, params["w"])
        expert = jnp.argmax(logits, 1)
        values = params["table"].at[expert].get(out_sharding=PartitionSpec("x", None))
        return jnp.mean((values.sum(1) * logits.sum(1) - y) ** 2)

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    (rows, w), rng = begin(), np.random.default_rng(1)
    feat = put(rng.normal(size=(64, DIM)).astype(np.float32), split)
    made = [(put(ids, split), put(y, split)) for ids, y in batches()]
    params = {"feat": feat, "w": put(w, whole)}
    with jax.set_mesh(mesh):
        table = put(rows[: ROWS // 8 * 8], split)
        known = train_in_memory(loss, TX, params | {"table": table}, made)
        with host.HostTrainer(loss, TX, host_params(rows, w) | params) as trainer:
            np.testing.assert_allclose(list(trainer.run(made)), known[2], rtol=1e-5)
            trained = trainer.params["feat"]
    np.testing.assert_allclose(trained, known[0]["feat"], rtol=1e-5, atol=1e-6)


def shown(params, x):
    """As one prints it while one looks for a fault."""
    jax.debug.callback(lambda _: None, params["w"] * 2)
    return jnp.floor(jnp.abs(x * params["w"].sum()))


def looked_up(params, x):
    return jnp.floor(jnp.abs((params["w"] * params["s"])[x.astype(jnp.int32) % 8]) * 3)


def as_a_whole(params, x):
    return x + 0 * jnp.tanh(2 * params["w"]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("ids_of", [shown, looked_up, as_a_whole])
@pytest.mark.parametrize("flag", ["jax_enable_checks", "jax_disable_jit"])
def test_while_one_looks_for_a_fault(ids_of, flag):
    def loss(params, x):
        ids = ids_of(params, x).astype(jnp.int32)
        return jnp.mean(params["table"][ids.reshape(COUNT, -1)[:, 0]] ** 2)

    rows, _ = begin()
    params = host_params(rows, np.ones(DIM, np.float32)) | {"s": np.float32(0.7)}
    batch = (np.arange(COUNT, dtype=np.float32),)
    with host.HostTrainer(loss, TX, params) as trainer:
        expected = [trainer.step(*batch) for _ in range(2)]
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        with jax.checking_leaks(), host.HostTrainer(loss, TX, params) as trainer:
            values = [trainer.step(*batch) for _ in range(2)]
    finally:
        jax.config.update(flag, before)
    np.testing.assert_allclose(values, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_chain_of_functions_is_computed_once():
    """Also where later ones are used as a whole before earlier ones."""

    def loss_of(count):
        def loss(params, ids):
            chain = [params["w"]]
            for _ in range(count):
                chain.append(jnp.tanh(chain[-1]))
            penalty = sum(jnp.sum(x * x.sum()) for x in reversed(chain))
            return jnp.mean(params["table"][ids]) + penalty

        return loss

    def length(count):
        texts, advance = [], HostRows.advance

        def noted(self, program, args, rows):
            texts.append(program.lower(*args).as_text())
            return advance(self, program, args, rows)

        rows, w = begin()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostRows, "advance", noted)
            with host.HostTrainer(loss_of(count), TX, host_params(rows, w)) as trainer:
                trainer.step(np.arange(COUNT))
        return texts[0].count("stablehlo.tanh")

    assert length(20) <= 3 * length(10)
