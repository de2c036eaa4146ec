"""Which operands of a program the loss depends on differentiably: a backward slice.

A use of a table matters to the gradient only if the loss is computed from it, not
through integers, `stop_gradient`, or another function whose derivative is zero.
Auxiliary outputs and what `jax.debug.print` shows are no such uses. For the loss
`sum(t[ids]) * stop_gradient(sum(t))`, read from its end:

    a = gather t ids           needed for c, and so is t here
    c = reduce_sum a           needed for the loss
    d = reduce_sum t           not needed, and neither is t here
    e = stop_gradient d        needed for the loss, d for nothing
    f = mul c e                the loss

A result that is an operand (`forwarded`) is no use of it: who needs the result needs
the operand, as it was before the equation.

An equation may matter though it returns nothing. What is written to a mutable array
(`jax.new_ref`) is taken for needed, whoever reads it, and so are the operands of an
equation with an effect that is not known here.

An operand that is wrongly taken for needed costs time at most: the gradient is dense.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from .._jax_extras.jaxprs import name_and_params, scan_sizes

# Primitives with a jaxpr that is evaluated once, in their place, and its parameter.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # in JAX 0.11
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
}
# Those whose results have the derivatives that a rule of the user's says.
_BY_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Of the former, those that may lay a result out otherwise: the parameters that say so.
_LAYOUTS = {
    "jit": ("in_shardings", "out_shardings"),
    "shard_map": ("in_specs", "out_specs"),
}
# Primitives whose derivative is zero, though their results are floating point numbers.
WITHOUT_DERIVATIVE = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})
# Effects, by the names of their types, through which no derivative passes: reads and
# writes of mutable arrays, which operands tell, collectives, and what shows or checks
# values. JAX has no public names for them.
_KNOWN_EFFECTS = frozenset(
    {
        "InternalMutableArrayEffect",
        "ReadEffect",
        "WriteEffect",
        "AccumEffect",
        "NamedAxisEffect",
        "DebugEffect",
        "OrderedDebugEffect",
        "ErrorEffect",
        "ShapeAssertionEffect",
    }
)

Flags = Sequence[bool]


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def forwarded(eqn: JaxprEqn, *, as_values: bool = False) -> list[int | None]:
    """For each result of an equation the place of the operand that it is, or `None`.

    Programs of Flax (`nnx.jit`, `nnx.remat`) return every variable of their modules.
    JAX forwards what a `jit`, a loop or a branch returns as it came, and nothing of a
    `checkpoint`, nor of what has one inside.

    A rule of the user's, such as that of a `custom_vjp`, may give a result another
    derivative than its operand has. It is its operand `as_values` only.
    """
    name, params = name_and_params(eqn)
    forwarded_by = functools.partial(forwarded_by_jaxpr, as_values=as_values)
    if name == "cond":
        of_branches = [forwarded_by(b.jaxpr) for b in params["branches"]]
        of_results = zip(*of_branches, strict=True)
        places = [x[0] if len(set(x)) == 1 else None for x in of_results]
        return [None if x is None else 1 + x for x in places]
    if name == "scan":
        first, carried = scan_sizes(eqn)
        places = forwarded_by(params["jaxpr"].jaxpr)
        # A row of each step, in the order of the steps, or what no step changes.
        last = first + carried
        carry = [x if x == first + i else None for i, x in enumerate(places[:carried])]
        return carry + [x if (x or 0) >= last else None for x in places[carried:]]
    if name == "while":
        first, inner = params["cond_nconsts"], params["body_nconsts"]
        places = forwarded_by(params["body_jaxpr"].jaxpr)
        return [first + x if x == inner + i else None for i, x in enumerate(places)]
    calls = CALLS | _BY_RULES if as_values else CALLS
    if calls.get(name) not in params:
        return [None] * len(eqn.outvars)
    places = forwarded_by(as_closed(params[calls[name]]).jaxpr)
    if name not in _LAYOUTS:
        return places
    before, after = (params[x] for x in _LAYOUTS[name])
    pairs = zip(places, after, strict=True)
    return [x if x is not None and before[x] == layout else None for x, layout in pairs]


def computed(eqn: JaxprEqn) -> list[int]:
    """The places of the results of an equation that are none of its operands."""
    return [i for i, place in enumerate(forwarded(eqn)) if place is None]


def forwarded_by_jaxpr(jaxpr: Jaxpr, *, as_values: bool) -> list[int | None]:
    """For each result of a jaxpr the place of the argument that it is, or `None`."""
    places: dict[Any, int] = {x: i for i, x in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        of_eqn = forwarded(eqn, as_values=as_values)
        for var, place in zip(eqn.outvars, of_eqn, strict=True):
            atom = None if place is None else eqn.invars[place]
            if isinstance(atom, Var) and atom in places:
                places[var] = places[atom]
    return [places.get(x) if isinstance(x, Var) else None for x in jaxpr.outvars]


class BackwardSlice:
    """The slice of a program, at any depth of jaxprs inside of jaxprs.

    A jaxpr that is called twice has the needs of both calls.

    Attributes:
      variables: The variables that the loss depends on.
    """

    def __init__(self, jaxpr: Jaxpr | None = None):
        """The slice of the first result of a jaxpr; an empty one without a jaxpr."""
        self.variables: set[Any] = set()
        self._operands: dict[int, Flags] = {}  # by the `id` of equations
        self._inputs: dict[Any, Flags] = {}  # by the `id` of jaxprs, and their results
        if jaxpr is not None:
            self._read(jaxpr, [i == 0 for i in range(len(jaxpr.outvars))])

    def operands(self, eqn: JaxprEqn) -> Flags:
        """For each operand of an equation: whether the loss depends on its use here."""
        return self._operands.get(id(eqn), [False] * len(eqn.invars))

    def _read(self, jaxpr: Jaxpr, needed: Flags) -> Flags:
        """Reads a jaxpr from its end; returns which of its arguments are needed."""
        # A function that is called for its first result, and again for its second one,
        # is read twice, and its variables are those of both.
        key = id(jaxpr), tuple(needed)
        if key in self._inputs:
            return self._inputs[key]
        variables: set[Any] = set()

        def add(atoms: Sequence[Any], flags: Flags) -> None:
            for atom, flag in zip(atoms, flags, strict=True):
                # Nothing is differentiated through integers: the ids of a lookup are
                # not needed.
                if flag and isinstance(atom, Var) and has_derivative(atom.aval):
                    variables.add(atom)

        add(jaxpr.outvars, needed)
        for eqn in reversed(jaxpr.eqns):
            results = [var in variables for var in eqn.outvars]
            for i, place in enumerate(forwarded(eqn)):
                if place is not None and results[i]:
                    results[i] = False
                    add([eqn.invars[place]], [True])
                    variables.discard(eqn.outvars[i])
            if any(results) or eqn.effects:
                flags = self._operands_of(eqn, results)
                add(eqn.invars, flags)
                self._operands[id(eqn)] = _either(flags, self.operands(eqn))
        self.variables |= variables
        self._inputs[key] = [var in variables for var in jaxpr.invars]
        return self._inputs[key]

    def _operands_of(self, eqn: JaxprEqn, needed: Flags) -> Flags:
        name, params = name_and_params(eqn)
        if name in WITHOUT_DERIVATIVE:
            return [False] * len(eqn.invars)
        if name in CALLS:
            return self._read(as_closed(params[CALLS[name]]).jaxpr, needed)
        if name == "cond":
            of_branches = (self._read(b.jaxpr, needed) for b in params["branches"])
            return [False, *map(any, zip(*of_branches, strict=True))]
        if name == "scan":
            first, carried = scan_sizes(eqn)
            return self._read_loop(params["jaxpr"].jaxpr, needed, first, carried)
        if name == "while":
            first, inner = params["cond_nconsts"], params["body_nconsts"]
            body = params["body_jaxpr"].jaxpr
            flags = self._read_loop(body, needed, inner, len(needed))
            return [*[False] * first, *flags]
        if name == "custom_jvp_call":  # whose rule may need more than its body
            self._read(as_closed(params["call_jaxpr"]).jaxpr, needed)
        return [any(needed) or _has_effect(eqn)] * len(eqn.invars)

    def _read_loop(self, body: Jaxpr, needed: Flags, first: int, carried: int) -> Flags:
        """A carry is needed if a later step, or what follows the loop, needs it."""
        # For a body `(a, b, c) -> (a + b, c, c)` of which the loss needs the last `a`:
        # the last step needs a and b, so the one before needs c, too. Needs only grow,
        # so this ends after as many rounds as there are carries.
        while True:
            inputs = self._read(body, needed)
            carry = _either(needed[:carried], inputs[first : first + carried])
            if carry == list(needed[:carried]):
                return [*inputs[:first], *carry, *inputs[first + carried :]]
            needed = [*carry, *needed[carried:]]


def has_derivative(aval: Any) -> bool:
    """Whether values of this type have tangents other than zero.

    JAX's own question. Some extended types have, such as that of Flax's scales for
    float8, and keys have not.
    """
    tangent = aval.to_tangent_aval()
    return getattr(tangent, "dtype", None) != jax.dtypes.float0


def _has_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation may hand a value with a derivative on by what it does.

    What is written to a mutable array need not be read by the loss. It is taken for
    needed all the same: JAX 0.10 and 0.11 cannot transpose a loop that writes values
    with and values without a derivative to arrays that have one. (`whole_log` in
    tests/helpers/differential_refs.py)
    """
    if {type(effect).__name__ for effect in eqn.effects} - _KNOWN_EFFECTS:
        return True
    atoms = [x for x in (*eqn.invars, *eqn.outvars) if isinstance(x, Var)]
    return any(
        has_derivative(x.aval) for x in atoms if not isinstance(x.aval, ShapedArray)
    )


def _either(one: Flags, other: Flags) -> Flags:
    return [a or b for a, b in zip(one, other, strict=True)]
