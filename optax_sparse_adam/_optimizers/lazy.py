"""Any optax transformation, applied to the rows that a gradient holds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import jit_on_mesh, shard_columns_like
from .._rows.checks import check_bcoo, is_bcoo, is_leaf, leaves_like
from .._rows.coalesce import Rows, accumulator_dtype, bcoo_like, touched_rows
from .._rows.gather_scatter import (
    gather_rows,
    order_after_gather,
    prevent_fusion,
    scatter_rows,
)
from .._rows.map_rows import map_rows
from .._rows.padding import mask_padding
from .hyperparameters import check_transformation
from .lazy_row_analysis import take_apart
from .lazy_sizes import check_sizes
from .lazy_state import check_state, row_leaves, shape_of, state_laid_like


def _touched(grad: Any, param: Any) -> Rows:
    """The touched rows of a BCOO, and of `None`: no rows."""
    if grad is None:
        none = jnp.zeros([0, *param.shape[1:]], param.dtype)
        indices = jnp.zeros([0, min(1, param.ndim)], jnp.int32)
        return Rows(indices, none, jnp.zeros([], jnp.int32))
    check_bcoo(grad, None if param is None else jnp.shape(param))
    rows = touched_rows(grad, accumulator_dtype(grad.dtype))
    data = rows.data.astype(grad.dtype)
    return rows._replace(
        data=data if param is None else shard_columns_like(param, data)
    )


class _Table(NamedTuple):
    """A parameter with a row-sparse gradient or none, and what of it is gathered.

    Attributes:
      rows: The touched rows of its gradient.
      shape: Its shape.
      places: Which leaves of the state hold its rows.
      state: These leaves.
      params: The parameter, where `update` has been given parameters.
      old: The touched rows of `state`, then of `params`.
    """

    rows: Rows
    shape: tuple[int, ...]
    places: list[int]
    state: tuple[jax.Array, ...]
    params: tuple[jax.Array, ...]
    old: list[jax.Array]

    @property
    def is_worth_analysing(self) -> bool:
        """Whether to ask if its rows are independent: it has some, state and a trace.

        Outside of a program each loop over blocks would be compiled anew.
        """
        is_traced = isinstance(self.rows.indices, jax.core.Tracer)
        return is_traced and self.rows.data.size > 0 and bool(self.state)


def _gather(rows: Rows, shape: Any, places: list[int], leaves: Any, param: Any) -> Any:
    state = tuple(leaves[place] for place in places)
    params = () if param is None else (param,)
    old = [gather_rows(x, rows.indices) for x in (*state, *params)]
    return _Table(rows, shape, places, state, params, old)


def _scatter(
    table: _Table, update: jax.Array, new_state: Sequence[jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The rows of the update, without padding, and the state with its new rows."""
    state = tuple(
        scatter_rows(whole, table.rows.indices, order_after_gather(old, new))
        for whole, old, new in zip(table.state, table.old, new_state, strict=False)
    )
    rows = mask_padding(update, table.rows.indices, table.shape)
    return prevent_fusion(rows), state


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
    ones, so a chain in the middle sees all leaves:
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

    Weight decay inside `inner` decays the touched rows, once for each step that touches
    them. Masks and labels that are functions (`optax.masked`, `optax.partition`) see
    the touched rows: those of names, types and ranks are right, one of sizes that would
    choose other leaves than for the table is refused. Give the tree that it returns.

    Under `jit`, if the jaxpr of `inner.update` shows that it treats each row of a table
    alone, norms over gradients aside, this table and its state are updated separately
    and in place, on a CPU in blocks of rows where that is faster. That holds for Adam
    and its kin, Adagrad, RMSProp, momentum, Lion and `per_row`, with clipping and
    schedules around them. All else is updated together; the results are the same up to
    rounding.

    Args:
      inner: The transformation, or a chain of them.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `inner`. `update`
      returns a coalesced BCOO for a BCOO, `None` for `None`, which touches no row. It
      raises `TypeError` and `ValueError` for gradients as `sparse_adam` does, and
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
    transformation = optax.with_extra_args_support(inner)
    checked: set[Any] = set()

    def init_fn(params: optax.Params) -> optax.OptState:
        state = transformation.init(params)
        check_state(state)
        return state_laid_like(params, transformation, state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        treedef: Any
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        olds: list[Any] = [None] * len(grads)
        if params is not None:
            olds = leaves_like(treedef, params, "Parameters", "gradients")
        rows = {
            i: _touched(grad, param)
            for i, (grad, param) in enumerate(zip(grads, olds, strict=True))
            if is_bcoo(grad) or (grad is None and param is not None)
        }
        unknown = params is None and any(grad is None for grad in grads)
        if not rows and not unknown:
            return transformation.update(updates, state, params, **extra_args)
        shapes = [
            shape_of(grad, param) for grad, param in zip(grads, olds, strict=True)
        ]
        depths = {i: touched.indices.shape[1] for i, touched in rows.items()}
        structure: Any
        leaves, structure = jax.tree.flatten(state)
        owners = row_leaves(transformation, treedef, shapes, depths, leaves)

        def inner_update(arrays: list[list[Any]]) -> Any:
            """Of gradients, state and parameters, as lists of arrays."""
            return transformation.update(
                treedef.unflatten(arrays[0]),
                structure.unflatten(arrays[1]),
                None if params is None else treedef.unflatten(arrays[2]),
                **extra_args,
            )

        own = [i if i in rows else None for i in range(len(grads))]
        check_sizes(
            inner_update,
            [shapes, leaves, olds],
            [own, owners, own],
            depths,
            {i: touched.indices.shape[0] for i, touched in rows.items()},
            checked,
        )
        tables: dict[int, _Table] = {}
        for i, touched in rows.items():
            places = [place for place, owner in enumerate(owners) if owner == i]
            tables[i] = _gather(touched, shapes[i].shape, places, leaves, olds[i])
        alone = {i: table for i, table in tables.items() if table.is_worth_analysing}

        def compact(data: Any, old: Any) -> list[Any]:
            """`inner.update` on compact trees."""
            small_grads, small_leaves, small_params = [*grads], [*leaves], [*olds]
            for i, table in tables.items():
                small_grads[i] = data.get(i, table.rows.data)
                taken = old.get(i, table.old)
                for place, new in zip(table.places, taken, strict=False):
                    small_leaves[place] = new
                if table.params:
                    small_params[i] = taken[-1]
            new_updates, new_state = inner_update(
                [small_grads, small_leaves, small_params]
            )
            results = treedef.flatten_up_to(new_updates)
            return [*results, *structure.flatten_up_to(new_state)]

        small, middles, extra = take_apart(
            compact,
            [*range(len(grads)), *owners],
            {i: table.rows.data for i, table in alone.items()},
            {i: table.old for i, table in alone.items()},
        )
        results, new_leaves = small[: len(grads)], small[len(grads) :]
        for i, table in tables.items():
            if i in middles:  # independent; `map_rows` decides whether in blocks
                data, new_state = map_rows(
                    middles[i], table.rows, table.state, extra[i], read=table.params
                )
            else:
                new_rows = [new_leaves[place] for place in table.places]
                data, new_state = _scatter(table, results[i], new_rows)
            grad = grads[i]
            results[i] = None if grad is None else bcoo_like(grad, table.rows, data)
            for place, new in zip(table.places, new_state, strict=True):
                new_leaves[place] = new
        return treedef.unflatten(results), structure.unflatten(new_leaves)

    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update_fn)
