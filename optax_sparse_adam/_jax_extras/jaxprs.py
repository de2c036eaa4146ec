"""What the readers of jaxprs share: of gradients, of row-wise updates, of updates in
place.

An equation is evaluated in one of two ways: `evaluate_eqn` does what it says, whatever
it is; `bind_eqn` applies an elementwise one to operands of another shape, such as some
rows of a table.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from .varying_axes import bind

# Primitives of one result, each element of which is computed from the same element of
# every operand, or from operands that are scalars. Gradient rules, `lazy_row_analysis`
# and `update_in_place` believe it: a wrong name here gives wrong numbers in all three.
# One whose derivative is zero is named in `_gradients/backward_slice.py`, too.
_NAMES = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le lgamma log log1p log2 logistic lt "
    "max min mul name ne neg nextafter not one_minus_square or polynomial pow "
    "reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
)
ELEMENTWISE = frozenset(_NAMES.split())

# The parameter of a primitive that says how many rows it makes.
_ROWS = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}

_DEBUG_INFO = DebugInfo("optax_sparse_adam", "equation", None, None)


def evaluate_eqn(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """JAX evaluates the equation, and keeps its name and its source line."""
    atoms = zip(eqn.invars, args, strict=True)
    values = {atom: arg for atom, arg in atoms if isinstance(atom, Var)}
    single = Jaxpr((), list(values), eqn.outvars, [eqn], debug_info=_DEBUG_INFO)
    return list(jaxpr_as_fun(ClosedJaxpr(single, ()))(*values.values()))


def bind_eqn(eqn: JaxprEqn, *args: Any, **params: Any) -> Any:
    """Applies the primitive of an equation to operands that may have another shape.

    JAX may check the operands of an equation, as `evaluate_eqn` makes them, against the
    shapes that it was traced with.
    """
    with eqn.ctx.manager:
        return bind(eqn.primitive, *args, **(eqn.params | params))


class Step(NamedTuple):
    """An equation whose operands and results are numbered."""

    eqn: JaxprEqn
    operands: list[int]
    results: list[int]


class Program:
    """The equations of a jaxpr, those of each `jit` inside of it included.

    Values are numbered, the arguments first. Values of an outer trace, in `consts`, are
    no part of the steps, which may outlive it.
    """

    def __init__(self, closed: ClosedJaxpr):
        self.steps: list[Step] = []
        self.maker: dict[int, int] = {}  # the step that makes a value
        self.literals: dict[int, Any] = {}
        self.consts: dict[int, Any] = {}
        self.size = len(closed.jaxpr.invars)
        self.inputs = list(range(self.size))
        self.outputs = self._inline(closed, self.inputs)

    def _new(self, known: dict[int, Any], value: Any = None) -> int:
        number, self.size = self.size, self.size + 1
        known[number] = value
        return number

    def _inline(self, closed: ClosedJaxpr, args: list[int]) -> list[int]:
        numbers: dict[Any, int] = dict(zip(closed.jaxpr.invars, args, strict=True))
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[var] = self._new(self.consts, value)

        def number(atom: Any) -> int:
            is_literal = isinstance(atom, Literal)
            return self._new(self.literals, atom.val) if is_literal else numbers[atom]

        for eqn in closed.jaxpr.eqns:
            operands = list(map(number, eqn.invars))
            if eqn.primitive.name == "jit":
                results = self._inline(eqn.params["jaxpr"], operands)
            else:
                step = len(self.steps)
                results = [self._new(self.maker, step) for _ in eqn.outvars]
                self.steps.append(Step(eqn, operands, results))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return list(map(number, closed.jaxpr.outvars))

    def slice(
        self, wanted: Iterable[int], stop: Callable[[int], bool] = lambda number: False
    ) -> tuple[list[Step], list[int]]:
        """The steps that lead to these values, and the values that they start from."""
        todo, seen, steps, starts = list(wanted), set[int](), set[int](), list[int]()
        while todo:
            number = todo.pop()
            if number in seen or number in self.literals:
                continue
            seen.add(number)
            if number in self.maker and not stop(number):
                steps.add(self.maker[number])
                todo += self.steps[self.maker[number]].operands
            else:
                starts.append(number)
        return [self.steps[step] for step in sorted(steps)], starts


def evaluate(
    steps: list[Step], given: dict[int, Any], rows: int | None = None
) -> dict[int, Any]:
    """Evaluates the steps, and returns all values by their number.

    With `rows`, results have that many rows in place of the number that was traced.
    """
    env = dict(given)
    for eqn, operands, results in steps:
        args = [env[number] for number in operands]
        made = evaluate_eqn(eqn, args) if rows is None else _of_rows(rows, eqn, args)
        env.update(zip(results, made, strict=True))
    return env


def _of_rows(rows: int, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """The one result of an equation whose operands have so many rows."""
    name = _ROWS.get(eqn.primitive.name)
    shape = {} if name is None else {name: (rows, *eqn.params[name][1:])}
    return [bind_eqn(eqn, *args, **shape)]
