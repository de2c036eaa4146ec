"""Any optax transformation, applied to the rows that a gradient holds."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.huge_pages import use_huge_pages
from .._jax_extras.sharding import jit_on_mesh, shard_columns_like
from .._rows.checks import check_bcoo, is_bcoo, is_leaf, leaves_like
from .._rows.coalesce import touched_rows
from .._rows.entries import Rows, accumulator_dtype, bcoo_of
from .._rows.gather_scatter import order_after_gather, prevent_fusion
from .._rows.map_rows import RowFunction, Tables
from .._rows.padding import mask_padding
from .._rows.update_table import map_rows, put_rows, take_rows
from .by_leaf import DenseUpdate
from .hyperparameters import check_transformation
from .lazy_probe import (
    TableSize,
    check_state,
    probe,
    shapes_of_none,
    shard_state_like,
)
from .lazy_row_analysis import split_update


def _table_size(grad: Any, param: Any) -> TableSize | None:
    """How many rows a parameter has, if `lazy` updates some of them only.

    None of them where the gradient is `None`: the parameter stays as it is.
    """
    if is_bcoo(grad):
        check_bcoo(grad, None if param is None else jnp.shape(param))
        return TableSize(grad.shape, grad.n_sparse, grad.nse)
    if grad is None and param is not None:
        return TableSize(param.shape, min(1, param.ndim), 0)
    return None


def _touched_rows(grad: Any, param: Any, n_sparse: int) -> Rows:
    """The touched rows of a gradient, in its type; none of `None`."""
    if grad is None:
        none = jnp.zeros(
            [0, *param.shape[1:]], jax.dtypes.canonicalize_dtype(param.dtype)
        )
        count = jnp.zeros([], jnp.int32)
        return Rows(jnp.zeros([0, n_sparse], jnp.int32), none, count)
    rows = touched_rows(grad, accumulator_dtype(grad.dtype))
    data = rows.data.astype(grad.dtype)
    return rows._replace(
        data=data if param is None else shard_columns_like(param, data)
    )


def _widened(table: jax.Array, result: jax.Array) -> jax.Array:
    """An array of the state, in the type that the transformation makes it of.

    A float32 gradient widens the momentum of a float16 parameter in optax, once. What
    would be narrower stays as it is: other rows keep their bits.
    """
    dtypes = result.dtype, table.dtype
    if all(jnp.issubdtype(x, jnp.floating) for x in dtypes):
        new, old = (jnp.finfo(x).bits for x in dtypes)
        return table.astype(result.dtype) if new > old else table
    return table


def _run_in_types(
    row_fn: RowFunction,
    dtypes: tuple[Any, ...],
    data: jax.Array,
    old: Tables,
    *args: Any,
) -> tuple[jax.Array, Tables]:
    """A function of rows that were widened, of these in the types that they had."""
    cast = [x.astype(t) for x, t in zip((data, *old), dtypes, strict=False)]
    return row_fn(cast[0], (*cast[1:], *old[len(cast) - 1 :]), *args)


def _either(x: Any, of_some: Any, of_none: Any) -> Any:
    return of_none if x is None else of_some


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
    trust ratios of `lamb` and `lars` and in the distances of `dog` and `prodigy`. Means
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
    if type(inner.update) is DenseUpdate:  # of a formula, so there is nothing to find
        return optax.GradientTransformationExtraArgs(inner.init, inner.update.of_rows)
    transformation = optax.with_extra_args_support(inner)
    known: dict[Any, list[int | None]] = {}
    of_none: dict[Any, list[Any]] = {}

    def init_fn(params: optax.Params) -> optax.OptState:
        state = transformation.init(params)
        check_state(state)
        use_huge_pages((params, state))
        return shard_state_like(params, transformation, state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        treedef: Any
        state_treedef: Any
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        leaves, state_treedef = jax.tree.flatten(state)
        param_leaves: list[Any] = [None] * len(grads)
        if params is not None:
            param_leaves = leaves_like(treedef, params, "Parameters", "gradients")
        # Leaves that are updated by rows, by their places. Dense ones stay whole, and
        # pass through the same call of the inner transformation.
        shaped_like = param_leaves
        if any(grad is None for grad in grads):
            given = treedef, grads, param_leaves, leaves
            found = shapes_of_none(transformation.init, *given, of_none)
            shaped_like = [*map(_either, grads, param_leaves, found)]
        each = map(_table_size, grads, shaped_like)
        sizes = {i: size for i, size in enumerate(each) if size is not None}
        if not sizes:
            return transformation.update(updates, state, params, **extra_args)
        # One flat list: gradients, state, parameters. The results are updates and new
        # state, so that a result has the place of the array that it replaces.
        arrays = [*grads, *leaves, *param_leaves]
        num_grads, num_results = len(grads), len(grads) + len(leaves)

        def update(arrays: list[Any]) -> list[Any]:
            """An ordinary dense update, of whole arrays or of touched rows."""
            updates, state = transformation.update(
                treedef.unflatten(arrays[:num_grads]),
                state_treedef.unflatten(arrays[num_grads:num_results]),
                None if params is None else treedef.unflatten(arrays[num_results:]),
                **extra_args,
            )
            flat = state_treedef.flatten_up_to(state)
            return [*treedef.flatten_up_to(updates), *flat]

        # Look the touched rows up, of gradients, state and parameters. `owners` says of
        # each array which table it has rows of. For table 0 and a bias under Adam:
        # gradients [0, None], count, mu, nu [None, 0, None, 0, None], params [0, None].
        gradients = map(_either, grads, grads, shaped_like)
        known_params = map(_either, shaped_like, param_leaves, itertools.repeat(None))
        sought = treedef, [*gradients, *leaves, *known_params], sizes, extra_args
        owners = probe(transformation.init, update, *sought, known)
        rows = {
            i: _touched_rows(grads[i], shaped_like[i], sizes[i].n_sparse) for i in sizes
        }

        def compacted(at: int, x: Any) -> Any:
            i = owners[at]
            if i is None:
                return x
            if at < num_grads:
                return rows[i].data
            x = jnp.asarray(x)  # a parameter may be a number
            return mask_padding(take_rows(x, rows[i].indices), rows[i].indices, x.shape)

        compact = list(itertools.starmap(compacted, enumerate(arrays)))
        in_state = range(num_grads, num_results)
        state_of = {i: [at for at in in_state if owners[at] == i] for i in rows}
        # Update them. All tables go through one call of the inner transformation, as a
        # norm is one over all of them. Where it provably treats each row alone, XLA
        # drops these results, and `map_rows` computes the rows in blocks.
        # Outside of a program each loop over blocks would be compiled again.
        traced = [i for i in rows if isinstance(rows[i].data, jax.core.Tracer)]
        alone = {i for i in traced if rows[i].data.size and state_of[i]}
        results, row_fns = split_update(
            lambda some: update([some.get(at, x) for at, x in enumerate(compact)]),
            {at: compact[at] for at, i in enumerate(owners) if i in alone},
            owners,
            num_grads,
        )
        # Write them back.
        for i, (indices, data, _) in rows.items():
            places = state_of[i]
            tables = tuple(_widened(arrays[at], results[at]) for at in places)
            if i in row_fns:
                # `extra`: what all rows share, as a bias correction or a global norm.
                row_fn, extra = row_fns[i]
                read = () if params is None else (param_leaves[i],)
                dtypes = data.dtype, *(compact[at].dtype for at in places)
                # `data` is the buffer of the update as well.
                if results[i].dtype != data.dtype:
                    wide = accumulator_dtype(data.dtype, results[i].dtype)
                    data = data.astype(wide)
                if (data.dtype, *(x.dtype for x in tables)) != dtypes:
                    row_fn = functools.partial(_run_in_types, row_fn, dtypes)
                own = rows[i]._replace(data=data)
                data, news = map_rows(row_fn, own, tables, extra, read=read)
                data = data.astype(results[i].dtype)
            else:
                # Padding is zeros in an update, also where the inner transformation
                # adds something to every row, as noise.
                data = mask_padding(results[i], indices, sizes[i].shape)
                data = prevent_fusion(data)
                made = (order_after_gather(compact[at], results[at]) for at in places)
                pairs = zip(tables, made, strict=True)
                news = tuple(put_rows(table, indices, new) for table, new in pairs)
            for at, new in zip(places, news, strict=True):
                results[at] = new
            results[i] = None
            if grads[i] is not None:
                args = grads[i], indices, data
                results[i] = bcoo_of(*args, is_sorted=True, dtype=data.dtype)
        state = state_treedef.unflatten(results[num_grads:])
        return treedef.unflatten(results[:num_grads]), state

    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update_fn)
