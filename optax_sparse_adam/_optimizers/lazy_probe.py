"""Which arrays of an optax state hold rows of a table, and what `lazy` refuses.

Nothing but the transformation can tell. `Probe` traces it for tables with other numbers
of rows, without memory or computation, and compares. An array of the state whose first
axis follows the number of rows of a table holds its rows. And a mask or a label may be
a function of the parameters: inside `lazy` it is called with the touched rows, and one
by size would choose other leaves than for the table, but has then other operations:

    mask = lambda tree: jax.tree.map(lambda x: x.size > 1000, tree)
    optax.add_decayed_weights(0.1, mask)
    # operations of a [1000, 4] table: mul add;  of its [3, 4] touched rows: none

Known limit: choices between leaves for which the same operations are done.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._jax_extras.sharding import mesh_of, shard_axes_like
from .attempt import attempt
from .lazy_leaves import Leaves, Trees, shape_of

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

# `stochastic_rounding` draws bits once for two arrays of one shape, and the compact
# rows of two tables may have one by chance.
_DRAWS = frozenset(["random_bits", "shift_left", "shift_right_logical", "or"])


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


class TableSize(NamedTuple):
    """A parameter of which some rows are updated.

    Attributes:
      shape: Its shape.
      n_sparse: How many leading axes index the rows.
      nse: How many rows are touched at most.
    """

    shape: tuple[int, ...]
    n_sparse: int
    nse: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[: self.n_sparse])


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
            _check_same_operations(update, shapes, owners, tables)
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
            unused = _unused_sizes([*state, *grads])
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


def _unused_sizes(arrays: list[Any]) -> Iterator[int]:
    """Sizes that no axis of these arrays has."""
    used = {size for x in arrays if x is not None for size in x.shape}
    return (size for size in itertools.count(1009) if size not in used)


def _kind_of(extra_args: dict[str, Any]) -> Any:
    """What an update may do other operations by: all but the values of numbers."""

    def kind(x: Any) -> Any:
        if hasattr(x, "dtype"):
            return jnp.shape(x), x.dtype
        is_number = isinstance(x, int | float | complex) and not isinstance(x, bool)
        return x if isinstance(x, Hashable) and not is_number else type(x)

    leaves, treedef = jax.tree.flatten(extra_args)
    return treedef, *map(kind, leaves)


def find_owners(
    init: Callable[[Any], Any],
    treedef: Any,
    tables: dict[int, TableSize],
    shapes: list[Any],
    leaves: list[Any],
    name: str = "lazy",
) -> list[int | None]:
    """Which table's rows each array of a state holds, by the table's place, if any.

    Args:
      init: That of the transformation.
      treedef: The structure of the parameters.
      tables: The tables among them.
      shapes: Shapes and types of the parameters.
      leaves: The arrays of the state.
      name: Who needs it, for errors.

    Raises:
      ValueError: For a state of other shapes, or whose rows lie along another axis.
    """
    # Sizes that no parameter has: a [1000, 4] table is traced as [1009, 4]. What is
    # then [1009, 4] or [1009] in the state holds its rows; a count, [], does not.
    # Two tables of equal sizes, [1000, 4] both, are traced as [1009, 4] and [1010, 4],
    # so that an array of the state follows one of them.
    unused = _unused_sizes(shapes)
    sizes = {i: next(unused) for i in tables}
    resized = [_resized(x, i, tables, sizes) for i, x in enumerate(shapes)]

    def owner(path: Any, leaf: Any, other: Any) -> int | None:
        if leaf.shape == other.shape:
            return None
        for i, table in tables.items():
            # With n_sparse == 2, the sizes [30, 40] became one, [1009]. Only an array
            # with both in front has a row for each index.
            full = (*shapes[i].shape[: table.n_sparse], *other.shape[1:])
            if other.shape[:1] == (sizes[i],) and leaf.shape == full:
                return i
        raise ValueError(
            f"{name} needs a state whose arrays hold the rows of a table along "
            "their first axes, or do not depend on its number of rows; got shape "
            f"{leaf.shape} at {jax.tree_util.keystr(path)} of the state, and "
            f"tables with {sorted({x.n_sparse for x in tables.values()})} sparse "
            "axes. Look rows up by one id, or choose a state shaped like the "
            "parameters."
        )

    state, other = (
        jax.eval_shape(init, treedef.unflatten(x)) for x in (shapes, resized)
    )
    structures: list[Any] = [*map(jax.tree.structure, (state, other))]
    if structures[0] != structures[1]:
        some = next(iter(tables))
        raise _size_error(name, tables[some].num_rows, sizes[some])
    pairs = jax.tree_util.tree_leaves_with_path(state)
    expected = [leaf.shape for _, leaf in pairs]
    got = [leaf.shape for leaf in leaves]
    if got != expected:
        raise ValueError(
            "lazy needs gradients of the shapes of the parameters; for such gradients "
            f"the inner state would hold arrays of shapes {expected}, but it holds "
            f"{got}."
        )
    triples = zip(pairs, jax.tree.leaves(other), strict=True)
    return [owner(*pair, leaf) for pair, leaf in triples]


def check_sizes(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    tables: dict[int, TableSize],
    owners: list[int | None],
    name: str,
) -> None:
    """Raises for a transformation that two rows of each table would change.

    Args:
      tx: The transformation.
      params: The tree of shapes and types of the parameters.
      tables: The tables among them.
      owners: Which table's rows each array of the state holds.
      name: Who needs it, for errors.
    """
    state = jax.eval_shape(tx.init, params)
    trees, shapes = Trees.of(params, state, params)
    of_params = [i if i in tables else None for i in range(len(shapes.params))]
    every_owner = Leaves(of_params, owners, of_params)
    two = {i: min(2, table.num_rows) for i, table in tables.items()}
    resized = functools.partial(_resized, tables=tables, num_rows=two)
    of_two = trees.grads.unflatten(map(resized, shapes.params, of_params))
    if jax.tree.structure(jax.eval_shape(tx.init, of_two)) != trees.state:
        some = next(iter(tables))
        raise _size_error(name, tables[some].num_rows, two[some])
    update = functools.partial(trees.update, tx, {})
    _check_same_operations(update, shapes, every_owner, tables, name)


def _check_same_operations(
    update: Callable[[Leaves[Any]], Any],
    shapes: Leaves[Any],
    owners: Leaves[int | None],
    tables: dict[int, TableSize],
    name: str = "lazy",
) -> None:
    """Raises unless an update does to the touched rows what it does to a table."""

    def operations(num_rows: dict[int, int]) -> list[Any]:
        resized = functools.partial(_resized, tables=tables, num_rows=num_rows)
        return _operations(update, shapes.map(resized, owners))

    rows = {i: table.num_rows for i, table in tables.items()}
    # Two rows for none: of arrays without elements JAX computes less.
    few = {i: table.nse or min(2, table.num_rows) for i, table in tables.items()}
    expected, error = attempt(operations, rows)
    if error is not None:  # it takes no tables, so there is nothing to compare with
        return
    at = max(rows, key=lambda i: rows[i])
    largest = tables[at]
    # The mask of the module's example: (mul, add) of the table, nothing of few rows.
    of_few, error = attempt(operations, few)
    if error is not None:
        raise _size_error(name, largest.num_rows, few[at], error) from error
    if of_few != expected:
        raise _size_error(name, largest.num_rows, few[at])


def _operations(function: Callable[..., Any], args: Any) -> list[Any]:
    """The operations of a function, and how many axes their results have."""

    def of_jaxpr(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _DRAWS:
                continue
            # Sizes differ between a table and its touched rows; ranks must not.
            ranks = (len(getattr(var.aval, "shape", ())) for var in eqn.outvars)
            yield eqn.primitive.name, *ranks
            for param in jax.tree.leaves(eqn.params):
                if isinstance(param, ClosedJaxpr | Jaxpr):
                    yield from of_jaxpr(getattr(param, "jaxpr", param))

    return list(of_jaxpr(jax.make_jaxpr(function)(args).jaxpr))


def _size_error(name: str, rows: int, nse: Any, cause: Any = None) -> ValueError:
    words = ""
    if cause is not None:
        first = str(cause).partition("\n")[0].rstrip(".:")
        words = f" (these rows raise {type(cause).__name__}: {first})"
    return ValueError(
        f"{name} runs {'the inner' if name == 'lazy' else 'this'} transformation on "
        "the touched rows of a table only, and it behaves differently for the whole "
        f"table ({rows} rows) and for its touched rows ({nse}): it depends on the "
        "number of rows, as masks and labels that are computed from the sizes of "
        f"parameters do{words}. Call such a function with the parameters first, and "
        "give the tree that it returns, as in optax.masked(inner, mask(params))."
    )


def _resized(
    x: Any, owner: int | None, tables: dict[int, TableSize], num_rows: dict[int, int]
) -> Any:
    """A shape; if it is of rows of a table, with so many of these, along one axis."""
    if x is None or owner is None or owner not in num_rows:
        return x
    shape = (num_rows[owner], *x.shape[tables[owner].n_sparse :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


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
