"""Which values of a program the loss depends on differentiably: a backward slice.

A use of a table matters to the gradient only if the loss is computed from it, not by
way of integers, of `stop_gradient`, or of another function whose derivative is zero.
Auxiliary outputs and what `jax.debug.print` shows are no such uses. For the loss
`sum(t[ids]) * stop_gradient(sum(t))`, read from its end:

    a = gather t ids           needed for c
    c = reduce_sum a           needed for the loss
    d = reduce_sum t           not needed: stop_gradient hands no derivative on
    e = stop_gradient d        needed for the loss, d for nothing
    f = mul c e                the loss

A value that is wrongly taken for needed costs time at most: the gradient is dense then.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

# Primitives with a jaxpr that is evaluated once, in their place, and its parameter.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # in JAX 0.11
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
}
# Primitives whose derivative is zero, though their results are floating point numbers.
WITHOUT_DERIVATIVE = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def has_derivative(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    The rest have an axis more outside of the body. JAX's own note of it differs from
    version to version.
    """

    def count(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(x.aval.shape == y.aval.shape for x, y in pairs)

    body = eqn.params["jaxpr"].jaxpr
    carried = count(eqn.outvars, body.outvars)
    return count(eqn.invars, body.invars) - carried, carried


class Needed(NamedTuple):
    """The variables of a jaxpr that its needed results depend on, and which inputs."""

    variables: frozenset[Var]
    inputs: tuple[bool, ...]


class BackwardSlice:
    """The slices of one program; each jaxpr is read once for each set of results."""

    def __init__(self) -> None:
        # A jaxpr stays alive as long as its `id` is a key.
        self._found: dict[Any, tuple[Jaxpr, Needed]] = {}

    def of(self, jaxpr: Jaxpr, needed: Sequence[bool]) -> Needed:
        """The slice of a jaxpr, given which of its results are needed."""
        key = (id(jaxpr), tuple(needed))
        if key not in self._found:
            self._found[key] = jaxpr, self._find(jaxpr, needed)
        return self._found[key][1]

    def _find(self, jaxpr: Jaxpr, needed: Sequence[bool]) -> Needed:
        found: set[Var] = set()

        def add(atoms: Sequence[Any], flags: Sequence[bool]) -> None:
            for atom, flag in zip(atoms, flags, strict=True):
                aval: Any = atom.aval
                if flag and isinstance(atom, Var) and has_derivative(aval.dtype):
                    found.add(atom)

        add(jaxpr.outvars, needed)
        for eqn in reversed(jaxpr.eqns):
            results = [var in found for var in eqn.outvars]
            if any(results):
                add(eqn.invars, self.operands(eqn, results))
        return Needed(frozenset(found), tuple(var in found for var in jaxpr.invars))

    def operands(self, eqn: JaxprEqn, needed: Sequence[bool]) -> Sequence[bool]:
        """Which operands of an equation its needed results depend on."""
        name = eqn.primitive.name
        if name in WITHOUT_DERIVATIVE or not any(needed):
            return [False] * len(eqn.invars)
        if name in CALLS:
            return self.of(as_closed(eqn.params[CALLS[name]]).jaxpr, needed).inputs
        if name == "cond":
            branches = (self.of(b.jaxpr, needed) for b in eqn.params["branches"])
            columns = zip(*(branch.inputs for branch in branches), strict=True)
            return [False, *map(any, columns)]
        if name == "scan":
            return self.of(eqn.params["jaxpr"].jaxpr, self.of_body(eqn, needed)).inputs
        if name == "while":
            first = eqn.params["cond_nconsts"]
            inner = eqn.params["body_nconsts"]
            carry = list(needed)
            while True:
                inputs = self.of(eqn.params["body_jaxpr"].jaxpr, carry).inputs
                grown = [a or b for a, b in zip(carry, inputs[inner:], strict=True)]
                if grown == carry:
                    return [*[False] * first, *inputs[:inner], *carry]
                carry = grown
        return [True] * len(eqn.invars)

    def of_body(self, eqn: JaxprEqn, needed: Sequence[bool]) -> list[bool]:
        """Which results of a scan's body are needed in this or a later iteration."""
        first, carried = scan_sizes(eqn)
        results = list(needed)
        while True:
            inputs = self.of(eqn.params["jaxpr"].jaxpr, results).inputs
            later = [*inputs[first : first + carried], *needed[carried:]]
            grown = [a or b for a, b in zip(results, later, strict=True)]
            if grown == results:
                return results
            results = grown
