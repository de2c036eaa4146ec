"""Sums over looked-up rows of a sharded table: partial sums travel, and no rows.

Problem: under `jit` of a table that is sharded by rows, a sum of looked-up rows sends
every row, `[bags, length, columns]`. Cause: the partitioner replaces a gather by one of
each shard and an all-reduce, and does not move the sum in front of that. Remedy: the
sum is one operation to it (`custom_partitioning`), partitioned here: each device adds
up the rows that it has, and the all-reduce is of `[bags, columns]`. It is safe: the
same sum, in another order. Test: `tests/collectives/test_sharded_bags.py`.
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

from .sharding import call_with_auto_axes, mesh_axes, mesh_of, partitions_of


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

    def partition(mesh: Mesh, given: Any, _: Any) -> Any:
        # For a table P("x", "y") and ids P(("x", "z")): `rows` is "x", `columns` ["y"],
        # `free` ["z"]. Bags [bags, length] are then P("z", "y"), summed over "x". Of a
        # flat list of entries each device has some, of any bag, so that the bags are
        # summed over "z", too, and lie P(None, "y").
        rows, *columns = (*partitions_of(given[0].sharding.spec), *[None] * table.ndim)[
            : table.ndim
        ]
        used = {name for axis in (rows, *columns) for name in mesh_axes(axis)}
        # A mesh axis that splits the table cannot split the ids as well.
        of_entries = mesh_axes((*partitions_of(given[1].sharding.spec), None)[0])
        free = tuple(name for name in of_entries if name not in used) or None
        over = (*mesh_axes(rows), *(() if is_padded else mesh_axes(free)))

        def add_up(table: jax.Array, ids: jax.Array, *others: jax.Array) -> jax.Array:
            # Explicit axes are no part of the types here: each array is a shard.
            with use_abstract_mesh(AbstractMesh((), ())):
                if rows is not None:
                    ids = ids - lax.axis_index(rows).astype(ids.dtype) * len(table)
                sums = function(table, ids, *others)
                return lax.psum(sums, over) if over else sums

        specs = [(rows, *columns), *[(free,)] * len(entries)]
        specs.append((free if is_padded else None, *columns))
        *inputs, result = (NamedSharding(mesh, PartitionSpec(*x)) for x in specs)
        return mesh, add_up, result, tuple(inputs)

    # The rule of Shardy, in the notation of einsum: which axes lie as which.
    row = " ".join(f"d{axis}" for axis in range(1, table.ndim))
    entry, bags = ("b l", "b") if is_padded else ("n", "b")
    rule = f"r {row}, {', '.join(entry for _ in entries)} -> {bags} {row}"
    call = custom_partitioning(function)
    call.def_partition(partition=partition, sharding_rule=rule)
    axes = (None, *range(1, table.ndim))
    return call_with_auto_axes(call, table, *entries, like=table, axes=axes)
