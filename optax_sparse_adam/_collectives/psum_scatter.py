"""Sums of gradients over devices: each row's gradient travels only to its owner."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.sparse import BCOO

from .._rows.checks import check_bcoo, is_bcoo, is_leaf
from .._rows.coalesce import coalesce
from .._rows.entries import coalesced_bcoo
from .._rows.padding import in_bounds
from .psum import AxisName, local_rows, psum, rows_per_device
from .routing import make_route, plan_exchange, to_owners


def psum_scatter(
    grads: Any,
    axis_name: AxisName,
    *,
    capacity: int | None = None,
    max_rounds: int | None = None,
) -> Any:
    """Sums gradients over devices and leaves each device the rows that it owns.

    `lax.psum_scatter(grads, axis_name, tiled=True)` for trees with row-sparse leaves,
    inside of `jax.shard_map`. Each device has a gradient of the whole table, from its
    share of the batch; the result is the gradient of its shard, for a table sharded by
    rows. Of a BCOO leaf, duplicates are added up and each row is sent to its owner by
    `lax.all_to_all`, in rounds of at most `capacity` rows for each pair of devices, as
    many as the fullest pair needs. With `n` rows stored on each of `d` devices, a
    device sends `(d - 1) * capacity` rows in one round, by default about
    `n + 6 * sqrt(n * d)`; where `capacity` is `n` or more, all rows are gathered
    instead, `(d - 1) * n` of them. See `sharded_lookup`, whose gradient needs no
    `psum_scatter`, for the rule and for ids sorted by frequency.

    Args:
      grads: Tree of gradients; dense `[num_rows, ...]`, BCOO of this shape, or `None`.
      axis_name: Mesh axis along which the table is sharded, or a tuple of several.
      capacity: Rows for each pair of devices in one round.
      max_rounds: The most rounds to make room for, as many as the worst case needs by
        default. Where fewer are not enough, all rows stored are NaN, on all devices.

    Returns:
      The tree with leaves of shape `[num_rows / devices, ...]`. A BCOO is coalesced
      (see `coalesce`: ascending local ids, padding above the last row) and stores
      `devices * capacity * max_rounds` rows, `devices * n` if gathered, or all rows of
      the shard if these are fewer.

    Raises:
      TypeError: If the indices of a BCOO are not integers, or its values not floating
        point.
      ValueError: If a BCOO is not row-sparse, `num_rows` is not a multiple of the
        number of devices, or `capacity` or `max_rounds` is below 1.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> from jax.sharding import PartitionSpec as P
      >>> import optax_sparse_adam as osa
      >>> mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
      ... def summed(data, indices):
      ...     grad = osa.psum_scatter(BCOO((data, indices), shape=(10, 1)), "d")
      ...     return grad.data, grad.indices
      >>> data, indices = summed(jnp.ones((3, 1)), jnp.array([[7], [3], [7]]))
      >>> indices.ravel().tolist(), data.ravel().tolist()
      ([3, 7, 12], [1.0, 2.0, 0.0])
    """

    def one(grad: Any) -> Any:
        if grad is None:
            return None
        if not is_bcoo(grad):
            return lax.psum_scatter(grad, axis_name, tiled=True)
        check_bcoo(grad)
        shape = (rows_per_device(grad.shape[0], axis_name), *grad.shape[1:])
        most = math.prod(shape[: grad.n_sparse])
        exchange = plan_exchange(
            axis_name, shape[0], most, grad.nse, capacity, max_rounds
        )
        if not exchange.is_routed:
            return local_rows(psum(grad, axis_name), axis_name)
        # A row leaves a device once, in ascending order, as `make_route` needs it.
        grad = coalesce(grad)
        count = jnp.sum(in_bounds(grad.indices, grad.shape), dtype=jnp.int32)
        route = make_route(exchange, grad.indices, count)
        indices, data = to_owners(exchange, route, grad.data)
        total = coalesce(BCOO((data, indices), shape=shape))
        # What follows is padding.
        return coalesced_bcoo(grad, total.indices[:most], total.data[:most], shape)

    return jax.tree.map(one, grads, is_leaf=is_leaf)
