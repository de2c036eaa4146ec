"""What `lazy` finds out about a transformation by tracing it, and what it refuses."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.sharding import mesh_of, shard_axes_like
from .lazy_leaves import Leaves, Trees, shape_of
from .row_owners import TableSize, check_same_operations, find_owners, unused_sizes

# What cannot be right on some rows only, by the type of its state.
_REFUSED = {
    "ApplyEvery": "it would update the rows of the last micro-batch only; let one "
    "gradient span the micro-batches, through a lax.scan in the loss",
    "DifferentiallyPrivateAggregateState": "it needs a gradient for each example",
    "ExactAdamState": "exact Adam advances all rows; put it beside lazy, not inside: "
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


# Results that a transformation keeps.
_MOST_KNOWN = 32


class Probe:
    """What is found out about a transformation by tracing it, and kept.

    Outside of `jit` each step asks, with the same shapes.
    """

    def __init__(self, init: Callable[[Any], Any]):
        self._init = init
        self._owners: dict[Any, Leaves[int | None]] = {}
        self._params: dict[Any, list[Any]] = {}

    def owners(
        self,
        update: Callable[[Leaves[Any]], Leaves[Any]],
        trees: Trees,
        leaves: Leaves[Any],
        tables: dict[int, TableSize],
        extra_args: dict[str, Any],
    ) -> Leaves[int | None]:
        """Which table's rows each leaf holds, if any.

        Args:
          update: `Trees.update` of the transformation.
          trees: The structures.
          leaves: Its arguments, of which only shapes and types matter; in the place of
            no gradient the parameter's.
          tables: The tables.
          extra_args: What `update` takes beside them.

        Raises:
          ValueError: For a state that does not fit these gradients, or that `lazy`
            cannot read by rows, or an update that depends on the number of rows.
        """
        shapes = leaves.map(shape_of)
        key = trees.grads, str(shapes), tuple(tables.items()), _kind_of(extra_args)
        if key not in self._owners:
            _make_room(self._owners)
            of_grads = [i if i in tables else None for i in range(len(shapes.grads))]
            pairs = zip(of_grads, shapes.params, strict=True)
            owners = Leaves(
                of_grads,
                find_owners(
                    self._init, trees.grads, tables, shapes.grads, shapes.state
                ),
                [None if x is None else i for i, x in pairs],
            )
            check_same_operations(update, shapes, owners, tables)
            self._owners[key] = owners
        return self._owners[key]

    def shapes_of_none(self, trees: Trees, leaves: Leaves[Any]) -> list[Any]:
        """The shapes of parameters whose gradient is `None`, where there is one.

        `None` where there is none, and in the places of all other gradients. The state
        was made for the parameters, and decides: what `update` is given may hold none
        of them, or leaves that are not trained, if the transformation does not read
        them.

        Raises:
          ValueError: If neither the parameters nor the state tell.
        """
        grads, state = [*map(shape_of, leaves.grads)], [x.shape for x in leaves.state]
        missing = [i for i, x in enumerate(grads) if x is None]
        params = leaves.params
        named = {i: shape_of(x) for i in missing if _has_shape(x := params[i])}
        key = trees.grads, str(grads), str(named), str(state)
        if key not in self._params:
            _make_room(self._params)
            shapes = self._shapes_of(trees.grads, grads, named, leaves.state)
            if shapes is None and not named:
                raise ValueError(
                    "lazy needs the parameters where a gradient is None and the state "
                    "does not tell their shapes. Call update(updates, state, params)."
                )
            shapes = named if shapes is None else shapes
            self._params[key] = [shapes.get(i) for i in range(len(grads))]
        return self._params[key]

    def _shapes_of(
        self,
        treedef: Any,
        grads: list[Any],
        named: dict[int, Any],
        state: list[Any],
    ) -> dict[int, Any] | None:
        """Shapes in the places of no gradients, of which a state is like this one."""
        expected = [x.shape for x in state]

        def new_shapes(shapes: dict[int, Any]) -> list[tuple[int, ...]]:
            params = treedef.unflatten([shapes.get(i, x) for i, x in enumerate(grads)])
            return [
                x.shape for x in jax.tree.leaves(jax.eval_shape(self._init, params))
            ]

        def guesses() -> Iterator[dict[int, Any]]:
            yield named
            is_real = {
                i: x for i, x in named.items() if jnp.issubdtype(x.dtype, jnp.inexact)
            }
            yield is_real
            yield {}
            # Vectors of sizes that nothing has stand for the parameters: where a new
            # state holds [1009], the given one holds an array of the shape that is
            # sought, or, if it has one number for each row, of its first axis: of
            # several the longest.
            unused = unused_sizes([*state, *grads])
            missing = [i for i, x in enumerate(grads) if x is None]
            vectors = {
                i: jax.ShapeDtypeStruct((next(unused),), jnp.float32) for i in missing
            }
            shapes, made = dict(vectors), new_shapes(vectors)
            if len(made) == len(expected):
                for i, vector in vectors.items():
                    pairs = zip(state, made, strict=True)
                    rows = [x for x, shape in pairs if shape == vector.shape]
                    shapes[i] = shape_of(max(rows, key=jnp.ndim)) if rows else vector
            yield shapes

        return next((x for x in guesses() if new_shapes(x) == expected), None)


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= _MOST_KNOWN:  # a new function in each step has a new key
        del kept[next(iter(kept))]


def _kind_of(extra_args: dict[str, Any]) -> Any:
    """What an update may do other operations by: all but the values of numbers."""

    def kind(x: Any) -> Any:
        if hasattr(x, "dtype"):
            return jnp.shape(x), x.dtype
        is_number = isinstance(x, int | float | complex) and not isinstance(x, bool)
        return x if isinstance(x, Hashable) and not is_number else type(x)

    leaves, treedef = jax.tree.flatten(extra_args)
    return treedef, *map(kind, leaves)


def _has_shape(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, int | float | complex)


def shard_state_like(
    params: optax.Params, inner: optax.GradientTransformation, state: optax.OptState
) -> optax.OptState:
    """On a mesh, lays out what holds the rows of a parameter as the parameter is."""
    treedef: Any
    structure: Any
    arrays, treedef = jax.tree.flatten(params)
    leaves, structure = jax.tree.flatten(state)
    if mesh_of(*arrays).empty:
        return state
    shapes, held = ([*map(shape_of, some)] for some in (arrays, leaves))
    tables = {i: TableSize(x.shape, 1, 0) for i, x in enumerate(shapes) if x.shape}
    try:
        owners = find_owners(inner.init, treedef, tables, shapes, held)
    except ValueError:  # what lazy cannot lift, it cannot lay out
        return state
    for n, (leaf, i) in enumerate(zip(leaves, owners, strict=True)):
        if i is not None and leaf.shape == shapes[i].shape[: leaf.ndim]:
            leaves[n] = shard_axes_like(arrays[i], leaf, range(leaf.ndim))
    return structure.unflatten(leaves)
