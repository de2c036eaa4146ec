"""Lookups of a table of which some rows are trained, and all others are frozen.

An optimiser moves the rows that it knows of: by their gradients, by their momentum, by
weight decay. So no mask on gradients or updates freezes a row under each of them. Here
it is given no frozen row at all. Of a table of 8 rows, of which 2, 5 and 9 are trained:

    frozen   [r0 r1 r2 r3 r4 r5 r6 r7]     all rows; those of 2 and 5 are not read
    rows     [2 5 9]                       9 is a new one
    trained  [t2 t5 t9]                    the parameter, with a state of three rows
    ids      [1 5 9 8]  ->  [r1 t5 t9 0]   8 is in neither: padding
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from .._jax_extras.sharding import (
    call_with_auto_axes,
    mesh_axes,
    mesh_of,
    partitions_of,
)
from .bags import as_array
from .lookups import look_up_padded
from .padding import expand_like, narrow_ids

_NAME = "frozen_lookup"


def frozen_lookup(
    trained: jax.Array, ids: ArrayLike, *, frozen: ArrayLike, rows: ArrayLike
) -> jax.Array:
    """Rows of a table of which some are trained and all others stay, bit for bit.

    Give `trained` to the optimiser, and `frozen` to the loss as an argument that is not
    differentiated: then no optimiser, momentum or weight decay can move a frozen row,
    and the state is that of the trained rows only. The gradient of `trained` is
    row-sparse; the frozen ids of a batch are padding in it.

    Args:
      trained: The rows that are trained, `[n, ...]`, in the order of `rows`.
      ids: Which rows to look up, integers of any shape. What is in neither table, a
        negative id too, is padding: it reads zeros, and touches nothing.
      frozen: The table, `[num_rows, ...]`, of any floating-point type. Its own rows at
        `rows` are not read.
      rows: The ids of the trained rows, `[n]`, ascending, each there once. They may lie
        behind the frozen table, as new tokens do: `np.arange(50_257, 50_267)`.

    Returns:
      The rows, `[*ids.shape, ...]`, in the type of `trained`. Over Explicit mesh axes
      they lie as `ids` do, and along columns as `trained`, but for axes that split ids.

    Raises:
      TypeError: If `ids` or `rows` are not integers, or a table is not of floating
        point.
      ValueError: If the shapes do not fit, `jax.export` leaves the number of trained
        rows free, or `rows` is not ascending, or holds ids of more than 32 bits. In a
        compiled program that does not know `rows` the result is NaN.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax_sparse_adam as osa
      >>> frozen, rows = jnp.ones((1000, 4)), np.array([2, 5, 1000])
      >>> trained = jnp.zeros((3, 4))
      >>> def loss(trained, frozen, ids):
      ...     looked_up = osa.frozen_lookup(trained, ids, frozen=frozen, rows=rows)
      ...     return jnp.sum((looked_up - 3) ** 2)
      >>> tx = osa.exact_adamw(0.1)
      >>> step = osa.make_train_step(loss, tx)
      >>> trained, state, value = step(
      ...     trained, tx.init(trained), frozen, jnp.array([7, 1000])
      ... )
      >>> trained, state = osa.flush(trained, state)
      >>> [round(x, 4) for x in trained[:, 0].tolist()]
      [0.0, 0.0, 0.1]
    """
    trained, frozen = jnp.asarray(trained), lax.stop_gradient(jnp.asarray(frozen))
    passed, ids, rows = rows, as_array(ids, _NAME), as_array(rows, _NAME)
    _check(trained, ids, frozen, rows)
    size = frozen.shape[0]
    ids, rows = narrow_ids(ids, size), narrow_ids(rows, size)
    is_ascending = _is_ascending(passed, rows)
    columns = _columns_beside(ids, trained)
    place = _places(rows, ids)
    is_trained = _is_at(rows, place, ids)
    # Each id is out of bounds of the table that it is not of: reads zeros there, and is
    # padding in its gradient.
    is_frozen = ~is_trained & (ids >= 0)
    learned = _read(trained, _where(is_trained, place), columns)
    fixed = _read(frozen, _where(is_frozen, ids), columns).astype(learned.dtype)
    result = jnp.where(expand_like(is_trained, learned), learned, fixed)
    return result if is_ascending is True else jnp.where(is_ascending, result, jnp.nan)


def _places(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Where each id stands among the rows, or would."""
    search: Any = jnp.searchsorted
    return call_with_auto_axes(search, rows, ids, like=ids, axes=range(ids.ndim))


def _is_at(rows: jax.Array, place: jax.Array, ids: jax.Array) -> jax.Array:
    """Whether each id is that of its place among the rows."""
    if not len(rows):
        return jnp.zeros_like(ids, bool)
    # An id above all of them is not the last one; checkify reports places behind it.
    place = jnp.minimum(place, np.asarray(len(rows) - 1, place.dtype))
    layout = _layout(rows, place, ())
    near = rows.at[place].get(mode="promise_in_bounds", out_sharding=layout)
    return (near == ids) & (ids >= 0)


def _where(flags: jax.Array, ids: jax.Array) -> jax.Array:
    """The ids, and elsewhere one that is out of bounds of every table."""
    return jnp.where(flags, ids, np.asarray(jnp.iinfo(ids.dtype).max, ids.dtype))


def _columns_beside(ids: jax.Array, table: jax.Array) -> tuple[Any, ...]:
    """How rows lie on Explicit mesh axes: as the columns of a table do.

    But for the axes that split the ids, each of which splits one axis only.
    """
    used = {x for axis in _partitions(ids) for x in mesh_axes(axis)}
    columns = _partitions(table)[1:]
    return tuple(None if used & {*mesh_axes(axis)} else axis for axis in columns)


def _partitions(x: jax.Array) -> tuple[Any, ...]:
    return partitions_of(jax.typeof(x).sharding.spec)


def _layout(
    table: jax.Array, ids: jax.Array, columns: tuple[Any, ...]
) -> NamedSharding | None:
    """How looked-up rows lie, on Explicit mesh axes."""
    if not (mesh := mesh_of(table, ids)).explicit_axes:
        return None
    return NamedSharding(mesh, PartitionSpec(*_partitions(ids), *columns))


def _read(table: jax.Array, ids: jax.Array, columns: tuple[Any, ...]) -> jax.Array:
    """`table[ids]`, zeros for padding."""
    if isinstance(table.shape[0], int) and not len(table):  # JAX reads nothing of it
        return jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    layout = _layout(table, ids, columns)
    if layout is None:
        return look_up_padded(table, ids)
    rows: jax.Array = table.at[ids].get(mode="fill", fill_value=0, out_sharding=layout)
    return rows


def _check(trained: Any, ids: Any, frozen: Any, rows: Any) -> None:
    for name, array in (("ids", ids), ("rows", rows)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                f"{_NAME} takes `{name}` that are integers, got {array.dtype} of shape "
                f"{array.shape}. For a mask give np.flatnonzero(mask)."
            )
    for name, table in (("trained", trained), ("frozen", frozen)):
        if not jnp.issubdtype(table.dtype, jnp.floating):
            raise TypeError(
                f"{_NAME} takes tables of floating point, got {table.dtype} for "
                f"`{name}`, of shape {table.shape}."
            )
    if trained.ndim < 1 or trained.shape[1:] != frozen.shape[1:] or frozen.ndim < 1:
        raise ValueError(
            f"{_NAME} takes tables whose rows have one shape, got {trained.shape} for "
            f"`trained` and {frozen.shape} for `frozen`."
        )
    if not isinstance(trained.shape[0], int):
        raise ValueError(
            f"{_NAME} takes a known number of trained rows, got {trained.shape} for "
            "`trained`. jax.export may leave the sizes of `ids` and `frozen` free."
        )
    if rows.shape != trained.shape[:1]:
        raise ValueError(
            f"{_NAME} takes one id in `rows` for each row of `trained`, got shape "
            f"{rows.shape} for a table of shape {trained.shape}."
        )


def _is_ascending(passed: Any, rows: jax.Array) -> Any:
    """Whether each of these ids is there once, in order: raises where it is known.

    The last number of their type stands for all ids above it (`narrow_ids`).
    """
    last = jnp.iinfo(rows.dtype).max
    if isinstance(rows, jax.core.Tracer) and isinstance(passed, jax.core.Tracer):
        is_held = jnp.all(rows[:1] >= 0) & jnp.all(rows[-1:] < last)
        return jnp.all(rows[1:] > rows[:-1]) & is_held
    values = np.asarray(passed)
    if not ((values[1:] > values[:-1]).all() and (values[:1] >= 0).all()):
        raise ValueError(
            f"{_NAME} takes `rows` in ascending order, each there once and none "
            "negative, as np.unique returns them; got others."
        )
    if not (values[-1:] < last).all():
        raise ValueError(
            f"{_NAME} takes `rows` below {last}, got {values[-1]}. Number the trained "
            "rows as rows of the table, or behind it; for keys of 64 bits there is "
            "optax_sparse_adam.Vocabulary."
        )
    return True
