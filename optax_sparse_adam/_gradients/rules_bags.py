"""The rule of a walk for bags of ids: one delta for each bag.

`osa.embedding_bag(table, ids)` is, in a jaxpr, a call of `bag_lookup`: its sums are
linear in the table, so the gradient of a bag's sum says that of all its rows:

    sums = inject(sum_bags(table, ids, segments, weights), delta)     delta [bags, D]

Beside the ids, a walk returns the bag of each entry and its weight. Both count within
one call; a loop or a mesh has many calls, and `Request.bags` says how long each is.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.sharding import partitions_of
from .._jax_extras.varying_axes import axes_of_type
from .._rows.bags import add_up, sum_bags
from .expressions import Expression, inject
from .lookups import lookup_of_rows
from .reading import look_up
from .row_slices import LookupEntries
from .walk import Bags, Request, Results, Walk, on_mesh_of_context


def bag_lookup(walk: Walk, eqn: JaxprEqn, value: Any, *operands: Any) -> Results:
    """A lookup of bags in a table, or in a function of tables, for each row of a bag.

    The operands are ids; where these are a vector, segments; and weights, if any.
    """
    if not isinstance(value, Expression):
        return NotImplemented
    out: Any = eqn.outvars[0].aval
    ids_type: Any = eqn.invars[1].aval
    is_flat = ids_type.ndim == 1
    num_bags, axes = out.shape[0], axes_of_type(out)
    ids, *rest = (walk.as_array(eqn, x) for x in operands)
    ids = ids_type if walk.is_plan else jnp.asarray(ids)
    # Else rows are read, as `_rows.bags._take` reads them: of all ids everywhere.
    is_sum = value.is_table and value.source is not None and value.source.stale is None
    if not (is_sum or walk.is_plan):
        ids, *rest = map(on_mesh_of_context, (ids, *rest))
    segments = rest.pop(0) if is_flat else None
    weights = rest[0] if rest else None
    lookup = lookup_of_rows(value.shape, ids, _sharding_of_rows(out, ids_type.ndim))
    if value.source is None:
        # The derivative of a nonlinear function differs from row to row of a bag.
        deltas = walk.request_for(lookup, value, axes)
        if walk.is_plan:
            return [None]
        return [add_up(num_bags, look_up(value, lookup, deltas), segments, weights)]
    requests = []
    for leaf in value.leaves:  # one, of a table or of a cast of one; or none
        depth, size = walk.depth_of(leaf, 1), ids_type.size
        request = Request(leaf, value.shape, size, depth, axes, is_whole=True)
        if leaf.index not in walk.program.whole_leaves:
            bags = Bags(size, num_bags, out.dtype, len(operands) > 1 + is_flat)
            request = request._replace(count=num_bags, is_whole=False, bags=bags)
        requests.append(request)
    of_bags = walk.request(requests)
    if weights is not None:  # whose gradient reads rows
        walk.program.reread.update(x.index for x in value.leaves)
    if walk.is_plan:
        return [None]
    if is_sum:
        table = jnp.asarray(value.source.array)
        sums = sum_bags(num_bags, table, ids, segments, weights)
    else:
        sums = add_up(num_bags, look_up(value, lookup, None), segments, weights)
    for request, delta in zip(requests, of_bags, strict=True):
        entries = LookupEntries(lookup.rows(1))
        if request.is_whole:
            whole = on_mesh_of_context(walk.whole_deltas[request.leaf])
            delta = sum_bags(num_bags, whole, ids, segments, weights)
        else:
            # For ids [2, 3]: [0, 0, 0, 1, 1, 1].
            bag = jnp.arange(ids.size, dtype=jnp.int32) // ids.shape[-1]
            entries = LookupEntries(
                entries.ids,
                bag if segments is None else segments,
                None if weights is None else weights.ravel(),
            )
        walk.entries.append(entries)
        delta = on_mesh_of_context(delta)
        sums = inject(sums, delta.astype(sums.dtype))
    return [sums]


def _sharding_of_rows(sums: Any, ndim: int) -> NamedSharding | None:
    """Over Explicit axes, how the rows lie of which these are the sums: by columns."""
    mesh, spec = sums.sharding.mesh, partitions_of(sums.sharding.spec)
    rows = PartitionSpec(*[None] * ndim, *spec[1:])
    return NamedSharding(mesh, rows) if mesh.explicit_axes else None
