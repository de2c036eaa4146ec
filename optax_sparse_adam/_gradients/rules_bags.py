"""The rule of a walk for bags of ids: one delta for each bag.

`osa.embedding_bag(table, ids)` is, in a jaxpr, a call of `look_up_bags`: its sums are
linear in the table, so the gradient of a bag's sum says that of all its rows:

    sums = inject(sum_bags(table, ids, segments, weights), delta)     delta [bags, D]

Beside the ids, a walk returns the bag of each entry and its weight. Both count within
one call; a loop or a mesh has many calls, and `Request.bags` says how long each is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.inject import inject
from .._jax_extras.sharding import mesh_of, partitions_of
from .._jax_extras.varying_axes import axes_of_type
from .._rows.bag_sums import add_up, take_whole
from .._rows.lookups import sum_bags
from .._rows.source import Source
from .expressions import Expression
from .lookups import lookup_of_rows
from .reading import look_up
from .row_slices import LookupEntries
from .walk import Bags, Request, Results, Walk, on_mesh_of_context


def look_up_bags(
    walk: Walk,
    eqn: JaxprEqn,
    num_bags: int,
    source: Source,
    ids: Any,
    segments: Any,
    weights: Any,
) -> Results:
    """A lookup of bags in a table, or of each row in a function of tables."""
    value = source.array
    if not isinstance(value, Expression) or source.stale is not None:
        return NotImplemented
    out: Any = eqn.outvars[0].aval
    ids_type: Any = eqn.invars[1].aval
    axes, is_flat = axes_of_type(out), ids_type.ndim == 1
    has_weights = len(eqn.invars) > 2 + is_flat  # which in a plan are not known
    ids, segments, weights = (
        None if x is None else walk.as_array(eqn, x) for x in (ids, segments, weights)
    )
    ids = ids_type if walk.is_plan else jnp.asarray(ids)
    if not walk.is_plan:
        ids = _can_be_flat(ids)
        weights = None if weights is None else _can_be_flat(weights)
    # Else rows are read, as `_rows.bag_sums.take` reads them: of all ids everywhere.
    is_sum = _is_read_by_bags(value, weights)
    if not (is_sum or walk.is_plan):
        ids, segments, weights = jax.tree.map(
            on_mesh_of_context, (ids, segments, weights)
        )
    lookup = lookup_of_rows(
        value.shape, ids, sharding=_sharding_of_rows(out, ids_type.ndim)
    )
    if value.source is None:
        # The derivative of a nonlinear function differs from row to row of a bag.
        deltas = walk.request_for(lookup, value, axes)
        if walk.is_plan:
            return [None]
        return [add_up(num_bags, look_up(value, lookup, deltas), segments, weights)]
    bags = Bags(ids_type.size, num_bags, out.dtype, has_weights, not is_flat)
    requests = _requests_for(walk, value, axes, bags)
    of_bags = walk.request(requests)
    if weights is not None:  # whose gradient reads rows
        walk.program.reread.update(x.index for x in value.leaves)
    if walk.is_plan:
        return [None]
    if is_sum:
        table = value.source._replace(array=jnp.asarray(value.source.array))
        sums = sum_bags(num_bags, table, ids, segments, weights)
    else:
        sums = add_up(num_bags, look_up(value, lookup, None), segments, weights)
    for request, delta in zip(requests, of_bags, strict=True):
        entries = LookupEntries(lookup.rows(1))
        if request.is_whole:
            whole = on_mesh_of_context(walk.whole_deltas[request.leaf])
            rows = take_whole(whole, ids)
            delta = add_up(num_bags, rows, segments, weights)
        else:
            entries = _entries_of_bags(entries.ids, ids, segments, weights)
        walk.entries.append(entries)
        delta = on_mesh_of_context(delta)
        sums = inject(sums, delta.astype(sums.dtype))
    return [sums]


def _requests_for(
    walk: Walk, value: Expression, axes: tuple[str, ...], bags: Bags
) -> list[Request]:
    """One for the leaf, of a table or of a cast of one; or none."""
    requests, size = [], bags.entries
    for leaf in value.leaves:
        depth = walk.depth_of(leaf, 1)
        request = Request(leaf, value.shape, size, depth, axes, is_whole=True)
        if leaf.index not in walk.program.whole_leaves:
            request = request._replace(count=bags.bags, is_whole=False, bags=bags)
        requests.append(request)
    return requests


def _entries_of_bags(
    rows: jax.Array, ids: jax.Array, segments: Any, weights: Any
) -> LookupEntries:
    """Rows, and the bag and the weight of each: of ids [2, 3], [0, 0, 0, 1, 1, 1]."""
    bag = jnp.arange(ids.size, dtype=jnp.int32) // ids.shape[-1]
    return LookupEntries(
        rows,
        bag if segments is None else segments,
        None if weights is None else weights.ravel(),
    )


def _can_be_flat(x: jax.Array) -> jax.Array:
    """An array `[bags, length]` that lies on Explicit axes so that JAX reshapes it."""
    mesh, spec = mesh_of(x), partitions_of(jax.typeof(x).sharding.spec)
    is_split = mesh.explicit_axes and spec[0] is None and any(spec)
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec())) if is_split else x


def _is_read_by_bags(value: Expression, weights: Any) -> bool:
    """Whether rows are added up as they are read, and stored nowhere.

    Stale ones are stored where there are weights, whose gradient reads them: they are
    brought up to date once.
    """
    if not value.is_table or value.source is None:
        return False
    is_stale = value.source.stale is not None
    mesh = mesh_of(*jax.tree.leaves(value.source)) if is_stale else None
    return mesh is None or (weights is None and mesh.empty)


def _sharding_of_rows(sums: Any, ndim: int) -> NamedSharding | None:
    """Over Explicit axes, how the rows lie of which these are the sums: by columns."""
    mesh, spec = sums.sharding.mesh, partitions_of(sums.sharding.spec)
    rows = PartitionSpec(*[None] * ndim, *spec[1:])
    return NamedSharding(mesh, rows) if mesh.explicit_axes else None
