"""The rules of the interpreter for primitives with jaxprs inside: calls and loops.

A call is evaluated in its place. The body of a loop and the branches of `cond` are
traced once, with their sums of rows as the arrays that these are made of; how these
leave the loop, or all branches in one shape, is decided when their sizes are known.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .._jax_extras.varying_axes import vary, varying_axes
from .analysis import UNKNOWN, Analysis, Obstacle, Obstacles, Rule
from .interpreter import Context, Results, as_closed
from .symbolic_values import (
    DenseCarry,
    Part,
    RowSum,
    all_gather_parts,
    dense,
    every_row,
    is_symbolic,
    padded,
    touched_by,
)


def call(name: str, evaluate: Callable[..., Results] | None = None) -> Rule:
    """A primitive that evaluates the jaxpr in this parameter."""

    def apply(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
        if not context.passes_table(eqn, args):
            return NotImplemented
        values = args if evaluate is None else evaluate(context, eqn, *args)
        jaxpr = as_closed(eqn.params[name])
        return context.evaluate(jaxpr, values, context.wanted(eqn))

    def demand(
        analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]
    ) -> Sequence[bool]:
        return analysis.demand(as_closed(eqn.params[name]).jaxpr, wanted).inputs

    def obstacles(
        analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool], operands: Obstacles
    ) -> Obstacles:
        jaxpr = as_closed(eqn.params[name]).jaxpr
        return analysis.obstacles(jaxpr, wanted, operands)

    return Rule(apply, demand, obstacles)


def _behind_barriers(context: Context, eqn: JaxprEqn, *args: Any) -> list[Any]:
    """Keeps the barrier without which XLA would undo the rematerialization.

    Tables pass beside it, so that nothing can make a copy of them.
    """
    flags, values = eqn.params["prevent_cse"], list(args)
    flags = flags if isinstance(flags, tuple) else (flags,) * len(args)
    held = [i for i, flag in enumerate(flags) if flag and not is_symbolic(args[i])]
    if eqn.params["differentiated"] and held:
        groups: dict[tuple[str, ...], list[int]] = {}
        for i in held:  # one barrier would make all vary over the same mesh axes
            groups.setdefault(varying_axes(values[i]), []).append(i)
        for group in groups.values():
            barred = lax.optimization_barrier([values[i] for i in group])
            for i, value in zip(group, barred, strict=True):
                values[i] = value
    return values


REMAT = call("jaxpr", _behind_barriers)


class _Traced(NamedTuple):
    """A function that was traced, with what it returns."""

    closed: ClosedJaxpr
    shapes: Any

    def __call__(self, *args: Any) -> Any:
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def _trace(function: Callable[..., Any], *avals: Any) -> _Traced:
    return _Traced(*jax.make_jaxpr(function, return_shape=True)(*avals))


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


def _loop_demand(
    analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Which results and operands of a scan are to be sums of rows.

    What is carried is wanted if a wanted result needs it in any later iteration.
    """
    first, carry = _numbers(eqn)
    outs = [flag and i < carry for i, flag in enumerate(wanted)]
    while True:
        inputs = analysis.demand(eqn.params["jaxpr"].jaxpr, outs).inputs
        needed = [*inputs[first : first + carry], *[False] * (len(outs) - carry)]
        grown = [a or b for a, b in zip(outs, needed, strict=True)]
        if grown == outs:
            xs = len(inputs) - first - carry
            return outs, [*inputs[:first], *outs[:carry], *[False] * xs]
        outs = grown


def _scan(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """A carried sum of rows becomes the rows of all iterations.

    A sum that the body uses otherwise is carried as an array, as under `jax.grad`. A
    sum to which the loop adds more rows than the table has is carried as an array
    together with flags for the rows that were touched.
    """
    if not context.passes_table(eqn, args):
        return NotImplemented
    first, carry = _numbers(eqn)
    outs, demanded = _loop_demand(context.analysis, eqn, context.wanted(eqn))
    values = [
        context.dense(x) if isinstance(x, RowSum) and not wanted else x
        for x, wanted in zip(args, demanded, strict=True)
    ]
    while True:
        sums = [
            i
            for i in range(first, first + carry)
            if isinstance(values[i], RowSum) and not values[i].axes
        ]
        try:
            return _scan_sums(context, eqn, values, sums, outs)
        except DenseCarry as error:
            ((owner, i),) = error.args
            if owner is not eqn:
                raise
        values[i] = context.dense(values[i])
        context.blamed.append(eqn)


def _scan_sums(
    context: Context,
    eqn: JaxprEqn,
    args: Sequence[Any],
    sums: Sequence[int],
    outs: Sequence[bool],
) -> list[Any]:
    params, body = eqn.params, eqn.params["jaxpr"]
    first, carry = _numbers(eqn)
    plain = [i for i in range(first, first + carry) if i not in sums]
    axes: dict[int, tuple[str, ...]] = {}

    def step(arrays: Any, xs: Any) -> Any:
        values = [*args[:first], *[None] * carry, *xs]
        for i, array in zip(plain, arrays, strict=True):
            values[i] = array
        for i in sums:
            values[i] = RowSum(args[i].shape, args[i].dtype, carry=(eqn, i))
        inner = context.in_new_trace()
        results = inner.evaluate(body, values, outs)
        parts = {}
        for i in sums:
            total = results[i - first]
            if not isinstance(total, RowSum) or total.carry != (eqn, i) or total.axes:
                raise DenseCarry((eqn, i))
            parts[i] = total.parts
            axes[i] = varying_axes(*(array for part in total.parts for array in part))
        arrays = [inner.dense(results[i - first]) for i in plain]
        return arrays, parts, [inner.dense(y) for y in results[carry:]]

    avals = [var.aval for var in body.jaxpr.invars]
    traced = _trace(step, [avals[i] for i in plain], avals[first + carry :])
    full = {}
    for i in sums:
        total = RowSum(args[i].shape, args[i].dtype, traced.shapes[1][i])
        rows = params["length"] * sum(len(part.indices) for part in total.parts)
        if rows > math.prod(total.shape[: total.depth]):
            full[i] = _nothing(total, axes[i])

    def body_with_totals(carry: Any, xs: Any) -> Any:
        arrays, totals = carry
        arrays, parts, ys = traced(arrays, xs)
        totals = {i: _accumulate(total, parts.pop(i)) for i, total in totals.items()}
        return (arrays, totals), (parts, ys)

    (arrays, totals), (parts, ys) = lax.scan(
        body_with_totals,
        ([context.dense(args[i]) for i in plain], full),
        [context.dense(x) for x in args[first + carry :]],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    results = dict(zip(plain, arrays, strict=True))
    for i in sums:
        init = args[i]
        if i in full:
            array, touched = totals[i]
            new: tuple[Part, ...] = (every_row(touched, array),)
        else:
            new = tuple(Part(*map(_flatten_steps, part)) for part in parts[i])
        results[i] = RowSum(init.shape, init.dtype, init.parts + new, init.carry)
    return [results[i] for i in sorted(results)] + list(ys)


def _flatten_steps(stacked: jax.Array) -> jax.Array:
    return stacked.reshape(-1, *stacked.shape[2:])


def _nothing(total: RowSum, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros(total.shape, total.dtype)
    touched = jnp.zeros(total.shape[: total.depth], bool)
    return vary(zeros, axes), vary(touched, axes)


def _accumulate(total: Any, parts: Sequence[Part]) -> tuple[jax.Array, jax.Array]:
    array, touched = total
    array = array + dense(RowSum(array.shape, array.dtype, tuple(parts)))
    for part in parts:
        touched = touched_by(touched, part, array.shape)
    return array, touched


def _scan_obstacles(
    analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool], operands: Obstacles
) -> Obstacles:
    first, carry = _numbers(eqn)
    outs, _ = _loop_demand(analysis, eqn, wanted)
    xs = len(operands) - first - carry
    inner = [*operands[: first + carry], *[UNKNOWN] * xs]
    results = analysis.obstacles(eqn.params["jaxpr"].jaxpr, outs, inner)
    stacked = [Obstacle(eqn)] * (len(results) - carry)
    return [*results[:carry], *stacked]


SCAN = Rule(
    _scan,
    demand=lambda analysis, eqn, wanted: _loop_demand(analysis, eqn, wanted)[1],
    obstacles=_scan_obstacles,
)


def _cond(context: Context, eqn: JaxprEqn, index: Any, *args: Any) -> Results:
    """Sums of rows get as many rows as the branch that has most, the rest padding."""
    if not context.passes_table(eqn, args):
        return NotImplemented
    wanted = context.wanted(eqn)
    # Devices may take different branches: they sum before, or as JAX does inside.
    args = tuple(all_gather_parts(x) if isinstance(x, RowSum) else x for x in args)

    def results(branch: ClosedJaxpr) -> list[Any]:
        inner = context.in_new_trace()
        return [
            value.parts
            if isinstance(value, RowSum) and value.is_plain and want
            else inner.dense(value)
            for value, want in zip(
                inner.evaluate(branch, args, wanted), wanted, strict=True
            )
        ]

    avals: list[Any] = [var.aval for var in eqn.outvars]
    branches = [
        _trace(functools.partial(results, branch)) for branch in eqn.params["branches"]
    ]

    def sum_of(aval: Any, parts: Any) -> RowSum:
        return RowSum(aval.shape, aval.dtype, parts)

    rows: dict[int, tuple[int, int]] = {}
    for i, column in enumerate(zip(*(b.shapes for b in branches), strict=True)):
        if all(isinstance(value, tuple) for value in column):
            sums = [sum_of(avals[i], parts) for parts in column]
            depths = [total.depth for total in sums if total.parts]
            rows[i] = (max(total.number for total in sums), min(depths, default=1))

    def run(branch: _Traced) -> list[Any]:
        values = []
        for i, value in enumerate(branch()):
            if i in rows:
                value = padded(sum_of(avals[i], value), *rows[i])
            elif isinstance(value, tuple):
                value = dense(sum_of(avals[i], value))
            values.append(value)
        return values

    outputs = lax.switch(index, [functools.partial(run, b) for b in branches])
    return [
        sum_of(avals[i], (value,)) if i in rows else value
        for i, value in enumerate(outputs)
    ]


def _cond_demand(
    analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]
) -> list[bool]:
    branches = eqn.params["branches"]
    columns = zip(
        *(analysis.demand(b.jaxpr, wanted).inputs for b in branches), strict=True
    )
    return [False, *map(any, columns)]


def _cond_obstacles(
    analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool], operands: Obstacles
) -> Obstacles:
    branches = eqn.params["branches"]
    columns = zip(
        *(analysis.obstacles(b.jaxpr, wanted, operands[1:]) for b in branches),
        strict=True,
    )
    return [next((x for x in column if x is not None), None) for column in columns]


COND = Rule(_cond, _cond_demand, _cond_obstacles)
