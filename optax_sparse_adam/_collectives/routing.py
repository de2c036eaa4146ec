"""All-to-all exchange of rows with the devices that own them, in rounds.

This is the dispatch with a capacity of mixture-of-experts layers, with the owner of a
row in place of the expert, and as many rounds as it takes in place of dropped tokens.

Owners hold blocks of consecutive rows, so rows in ascending order are in the order of
their owners: device `p` owns the rows from `p * shard_rows` on. In each round a device
sends at most `capacity` rows to each owner, which is what a static shape allows. All
devices take part in as many rounds as the fullest pair needs.

Example: two devices own rows 0-4 and 5-9, and `capacity` is 2. A device with the rows
`[1, 3, 4, 7]` has `starts == [0, 3, 4]`: it sends rows 1 and 3 to the first owner and 7
to the second in round 0, and row 4 to the first owner in round 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._rows.duplicates import search
from .._rows.gather_scatter import gather_rows
from .psum import AxisName


def default_capacity(num_sent: int, devices: int) -> int:
    """Rows for each pair of devices, if `num_sent` rows have random owners.

    An owner's share is then a Poisson variable of mean and variance
    `num_sent / devices`. With six standard deviations above the mean, one round is
    enough for all but a few of a million pairs.
    """
    mean = num_sent / devices
    return min(num_sent, math.ceil(mean + 6 * math.sqrt(mean)))


class Exchange(NamedTuple):
    """The static sizes of an exchange of rows.

    Attributes:
      axis_name: Mesh axis or axes along which the table is sharded.
      devices: How many devices lie along these axes.
      shard_rows: How many rows each of them owns.
      num_sent: How many rows each device has for all devices together.
      capacity: How many rows each device sends to each device in one round.
      max_rounds: The most rounds; rows that are left after them are not sent.
      is_lossless: Whether `max_rounds` are always enough.
    """

    axis_name: AxisName
    devices: int
    shard_rows: int
    num_sent: int
    capacity: int
    max_rounds: int
    is_lossless: bool

    @property
    def is_routed(self) -> bool:
        """Whether sending each row to its owner is cheaper than gathering all rows.

        Gathering sends `num_sent` rows for each pair of devices, and sorts nothing.
        """
        return self.capacity < self.num_sent

    @property
    def slots(self) -> int:
        """How many rows a device sends, and receives, in one round."""
        return self.devices * self.capacity

    def swap(self, x: jax.Array) -> jax.Array:
        """Sends `x[p * capacity:(p + 1) * capacity]` to device `p`, for each `p`."""
        return lax.all_to_all(x, self.axis_name, 0, 0, tiled=True)


def plan_exchange(
    axis_name: AxisName,
    shard_rows: int,
    max_per_owner: int,
    num_sent: int,
    capacity: int | None,
    max_rounds: int | None,
) -> Exchange:
    """The sizes for `num_sent` rows a device, `max_per_owner` of them for one owner.

    Raises:
      ValueError: If the capacity or the number of rounds is not at least 1.
    """
    for name, value in (("capacity", capacity), ("max_rounds", max_rounds)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, or None, got {value}.")
    devices = lax.axis_size(axis_name)
    if capacity is None:
        capacity = default_capacity(num_sent, devices)
    capacity = min(capacity, num_sent)
    # 100 rows for 4 owners: a capacity of 25 + 6 * 5 = 55. If one owner has all of
    # them, two rounds are needed.
    enough = -(-min(num_sent, max_per_owner) // max(1, capacity))
    rounds = enough if max_rounds is None else min(max_rounds, enough)
    return Exchange(
        axis_name, devices, shard_rows, num_sent, capacity, rounds, rounds == enough
    )


class Route(NamedTuple):
    """Which rows a device has for which owner.

    Attributes:
      indices: `[num_sent, n_sparse]` in the whole table; ascending, no duplicates.
      starts: `[devices + 1]`; `indices[starts[p]:starts[p + 1]]` belong to device `p`.
      rounds: How many rounds the fullest pair needs; the same on all devices.
    """

    indices: jax.Array
    starts: jax.Array
    rounds: jax.Array


def make_route(exchange: Exchange, indices: jax.Array, count: jax.Array) -> Route:
    """The route of the first `count` rows; the rest is padding above the table."""
    firsts = np.arange(1, exchange.devices) * exchange.shard_rows
    # In the module's example: 3 rows lie below 5, the first row of device 1, so that
    # `starts` is [0, 3, 4]. The fuller pair has 3 rows: two rounds.
    inner = search(indices[:, 0], jnp.asarray(firsts, indices.dtype))
    ends = [jnp.zeros([1], jnp.int32), inner, count.reshape(1)]
    starts = jnp.concatenate(ends)
    rounds = -(-jnp.max(jnp.diff(starts)) // exchange.capacity)
    return Route(indices, starts, lax.pmax(rounds, exchange.axis_name))


def outgoing(exchange: Exchange, route: Route, round_index: Any) -> jax.Array:
    """The places of the rows to send in this round, then padding: `[slots, 1]`."""
    # `slot[p, c]`: the c-th row of this round for owner p, or padding after its last.
    # In the module's example: [[0, 1], [3, P]] in round 0, [[2, P], [P, P]] in round 1.
    begin = route.starts[:-1, None] + round_index * exchange.capacity
    slot = begin + jnp.arange(exchange.capacity, dtype=jnp.int32)[None, :]
    outside = exchange.num_sent + jnp.arange(exchange.slots, dtype=jnp.int32)
    inside = slot < route.starts[1:, None]
    slot = jnp.where(inside, slot, outside.reshape(slot.shape))
    return slot.reshape(exchange.slots, 1)


def incoming(exchange: Exchange, route: Route, slot: jax.Array) -> jax.Array:
    """The indices that other devices send to this owner: `[slots, n_sparse]`.

    The first column counts from the first row of the shard; padding is `shard_rows`.
    """
    # Block p of `local` is for device p, counted from its first row. After `swap`,
    # block p is what device p requests of this device.
    indices = gather_rows(route.indices, slot)
    owner = np.repeat(np.arange(exchange.devices), exchange.capacity)[:, None]
    local = indices[:, :1] - (owner * exchange.shard_rows).astype(indices.dtype)
    local = jnp.where(slot < exchange.num_sent, local, exchange.shard_rows)
    return exchange.swap(jnp.concatenate([local, indices[:, 1:]], axis=1))


def in_rounds(
    exchange: Exchange,
    route: Route,
    start: Callable[[Any], Any],
    step: Callable[[Any, Any], Any],
) -> Any:
    """Runs the first round by `start(0)`, each later one by `step(index, result)`.

    The first round is outside of the loop, so that XLA can overlap it with other work.
    """
    result = start(0)
    if exchange.max_rounds <= 1:
        return result
    rounds = jnp.minimum(route.rounds, exchange.max_rounds)
    return lax.fori_loop(1, rounds, step, result)


def to_owners(
    exchange: Exchange, route: Route, data: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sends each row to its owner.

    Args:
      exchange: The static sizes.
      route: Where the rows go.
      data: `[num_sent, *row_shape]`, the rows.

    Returns:
      The indices and the values of the rows that this device receives,
      `max_rounds * slots` of them with padding. Indices count from the first row of
      the shard; padding is `shard_rows`. The values are NaN on all devices if some row
      could not be sent.
    """

    def receive(round_index: Any) -> tuple[jax.Array, jax.Array]:
        slot = outgoing(exchange, route, round_index)
        rows = exchange.swap(gather_rows(data, slot))
        return incoming(exchange, route, slot), rows

    def start(round_index: Any) -> tuple[jax.Array, jax.Array]:
        indices, rows = receive(round_index)
        # Room for all rounds: `step` writes round k at `k * slots`.
        missing = (exchange.max_rounds - 1) * exchange.slots
        widths = [(0, missing), (0, 0)]
        indices = jnp.pad(indices, widths, constant_values=exchange.shard_rows)
        return indices, jnp.pad(rows, widths[:1] + [(0, 0)] * (rows.ndim - 1))

    def step(round_index: Any, buffers: tuple[jax.Array, jax.Array]) -> Any:
        place = round_index * exchange.slots
        pairs = zip(buffers, receive(round_index), strict=True)
        return tuple(
            lax.dynamic_update_slice_in_dim(buffer, part, place, 0)
            for buffer, part in pairs
        )

    indices, rows = in_rounds(exchange, route, start, step)
    if not exchange.is_lossless:
        rows = jnp.where(route.rounds > exchange.max_rounds, jnp.nan, rows)
    return indices, rows


def from_owners(
    exchange: Exchange, route: Route, table: jax.Array, segment: jax.Array
) -> jax.Array:
    """Requests rows from their owners.

    Args:
      exchange: The static sizes.
      route: Which rows are requested.
      table: `[shard_rows, *row_shape]`, this device's shard.
      segment: `[num_sent]`, for each row of the result its place in the route.

    Returns:
      `[num_sent, *row_shape]`; NaN where a row could not be requested.
    """
    # Row `starts[p] + rank` of owner p comes in round `rank // capacity`, in slot
    # `p * capacity + rank % capacity` of what `swap` returns. In the module's example,
    # row 4 is the third of the first owner: it comes in round 1, in slot 0.
    owner = search(route.starts[1:], segment + 1)
    rank = segment - route.starts[owner]
    place = owner * exchange.capacity + rank % exchange.capacity
    round_of = rank // exchange.capacity

    def start(round_index: Any) -> jax.Array:
        requested = incoming(exchange, route, outgoing(exchange, route, round_index))
        answers = exchange.swap(read_rows(table, requested[:, 0]))
        # Rows of later rounds are read out of bounds: NaN, until their round comes.
        mine = jnp.where(round_of == round_index, place, exchange.slots)
        return answers.at[mine].get(mode="fill")

    def step(round_index: Any, rows: jax.Array) -> jax.Array:
        now = (round_of == round_index).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(now, start(round_index), rows)

    return in_rounds(exchange, route, start, step)


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]`, but a negative id is one below the table, not one from its end."""
    return table.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
