"""What `lazy` updates in blocks: where it may, and never where rows meet."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._rows import map_rows

from ..helpers.blocks import at_once, lower
from ..helpers.support import TOLERANCE, assert_close, bcoo, slow_but

# As many rows as columns, which a proof by shapes alone would confuse.
SIDE = 6
ROWS = 20


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two rows or three, of the tables here."""
    monkeypatch.setattr(map_rows, "_BLOCK_BYTES", 60)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def gradient(shape=(ROWS, SIDE), nse=SIDE, n_sparse=1, dtype="float32", seed=0):
    """Unique rows, and one of padding: no loop of ours but that over blocks."""
    rng = np.random.default_rng(seed)
    values = (rng.integers(-31, 32, (nse, *shape[n_sparse:])) / 32).astype(dtype)
    size = int(np.prod(shape[:n_sparse]))
    flat = rng.choice(size, nse, replace=False)
    indices = np.stack(np.unravel_index(flat, shape[:n_sparse]), 1).astype(np.int32)
    values[2], indices[2] = 0, shape[:n_sparse]
    return bcoo(values, indices, shape, unique_indices=True)


def table(shape=(ROWS, SIDE), dtype="float32"):
    x = np.random.default_rng(1).integers(-31, 32, shape) / 32
    return jnp.asarray(x, dtype)


def with_rows_of_state(function):
    """A transformation whose state has rows: `function` of gradient, state, params."""

    def update(updates, state, params=None, **extra):
        del extra
        updates = function(updates, state, params)
        return updates, jax.tree.map(jnp.add, state, updates)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.ones_like, params), update
    )


@jax.custom_jvp
def centred(x):
    return x - jnp.sum(x, axis=0)


centred.defjvp(lambda primals, tangents: (centred(*primals), centred(*tangents)))
SQUARE = jnp.arange(36.0).reshape(6, 6) / 32
VECTOR = jnp.arange(6.0)


def scanned(x):
    return jax.lax.scan(lambda total, row: (total + row,) * 2, jnp.zeros(SIDE), x)[1]


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: y.at[i].add(x[0]), x)


def _less_maximum(x):
    return x - x.max(2, keepdims=True)


# Rows meet, in ways that keep the shape.
MIXED = {
    "cumulative sum": lambda x: jnp.cumsum(x, axis=0),
    "cumulative maximum": lambda x: jax.lax.cummax(x, axis=0),
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "ranks": lambda x: x * jnp.argsort(x, axis=0),
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "shifted": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "permuted": lambda x: x[jnp.array([1, 0, 3, 2, 5, 4])],
    "mean over rows": lambda x: x - x.mean(0),
    "kept maximum": lambda x: x / (1 + jnp.max(jnp.abs(x), axis=0, keepdims=True)),
    "softmax over rows": lambda x: jax.nn.softmax(x, axis=0),
    "products of rows": lambda x: x @ x.T,
    "matrix on the left": lambda x: SQUARE @ x,
    "contracted rows": lambda x: jnp.einsum("rd,rk->kd", x, SQUARE),
    "the first row": lambda x: x + x[0],
    "the first element": lambda x: x * x[0, 0],
    "transposed": lambda x: x.T,
    "plus transposed": lambda x: x + x.T,
    "row sums as columns": lambda x: x + x.sum(1),
    "column sums as rows": lambda x: x + x.sum(0)[:, None],
    "row sums, reshaped": lambda x: x + x.sum(1).reshape(1, SIDE),
    "broadcast over columns": lambda x: jnp.broadcast_to(x.max(1), x.shape),
    "pairs of rows": lambda x: x.reshape(3, 2, SIDE)[:, ::-1].reshape(x.shape),
    "flat": lambda x: x.reshape(-1)[::-1].reshape(x.shape),
    "columns first": lambda x: x.reshape(-1, order="F").reshape(x.shape),
    "moved away and back": lambda x: jnp.cumsum(x[None], axis=1)[0],
    "swapped in three axes": lambda x: x.reshape(6, 6, 1).transpose(1, 0, 2)[..., 0],
    "numbered": lambda x: x * jnp.arange(SIDE)[:, None],
    "one row only": lambda x: jnp.where(jnp.arange(SIDE)[:, None] == 1, x, 0),
    "a constant with rows": lambda x: x * SQUARE,
    "random": lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
    "scan over rows": scanned,
    "loop over rows": looped,
    "inside of jit": jax.jit(jax.jit(lambda x: x - jnp.sum(x, axis=0))),
    "inside of custom_jvp": centred,
    "inside of checkpoint": jax.checkpoint(lambda x: x - jnp.sum(x, axis=0)),
    "inside of cond": lambda x: jax.lax.cond(
        x[0, 0] > 0, jnp.cumsum, jnp.ravel, x
    ).reshape(x.shape),
    "inside of vmap": jax.vmap(jnp.cumsum, in_axes=1, out_axes=1),
    "a norm of the state": lambda x: x / jnp.linalg.norm(x),
}

# Each row by itself, although the shapes are as many.
ALONE = {
    "mean of a row": lambda x: x - x.mean(1, keepdims=True),
    "softmax of a row": lambda x: jax.nn.softmax(x, axis=1),
    "a number a row": lambda x: x.max(1)[:, None] + jnp.zeros(SIDE),
    "vector for all rows": lambda x: x * VECTOR,
    "one row for all": lambda x: x + VECTOR[None],
    "reshaped": lambda x: _less_maximum(x.reshape(6, 2, 3)).reshape(6, 6),
    "turned": lambda x: x.reshape(6, 2, 3).transpose(0, 2, 1).reshape(6, 6),
    "inside of jit": jax.jit(lambda x: jnp.where(x > 0, x, jnp.tanh(x))),
    "clamped": lambda x: jnp.clip(x, -0.5, VECTOR),
    "constant": lambda x: jnp.full_like(x, 0.5),
    "the same": lambda x: x,
}


def count_loops(text):
    """Loops over tables, as often as they run: tables of one size share a function."""
    parts = re.split(r"func\.func \w+ @(\w+)", text)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))

    def count(name):
        loops = re.findall(rf"stablehlo\.while\(.*tensor<{ROWS}x", bodies[name])
        return len(loops) + sum(map(count, re.findall(r"call @(\w+)", bodies[name])))

    return count("main")


def check(tx, grads, params, in_blocks):
    """These leaves are updated in blocks, with the results of all rows at once."""
    tx = osa.lazy(tx)
    lowered, found = lower(tx, grads, params)
    assert found == set(in_blocks)
    assert count_loops(lowered.as_text()) == len(found)
    state = tx.init(params)
    actual = lowered.compile()(grads, state, params)
    expected = at_once(tx.update, grads, state, params)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    expected, _ = jax.tree_util.tree_flatten_with_path(expected)
    for a, (path, e) in zip(jax.tree.leaves(actual), expected, strict=True):
        assert a.dtype == e.dtype
        scale = np.max(np.abs(np.asarray(e, np.float64)), initial=0)
        what = jax.tree_util.keystr(path)
        # Sums of a few rounded numbers; XLA fuses a program.
        assert_close(a, e, 3 * TOLERANCE["float32"].numpy, magnitude=scale, what=what)


@pytest.mark.slow
def test_rows_that_meet_stay_together():
    """Of many tables of one shape in one program, those are taken that may be."""
    functions = {"alone: " + name: f for name, f in ALONE.items()} | MIXED

    def update(g, s, p):
        del p
        return {name: f(g[name] + s[name]) for name, f in functions.items()}

    grads = {name: gradient(seed=n) for n, name in enumerate(functions)}
    params = dict.fromkeys(functions, table())
    _, found = lower(osa.lazy(with_rows_of_state(update)), grads, params, "trace")
    alone = {name for name in functions if name.startswith("alone: ")}
    assert found == alone
    # One that stays together is all rows at once, whatever it computes.
    for name in {*MIXED} - {"sorted", "a norm of the state"}:
        del functions[name], grads[name], params[name]
    check(with_rows_of_state(update), grads, params, alone)


def two(function):
    def update(g, s, p):
        return dict(zip("ab", function(g["a"], g["b"], s["a"], s["b"]), strict=True))

    return with_rows_of_state(update)


# Of two tables whose gradients are alike in shape: those in blocks.
TWO = {
    "rows of the other": (lambda a, b, s, t: (a + s, b + a), "a"),
    "gathered rows of the other": (lambda a, b, s, t: (a + s, b + s), ""),
    "exchanged": (lambda a, b, s, t: (b, a), ""),
    "norm of the other's gradient": (lambda a, b, s, t: (a + s, b * a.sum()), "ab"),
    "norm of the other's state": (lambda a, b, s, t: (a + s, b * s.sum()), ""),
    "one with a norm of its own state": (lambda a, b, s, t: (a + s, b * t.sum()), "a"),
    "norms of both gradients": (
        lambda a, b, s, t: (a / (norm := (a + b).sum()) + s, b / norm + t),
        "ab",
    ),
}


@pytest.mark.parametrize("name", slow_but(TWO, *list(TWO)[::2]))
def test_two_tables(name):
    function, in_blocks = TWO[name]
    grads = {"a": gradient(), "b": gradient(seed=3)}
    check(two(function), grads, {"a": table(), "b": 2 * table()}, in_blocks)


def test_the_update_of_another():
    """Each table's state is its own; the updates change places."""

    def update(g, s, p=None):
        return {"a": g["b"], "b": g["a"]}, jax.tree.map(jnp.add, s, g)

    tx = optax.GradientTransformation(lambda params: params, update)
    grads = {"a": gradient(), "b": gradient(seed=3)}
    check(tx, grads, {"a": table(), "b": table()}, "")
