"""Sums of gradients over the devices of `shard_map` and `pmap`, and a device's rows."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.sparse import BCOO

from .._jax_extras.sharding import first_row
from .._rows.canary import entries
from .._rows.checks import check_bcoo, is_bcoo, is_leaf
from .._rows.coalesce import coalesce, touched_rows
from .._rows.entries import coalesced_bcoo
from .._rows.padding import in_bounds, mask_padding, pad_indices

AxisName = str | tuple[str, ...]


def psum(grads: optax.Updates, axis_name: AxisName) -> optax.Updates:
    """Sums gradients over the devices along mesh axes, inside `shard_map` or `pmap`.

    As `jax.lax.psum`, for trees with row-sparse leaves; also along an axis of `vmap`.
    The rows of all devices are gathered and coalesced on each: a device receives what
    the devices store, `nse * (row_size + 1)` numbers from each, and all get the same.

    .. warning::

      In a `shard_map` with `check_vma`, the default, JAX's gradient of a replicated
      parameter is the sum over the devices already, and so is `value_and_grad`'s; a
      second sum would multiply it. Call this with `check_vma=False`, in `pmap`, or for
      gradients that differ from device to device.

    Args:
      grads: A tree with dense, BCOO or `None` leaves; the same structure and `nse` on
        each device.
      axis_name: The name of a mesh axis, or several.

    Returns:
      The tree of the sums, with `None` for `None`. A BCOO is coalesced, and stores
      the entries of all devices, but never more than its table has rows. With
      `check_vma`, the result is of a type that `out_specs=PartitionSpec()` takes.

    Raises:
      TypeError: If a BCOO has indices that are not integers, or other values than
        floating-point ones.
      ValueError: If the layout of a BCOO is not row-sparse.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> import optax_sparse_adam as osa
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
      >>> def total(table, ids):
      ...     grads = osa.grad(lambda t: jnp.sum(t[ids]))(table)
      ...     return osa.psum(grads, "data")
      >>> step = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")),
      ...                      out_specs=P(), check_vma=False)
      >>> ids = jnp.full(2 * jax.device_count(), 7)  # two on each device
      >>> grad = jax.jit(step)(jnp.ones((1000, 1)), ids)
      >>> int(grad.indices[0, 0]), float(grad.data[0, 0]) == ids.size
      (7, True)
    """

    def one(leaf: Any) -> Any:
        if is_bcoo(leaf):
            return _all_gather_rows(check_bcoo(leaf), axis_name)
        return None if leaf is None else lax.psum(leaf, axis_name)

    return jax.tree.map(one, grads, is_leaf=is_leaf)


def pmean(grads: optax.Updates, axis_name: AxisName) -> optax.Updates:
    """Averages gradients over the devices along mesh axes; see `psum`.

    What data-parallel training needs, where each device's loss is the mean over its
    part of the batch. The sum is divided by the number of all devices, whether or not
    they store a row. With `check_vma` the warning of `psum` holds: the mean of what is
    a sum already, on each device, is that sum.

    Args:
      grads: A tree with dense, BCOO or `None` leaves.
      axis_name: The name of a mesh axis, or several.

    Returns:
      The tree of the means, as `psum` returns sums.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> def mean(table, ids):
      ...     grads = osa.grad(lambda t: jnp.sum(t[ids]))(table)
      ...     return osa.pmean(grads, "data")
      >>> devices = jax.device_count()
      >>> ids = jnp.full((devices, 2), 7)
      >>> step = jax.pmap(mean, axis_name="data", in_axes=(None, 0))
      >>> grad = step(jnp.ones((1000, 1)), ids)
      >>> grad.data[:, 0, 0].tolist() == [2.0] * devices
      True
    """

    devices = lax.axis_size(axis_name)

    def one(total: Any) -> Any:
        if not is_bcoo(total):
            return None if total is None else total / devices
        return coalesced_bcoo(total, total.indices, total.data / devices, total.shape)

    return jax.tree.map(one, psum(grads, axis_name), is_leaf=is_leaf)


def _all_gather_rows(grad: BCOO, axis_name: AxisName) -> BCOO:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    # Only mesh axes have a type for "the same on all devices"; an axis of vmap has not.
    on_mesh = set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)

    def gather(x: jax.Array) -> jax.Array:
        if x.shape[0] == 0:  # XLA refuses to gather empty arrays
            return jnp.zeros(x.shape, x.dtype)
        to = "invarying" if on_mesh else "varying"
        return lax.all_gather(x, axis_name, tiled=True, to=to)

    # Each device has its own padding. It stays out of bounds when gathered, and
    # `coalesce` moves it to the end, where the slots beyond `num_rows` are cut off.
    local = entries(grad)
    total = coalesce(
        BCOO((gather(local.data), gather(local.indices)), shape=grad.shape)
    )
    nse = min(total.nse, math.prod(total.shape[: total.n_sparse]))
    return coalesced_bcoo(grad, total.indices[:nse], total.data[:nse], total.shape)


def local_rows(grad: optax.Updates, axis_name: AxisName) -> optax.Updates:
    """The rows of a whole gradient that belong to this device's shard of the table.

    For tables whose rows are sharded along mesh axes, `PartitionSpec(axis_name)`,
    inside `shard_map`: device `k` of `n` owns `num_rows / n` rows, from
    `k * num_rows / n` on. Nothing is sent.

    .. warning::

      A norm or a mean over the result is that of a shard. To clip by the global norm,
      clip the whole gradient first, `clip = osa.lazy(optax.clip_by_global_norm(1.0))`;
      `sparse_adafactor` trains each shard as a table of its own. Under `jit` of sharded
      arrays, without `shard_map`, both see the whole table.

    Args:
      grad: A tree with dense, BCOO or `None` leaves; a BCOO is the gradient of the
        whole table, its indices those of the whole table, and the same on each device,
        as `psum` returns it.
      axis_name: The mesh axis along which rows are sharded, or several, in the order of
        the `PartitionSpec`.

    Returns:
      The tree with each BCOO that of the local table, `[num_rows / n, ...]`:
      coalesced, the indices those of the local table, and storing no more entries than
      that has rows. Other leaves are returned as they are.

    Raises:
      TypeError: If a BCOO has indices that are not integers, or other values than
        floating-point ones.
      ValueError: If the layout of a BCOO is not row-sparse, or if the devices do not
        divide the number of rows.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> import optax_sparse_adam as osa
      >>> devices = jax.device_count()
      >>> mesh = jax.make_mesh((devices,), ("rows",), (AxisType.Auto,))
      >>> def apply(table, grad):  # 10 rows on each device
      ...     return osa.apply_updates(table, osa.local_rows(grad, "rows"))
      >>> step = jax.shard_map(
      ...     apply, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
      >>> table = jnp.zeros((10 * devices, 1))
      >>> last = jnp.array([[10 * devices - 1]])  # a row of the last device
      >>> grad = BCOO((jnp.ones((1, 1)), last), shape=table.shape)
      >>> table = jax.jit(step)(table, grad)
      >>> float(table.sum()), float(table[-1, 0])
      (1.0, 1.0)
    """

    def one(leaf: Any) -> Any:
        if not is_bcoo(leaf):
            return leaf
        whole = check_bcoo(leaf)
        # With several sparse axes a sorted gradient may have padding between the rows
        # of one device: (2, out of bounds) sorts between (2, 0) and (3, 0).
        if not (whole.indices_sorted and whole.unique_indices and whole.n_sparse == 1):
            whole = coalesce(whole)
        ids, data, _ = touched_rows(whole, whole.dtype)
        shape = (rows_per_device(whole.shape[0], axis_name), *whole.shape[1:])
        nse = min(whole.nse, math.prod(shape[: whole.n_sparse]))
        slot = jnp.arange(nse, dtype=jnp.int32)
        # The indices are sorted, so the rows of one device are consecutive. Device 1 of
        # 2 has the rows 5 to 9 of 10. Of the ids [3, 7, 9, padding] its own begin at
        # slot 1, and are its rows [2, 4]; then follow rows of other devices, or none.
        first = first_row(axis_name, shape[0], ids.dtype)
        place = slot + jnp.sum(ids[:, 0] < first, dtype=jnp.int32)
        ids = ids.at[place].get(mode="fill", fill_value=jnp.iinfo(ids.dtype).max)
        ids = ids.at[:, 0].add(-first)
        data = mask_padding(data.at[place].get(mode="fill"), ids, shape)
        ids = pad_indices(ids, in_bounds(ids, shape), slot, shape)
        return coalesced_bcoo(whole, ids, data, shape)

    return jax.tree.map(one, grad, is_leaf=is_leaf)


def rows_per_device(num_rows: int, axis_name: AxisName) -> int:
    """The number of rows that each device owns.

    Raises:
      ValueError: If the rows do not divide evenly.
    """
    devices = lax.axis_size(axis_name)
    if num_rows % devices:
        raise ValueError(
            "The rows of a table must divide evenly among the devices, got "
            f"{num_rows} rows for {devices} devices along {axis_name!r}. Pad the table "
            f"to {num_rows + -num_rows % devices} rows."
        )
    return num_rows // devices
