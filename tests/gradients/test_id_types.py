"""Ids of every integer type, far out of range, in every mode: the gradient of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_sparse_adam as osa

from ..helpers.gradients import assert_same, dense, is_bcoo
from ..helpers.lookup_cases import no_nan
from ..helpers.support import slow_but

ROWS = 5
TYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def ids_of(dtype):
    """Inside, around both ends of the table, around those of int32, and of the type."""
    ends = jnp.iinfo(dtype)
    numbers = [0, 3, 4, 5, -1, -5, -6, 2**31 - 1, 2**31, 2**32 - 1, ends.min, ends.max]
    fitting = [x for x in numbers if ends.min <= x <= ends.max]
    return np.asarray([*fitting, ends.max - 1], dtype)


def take(mode):
    return lambda t, ids: no_nan(jnp.take(t, ids, axis=0, mode=mode))


def get(mode, **kwargs):
    return lambda t, ids: no_nan(t.at[ids].get(mode=mode, **kwargs))


def gather(mode):
    """JAX's own functions prepare ids; a gather gets them as they are."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lambda t, ids: no_nan(
        lax.gather(t, ids[:, None], numbers, (1, t.shape[1]), mode=mode)
    )


def of_each(read):
    """By a single id at a time, of which the last ones are far out."""
    return lambda t, ids: jnp.stack([read(t, ids[n]) for n in (1, -3, -2, -1)])


def windows(t, ids):
    starts = [ids[n] for n in (1, -3, -2, -1)]
    return jnp.concatenate([lax.dynamic_slice(t, (i, i), (2, 3)) for i in starts])


READS = {
    "indexing": lambda t, ids: no_nan(t[ids]),
    "indexing, scaled": lambda t, ids: no_nan((2 * t)[ids]),
    **{f"take {mode}": take(mode) for mode in ("clip", "fill", "wrap")},
    **{f"get {mode}": get(mode) for mode in ("clip", "drop", "fill")},
    "get, as they are": get("fill", wrap_negative_indices=False),
    **{f"gather {mode}": gather(mode) for mode in ("clip", "fill")},
    "scalar": of_each(lambda t, i: t[i]),
    "take of a scalar": of_each(take("clip")),
    "dynamic_index_in_dim": of_each(lambda t, i: lax.dynamic_index_in_dim(t, i)[0]),
    "dynamic_slice": windows,
    **{f"stack, {mode}": jax.vmap(take(mode)) for mode in ("clip", "fill")},
    "stack, scalar": jax.vmap(of_each(lambda t, i: t[i])),
    "branches": lambda t, ids: lax.cond(
        ids[0] == 0, lambda: no_nan(t[ids]), lambda: no_nan(t[ids.astype("int32")])
    ),
    "promise": lambda t, ids: t.at[ids % ROWS].get(mode="promise_in_bounds"),
}


@pytest.mark.parametrize("dtype", slow_but(TYPES, "uint8"))
def test_as_jax(dtype):
    with jax.enable_x64("64" in dtype), jax.numpy_dtype_promotion("standard"):
        table = jnp.asarray(np.arange(1, 4 * ROWS + 1).reshape(ROWS, 4) / 8, "float32")
        ids = jnp.asarray(ids_of(dtype))

        def loss(read):
            return lambda table, ids: jnp.sum(jnp.square(read(table, ids)))

        @jax.jit
        def gradients(table, ids):
            found = {}
            for name, read in READS.items():
                args = (table, ids)
                if "stack" in name:
                    args = (jnp.stack([table, 2 * table]), jnp.stack([ids, ids[::-1]]))
                found[name] = [lib.grad(loss(read))(*args) for lib in (osa, jax)]
            return found

        for name, (ours, theirs) in gradients(table, ids).items():
            assert is_bcoo(ours), name
            assert_same(dense(ours), theirs, what=name)
