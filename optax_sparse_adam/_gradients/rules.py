"""The rules of the interpreter: one entry for each primitive in `RULES`.

A new primitive is a new entry: what to do with it (`apply`), through which operands a
sum of rows reaches its results (`demand`), and what keeps a result from being one
(`obstacles`). An elementwise primitive needs its name in `_jax_extras.jaxprs` only.

Three kinds of elementwise equations keep a sum of rows one:

* Linear ones, such as a product, act on each entry. Entries of one row still add up.
* A function `f` of one sum with `f(0) == 0`, such as a cast that rounds, acts on the
  sum of each row: the entries of each row are added up first.
* Everything else gets plain arrays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import LINEAR, NONLINEAR, bind_eqn
from .._rows.padding import in_bounds
from . import rules_control_flow, rules_custom, rules_shard_map
from .analysis import Analysis, Number, Obstacle, Obstacles, Rule, number_of
from .interpreter import Context, Results, shape_of
from .rules_lookups import (
    gather_from,
    is_pad_of_row,
    is_scatter_of_rows,
    is_update_of_rows,
    look_up,
    pad_part,
    scatter_part,
    slice_reader,
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
)

Apply = Callable[..., Results]


def _out(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval


# Through which operands a sum of rows reaches a result.


def _none(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    return [False] * len(eqn.invars)


def _never(apply: Apply) -> Rule:
    """No result is a sum of rows."""

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        return [Obstacle(eqn)] * len(eqn.outvars)

    return Rule(apply, _none, obstacles)


def _all_of(
    apply: Apply,
    start: int = 0,
    stop: int | None = None,
    condition: Callable[[JaxprEqn], bool] = lambda eqn: True,
) -> Rule:
    """The result is a sum of rows if all of these operands are."""

    def demand(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
        chosen = range(len(eqn.invars))[start:stop]
        return [i in chosen and condition(eqn) for i in range(len(eqn.invars))]

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        if not condition(eqn):
            return [Obstacle(eqn)]
        found = (x for x in operands[start:stop] if x is not None)
        return [next(found, None)]

    return Rule(apply, demand, obstacles)


def _any_of(apply: Apply) -> Rule:
    """The result is a sum of rows if one of the operands is."""

    def may_be(eqn: JaxprEqn) -> list[bool]:
        atoms: list[Any] = eqn.invars
        shape = _out(eqn).shape
        return [not isinstance(x, Literal) and x.aval.shape == shape for x in atoms]

    def demand(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
        return may_be(eqn)

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        found = [x for x, may in zip(operands, may_be(eqn), strict=True) if may]
        return [None if None in found else next(iter(found), Obstacle(eqn))]

    return Rule(apply, demand, obstacles)


def _each_of(apply: Apply) -> Rule:
    """Each result is a sum of rows if its operand is."""
    return Rule(
        apply,
        demand=lambda analysis, eqn, wanted: wanted,
        obstacles=lambda analysis, eqn, wanted, operands: operands,
    )


def _of_one(apply: Apply) -> Rule:
    """The result is a sum of rows if it is a function `f` of one, with `f(0) == 0`."""

    def demand(analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
        var = _only_table(eqn)
        return [x is var for x in eqn.invars]

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Any, operands: Obstacles
    ) -> Obstacles:
        var = _only_table(eqn)
        values = [x.value if isinstance(x, Number) else None for x in operands]
        if var is None or not _is_zero_at_zero(eqn, values):
            return [Obstacle(eqn)]
        pairs = zip(eqn.invars, operands, strict=True)
        return [next(state for x, state in pairs if x is var)]

    return Rule(apply, demand, obstacles)


# Elementwise functions of one value that are zero at zero.

_ZERO_AT_ZERO = (
    "abs asin asinh atan atanh cbrt ceil convert_element_type copy erf erf_inv expm1 "
    "floor log1p name neg reduce_precision round sign sin sinh sqrt square tan tanh"
)
# The same where it depends on other operands, which are numbers, or on parameters.
_AT_ZERO: dict[str, Callable[..., Any]] = {
    "clamp": lambda low, x, high: np.minimum(np.maximum(low, x), high),
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "integer_pow": lambda x, *, y: 0 if y > 0 else 1,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "ne": np.not_equal,
}


def _only_table(eqn: JaxprEqn) -> Any:
    """The variable of the result's shape, if an elementwise equation has only one."""
    atoms: list[Any] = eqn.invars
    shape = _out(eqn).shape
    found = {x for x in atoms if not isinstance(x, Literal) and x.aval.shape == shape}
    return found.pop() if len(found) == 1 else None


def _is_zero_at_zero(eqn: JaxprEqn, values: Sequence[Any]) -> bool:
    """Whether zeros in the place of the only table make zeros.

    Args:
      eqn: An elementwise equation.
      values: Its operands that are known scalars, `None` for all others.
    """
    name, table = eqn.primitive.name, _only_table(eqn)
    if name in _ZERO_AT_ZERO.split():
        return True
    if name not in _AT_ZERO:
        return False
    args = [
        0 if x is table else value for x, value in zip(eqn.invars, values, strict=True)
    ]
    params = eqn.params if name == "integer_pow" else {}
    return None not in args and bool(_AT_ZERO[name](*args, **params) == 0)


def _function_of_one(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Applies a function to the sum of each row."""
    total = next((x for x in args if isinstance(x, RowSum)), None)
    if total is None or total.carry is not None or _only_table(eqn) is None:
        return NotImplemented
    numbers = map(number_of, args)
    if not _is_zero_at_zero(eqn, [x and x.value for x in numbers]):
        return NotImplemented
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    if total.is_zero:
        return [RowSum(shape, dtype)] if any(context.wanted(eqn)) else NotImplemented
    total = context.known.coalesced(total)

    def function(part: Part) -> Any:
        return bind_eqn(eqn, *(part.data if isinstance(x, RowSum) else x for x in args))

    return [total.map(function, dtype)]


# Elementwise primitives.


def _elementwise(linear: Apply | None = None) -> Apply:
    """On the way back, `linear` in a sum of rows; on the way forward, deferred."""

    def apply(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
        if any(isinstance(arg, RowSum) for arg in args):
            for rule in (linear, _function_of_one):
                results = NotImplemented if rule is None else rule(context, eqn, *args)
                if results is not NotImplemented:
                    return results
        return _defer(eqn, *map(_zeros_as_fill, args))

    return apply


def _zeros_as_fill(value: Any) -> Any:
    if isinstance(value, RowSum) and value.is_zero:
        return fill(value.shape, value.dtype, np.zeros([], value.dtype))
    return value


def _defer(eqn: JaxprEqn, *args: Any) -> Results:
    """Waits for a lookup, if that is a function of tables and numbers, or might be."""
    waiting = [arg for arg in args if isinstance(arg, Deferred)]
    others = [arg for arg in args if not isinstance(arg, Deferred)]
    has_table = any(arg.has_table for arg in waiting)
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    allowed = ((), shape) if has_table else ((),)
    if (
        not waiting
        or any(isinstance(arg, RowSum) for arg in others)
        or any(shape_of(arg) not in allowed for arg in others)
        or any(arg.shape != shape for arg in waiting)
    ):
        return NotImplemented
    return [elementwise(shape, dtype, functools.partial(bind_eqn, eqn), *args)]


def _each_row(context: Context, eqn: JaxprEqn, total: RowSum, *rest: Any) -> Results:
    """A linear function of one operand, such as a negation."""
    if not isinstance(total, RowSum) or total.carry is not None:
        return NotImplemented
    if total.is_zero and not (any(context.wanted(eqn)) or _keeps_zero(eqn, rest)):
        return NotImplemented

    def function(part: Part) -> Any:
        return bind_eqn(eqn, part.data, *(context.rows(value, part) for value in rest))

    return [total.map(function, _out(eqn).dtype)]


def _keeps_zero(eqn: JaxprEqn, factors: Any) -> bool:
    """Whether zeros surely stay zeros; not if negated, or multiplied by infinity."""
    name = eqn.primitive.name
    if name in ("mul", "div"):
        (factor,) = factors
        if isinstance(factor, jax.Array) or is_symbolic(factor) or np.ndim(factor):
            return False
        return bool(
            np.isfinite(factor) and (factor > 0 or (name == "mul" and factor == 0))
        )
    return name != "neg"


def _multiply(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if isinstance(left, RowSum):
        return _each_row(context, eqn, left, right)
    return _each_row(context, eqn, right, left)


def _cast(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    return _each_row(context, eqn, value) if _is_exact(eqn) else NotImplemented


def _is_exact(eqn: JaxprEqn) -> bool:
    """Whether a cast keeps every number; one that rounds is not linear."""
    operand: Any = eqn.invars[0]
    old, new = operand.aval.dtype, _out(eqn).dtype
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new)):
        return False
    old, new = jnp.finfo(old), jnp.finfo(new)
    return bool(
        new.nmant >= old.nmant
        and new.maxexp >= old.maxexp
        and new.smallest_subnormal <= old.smallest_subnormal
    )


def _is_floating(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(_out(eqn).dtype, jnp.floating))


def _divide(context: Context, eqn: JaxprEqn, total: Any, divisor: Any) -> Results:
    if not _is_floating(eqn):  # integers are rounded
        return NotImplemented
    return _each_row(context, eqn, total, divisor)


def _add(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if not (isinstance(left, RowSum) and isinstance(right, RowSum)):
        return NotImplemented
    if left.carry is not None and right.carry is not None:
        return NotImplemented
    if left.axes != right.axes:
        # Of a table that some lookups only read in the same way on all devices.
        left, right = all_gather_parts(left), all_gather_parts(right)
    carry = right.carry if left.carry is None else left.carry
    parts: dict[int, Part] = {}
    for part in left.parts + right.parts:
        # Terms of one lookup, as a product rule makes them, stay one entry a row.
        same = parts.get(id(part.indices))
        data = part.data if same is None else same.data + part.data
        parts[id(part.indices)] = Part(part.indices, data)
    unique = len(parts) == 1 and all(x.unique for x in (left, right) if x.parts)
    return [
        RowSum(left.shape, left.dtype, tuple(parts.values()), carry, left.axes, unique)
    ]


def _subtract(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if not isinstance(right, RowSum) or right.carry is not None:
        return NotImplemented
    return _add(context, eqn, left, right.map(lambda part: -part.data, right.dtype))


def _select(context: Context, eqn: JaxprEqn, which: Any, *cases: Any) -> Results:
    if not all(isinstance(case, RowSum) and case.is_plain for case in cases):
        return NotImplemented

    def chosen(i: int, part: Part) -> Part:
        zeros = [jnp.zeros_like(part.data)] * len(cases)
        zeros[i] = part.data
        return Part(part.indices, bind_eqn(eqn, context.rows(which, part), *zeros))

    parts = [chosen(i, part) for i, case in enumerate(cases) for part in case.parts]
    return [RowSum(_out(eqn).shape, _out(eqn).dtype, tuple(parts))]


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
    if jnp.ndim(scalar):
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
        return eqn.primitive.bind(array, *starts, **params)

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
    **{name: _of_one(_elementwise()) for name in NONLINEAR.split()},
    **{name: _all_of(_elementwise(_each_row)) for name in LINEAR.split()},
    "convert_element_type": _of_one(_elementwise(_cast)),
    "reduce_precision": _of_one(_elementwise()),
    "mul": _any_of(_elementwise(_multiply)),
    "div": _all_of(_elementwise(_divide), 0, 1, _is_floating),
    "add": _all_of(_elementwise(_add)),
    "add_any": _all_of(_elementwise(_add)),
    "sub": _all_of(_elementwise(_subtract)),
    "select_n": _all_of(_elementwise(_select), 1),
    "optimization_barrier": _each_of(_barrier),
    "pvary": _all_of(_same_rows),
    "reduce_sum": _never(_reduce_sum),
    "reshard": _all_of(_reshard),
    "sharding_constraint": _all_of(_same_rows),
    "broadcast_in_dim": Rule(_broadcast, _none, _broadcast_obstacles),
    "gather": _never(_gather),
    "slice": _never(_slice),
    "dynamic_slice": _never(_slice),
    "scatter-add": _all_of(_scatter_add, 0, 1, is_scatter_of_rows),
    "pad": Rule(_pad, _none, _pad_obstacles),
    "dynamic_update_slice": _all_of(_update_slice, 0, 1, is_update_of_rows),
    "jit": rules_control_flow.call("jaxpr"),
    "closed_call": rules_control_flow.call("call_jaxpr"),
    "eval_jaxpr": rules_control_flow.call("call_jaxpr"),  # in JAX 0.11
    "custom_vmap_call": rules_control_flow.call("call"),
    "custom_jvp_call": _never(rules_custom.custom_jvp),
    "remat2": rules_control_flow.REMAT,
    "scan": rules_control_flow.SCAN,
    "cond": rules_control_flow.COND,
    "shard_map": rules_shard_map.SHARD_MAP,
    "psum": _each_of(rules_shard_map.psum),  # without check_vma
    "psum_invariant": _each_of(rules_shard_map.psum),
}
