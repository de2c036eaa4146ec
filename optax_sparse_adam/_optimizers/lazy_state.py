"""Which arrays of an optax state hold the rows of a table."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import mesh_of, shard_axes_like
from .lazy_sizes import size_error

# What cannot be right on some rows only, by the type of its state.
_REFUSED = {
    "ApplyEvery": "it would update the rows of the last micro-batch only; let one "
    "gradient span the micro-batches, through a lax.scan in the loss",
    "DifferentiallyPrivateAggregateState": "it needs a gradient for each example",
    "ExactAdamState": "in exact Adam no row rests; put it beside lazy, not inside: "
    "optax.chain(lazy(optax.clip_by_global_norm(1.0)), exact_adam(...))",
    "FactoredState": "it takes means over all rows; use sparse_adafactor",
    "GaLoreState": "it works on whole matrices",
    "HutchinsonState": "it differentiates the loss at all parameters",
    "LookaheadState": "it synchronises all rows at once",
    "MonitorState": "its state has no fixed structure; use optax.snapshot",
    "MultiStepsState": "it would update the rows of the last micro-batch only; let one "
    "gradient span the micro-batches, through a lax.scan in the loss",
    "MuonState": "it works on whole matrices",
    "SAMState": "it takes two steps with one gradient's rows",
    "ScaleByBacktrackingLinesearchState": "it searches along the whole gradient",
    "ScaleByLBFGSState": "it works on the whole gradient",
    "ScaleByZoomLinesearchState": "it searches along the whole gradient",
}


def check_state(state: Any) -> None:
    """Raises for the state of a transformation that some rows alone cannot feed."""

    def check(node: Any) -> bool:
        name = type(node).__name__
        if name in _REFUSED:
            raise ValueError(
                f"lazy cannot apply the transformation with the state {name} to some "
                f"rows of a table only: {_REFUSED[name]}."
            )
        return False

    jax.tree.leaves(state, is_leaf=check)


def row_leaves(
    inner: optax.GradientTransformation,
    treedef: Any,
    shapes: list[Any],
    depths: dict[int, int],
    leaves: list[Any],
) -> list[int | None]:
    """Says for each leaf of the state which parameter's rows it holds, if any.

    Nothing but `inner.init` can tell: it is asked, abstractly, for the state of tables
    with other numbers of rows.

    Args:
      inner: The transformation.
      treedef: Structure of the parameters.
      shapes: A `jax.ShapeDtypeStruct` or `None` for each parameter.
      depths: For each table, by its position, how many leading axes number its rows.
      leaves: The state.
    """
    used = {size for shape in shapes if shape is not None for size in shape.shape}
    unused = (size for size in itertools.count(1009) if size not in used)
    numbers = {i: next(unused) for i in depths}
    others = list(shapes)
    for i, depth in depths.items():
        shape = (numbers[i], *shapes[i].shape[depth:])
        others[i] = jax.ShapeDtypeStruct(shape, shapes[i].dtype)

    def owner(path: Any, leaf: Any, other: Any) -> int:
        if leaf.shape == other.shape:
            return -1
        for i, depth in depths.items():
            full = (*shapes[i].shape[:depth], *other.shape[1:])
            if other.shape[:1] == (numbers[i],) and leaf.shape == full:
                return i
        raise ValueError(
            "lazy needs an inner state whose arrays hold the rows of a table along "
            "their first axes, or do not depend on its number of rows; got shape "
            f"{leaf.shape} at {jax.tree_util.keystr(path)} of the inner state, and "
            f"tables with {sorted(set(depths.values()))} sparse axes. Look rows up by "
            "one id, or choose a state shaped like the parameters."
        )

    states = [
        jax.eval_shape(inner.init, treedef.unflatten(s)) for s in (shapes, others)
    ]
    kinds: list[Any] = list(map(jax.tree.structure, states))
    if kinds[0] != kinds[1]:
        some = next(i for i in depths)
        raise size_error(math.prod(shapes[some].shape[: depths[some]]), numbers[some])
    expected = [leaf.shape for leaf in jax.tree.leaves(states[0])]
    if [jnp.shape(leaf) for leaf in leaves] != expected:
        if None in shapes:
            raise ValueError(
                "lazy needs the parameters where a gradient is None: only they tell "
                "which rows to leave alone. Call update(updates, state, params)."
            )
        given = [jnp.shape(leaf) for leaf in leaves]
        raise ValueError(
            "lazy needs gradients of the shapes of the parameters; for such gradients "
            f"the inner state would hold arrays of shapes {expected}, but it holds "
            f"{given}."
        )
    owners = jax.tree.leaves(jax.tree_util.tree_map_with_path(owner, *states))
    return [None if i < 0 else i for i in owners]


def state_laid_like(
    params: optax.Params, inner: optax.GradientTransformation, state: optax.OptState
) -> optax.OptState:
    """On a mesh, lays out what holds the rows of a parameter as the parameter is."""
    treedef: Any
    structure: Any
    tables, treedef = jax.tree.flatten(params)
    leaves, structure = jax.tree.flatten(state)
    if mesh_of(*tables).empty:
        return state
    shapes = [shape_of(None, table) for table in tables]
    depths = {i: 1 for i, shape in enumerate(shapes) if shape.shape}
    try:
        owners = row_leaves(inner, treedef, shapes, depths, leaves)
    except ValueError:  # what lazy cannot lift, it cannot lay out
        return state
    for n, (leaf, i) in enumerate(zip(leaves, owners, strict=True)):
        if i is not None and leaf.shape == shapes[i].shape[: leaf.ndim]:
            leaves[n] = shard_axes_like(tables[i], leaf, range(leaf.ndim))
    return structure.unflatten(leaves)


def shape_of(grad: Any, param: Any) -> Any:
    value = param if grad is None else grad
    return None if value is None else jax.ShapeDtypeStruct(value.shape, value.dtype)
