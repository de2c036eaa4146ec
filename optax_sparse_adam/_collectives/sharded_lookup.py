"""Lookups of row-sharded tables: each row travels only to devices that look it up."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax_extras.sharding import first_row
from .._jax_extras.varying_axes import vary, varying_axes
from .._rows.bags import as_array
from .._rows.entries import accumulator_dtype
from .._rows.padding import pad_indices
from .._rows.segments import segment_rows, sum_segments
from .psum import AxisName, rows_per_device
from .routing import (
    Exchange,
    Route,
    from_owners,
    make_route,
    plan_exchange,
    read_rows,
    to_owners,
)


def sharded_lookup(
    table: jax.Array,
    ids: jax.Array,
    axis_name: AxisName,
    *,
    capacity: int | None = None,
    max_rounds: int | None = None,
) -> jax.Array:
    """`table[ids]` for a table sharded by rows, inside of `jax.shard_map`.

    Each device holds a block of consecutive rows, as JAX shards by `P(axis_name)`, and
    looks up rows of the whole table. Duplicates are requested once. The ids go to the
    owners of their rows and the rows come back by `lax.all_to_all`, in rounds: in each,
    at most `capacity` rows for each pair of devices. All devices go on for as many
    rounds as the fullest pair needs, so nothing is lost, however skewed the ids are.

    The gradient travels the same way back. To `value_and_grad` this is a lookup of the
    local shard: inside of `shard_map` its gradient is a BCOO of the shard, for
    `sparse_adam` and `apply_updates` there. It has `devices * capacity` rows for each
    round that there may be, most of them padding: `ceil(n / capacity)` rounds for `n`
    ids on a device, unless `max_rounds` says fewer. What does not fit is then NaN, in
    the rows and in the whole gradient; see `lookup_rounds` to know before.

    With `n` ids on each of `d` devices along `axis_name` and rows of `w` bytes, a
    device sends in one round `(d - 1) * capacity` ids (4 bytes, as a rule) and as many
    rows, and in the gradient once more; by default, `capacity` is
    `ceil(n / d + 6 * sqrt(n / d))` or `n` if that is less. So it sends about
    `n + 6 * sqrt(n * d)` rows, where the gathered form, in which every id goes to every
    device and every device answers, sends `(d - 1) * n`. Where `capacity` is `n` or
    more, routing saves nothing, and the gathered form is used. The default suits rows
    that are spread evenly: where ids are sorted by frequency, the first shard owns the
    hot ones, and an exchange takes several rounds, at most as many as make it about as
    expensive as the gathered form. Permute the rows of such a table once.

    Out of bounds, ids mean what they mean in `table[ids]`: negative ones count from the
    end, the others read the nearest row and have no gradient. Reverse mode only, as of
    any function with a custom derivative; under `vmap` the gradient is dense, so pass
    ids of any shape instead.

    Args:
      table: `[num_rows / devices, ...]`, this device's rows. Cast the rows that come
        back, not the table.
      ids: Integers of any shape: rows of the whole table, this device's own share.
      axis_name: Mesh axis along which the table is sharded, or a tuple of several.
      capacity: Rows for each pair of devices in one round.
      max_rounds: The most rounds to make room for; as many as the worst case needs by
        default.

    Returns:
      `[*ids.shape, *table.shape[1:]]`.

    Raises:
      TypeError: If the ids are not integers.
      ValueError: If `capacity` or `max_rounds` is below 1, or the table has too many
        rows for the type of the ids.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> import optax_sparse_adam as osa
      >>> mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
      ... def lookup(table, ids):
      ...     return osa.sharded_lookup(table, ids, "d")
      >>> lookup(jnp.arange(10.0).reshape(10, 1), jnp.array([7, 3, 7])).ravel().tolist()
      [7.0, 3.0, 7.0]
    """
    ids = as_array(ids, "sharded_lookup")
    exchange = _plan_exchange(axis_name, table.shape[0], ids.size, capacity, max_rounds)
    flat = _row_ids(ids, exchange).reshape(-1)
    table, flat = _vary_equally(table, flat)
    if ids.size == 0:
        rows = read_rows(table, flat)
    elif exchange.is_routed:
        route, segment = _route(exchange, flat)
        # The gradient is that of a lookup of the rows that other devices request here,
        # which `value_and_grad` knows as one. XLA drops this lookup: only its
        # derivative is used.
        nothing = jnp.zeros((len(flat), 0), table.dtype)
        local = to_owners(exchange, route, nothing)[0][:, 0]
        requested_rows = table.at[local].get(mode="fill", wrap_negative_indices=False)
        table = lax.stop_gradient(table)
        rows = _lookup_by_routing(exchange, requested_rows, table, route, segment)
    else:  # all ids go to all devices, which answer for all, and owners are right
        # `[devices * n]` ids; after `swap`, block p is device p's answer to our ids.
        everyone = lax.all_gather(flat, axis_name, tiled=True)
        first = first_row(axis_name, exchange.shard_rows, flat.dtype)
        rows = exchange.swap(read_rows(table, everyone - first))
        rows = rows.reshape(exchange.devices, len(flat), *table.shape[1:])
        owner = jnp.clip(flat // exchange.shard_rows, 0, exchange.devices - 1)
        rows = rows[owner, jnp.arange(len(flat), dtype=owner.dtype)]
    return rows.reshape(*ids.shape, *table.shape[1:])


def lookup_rounds(
    ids: jax.Array,
    num_rows: int,
    axis_name: AxisName,
    *,
    capacity: int | None = None,
) -> jax.Array:
    """How many rounds `sharded_lookup` of these ids takes, inside of `jax.shard_map`.

    A gradient with room for one round is `devices` times smaller than one with room for
    the worst case. Where ids are read ahead, find out how much room they need, and
    choose among steps compiled with a static `max_rounds`. (Choose in Python: a
    `lax.cond` around whole steps would copy the tables.)

    Args:
      ids: As for `sharded_lookup`.
      num_rows: Rows of the whole table.
      axis_name: Mesh axis along which the table is sharded, or a tuple of several.
      capacity: As for `sharded_lookup`.

    Returns:
      An `int32` scalar, the same on all devices along `axis_name`.

    Raises:
      TypeError: If the ids are not integers.
      ValueError: As `sharded_lookup`; or if the rows do not divide evenly.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> import optax_sparse_adam as osa
      >>> mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P())
      ... def rounds(ids):
      ...     return osa.lookup_rounds(ids, 10, "d", capacity=2)
      >>> rounds(jnp.array([7, 3, 7, 1])).item()
      2
    """
    ids = as_array(ids, "lookup_rounds")
    shard_rows = rows_per_device(num_rows, axis_name)
    exchange = _plan_exchange(axis_name, shard_rows, ids.size, capacity, None)
    if not exchange.is_routed:
        return jnp.ones([], jnp.int32)
    flat = _row_ids(ids, exchange).reshape(-1)
    return _route(exchange, *_vary_equally(flat))[0].rounds


def _plan_exchange(axis_name: AxisName, shard_rows: int, *sizes: Any) -> Exchange:
    # Ids below the table are sent to the first owner as one row more, ids above the
    # table to the last owner (`_row_ids`).
    return plan_exchange(axis_name, shard_rows, shard_rows + 2, *sizes)


def _row_ids(ids: jax.Array, exchange: Exchange) -> jax.Array:
    """Row ids with the meaning of `table[ids]`; -1 or `num_rows` if out of bounds."""
    num_rows = exchange.devices * exchange.shard_rows
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"Row ids must be integers, got an array of type {ids.dtype}.")
    signed = jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32
    largest = jnp.iinfo(signed).max
    if jnp.iinfo(ids.dtype).max > largest:
        ids = jnp.minimum(ids, np.asarray(largest, ids.dtype))
    ids = ids.astype(signed)
    if num_rows + 2 + ids.size > jnp.iinfo(ids.dtype).max:
        raise ValueError(
            f"Row ids of {ids.dtype} cannot index a sharded table of {num_rows} rows. "
            "Enable 64-bit types (jax_enable_x64) and pass int64 ids."
        )
    return jnp.clip(jnp.where(ids < 0, ids + num_rows, ids), -1, num_rows)


def _vary_equally(*arrays: jax.Array) -> list[jax.Array]:
    """Casts arrays to vary over each mesh axis over which one of them varies.

    The cotangent of `_lookup_by_routing` varies as its table does. JAX then sums it
    over the axes over which the caller's table does not vary.
    """
    axes = varying_axes(*arrays)
    return [vary(x, axes) for x in arrays]


def _route(exchange: Exchange, ids: jax.Array) -> tuple[Route, jax.Array]:
    """The distinct ids, and for each id its place among them."""
    size = (exchange.devices * exchange.shard_rows + 2,)
    # Plus one: -1, an id below the table, becomes a row of its own, not padding.
    # Ids [7, 3, 7]: distinct [3, 7, padding], segments [1, 0, 1].
    shifted, segment, count = segment_rows(ids[:, None] + 1, size)
    slot = jnp.arange(len(ids), dtype=jnp.int32)
    distinct = pad_indices(shifted, slot < count, slot, size) - 1
    return make_route(exchange, distinct, count), segment


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup_by_routing(
    exchange: Exchange,
    requested_rows: jax.Array,
    table: jax.Array,
    route: Route,
    segment: jax.Array,
) -> jax.Array:
    return from_owners(exchange, route, table, segment)


def _lookup_by_routing_bwd(exchange: Exchange, kept: Any, cotangent: jax.Array) -> Any:
    route, segment = kept
    # The cotangents of a row add up on this device, and one sum goes to its owner.
    data = cotangent.astype(accumulator_dtype(cotangent.dtype))
    sums = sum_segments(segment, data).astype(cotangent.dtype)
    _, rows = to_owners(exchange, route, sums)
    return rows, None, None, None


_lookup_by_routing.defvjp(
    lambda exchange, *args: (_lookup_by_routing(exchange, *args), args[2:]),
    _lookup_by_routing_bwd,
)
