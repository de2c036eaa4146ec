"""The static sizes of an exchange of rows, and the choice of its form.

A table is sharded by rows along mesh axes: device `p` owns the rows from
`p * shard_rows` on. In each round of an exchange a device sends at most `capacity` rows
to each owner, which is what a static shape allows.
"""

import dataclasses
import math

import jax
from jax import lax
from jax.typing import DTypeLike

from .._jax_extras.sharding import first_row
from .psum import AxisName


def default_capacity(num_sent: int, devices: int) -> int:
    """Rows for each pair of devices, if `num_sent` rows have random owners.

    An owner's share is then a Poisson variable of mean and variance
    `num_sent / devices`. With six standard deviations above the mean, one round is
    enough for all but a few of a million pairs.
    """
    mean = num_sent / devices
    return min(num_sent, math.ceil(mean + 6 * math.sqrt(mean)))


@dataclasses.dataclass(frozen=True)
class Exchange:
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

    def first_row(self, dtype: DTypeLike) -> jax.Array:
        """The first row that this device owns."""
        return first_row(self.axis_name, self.shard_rows, dtype)


def plan(
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
    enough = -(-min(num_sent, max_per_owner) // max(1, capacity))
    rounds = enough if max_rounds is None else min(max_rounds, enough)
    return Exchange(
        axis_name, devices, shard_rows, num_sent, capacity, rounds, rounds == enough
    )
