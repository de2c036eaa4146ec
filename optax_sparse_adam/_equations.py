"""What the two readers of jaxprs share, of gradients and of updates."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Var,
    jaxpr_as_fun,
)

# Primitives of one result, each element of which is computed from the same element of
# every operand, or from operands that are scalars.
NONLINEAR = (
    "abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma "
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma "
    "log log1p logistic lt max min ne nextafter not or pow rem round rsqrt sign sin "
    "sinh sqrt square stop_gradient tan tanh xor"
)
LINEAR = "convert_element_type copy name neg reduce_precision"
OTHERS = "mul div add add_any sub select_n"
ELEMENTWISE = frozenset(f"{NONLINEAR} {LINEAR} {OTHERS}".split())

_DEBUG_INFO = DebugInfo("optax_sparse_adam", "equation", None, None)


def evaluate_eqn(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """JAX evaluates the equation, and keeps its name and its source line."""
    atoms = zip(eqn.invars, args, strict=True)
    values = {atom: arg for atom, arg in atoms if isinstance(atom, Var)}
    single = Jaxpr((), list(values), eqn.outvars, [eqn], debug_info=_DEBUG_INFO)
    return list(jaxpr_as_fun(ClosedJaxpr(single, ()))(*values.values()))
