"""Whether an update leaves the rows alone of which its gradients store nothing.

In memory `optax.contrib.schedule_free(lazy(optax.sgd(0.1)), 0.1)` moves all rows at
every step, though gradients are row-sparse. Where only the rows of a batch are there,
the others would stay, without a word. So the update is traced, and each value of its
jaxpr that has all rows of a table is followed. In

    chain(lazy(sgd), momentum)      momentum: m = 0.9 * m + updates
    chain(average, sparse_adam)     average:  a = 0.9 * a + 0.1 * params

`mul` reads all rows of `m`, or of `a`. What may: the optimisers of this package, which
name their equations (`knows_stored_rows`), and a choice between the old array and the
new one, as of `optax.apply_if_finite`. Everything else is refused. So is what computes
with indices, or keeps them: rows of a batch have other numbers than those of the table.
"""

import functools
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.sparse import BCOO
from jax.extend.core import ClosedJaxpr

from .._rows.checks import is_bcoo, leaves_like
from .attempt import attempt
from .forms import first_that_traces
from .row_flow import (
    FOLLOWED,
    AllRows,
    Ids,
    Needed,
    RowFlow,
    Value,
    Zeros,
    have_same_numbers,
)
from .row_owners import TableSize, operations_of, size_error, unused_sizes
from .update_fn import RowUpdateFn


def forms_of(grads: Any) -> list[Any]:
    """The shapes of gradients, leaf by leaf: arrays, or row-sparse ones of arrays."""
    leaves = jax.tree.leaves(grads, is_leaf=is_bcoo)
    return [_row_sparse(x, x.shape) if is_bcoo(x) else jax.typeof(x) for x in leaves]


def _row_sparse(grad: Any, shape: tuple[int, ...]) -> Any:
    """The shapes of a gradient like this one, but of a parameter of this shape."""
    flags = {
        "indices_sorted": grad.indices_sorted, "unique_indices": grad.unique_indices
    }  # fmt: skip
    arrays = grad.data, grad.indices
    return jax.eval_shape(lambda *x: BCOO(x, shape=shape, **flags), *arrays)


def _summed(param: Any) -> Any:
    """As gradients are where duplicates were added up, which all optimisers take."""
    data, ids = jnp.zeros((2, *param.shape[1:]), param.dtype), jnp.zeros((2, 1), int)
    flags = {"indices_sorted": True, "unique_indices": True}
    return BCOO((data, ids), shape=param.shape, **flags)


def check_untouched_rows(
    tx: optax.GradientTransformation,
    params: Any,
    tables: dict[int, TableSize],
    owners: Sequence[int | None],
    extra_args: dict[str, Any],
    name: str,
    *,
    forms: list[Any] | None = None,
) -> None:
    """Raises for a transformation that reads or changes rows without a gradient.

    Args:
      tx: The transformation.
      params: The tree of shapes and types of the parameters.
      tables: The tables among them, each looked up by one id.
      owners: Which table's rows each array of the state holds.
      extra_args: What the update takes besides.
      name: Who needs it, for errors.
      forms: Of the gradients (`forms_of`) in a step, whose arguments are all there.

    Raises:
      ValueError: If it does.
      Exception: What the update raises of row-sparse gradients of whole tables, in a
        step; before it, one may want other arguments.
    """
    if type(tx.update) is RowUpdateFn:
        return
    leaves = jax.tree.leaves(params)
    is_step = forms is not None
    forms = [
        _summed(x) if i in tables and not is_bcoo(form) else form
        for i, (x, form) in enumerate(zip(leaves, forms or leaves, strict=True))
    ]
    ask = functools.partial(
        _Asked.of, tx, params, forms=forms, extra_args=extra_args, name=name
    )
    # As many rows as no other axis has: what has all rows is known by their number.
    state = jax.eval_shape(tx.init, params)
    unused = unused_sizes([*leaves, *jax.tree.leaves((forms, state))])
    sizes = {i: next(unused) for i in tables}
    asked, error = attempt(ask, sizes)
    if error is not None:
        if is_step:
            error.add_note(f"{name} asks this of tables of {[*sizes.values()]} rows.")
            raise error
        return
    for i in tables:
        if asked.num_arrays[i] == 1:
            raise _error(name, params, i, "its update is one of all rows")
    places = range(len(leaves))
    inputs: list[Value] = [AllRows(i, i) if i in tables else None for i in places]
    pairs = enumerate(owners, len(leaves))
    owned = [None if i is None else AllRows(i, k) for k, i in pairs]
    inputs += owned
    for i, form in enumerate(forms):
        ids = [Ids(i) if i in tables else None] if is_bcoo(form) else []
        inputs += [None, *ids]
    try:
        results = RowFlow(sizes).run(asked.closed.jaxpr, inputs)
        asked.check(results, owned, tables)
    except Needed as needed:
        # What maps over all arrays, as optax.scale does, is explained by the step.
        if needed.numbers and not is_step:
            return
        raise _error(name, params, needed.table, needed.why) from None
    # The same numbers, whatever the number of rows is, and the same operations with all
    # rows and with some, as `check_sizes` asks of dense gradients.
    others = {i: next(unused) for i in tables}
    whole = {i: table.num_rows for i, table in tables.items()}
    few = {i: table.num_touched for i, table in tables.items()}
    other, *programs = (ask(x).closed for x in (others, whole, few))
    of_any = (asked.closed, {*sizes.values()}), (other, {*others.values()})
    any_number = range(1 << 62)  # here a table may be as long as any other axis
    sides = [(x, any_number) for x in programs]
    operations = [*map(operations_of, programs)]
    is_same = operations[0] == operations[1] and have_same_numbers(*sides)
    if not (is_same and have_same_numbers(*of_any)):
        at = max(whole, key=lambda i: whole[i])
        raise size_error(name, whole[at], few[at])


class _Asked(NamedTuple):
    """An update of row-sparse gradients, traced.

    Attributes:
      closed: Its program: of the leaves of parameters, state and gradients, of which
        a row-sparse one has two. It returns the new state, and updates.
      state: The tree of shapes of the state.
      num_arrays: How many each update has: two if it is row-sparse, none for `None`.
    """

    closed: ClosedJaxpr
    state: Any
    num_arrays: list[int]

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        params: Any,
        sizes: dict[int, int],
        *,
        forms: list[Any],
        extra_args: dict[str, Any],
        name: str,
    ) -> "_Asked":
        """Of tables of so many rows; raises what the update raises."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(params)
        resized, grads = [*leaves], [*forms]
        for i, num_rows in sizes.items():
            shape = num_rows, *leaves[i].shape[1:]
            resized[i] = jax.ShapeDtypeStruct(shape, leaves[i].dtype)
            grads[i] = _row_sparse(forms[i], shape)
        state = jax.eval_shape(tx.init, treedef.unflatten(resized))
        made: list[Any] = []

        def update(params: Any, state: Any, grads: Any) -> Any:
            def of_grads(grads: Any, extra: dict[str, Any]) -> Any:
                updates, new_state = tx.update(grads, state, params, **extra)
                made[:] = leaves_like(treedef, updates, "Updates", "parameters")
                kinds: list[Any] = [*map(jax.tree.structure, (new_state, state))]
                if kinds[0] != kinds[1]:
                    raise ValueError(
                        f"{name} needs an optimiser whose state keeps its structure; "
                        f"`init` returned {kinds[1]}, and `update` {kinds[0]}."
                    )
                return new_state, made

            new_state, updates = first_that_traces(name, of_grads, grads, extra_args)(
                extra_args
            )
            return jax.tree.leaves(new_state), updates

        shapes = treedef.unflatten(resized), state, treedef.unflatten(grads)
        closed = jax.make_jaxpr(update)(*shapes)
        return cls(closed, state, [len(jax.tree.leaves(x)) for x in made])

    def check(
        self,
        results: Iterable[Value],
        owned: Sequence[AllRows | None],
        tables: Container[int],
    ) -> None:
        """Raises `Needed` unless each result is of the rows that it should be.

        Args:
          results: What the program returns, as `RowFlow` has it.
          owned: What the arrays of the state are.
          tables: The tables among the parameters.
        """
        values = iter(results)
        pairs = jax.tree_util.tree_leaves_with_path(self.state)
        for (path, _), rows in zip(pairs, owned, strict=True):
            value, where = next(values), f"`state{jax.tree_util.keystr(path)}`"
            if rows is not None and value != rows:
                raise Needed(rows.table, f"{where} changes in all rows")
            if rows is None and isinstance(value, FOLLOWED):
                raise Needed(value.table, f"{where} keeps them, or their numbers")
        for i, number in enumerate(self.num_arrays):
            data, ids = [*itertools.islice(values, number), None, None][:2]
            if i in tables and number:
                own: list[Value] = [Ids(i)]
                if isinstance(data, Zeros):
                    own += [Ids(i, or_zeros=True), data]
                if ids not in own or isinstance(data, FOLLOWED):
                    raise Needed(i, "its update has other indices than its gradient")
            for x in (data, ids):
                if i not in tables and isinstance(x, FOLLOWED):
                    raise Needed(
                        x.table, "another parameter gets them, or their numbers"
                    )


def _error(name: str, params: Any, table: int, why: str) -> ValueError:
    path, _ = jax.tree_util.tree_leaves_with_path(params)[table]
    return ValueError(
        f"{name} trains the rows that a batch looks up, and this optimiser needs more "
        f"than these of {jax.tree_util.keystr(path) or 'the table'}: {why}. Put what "
        "takes rows inside of lazy, which gives it those of the batch, as in "
        "lazy(optax.chain(...)); or keep the table on the device."
    )
