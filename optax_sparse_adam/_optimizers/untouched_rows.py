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
from jax.extend.core import ClosedJaxpr

from .._rows.checks import is_bcoo, leaves_like
from .attempt import attempt
from .forms import first_that_traces
from .row_flow import AllRows, Ids, Needed, RowFlow, Value
from .row_owners import TableSize, operations_of, size_error, unused_sizes
from .update_fn import RowUpdateFn

_NUM_STORED = 2  # entries of each gradient
# As gradients are where duplicates were added up, which all optimisers take.
_SUMMED = {"indices_sorted": True, "unique_indices": True}


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
    owned = [None if i is None else AllRows(i, k) for k, i in enumerate(owners, count)]
    inputs: list[Value] = [AllRows(i, i) if i in tables else None for i in range(count)]
    inputs += [*owned, *[None] * count, *map(Ids, sorted(tables))]
    flow = RowFlow(sizes)
    try:
        results = flow.run(asked.closed.jaxpr, inputs, "")
    except Needed as needed:
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
    others = RowFlow({i: next(unused) for i in tables})
    others.run(ask(others.sizes).closed.jaxpr, inputs, "")
    if programs[0] != programs[1] or flow.numbers != others.numbers:
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
