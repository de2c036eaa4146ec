"""A walk over a loss that takes residuals: values that another program has computed.

Which values, says `_way_to_ids.py`. Both programs are traced of the same loss. A value
is known by its place among all that is computed, and by digests of the equations before
it and of the numbers that these hold: what is of another program is refused.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._gradients.backward_slice import WITHOUT_DERIVATIVE, as_closed
from .._gradients.expressions import Expression, operands_first
from .._gradients.tracing import jit_enabled
from .._gradients.walk import Program, Walk
from .._jax_extras.jaxprs import name_and_params
from .._rows.gather_scatter import order_after_gather
from .._rows.source import are_zeros
from ._callbacks import CALLBACKS, callback_of

_LARGE = 1 << 20  # bytes of an array that is not looked at again for each trace
# A value's number among those of a program, and digests of the equations before it, and
# of the numbers that they hold.
Number = tuple[int, int, int]


class ResidualWalk(Walk):
    """A walk that takes residuals, or notes what a loss computes.

    A `jit` is walked through: what is computed inside is a value like others. In the
    bodies of loops, branches and the like that look rows up, which are other walks,
    there are none.

    Args:
      residuals: By their numbers.
      is_known: Whether arguments are numbers that the program holds, as without `jit`:
        then numbers are not compared.

    Attributes:
      computed: The arrays that are none, by their numbers.
    """

    def __init__(
        self,
        program: Program,
        deltas: Any,
        residuals: Mapping[Number, Any],
        *,
        is_known: bool,
    ):
        super().__init__(program, deltas)
        self.computed: dict[Number, jax.Array] = {}
        self._is_known = is_known
        self._left = {self._key(x): value for x, value in residuals.items()}
        self._number: Number = 0, 0, 0

    def _key(self, number: Number) -> tuple[int, ...]:
        return number[:2] if self._is_known else number

    @property
    def is_other(self) -> bool:
        """Whether residuals are of another program: of other equations or numbers.

        So it is where a loss has numbers of `np.random`, which are others each time
        when it is traced, and may compute more of them than ids.
        """
        return bool(self._left)

    def evaluate(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        self._note(numbers=map(_bits, closed.consts))
        return super().evaluate(closed, args)

    def _evaluate_eqn(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        if eqn.outvars:
            if any(isinstance(x, Expression) for x in args):
                self._note(numbers=_literals(eqn))
            return super()._evaluate_eqn(eqn, args)
        # What shows values alone is no part of the small program.
        before = self._number, self._left, self._memo
        self._left, self._memo = {}, {}
        results = super()._evaluate_eqn(eqn, args)
        self._number, self._left, self._memo = before
        return results

    def evaluate_by_jax(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        name, params = name_and_params(eqn)
        callback = callback_of(eqn)
        if name == "jit" and not params["name"].startswith("optax_sparse_adam_"):
            self._note(numbers=_literals(eqn))
            return self.evaluate(as_closed(params["jaxpr"]), args)
        self._note(numbers=_numbers_in([eqn]))
        results = super().evaluate_by_jax(eqn, args)
        for i, var in enumerate(eqn.outvars):
            shape, dtype = (getattr(var.aval, x, None) for x in ("shape", "dtype"))
            self._note(callback or name, shape, str(dtype))
            key = self._key(self._number)
            if key in self._left:
                results[i] = _with_value(name, results[i], self._left.pop(key))
            elif _is_array(var.aval):
                self.computed[self._number] = results[i]
        return results

    def evaluate_function(self, function: Callable[[], list[jax.Array]]) -> Any:
        """What a function of this walk's arrays computes, each value like others."""
        with jit_enabled():
            closed = jax.make_jaxpr(function)()
        return self.evaluate(closed, ())

    def dense(self, value: Any) -> Any:
        """As any walk's; all of a function of tables is evaluated as equations are."""
        if not isinstance(value, Expression) or value.leaves or value.is_table:
            return super().dense(value)
        new = operands_first([value], self._memo)

        def values() -> list[jax.Array]:
            memo = {**self._memo}  # to which values of this trace are added
            value.select(lambda x: x, memo=memo)
            return [memo[x] for x in new]

        if new:
            self._memo |= zip(new, self.evaluate_function(values), strict=True)
        return self._memo[value]

    def _note(self, *parts: Any, numbers: Iterable[Any] = ()) -> None:
        count, *digests = self._number
        texts = repr(parts), repr(list(numbers))
        pairs = zip(texts, digests, strict=True)
        made, held = (zlib.crc32(text.encode(), digest) for text, digest in pairs)
        self._number = count + bool(parts), made, held


def _with_value(name: str, own: jax.Array, residual: jax.Array) -> jax.Array:
    """The residual; if it is of parameters, with the step's derivative."""
    layout = jax.typeof(own).sharding
    if layout.mesh.explicit_axes:
        residual = jax.reshard(residual, layout)
    if not jnp.issubdtype(own.dtype, jnp.inexact) or name in WITHOUT_DERIVATIVE:
        return residual
    return _with_derivative(residual, own)


@jax.custom_jvp
def _with_derivative(residual: jax.Array, own: jax.Array) -> jax.Array:
    return residual


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    residual, own = primals
    if are_zeros(tangents[1]):
        return residual, jnp.zeros_like(residual)
    context = jax.sharding.get_abstract_mesh()
    if context.explicit_axes and jax.typeof(own).sharding.mesh != context:
        return residual, tangents[1]  # of a lookup, which is traced with Auto axes
    # The derivative may read rows that nothing else reads.
    return order_after_gather(own, residual), tangents[1]


_with_derivative.defjvp(_jvp, symbolic_zeros=True)


def _bits(x: Any) -> Any:
    """Of a number or an array that a program holds; of a large one the type alone."""
    kind = getattr(x, "shape", ()), str(getattr(x, "dtype", None))
    is_known = isinstance(x, np.ndarray | np.generic | int | float | complex)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        is_known = _is_array(x.aval) and x.is_fully_addressable and x.nbytes < _LARGE
    return (*kind, zlib.crc32(np.asarray(x).tobytes())) if is_known else kind


def _literals(eqn: JaxprEqn) -> Iterator[Any]:
    return (_bits(x.val) for x in eqn.invars if isinstance(x, Literal))


def _numbers_in(eqns: Sequence[JaxprEqn]) -> Iterator[Any]:
    """Those that equations hold, but for callbacks, which only a step has."""
    for eqn in eqns:
        is_once = name_and_params(eqn)[0] in CALLBACKS or callback_of(eqn)
        if is_once or not eqn.outvars:
            continue
        yield from _literals(eqn)
        for closed in jaxprs_in(eqn):
            yield from map(_bits, closed.consts)
            yield from _numbers_in(closed.jaxpr.eqns)


def _is_array(aval: Any) -> bool:
    """No mutable array, and none of random keys."""
    is_array = isinstance(aval, jax.core.ShapedArray)
    return is_array and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def equations_in(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """All of them, those inside of others included."""
    for eqn in eqns:
        yield eqn
        for closed in jaxprs_in(eqn):
            yield from equations_in(closed.jaxpr.eqns)


def jaxprs_in(eqn: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """Those that are parameters of an equation."""

    def inside(x: Any) -> Iterator[ClosedJaxpr]:
        if type(x) in (tuple, list):
            for y in x:
                yield from inside(y)
        if isinstance(x, ClosedJaxpr | Jaxpr):
            yield as_closed(x)

    for x in name_and_params(eqn)[1].values():
        yield from inside(x)
