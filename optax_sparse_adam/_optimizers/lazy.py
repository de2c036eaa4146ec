"""Any optax transformation, applied to the rows that a gradient holds.

`_update_tables` is the one idea of this package as a function: look rows up, update
them as a dense tree is updated, write them back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from .._jax_extras.huge_pages import use_huge_pages
from .._jax_extras.sharding import jit_on_mesh
from .._rows.checks import check_bcoo, is_bcoo
from .._rows.entries import Rows
from .._rows.row_ops import Update
from .by_leaf import DenseUpdateFn
from .current_rows import read_stale_params, with_current_rows
from .hyperparameters import check_transformation
from .lazy_leaves import Leaves, OfTable, Trees
from .lazy_probe import Probe, check_state, shard_state_like
from .lazy_row_analysis import split_update
from .lazy_tables import (
    compact_shapes,
    look_up,
    step_rows,
    sum_rows,
    summed_data,
    write,
)
from .row_owners import TableSize
from .update_fn import RowUpdateFn, Updated


def _shaped_like(
    probe: Probe, trees: Trees, leaves: Leaves[Any]
) -> tuple[Leaves[Any], Leaves[Any]]:
    """The leaves, with the parameter, or its shape, in the place of no gradient.

    Then the same without those parameters that the state was not made for.
    """
    if all(grad is not None for grad in leaves.grads):
        return leaves, leaves
    shapes = probe.shapes_of_none(trees, leaves)
    pairs = zip(leaves.grads, shapes, strict=True)
    grads = [shape if grad is None else grad for grad, shape in pairs]
    pairs = zip(leaves.params, grads, strict=True)
    params = [None if grad is None else param for param, grad in pairs]
    leaves = leaves._replace(grads=grads)
    return leaves, leaves._replace(params=params)


def _table_sizes(leaves: Leaves[Any], shaped_like: Leaves[Any]) -> dict[int, TableSize]:
    """Of each leaf of which some rows are updated, by its place, how many it has.

    None of them where the gradient is `None`: the parameter stays as it is.
    """
    sizes = {}
    triples = zip(leaves.grads, shaped_like.grads, leaves.params, strict=True)
    for i, (grad, like, param) in enumerate(triples):
        if is_bcoo(grad):
            check_bcoo(grad, None if param is None else jnp.shape(param))
            sizes[i] = TableSize(grad.shape, grad.n_sparse, grad.nse)
        elif grad is None and like is not None:
            sizes[i] = TableSize(like.shape, min(1, like.ndim), 0)
    return sizes


def _update_tables(
    update: Callable[[Leaves[Any]], Leaves[Any]],
    leaves: Leaves[Any],
    owners: Leaves[int | None],
    places: list[int],
    *,
    adds_to_params: bool,
) -> Leaves[Any]:
    """Looks the touched rows up, updates them, and writes them back.

    Args:
      update: The dense update of all leaves. It is called once, as a norm is one over
        all tables.
      leaves: Gradients, state and parameters.
      owners: The tables whose rows they hold.
      places: These tables, by their places among the gradients.
      adds_to_params: Whether updates may be added to the parameters.

    Returns:
      Of each gradient an `Update`, and the new state.
    """
    tables = {i: leaves.of_table(i, owners) for i in places}
    are_stale = read_stale_params(update, leaves, places)
    shapes, compact, rest = (leaves.map(_none) for _ in range(3))
    rows: dict[int, Rows] = {}
    looked_up: dict[int, OfTable[Any]] = {}

    # Look up. What is provably computed of each row alone needs no rows yet.
    may_be_split = set()
    for i, table in tables.items():
        shape = None if i in are_stale else compact_shapes(table)
        if shape is None:
            rows[i], looked_up[i] = look_up(table)
            if i in are_stale:
                olds = rows[i], looked_up[i]
                rows[i], looked_up[i] = with_current_rows(table, *olds)
            compact.put(i, owners, looked_up[i])
        else:
            shapes.put(i, owners, shape)
            may_be_split.add(i)
    compact = compact.map(_either, leaves)
    split = split_update(lambda x: update(x.map(_either, compact)), shapes, owners)
    for i in sorted(may_be_split):
        if i in split.summed:
            rows[i] = sum_rows(tables[i].grad)
            rest.grads[i] = summed_data(tables[i], rows[i])
        elif i not in split.formulas:
            rows[i], looked_up[i] = look_up(tables[i])
            rest.put(i, owners, looked_up[i])

    # Update: what is not of rows, or of those that depend on each other.
    results, shared = split.rest(rest)
    made = Leaves([*map(Update, results.grads)], [*results.state], results.params)

    # Write back.
    for i, table in tables.items():
        if i in split.formulas:
            formula, like = split.formulas[i], split.shapes.of_table(i, owners)
            operands = formula, table, rows.get(i), like, shared[i]
            new = step_rows(*operands, adds_to_param=adds_to_params)
        else:
            new = write(table, rows[i], looked_up[i], results.of_table(i, owners))
        made.put(i, owners, new)
    return made


def _none(x: Any) -> Any:
    return None


def _either(x: Any, other: Any) -> Any:
    return other if x is None else x


def lazy(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optax transformation lazy: it reads and writes the touched rows only.

    For each row-sparse gradient, the touched rows (duplicates added up) of the
    parameter and of every array of the state that has the parameter's rows are
    gathered, `inner.update` runs on these compact trees, and its results are scattered
    back. Rows that the gradient does not hold keep their parameters and their state bit
    for bit; scalars of the state, such as step counts, are shared by all rows (but see
    `per_row`). Dense gradients pass through as they are, together with the compact
    ones, so a chain inside sees all leaves:
    `lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))` clips by
    the norm of the whole, summed gradient.

    Padding of a gradient is zero rows to the inner transformation: sums and norms over
    rows are right, and run over the touched rows, which stand for the table in the
    trust ratios of `lamb` and `lars` and in the distances of `dog` and `prodigy`; but
    not behind what makes something of nothing, as noise or `contrib.cocob`. Means
    over rows are not right (`clip_by_block_rms`, `scale_by_param_block_rms`). What
    needs all rows at once is refused, as far as its state tells: `adafactor` (see
    `sparse_adafactor`), `muon`, `galore`, `lbfgs` and line searches, `lookahead`,
    `sam`, `sophia`, differentially private aggregation, `flatten`, `apply_every` and
    `MultiSteps`. To accumulate gradients, let one gradient span the micro-batches:
    `value_and_grad` of a loss that runs a `jax.lax.scan` over them.

    `inner` has its own defaults: the sums of `optax.adagrad` begin at 0.1, beside which
    the squares of a mean loss are nothing; give it `initial_accumulator_value=0.0`.

    Weight decay inside `inner` decays the touched rows, once for each step that touches
    them. A mask, or labels, that are a function (`optax.masked`, `optax.partition`) see
    the touched rows in place of the table. One that goes by names, types or ranks
    chooses the same leaves; one of sizes, which would choose others, is refused:
    pass a tree of booleans or labels in its place.

    Under `jit`, if the jaxpr of `inner.update` shows that it treats each row of a table
    alone, norms over gradients aside, this table and its state are updated separately
    and in place, on a CPU in blocks of rows where that is faster. That holds for Adam
    and similar ones, Adagrad, RMSProp, momentum, Lion and `per_row`, with clipping and
    schedules around them. All else is updated together; the results are the same up to
    rounding.

    Args:
      inner: The transformation, or a chain of them.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `inner`. `update`
      returns a coalesced BCOO for a BCOO, `None` for `None`, which touches no row.
      Updates and state have the types that `inner` gives them: float32 gradients of a
      float16 table widen its momentum, as in optax. Parameters are needed where `inner`
      reads them, and where a gradient is `None` and the state does not tell its shape.
      It raises `TypeError` and `ValueError` for gradients as `sparse_adam` does, and
      `ValueError` for a state that is not made of rows, or a mask of sizes.

    Raises:
      ValueError: By `init`, for a transformation that is known not to work.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 3, 7])
      >>> grad = osa.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      >>> tx = osa.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
      >>> update, state = tx.update(grad, tx.init(table), table)
      >>> table = osa.apply_updates(table, update)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.999, 0.999]
    """
    check_transformation(inner, "lazy")
    if type(inner.update) is DenseUpdateFn:  # of a formula, so there is nothing to find
        return optax.GradientTransformationExtraArgs(inner.init, inner.update.of_rows)
    transformation = optax.with_extra_args_support(inner)
    probe = Probe(transformation.init)

    def init_fn(params: optax.Params) -> optax.OptState:
        state = transformation.init(params)
        check_state(state)
        use_huge_pages((params, state))
        return shard_state_like(params, transformation, state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        *,
        adds_to_params: bool,
        **extra_args: Any,
    ) -> Updated:
        trees, leaves = Trees.of(updates, state, params)
        update = functools.partial(trees.update, transformation, extra_args)
        shaped, of_state = _shaped_like(probe, trees, leaves)
        tables = _table_sizes(leaves, shaped)
        if tables:
            owners = probe.owners(update, trees, of_state, tables, extra_args)
            args = update, shaped, owners, [*tables]
            results = _update_tables(*args, adds_to_params=adds_to_params)
        else:
            results = update(leaves)
            results = results._replace(grads=[*map(Update, results.grads)])
        return trees.grads, results.grads, trees.state.unflatten(results.state)

    return optax.GradientTransformationExtraArgs(
        jit_on_mesh(init_fn), RowUpdateFn(update_fn)
    )
