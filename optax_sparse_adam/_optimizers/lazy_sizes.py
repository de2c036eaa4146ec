"""Refuses inside `lazy` what depends on how many rows a table has.

A mask or a label may be a function of the parameters: `optax.masked(tx, mask)` calls
`mask(updates)`. Inside `lazy` that is a tree of a few rows, `[nse, ...]` in place of
`[num_rows, ...]`, so a mask by size would choose other leaves than for the table, and
weight decay, say, be off in silence. Nothing tells which function asks for a shape;
but an update that chooses other leaves has other operations:

    mask = lambda tree: jax.tree.map(lambda x: x.size > 1000, tree)
    optax.add_decayed_weights(0.1, mask)
    # operations of a [1000, 4] table: mul add;  of its [3, 4] touched rows: none

The update is traced for both sizes, without memory or computation, and compared. Known
limit: choices between leaves for which the same operations are done alike.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

_MESSAGE = (
    "lazy runs the inner transformation on the touched rows of a table only, and this "
    "one would do something else to a table of {rows} rows than to {nse} rows of it: "
    "it asks for their number, as masks and labels do that are a function of the sizes "
    "of parameters{cause}. Call such a function with the parameters first, and give "
    "the tree that it returns, as in optax.masked(inner, mask(params))."
)

# `stochastic_rounding` draws bits once for two arrays of one shape, and the compact
# rows of two tables may have one by chance.
_DRAWS = frozenset(["random_bits", "shift_left", "shift_right_logical", "or"])


def size_error(rows: int, nse: Any, cause: Any = None) -> ValueError:
    words = ""
    if cause is not None:
        first = str(cause).partition("\n")[0].rstrip(".:")
        words = f" (these rows raise {type(cause).__name__}: {first})"
    return ValueError(_MESSAGE.format(rows=rows, nse=nse, cause=words))


def operations(function: Callable[..., Any], args: Any) -> list[Any]:
    """The operations of a function, and how many axes their results have."""
    return list(_operations(jax.make_jaxpr(function)(args).jaxpr))


def _operations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _DRAWS:
            continue
        depths = (len(getattr(var.aval, "shape", ())) for var in eqn.outvars)
        yield eqn.primitive.name, *depths
        for param in jax.tree.leaves(eqn.params):
            if isinstance(param, ClosedJaxpr | Jaxpr):
                yield from _operations(getattr(param, "jaxpr", param))


Arrays = list[Any]


def check_sizes(
    update: Callable[[list[Arrays]], Any],
    arrays: list[Arrays],
    owners: list[list[int | None]],
    depths: dict[int, int],
    nse: dict[int, int],
    checked: set[Any],
) -> None:
    """Raises unless an update does to the touched rows what it does to a table.

    Args:
      update: The inner transformation's, of gradients, state and parameters.
      arrays: Its arguments for whole tables; only their shapes and types matter.
      owners: For each of these arrays the number of the table whose rows it holds.
      depths: For each table, by its number, how many leading axes number its rows.
      nse: For each table how many rows are touched at most.
      checked: What has been found to be right is added here, and not looked at again.

    Raises:
      ValueError: If it does not.
    """
    heights = {i: math.prod(arrays[0][i].shape[:depth]) for i, depth in depths.items()}
    # Two rows for none: of arrays without elements JAX computes less.
    small = {i: rows or min(2, heights[i]) for i, rows in nse.items()}
    whole, compact = (
        [
            [_sized(x, i, depths, rows) for x, i in zip(*group, strict=True)]
            for group in zip(arrays, owners, strict=True)
        ]
        for rows in (heights, small)
    )
    key = tuple((x.shape, x.dtype) for x in jax.tree.leaves((whole, compact)))
    if key in checked:
        return
    try:
        expected = operations(update, whole)
    except Exception:  # of no table, so there is nothing that it ought to do
        return
    table = max(heights, key=lambda i: heights[i])
    sizes = heights[table], nse[table]
    try:
        found = operations(update, compact)
    except Exception as error:
        raise size_error(*sizes, error) from error
    if found != expected:
        raise size_error(*sizes)
    checked.add(key)


def _sized(x: Any, table: int | None, depths: dict[int, int], rows: Any) -> Any:
    """An array of a table, or another one, with so many rows; nothing is computed.

    Of several sparse axes one is left, as of touched rows.
    """
    if x is None:
        return None
    dtype = jnp.result_type(x) if jnp.isscalar(x) else x.dtype
    shape = jnp.shape(x)
    if table is not None:
        shape = (rows[table], *shape[depths[table] :])
    return jax.ShapeDtypeStruct(shape, dtype)
