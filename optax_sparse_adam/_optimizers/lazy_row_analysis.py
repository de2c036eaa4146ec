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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from .._jax_extras.jaxprs import (
    ELEMENTWISE,
    FlatJaxpr,
    name_and_params,
    run_equations,
)
from .lazy_leaves import Leaves, OfTable
from .row_formula import RowFormula

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
    row_kinds = {kind for kind, _ in apart}
    tables = row_kinds - {_UNIFORM}
    if not (row_kinds and same_number and _KEEPS_ROWS[name](params)):
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


class Split(NamedTuple):
    """An update of compact trees, apart as far as it provably treats each row alone.

    Attributes:
      shapes: Shapes and types of its results.
      formulas: For each table whose rows are treated alone, what is computed of each.
      summed: Those of these tables whose gradients something else reads than their own
        rows, as a global norm does.
      rest: `rest(rows)`, of the rows of all other tables and of the gradients of those
        in `summed`: all other results, and for each formula what its rows share.
    """

    shapes: Leaves[Any]
    formulas: dict[int, RowFormula]
    summed: set[int]
    rest: Callable[[Leaves[Any]], tuple[Leaves[Any], dict[int, list[jax.Array]]]]


def split_update(
    update: Callable[[Leaves[Any]], Leaves[Any]],
    rows: Leaves[Any],
    owners: Leaves[int | None],
) -> Split:
    """Traces an update, and splits it.

    Args:
      update: A function of compact arrays of tables.
      rows: Shapes and types of these arrays, `None` for all other leaves.
      owners: The table whose rows a leaf holds.
    """
    if not jax.tree.leaves(rows):
        return Split(rows, {}, set(), lambda rows: (update(rows), {}))
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(rows)
    program = FlatJaxpr(closed)
    of_rows: Any = jax.tree.structure(rows)
    of_results: Any = jax.tree.structure(shapes)
    inputs: Leaves[Any] = of_rows.unflatten(program.inputs)
    outputs: Leaves[Any] = of_results.unflatten(program.outputs)
    tables = [i for i, x in enumerate(rows.grads) if x is not None]
    if closed.effects:  # they happen once, and in order
        tables = []
    old_rows = {i: inputs.of_table(i, owners) for i in tables}
    new_rows = {i: outputs.of_table(i, owners) for i in tables}
    values = _classify(program, _of_inputs(inputs, owners))

    def is_by_row(i: int) -> bool:
        """Whether all results of a table are rows of it, like those they replace."""
        of_table = new_rows[i], *(x.of_table(i, owners) for x in (shapes, rows))
        return all(
            isinstance(value_id, int)
            and values[value_id].kind in (i, _UNIFORM)
            and values[value_id].is_by_row
            and new.shape == old.shape
            for value_id, new, old in zip(*map(_rows, of_table), strict=True)
        )

    alone = set(filter(is_by_row, tables))
    # A table is updated by itself unless something else reads its gathered rows: the
    # result of another table, or one that is not of rows.
    rest = jax.tree.leaves(_without(alone, outputs, owners))
    alone = alone.difference(*(values[value_id].reads for value_id in rest))
    formulas, shared = {}, {}
    for i in sorted(alone):
        dtypes = [x.dtype for x in _rows(rows.of_table(i, owners))]
        ends = old_rows[i], new_rows[i]
        formulas[i], shared[i] = _formula(program, *ends, dtypes, values)
    wanted = _without(alone, outputs, owners), shared
    equations, starts = program.slice(jax.tree.leaves(wanted))

    def run(rows: Leaves[Any]) -> tuple[Leaves[Any], dict[int, list[jax.Array]]]:
        if not alone:
            results = jaxpr_as_fun(closed)(*jax.tree.leaves(rows))
            return of_results.unflatten(results), {}
        # The equations of what rows share are traced a second time, as those of rows
        # may contain them, too. XLA merges equal operations.
        arrays = _by_id(inputs, rows)
        env = run_equations(equations, program.literals | program.consts | arrays)
        made: tuple[Leaves[Any], dict[int, list[jax.Array]]]
        made = jax.tree.map(lambda value_id: jnp.asarray(env[value_id]), wanted)
        return made

    summed = {i for i in alone if old_rows[i].grad in starts}
    return Split(shapes, formulas, summed, run)


def _rows(of_table: OfTable[Any]) -> list[Any]:
    return [of_table.grad, *of_table.state]


def _by_id(inputs: Leaves[Any], xs: Leaves[Any]) -> dict[int, Any]:
    """What there is for each compact array, by the id of its value."""
    return {
        value_id: x
        for columns in zip(inputs, xs, strict=True)
        for value_id, x in zip(*columns, strict=True)
        if value_id is not None and x is not None
    }


def _of_inputs(inputs: Leaves[Any], owners: Leaves[int | None]) -> dict[int, _Value]:
    """What is known of the compact arrays: all but gradients are gathered."""
    gathered = owners.map(lambda i: _Value(i, frozenset([i] if i is not None else [])))
    grads = [*map(_Value, owners.grads)]
    return _by_id(inputs, gathered._replace(grads=grads))


def _without(
    tables: set[int], outputs: Leaves[Any], owners: Leaves[int | None]
) -> Leaves[Any]:
    """The results but those of some tables."""

    def other(x: Any, owner: int | None) -> Any:
        return None if owner in tables else x

    return outputs.map(other, owners)


def _formula(
    program: FlatJaxpr,
    old_rows: OfTable[Any],
    new_rows: OfTable[Any],
    dtypes: list[Any],
    values: dict[int, _Value],
) -> tuple[RowFormula, list[int]]:
    """What is computed of the rows of a table, and of which values beside them.

    From the new rows back to rows, which are looked up, and to opaque values, which
    are computed once: in Adam the bias corrections.
    """
    outputs = _rows(new_rows)
    equations, starts = program.slice(outputs, lambda n: values[n].kind is None)
    shared = [n for n in starts if values[n].kind is None]
    reads_param = old_rows.param in starts
    inputs = [*_rows(old_rows), *[old_rows.param] * reads_param, *shared]
    formula = RowFormula(
        equations, program.literals, inputs, outputs, dtypes, reads_param=reads_param
    )
    return formula, shared
