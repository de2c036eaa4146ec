"""Dense transformations that are made of a formula for one parameter.

Such a transformation is a state class, a `Moment` for each field of the state, the
scalars of a step, and the formula. `by_leaf` maps it over the leaves of a tree, and
does once for all what follows from the moments: the arrays of a new state and their
layout, and the checks of a state that it is given. The formula treats each row alone,
so `lazy` lifts it to row-sparse gradients without looking into it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.huge_pages import use_huge_pages
from .._jax_extras.sharding import jit_on_mesh
from .._rows.checks import check_dense, is_bcoo, is_leaf, leaves_like, refuse_complex
from .._rows.clocks import keep_read_of
from .._rows.entries import accumulator_dtype
from .._rows.jit_with_bags import jit_with_bags
from .._rows.map_rows import Tables
from .._rows.new_arrays import full_along
from .._rows.row_ops import Formula, Update
from .._rows.update_table import update_table
from .current_rows import refuse_stored_rows
from .hyperparameters import (
    check_at_least,
    check_leaf,
    check_moment,
    check_state_class,
)
from .update_fn import RowUpdateFn, Updated


def all_axes(ndim: int) -> Sequence[int]:
    return range(ndim)


def all_but_last(ndim: int) -> Sequence[int]:
    """All axes but the last: one scalar for each row. A vector keeps its axis."""
    return range(max(1, ndim - 1) if ndim else 0)


class Moment(NamedTuple):
    """A field of a state, which has an array or `None` for each parameter.

    Attributes:
      axes: Which axes of a parameter of `ndim` axes its array has; `None`: it has none.
      dtype: Its type, or a function of that of the parameter, which is the default.
      value: What it begins with.
    """

    axes: Callable[[int], Sequence[int] | None] = all_axes
    dtype: Any = None
    value: Any = 0

    def init(self, param: Any) -> jax.Array | None:
        axes = self.axes(jnp.ndim(param))
        dtype = self.dtype
        if callable(dtype):
            dtype = dtype(jnp.result_type(param))
        return None if axes is None else full_along(param, self.value, dtype, axes)

    def check(self, name: str, array: Any, shape: tuple[int, ...]) -> None:
        axes = self.axes(len(shape))
        expected = None if axes is None else tuple(shape[axis] for axis in axes)
        check_moment(array, expected, name)


@functools.partial(jit_with_bags, static_argnames=("formula", "kernel"))
def update_leaf(
    formula: Callable[..., tuple[jax.Array, Tables]],
    grad: Any,
    param: Any,
    moments: Tables,
    scalars: Any,
    adds_to: jax.Array | None = None,
    kernel: str | None = None,
) -> tuple[Update, Tables]:
    """The update of a parameter, dense or row-sparse as its gradient, and its moments.

    `formula(grad, moments, scalars)` returns what to add to the parameter, and the new
    moments; the parameter, if it is given, is behind the moments. All arrays have the
    type of the scalars. It treats each row alone. `kernel` is the formula's name in the
    kernel, and `adds_to` the parameter, if that may add the update to it; see
    `update_table`.
    """
    read = () if param is None else (param,)
    dtype = jax.tree.leaves(scalars)[0].dtype

    def wide_formula(grad: jax.Array, rows: Tables, scalars: Any) -> Any:
        return formula(grad, tuple(x.astype(dtype) for x in rows), scalars)

    if is_bcoo(grad):
        operands = Formula(wide_formula, kernel), grad, moments, scalars
        return update_table(*operands, dtype=dtype, read=read, adds_to=adds_to)
    update, new_moments = wide_formula(grad.astype(dtype), (*moments, *read), scalars)
    pairs = zip(new_moments, moments, strict=True)
    return (
        Update(update.astype(grad.dtype)),
        tuple(new.astype(old.dtype) for new, old in pairs),
    )


class DenseUpdateFn:
    """The `update` of what `by_leaf` makes: that of dense gradients.

    `lazy` finds in it the one for row-sparse gradients. It is looked for in `update`,
    and by its class alone, so that what stands around it, or in its place
    (`tx._replace(update=...)`), is a transformation as any other.

    Attributes:
      of_rows: `update` for row-sparse gradients, too, which `lazy` makes public.
    """

    def __init__(self, of_rows: RowUpdateFn, name: str):
        self.of_rows, self._name = of_rows, name

    def __call__(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        check_dense(updates, self._name, f"{self._name}()")
        return self.of_rows(updates, state, params, **extra_args)


def _step_scalars(
    scalars: Callable[..., Any], scale: Any, count: jax.Array
) -> Callable[[Any, Any], Any]:
    """The scalars of a step, by the type that is computed in and the parameter's.

    They are computed once for each pair of types, not for each leaf: a model of 100
    tables traces its bias corrections once.
    """

    @functools.cache
    def of_types(dtype: Any, param_dtype: Any) -> Any:
        wide = functools.partial(jnp.asarray, dtype=dtype)
        numbers = scalars(wide(scale).reshape(()), count, dtype, param_dtype)
        return jax.tree.map(wide, numbers)

    return of_types


def _moments_of_leaf(
    moments: dict[str, Moment],
    columns: dict[str, list[Any]],
    i: int,
    shape: tuple[int, ...],
) -> dict[str, jax.Array]:
    """Those arrays of the state that a parameter has, which are checked."""
    for key, moment in moments.items():
        moment.check(key, columns[key][i], shape)
    return {key: x[i] for key, x in columns.items() if x[i] is not None}


def _update_leaves(
    update_leaf: Callable[..., Any],
    moments: dict[str, Moment],
    leaves: tuple[list[Any], list[Any], list[Any]],
    columns: dict[str, list[Any]],
    scalars_of: Callable[[Any, Any], Any],
    *,
    name: str,
    reads_params: str,
) -> list[Update]:
    """The update of each leaf; its new moments are put into the columns.

    `leaves` are the gradients, what they must be shaped like (the parameters, if these
    are read), and the parameters that may add updates to themselves.
    """
    made = [Update() for _ in leaves[0]]
    for i, (grad, like, adds_to) in enumerate(zip(*leaves, strict=True)):
        if grad is None:
            continue
        check_leaf(grad, like)
        if reads_params:
            refuse_stored_rows(grad, reads_params, name)
        arrays = _moments_of_leaf(moments, columns, i, jnp.shape(like))
        param = jnp.asarray(like) if reads_params else None
        read = [*arrays.values()] if param is None else [param]
        dtype = accumulator_dtype(grad.dtype, *(x.dtype for x in read))
        args = tuple(arrays.values()), scalars_of(dtype, read[-1].dtype), adds_to
        made[i], new_arrays = update_leaf(grad, param, *args)
        keep_read_of(made[i].change, grad)
        for key, new in zip(arrays, new_arrays, strict=True):
            columns[key][i] = new
    return made


def by_leaf(
    name: str,
    state_class: Any,
    moments: dict[str, Moment],
    update_leaf: Callable[..., Any],
    scalars: Callable[..., Any],
    learning_rate: optax.ScalarOrSchedule | None = None,
    reads_params: str = "",
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation of dense and `None` gradients; `lazy` lifts it.

    Args:
      name: Its name in errors.
      state_class: Its `NamedTuple`: `count` and then the moments.
      moments: The fields with an array for each parameter, by their names.
      update_leaf: `update_leaf(grad, param, moments, scalars, adds_to)`: what is
        computed for one parameter; that of a formula is a partial of the one above.
      scalars: `scalars(scale, count, dtype, param_dtype)` of a step, a tree of numbers
        that become arrays of `dtype`, in which the parameter is computed. `scale` is
        minus the learning rate; `count` counts from 1.
      learning_rate: The learning rate; `None` for a scaling, whose `scale` is 1.
      reads_params: Why it reads the parameters, for the error, if it does.
    """
    # 0 freezes, and a negative rate is a mistake.
    hint = " To maximize, negate the gradients, or set maximize."
    check_at_least("learning rate", learning_rate, 0, hint)
    # Without parameters, their shapes are those of the moments of the same shape.
    full = [key for key, moment in moments.items() if moment.axes is all_axes]
    title = name.title().replace("_", "")  # as torch's class
    update_leaves = functools.partial(
        _update_leaves, update_leaf, moments, name=name, reads_params=reads_params
    )

    def init_fn(params: optax.Params) -> Any:
        for leaf in jax.tree.leaves(params):
            refuse_complex(leaf, title)
        use_huge_pages(params)
        trees = {key: jax.tree.map(x.init, params) for key, x in moments.items()}
        return state_class(count=jnp.zeros([], jnp.int32), **trees)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        *,
        adds_to_params: bool,
        **extra_args: Any,
    ) -> Updated:
        del extra_args
        if reads_params and params is None:
            raise ValueError(
                f"{reads_params}, got none. Call update(updates, state, params)."
            )
        check_state_class(state, state_class, name)
        check_moment(state.count, (), "count")
        count_inc = optax.safe_increment(state.count)
        treedef: Any
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        none: list[Any] = [None] * len(grads)
        param_leaves, columns = none, {}
        if reads_params or adds_to_params:
            param_leaves = leaves_like(treedef, params, "Parameters", "gradients")
        for key in moments:
            tree = getattr(state, key)
            columns[key] = leaves_like(treedef, tree, "The moments", "gradients")
        shaped_like = columns[full[-1]] if full else grads
        if reads_params:
            shaped_like = param_leaves
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        if rate is None and callable(learning_rate):
            raise TypeError(
                f"The learning rate of {name} is a number or a schedule that returns "
                f"one; {learning_rate} returned None. Does it lack a return?"
            )
        scale = 1 if rate is None else -1 * rate
        leaves = grads, shaped_like, param_leaves if adds_to_params else none
        made = update_leaves(leaves, columns, _step_scalars(scalars, scale, count_inc))
        new_trees = {key: treedef.unflatten(x) for key, x in columns.items()}
        return treedef, made, state_class(count=count_inc, **new_trees)

    update = DenseUpdateFn(RowUpdateFn(update_fn), name)
    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update)
