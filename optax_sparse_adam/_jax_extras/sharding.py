"""Layouts of rows and of states on a mesh.

JAX partitions the programs, and needs two hints. A gradient has few rows, so every
device gets all of them (`replicate_rows`, `shard_columns_like`). A state is laid out as
its parameter is (`shard_axes_like`, `jit_on_mesh`). The type of an array says whether
it lies on a mesh, and for Explicit mesh axes also how. Without a mesh nothing here adds
an operation to a program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike


def mesh_of(*arrays: Any) -> AbstractMesh:
    """The mesh that the arrays lie on, or the program runs on; it may be empty."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    of_arrays = next((mesh for mesh in meshes if not mesh.empty), None)
    return jax.sharding.get_abstract_mesh() if of_arrays is None else of_arrays


def layout_of(x: jax.Array) -> NamedSharding | None:
    """How an array lies on Explicit mesh axes, if any of them splits it."""
    sharding = jax.typeof(x).sharding
    spec = partitions_of(sharding.spec)
    if not any(spec) or not sharding.mesh.explicit_axes:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def mesh_axes(axis: Any) -> tuple[str, ...]:
    """The mesh axes that split an axis, from its entry in a `PartitionSpec`."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def partitions_of(spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a `PartitionSpec`: which mesh axes split each axis of an array.

    A spec with `reduced` or `unreduced` axes, which split nothing, is no sequence.
    """
    return tuple(spec.partitions)


def _spec(x: jax.Array, axes: Sequence[int]) -> PartitionSpec:
    """The sharding of these axes in the type of `x`, which lists Explicit axes only."""
    spec = partitions_of(jax.typeof(x).sharding.spec)
    return PartitionSpec(*(spec[axis] for axis in axes))


def without_reduced(x: jax.Array) -> jax.Array:
    """An array of type `P(reduced={"x"})` as the equal copies over "x" that it is.

    Problem: arithmetic of it and of what is replicated raises. Cause: JAX tells both
    apart by their derivatives, as that of the former is a partial sum on each device.
    Remedy: a cast, and `reduced_like` back. Safe where nothing is differentiated.
    Test: `tests/gradients/test_reduced_axes.py`.
    """
    sharding = jax.typeof(x).sharding
    if not sharding.spec.reduced:
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, _spec(x, range(x.ndim))))


def reduced_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, of the type `P(reduced=...)` if `like` has one."""
    sharding = jax.typeof(like).sharding
    return jax.reshard(x, sharding) if sharding.spec.reduced else x


def replicate_rows(rows: jax.Array, mesh: AbstractMesh) -> jax.Array:
    """Gives every device all rows; the layout of the columns stays.

    Problem: each device allocates zeros of the table's size, and these are summed over
    a mesh axis. Cause: where the axis splits the rows of a gradient but not its table,
    the partitioner lets each device scatter its part alone. Remedy: replicate the rows
    first, which are few. Safe, because the values stay as they are. Test:
    `tests/collectives/test_sharded_memory.py`.
    """
    spec = partitions_of(jax.typeof(rows).sharding.spec)
    # Over Explicit axes, the type says how rows lie. Over Auto axes it does not: there
    # the rows are constrained, and the partitioner is free to choose for the columns.
    if rows.ndim and spec[0] is not None:
        whole = PartitionSpec(None, *spec[1:])
        rows = jax.reshard(rows, NamedSharding(mesh, whole))
    # Where nothing is traced, rows of a mesh's program may be on one device all.
    is_traced = isinstance(rows, jax.core.Tracer)
    if rows.ndim and mesh.auto_axes and (is_traced or len(rows.devices()) > 1):
        free = [PartitionSpec.UNCONSTRAINED if s is None else None for s in spec[1:]]
        whole = PartitionSpec(None, *free)
        rows = lax.with_sharding_constraint(rows, NamedSharding(mesh, whole))
    return rows


def shard_columns_like(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Shards the columns of rows as the table's columns, over Explicit mesh axes."""
    mesh = mesh_of(table, rows)
    if not mesh.explicit_axes:
        return rows
    # Axis 2 of a table [30, 40, 8] is axis 1 of its rows, [k, 8].
    columns = _spec(table, range(table.ndim - rows.ndim + 1, table.ndim))
    return jax.reshard(rows, NamedSharding(mesh, PartitionSpec(None, *columns)))


def columns_as_in(table: jax.Array, rows: jax.Array) -> jax.Array:
    """The same, where columns lie otherwise; mesh axes that split the rows may stay."""
    mesh = mesh_of(table, rows)
    if not mesh.explicit_axes:
        return rows
    of_rows, *before = partitions_of(jax.typeof(rows).sharding.spec)
    columns = partitions_of(_spec(table, range(table.ndim - rows.ndim + 1, table.ndim)))
    if (*before,) == columns:
        return rows
    taken = {axis for entry in columns for axis in mesh_axes(entry)}
    of_rows = None if taken & {*mesh_axes(of_rows)} else of_rows
    return jax.reshard(rows, NamedSharding(mesh, PartitionSpec(of_rows, *columns)))


def call_with_auto_axes(
    function: Callable[..., jax.Array],
    *arrays: jax.Array,
    like: jax.Array,
    axes: Sequence[int | None],
) -> jax.Array:
    """Calls a gather or scatter of arrays that lie on Explicit mesh axes.

    JAX has no sharding rule for gathers and scatters over Explicit axes: they raise
    `ShardingTypeError`. `jax.sharding.auto_axes` leaves them to the partitioner, and
    takes the layout of the result.

    Args:
      function: The operation.
      *arrays: Its operands.
      like: The array after which the result is laid out.
      axes: For each axis of the result the axis of `like`, or `None` for unsharded.
    """
    mesh = mesh_of(*arrays)
    if not mesh.explicit_axes:
        return function(*arrays)
    spec = partitions_of(jax.typeof(like).sharding.spec)
    out = PartitionSpec(*(None if axis is None else spec[axis] for axis in axes))
    result: jax.Array = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=NamedSharding(mesh, out)
    )(*arrays)
    # An updated table has the type of the table, `reduced` included.
    is_table = result.shape == like.shape and list(axes) == list(range(like.ndim))
    return reduced_like(result, like) if is_table else result


def first_row(axis_name: Any, shard_rows: int, dtype: DTypeLike) -> jax.Array:
    """The first row that this device owns of a table sharded along mesh axes."""
    # `axis_index` is an int32; row ids of large tables are wider.
    device = lax.axis_index(axis_name).astype(dtype)
    return device * np.asarray(shard_rows, dtype)


def shard_axes_like(param: jax.Array, x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """`x`, whose axes are these axes of a parameter, sharded as they are.

    Problem: no Python value tells how a parameter lies over Auto axes. Cause: only the
    partitioner knows, when a program is compiled. Remedy: a select, to whose operands
    and result it gives one layout. Safe, because the condition is false, which XLA does
    not see before. Test: `tests/collectives/test_sharded_init.py`.
    """
    mesh = mesh_of(param)
    if mesh.explicit_axes:
        return jax.reshard(x, NamedSharding(mesh, _spec(param, axes)))
    if not mesh.auto_axes:
        return x
    # The sum over the other axes has the layout of these axes.
    summed_axes = tuple(axis for axis in range(param.ndim) if axis not in axes)
    like = jnp.sum(param, summed_axes) if summed_axes else param
    never = lax.optimization_barrier(jnp.zeros([], bool))
    return jnp.where(never, like.astype(x.dtype), x)


def _as_array(x: Any) -> Any:
    """A mutable array, or variable of Flax, as `nnx.Optimizer` passes it, as it is."""
    return x if isinstance(jax.typeof(x), ShapedArray) else x[...]


def jit_on_mesh(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiles `init` for parameters on a mesh; else it is made on one device first."""
    compiled = jax.jit(init, keep_unused=True)  # the parameters say which devices

    @functools.wraps(init)
    def init_fn(params: Any) -> Any:
        params = jax.tree.map(_as_array, params)
        is_on_mesh = not mesh_of(*jax.tree.leaves(params)).empty
        if not is_on_mesh:
            return init(params)
        return compiled(jax.tree.map(without_reduced, params))

    return init_fn
