"""Whether an update leaves the rows alone of which its gradients store nothing.

In memory `optax.contrib.schedule_free(lazy(optax.sgd(0.1)), 0.1)` moves all rows at
every step, though gradients are row-sparse. Where only the rows of a batch are there,
the others would stay, without a word. So the update is traced, and each value of its
jaxpr that has all rows of a table is followed. In

    chain(lazy(sgd), momentum)      momentum: m = 0.9 * m + updates
    chain(average, sparse_adam)     average:  a = 0.9 * a + 0.1 * params

`mul` reads all rows of `m`, or of `a`. What may have all rows: the optimisers of this
package, which name their equations (`knows_stored_rows`); a choice between the old
array and the new one, as of `optax.apply_if_finite`; rows that are taken from an
array, or put into it, by the indices of the gradient. Everything else is refused. So
is what computes with indices, as `rates[grad.indices]`: rows of a batch have other
numbers than those of the table.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.experimental.sparse import BCOO
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._jax_extras.jaxprs import name_and_params
from .._rows.checks import is_bcoo, leaves_like
from .._rows.stale import STORED
from .attempt import attempt
from .forms import first_that_traces
from .row_owners import TableSize, operations_of, size_error, unused_sizes
from .update_fn import RowUpdateFn

_NUM_STORED = 2  # entries of each gradient
_MOVED = frozenset(["copy", "optimization_barrier", "sharding_constraint"])
_MOVES = _MOVED | {
    *("reshape", "slice", "squeeze", "broadcast_in_dim", "transpose", "concatenate"),
    *("convert_element_type", "select_n", "gather", "dynamic_slice"),
    *("min", "max", "clamp"),
}
_COMPARED = frozenset(["lt", "le", "gt", "ge", "eq", "ne"])
# As gradients are where duplicates were added up, which all optimisers take.
_SUMMED = {"indices_sorted": True, "unique_indices": True}
# What is called as often as it stands there, with its operands in their order.
_CALLS = frozenset(
    ["jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call", "cond"]
)


class _Rows(NamedTuple):
    """All rows of a table: those without a gradient are as they were in an array.

    Attributes:
      table: Its place among the parameters.
      leaf: Which array, or `None` where an optimiser of this package says so.
    """

    table: int
    leaf: int | None


class _Ids(NamedTuple):
    """The indices of a gradient, or what a lookup makes of them.

    Attributes:
      table: Its place among the parameters.
    """

    table: int


class _Scratch(NamedTuple):
    """Zeros, say, into which something is written by such indices.

    Attributes:
      table: Its place among the parameters.
    """

    table: int


_Value = _Rows | _Ids | _Scratch | None


class _Needed(Exception):
    """More of a table than the rows of a batch, and why; or numbers of rows."""

    def __init__(self, table: int, why: str, *, numbers: bool = False):
        super().__init__(table, why)
        self.table, self.why, self.numbers = table, why, numbers


def check_untouched_rows(
    tx: optax.GradientTransformation,
    params: Any,
    tables: dict[int, TableSize],
    owners: Sequence[int | None],
    extra_args: dict[str, Any],
    name: str,
    *,
    has_all_args: bool = False,
) -> None:
    """Raises for a transformation that reads or changes rows without a gradient.

    Args:
      tx: The transformation.
      params: The tree of shapes and types of the parameters.
      tables: The tables among them, each looked up by one id.
      owners: Which table's rows each array of the state holds.
      extra_args: What the update takes besides.
      name: Who needs it, for errors.
      has_all_args: Whether `extra_args` are those of a step.

    Raises:
      ValueError: If it does.
      Exception: What the update raises of row-sparse gradients of whole tables, in a
        step; before it, one may want other arguments.
    """
    if type(tx.update) is RowUpdateFn:
        return
    ask = functools.partial(_Asked.of, tx, params, extra_args=extra_args, name=name)
    # As many rows as no other axis has: what has all rows is known by their number.
    unused = unused_sizes(jax.tree.leaves(params))
    sizes = {i: next(unused) for i in tables}
    asked, error = attempt(ask, sizes)
    if error is not None and has_all_args:
        raise error
    if error is not None:
        return
    for i in asked.dense:
        raise _error(name, params, i, "its update is one of all rows")
    count = len(jax.tree.leaves(params))
    owned = [None if i is None else _Rows(i, k) for k, i in enumerate(owners, count)]
    inputs: list[_Value] = [_Rows(i, i) if i in tables else None for i in range(count)]
    inputs += [*owned, *[None] * count, *map(_Ids, sorted(tables))]
    try:
        results = _Walk(sizes).run(asked.closed.jaxpr, inputs, "")
    except _Needed as needed:
        # What maps over all arrays, as optax.scale does, is explained by the step.
        if needed.numbers and not has_all_args:
            return
        raise _error(name, params, needed.table, needed.why) from None
    pairs = jax.tree_util.tree_leaves_with_path(asked.state)
    for (path, _), rows, value in zip(pairs, owned, results, strict=False):
        if rows is not None and value not in (rows, rows._replace(leaf=None)):
            where = f"`state{jax.tree_util.keystr(path)}` changes in all rows"
            raise _error(name, params, rows.table, where)
    # The same operations with all rows and with some: see `check_sizes`.
    whole = {i: table.num_rows for i, table in tables.items()}
    few = {i: table.num_touched for i, table in tables.items()}
    of_whole, of_few = (attempt(ask, x)[0] for x in (whole, few))
    if of_whole is not None and whole != few:
        at = max(whole, key=lambda i: whole[i])
        programs = [x and operations_of(x.closed) for x in (of_whole, of_few)]
        if programs[0] != programs[1]:
            raise size_error(name, whole[at], few[at])


class _Asked(NamedTuple):
    """An update of row-sparse gradients, traced.

    Attributes:
      closed: Its program: of the leaves of parameters and state, of those of gradients,
        or what they store, and of the indices. It returns the new state, and updates.
      state: The tree of shapes of the state.
      dense: Tables whose update is not row-sparse.
    """

    closed: ClosedJaxpr
    state: Any
    dense: list[int]

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        params: Any,
        sizes: dict[int, int],
        *,
        extra_args: dict[str, Any],
        name: str,
    ) -> "_Asked":
        """Of tables of so many rows; raises what the update raises."""
        treedef: Any
        of_state: Any
        leaves, treedef = jax.tree.flatten(params)

        def resized(num_rows: dict[int, int]) -> list[Any]:
            return [
                jax.ShapeDtypeStruct((num_rows[i], *x.shape[1:]), x.dtype)
                if i in num_rows
                else x
                for i, x in enumerate(leaves)
            ]

        shapes, stored = resized(sizes), resized(dict.fromkeys(sizes, _NUM_STORED))
        state = jax.eval_shape(tx.init, treedef.unflatten(shapes))
        state_leaves, of_state = jax.tree.flatten(state)
        ids = {i: jax.ShapeDtypeStruct((_NUM_STORED, 1), "int32") for i in sizes}
        made: list[Any] = []

        def update(params: Any, state: Any, stored: Any, ids: Any) -> Any:
            grads = treedef.unflatten(
                BCOO((x, ids[i]), shape=shapes[i].shape, **_SUMMED) if i in ids else x
                for i, x in enumerate(stored)
            )

            def of_grads(grads: Any, extra: dict[str, Any]) -> Any:
                args = grads, of_state.unflatten(state), treedef.unflatten(params)
                updates, new_state = tx.update(*args, **extra)
                made[:] = leaves_like(treedef, updates, "Updates", "parameters")
                return new_state, made

            new_state, updates = first_that_traces(name, of_grads, grads, extra_args)(
                extra_args
            )
            return jax.tree.leaves(new_state), updates

        closed = jax.make_jaxpr(update)(shapes, state_leaves, stored, ids)
        return cls(closed, state, [i for i in sizes if not is_bcoo(made[i])])


def _error(name: str, params: Any, table: int, why: str) -> ValueError:
    path, _ = jax.tree_util.tree_leaves_with_path(params)[table]
    return ValueError(
        f"{name} trains the rows that a batch looks up, and this optimiser needs more "
        f"than these of {jax.tree_util.keystr(path) or 'the table'}: {why}. Put what "
        "takes rows inside of lazy, which gives it those of the batch, as in "
        "lazy(optax.chain(...)); or keep the table on the device."
    )


class _Walk:
    """Follows what has all rows through a jaxpr.

    Args:
      sizes: How many rows each table has in it, another number than any other axis.
    """

    def __init__(self, sizes: dict[int, int]):
        self._tables = {size: i for i, size in sizes.items()}

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Value], around: str) -> list[_Value]:
        """What its results are, of arguments that are this; `around` is its line.

        Raises:
          _Needed: If it takes all rows, or ids, otherwise than the module says.
        """
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> _Value:
            return None if isinstance(atom, Literal) else values.get(atom)

        for eqn in jaxpr.eqns:
            operands = [*map(of, eqn.invars)]
            if any(operands):
                values.update(
                    zip(eqn.outvars, self._results(eqn, operands, around), strict=True)
                )
            elif self._is_ours(eqn):
                values.update(zip(eqn.outvars, self._rows_of(eqn), strict=True))
        return [*map(of, jaxpr.outvars)]

    def _is_ours(self, eqn: JaxprEqn) -> bool:
        return STORED in str(eqn.source_info.name_stack)

    def _rows_of(self, eqn: JaxprEqn) -> list[_Value]:
        """Results of an optimiser of ours: a table is known by its size."""
        shapes = (getattr(x.aval, "shape", ()) for x in eqn.outvars)
        tables = (self._tables.get(shape[0]) if shape else None for shape in shapes)
        return [None if i is None else _Rows(i, None) for i in tables]

    def _results(
        self, eqn: JaxprEqn, operands: list[_Value], around: str
    ) -> Sequence[_Value]:
        """Results of an equation that gets rows or ids."""
        if self._is_ours(eqn):
            return self._rows_of(eqn)
        name, params = name_and_params(eqn)
        line = source_info_util.summarize(eqn.source_info) or around
        nothing: list[_Value] = [None] * len(eqn.outvars)
        first, *rest = operands
        if name in _CALLS and not (name == "cond" and first):
            bodies = params.get("branches") or [
                params.get("jaxpr") or params["call_jaxpr"]
            ]
            of_body = rest if name == "cond" else operands
            made = [self.run(getattr(x, "jaxpr", x), of_body, line) for x in bodies]
            return [*map(_merged, zip(*made, strict=True))]
        if name in _MOVED and len(operands) == 1:
            return operands
        if name == "select_n" and not first and (merged := _merged(rest)):
            return [merged]
        tables = {x.table for x in operands if x is not None}
        by_ids = len(tables) == 1 and isinstance(first, _Rows | _Scratch | None)
        if by_ids and rest and isinstance(rest[0], _Ids):
            if name == "gather" and first is not None:
                return nothing
            if name.startswith("scatter") and rest[1] is None:
                return [_Scratch(rest[0].table) if first is None else first]
        for x in operands:
            if isinstance(x, _Rows):
                raise _Needed(x.table, f"`{name}` at {line} takes all, or its state's")
        if all(isinstance(x, _Scratch | None) for x in operands):
            return nothing
        if (results := self._ids(name, eqn, operands)) is None:
            why = f"`{name}` at {line} computes with their numbers, which are others"
            raise _Needed(min(tables), why, numbers=True)
        return results

    def _ids(
        self, name: str, eqn: JaxprEqn, operands: list[_Value]
    ) -> list[_Value] | None:
        """Ids that are moved, made positive or compared, and `None` for all others."""
        if name == "sort":
            return operands
        pairs = [*zip(eqn.invars, operands, strict=True)]
        if name in ("gather", "dynamic_slice"):
            pairs = pairs[:1]
        if name == "select_n":
            pairs = pairs[1:]
        numbers = {float(x.val) for x, _ in pairs if isinstance(x, Literal)}
        ids = {known for x, known in pairs if not isinstance(x, Literal)}
        if len(ids) != 1 or not isinstance(only := ids.pop(), _Ids):
            return None
        size = next(size for size, i in self._tables.items() if i == only.table)
        if name in _COMPARED:
            return [None] if numbers <= {0, size - 1, size} else None
        if name == "add":
            return [only] if numbers == {size} else None
        return [only] if name in _MOVES and numbers <= {0, size - 1, size} else None


def _merged(values: Sequence[_Value]) -> _Value:
    """What one of these is, whichever."""
    first, *rest = set(values) - {
        x._replace(leaf=None)
        for x in values
        if isinstance(x, _Rows) and x.leaf is not None
    }
    return None if rest else first
