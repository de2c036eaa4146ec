"""The rule of a walk for bags of ids: one delta for each bag.

`osa.embedding_bag(table, ids)` is, in a jaxpr, a call of `bag_lookup`: its sums are
linear in the table, so the gradient of a bag's sum says that of all its rows:

    sums = inject(sum_bags(table, ids, segments, weights), delta)     delta [bags, D]

Beside the ids, a walk returns the bag of each entry and its weight. Both count within
one call; a loop or a mesh has many calls, and `Request.bags` says how long each is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._jax_extras.varying_axes import axes_of_type
from .._rows.bags import add_up, sum_bags
from .backward_slice import as_closed
from .expressions import Expression, Table, inject
from .reading import first_gather, read_gather
from .walk import BagEntries, Bags, Request, Results, Rule, Walk


def bag_lookup(
    look_up: Rule, walk: Walk, eqn: JaxprEqn, needed: Any, value: Any, *operands: Any
) -> Results:
    """See the module. A function of tables is computed for each row of a bag.

    Args:
      look_up: The rule of a gather.
      walk: The walk.
      eqn: The call.
      needed: Whether the loss depends on the result.
      value: The table, or a function of tables.
      *operands: Ids; where these are a vector, segments; and weights, if any.
    """
    out: Any = eqn.outvars[0].aval
    ids_type: Any = eqn.invars[1].aval
    is_flat = ids_type.ndim == 1
    num_bags, has_weights = out.shape[0], len(operands) > 1 + is_flat
    rows_shape = (*ids_type.shape, *out.shape[1:])
    gather = first_gather(as_closed(eqn.params["jaxpr"]).jaxpr, rows_shape)
    if gather is None or not isinstance(value, Expression):  # there are no ids
        return NotImplemented
    for x in operands:
        if isinstance(x, Expression) and any(needed):
            walk.use_densely(eqn, x)
    ids, *rest = (walk.dense(x) for x in operands)
    segments = rest[0] if is_flat else None
    weights = rest[-1] if has_weights else None
    indices: Any = None if walk.is_plan else ids[..., None]
    if value.source is None:
        (rows,) = look_up(walk, gather, needed, value, indices)
        return [None if walk.is_plan else add_up(num_bags, rows, segments, weights)]
    deltas = []
    if any(needed) and value.leaves:
        request = _request(walk, value, ids_type.size, out, has_weights)
        deltas = walk.request([request])
    if walk.is_plan:
        return [None]
    if value.is_table and isinstance(value.source, Table):
        table = jnp.asarray(value.source.array)
        sums = sum_bags(num_bags, table, ids, segments, weights)
    else:
        read: Any = read_gather(gather, value, indices, None)
        sums = add_up(num_bags, read, segments, weights)
    for delta in deltas:
        valid = (ids >= 0) & (ids < value.shape[0])
        found = jnp.where(valid, ids, value.shape[0]).reshape(-1, 1)
        if request.is_whole:
            walk.rows.append(found)
            delta = sum_bags(num_bags, delta, ids, segments, weights)
        else:
            walk.rows.append(_entries(found, ids, segments, weights))
        sums = inject(sums, delta.astype(sums.dtype))
    return [sums]


def _request(
    walk: Walk, value: Expression, size: int, out: Any, has_weights: bool
) -> Request:
    (leaf,) = value.leaves
    walk.program.depths[leaf.index] = 1
    axes = axes_of_type(out)
    if leaf.index in walk.whole:
        return Request(leaf, value.shape, size, 1, axes, is_whole=True)
    bags = Bags(size, out.shape[0], out.dtype, has_weights)
    return Request(leaf, value.shape, out.shape[0], 1, axes, bags=bags)


def _entries(
    rows: jax.Array, ids: jax.Array, segments: Any, weights: Any
) -> BagEntries:
    if segments is None:
        segments = jnp.arange(ids.size, dtype=jnp.int32) // ids.shape[1]
    return BagEntries(rows, segments, None if weights is None else weights.ravel())
