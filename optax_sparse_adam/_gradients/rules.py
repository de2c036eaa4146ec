"""The rules of a walk: one entry for each primitive that may have tables for operands.

`rule(walk, eqn, *args)` returns the results, or `NotImplemented` to let JAX evaluate
the equation on arrays. It runs twice, in the plan and in the walk: in a plan it may not
look at arrays, only at `eqn` and at expressions. A new elementwise primitive needs its
name in `_jax_extras.jaxprs` only.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import (
    ELEMENTWISE,
    bind_eqn,
    call_of,
    calls_only,
    name_and_params,
)
from .._jax_extras.sharding import partitions_of
from .._jax_extras.unchecked import show_bounds
from .._jax_extras.varying_axes import axes_of_type, bind, vary
from .._rows import lookups
from .._rows.source import Bounds, Source
from . import rules_calls, rules_shard_map
from .backward_slice import CALLS, as_closed
from .expressions import (
    Expression,
    arrays_among,
    cast_table,
    elementwise,
    map_arrays,
    merge,
    operands_first,
)
from .lookups import (
    Lookup,
    lookup_of_gather,
    lookup_of_rows,
    lookup_of_slice,
    reads_rows,
)
from .reading import look_up
from .rules_bags import look_up_bags
from .walk import Results, Rule, Walk


def _out(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval


# Elementwise functions, and what concerns where or how an array is kept.


def _elementwise(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Stays an expression if it is a function of tables, their shape, and scalars."""
    expressions = [x for x in args if isinstance(x, Expression)]
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return NotImplemented  # gradients of such a type may add up in their own way
    name = eqn.primitive.name
    # `t.astype(float32)[ids]` of a bfloat16 table has its delta in float32, and not
    # before the cast, where entries of one row would be rounded before they add up.
    is_cast = name == "convert_element_type" and expressions[0].is_table
    if is_cast and is_wider(dtype, expressions[0].dtype):
        return [cast_table(expressions[0], dtype)]
    atoms: list[Any] = eqn.invars
    if any(x.aval.shape not in ((), shape) for x in atoms) or any(
        x.shape != shape for x in expressions
    ):
        return NotImplemented
    # In the context of the lookup, which may have another mesh.
    function = functools.partial(bind, eqn.primitive, **eqn.params)
    return [elementwise(_out(eqn), function, *args)]


def is_wider(new: Any, old: Any) -> bool:
    """Whether a cast keeps every number, and is no cast to the same type."""
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new)):
        return False
    wide, narrow = jnp.finfo(new), jnp.finfo(old)
    return bool(
        wide.bits > narrow.bits
        and wide.nmant >= narrow.nmant
        and wide.maxexp >= narrow.maxexp
        and wide.smallest_subnormal <= narrow.smallest_subnormal
    )


def _same_values(walk: Walk, eqn: JaxprEqn, value: Expression) -> Results:
    """What moves a table moves all arrays that an expression is computed from."""
    if walk.is_plan:
        return [value]

    def moved(x: Any, has_rows: bool) -> Any:
        if "axes" in eqn.params:  # of a cast to varying, from replicated or reduced
            return vary(x, tuple(eqn.params["axes"]))
        if jnp.shape(x) == value.shape:
            return bind_eqn(eqn, x)
        if eqn.primitive.name != "reshard":
            return x
        # What exact Adam keeps of each row lies as the table does along leading axes.
        to, ndim = _out(eqn).sharding, jnp.ndim(x) if has_rows else 0
        spec = PartitionSpec(*partitions_of(to.spec)[:ndim])
        return jax.reshard(x, NamedSharding(to.mesh, spec))

    return [map_arrays(value, moved)]


def _reduced(walk: Walk, eqn: JaxprEqn, value: Expression) -> Results:
    """A table stays one: its copies are equal, and their gradients are to be summed."""
    # A function of a table is computed at rows that are reduced already, beside
    # constants that are not, which JAX refuses.
    if not value.is_table:
        return NotImplemented
    if walk.is_plan:
        return [value]
    return [map_arrays(value, lambda x, _: bind_eqn(eqn, x))]


def _barrier(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Tables skip the barrier; it applies to the arrays only."""
    if walk.is_plan:
        return args
    return merge(args, lax.optimization_barrier(arrays_among(args)))


# Lookups.


def _look_up(walk: Walk, eqn: JaxprEqn, value: Expression, lookup: Lookup) -> Results:
    deltas = walk.request_for(lookup, value, axes_of_type(_out(eqn)))
    return [None if walk.is_plan else look_up(value, lookup, deltas)]


def _gather(walk: Walk, eqn: JaxprEqn, value: Any, ids: Any) -> Results:
    if not isinstance(value, Expression) or isinstance(ids, Expression):
        return NotImplemented
    aval: Any = eqn.invars[1].aval
    indices = aval if walk.is_plan else ids
    lookup = lookup_of_gather(eqn, value.shape, indices)
    # `sort` and `take_along_axis`, which gather single elements, are lookups only where
    # nothing is differentiated.
    if value.leaves and not reads_rows(lookup):
        return NotImplemented
    if lookup.indices is not indices:
        _show_bounds(walk, eqn, value, [ids])
    return _look_up(walk, eqn, value, lookup)


def _slice(walk: Walk, eqn: JaxprEqn, value: Any, *starts: Any) -> Results:
    lookup = lookup_of_slice(eqn, value.shape, None if walk.is_plan else starts)
    if lookup is None:
        return NotImplemented
    if starts:
        _show_bounds(walk, eqn, value, starts)
    return _look_up(walk, eqn, value, lookup)


def _show_bounds(
    walk: Walk, eqn: JaxprEqn, value: Expression, indices: Sequence[Any]
) -> None:
    """Of an equation whose lookup has its indices clamped."""
    sources = [x.source for x in operands_first([value]) if x.source is not None]
    if sources and not walk.is_plan:
        bound = functools.partial(bind, eqn.primitive)
        show_bounds(bound, sources[0].array, indices, eqn.params)


def _look_up_rows(
    walk: Walk, eqn: JaxprEqn, bounds: Bounds, source: Source, ids: Any
) -> Results:
    """Of ids with padding; or a kernel's lookup, in a gradient of a gradient."""
    value = source.array
    if not isinstance(value, Expression) or source.stale is not None:
        return NotImplemented
    aval: Any = eqn.invars[1].aval
    indices = aval if walk.is_plan else jnp.asarray(ids)  # of NumPy, if constant
    return _look_up(walk, eqn, value, lookup_of_rows(value.shape, indices, bounds))


# The functions that are lookups as a whole: `rule(walk, eqn, params, *args)`, with what
# the function was called with.
LOOKUPS: dict[Any, Rule] = {
    lookups.look_up_rows: _look_up_rows,
    lookups.look_up_bags: look_up_bags,
}


def _jit(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    call, results = call_of(eqn), NotImplemented
    if call is not None and call.function in LOOKUPS:
        rule = LOOKUPS[call.function]
        results = rule(walk, eqn, call.params, *call.tree.unflatten(args))
    if results is NotImplemented:
        results = rules_calls.call(walk, eqn, *args)
    return results


def _custom_jvp(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    body = as_closed(name_and_params(eqn)[1]["call_jaxpr"])
    # The derivative of `sum_bags` is that of the `look_up_bags` inside of it.
    is_whole = len(body.jaxpr.invars) == len(args)  # with nothing closed over
    if is_whole and calls_only(body.jaxpr, LOOKUPS):
        return walk.evaluate(body, args)
    return NotImplemented


def _checkpoint_name(walk: Walk, eqn: JaxprEqn, value: Expression) -> Results:
    """The object that `checkpoint_name` applies under `jax_remat3` has a shape."""
    name = name_and_params(eqn)[1]["name"]
    return [elementwise(_out(eqn), lambda x: checkpoint_name(x, name), value)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "optimization_barrier": _barrier,
    "pvary": _same_values,
    "reduced_vary_cast_p": _same_values,
    "reduced_vary_cast": _same_values,
    "preduced": _reduced,
    "reshard": _same_values,
    "sharding_constraint": _same_values,
    "gather": _gather,
    "slice": _slice,
    "dynamic_slice": _slice,
    **dict.fromkeys(CALLS, rules_calls.call),
    "jit": _jit,
    "custom_jvp_call": _custom_jvp,
    "CheckpointName": _checkpoint_name,
    "remat2": rules_calls.remat,
    "scan": rules_calls.scan,
    "cond": rules_calls.cond,
    "while": rules_calls.while_loop,
    "shard_map": rules_shard_map.shard_map,
}
