"""The rules of a walk: one entry for each primitive that may have tables for operands.

`rule(walk, eqn, needed, *args)` returns the results, or `NotImplemented` to let JAX
evaluate the equation on arrays. It runs twice, in the plan and in the walk: in a plan
it may not look at arrays, only at `eqn` and at expressions. `needed` says for each
result whether the loss depends on it. A new elementwise primitive needs its name in
`_jax_extras.jaxprs` only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import ELEMENTWISE, bind_eqn
from .._jax_extras.varying_axes import axes_of_type, bind, vary
from . import rules_bags, rules_calls, rules_elementwise_calls, rules_shard_map
from .backward_slice import WITHOUT_DERIVATIVE, as_closed
from .expressions import (
    Expression,
    StaleTable,
    arrays_of,
    cast_table,
    elementwise,
    expressions_below,
    fill,
    with_arrays,
)
from .lookups import (
    constants,
    indices_of_gather,
    indices_of_slice,
    lookup_of_gather,
    lookup_of_slice,
)
from .reading import first_gather, read_gather, read_slice
from .walk import Results, Rule, Walk


def _out(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval


# Elementwise functions, and what concerns where or how an array is kept.


def _elementwise(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    """Waits for a lookup, if that is a function of tables and numbers, or might be."""
    waiting = [x for x in args if isinstance(x, Expression)]
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    name = eqn.primitive.name
    is_cast = name == "convert_element_type" and waiting[0].is_table
    if is_cast and _is_wider(dtype, waiting[0].dtype):
        return [cast_table(waiting[0], dtype)]
    has_table = any(x.has_table for x in waiting)
    allowed = ((), shape) if has_table else ((),)
    atoms: list[Any] = eqn.invars
    for atom, x in zip(atoms, args, strict=True):
        if atom.aval.shape not in ((shape,) if isinstance(x, Expression) else allowed):
            return NotImplemented
    # In the context of the lookup, which may have another mesh.
    function = functools.partial(bind, eqn.primitive, **eqn.params)
    is_stopped = name in WITHOUT_DERIVATIVE
    return [elementwise(shape, dtype, function, *args, is_stopped=is_stopped)]


def _is_wider(new: Any, old: Any) -> bool:
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


def _same_values(walk: Walk, eqn: JaxprEqn, needed: Any, value: Expression) -> Results:
    """What moves a table moves what an expression is computed of."""
    if walk.is_plan:
        return [value]
    below = expressions_below([value])

    def moved(x: Any) -> Any:
        return bind_eqn(eqn, x) if jnp.shape(x) == value.shape else along(x)

    def along(x: Any, ndim: int | None = None) -> Any:
        """Lies as the table along the leading axes, as what is kept of its rows."""
        if eqn.primitive.name != "reshard":
            return x
        to, ndim = _out(eqn).sharding, jnp.ndim(x) if ndim is None else ndim
        spec = PartitionSpec(*to.spec[:ndim])
        return jax.reshard(x, NamedSharding(to.mesh, spec))

    arrays = []
    for inner in below:
        own = arrays_of(inner)
        if isinstance(own, StaleTable):
            array, rows = jax.tree.map(moved, (own.array, own.rows))
            own = jax.tree.map(lambda x: along(x, 0), own)
            arrays.append(own._replace(array=array, rows=rows))
        else:
            arrays.append(jax.tree.map(moved, own))
    return [with_arrays(below, arrays)[value]]


def _vary(walk: Walk, eqn: JaxprEqn, needed: Any, value: Expression) -> Results:
    if value.is_table:
        return _same_values(walk, eqn, needed, value)
    # What is looked up may vary already.
    function = functools.partial(vary, axes=tuple(eqn.params["axes"]))
    return [elementwise(value.shape, value.dtype, function, value)]


def _barrier(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    """Tables pass beside it."""
    if walk.is_plan:
        return args
    held = [x for x in args if not isinstance(x, Expression)]
    rest = iter(lax.optimization_barrier(held))
    return [x if isinstance(x, Expression) else next(rest) for x in args]


def _broadcast(
    walk: Walk, eqn: JaxprEqn, needed: Any, value: Any, *rest: Any
) -> Results:
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    operand: Any = eqn.invars[0].aval
    is_scalar = not isinstance(value, Expression) and not operand.shape
    if is_scalar and shape in walk.shapes:
        return [fill(shape, dtype, value)]
    if isinstance(value, Expression) or rest:
        return NotImplemented
    return walk.as_it_is(eqn, [value])


# Lookups.


def _gather(walk: Walk, eqn: JaxprEqn, needed: Any, value: Any, ids: Any) -> Results:
    if not isinstance(value, Expression) or isinstance(ids, Expression):
        return NotImplemented
    deltas = None
    if any(needed) and value.leaves:
        lookup = lookup_of_gather(eqn, value.shape)
        if lookup is None:
            return NotImplemented
        indices = functools.cache(lambda: indices_of_gather(eqn, ids))
        deltas = walk.look_up(lookup, value, axes_of_type(_out(eqn)), indices)
    if walk.is_plan:
        return [None]
    rows = read_gather(eqn, value, ids, deltas)
    return NotImplemented if rows is None else [rows]


def _slice(walk: Walk, eqn: JaxprEqn, needed: Any, value: Any, *starts: Any) -> Results:
    lookup = lookup_of_slice(eqn, value.shape)
    if lookup is None:
        return NotImplemented
    first = starts or constants(eqn.params["start_indices"])
    indices = functools.cache(lambda: indices_of_slice(lookup, first))
    deltas = None
    if any(needed) and value.leaves:
        deltas = walk.look_up(lookup, value, axes_of_type(_out(eqn)), indices)
    if walk.is_plan:
        return [None]
    return [read_slice(eqn, value, starts, indices(), deltas)]


def _look_up_by_kernel(
    walk: Walk, eqn: JaxprEqn, needed: Any, value: Any, *rest: Any
) -> Results:
    """The kernel's lookup, in a gradient of a gradient, as the gather it stands for."""
    gather = first_gather(as_closed(eqn.params["jaxpr"]).jaxpr, _out(eqn).shape)
    if len(rest) != 1 or gather is None:
        return NotImplemented
    return _gather(walk, gather, needed, value, *rest)


# Functions under `jit` that are lookups as a whole, by their name.
LOOKUP_FUNCTIONS: dict[str, Rule] = {
    "look_up_by_kernel": _look_up_by_kernel,
    "bag_lookup": functools.partial(rules_bags.bag_lookup, _gather),
}


def _jit(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    rule = LOOKUP_FUNCTIONS.get(eqn.params["name"])
    results = NotImplemented if rule is None else rule(walk, eqn, needed, *args)
    if results is NotImplemented:
        results = rules_calls.call(walk, eqn, needed, *args)
    return results


def _custom_jvp(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    body = as_closed(eqn.params["call_jaxpr"])
    names = [inner.params.get("name") for inner in body.jaxpr.eqns]
    if names == ["bag_function"]:  # whose derivative that of `bag_lookup` has
        return walk.evaluate(body, args, needed)
    return rules_elementwise_calls.custom_jvp(walk, eqn, needed, *args)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "optimization_barrier": _barrier,
    "pvary": _vary,
    "reshard": _same_values,
    "sharding_constraint": _same_values,
    "broadcast_in_dim": _broadcast,
    "gather": _gather,
    "slice": _slice,
    "dynamic_slice": _slice,
    "jit": _jit,
    "closed_call": rules_calls.call,
    "eval_jaxpr": rules_calls.call,  # in JAX 0.11
    "custom_vmap_call": rules_calls.call,
    "custom_jvp_call": _custom_jvp,
    "remat2": rules_calls.remat,
    "scan": rules_calls.scan,
    "cond": rules_calls.cond,
    "shard_map": rules_shard_map.shard_map,
}
