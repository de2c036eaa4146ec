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
import jax.numpy as jnp
import numpy as np
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
_SHOWS = frozenset(["debug_callback", "debug_print"])
_MOVES = _MOVED | {
    *("reshape", "slice", "squeeze", "broadcast_in_dim", "transpose", "concatenate"),
    *("convert_element_type", "select_n", "gather", "dynamic_slice"),
    *("min", "max", "clamp"),
}
_COMPARED = frozenset(["lt", "le", "gt", "ge", "eq", "ne"])
# As gradients are where duplicates were added up, which all optimisers take.
_SUMMED = {"indices_sorted": True, "unique_indices": True}
_TURNED = str.maketrans("lg", "gl")  # 0 > ids for ids < 0
# What is called where it stands, with its operands in their order.
_CALLS = {
    **{
        "jit": "jaxpr",
        "remat2": "jaxpr",
        "cond": "branches",
        "custom_vmap_call": "call",
    },
    **dict.fromkeys(
        ["closed_call", "custom_jvp_call", "custom_vjp_call"], "call_jaxpr"
    ),
}


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


class _Number(NamedTuple):
    """A number of the program, as it is given to a function inside.

    Attributes:
      value: Which.
    """

    value: complex


_Value = _Rows | _Ids | _Scratch | _Number | None


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
    walk = _Walk(sizes)
    try:
        results = walk.run(asked.closed.jaxpr, inputs, "")
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
    # The same operations with all rows and with some, as `check_sizes` asks of dense
    # gradients; and the same numbers, whatever the number of rows is.
    whole = {i: table.num_rows for i, table in tables.items()}
    few = {i: table.num_touched for i, table in tables.items()}
    of_whole, of_few = (attempt(ask, x)[0] for x in (whole, few))
    if of_whole is None or whole == few:
        return
    programs = [x and operations_of(x.closed) for x in (of_whole, of_few)]
    others = _Walk({i: next(unused) for i in tables})
    others.run(ask(others.sizes).closed.jaxpr, inputs, "")
    if programs[0] != programs[1] or walk.numbers != others.numbers:
        at = max(whole, key=lambda i: whole[i])
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

    Attributes:
      numbers: Those that it computes with, beside indices.
    """

    def __init__(self, sizes: dict[int, int]):
        self.sizes, self.numbers = sizes, list[str]()
        self._tables = {size: i for i, size in sizes.items()}

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Value], around: str) -> list[_Value]:
        """What its results are, of arguments that are this; `around` is its line.

        Raises:
          _Needed: If it takes all rows, or ids, otherwise than the module says.
        """
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> _Value:
            if not isinstance(atom, Literal):
                return values.get(atom)
            number: Any = atom.val
            return None if np.ndim(number) else _Number(complex(number))

        for eqn in jaxpr.eqns:
            operands = [*map(of, eqn.invars)]
            results = self._results(eqn, operands, around)
            values.update(zip(eqn.outvars, results, strict=True))
        return [*map(of, jaxpr.outvars)]

    def _results(
        self, eqn: JaxprEqn, operands: list[_Value], around: str
    ) -> Sequence[_Value]:
        if STORED in str(eqn.source_info.name_stack):
            return self._of_ours(eqn, operands)
        name, params = name_and_params(eqn)
        line = source_info_util.summarize(eqn.source_info) or around
        rows = [x for x in operands if isinstance(x, _Rows)]
        ids = [x for x in operands if isinstance(x, _Ids)]
        nothing: list[_Value] = [None] * len(eqn.outvars)
        is_call = name in _CALLS and (rows or ids or name != "cond")
        if is_call and not (
            name == "cond" and (operands[0] in rows or operands[0] in ids)
        ):
            bodies = params.get("branches") or [params[_CALLS[name]]]
            of_body = operands[1:] if name == "cond" else operands
            made = [self.run(getattr(x, "jaxpr", x), of_body, line) for x in bodies]
            return [*map(_merged, zip(*made, strict=True))]
        if name in _SHOWS:
            return nothing
        if not rows and not ids:
            if name == "convert_element_type":
                return operands
            self.numbers += [str(x.value) for x in operands if isinstance(x, _Number)]
            return nothing
        if name in _MOVED and len(operands) == 1:
            return operands
        if not rows:
            results = self._of_ids(name, eqn, operands)
            if results is None:
                why = (
                    f"`{name}` at {line} computes with their numbers, which are others"
                )
                raise _Needed(ids[0].table, why, numbers=True)
            return results
        cases = _merged(operands[1:])
        if name == "select_n" and isinstance(cases, _Rows) and not operands[0]:
            return [cases]
        first, *rest = operands
        if len(rows) == 1 and first in rows and _Ids(rows[0].table) in rest[:1]:
            if name == "gather":
                return nothing
            if name.startswith("scatter"):
                return rows
        raise _Needed(rows[0].table, f"`{name}` at {line} takes all, or its state's")

    def _of_ours(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Results of an optimiser of ours: a table is known by its size.

        What it writes into one array alone, as `apply_updates` does, is that array.
        """
        rows = {x for x in operands if isinstance(x, _Rows)}
        ids = {x for x in operands if isinstance(x, _Ids)}
        results: list[_Value] = []
        for var in eqn.outvars:
            aval: Any = var.aval
            shape = getattr(aval, "shape", ())
            i = self._tables.get(shape[0]) if shape else None
            result: _Value = None
            if i is not None:
                result = rows.copy().pop() if len(rows) == 1 else _Rows(i, None)
            elif shape and len(ids) == 1 and jnp.issubdtype(aval.dtype, jnp.integer):
                result = ids.copy().pop()
            results.append(result)
        return results

    def _of_ids(
        self, name: str, eqn: JaxprEqn, operands: list[_Value]
    ) -> list[_Value] | None:
        """Ids that are moved, made positive or compared, and `None` for all others."""
        if name == "sort":
            return operands
        used = operands[1:] if name == "select_n" else operands
        if name in ("gather", "dynamic_slice"):  # of ids, or of what is no table's
            used = operands[:1]
        is_own = isinstance(operands[0], _Scratch | None)
        if name.startswith("scatter") and is_own and isinstance(operands[1], _Ids):
            return [_Scratch(operands[1].table)]
        if name == "gather" and isinstance(operands[0], _Scratch):
            return [None]
        numbers = [x.value for x in used if isinstance(x, _Number)]
        ids = [x for x in used if isinstance(x, _Ids)]
        is_apart = name == "concatenate" and (
            eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1  # type: ignore[attr-defined]
        )
        if not ids or (len(ids) + len(numbers) < len(used) and not is_apart):
            return None
        size = self.sizes[ids[0].table]
        if name in _COMPARED:
            turned = name.translate(_TURNED) if operands[0] not in ids else name
            allowed = {(turned, x) in _bounds(size) for x in numbers}
            return [None] if allowed <= {True} else None
        if name == "add":
            return [ids[0]] if numbers == [size] else None
        is_moved = name in _MOVES and {*numbers} <= {0, size - 1, size}
        return [ids[0]] if is_moved else None


def _bounds(size: int) -> set[tuple[str, complex]]:
    """Comparisons that say whether a row is there, and not which one it is."""
    return {
        *(("lt", 0), ("ge", 0), ("le", size - 1), ("gt", size - 1)),
        *(("lt", size), ("ge", size), ("eq", size), ("ne", size)),
    }


def _merged(values: Sequence[_Value]) -> _Value:
    """What one of these is, whichever, if it is known."""
    leaves = {x for x in values if isinstance(x, _Rows) and x.leaf is not None}
    kinds = {*values} - {x._replace(leaf=None) for x in leaves}
    return kinds.pop() if len(kinds) == 1 else None
