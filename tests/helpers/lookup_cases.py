"""Cases for the gradient tests: every kind of lookup, and uses that are no lookups."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .gradients import FAR_IDS, ROUNDED, SMALL_IDS, SMALL_TABLE, TABLES, Case, R, square


def lookup(function, nse=6, **kwargs):
    """The case of `function(table, ids)`."""
    return Case(lambda p, ids: square(function(p["t"], ids), p["w"]), nse, **kwargs)


def no_nan(rows):
    """Rows that a lookup fills with NaN, as zeros."""
    return jnp.where(jnp.isnan(rows), 0, rows)


def mixed(p, ids):
    """Rows and single elements of one table."""
    return square(p["t"][ids], p["w"]) + jnp.sum(jnp.square(p["t"][ids[0], 2]))


def integers(p, ids):
    """Out of bounds they are the largest number, and not what NaN is cast to."""
    numbers = jnp.take(abs(8 * p["t"]).astype(jnp.uint32), ids, axis=0)
    rows = p["t"].at[ids].get(mode="clip")
    return square(jnp.where(numbers > 8, 2 * rows, rows), p["w"])


def windows(t, ids):
    """Two rows from each id on; JAX clamps where they begin."""
    return jax.vmap(jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 2)))(ids)


def raw_windows(t, ids, **mode):
    numbers = lax.GatherDimensionNumbers((2, 3), (), (0,))
    return lax.gather(t, ids[..., None], numbers, (3, 4), **mode)


VECTOR = {"t": (R,), "w": (3,)}
DEEP = {"t": (R, 2, 4), "w": (4,)}
MANY = np.arange(20) % 7  # more ids than a table of ROWS has rows
PAIRS = [[1, 2, 1], [0, -1, 0]]

LOOKUPS = {
    # ids
    "scalar id": lookup(lambda t, i: t[i], 1, ids=3),
    "negative scalar id": lookup(lambda t, i: t[i], 1, ids=-2),
    "matrix of ids": lookup(lambda t, i: t[i]),
    "constant ids": lookup(lambda t, i: t[np.array([1, 2])], 2),
    "uint32 ids beyond int32": lookup(
        lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
        3,
        ids=[1, 2**31 + 1, 2**32 - 1],
        id_dtype="uint32",
        params=SMALL_TABLE,
    ),
    "as many ids as rows": lookup(lambda t, i: t[i], 16, ids=np.arange(16) % 7),
    "more ids than rows": lookup(
        lambda t, i: t[i], 16, ids=MANY, params={"t": (16, 4), "w": (4,)}
    ),
    "two lookups of more ids than rows": Case(
        lambda p, i: square(p["t"][i] * p["t"][i - 1], p["w"]),
        5,
        SMALL_TABLE,
        SMALL_IDS,
    ),
    "table of one row": lookup(
        lambda t, i: t[i], 1, ids=[0, 0], params={"t": (1, 4), "w": (4,)}
    ),
    # out of range, in every mode
    "index out of range": lookup(lambda t, i: no_nan(t[i]), ids=FAR_IDS),
    "index gives NaN": lookup(lambda t, i: t[i], ids=FAR_IDS, touches_more=True),
    **{
        f"take {mode}": lookup(
            lambda t, i, mode=mode: no_nan(jnp.take(t, i, axis=0, mode=mode)),
            ids=FAR_IDS,
        )
        for mode in ("clip", "wrap")
    },
    "take with fill_value": lookup(
        lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=2.0), ids=FAR_IDS
    ),
    "get without wrapping": lookup(
        lambda t, i: no_nan(t.at[i].get(mode="fill", wrap_negative_indices=False)),
        ids=FAR_IDS,
    ),
    "get promise_in_bounds": lookup(
        lambda t, i: t.at[i].get(mode="promise_in_bounds"), ids=[[0, 3], [5, 3]], nse=4
    ),
    "get sorted and unique": lookup(
        lambda t, i: t.at[i].get(indices_are_sorted=True, unique_indices=True),
        3,
        ids=[1, 4, 6],
    ),
    "fill of a scaled table": lookup(
        lambda t, i: no_nan(jnp.take(2 * t, i, axis=0)), ids=FAR_IDS
    ),
    "fill_value of a scaled table": lookup(
        lambda t, i: (2 * t).at[i].get(mode="fill", fill_value=1.0), ids=FAR_IDS
    ),
    "out of bounds in a table scaled by a parameter": Case(
        lambda p, i: jnp.sum(no_nan((jnp.sum(p["w"]) * p["t"])[i])), 3, ids=[0, 3, 99]
    ),
    "integers of the table, out of range": Case(integers, ids=FAR_IDS),
    # tables of other ranks, and more than one index
    "rank 1": lookup(lambda t, i: t[i], params=VECTOR),
    "rank 1, scalar id": Case(
        lambda p, i: jnp.square(p["t"][i]), 1, params={"t": (R,)}, ids=4
    ),
    "rank 3": lookup(lambda t, i: t[i], params=DEEP),
    "rank 3, i j": lookup(
        lambda t, i: t[i[0], i[1]], 3, params=DEEP, n_sparse=2, ids=PAIRS
    ),
    "rank 3, i j k": lookup(
        lambda t, i: t[i[0], i[1], i[1]],
        3,
        params={**DEEP, "w": (3,)},
        n_sparse=3,
        ids=PAIRS,
    ),
    "rank 3, i column": lookup(lambda t, i: t[i, 1], params=DEEP, n_sparse=2),
    "rank 3, i : j": lookup(
        lambda t, i: t[i[0], :, i[1]], 3, params={"t": (R, 4, 3), "w": (4,)}, ids=PAIRS
    ),
    "rank 3, width one": lookup(
        lambda t, i: t[i, 0], params={"t": (R, 1, 4), "w": (4,)}
    ),
    "i j": lookup(
        lambda t, i: t[i[0], i[1]],
        3,
        params={"t": (R, 4), "w": (3,)},
        n_sparse=2,
        ids=PAIRS,
    ),
    **{
        f"i j out of range, {mode}": lookup(
            lambda t, i, mode=mode: no_nan(t.at[i[0], i[1]].get(mode=mode)),
            4,
            n_sparse=2,
            ids=[[1, 2, 10**7, 1], [0, 9, 0, -9]],
            touches_more=True,
        )
        for mode in ("clip", "fill")
    },
    "more i j than elements": lookup(
        lambda t, i: t[i[0], i[1]],
        12,
        params={"t": (3, 4), "w": (20,)},
        n_sparse=2,
        ids=[np.arange(20) % 2, np.arange(20) % 3],
    ),
    "i :k": lookup(lambda t, i: t[i, :2], params={"t": (R, 4), "w": (2,)}),
    "i ::2": lookup(
        lambda t, i: t[i, ::2], 12, params={"t": (R, 4), "w": (2,)}, n_sparse=2
    ),
    "i and i j": Case(mixed, 9),
    "i and i j, more than rows": Case(mixed, 5, SMALL_TABLE, SMALL_IDS),
    # other ways to read rows
    "dynamic_slice": lookup(lambda t, i: lax.dynamic_slice_in_dim(t, i, 3), 3, ids=4),
    "dynamic_slice of columns": lookup(
        lambda t, i: lax.dynamic_slice(t, (i, jnp.int32(1)), (3, 2)),
        3,
        params={"t": (R, 4), "w": (2,)},
        ids=4,
    ),
    "dynamic_slice of a scaled table": lookup(
        lambda t, i: lax.dynamic_slice_in_dim(2 * t, i, 3), 3, ids=4
    ),
    "windows": lookup(windows, 12),
    "windows of columns": lookup(
        lambda t, i: jax.vmap(
            lambda k: lax.dynamic_slice(2 * t, (k, jnp.int32(1)), (2, 2)), out_axes=1
        )(i),
        12,
        params={"t": (R, 4), "w": (2,)},
        ids=[1, 2, 1, 0, -1, 0],
    ),
    "windows of a vector": lookup(windows, 12, params={"t": (R,), "w": (2,)}),
    "axis -2": lookup(lambda t, i: jnp.take(t, i, axis=-2)),
    # one row at a constant index
    "static index": lookup(lambda t, i: t[-1], 1),
    "static index, twice": lookup(lambda t, i: t[3] * t[3], 2),
    "static index and ids": lookup(lambda t, i: t[0, None, None] + t[i], 7),
    "static index of a scaled table": lookup(lambda t, i: (2 * t)[-2], 1),
    "static index, columns": lookup(
        lambda t, i: t[2, 1:3], 1, params={"t": (R, 4), "w": (2,)}
    ),
    "static index, element": Case(lambda p, i: p["t"][2, 1] ** 2, 1, n_sparse=2),
    "static slice of one row": lookup(lambda t, i: t[5:6], 1),
    # a table for each of a batch
    "stack of tables": lookup(
        jax.vmap(lambda t, i: t[i]), params={"t": (2, R, 4), "w": (4,)}, n_sparse=2
    ),
    "stack of tables, fill": lookup(
        jax.vmap(lambda t, i: no_nan(t[i])),
        params={"t": (2, R, 4), "w": (4,)},
        n_sparse=2,
        ids=FAR_IDS,
    ),
    "stack of tables, scalar ids": lookup(
        lambda t, i: jax.vmap(lambda t, j: t[j])(t, i[:, 0]),
        2,
        params={"t": (2, R, 4), "w": (4,)},
        n_sparse=2,
    ),
    "stack of tables, windows": lookup(
        jax.vmap(lambda t, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, 2))(i)),
        12,
        params={"t": (2, R, 4), "w": (4,)},
        n_sparse=2,
    ),
    "stack of scaled tables": lookup(
        lambda t, i: jax.vmap(lambda t, j: (2 * t)[j])(t, i),
        params={"t": (2, R, 4), "w": (4,)},
        n_sparse=2,
    ),
    # nothing looked up
    "no use": Case(lambda p, i: jnp.sum(p["w"]), 0),
    "stopped": Case(lambda p, i: square(lax.stop_gradient(p["t"])[i], p["w"]), 0),
    "no ids": lookup(lambda t, i: t[i], 0, ids=np.zeros((0, 3))),
    # several lookups and several tables
    "two lookups": Case(lambda p, i: square(p["t"][i] * p["t"][i - 1], p["w"]), 12),
    "masked rows": Case(
        lambda p, i: square(jnp.where((i > 0)[..., None], p["t"][i], 0), p["w"]),
        touches_more=True,
    ),
    "two tables": Case(
        lambda p, i: square(p["t"][i] * p["s"][i - 1], p["w"]), {"t": 6, "s": 6}, TABLES
    ),
    "two tables, one small": Case(
        lambda p, i: square(p["t"][i] * p["s"][i % 5], p["w"]),
        {"t": 6, "s": 5},
        {**TABLES, "s": (5, 4)},
    ),
    "two tables, one dense": Case(
        lambda p, i: square(p["t"][i] * p["s"][i], p["w"]) + jnp.sum(p["s"] * p["s"]),
        6,
        TABLES,
    ),
    "low-rank correction": Case(
        lambda p, i: square(p["t"][i] + p["a"][i] @ p["b"], p["w"]),
        {"t": 6, "a": 6},
        {"t": (R, 4), "a": (R, 2), "b": (2, 4), "w": (4,)},
    ),
    "bfloat16 table": lookup(lambda t, i: t[i], dtype="bfloat16", ulps=4),
}


def carry_halved(p, ids):
    return jnp.sum(lax.scan(lambda t, i: (t / 2, t[i]), p["t"], ids)[1])


DENSE = {
    "tied output weights": lambda p, i: jnp.sum(jnp.square(p["t"][i] @ p["t"].T)),
    "weight decay": lambda p, i: square(p["t"][i], p["w"]) + jnp.sum(p["t"] * p["t"]),
    "norm": lambda p, i: square(p["t"][i], p["w"]) * jnp.linalg.norm(p["t"]),
    "whole": lambda p, i: jnp.sum(p["t"] @ p["w"]),
    "static slice": lambda p, i: square(p["t"][2:5], p["w"]),
    "static index and a slice": lambda p, i: square(p["t"][:3] * p["t"][3:4], p["w"]),
    "each row by a static index": lambda p, i: sum(
        square(p["t"][row], p["w"]) for row in range(-3, 13)
    ),
    "windows that may be filled": lambda p, i: square(
        raw_windows(p["t"], i + 13, mode="fill", fill_value=2), p["w"]
    ),
    # JAX reads clamped ones, and gives them no gradient.
    "windows that break a promise": lambda p, i: square(
        raw_windows(p["t"], i + 13), p["w"]
    ),
    "matmul, then lookup": lambda p, i: square((p["t"] @ jnp.diag(p["w"]))[i], p["w"]),
    "transpose": lambda p, i: square(p["t"].T[i % 4, :4], p["w"]),
    "row appended": lambda p, i: square(
        jnp.concatenate([p["t"], jnp.zeros((1, 4))])[i], p["w"]
    ),
    "row set": lambda p, i: square(p["t"].at[0].set(0.0)[i], p["w"]),
    "centred": lambda p, i: square((p["t"] - p["t"].mean(0, keepdims=True))[i], p["w"]),
    "an id for each column": lambda p, i: square(
        jnp.take_along_axis(p["t"], i[:, :1] * jnp.arange(4)[None], axis=0), p["w"]
    ),
    "carried and halved": carry_halved,
    "decay in a scan": lambda p, ids: lax.scan(
        lambda c, i: (c + square(p["t"][i], p["w"]) + jnp.sum(p["t"]), None), 0.0, ids
    )[0],
    "rows as the input of a scan": lambda p, ids: lax.scan(
        lambda c, row: (c + square(row, p["w"]), None), 0.0, p["t"]
    )[0],
    "decay in a branch": lambda p, i: lax.cond(
        i[0, 0] == 0, lambda: jnp.sum(p["t"]), lambda: square(p["t"][i], p["w"])
    ),
    "branch that returns the table": lambda p, i: square(
        lax.cond(i[0, 0] == 0, lambda: p["t"], lambda: 2 * p["t"])[i], p["w"]
    ),
    "decay under checkpoint": lambda p, i: jax.checkpoint(
        lambda t: square(t[i], p["w"]) + jnp.sum(t)
    )(p["t"]),
}
DENSE = {name: Case(loss, None, ulps=ROUNDED) for name, loss in DENSE.items()}
# A square table keeps its shape through what moves its rows.
DENSE["transpose of a square table"] = lookup(
    lambda t, i: t.T[i], None, params={"t": (4, 4), "w": (4,)}, ids=[0, 1, 3]
)
