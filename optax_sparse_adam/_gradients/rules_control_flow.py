"""The rules of the interpreter for primitives with jaxprs inside: calls and loops."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jax_extras.varying_axes import vary, varying_axes
from .interpreter import Blame, Context, Results, Rule, Verdict
from .symbolic_values import (
    DenseCarry,
    Part,
    RowSum,
    dense,
    every_row,
    is_deferred,
    padded,
    touched_by,
)


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def call(name: str) -> Rule:
    """A primitive that evaluates the jaxpr in this parameter."""

    def apply(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
        return context.evaluate(_closed(eqn.params[name]), args)

    def judge(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
        verdicts = [verdict_of(atom) for atom in eqn.invars]
        return context.judge(_closed(eqn.params[name]).jaxpr, verdicts)

    return Rule(apply, judge)


def remat(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Keeps the barrier without which XLA would undo the rematerialization.

    Tables pass beside it, so that nothing can make a copy of them.
    """
    flags, values = eqn.params["prevent_cse"], list(args)
    flags = flags if isinstance(flags, tuple) else (flags,) * len(args)
    held = [i for i, flag in enumerate(flags) if flag and not is_deferred(args[i])]
    if eqn.params["differentiated"] and held:
        groups: dict[tuple[str, ...], list[int]] = {}
        for i in held:  # one barrier would make all vary over the same mesh axes
            groups.setdefault(varying_axes(values[i]), []).append(i)
        for group in groups.values():
            barred = lax.optimization_barrier([values[i] for i in group])
            for i, value in zip(group, barred, strict=True):
                values[i] = value
    return context.evaluate(_closed(eqn.params["jaxpr"]), values)


class _TooManyRows(Exception):
    """Raised where a loop would store more rows than the table has."""


def _numbers(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    The rest have an axis more outside of the body. JAX's own note of it differs from
    version to version.
    """

    def whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(x.aval.shape == y.aval.shape for x, y in pairs)

    body = eqn.params["jaxpr"].jaxpr
    carry = whole(eqn.outvars, body.outvars)
    return whole(eqn.invars, body.invars) - carry, carry


def scan(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """A carried sum of rows becomes the rows of all iterations.

    A sum that the body uses otherwise is carried as an array, as under `jax.grad`. A
    sum to which the loop adds more rows than the table has is carried as an array
    together with flags for the rows that were touched.
    """
    if not any(map(is_deferred, args)):
        return NotImplemented
    consts, carry = _numbers(eqn)
    carried = range(consts, consts + carry)
    values = list(args)
    full: dict[int, Any] = {}
    while True:
        sums = [
            i for i in carried if isinstance(values[i], RowSum) and not values[i].axes
        ]
        try:
            return _scan_sums(context, eqn, values, sums, full)
        except DenseCarry as error:
            (i,) = error.args
            if i[0] is not eqn:
                raise
            values[i[1]] = dense(values[i[1]])
            context.blamed.append(eqn)
        except _TooManyRows as error:
            here, i, *layout = error.args
            if here is not eqn:
                raise
            full[i] = layout


def _scan_sums(
    context: Context,
    eqn: JaxprEqn,
    args: Sequence[Any],
    sums: Sequence[int],
    full: dict[int, Any],
) -> list[Any]:
    params, body = eqn.params, eqn.params["jaxpr"]
    first, number = _numbers(eqn)
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
            if not isinstance(total, RowSum) or total.carry != (eqn, i) or total.axes:
                raise DenseCarry((eqn, i))
            if i in full:
                new_totals[i] = _accumulate(totals[i], total.parts)
            else:
                parts[i] = total.parts
                _check_rows(eqn, i, total)
        arrays = [dense(results[i - first]) for i in plain]
        return (arrays, new_totals), (parts, [dense(y) for y in results[number:]])

    totals = {i: _nothing(args[i], *full[i]) for i in sums if i in full}
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
    rows = eqn.params["length"] * total.number
    if rows > math.prod(total.shape[: total.depth]):
        axes = varying_axes(*(array for part in total.parts for array in part))
        raise _TooManyRows(eqn, i, total.depth, axes)


def _nothing(
    total: RowSum, depth: int, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros(total.shape, total.dtype)
    return vary(zeros, axes), vary(jnp.zeros(total.shape[:depth], bool), axes)


def _accumulate(total: Any, parts: Sequence[Part]) -> tuple[jax.Array, jax.Array]:
    array, touched = total
    array = array + dense(RowSum(array.shape, array.dtype, tuple(parts)))
    for part in parts:
        touched = touched_by(touched, part, array.shape)
    return array, touched


def judge_scan(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    first, number = _numbers(eqn)
    verdicts = [verdict_of(atom) for atom in eqn.invars]
    xs = len(verdicts) - first - number
    inner = [*verdicts[: first + number], *[Blame(None)] * xs]
    results = context.judge(eqn.params["jaxpr"].jaxpr, inner)
    stacked = [Blame(eqn)] * (len(results) - number)
    return [*results[:number], *stacked]


def cond(context: Context, eqn: JaxprEqn, index: Any, *args: Any) -> Results:
    """Sums of rows get as many rows as the branch that has most, the rest padding."""
    branches = eqn.params["branches"]

    layouts: list[list[Any]] = []

    def look(branch: ClosedJaxpr) -> None:
        layouts.append(context.evaluate(branch, args))

    for branch in branches:
        jax.eval_shape(functools.partial(look, branch))
    rows: dict[int, tuple[int, int]] = {}
    for i, column in enumerate(zip(*layouts, strict=True)):
        if all(isinstance(value, RowSum) and value.is_plain for value in column):
            depths = [value.depth for value in column if value.parts]
            number = max(value.number for value in column)
            rows[i] = (number, min(depths, default=1))

    def run(branch: ClosedJaxpr) -> list[Any]:
        results = context.evaluate(branch, args)
        return [
            padded(value, *rows[i]) if i in rows else dense(value)
            for i, value in enumerate(results)
        ]

    results = lax.switch(index, [functools.partial(run, b) for b in branches])
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return [
        RowSum(aval.shape, aval.dtype, (value,)) if i in rows else value
        for i, (aval, value) in enumerate(zip(avals, results, strict=True))
    ]


def judge_cond(context: Context, eqn: JaxprEqn, verdict_of: Any) -> list[Verdict]:
    verdicts = [verdict_of(atom) for atom in eqn.invars[1:]]
    columns = zip(
        *(context.judge(b.jaxpr, verdicts) for b in eqn.params["branches"]), strict=True
    )
    return [next((v for v in column if v is not None), None) for column in columns]
