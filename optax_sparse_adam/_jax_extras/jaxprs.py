"""Evaluation of jaxprs, for gradients, row-wise updates and updates in place.

`evaluate_eqn` evaluates any equation on operands of the traced shapes. `bind_eqn`
applies an elementwise one to operands of other shapes, such as some rows of a table.
"""

import functools
import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxpr_as_fun,
    primitives,
)

from .varying_axes import bind

# Primitives of one result, each element of which is computed from the same element of
# every operand, or from operands that are scalars. Gradient rules and
# `lazy_row_analysis` rely on it: a wrong name here gives wrong results in both.
# A primitive whose derivative is zero is also named in `_gradients/backward_slice.py`.
_NAMES = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le lgamma log log1p log2 logistic lt "
    "max min mul name ne neg nextafter not one_minus_square or polynomial pow "
    "reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
)
ELEMENTWISE = frozenset(_NAMES.split())
# Of these, the ones that `jax.extend.core.primitives` leaves out.
_NOT_PUBLIC = frozenset({"add_any"})

# The parameter of a primitive that says how many rows it makes.
# For an update that was traced with 8 rows and is run on blocks of 4, these two make
# `(4, 64)` in place of `(8, 64)`; all others follow their operands.
_ROWS = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}

# Primitives that are objects of hijax under `jax_remat3`, `jax_custom_jvp3` and
# `jax_custom_vjp3` of JAX 0.12, by their types, and what they are called without.
_OBJECTS = {
    "RematTraced": "remat2",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}

_DEBUG_INFO = DebugInfo("optax_sparse_adam", "equation", None, None)

Function = TypeVar("Function", bound=Callable[..., Any])


class KnownCall(NamedTuple):
    """A call of a function that is `known_in_jaxprs`.

    Attributes:
      function: As its module has it.
      params: Its static argument.
      tree: The structure of its other arguments.
      ndims: The number of axes of each of their arrays.
    """

    function: Callable[..., Any]
    params: Any
    tree: Any
    ndims: tuple[int, ...]


_KNOWN: dict[str, KnownCall] = {}


def known_in_jaxprs(function: Function) -> Function:
    """`jax.jit` of `function(params, *args)`, which `call_of` finds in a jaxpr.

    A `jit` in a jaxpr says of its function no more than the name, and a user may have
    one of the same name. So each of these has a name of this package for each way in
    which it is called. `params` is static, hashable, and has a `repr` that is the same
    in each process: the name is a part of the key of JAX's compilation cache.
    """

    @functools.cache
    def compiled(called: KnownCall) -> Callable[..., Any]:
        def body(*args: Any) -> Any:
            return function(called.params, *args)

        text = repr((called.params, str(called.tree), called.ndims))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = f"optax_sparse_adam_{function.__name__}_{digest}"
        # A symbolic size, of `jax.export`, has the text of one of another scope.
        while _KNOWN.setdefault(name, called) != called:
            name += "_"
        body.__name__ = name
        return jax.jit(body)

    @functools.wraps(function)
    def call(params: Any, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        called = KnownCall(call, params, tree, tuple(map(np.ndim, leaves)))
        return compiled(called)(*args)

    return cast(Function, call)


def call_of(eqn: JaxprEqn) -> KnownCall | None:
    """What an equation calls, if that is known, and called as it was written.

    After `vmap` or a derivative an equation keeps the name and has other operands: who
    meets it looks into its jaxpr.
    """
    called = _KNOWN.get(eqn.params.get("name", ""))
    avals: list[Any] = [x.aval for x in eqn.invars]
    ndims = tuple(x.ndim for x in avals)
    is_same = called is not None and ndims == called.ndims and len(eqn.outvars) == 1
    return called if is_same else None


def calls_only(jaxpr: Jaxpr, functions: Container[Any]) -> bool:
    """Whether a jaxpr is one call of a known function, even after a `vmap`."""
    if len(jaxpr.eqns) != 1:
        return False
    called = _KNOWN.get(jaxpr.eqns[0].params.get("name", ""))
    return called is not None and called.function in functions


def name_and_params(eqn: JaxprEqn) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of what an equation applies.

    An object of hijax is a parameter of the equation, and its type has the name.
    """
    if eqn.primitive.name != "call_hi_primitive":
        return _name_of(eqn.primitive), eqn.params
    made = eqn.params["_prim"]
    name, params = type(made).__name__, getattr(made, "params", {})
    if not type(made).__module__.startswith("jax."):
        return _foreign(name), params
    if name == "CustomJVPTraced":
        params = {**params, "call_jaxpr": params["traced"].jaxpr}
    return _OBJECTS.get(name, name), params


def _name_of(primitive: Primitive) -> str:
    """The name, by which rules know a primitive of JAX; no rule knows another one's.

    A library may give its primitive a name that one of JAX's has, such as `round` for
    one whose derivative is not zero.
    """
    name = primitive.name
    of_jax = getattr(primitives, f"{name}_p", None)
    if of_jax is None:
        is_of_jax = name not in ELEMENTWISE or name in _NOT_PUBLIC
    else:
        is_of_jax = of_jax is primitive
    return name if is_of_jax else _foreign(name)


def _foreign(name: str) -> str:
    return f"{name} (not JAX's)"


def empty_values(eqn: JaxprEqn) -> jax.Array:
    """Zeros, for an equation that makes an empty mutable array."""
    held: Any = eqn.params["ty"]
    layout = held.sharding if held.sharding.mesh.explicit_axes else None
    return jnp.zeros(held.shape, held.dtype, device=layout)


def evaluate_eqn(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """JAX evaluates the equation, and keeps its name and its source line.

    Problem: a loss under `jit` that makes an empty mutable array (`jax.empty_ref`)
    raises `NotImplementedError` where its gradient is under none. Cause: we evaluate
    equations one by one, and JAX has no rule for this one outside of a program. Remedy:
    a mutable array of zeros. Safe, as nothing is said of the values of an empty one.
    Test: `test_empty_ref` in `tests/gradients/test_refs.py`.
    A user's rule for derivatives may index a constant by a traced number, so it gets an
    array of JAX.
    """
    if name_and_params(eqn)[0].startswith("custom_"):
        args = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    if eqn.primitive.name == "empty_ref":
        return [jax.new_ref(empty_values(eqn), memory_space=eqn.params["memory_space"])]
    # `mul x x` reads one variable twice, and the new jaxpr has it once. A literal is a
    # part of the equation.
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


class Equation(NamedTuple):
    """An equation, with the ids of its operands and results."""

    eqn: JaxprEqn
    operands: list[int]
    results: list[int]


def _shape(aval: Any) -> Any:
    """The shape of an array; another type, such as a hijax type, has none."""
    return aval.shape if isinstance(aval, jax.core.ShapedArray) else aval


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    Derived from ranks (what is scanned over has one axis less inside), because the
    names of the parameters that say it differ from one version of JAX to the next.
    """

    def count(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        shapes = ([_shape(x.aval) for x in side] for side in (outer, inner))
        return sum(x == y for x, y in zip(*shapes, strict=True))

    body = eqn.params["jaxpr"].jaxpr
    carried = count(eqn.outvars, body.outvars)
    return count(eqn.invars, body.invars) - carried, carried


class FlatJaxpr:
    """The equations of a jaxpr, those of each `jit` inside of it included.

    Each value has an id, the arguments the first ones. Values of an outer trace are in
    `consts`, apart from the equations, which may outlive that trace.
    """

    def __init__(self, closed: ClosedJaxpr):
        self.equations: list[Equation] = []
        self.producer: dict[int, int] = {}  # the equation that computes a value
        self.literals: dict[int, Any] = {}
        self.consts: dict[int, Any] = {}
        self.size = len(closed.jaxpr.invars)
        self.inputs = list(range(self.size))
        self.outputs = self._inline(closed, self.inputs)

    def _new(self, table: dict[int, Any], value: Any = None) -> int:
        value_id, self.size = self.size, self.size + 1
        table[value_id] = value
        return value_id

    def _inline(self, closed: ClosedJaxpr, args: list[int]) -> list[int]:
        ids: dict[Any, int] = dict(zip(closed.jaxpr.invars, args, strict=True))
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            ids[var] = self._new(self.consts, value)

        def id_of(atom: Any) -> int:
            is_literal = isinstance(atom, Literal)
            return self._new(self.literals, atom.val) if is_literal else ids[atom]

        for eqn in closed.jaxpr.eqns:
            operands = list(map(id_of, eqn.invars))
            # The ids of `jit(sin)(x) * 2.0`: 0 is x, 1 the sine, inside of the `jit`
            # and outside, 2 the literal, 3 the product. There are two equations, `sin`
            # and `mul`.
            if name_and_params(eqn)[0] == "jit":
                results = self._inline(eqn.params["jaxpr"], operands)
            else:
                position = len(self.equations)
                results = [self._new(self.producer, position) for _ in eqn.outvars]
                self.equations.append(Equation(eqn, operands, results))
            ids.update(zip(eqn.outvars, results, strict=True))
        return list(map(id_of, closed.jaxpr.outvars))

    def slice(
        self, wanted: Iterable[int], stop: Callable[[int], bool] = lambda _: False
    ) -> tuple[list[Equation], list[int]]:
        """The equations that compute these values, and the values that they read.

        The slice goes back to the arguments, and no further than a value for which
        `stop` is true.
        """
        todo, starts = list(wanted), list[int]()
        seen, positions = set[int](), set[int]()
        while todo:
            value_id = todo.pop()
            if value_id in seen or value_id in self.literals:
                continue
            seen.add(value_id)
            if value_id in self.producer and not stop(value_id):
                positions.add(self.producer[value_id])
                todo += self.equations[self.producer[value_id]].operands
            else:
                starts.append(value_id)
        return [self.equations[at] for at in sorted(positions)], starts


def run_equations(
    equations: list[Equation], values: dict[int, Any], rows: int | None = None
) -> dict[int, Any]:
    """Evaluates the equations, and returns all values by their ids.

    With `rows`, results have that many rows in place of as many as were traced. An
    elementwise equation is applied as it is: `evaluate_eqn` makes a jaxpr of each.
    """
    env = dict(values)
    for eqn, operands, results in equations:
        args = [env[value_id] for value_id in operands]
        if rows is None and eqn.primitive.name in ELEMENTWISE:
            made = [bind_eqn(eqn, *args)]
        elif rows is None:
            made = evaluate_eqn(eqn, args)
        else:
            name = _ROWS.get(eqn.primitive.name)
            shape = {} if name is None else {name: (rows, *eqn.params[name][1:])}
            made = [bind_eqn(eqn, *args, **shape)]
        env.update(zip(results, made, strict=True))
    return env
