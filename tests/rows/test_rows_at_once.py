"""Nothing is written before all that can be refused has been: arrays of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

IDS = {"a": np.array([1, 2]), "b": np.array([0, 4]), "w": None}
OPTIMIZERS = {
    "sparse_adam": osa.sparse_adam(0.1),
    "exact_adamw": osa.exact_adamw(0.1),
    "lazy": osa.lazy(optax.sgd(0.1, momentum=0.9)),
    "chain": optax.chain(optax.identity(), osa.rowwise_adam(0.1)),
}


def begin(tx):
    params = {
        "a": np.arange(40, dtype=np.float32).reshape(10, 4),
        "b": np.arange(10, dtype=np.float32).reshape(5, 2),
        "w": np.ones(4, np.float32),
    }
    state = jax.tree.map(np.array, tx.init(jax.tree.map(jnp.asarray, params)))
    return params, state


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def last_leaf(change, tree):
    """The tree with another one in place of its last array with rows."""
    leaves, treedef = jax.tree.flatten(tree)
    place = max(i for i, x in enumerate(leaves) if np.ndim(x) and len(x) in (5, 10, 2))
    leaves[place] = change(leaves[place])
    return treedef.unflatten(leaves)


def deleted(x):
    x = jnp.array(x)
    x.delete()
    return x


# What is wrong: of the tables, of their state, of the rows and of the rows' state.
FAULTS = {
    "state of device_get": (None, jax.device_get, None, None),
    "state of asarray": (None, lambda s: jax.tree.map(np.asarray, s), None, None),
    "last of the state": (None, functools.partial(last_leaf, read_only), None, None),
    "last table": (lambda p: p | {"b": read_only(p["b"])}, None, None, None),
    "whole": (lambda p: p | {"w": read_only(p["w"])}, None, None, None),
    "width": (None, None, lambda r: r | {"b": np.ones((2, 3), np.float32)}, None),
    "type": (None, None, lambda r: r | {"b": r["b"].astype(np.float64)}, None),
    "shape of a whole one": (None, None, lambda r: r | {"w": r["w"][:1]}, None),
    "type of a whole one": (None, None, lambda r: r | {"w": r["w"] + 1j}, None),
    "deleted": (None, None, lambda r: r | {"b": deleted(r["b"])}, None),
    "width of state": (
        *(None, None, None),
        functools.partial(last_leaf, lambda x: np.ones((*x.shape, 2), x.dtype)),
    ),
    "type of state": (
        *(None, None, None),
        functools.partial(last_leaf, lambda x: x.astype(np.float64)),
    ),
    "deleted state": (None, None, None, functools.partial(last_leaf, deleted)),
    "tree of state": (None, None, None, lambda s: (s, s)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_put_rows(fault, name):
    tx = OPTIMIZERS[name]
    params, state = begin(tx)
    rows, row_state = osa.take_rows(tx, params, state, IDS)
    rows, row_state = jax.tree.map(lambda x: x + 1, (rows, row_state))
    if fault.startswith("state of "):  # what makes arrays of NumPy of those of JAX
        state = jax.tree.map(jnp.asarray, state)
    trees = params, state, rows, row_state
    changes = [x or (lambda tree: tree) for x in FAULTS[fault]]
    given = [change(tree) for change, tree in zip(changes, trees, strict=True)]
    before = jax.tree.map(np.array, given[:2])
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        osa.put_rows(tx, *given[:2], IDS, *given[2:])
    if "deleted" not in fault and "tree" not in fault:
        assert str(raised.value).startswith("put_rows ")
    jax.tree.map(np.testing.assert_array_equal, before, given[:2])


@pytest.mark.parametrize("fault", ["state of device_get", "last table", "width"])
def test_reset_rows(fault):
    tx = OPTIMIZERS["sparse_adam"]
    params, state = begin(tx)
    state = state._replace(nu=jax.tree.map(lambda x: x + 3, state.nu))
    rows = {"a": np.zeros((2, 4), np.float32), "b": np.zeros((2, 2), np.float32)}
    of_params, of_state, of_rows, _ = FAULTS[fault]
    params = of_params(params) if of_params else params
    state = of_state(jax.tree.map(jnp.asarray, state)) if of_state else state
    rows = of_rows(rows) if of_rows else rows
    before = jax.tree.map(np.array, (params, state))
    with pytest.raises(ValueError, match="reset_rows "):
        osa.reset_rows(tx, params, state, IDS, rows | {"w": None})
    jax.tree.map(np.testing.assert_array_equal, before, (params, state))


def test_an_init_that_raises():
    """What makes the state of new rows fails after tables could have been written."""
    tx = osa.sparse_adam(0.1)
    params, state = begin(tx)

    def init(params):
        if params["a"].shape[0] == 2:
            raise RuntimeError("no rows today")
        return tx.init(params)

    rows = {"a": np.zeros((2, 4), np.float32), "b": np.zeros((2, 2), np.float32)}
    before = jax.tree.map(np.array, (params, state))
    other = optax.GradientTransformation(init, tx.update)
    with pytest.raises(RuntimeError, match="no rows today"):
        osa.reset_rows(other, params, state, IDS, rows | {"w": None})
    jax.tree.map(np.testing.assert_array_equal, before, (params, state))


def test_a_map_for_reading(tmp_path):
    table = np.lib.format.open_memmap(tmp_path / "t.npy", "w+", np.float32, (9, 2))
    table[...] = 1
    del table
    table = np.load(tmp_path / "t.npy", mmap_mode="r")
    tx = osa.rowwise_adagrad(0.1)
    state = jax.tree.map(np.array, tx.init(jnp.zeros((9, 2))))
    ids = np.array([3])
    taken = osa.take_rows(tx, table, state, ids)
    with pytest.raises(ValueError, match=r'read-only.*open the file with "r\+"'):
        osa.put_rows(
            tx, table, state, ids, taken[0], jax.tree.map(np.ones_like, taken[1])
        )
    assert not any(np.any(x) for x in jax.tree.leaves(state))


def test_traced_values_for_numpy():
    tx = osa.sparse_adam(0.1)
    params, state = begin(tx)
    rows, row_state = osa.take_rows(tx, params, state, IDS)
    before = jax.tree.map(np.array, (params, state))

    def put(w):
        return osa.put_rows(tx, params, state, IDS, rows | {"w": w}, row_state)

    with pytest.raises(TypeError, match=r"values that are known.*\['w'\]"):
        jax.jit(put)(jnp.ones(4))
    jax.tree.map(np.testing.assert_array_equal, before, (params, state))


@pytest.mark.parametrize("kind", ["numpy", "memmap", "asarray"])
def test_rows_that_are_views_of_what_is_written(kind, tmp_path):
    """A swap of two tables in one call, and a shift inside of one table."""
    tx = osa.rowwise_adagrad(0.1)
    first = np.arange(12, dtype=np.float32).reshape(6, 2)
    params = {"a": first.copy(), "b": first + 100}
    if kind == "memmap":
        for name, x in params.items():
            params[name] = np.memmap(tmp_path / name, np.float32, "w+", shape=x.shape)
            params[name][...] = x
    state = jax.tree.map(np.array, tx.init(jax.tree.map(jnp.asarray, params)))
    ids = {"a": np.arange(3), "b": np.arange(3, 6)}
    _, of_rows = osa.take_rows(tx, params, state, ids)
    views = {"a": params["b"][3:], "b": params["a"][:3]}
    if kind == "asarray":  # JAX may keep the memory of NumPy
        views = jax.tree.map(jnp.asarray, views)
    expected = {"a": first.copy(), "b": first + 100}
    expected["a"][:3], expected["b"][3:] = first[3:] + 100, first[:3]
    osa.put_rows(tx, params, state, ids, views, of_rows)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    shifted = {"a": params["a"][1:4], "b": params["b"][3:]}
    osa.put_rows(tx, params, state, ids, shifted, of_rows)
    expected["a"][:3] = expected["a"][1:4].copy()
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_moments_that_are_views():
    """The rows' state is that of another run, of which it is a view."""
    tx = osa.sparse_adam(0.1)
    params, state = begin(tx)
    state = state._replace(mu={k: np.array(x) for k, x in params.items()})
    rows, row_state = osa.take_rows(tx, params, state, IDS)
    mu = row_state.mu | {"a": state.mu["a"][8:10], "w": state.mu["a"][1]}
    expected = state.mu["a"][1].copy()
    osa.put_rows(tx, params, state, IDS, rows, row_state._replace(mu=mu))
    np.testing.assert_array_equal(state.mu["a"][1:3], state.mu["a"][8:10])
    np.testing.assert_array_equal(state.mu["w"], expected)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_expects")
def test_rows_of_a_state_whose_type_a_step_has_changed():
    """`init` makes `mu` of a bfloat16 table as bfloat16; injected numbers widen it."""
    tx = osa.lazy(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    params = {"a": jnp.ones((9, 4), jnp.bfloat16), "w": jnp.ones(4)}
    ids, rows = {"a": jnp.array([3]), "w": None}, {"a": jnp.zeros((1, 4), jnp.bfloat16)}

    def loss(params, at):
        return jnp.sum((params["a"][at].astype(jnp.float32) @ params["w"]) ** 2)

    step = osa.make_train_step(loss, tx)
    old = step(params, tx.init(params), jnp.array([3, 4]))[:2]
    params, state = osa.reset_rows(tx, *old, ids, rows | {"w": None})
    expected = old[1].inner_state[0].mu["a"]
    assert expected.dtype == jnp.float32
    expected = expected.at[3].set(0.0)
    np.testing.assert_array_equal(state.inner_state[0].mu["a"], expected)
