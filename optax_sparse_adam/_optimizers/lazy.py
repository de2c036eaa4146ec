"""Any optax transformation, applied to the rows that a gradient holds."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import jit_on_mesh, shard_columns_like
from .._rows.checks import check_bcoo, is_bcoo, is_leaf, leaves_like
from .._rows.coalesce import Rows, accumulator_dtype, bcoo_of, touched_rows
from .._rows.gather_scatter import (
    gather_rows,
    order_after_gather,
    prevent_fusion,
    scatter_rows,
)
from .._rows.map_rows import map_rows
from .._rows.padding import mask_padding
from .hyperparameters import check_transformation
from .lazy_probe import Sizes, check_state, probe, state_laid_like
from .lazy_row_analysis import split_update


class _Arguments(NamedTuple):
    """The arguments of an update, as lists.

    A gradient may be `None`, and so is every parameter where none are given.
    """

    grads: list[Any]
    leaves: list[Any]
    params: list[Any]
    treedef: Any
    structure: Any
    has_params: bool

    @classmethod
    def of(cls, updates: Any, state: Any, params: Any) -> "_Arguments":
        treedef: Any
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        olds: list[Any] = [None] * len(grads)
        if params is not None:
            olds = leaves_like(treedef, params, "Parameters", "gradients")
        leaves, structure = jax.tree.flatten(state)
        return cls(grads, leaves, olds, treedef, structure, params is not None)

    def trees(self, arrays: list[Any]) -> tuple[Any, Any, Any]:
        """The arguments again, of a list of their arrays."""
        first, last = len(self.grads), len(arrays) - len(self.grads)
        params = self.treedef.unflatten(arrays[last:]) if self.has_params else None
        state = self.structure.unflatten(arrays[first:last])
        return self.treedef.unflatten(arrays[:first]), state, params

    def results(self, updates: Any, state: Any) -> list[Any]:
        """What an update returns, in the order of its arguments."""
        leaves = self.structure.flatten_up_to(state)
        return [*self.treedef.flatten_up_to(updates), *leaves]


class _Table(NamedTuple):
    """A parameter with a row-sparse gradient or none, and its touched rows.

    Attributes:
      rows: The touched rows of its gradient.
      places: Where the arguments have its gradient, the arrays of the state that hold
        its rows, and the parameter, if they have that.
      state: These arrays of the state.
      read: The parameter, or nothing.
      old: The touched rows of both.
    """

    rows: Rows
    places: list[int]
    state: tuple[jax.Array, ...]
    read: tuple[jax.Array, ...]
    old: list[jax.Array]

    @property
    def is_worth_analysing(self) -> bool:
        """Whether its rows may be independent: it has some, state and a trace.

        Outside of a program each loop over blocks would be compiled again.
        """
        is_traced = isinstance(self.rows.indices, jax.core.Tracer)
        return is_traced and self.rows.data.size > 0 and bool(self.state)


def _sizes(grad: Any, param: Any) -> Sizes | None:
    """How many rows a parameter has, if `lazy` updates some of them only.

    None of them where the gradient is `None`: the parameter stays as it is.
    """
    if is_bcoo(grad):
        check_bcoo(grad, None if param is None else jnp.shape(param))
        return Sizes.of(grad.shape, grad.n_sparse, grad.nse)
    if grad is None and param is not None:
        return Sizes.of(param.shape, min(1, param.ndim), 0)
    return None


def _gather(given: _Arguments, i: int, size: Sizes, owners: list[Any]) -> _Table:
    """The touched rows of what belongs to parameter `i`."""
    grad, param = given.grads[i], given.params[i]
    if grad is None:
        none = jnp.zeros([0, *param.shape[1:]], param.dtype)
        count = jnp.zeros([], jnp.int32)
        rows = Rows(jnp.zeros([0, size.n_sparse], jnp.int32), none, count)
    else:
        rows = touched_rows(grad, accumulator_dtype(grad.dtype))
        data = rows.data.astype(grad.dtype)
        data = data if param is None else shard_columns_like(param, data)
        rows = rows._replace(data=data)
    places = [place for place, owner in enumerate(owners) if owner == i]
    arrays = [*given.grads, *given.leaves, *given.params]
    held = tuple(arrays[place] for place in places[1:])
    own = len(held) - given.has_params
    old = [gather_rows(x, rows.indices) for x in held]
    return _Table(rows, places, held[:own], held[own:], old)


def _put(arrays: list[Any], places: list[int], news: Iterable[Any]) -> list[Any]:
    """The list with new arrays in the first of these places."""
    arrays = list(arrays)
    for place, new in zip(places, news, strict=False):
        arrays[place] = new
    return arrays


def _write_back(
    grad: Any, size: Sizes, table: _Table, found: Any, results: list[Any]
) -> tuple[Any, ...]:
    """The update of a table, as its gradient is, and its state with the new rows.

    `found` is the formula of its rows, where they are independent.
    """
    rows = table.rows
    if found is not None:
        data, state = map_rows(found[0], rows, table.state, found[1], read=table.read)
    else:
        update, *new_rows = (results[i] for i in table.places[: 1 + len(table.state)])
        data = prevent_fusion(mask_padding(update, rows.indices, size.shape))
        state = tuple(
            scatter_rows(x, rows.indices, order_after_gather(old, new))
            for x, old, new in zip(table.state, table.old, new_rows, strict=False)
        )
    if grad is None:
        return None, *state
    return bcoo_of(grad, rows.indices, data, is_sorted=True), *state


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

    Weight decay inside `inner` decays the touched rows, once for each step that touches
    them. Masks and labels that are functions (`optax.masked`, `optax.partition`) see
    the touched rows: those of names, types and ranks are right, one of sizes that would
    choose other leaves than for the table is refused. Give the tree that it returns.

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
    known: dict[Any, list[int | None]] = {}

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
        given = _Arguments.of(updates, state, params)
        each = map(_sizes, given.grads, given.params)
        sizes = {i: size for i, size in enumerate(each) if size is not None}
        if not sizes and (params is not None or None not in given.grads):
            return transformation.update(updates, state, params, **extra_args)
        arrays = [*given.grads, *given.leaves, *given.params]

        # An ordinary dense transformation, of whole arrays or of touched rows.
        def update(arrays: list[Any]) -> list[Any]:
            trees = given.trees(arrays)
            return given.results(*transformation.update(*trees, **extra_args))

        def update_rows(data: Any, old: Any) -> list[Any]:
            """The update of touched rows: of these, or of those of a table."""
            small = arrays
            for i, table in tables.items():
                rows = data.get(i, table.rows.data), *old.get(i, table.old)
                small = _put(small, table.places, rows)
            return update(small)

        # Look the touched rows up, of gradients, state and parameters. `owners` says of
        # each array which table it has rows of. For table 0 and a bias under Adam:
        # gradients [0, None], count, mu, nu [None, 0, None, 0, None], params [0, None].
        owners = probe(transformation.init, update, given.treedef, arrays, sizes, known)
        tables = {i: _gather(given, i, size, owners) for i, size in sizes.items()}
        # Update them. All tables go through one call of the inner transformation, as a
        # norm is one over all of them. Where it provably treats each row alone, XLA
        # drops these results, and `_write_back` computes the rows in blocks.
        alone = {i: table for i, table in tables.items() if table.is_worth_analysing}
        results, formulas = split_update(
            update_rows,
            owners[: -len(given.params)],
            {i: table.rows.data for i, table in alone.items()},
            {i: table.old for i, table in alone.items()},
        )
        # Write them back.
        for i, table in tables.items():
            news = _write_back(
                given.grads[i], sizes[i], table, formulas.get(i), results
            )
            results = _put(results, table.places, news)
        return given.trees([*results, *given.params])[:2]

    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update_fn)
