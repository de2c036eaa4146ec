"""The rules of the interpreter for elementwise primitives.

Three kinds of equations keep a sum of rows one:

* Linear ones, such as a product, act on each entry. Entries of one row still add up.
* A function `f` of one sum with `f(0) == 0`, such as a cast that rounds, acts on the
  sum of each row: the entries of each row are added up first.
* Everything else gets plain arrays.

On the way forward, a function of tables and scalars waits for a lookup.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from .._jax_extras.jaxprs import LINEAR, NONLINEAR, bind_eqn
from .analysis import Analysis, Number, Obstacle, Obstacles, Rule, number_of
from .interpreter import Context, Results, shape_of
from .rule_kinds import Apply, all_of, any_of
from .symbolic_values import (
    Deferred,
    Part,
    RowSum,
    all_gather_parts,
    elementwise,
    fill,
    is_symbolic,
)


def _out(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval


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
    "abs asin asinh atan atanh cbrt ceil convert_element_type erf erf_inv expm1 floor "
    "log1p reduce_precision round sign sin sinh sqrt square tan tanh"
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
    if not all(isinstance(case, RowSum) and case.carry is None for case in cases):
        return NotImplemented
    axes = cases[0].axes
    if any(case.axes != axes for case in cases):
        cases = tuple(map(all_gather_parts, cases))
        axes = frozenset()

    def chosen(i: int, part: Part) -> Part:
        zeros = [jnp.zeros_like(part.data)] * len(cases)
        zeros[i] = part.data
        return Part(part.indices, bind_eqn(eqn, context.rows(which, part), *zeros))

    parts = [chosen(i, part) for i, case in enumerate(cases) for part in case.parts]
    return [RowSum(_out(eqn).shape, _out(eqn).dtype, tuple(parts), axes=axes)]


ELEMENTWISE_RULES: dict[str, Rule] = {
    **{name: _of_one(_elementwise()) for name in NONLINEAR.split()},
    **{name: all_of(_elementwise(_each_row)) for name in LINEAR.split()},
    "convert_element_type": _of_one(_elementwise(_cast)),
    "reduce_precision": _of_one(_elementwise()),
    "mul": any_of(_elementwise(_multiply)),
    "div": all_of(_elementwise(_divide), 0, 1, _is_floating),
    "add": all_of(_elementwise(_add)),
    "add_any": all_of(_elementwise(_add)),
    "sub": all_of(_elementwise(_subtract)),
    "select_n": all_of(_elementwise(_select), 1),
}
