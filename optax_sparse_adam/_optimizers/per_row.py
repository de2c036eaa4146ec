"""Any optax transformation with a state, and a clock, of its own for each row."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._rows.checks import check_dense, is_leaf
from .._rows.stale import refuse_stale_states
from .hyperparameters import check_state_shapes, check_transformation


def _vmap_rows(function: Callable[..., Any], leaf: jax.Array) -> Callable[..., Any]:
    return jax.vmap(function) if jnp.ndim(leaf) else function


def _merge_states(treedef: Any, states: list[Any]) -> Any:
    """Makes one state, with a tree of arrays in each place, of one for each leaf."""
    # A leaf that is masked has a state with fewer arrays: the largest has all places.
    structure: Any = jax.tree.structure(
        max(states, key=lambda s: len(jax.tree.leaves(s)))
    )
    # Of the states (count [1000], mu [1000, 4]) and (count [50], mu [50, 2]) of two
    # tables, one state (counts, mus), with a tree like the parameters in each place.
    try:
        places = zip(*map(structure.flatten_up_to, states), strict=True)
    except ValueError as error:
        raise ValueError(
            "per_row needs a transformation whose state has one tree for all "
            "parameters, and this one has others, as optax.sm3 has for each number of "
            "axes. Give each kind a transformation of its own, by optax.partition, or "
            "use lazy without per_row."
        ) from error
    return structure.unflatten(map(treedef.unflatten, places))


def _state_of_leaf(treedef: Any, state: Any, i: int) -> Any:
    """The state of leaf `i` alone; `None` counts as a leaf."""
    return jax.tree.map(
        lambda tree: treedef.flatten_up_to(tree)[i],
        state,
        is_leaf=lambda tree: jax.tree.structure(tree, is_leaf=is_leaf) == treedef,
    )


def per_row(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Gives each row a state of its own, step count included, as if it were alone.

    In `lazy(inner)` all rows share the scalars of the state, so that a row first seen
    at step 1000 gets the bias correction of step 1000. In `lazy(per_row(inner))` each
    row counts the steps that touched it: this is Adam as DGL's `SparseAdam`, Monolith
    and FBGEMM (`use_rowwise_bias_correction`) run it, and what
    `optax.adam` would do with each row as a parameter, trained on the steps that touch
    it.

    .. warning::

      Everything in `inner` is by row: a schedule counts the row's steps, and
      `clip_by_global_norm` clips each row by its own norm, and a random key is the
      same for all rows, which then get the same noise. What rows should share
      goes outside, `lazy(optax.chain(optax.clip_by_global_norm(1.0),
      per_row(optax.scale_by_adam()), optax.scale_by_learning_rate(schedule)))`.

    A row is one index of the first axis, for dense gradients too; a gradient of `None`
    changes nothing. The state is that of
    `inner`, but that each of its scalars becomes a tree like the parameters, of
    `[num_rows]` arrays: 4 bytes a row for a count.

    Args:
      inner: The transformation, or a chain of them.

    Returns:
      An `optax.GradientTransformationExtraArgs`, an ordinary one for dense gradients;
      `lazy` lifts it to row-sparse ones, of one sparse axis; outside of `lazy` these
      raise `TypeError`.

    Raises:
      ValueError: By `init`, if the state of `inner` has other trees for some of the
        parameters, as that of `optax.sm3` for other numbers of axes.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from jax.experimental.sparse import BCOO
      >>> import optax_sparse_adam as osa
      >>> tx = osa.lazy(osa.per_row(optax.scale_by_adam()))
      >>> state = tx.init(jnp.zeros((4, 2)))
      >>> for row in (1, 1, 3):
      ...     grad = BCOO((jnp.ones((1, 2)), jnp.array([[row]])), shape=(4, 2))
      ...     update, state = tx.update(grad, state)
      >>> state.count.tolist()
      [0, 2, 0, 1]
    """
    check_transformation(inner, "per_row")
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        leaves, treedef = jax.tree.flatten(params)
        states = [_vmap_rows(inner.init, leaf)(leaf) for leaf in leaves]
        refuse_stale_states(states, "per_row")
        return _merge_states(treedef, states) if states else inner.init(params)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        treedef: Any
        check_dense(updates, "per_row", "per_row(inner)")
        grads, treedef = jax.tree.flatten(updates, is_leaf=is_leaf)
        if all(grad is None for grad in grads):
            return updates, state
        olds = [None] * len(grads) if params is None else treedef.flatten_up_to(params)
        # What state a leaf without a gradient has is unknown, where `params` holds
        # leaves that are not trained.
        has_all = not any(grad is None for grad in grads)
        if has_all:
            check_state_shapes(init_fn, updates, state, "per_row")
        update = functools.partial(inner.update, **extra_args)
        results = []
        for i, (grad, old) in enumerate(zip(grads, olds, strict=True)):
            alone = _state_of_leaf(treedef, state, i)
            if grad is None:  # rows that stay, or no parameter at all
                results.append((None, alone))
            else:
                if not has_all:
                    init = _vmap_rows(inner.init, grad)
                    check_state_shapes(init, grad, alone, "per_row")
                results.append(_vmap_rows(update, grad)(grad, alone, old))
        updates = treedef.unflatten([update for update, _ in results])
        return updates, _merge_states(treedef, [state for _, state in results])

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
