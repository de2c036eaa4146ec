"""Evaluates the jaxpr of a gradient without computing anything of a table's size.

A gradient's jaxpr looks rows up on its way forward and ends, for each table, in
`scatter-add(zeros, ids, rows)`, inside whatever the model wraps its lookups in. The
interpreter walks it with the two stand-ins for tables of `symbolic_values` and a rule
for each primitive that can treat them (`rules`). A primitive without a rule gets plain
arrays: it then costs what it costs under `jax.grad`, and is as right.

The loss `sum(tanh(t)[ids] ** 2)` of a table `t`, equation by equation:

    a = tanh t                     a Deferred: nothing is computed yet
    b = sub 1.0 (mul a a)          a Deferred
    c = gather a ids               the rows `tanh(t[ids])`, an array
    d = mul 2.0 c                  an array
    e = broadcast_in_dim 0.0       demanded by the gradient: a RowSum of no rows
    f = scatter-add e ids d        the RowSum of the rows `d` at `ids`
    g = mul f b                    the RowSum of the rows `d * (1 - tanh(t[ids]) ** 2)`

Which zeros are a RowSum is known beforehand (`analysis`): those that reach the gradient
of a wanted leaf, and no others, whatever their shape.

A call that no stand-in passes through is bound as it is, with its custom derivatives
for whoever differentiates the result. One with custom derivatives that a stand-in does
pass through keeps them, too (`rules_custom`), or gets an array in its place.

Known limits: a function of a table that leaves a branch of `cond`, and one that a loop
carries, becomes an array, as under `jax.grad`. Calls that a table passes through are
evaluated in their place, each time. Rows that no lookup touches have no gradient, where
`jax.grad` multiplies its zeros by infinite derivatives and gives them NaN.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._jax_extras.jaxprs import evaluate_eqn
from .analysis import Analysis, Rule, cast_number
from .symbolic_values import Deferred, Known, Part, RowSum, is_symbolic

Results = Any  # what a rule returns: a list, or NotImplemented


class Context(NamedTuple):
    """What holds for the evaluation of a jaxpr.

    Attributes:
      analysis: Says which values are to be sums of rows.
      rules: The rule of each primitive, by name.
      shapes: Shapes of the tables. Scalars that are broadcast to one of them wait for
        a lookup, as `where(table > 0, table, 0)[ids]` needs none of that size.
      blamed: Equations that have made a sum of rows dense after all.
      known: What has been computed in this trace.
      demanded: The variables of this jaxpr that are to be sums of rows.
      elementwise: Functions with custom derivatives that are taken for elementwise.
    """

    analysis: Analysis
    rules: dict[str, Rule]
    shapes: frozenset[tuple[int, ...]]
    blamed: list[JaxprEqn]
    known: Known
    demanded: frozenset[Var] = frozenset()
    elementwise: frozenset[Any] = frozenset()

    def in_new_trace(self) -> "Context":
        """The context for a jaxpr that JAX traces by itself, such as a loop's body.

        What is computed there must not be used outside.
        """
        return self._replace(known=Known())

    def wanted(self, eqn: JaxprEqn) -> list[bool]:
        """Says for each result of an equation whether it is to be a sum of rows."""
        return [var in self.demanded for var in eqn.outvars]

    def dense(self, value: Any) -> Any:
        """The plain array of any value."""
        return self.known.dense(value)

    def rows(self, value: Any, part: Part) -> Any:
        """The rows of any table-shaped value, or scalar, that a part holds."""
        return self.known.rows(value, part)

    def evaluate(
        self, closed: ClosedJaxpr, args: Sequence[Any], wanted: Sequence[bool]
    ) -> list[Any]:
        """Evaluates a jaxpr; arguments and results may stand for tables.

        Args:
          closed: The jaxpr.
          args: Its arguments.
          wanted: Says for each result whether it is to be a sum of rows.
        """
        jaxpr: Jaxpr = closed.jaxpr
        demanded = self.analysis.demand(jaxpr, wanted).variables
        context = self._replace(demanded=demanded)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        # What no later equation reads is dropped, as it matters outside of jit.
        live = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        dead: list[set[Var]] = []
        for eqn in reversed(jaxpr.eqns):
            atoms = (*eqn.invars, *eqn.outvars)
            dead.append({atom for atom in atoms if isinstance(atom, Var)} - live)
            live |= dead[-1]

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = context._evaluate_eqn(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            for var in dead.pop():
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluate_eqn(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        rule = self.rules.get(eqn.primitive.name)
        if rule is not None and self._concerns(eqn, args):
            with eqn.ctx.manager:
                results = rule.apply(self, eqn, *args)
            if results is not NotImplemented:
                return list(results)
        if len(args) == 1 and (number := cast_number(eqn, args[0])) is not None:
            return [number.value]
        return evaluate_eqn(eqn, list(map(self.dense, args)))

    def _concerns(self, eqn: JaxprEqn, args: list[Any]) -> bool:
        """Whether an equation has to do with tables."""
        if any(map(is_symbolic, args)) or any(self.wanted(eqn)):
            return True
        return eqn.primitive.name == "broadcast_in_dim"

    def passes_table(self, eqn: JaxprEqn, args: Sequence[Any]) -> bool:
        """Whether a function of a table or a sum of rows passes through a call."""
        return any(self.wanted(eqn)) or any(
            isinstance(arg, RowSum) or (isinstance(arg, Deferred) and arg.has_table)
            for arg in args
        )


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an array, a scalar or a stand-in."""
    return value.shape if is_symbolic(value) else jax.numpy.shape(value)
