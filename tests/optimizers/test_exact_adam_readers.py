"""What reads parameters beside `exact_adam` gets values of now, or is refused.

Between two steps a table holds projected values. The reference is dense optax: in front
of `optax.adam` the same transformation gets what every row is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.sparse import BCOO

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx
from optax_sparse_adam import host_tables as host

from ..helpers.support import assert_close, need_devices, slow_but
from .test_lazy_optax import MEASURES, RATE, REFUSED, WORKS, WRONG, make

ROWS, WIDTH, STEPS = 7, 3, 12
# Rounding of twelve steps in float64. What reads projected values is off by 1e-3 to 1.
TOLERANCE = 1e-9
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def as_optax_expects():
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(),
    ):
        yield


def start():
    rng = np.random.default_rng(0)
    table = 0.5 + rng.uniform(size=(ROWS, WIDTH))
    return {"table": jnp.asarray(table), "bias": jnp.ones(WIDTH)}


def loss(params, ids):
    return jnp.mean(jnp.sin(params["table"][ids] @ params["bias"] + ids))


def bag_loss(params, ids):
    bags = osa.embedding_bag(params["table"], ids[:, None])
    return jnp.mean(jnp.sin(bags @ params["bias"] + ids))


def all_rows(steps=STEPS):
    """Dense optax reads every row in every step, so each is in every batch."""
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.permutation(ROWS), jnp.int32) for _ in range(steps)]


def some_rows(steps=STEPS):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.zipf(1.5, 4) % ROWS, jnp.int32) for _ in range(steps)]


def of_name(name):
    arguments = (WORKS | MEASURES).get(name)
    if name in REFUSED or name in WRONG:
        arguments = (REFUSED | WRONG)[name][0]
    return optax.with_extra_args_support(make(name, arguments))


def reads_params(name):
    """Whether a change of the parameters alone changes what comes out, dense."""
    tx, params = of_name(name), start()
    grads = jax.grad(loss)(params, all_rows(1)[0])
    state = tx.init(params)
    extra = {"value": jnp.float64(1.0), "grad": grads}
    extra |= {"value_fn": lambda p: loss(p, all_rows(1)[0])}
    other = {"table": params["table"] * -0.3, "bias": params["bias"] * -2}
    results = [tx.update(grads, state, p, **extra) for p in (params, other)]

    def values(tree):
        def plain(x):
            is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            return np.asarray(jax.random.key_data(x) if is_key else x)

        return [plain(x) for x in jax.tree.leaves(tree)]

    pairs = zip(*map(values, results), strict=True)
    return any(not np.array_equal(*pair, equal_nan=True) for pair in pairs)


# Those that read parameters, of all public transformations of optax; a new one fails
# here until it is named.
READS_PARAMS = """
adamaxw adamw adaptive_grad_clip add_decayed_weights fromage keep_params_nonnegative
lamb lars lion nadamw scale_by_param_block_norm scale_by_trust_ratio
stateless_with_tree_map

contrib.cocob contrib.dog contrib.dowg contrib.madgrad contrib.mechanize contrib.momo
contrib.momo_adam contrib.prodigy contrib.scale_by_cocob contrib.scale_by_madgrad
contrib.schedule_free contrib.schedule_free_adamw contrib.schedule_free_sgd

scale_by_distance_over_gradients scale_by_param_block_rms
"""
READERS = READS_PARAMS.split()


@pytest.mark.slow
def test_every_reader_is_named():
    found = {name for name in {**WORKS, **MEASURES, **WRONG} if reads_params(name)}
    assert found == set(READERS)


def dense_values(reference, batches, params=None):
    params, values = start(), []
    state = reference.init(params)

    @jax.jit
    def step(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = reference.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    for ids in batches:
        params, state, value = step(params, state, ids)
        values.append(value)
    return values, params


# Ways to run.


def by_step(tx, batches, loss=loss):
    step, params = osa.make_train_step(loss, tx), start()
    state, values = jax.tree.map(jnp.copy, tx.init(params)), []
    for ids in batches:
        params, state, value = step(params, state, ids)
        values.append(value)
    return values, osa.flush(params, state)[0]


def by_hand(tx, batches, compile=jax.jit):
    params, values = start(), []
    state = tx.init(params)

    @compile
    def step(params, state, ids):
        value, grads = osa.value_and_grad(loss, read=state)(params, ids)
        updates, state = tx.update(grads, state, params, value=value)
        return osa.apply_updates(params, updates), state, value

    for ids in batches:
        params, state, value = step(params, state, ids)
        values.append(value)
    return values, osa.flush(params, state)[0]


class Model(nnx.Module):
    def __init__(self):
        params = start()
        self.table, self.bias = map(nnx.Param, (params["table"], params["bias"]))

    def __call__(self, ids):
        return loss({"table": self.table[...], "bias": self.bias[...]}, ids)


def by_nnx(tx, batches, update=flax_nnx.update):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids):
        value, grads = flax_nnx.value_and_grad(lambda m: m(ids), read=optimizer)(model)
        update(optimizer, model, grads)
        return value

    values = [step(model, optimizer, ids) for ids in batches]
    flax_nnx.flush(model, optimizer)
    return values, {"table": model.table[...], "bias": model.bias[...]}


def by_host(tx, batches):
    params = start()
    rows = np.asarray(params["table"])
    table = host.HostTable(rows.shape, rows.dtype, init=lambda a, b: rows[a:b])
    with host.HostTrainer(loss, tx, {**params, "table": table}) as trainer:
        values = [trainer.step(ids) for ids in batches]
        trainer.map_rows(osa.flush)
        return values, trainer.params


WAYS = {
    "step": by_step,
    "bags": functools.partial(by_step, loss=bag_loss),
    "by hand": by_hand,
    "eager": functools.partial(by_hand, compile=lambda f: f),
    "nnx": by_nnx,
    "host": by_host,
}


def labels(tree, table, bias):
    """Of parameters as the way has them: `nnx.State` has another class than a dict."""
    names = {"table": table, "bias": bias}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: next(x for name, x in names.items() if name in str(path)), tree
    )


TREES = {
    "chain": lambda f, adam, tree: optax.chain(f, adam),
    "nested": lambda f, adam, tree: optax.chain(optax.chain(f), optax.chain(adam)),
    "partition": lambda f, adam, tree: optax.partition(
        {"a": optax.chain(f, adam)}, labels(tree, "a", "a")
    ),
    "apart": lambda f, adam, tree: optax.partition(
        {"a": optax.chain(f, adam), "b": optax.adam(RATE)}, labels(tree, "a", "b")
    ),
    "masked": lambda f, adam, tree: optax.masked(
        optax.chain(f, adam), labels(tree, True, True)
    ),
}


def assert_dense(tx, reference, way, batches):
    values, params = WAYS[way](tx, batches)
    expected, dense = dense_values(reference, batches)
    assert_close(jnp.stack(values), jnp.stack(expected), TOLERANCE, magnitude=1.0)
    for name in dense:
        assert_close(params[name], dense[name], TOLERANCE, magnitude=1.0, what=name)


CORE = ("add_decayed_weights",)
# Each way with each tree; with and without weight decay in turns.
PLACES = [
    (way, tree, (None, 0.1)[(i + j) % 2])
    for i, way in enumerate(WAYS)
    for j, tree in enumerate(TREES)
]


@pytest.mark.parametrize("name", slow_but(READERS, *CORE))
def test_in_front(name):
    f = of_name(name)
    tx = optax.chain(osa.lazy(f), osa.exact_adam(RATE))
    assert_dense(tx, optax.chain(f, optax.adam(RATE)), "step", all_rows())


@pytest.mark.parametrize(
    ("way", "tree", "decay"),
    slow_but(
        PLACES,
        ("nnx", "chain", None),
    ),
)
def test_in_every_place(way, tree, decay):
    f, own, theirs = optax.adaptive_grad_clip(0.02), osa.exact_adam, optax.adam
    if decay is not None:
        f, own, theirs = optax.add_decayed_weights(0.3), osa.exact_adamw, optax.adamw
        own, theirs = (functools.partial(x, weight_decay=decay) for x in (own, theirs))
    params = start()
    if way == "nnx":
        params = nnx.as_pure(nnx.state(Model(), nnx.Param))
    tx = TREES[tree](osa.lazy(f), own(RATE), params)
    reference = TREES[tree](f, theirs(RATE), start())
    assert_dense(tx, reference, way, all_rows())


FIRST = {  # what makes its updates in a program of its own, by rows and by leaves
    "trace": (osa.lazy(optax.trace(0.8)), optax.trace(0.8)),
    "sparse_adam": (osa.sparse_adam(0.1, eps=1e-20), optax.adam(0.1, eps=1e-20)),
}


@pytest.mark.parametrize("first", slow_but(FIRST, "trace"))
@pytest.mark.parametrize("way", slow_but(WAYS, "step"))
def test_behind_what_is_lazy_itself(first, way):
    """What has been made of a gradient still says how its rows are read."""
    own, theirs = FIRST[first]
    decay, clip = optax.add_decayed_weights(0.3), optax.adaptive_grad_clip(0.02)
    tx = optax.chain(own, osa.lazy(decay), osa.lazy(clip), osa.exact_adamw(RATE))
    reference = optax.chain(theirs, decay, clip, optax.adamw(RATE))
    assert_dense(tx, reference, way, all_rows())


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_but(["step", "host", "eager"], "step"))
def test_rows_that_rest(way):
    """Only the rows of a batch are read, and most have rested before."""

    @jax.jit
    def decayed(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        touched = jnp.zeros(ROWS, bool).at[ids].set(True)[:, None]
        more = {"table": 0.3 * touched, "bias": 0.3}
        grads = jax.tree.map(lambda g, p, x: g + x * p, grads, params, more)
        updates, state = optax.adam(RATE).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, expected = start(), []
    state = optax.adam(RATE).init(params)
    for ids in some_rows(40):
        params, state, value = decayed(params, state, ids)
        expected.append(value)
    f = osa.lazy(optax.add_decayed_weights(0.3))
    values, flushed = WAYS[way](optax.chain(f, osa.exact_adam(RATE)), some_rows(40))
    assert_close(jnp.stack(values), jnp.stack(expected), TOLERANCE, magnitude=1.0)
    assert_close(flushed["table"], params["table"], TOLERANCE, magnitude=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["kernel"], indirect=True)
def test_with_the_kernel(backend):
    """In float32, where rows are looked up and updated by the kernel."""
    f = optax.add_decayed_weights(0.3)
    tx, losses = optax.chain(osa.lazy(f), osa.exact_adam(RATE)), []
    dense = optax.chain(f, optax.adam(RATE))
    for used, sparse in ((tx, None), (dense, False)):
        step = osa.make_train_step(loss, used, sparse=sparse)
        params = jax.tree.map(lambda x: x.astype("float32"), start())
        state, values = used.init(params), []
        for ids in all_rows():
            params, state, value = step(params, state, ids)
            values.append(value)
        losses.append(jnp.stack(values))
    assert_close(*losses, 1e-5, magnitude=1.0)


@pytest.mark.parametrize("name", slow_but(READERS, CORE[0]))
def test_without_lazy(name):
    """It gets whole tables, and row-sparse gradients, which most of them do not take.

    MADGRAD makes them dense, so that all rows always hold their values.
    """
    f = of_name(name)
    tx = optax.chain(f, osa.exact_adam(RATE))
    with pytest.raises((TypeError, ValueError)):
        by_step(tx, all_rows(2))
    if "madgrad" in name:
        assert_dense(tx, optax.chain(f, optax.adam(RATE)), "by hand", all_rows())
        return
    with pytest.raises((TypeError, ValueError, AttributeError)):
        by_hand(tx, all_rows(2))


@pytest.mark.parametrize("name", slow_but(READERS, CORE[0]))
def test_behind(name):
    exact, f = osa.exact_adam(RATE), of_name(name)
    chains = (
        lambda own: optax.chain(exact, own),
        lambda own: optax.named_chain(("exact", exact), ("own", own)),
    )
    turn = 1 if READERS.index(name) % 2 else -1
    for own, chain in zip((f, osa.lazy(f)), chains[::turn], strict=True):
        for run in (by_step, by_hand, by_nnx):
            try:
                values, _ = run(chain(own), all_rows(2))
            except (TypeError, ValueError):
                continue
            assert np.isnan(values[1])  # a changed update, in a program


def by_two_programs(tx, batches):
    params = start()
    state, values = tx.init(params), []
    both = jax.jit(lambda p, s, ids: osa.value_and_grad(loss, read=s)(p, ids))
    update = jax.jit(tx.update)
    for ids in batches:
        value, grads = both(params, state, ids)
        updates, state = update(grads, state, params)
        params = osa.apply_updates(params, updates)
        values.append(value)
    return values, osa.flush(params, state)[0]


@pytest.mark.slow
def test_a_gradient_that_has_lost_its_table():
    """Refused if the parameters are read; of no harm if they are not."""

    def flax(optimizer, model, grads):  # whose own update maps over all arrays
        optimizer.update(model, grads)

    f = optax.add_decayed_weights(0.3)
    tx = optax.chain(osa.lazy(f), osa.exact_adam(RATE))
    for run in (by_two_programs, functools.partial(by_nnx, update=flax)):
        with pytest.raises(ValueError, match=r"lazy got rows of exact_adam.*program"):
            run(tx, all_rows(2))
    clip = optax.clip_by_global_norm(0.1)
    tx = optax.chain(osa.lazy(clip), osa.exact_adam(RATE))
    values, params = by_two_programs(tx, some_rows())
    expected, dense = dense_values(optax.chain(clip, optax.adam(RATE)), some_rows())
    assert_close(jnp.stack(values), jnp.stack(expected), TOLERANCE, magnitude=1.0)
    assert_close(params["table"], dense["table"], TOLERANCE, magnitude=1.0)


def test_an_optimizer_of_rows_in_front():
    tx = optax.chain(osa.sparse_adafactor(), osa.exact_adam(RATE))
    with pytest.raises(ValueError, match="cannot train a table that exact_adam trains"):
        by_step(tx, all_rows(2))


# A part of one's own that knows row-sparse gradients.


def tracked(read):
    """Keeps what it reads of the table; gradients pass as they are."""

    def init_fn(params):
        return jnp.zeros(())

    def update_fn(updates, state, params=None, **extra):
        return updates, state + read(params["table"])

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


READS = {
    "a sum": jnp.sum,
    "in a jit": jax.jit(lambda table: jnp.sum(table[2])),
    "in a branch": lambda t: jax.lax.cond(t.size > 3, jnp.sum, jnp.max, t),
    "in a loop": lambda t: jax.lax.fori_loop(0, 2, lambda i, s: s + t[i, 0], 0.0),
    "in a while": lambda t: jax.lax.while_loop(
        lambda s: s < t[0, 0], lambda s: s + 1.0, 0.0
    ),
    "under vmap": lambda t: jax.vmap(jnp.sum)(t).sum(),
}


@pytest.mark.parametrize("kind", slow_but(READS, "a sum", "in a branch"))
@pytest.mark.parametrize("way", ["step", "nnx"])
def test_a_reader_of_ones_own(kind, way):
    tx = optax.chain(tracked(READS[kind]), osa.exact_adam(RATE))
    words = r"reads a table that exact_adam trains.*test_exact_adam_readers.*evaluate"
    with pytest.raises(ValueError, match=words):
        WAYS[way](tx, all_rows(2))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", "nnx"])
def test_a_reader_without_jit(way):
    """It is refused, and what gets rows of now inside of `lazy` is not."""
    with jax.disable_jit():
        reader = optax.chain(tracked(jnp.sum), osa.exact_adam(RATE))
        with pytest.raises(ValueError, match="reads a table that exact_adam trains"):
            WAYS[way](reader, all_rows(1))
        clip = osa.lazy(optax.adaptive_grad_clip(0.1))
        WAYS[way](optax.chain(clip, osa.exact_adam(RATE)), all_rows(1))


def with_rows(function):
    """A wrapper that knows row-sparse gradients, and the shapes of parameters."""

    def update_fn(updates, state, params=None):
        assert params["table"].shape == (ROWS, WIDTH)
        updates = jax.tree.map(
            lambda x: function(x) if isinstance(x, BCOO) else x,
            updates,
            is_leaf=lambda x: isinstance(x, BCOO),
        )
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_but(["step", "nnx"], "step"))
def test_who_reads_no_table_is_let_through(way):
    params = start()
    if way == "nnx":
        params = nnx.as_pure(nnx.state(Model(), nnx.Param))
    tx = optax.chain(
        with_rows(lambda x: 0.5 * x),
        osa.lazy(optax.trace(0.5)),
        optax.masked(optax.add_decayed_weights(0.3), labels(params, False, True)),
        osa.exact_adamw(RATE, weight_decay=0.1),
    )
    reference = optax.chain(
        optax.masked(optax.scale(0.5), labels(start(), True, False)),
        optax.trace(0.5),
        optax.masked(optax.add_decayed_weights(0.3), labels(start(), False, True)),
        optax.adamw(RATE, weight_decay=0.1),
    )
    values, params = WAYS[way](tx, all_rows())
    expected, dense = dense_values(reference, all_rows())
    assert_close(jnp.stack(values), jnp.stack(expected), TOLERANCE, magnitude=1.0)
    assert_close(params["table"], dense["table"], TOLERANCE, magnitude=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_on_a_mesh(axis_type):
    """The table and its state lie split by rows."""
    need_devices(7)
    types = (getattr(jax.sharding.AxisType, axis_type),)
    mesh = jax.make_mesh((7,), ("rows",), axis_types=types)
    f = optax.add_decayed_weights(0.3)
    tx = optax.chain(osa.lazy(f), osa.exact_adamw(RATE, weight_decay=0.1))
    reference = optax.chain(f, optax.adamw(RATE, weight_decay=0.1))
    expected, dense = dense_values(reference, all_rows())

    def loss_on_mesh(params, ids):
        table, spec = params["table"], jax.P(None, None)
        if axis_type == "Explicit":
            rows = table.at[ids].get(out_sharding=spec)
        else:
            rows = table[ids]
        return jnp.mean(jnp.sin(rows @ params["bias"] + ids))

    with jax.set_mesh(mesh):
        params = start()
        params["table"] = jax.device_put(params["table"], jax.P("rows", None))
        params["bias"] = jax.device_put(params["bias"], jax.P(None))
        step, state = osa.make_train_step(loss_on_mesh, tx), tx.init(params)
        values = []
        for ids in all_rows():
            params, state, value = step(params, state, jax.device_put(ids, jax.P(None)))
            values.append(value)
        params, _ = osa.flush(params, state)
    assert_close(jnp.stack(values), jnp.stack(expected), TOLERANCE, magnitude=1.0)
    assert_close(params["table"], dense["table"], TOLERANCE, magnitude=1.0)
