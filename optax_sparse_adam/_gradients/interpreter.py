"""Evaluates the jaxpr of a gradient without computing anything of a table's size.

A gradient's jaxpr looks rows up on its way forward and ends, for each table, in
`scatter-add(zeros, ids, rows)`, inside whatever the model wraps its lookups in. The
interpreter walks it with the two stand-ins for tables of `_values` and a rule for
each primitive that can treat them (`_rules`). A primitive without a rule gets plain
arrays: it then costs what it costs under `jax.grad`, and is as right.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._jax_extras.jaxprs import evaluate_eqn
from .symbolic_values import dense, is_deferred


class Blame(NamedTuple):
    """Why a value is no sum of rows.

    Attributes:
      eqn: The equation in the way, `None` if unknown.
      line: Where the user's code calls for it.
    """

    eqn: JaxprEqn | None
    line: str = ""


Verdict = Blame | None  # None: a sum of rows
Results = Any  # what a rule returns: a list, or NotImplemented


class Rule(NamedTuple):
    """What to do with one primitive when tables are concerned.

    Attributes:
      apply: `apply(context, eqn, *args)` returns the list of results, or
        `NotImplemented` to let JAX evaluate the equation on plain arrays.
      judge: `judge(context, eqn, verdict_of)` returns a verdict for each result, given
        a function that returns the verdict of an operand.
    """

    apply: Callable[..., Any]
    judge: Callable[..., Sequence[Verdict]]


class Context(NamedTuple):
    """What holds for a whole evaluation.

    Attributes:
      shapes: Shapes of the tables whose gradients are to be sums of rows.
      rules: The rule of each primitive, by name.
      blamed: Equations that have made a sum of rows dense after all.
    """

    shapes: frozenset[tuple[int, ...]]
    rules: dict[str, Rule]
    blamed: list[JaxprEqn]

    def is_table(self, var: Any) -> bool:
        shape = getattr(var.aval, "shape", None)
        return shape in self.shapes and jnp.issubdtype(var.aval.dtype, jnp.floating)

    def evaluate(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr; arguments and results may stand for tables."""
        jaxpr: Jaxpr = closed.jaxpr
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
            results = self._evaluate_eqn(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            for var in dead.pop():
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluate_eqn(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        rule = self.rules.get(eqn.primitive.name)
        concerned = any(map(is_deferred, args)) or any(map(self.is_table, eqn.outvars))
        if rule is not None and concerned:
            with eqn.ctx.manager:
                results = rule.apply(self, eqn, *args)
            if results is not NotImplemented:
                return list(results)
        return evaluate_eqn(eqn, list(map(dense, args)))

    def judge(self, jaxpr: Jaxpr, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Finds out which results of a jaxpr are sums of rows, and what is in the way.

        Nothing is computed. Only values of a table's shape are followed.

        Args:
          jaxpr: The jaxpr.
          verdicts: What is known of each of its inputs.
        """
        env: dict[Any, Verdict] = dict(zip(jaxpr.invars, verdicts, strict=True))

        def verdict_of(atom: Any) -> Verdict:
            return (
                Blame(None) if isinstance(atom, Literal) else env.get(atom, Blame(None))
            )

        for eqn in jaxpr.eqns:
            if not any(map(self.is_table, eqn.outvars)):
                continue
            rule = self.rules.get(eqn.primitive.name)
            if rule is None:
                results: Sequence[Verdict] = [Blame(eqn)] * len(eqn.outvars)
            else:
                results = rule.judge(self, eqn, verdict_of)
            for var, verdict in zip(eqn.outvars, results, strict=True):
                if verdict is not None and not verdict.line:
                    # What jnp functions hold inside has no line of its own.
                    line = source_info_util.summarize(eqn.source_info)
                    verdict = Blame(verdict.eqn or eqn, line)
                env[var] = verdict
        return [verdict_of(atom) for atom in jaxpr.outvars]
