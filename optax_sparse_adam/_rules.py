"""The rules of the interpreter: one entry for each primitive in `RULES`.

A new primitive is a new entry. `elementwise` primitives need their name only; those that
are linear in a cotangent also say how they act on a sum of rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ._deferred import (
    Deferred,
    DenseCarry,
    Part,
    RowSum,
    dense,
    every_row,
    fill,
    is_deferred,
    merged,
    padded,
    rows_of,
    table,
    touched_by,
)
from ._interpreter import Blame, Context, Rule, Verdict
from ._lookups import (
    gather_from,
    is_scatter_of_rows,
    is_update_of_rows,
    scatter_part,
    update_part,
)

Results = Any  # a list, or NotImplemented
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

    def function(part: Part) -> Any:
        return _bind(eqn, part.data, *(rows_of(value, part) for value in rest))

    return [total.map(function, _out(eqn).dtype)]


def _multiply(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if isinstance(left, RowSum):
        return _each_row(context, eqn, left, right)
    return _each_row(context, eqn, right, left)


def _add(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, RowSum) and one.is_zero and jnp.shape(other) == one.shape:
            return [other]
    if not (isinstance(left, RowSum) and isinstance(right, RowSum)):
        return NotImplemented
    if left.carry is not None and right.carry is not None:
        return NotImplemented
    carry = right.carry if left.carry is None else left.carry
    parts: dict[int, Part] = {}
    for part in left.parts + right.parts:
        # Terms of one lookup, as a product rule makes them, stay one entry a row.
        same = parts.get(id(part.indices))
        data = part.data if same is None else same.data + part.data
        parts[id(part.indices)] = Part(part.indices, data)
    return [RowSum(left.shape, left.dtype, tuple(parts.values()), carry)]


def _subtract(context: Context, eqn: JaxprEqn, left: Any, right: Any) -> Results:
    if not isinstance(right, RowSum) or right.carry is not None:
        return NotImplemented
    return _add(context, eqn, left, right.map(lambda part: -part.data, right.dtype))


def _select(context: Context, eqn: JaxprEqn, which: Any, *cases: Any) -> Results:
    if not all(isinstance(case, RowSum) and case.carry is None for case in cases):
        return NotImplemented

    def chosen(i: int, part: Part) -> Part:
        zeros = [jnp.zeros_like(part.data)] * len(cases)
        zeros[i] = part.data
        return Part(part.indices, _bind(eqn, rows_of(which, part), *zeros))

    parts = [chosen(i, part) for i, case in enumerate(cases) for part in case.parts]
    return [RowSum(_out(eqn).shape, _out(eqn).dtype, tuple(parts))]


def _same_rows(context: Context, eqn: JaxprEqn, value: Any) -> Results:
    """What concerns where or how an array is kept, not what is in it."""
    if isinstance(value, RowSum):
        return [value]
    if isinstance(value, Deferred) and value.is_table:
        return [table(_bind(eqn, dense(value)))]
    return NotImplemented


# Lookups, and the zeros that their transposes add to.


def _broadcast(context: Context, eqn: JaxprEqn, scalar: Any, *rest: Any) -> Results:
    shape, dtype = _out(eqn).shape, _out(eqn).dtype
    if jnp.ndim(scalar) or not context.is_table(eqn.outvars[0]):
        return NotImplemented
    if not isinstance(scalar, jax.Array) and scalar == 0:
        return [RowSum(shape, dtype)]
    return [fill(shape, dtype, scalar)]


def _judge_broadcast(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    atom = eqn.invars[0]
    zero = isinstance(atom, Literal) and jnp.ndim(atom.val) == 0 and atom.val == 0
    return [None if zero else Blame(eqn)]


def _gather(context: Context, eqn: JaxprEqn, value: Any, indices: Any) -> Results:
    if not isinstance(value, Deferred) or value.is_table:
        return NotImplemented
    rows = gather_from(eqn, value, dense(indices))
    return NotImplemented if rows is None else [rows]


def _slice(context: Context, eqn: JaxprEqn, value: Any, *starts: Any) -> Results:
    if not isinstance(value, Deferred) or value.is_table:
        return NotImplemented
    return [value.select(lambda array: _bind(eqn, array, *starts), _out(eqn).shape)]


def _scatter_add(
    context: Context, eqn: JaxprEqn, total: Any, indices: Any, updates: Any
) -> Results:
    if not isinstance(total, RowSum) or not is_scatter_of_rows(eqn):
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


# Primitives with jaxprs inside.


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _call(name: str) -> Rule:
    """A primitive that evaluates the jaxpr in this parameter."""

    def apply(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
        return context.evaluate(_closed(eqn.params[name]), args)

    def judge(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
        verdicts = [verdict_of(atom) for atom in eqn.invars]
        return context.judge(_closed(eqn.params[name]).jaxpr, verdicts)

    return Rule(apply, judge)


def _remat(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Keeps the barrier without which XLA would undo the rematerialization.

    Tables pass beside it, so that nothing can make a copy of them.
    """
    flags, values = eqn.params["prevent_cse"], list(args)
    flags = flags if isinstance(flags, tuple) else (flags,) * len(args)
    held = [i for i, flag in enumerate(flags) if flag and not is_deferred(args[i])]
    if eqn.params["differentiated"] and held:
        barred = lax.optimization_barrier([values[i] for i in held])
        for i, value in zip(held, barred, strict=True):
            values[i] = value
    return context.evaluate(_closed(eqn.params["jaxpr"]), values)


class _TooManyRows(Exception):
    """Raised where a loop would store more rows than the table has."""


def _scan(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """A carried sum of rows becomes the rows of all iterations.

    A sum that the body uses otherwise is carried as an array, as under `jax.grad`. A
    sum to which the loop adds more rows than the table has is carried as an array
    together with flags for the rows that were touched.
    """
    if not any(map(is_deferred, args)):
        return NotImplemented
    consts = eqn.params["num_consts"]
    carried = range(consts, consts + eqn.params["num_carry"])
    values = list(args)
    full: dict[int, int] = {}
    while True:
        sums = [i for i in carried if isinstance(values[i], RowSum)]
        try:
            return _scan_sums(context, eqn, values, sums, full)
        except DenseCarry as error:
            (i,) = error.args
            if i[0] is not eqn:
                raise
            values[i[1]] = dense(values[i[1]])
        except _TooManyRows as error:
            here, i, depth = error.args
            if here is not eqn:
                raise
            full[i] = depth


def _scan_sums(
    context: Context,
    eqn: JaxprEqn,
    args: Sequence[Any],
    sums: Sequence[int],
    full: dict[int, int],
) -> list[Any]:
    params, body = eqn.params, eqn.params["jaxpr"]
    first, number = params["num_consts"], params["num_carry"]
    plain = [i for i in range(first, first + number) if i not in sums]

    def step(carry: Any, xs: Any) -> Any:
        arrays, totals = carry
        values = [*args[:first], *[None] * number, *xs]
        for i, array in zip(plain, arrays, strict=True):
            values[i] = array
        for i in sums:
            values[i] = RowSum(args[i].shape, args[i].dtype, carry=(eqn, i))
        results = context.evaluate(body, values)
        parts, new_totals = {}, {}
        for i in sums:
            total = results[i - first]
            if not isinstance(total, RowSum) or total.carry != (eqn, i):
                raise DenseCarry((eqn, i))
            if i in full:
                new_totals[i] = _accumulate(totals[i], total.parts)
            else:
                parts[i] = total.parts
                _check_rows(eqn, i, total)
        arrays = [dense(results[i - first]) for i in plain]
        return (arrays, new_totals), (parts, [dense(y) for y in results[number:]])

    totals = {i: _nothing(args[i], full[i]) for i in sums if i in full}
    (arrays, totals), (parts, ys) = lax.scan(
        step,
        ([dense(args[i]) for i in plain], totals),
        [dense(x) for x in args[first + number :]],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    results = dict(zip(plain, arrays, strict=True))
    for i in sums:
        init = args[i]
        if i in full:
            total, touched = totals[i]
            new: tuple[Part, ...] = (every_row(touched, total),)
        else:
            new = tuple(Part(*map(_flatten_steps, part)) for part in parts[i])
        results[i] = RowSum(init.shape, init.dtype, init.parts + new, init.carry)
    return [results[i] for i in sorted(results)] + list(ys)


def _flatten_steps(stacked: jax.Array) -> jax.Array:
    return stacked.reshape(-1, *stacked.shape[2:])


def _check_rows(eqn: JaxprEqn, i: int, total: RowSum) -> None:
    if not total.parts:
        return
    depth = min(part.indices.shape[1] for part in total.parts)
    rows = eqn.params["length"] * sum(part.indices.shape[0] for part in total.parts)
    if rows > math.prod(total.shape[:depth]):
        raise _TooManyRows(eqn, i, depth)


def _nothing(total: RowSum, depth: int) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(total.shape, total.dtype), jnp.zeros(total.shape[:depth], bool)


def _accumulate(total: Any, parts: Sequence[Part]) -> tuple[jax.Array, jax.Array]:
    array, touched = total
    array = array + dense(RowSum(array.shape, array.dtype, tuple(parts)))
    for part in parts:
        touched = touched_by(touched, part)
    return array, touched


def _judge_scan(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    first, number = eqn.params["num_consts"], eqn.params["num_carry"]
    verdicts = [verdict_of(atom) for atom in eqn.invars]
    xs = len(verdicts) - first - number
    inner = [*verdicts[: first + number], *[Blame(None)] * xs]
    results = context.judge(eqn.params["jaxpr"].jaxpr, inner)
    stacked = [Blame(eqn)] * (len(results) - number)
    return [*results[:number], *stacked]


def _cond(context: Context, eqn: JaxprEqn, index: Any, *args: Any) -> Results:
    """Sums of rows get as many rows as the branch that has most, the rest padding."""
    branches = eqn.params["branches"]

    def outputs(branch: ClosedJaxpr) -> list[Any]:
        results = context.evaluate(branch, args)
        return [
            (merged(value) if value.parts else None)
            if isinstance(value, RowSum) and value.carry is None
            else dense(value)
            for value in results
        ]

    layouts = [jax.eval_shape(functools.partial(outputs, b)) for b in branches]
    rows: dict[int, tuple[int, int]] = {}
    for i, column in enumerate(zip(*layouts, strict=True)):
        if all(x is None or isinstance(x, Part) for x in column):
            sizes = [x.indices.shape for x in column if x is not None]
            depth = min((k for _, k in sizes), default=1)
            rows[i] = (max((n for n, _ in sizes), default=0), depth)

    def run(branch: ClosedJaxpr) -> list[Any]:
        results = context.evaluate(branch, args)
        return [
            padded(value, *rows[i]) if i in rows else dense(value)
            for i, value in enumerate(results)
        ]

    results = lax.switch(index, [functools.partial(run, b) for b in branches])
    return [
        RowSum(var.aval.shape, var.aval.dtype, (value,)) if i in rows else value
        for i, (var, value) in enumerate(zip(eqn.outvars, results, strict=True))
    ]


def _judge_cond(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    verdicts = [verdict_of(atom) for atom in eqn.invars[1:]]
    columns = zip(
        *(context.judge(b.jaxpr, verdicts) for b in eqn.params["branches"]), strict=True
    )
    return [next((v for v in column if v is not None), None) for column in columns]


_ELEMENTWISE = """
    abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p
    logistic lt max min ne nextafter not or pow rem round rsqrt shift_left sign sin sinh
    sqrt square stop_gradient tan tanh xor
""".split()

_LINEAR = "convert_element_type copy mul_const name neg reduce_precision".split()

RULES: dict[str, Rule] = {
    **{name: Rule(_elementwise(), _never) for name in _ELEMENTWISE},
    **{name: Rule(_elementwise(_each_row), _all_of()) for name in _LINEAR},
    "mul": Rule(_elementwise(_multiply), _any_of),
    "div": Rule(_elementwise(_each_row), _all_of(0, 1)),
    "add": Rule(_elementwise(_add), _all_of()),
    "add_any": Rule(_elementwise(_add), _all_of()),
    "sub": Rule(_elementwise(_subtract), _all_of()),
    "select_n": Rule(_elementwise(_select), _all_of(1)),
    "sharding_constraint": Rule(_same_rows, _all_of()),
    "broadcast_in_dim": Rule(_broadcast, _judge_broadcast),
    "gather": Rule(_gather, _never),
    "slice": Rule(_slice, _never),
    "dynamic_slice": Rule(_slice, _never),
    "scatter-add": Rule(_scatter_add, _judge_lookup(is_scatter_of_rows)),
    "dynamic_update_slice": Rule(_update_slice, _judge_lookup(is_update_of_rows)),
    "jit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "remat2": Rule(_remat, _call("jaxpr").judge),
    "scan": Rule(_scan, _judge_scan),
    "cond": Rule(_cond, _judge_cond),
}
