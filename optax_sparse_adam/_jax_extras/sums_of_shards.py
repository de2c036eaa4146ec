"""Sums over looked-up rows of a sharded table: partial sums travel, and no rows.

Each device adds up the rows that it has, and the sums of all are added up. Over
Explicit mesh axes the types of the arrays say how they lie, and this is a `shard_map`.

Over Auto axes only the partitioner knows. Problem: a sum of looked-up rows sends every
row, `[bags, length, columns]`. Cause: the partitioner replaces a gather by one of each
shard and an all-reduce, and does not move the sum in front of that. Remedy: the sum is
one operation to it (`custom_partitioning`), partitioned here: the all-reduce is of
`[bags, columns]`. It is safe: the same sum, in another order. Known limits: such a
program is not kept in JAX's compilation cache
(https://github.com/jax-ml/jax/issues/21159) and cannot be exported; for TPUs, where it
does not compile (https://github.com/jax-ml/jax/issues/38196), it is the sum as it
stands, and rows travel. Test: `tests/collectives/test_sharded_bags.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from .sharding import call_with_auto_axes, mesh_axes, mesh_of


def sum_of_shards(
    function: Callable[..., jax.Array], table: jax.Array, *entries: jax.Array
) -> jax.Array:
    """`function(table, *entries)`, added up from the shards of the table.

    Args:
      function: Adds up looked-up rows. It ignores ids out of bounds.
      table: `[num_rows, *row_shape]`.
      *entries: Of one shape: the ids, and what is known of each. `[bags, length]`, or
        `[entries]`, whose sums over some entries can be added up, too.
    """
    mesh = mesh_of(table, *entries)
    if mesh.manual_axes or not (mesh.auto_axes or mesh.explicit_axes):
        return function(table, *entries)
    is_padded = entries[0].ndim == 2

    def shards(of_table: Any, of_entries: Any) -> tuple[Any, list[PartitionSpec]]:
        """What a device computes, and the layouts of operands and result."""
        # For a table P("x", "y") and ids P(("x", "z")): `rows` is "x", `columns` ["y"],
        # `free` ["z"]. Bags [bags, length] are then P("z", "y"), summed over "x". Of a
        # flat list of entries each device has some, of any bag, so that the bags are
        # summed over "z", too, and lie P(None, "y").
        rows, *columns = (*of_table, *[None] * table.ndim)[: table.ndim]
        used = {name for axis in (rows, *columns) for name in mesh_axes(axis)}
        # A mesh axis that splits the table cannot split the ids as well.
        names = mesh_axes((*of_entries, None)[0])
        free = tuple(name for name in names if name not in used) or None
        over = (*mesh_axes(rows), *(() if is_padded else mesh_axes(free)))

        def add_up(table: jax.Array, ids: jax.Array, *values: jax.Array) -> jax.Array:
            if rows is not None:
                ids = ids - lax.axis_index(rows).astype(ids.dtype) * len(table)
            sums = function(table, ids, *values)
            return lax.psum(sums, over) if over else sums

        specs: list[Any] = [(rows, *columns), *[(free,)] * len(entries)]
        specs.append((free if is_padded else None, *columns))
        return add_up, [PartitionSpec(*spec) for spec in specs]

    if not mesh.auto_axes:
        specs = [jax.typeof(x).sharding.spec for x in (table, entries[0])]
        add_up, (*inputs, result) = shards(*specs)
        # Ids that an axis of the table splits, too, go to all of its devices.
        arrays = [
            jax.reshard(x, NamedSharding(mesh, spec))
            for x, spec in zip((table, *entries), inputs, strict=True)
        ]
        of_shards = jax.shard_map(
            add_up, mesh=mesh, in_specs=tuple(inputs), out_specs=result, check_vma=False
        )
        whole = PartitionSpec(None, *result[1:])  # as `bags._take` has them
        sums: jax.Array = jax.reshard(of_shards(*arrays), NamedSharding(mesh, whole))
        return sums

    def partition(mesh: Mesh, operands: Any, _: Any) -> Any:
        add_up, specs = shards(*(x.sharding.spec for x in operands[:2]))

        def on_device(*arrays: jax.Array) -> jax.Array:
            # Explicit axes are no part of the types here: each array is a shard.
            with use_abstract_mesh(AbstractMesh((), ())):
                sums: jax.Array = add_up(*arrays)
                return sums

        *inputs, result = (NamedSharding(mesh, spec) for spec in specs)
        return mesh, on_device, result, tuple(inputs)

    # The rule of Shardy, in the notation of einsum: which axes lie as which.
    row = " ".join(f"d{axis}" for axis in range(1, table.ndim))
    entry, bags = ("b l", "b") if is_padded else ("n", "b")
    rule = f"r {row}, {', '.join(entry for _ in entries)} -> {bags} {row}"
    call = custom_partitioning(function)
    call.def_partition(partition=partition, sharding_rule=rule)

    def by_platform(*arrays: jax.Array) -> jax.Array:
        sums: jax.Array = lax.platform_dependent(*arrays, tpu=function, default=call)
        return sums

    axes = (None, *range(1, table.ndim))
    return call_with_auto_axes(by_platform, table, *entries, like=table, axes=axes)
