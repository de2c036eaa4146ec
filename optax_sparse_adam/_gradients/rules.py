"""The rules of the interpreter: one entry for each primitive in `RULES`.

A new primitive is a new entry. An elementwise primitive needs its name only; one that
is linear also says how it acts on a sum of rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import LINEAR, NONLINEAR
from .._rows.gather_scatter import in_bounds
from . import rules_control_flow, rules_shard_map
from .interpreter import Blame, Context, Results, Rule, Verdict
from .rules_lookups import (
    gather_from,
    is_scatter_of_rows,
    is_update_of_rows,
    look_up,
    scatter_part,
    update_part,
)
from .symbolic_values import (
    Deferred,
    Part,
    RowSum,
    dense,
    fill,
    gathered,
    is_deferred,
    merged,
    rows_of,
    table,
)

Judge = Callable[[Context, JaxprEqn, Callable[[Any], Verdict]], list[Verdict]]


def _out(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval


def _bind(eqn: JaxprEqn, *args: Any) -> Any:
    return eqn.primitive.bind(*args, **eqn.params)


# How a result inherits being a sum of rows from its operands.


def _never(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    return [Blame(eqn)]


def _all_of(start: int = 0, stop: int | None = None) -> Judge:
    """A sum of rows if all of these operands are."""

    def judge(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
        verdicts = map(verdict_of, eqn.invars[start:stop])
        return [next((v for v in verdicts if v is not None), None)]

    return judge


def _each_of(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    """Each result is a sum of rows if its operand is."""
    return [verdict_of(atom) for atom in eqn.invars]


def _any_of(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    """A sum of rows if one of the operands is."""
    verdicts = [verdict_of(x) for x in eqn.invars if context.is_table(x)]
    return [None if None in verdicts else next(iter(verdicts), Blame(eqn))]


# Elementwise primitives.


def _elementwise(
    linear: Callable[..., Results] | None = None,
) -> Callable[..., Results]:
    """On the way forward, deferred; on the way back, `linear` on the rows of a sum."""

    def apply(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
        if not any(map(is_deferred, args)):
            return NotImplemented
        if linear is not None and any(isinstance(arg, RowSum) for arg in args):
            results = linear(context, eqn, *args)
            if results is not NotImplemented:
                return results
        shape = _out(eqn).shape
        if any(isinstance(arg, RowSum) and not arg.is_zero for arg in args) or any(
            jnp.shape(arg) not in ((), shape) for arg in args
        ):
            return NotImplemented
        value = functools.partial(_apply_eqn, eqn)
        return [Deferred(shape, _out(eqn).dtype, value, args)]

    return apply


def _apply_eqn(eqn: JaxprEqn, shape: Any, *args: jax.Array) -> Any:
    return _bind(eqn, *args)


def _each_row(context: Context, eqn: JaxprEqn, total: RowSum, *rest: Any) -> Results:
    """A linear function of one operand, such as a cast or a negation."""
    if not isinstance(total, RowSum) or total.carry is not None:
        return NotImplemented
    if total.is_zero and not _keeps_zero(eqn, rest):
        return NotImplemented

    def function(part: Part) -> Any:
        return _bind(eqn, part.data, *(rows_of(value, part) for value in rest))

    return [total.map(function, _out(eqn).dtype)]


def _keeps_zero(eqn: JaxprEqn, factors: Any) -> bool:
    """Whether zeros surely stay zeros; not if negated, or multiplied by infinity."""
    name = eqn.primitive.name
    if name in ("mul", "div"):
        (factor,) = factors
        if isinstance(factor, jax.Array) or is_deferred(factor):
            return False
        return bool(
            np.isfinite(factor) and (factor > 0 or (name == "mul" and factor == 0))
        )
    return name != "neg"


def _multiply(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if isinstance(left, RowSum):
        return _each_row(context, eqn, left, right)
    return _each_row(context, eqn, right, left)


def _add(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if not (isinstance(left, RowSum) and isinstance(right, RowSum)):
        return NotImplemented
    if left.carry is not None and right.carry is not None:
        return NotImplemented
    if left.axes != right.axes:
        # Of a table that some lookups only read in the same way on all devices.
        left, right = gathered(left), gathered(right)
    carry = right.carry if left.carry is None else left.carry
    parts: dict[int, Part] = {}
    for part in left.parts + right.parts:
        # Terms of one lookup, as a product rule makes them, stay one entry a row.
        same = parts.get(id(part.indices))
        data = part.data if same is None else same.data + part.data
        parts[id(part.indices)] = Part(part.indices, data)
    return [RowSum(left.shape, left.dtype, tuple(parts.values()), carry, left.axes)]


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
        return Part(part.indices, _bind(eqn, rows_of(which, part), *zeros))

    parts = [chosen(i, part) for i, case in enumerate(cases) for part in case.parts]
    return [RowSum(_out(eqn).shape, _out(eqn).dtype, tuple(parts))]


def _reduce_sum(context: Context, eqn: JaxprEqn, total: Any) -> Results:
    """A sum over all rows needs the stored ones only."""
    if not isinstance(total, RowSum) or not total.is_plain or not total.parts:
        return NotImplemented
    axes = eqn.params["axes"]
    if not all(axis in axes for axis in range(total.depth)):
        return NotImplemented
    part = merged(total)
    rest = tuple(1 + axis - total.depth for axis in axes if axis >= total.depth)
    valid = in_bounds(part.indices, total.shape)
    valid = valid.reshape((-1,) + (1,) * (part.data.ndim - 1))
    return [jnp.sum(jnp.where(valid, part.data, 0), axis=(0, *rest))]


def _same_rows(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    """What concerns where or how an array is kept, not what is in it."""
    if isinstance(value, RowSum):
        return [value]
    if isinstance(value, Deferred) and value.is_table:
        return [table(_bind(eqn, dense(value)))]
    return NotImplemented


def _reshard(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    """The rows of a sum belong to no device in particular."""
    if not isinstance(value, RowSum) or not value.is_plain:
        return _same_rows(context, eqn, value)
    mesh = _out(eqn).sharding.mesh
    if mesh.empty:  # back to a table that jit alone has laid out
        whole = functools.partial(_bind, eqn)
    else:
        to = NamedSharding(mesh, PartitionSpec())
        whole = functools.partial(jax.reshard, out_shardings=to)
    parts = tuple(Part(*map(whole, part)) for part in value.parts)
    return [RowSum(value.shape, value.dtype, parts)]


def _barrier(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Tables pass beside it."""
    held = iter(lax.optimization_barrier([x for x in args if not is_deferred(x)]))
    return [x if is_deferred(x) else next(held) for x in args]


# Lookups, and the zeros that their transposes add to.


def _broadcast(context: Context, eqn: JaxprEqn, scalar: Any, *rest: Any) -> Results:
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    if jnp.ndim(scalar) or not context.is_table(eqn.outvars[0]):
        return NotImplemented
    if not isinstance(scalar, jax.Array) and _is_zero(scalar):
        return [RowSum(shape, dtype)]
    return [fill(shape, dtype, scalar)]


def _judge_broadcast(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    atom = eqn.invars[0]
    zero = isinstance(atom, Literal) and not np.ndim(atom.val) and _is_zero(atom.val)
    return [None if zero else Blame(eqn)]


def _is_zero(scalar: Any) -> bool:
    """Zero, but not minus zero, which a sum of rows cannot keep."""
    return bool(scalar == 0 and not np.signbit(scalar))


def _gather(context: Context, eqn: JaxprEqn, value: Any, indices: Any) -> Results:
    if not isinstance(value, Deferred):
        return NotImplemented
    look = look_up if value.is_table else gather_from
    rows = look(eqn, value, dense(indices))
    return NotImplemented if rows is None else [rows]


# Parameters of both slices, for an axis of length 1 that stands for all columns.
_SLICE_OF_ONE = {
    "start_indices": 0,
    "limit_indices": 1,
    "strides": 1,
    "slice_sizes": 1,
}


def _slice(context: Context, eqn: JaxprEqn, value: Any, *starts: Any) -> Results:
    if not isinstance(value, Deferred) or value.is_table:
        return NotImplemented

    def take(array: jax.Array) -> jax.Array:
        sizes = zip(array.shape, value.shape, strict=True)
        params = dict(eqn.params)
        for i in (i for i, (size, whole) in enumerate(sizes) if size < whole):
            for name, number in _SLICE_OF_ONE.items():
                if params.get(name) is not None:
                    params[name] = (*params[name][:i], number, *params[name][i + 1 :])
        return eqn.primitive.bind(array, *starts, **params)

    return [value.select(take, _out(eqn).shape)]


def _scatter_add(
    context: Context, eqn: JaxprEqn, total: Any, indices: Any, updates: Any
) -> Results:
    if not isinstance(total, RowSum) or total.axes or not is_scatter_of_rows(eqn):
        return NotImplemented
    part = scatter_part(eqn, total.shape, dense(indices), dense(updates))
    return [RowSum(total.shape, total.dtype, (*total.parts, part), total.carry)]


def _update_slice(
    context: Context, eqn: JaxprEqn, total: Any, update: Any, *starts: Any
) -> Results:
    if not isinstance(total, RowSum) or not total.is_zero or not is_update_of_rows(eqn):
        return NotImplemented
    part = update_part(total.shape, dense(update), starts)
    return [RowSum(total.shape, total.dtype, (part,))]


def _judge_lookup(is_lookup: Callable[[JaxprEqn], bool]) -> Judge:
    def judge(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
        return [verdict_of(eqn.invars[0]) if is_lookup(eqn) else Blame(eqn)]

    return judge


RULES: dict[str, Rule] = {
    **{name: Rule(_elementwise(), _never) for name in NONLINEAR.split()},
    **{name: Rule(_elementwise(_each_row), _all_of()) for name in LINEAR.split()},
    "mul": Rule(_elementwise(_multiply), _any_of),
    "div": Rule(_elementwise(_each_row), _all_of(0, 1)),
    "add": Rule(_elementwise(_add), _all_of()),
    "add_any": Rule(_elementwise(_add), _all_of()),
    "sub": Rule(_elementwise(_subtract), _all_of()),
    "select_n": Rule(_elementwise(_select), _all_of(1)),
    "optimization_barrier": Rule(_barrier, _each_of),
    "pvary": Rule(_same_rows, _all_of()),
    "reduce_sum": Rule(_reduce_sum, _never),
    "reshard": Rule(_reshard, _all_of()),
    "sharding_constraint": Rule(_same_rows, _all_of()),
    "broadcast_in_dim": Rule(_broadcast, _judge_broadcast),
    "gather": Rule(_gather, _never),
    "slice": Rule(_slice, _never),
    "dynamic_slice": Rule(_slice, _never),
    "scatter-add": Rule(_scatter_add, _judge_lookup(is_scatter_of_rows)),
    "dynamic_update_slice": Rule(_update_slice, _judge_lookup(is_update_of_rows)),
    "jit": rules_control_flow.call("jaxpr"),
    "closed_call": rules_control_flow.call("call_jaxpr"),
    "eval_jaxpr": rules_control_flow.call("call_jaxpr"),  # in JAX 0.11
    "custom_jvp_call": rules_control_flow.call("call_jaxpr"),
    "custom_vjp_call": rules_control_flow.call("call_jaxpr"),
    "remat2": Rule(rules_control_flow.remat, rules_control_flow.call("jaxpr").judge),
    "scan": Rule(rules_control_flow.scan, rules_control_flow.judge_scan),
    "cond": Rule(rules_control_flow.cond, rules_control_flow.judge_cond),
    "shard_map": Rule(rules_shard_map.shard_map, rules_shard_map.judge),
    "psum": Rule(rules_shard_map.psum, _each_of),  # without check_vma
    "psum_invariant": Rule(rules_shard_map.psum, _each_of),
}
