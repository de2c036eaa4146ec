"""The rules of the interpreter: one entry for each primitive in `RULES`.

A new primitive is a new entry: what to do with it (`apply`), through which operands a
sum of rows reaches its results (`demand`), and what keeps a result from being one
(`obstacles`). An elementwise primitive needs its name in `_jax_extras.jaxprs`, and one
that is zero at zero another one in `rules_elementwise`, to keep a sum of rows one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import bind_eqn
from .._jax_extras.varying_axes import bind, vary
from .._rows.padding import in_bounds
from . import rules_control_flow, rules_custom, rules_shard_map
from .analysis import Analysis, Number, Obstacle, Obstacles, Rule, number_of
from .interpreter import Context, Results
from .reading import gather_from, look_up, slice_reader
from .rule_kinds import all_of, each_of, never, none
from .rules_elementwise import ELEMENTWISE_RULES
from .rules_lookups import (
    is_pad_of_row,
    is_scatter_of_rows,
    is_update_of_rows,
    pad_part,
    scatter_part,
    update_part,
)
from .symbolic_values import (
    Deferred,
    Part,
    RowSum,
    all_gather_parts,
    dense,
    elementwise,
    fill,
    is_symbolic,
    merge_parts,
    table,
    vary_parts,
)


def _out(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval


def _reduce_sum(context: Context, eqn: JaxprEqn, total: Any) -> Results:
    """A sum over all rows needs the stored ones only."""
    if not isinstance(total, RowSum) or not total.is_plain or not total.parts:
        return NotImplemented
    axes = eqn.params["axes"]
    if not all(axis in axes for axis in range(total.depth)):
        return NotImplemented
    part = merge_parts(total)
    rest = tuple(1 + axis - total.depth for axis in axes if axis >= total.depth)
    valid = in_bounds(part.indices, total.shape)
    valid = valid.reshape((-1,) + (1,) * (part.data.ndim - 1))
    data = jnp.where(valid, part.data, jnp.zeros([], part.data.dtype))
    return [jnp.sum(data, axis=(0, *rest), dtype=_out(eqn).dtype)]


def _same_rows(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    """What concerns where or how an array is kept, not what is in it."""
    if isinstance(value, RowSum):
        return [value]
    if isinstance(value, Deferred) and value.is_table:
        return [table(bind_eqn(eqn, dense(value)))]
    return NotImplemented


def _vary(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    """Before anything that may differ by device, the rows of all of them are summed."""
    axes = tuple(eqn.params["axes"])
    if isinstance(value, RowSum) and value.carry is None:
        if not value.axes.isdisjoint(axes):
            value = all_gather_parts(value)
        return [vary_parts(value, axes)]
    if isinstance(value, Deferred) and not value.is_table:
        # What is looked up may vary already.
        function = functools.partial(vary, axes=axes)
        return [elementwise(value.shape, value.dtype, function, value)]
    return _same_rows(context, eqn, value)


def _reshard(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    """The rows of a sum belong to no device in particular."""
    if not isinstance(value, RowSum) or not value.is_plain:
        return _same_rows(context, eqn, value)
    mesh = _out(eqn).sharding.mesh
    if mesh.empty:  # back to a table that jit alone has laid out
        whole = functools.partial(bind_eqn, eqn)
    else:
        to = NamedSharding(mesh, PartitionSpec())
        whole = functools.partial(jax.reshard, out_shardings=to)
    parts = tuple(Part(*map(whole, part)) for part in value.parts)
    return [RowSum(value.shape, value.dtype, parts)]


def _barrier(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Tables pass beside it."""
    held = iter(lax.optimization_barrier([x for x in args if not is_symbolic(x)]))
    return [x if is_symbolic(x) else next(held) for x in args]


# Lookups, and the zeros that their transposes add to.


def _broadcast(context: Context, eqn: JaxprEqn, scalar: Any, *rest: Any) -> Results:
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    if is_symbolic(scalar) or jnp.ndim(scalar):
        return NotImplemented
    if any(context.wanted(eqn)) and _is_zero(scalar):
        return [RowSum(shape, dtype)]
    if shape in context.shapes:
        return [fill(shape, dtype, scalar)]
    return NotImplemented


def _broadcast_obstacles(
    analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
) -> Obstacles:
    number = operands[0]
    zero = isinstance(number, Number) and _is_zero(number.value)
    return [None if zero else Obstacle(eqn)]


def _is_zero(scalar: Any) -> bool:
    """A number known to be zero, not minus zero, which a sum of rows cannot keep."""
    number = number_of(scalar)
    return number is not None and bool(
        number.value == 0 and not np.signbit(number.value)
    )


def _gather(context: Context, eqn: JaxprEqn, value: Any, indices: Any) -> Results:
    if not isinstance(value, Deferred):
        return NotImplemented
    look = look_up if value.is_table else gather_from
    rows = look(eqn, value, context.dense(indices))
    return NotImplemented if rows is None else [rows]


# Parameters of both slices, for an axis of length 1 that stands for all columns.
_SLICE_OF_ONE = {
    "start_indices": 0,
    "limit_indices": 1,
    "strides": 1,
    "slice_sizes": 1,
}


def _slice(context: Context, eqn: JaxprEqn, value: Any, *starts: Any) -> Results:
    if not isinstance(value, Deferred):
        return NotImplemented
    read = slice_reader(eqn, value.shape, starts)
    if read is None and value.is_table:
        return NotImplemented

    def window(array: jax.Array) -> jax.Array:
        sizes = zip(array.shape, value.shape, strict=True)
        params = dict(eqn.params)
        for i in (i for i, (size, whole) in enumerate(sizes) if size < whole):
            for name, number in _SLICE_OF_ONE.items():
                if params.get(name) is not None:
                    params[name] = (*params[name][:i], number, *params[name][i + 1 :])
        return bind(eqn.primitive, array, *starts, **params)

    take = read or window
    return [value.select(take, _out(eqn).shape)]


def _scatter_add(
    context: Context, eqn: JaxprEqn, total: Any, indices: Any, updates: Any
) -> Results:
    if not isinstance(total, RowSum) or total.axes or not is_scatter_of_rows(eqn):
        return NotImplemented
    part = scatter_part(
        eqn, total.shape, context.dense(indices), context.dense(updates)
    )
    return [RowSum(total.shape, total.dtype, (*total.parts, part), total.carry)]


def _update_slice(
    context: Context, eqn: JaxprEqn, total: Any, update: Any, *starts: Any
) -> Results:
    if not isinstance(total, RowSum) or not total.is_zero or not is_update_of_rows(eqn):
        return NotImplemented
    part = update_part(total.shape, context.dense(update), starts)
    return [RowSum(total.shape, total.dtype, (part,))]


def _pad(context: Context, eqn: JaxprEqn, row: Any, value: Any) -> Results:
    if not (any(context.wanted(eqn)) and _is_zero(value) and is_pad_of_row(eqn)):
        return NotImplemented
    part = pad_part(eqn, context.dense(row))
    return [RowSum(_out(eqn).shape, _out(eqn).dtype, (part,))]


def _pad_obstacles(
    analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
) -> Obstacles:
    """Adding one row to zeros is the transpose of `table[0]`."""
    number = operands[1]
    zeros = isinstance(number, Number) and _is_zero(number.value)
    return [None if zeros and is_pad_of_row(eqn) else Obstacle(eqn)]


RULES: dict[str, Rule] = {
    **ELEMENTWISE_RULES,
    "optimization_barrier": each_of(_barrier),
    "pvary": all_of(_vary),
    "reduce_sum": never(_reduce_sum),
    "reshard": all_of(_reshard),
    "sharding_constraint": all_of(_same_rows),
    "broadcast_in_dim": Rule(_broadcast, none, _broadcast_obstacles),
    "gather": never(_gather),
    "slice": never(_slice),
    "dynamic_slice": never(_slice),
    "scatter-add": all_of(_scatter_add, 0, 1, is_scatter_of_rows),
    "pad": Rule(_pad, none, _pad_obstacles),
    "dynamic_update_slice": all_of(_update_slice, 0, 1, is_update_of_rows),
    "jit": rules_control_flow.call("jaxpr"),
    "closed_call": rules_control_flow.call("call_jaxpr"),
    "eval_jaxpr": rules_control_flow.call("call_jaxpr"),  # in JAX 0.11
    "custom_vmap_call": rules_control_flow.call("call"),
    "custom_jvp_call": never(rules_custom.custom_jvp),
    "remat2": rules_control_flow.REMAT,
    "scan": rules_control_flow.SCAN,
    "cond": rules_control_flow.COND,
    "shard_map": rules_shard_map.SHARD_MAP,
    "psum": each_of(rules_shard_map.psum),  # without check_vma
    "psum_invariant": each_of(rules_shard_map.psum),
}
