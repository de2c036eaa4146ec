"""Row-independence analysis for `lazy`: which tables an update treats row by row.

The update of compact trees is traced once, and each value of its jaxpr is judged:

- *rows of a table*, `[nse, ...]`: row `r` is computed from row `r` of what this table
  brings, its gradient and its gathered rows, and from opaque values;
- *uniform*: all rows are equal, such as a scalar broadcast to `[nse, ...]`;
- *opaque*: all else, which may depend on everything: scalars, dense leaves, sums over
  rows, and the results of every operation that has no rule here.

A table may be updated in blocks if its results are rows of it, and if the opaque values
that they use depend on no table's gathered rows: the same equations then hold for any
subset of its rows. In `lazy(chain(clip_by_global_norm(1.0), adam(0.1)))`

    n = sqrt (sum of squares of all gradients)   opaque, of gradients only
    g = mul grad (div 1.0 n)                     rows of the table
    new_mu = add (mul 0.9 mu) (mul 0.1 g)        rows of the table

so blocks compute `new_mu` from rows of `grad` and `mu` and from `n`. A trust ratio, as
in `lamb`, is computed from all gathered rows of `mu`, and this table is updated at
once. An operation without a rule makes its results opaque: a missing rule costs time,
and never changes a value.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._jax_extras.jaxprs import (
    ELEMENTWISE,
    Equation,
    FlatJaxpr,
    name_and_params,
    run_equations,
)
from .._rows.map_rows import RowFunction, Tables

_UNIFORM = -1  # in place of the index of a table
_NO_TABLES: frozenset[int] = frozenset()

_REDUCTIONS = [f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or")]
# For each primitive a test of its parameters: does row r of the result depend on row r
# of the operands only, if the number of rows stays the same?
_KEEPS_ROWS: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(ELEMENTWISE, lambda params: True),
    **dict.fromkeys(_REDUCTIONS, lambda params: 0 not in params["axes"]),
    "broadcast_in_dim": lambda params: params["broadcast_dimensions"][:1] == (0,),
    "reshape": lambda params: params["dimensions"] is None,
    "squeeze": lambda params: 0 not in params["dimensions"],
    "transpose": lambda params: params["permutation"][:1] == (0,),
}


class _Value(NamedTuple):
    """What is known of a value.

    Attributes:
      kind: The index of the table whose rows it has, `_UNIFORM`, or `None` if opaque.
      reads: Tables on whose gathered rows it depends.
      is_by_row: Whether row `r` depends on row `r` of these only.
    """

    kind: int | None = None
    reads: frozenset[int] = _NO_TABLES
    is_by_row: bool = True


def _is_broadcast(kind: int | None, shape: tuple[int, ...]) -> bool:
    """Whether an operand is equal for every row: a scalar, or one row for all."""
    return not shape or (kind in (None, _UNIFORM) and shape[0] == 1)


def _kind(eqn: JaxprEqn, kinds: list[int | None]) -> int | None:
    """The kind of the result, given those of the operands."""
    name, params = name_and_params(eqn)
    if name not in _KEEPS_ROWS:
        return None
    avals: list[Any] = [atom.aval for atom in (eqn.outvars[0], *eqn.invars)]
    shape, *shapes = (aval.shape for aval in avals)
    pairs = zip(kinds, shapes, strict=True)
    # In `mul grad 0.1`, `grad` has rows of its own, and 0.1 is the same for each.
    apart = [pair for pair in pairs if not _is_broadcast(*pair)]
    if name == "broadcast_in_dim" and shape and kinds[0] in (None, _UNIFORM):
        # A scalar, a vector [4] or one row [1, 4], that becomes [nse, 4]: `axes` is (),
        # (1,) or (0, 1).
        axes = params["broadcast_dimensions"]
        is_new = 0 not in axes and kinds[0] is None
        if is_new or (not apart and axes[0] == 0):
            return _UNIFORM
    same_number = all(operand[:1] == shape[:1] for _, operand in apart)
    # Rows of two tables, `add mu_of_a mu_of_b`: row r of both is no row of one table.
    found = {kind for kind, _ in apart}
    tables = found - {_UNIFORM}
    if not (found and same_number and _KEEPS_ROWS[name](params)):
        return None
    return next(iter(tables), _UNIFORM) if len(tables) <= 1 else None


def _classify(program: FlatJaxpr, inputs: dict[int, _Value]) -> dict[int, _Value]:
    """What is known of each value, by its id, given that of the inputs."""
    opaque = _Value()
    values = dict.fromkeys(range(program.size), opaque) | inputs
    for eqn, operands, results in program.equations:
        args = [values[value_id] for value_id in operands]
        # Broadcasting an opaque scalar gives a value with all rows equal.
        is_new = name_and_params(eqn)[0] == "broadcast_in_dim"
        if not is_new and all(arg is opaque for arg in args):
            continue
        reads = _NO_TABLES.union(*(arg.reads for arg in args))
        kind = _kind(eqn, [arg.kind for arg in args])
        # Of an opaque norm of `mu`, say, each row of `mu` matters to all.
        is_by_row = all(arg.is_by_row for arg in args) and not (kind is None and reads)
        value = _Value(kind, reads, is_by_row)
        values.update(dict.fromkeys(results, value))
    return values


def split_update(
    update: Callable[[dict[int, jax.Array]], list[Any]],
    rows: dict[int, jax.Array],
    owners: list[int | None],
    num_grads: int,
) -> tuple[list[Any], dict[int, tuple[RowFunction, list[jax.Array]]]]:
    """Splits an update as far as it provably treats each row alone.

    Args:
      update: Returns new arrays in the order of `owners`, but not for the last ones,
        the parameters.
      rows: Its argument: compact arrays of tables, by their places in `owners`.
      owners: For each array, gradients first, the table whose rows it has, or `None`.
      num_grads: How many of them are gradients; the rows of all others are gathered.

    Returns:
      The results of the update; and for each table that is updated row by row its
      function for `map_rows`, with the values that this takes besides rows. The results
      of such a table are not used, and then XLA computes nothing for them.
    """
    if not rows:
        return update(rows), {}
    compiled = jax.jit(update)  # of which JAX keeps the jaxpr for the second call
    closed = jax.make_jaxpr(compiled)(rows)
    results = compiled(rows)
    if closed.effects:  # they happen once, and in order
        return results, {}
    program = FlatJaxpr(closed)
    value_of = dict(zip(rows, program.inputs, strict=True))
    treedef: Any = jax.tree.structure(results)
    results_at = treedef.unflatten(program.outputs)
    places: dict[Any, list[int]] = {}
    known = {}
    for at, value_id in value_of.items():
        i: Any = owners[at]
        places.setdefault(i, []).append(at)
        known[value_id] = _Value(i, _NO_TABLES if at < num_grads else frozenset([i]))
    values = _classify(program, known)

    def is_by_row(i: int) -> bool:
        """Whether all results of this table are rows, like those that they replace."""
        return all(
            isinstance(results_at[at], int)
            and values[results_at[at]].kind in (i, _UNIFORM)
            and values[results_at[at]].is_by_row
            and results[at].shape == rows[at].shape
            for at in places[i]
            if at < len(results)
        )

    # A table is updated by itself unless something else reads its gathered rows: the
    # result of another table, or one that is not of rows.
    by_row = set(filter(is_by_row, places))
    # The parameters, last in `owners`, have no results.
    pairs = zip(results_at, owners, strict=False)
    others = [result for result, i in pairs if i not in by_row]
    read = (values[value_id].reads for value_id in jax.tree.leaves(others))
    row_fns: dict[int, RowFunction] = {}
    extra_at = {}
    for i in sorted(by_row.difference(*read)):
        outputs = [results_at[at] for at in places[i] if at < len(results)]
        # From the new rows back to rows, which blocks gather, and to opaque values,
        # which are computed once: in Adam the bias corrections.
        equations, starts = program.slice(outputs, lambda n: values[n].kind is None)
        extra_at[i] = [n for n in starts if values[n].kind is None]
        inputs = [*(value_of[at] for at in places[i]), *extra_at[i]]
        given = equations, program.literals, inputs, outputs
        row_fns[i] = functools.partial(_run_at_rows, *given)
    # These equations are traced a second time, as the results contain them, too. XLA
    # merges equal operations.
    equations, _ = program.slice(jax.tree.leaves(extra_at))
    known_rows = {value_of[at]: x for at, x in rows.items()}
    env = run_equations(equations, program.literals | program.consts | known_rows)
    extra = jax.tree.map(lambda value_id: jnp.asarray(env[value_id]), extra_at)
    return results, {i: (row_fns[i], extra[i]) for i in row_fns}


def _run_at_rows(
    equations: list[Equation],
    literals: dict[int, Any],
    inputs: list[int],
    outputs: list[int],
    data: jax.Array,
    old: Tables,
    extra: list[Any],
) -> tuple[jax.Array, Tables]:
    """The row function of a table, from the equations that compute its results."""
    given = zip(inputs, (data, *old, *extra), strict=True)
    env = run_equations(equations, literals | dict(given), len(data))
    update, *new = (env[value_id] for value_id in outputs)
    return update, tuple(new)
