"""Tables on the device, in the walk that computes which rows of others are looked up.

Functions of them are expressions here, too, by the rules that gradients have:
`tanh(2 * table)[ids]` is computed of the looked-up rows, and each value on the way to
ids is of a row, and may be a residual (`_way_to_ids.py`). What hands a table on to
functions that JAX traces by itself, as a loop does, gets it as an array.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from .._gradients import rules
from .._gradients.backward_slice import as_closed, computed
from .._gradients.expressions import Expression, table
from .._gradients.lookups import Lookup
from .._gradients.reading import without_derivative_outside
from .._gradients.walk import Results, Rule, Walk
from .._jax_extras.jaxprs import ELEMENTWISE, name_and_params
from .._rows.source import Source
from ._residuals import ResidualWalk


def is_on_device(value: Any) -> bool:
    return isinstance(value, Expression) and not value.leaves


def is_table_on_device(value: Any) -> bool:
    """Whether it is a table itself, whose lookups JAX evaluates."""
    return is_on_device(value) and value.is_table


def read_on_device(walk: ResidualWalk, value: Expression, lookup: Lookup) -> jax.Array:
    """Of a function of tables on the device: that of their rows."""

    def read(clamped: Lookup) -> jax.Array:
        def take(array: jax.Array) -> jax.Array:
            rows = lookup.read(array)
            if not lookup.is_filled:
                return rows
            # No lookup of the row that is next to an id out of bounds.
            return lookup.where_inside(rows, lax.stop_gradient(clamped.read(array)))

        return value.select(take)

    def function() -> list[jax.Array]:
        rows = lookup.read_and_fill(read)
        return [without_derivative_outside(value, lookup, rows)]

    rows: jax.Array
    (rows,) = walk.evaluate_function(function)
    return rows


def on_arrays(rule: Rule) -> Rule:
    """A rule for tables on the host alone: those on the device are arrays to it."""

    def with_arrays(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
        args = (*(walk.dense(x) if is_on_device(x) else x for x in args),)
        if any(isinstance(x, Expression) for x in args):
            return rule(walk, eqn, *args)
        return walk.evaluate_by_jax(eqn, args)

    return with_arrays


def _elementwise(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """Of those on the device an expression; beside one on the host they are arrays."""
    rule = rules.RULES[name_and_params(eqn)[0]]
    if not all(map(is_on_device, (x for x in args if isinstance(x, Expression)))):
        return on_arrays(rule)(walk, eqn, *args)
    results = rule(walk, eqn, *args)
    if walk.is_plan or results is NotImplemented or results[0].source is None:
        return results
    # A table in a wider type, in which it is differentiated.
    return [table(Source(walk.dense(results[0])))]


def _remat(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """A function of tables on the device leaves it as an expression, as in memory."""
    if all(map(is_on_device, (x for x in args if isinstance(x, Expression)))):
        closed = as_closed(name_and_params(eqn)[1]["jaxpr"])
        _, results = walk.plan(closed, args)
        if any(isinstance(results[i], Expression) for i in computed(eqn)):
            return walk.evaluate(closed, args)
    return on_arrays(rules.RULES["remat2"])(walk, eqn, *args)


def _custom_jvp(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    """With the user's rule, but for bags of a function of a table."""
    rule, on_device = rules.RULES["custom_jvp_call"], filter(is_on_device, args)
    is_of_arrays = all(map(is_table_on_device, on_device))
    return (on_arrays(rule) if is_of_arrays else rule)(walk, eqn, *args)


_AS_IN_MEMORY = (
    *("CheckpointName", "closed_call", "custom_vmap_call", "eval_jaxpr"),
    *("optimization_barrier", "pvary", "reduced_vary_cast", "reduced_vary_cast_p"),
    *("reshard", "sharding_constraint"),
)
RULES = {
    **{name: on_arrays(rule) for name, rule in rules.RULES.items()},
    **{name: rules.RULES[name] for name in _AS_IN_MEMORY},
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "custom_jvp_call": _custom_jvp,
    "remat2": _remat,
}
