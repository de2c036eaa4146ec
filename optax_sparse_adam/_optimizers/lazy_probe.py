"""Which arrays of an optax state hold rows of a table, and what `lazy` refuses.

Nothing but the transformation can tell. `probe` traces it for tables with other numbers
of rows, without memory or computation, and compares. An array of the state whose first
axis follows the number of rows of a table holds its rows. And a mask or a label may be
a function of the parameters: inside `lazy` it is called with the touched rows, and one
by size would choose other leaves than for the table, but has then other operations:

    mask = lambda tree: jax.tree.map(lambda x: x.size > 1000, tree)
    optax.add_decayed_weights(0.1, mask)
    # operations of a [1000, 4] table: mul add;  of its [3, 4] touched rows: none

Known limit: choices between leaves for which the same operations are done.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._jax_extras.sharding import mesh_of, shard_axes_like
from .attempt import attempt

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


# Results of `probe` that a transformation keeps.
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


def probe(
    init: Callable[[Any], Any],
    update: Callable[[list[Any]], Any],
    treedef: Any,
    arrays: list[Any],
    tables: dict[int, TableSize],
    extra_args: dict[str, Any],
    known: dict[Any, list[int | None]],
) -> list[int | None]:
    """Which parameter's rows each array holds, by the parameter's place, if any.

    `init` and `update` are those of the inner transformation; `arrays` the arguments of
    `update`: gradients, then state, then parameters, of which only shapes and types
    matter, a parameter's in place of no gradient; `extra_args` what `update` takes
    beside them. `known` holds some earlier results.

    Raises:
      ValueError: For a state that does not fit these gradients, or that `lazy` cannot
        read by rows, or an update that depends on the number of rows.
    """
    shapes, count = [*map(_shape_of, arrays)], treedef.num_leaves
    for i in range(count):
        shapes[i] = shapes[i - count] if shapes[i] is None else shapes[i]
    # Outside of `jit` each step comes here, with the same shapes.
    key = treedef, str(shapes), tuple(tables.items()), _kind_of(extra_args)
    if key not in known:
        if len(known) >= _MOST_KNOWN:  # a new function in each step has a new key
            del known[next(iter(known))]
        params, leaves = shapes[:count], shapes[count : len(shapes) - count]
        own = [i if i in tables else None for i in range(count)]
        read = [
            None if x is None else i for i, x in zip(own, shapes[-count:], strict=True)
        ]
        owners = [*own, *find_owners(init, treedef, tables, params, leaves), *read]
        _check_same_operations(update, shapes, owners, tables)
        known[key] = owners
    return known[key]


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
    """`probe` of `init`, for parameters and a state of these shapes.

    `name` says in errors who needs it.
    """
    # Sizes that no parameter has: a [1000, 4] table is traced as [1009, 4]. What is
    # then [1009, 4] or [1009] in the state holds its rows; a count, [], does not.
    # Two tables of equal sizes, [1000, 4] both, are traced as [1009, 4] and [1010, 4],
    # so that an array of the state follows one of them.
    used = {size for shape in shapes if shape is not None for size in shape.shape}
    unused = (size for size in itertools.count(1009) if size not in used)
    sizes = {i: next(unused) for i in tables}
    others = _resized(shapes, range(len(shapes)), tables, sizes)

    def owner(path: Any, leaf: Any, other: Any) -> int:
        if leaf.shape == other.shape:
            return -1
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

    states = [jax.eval_shape(init, treedef.unflatten(x)) for x in (shapes, others)]
    kinds: list[Any] = list(map(jax.tree.structure, states))
    if kinds[0] != kinds[1]:
        some = next(iter(tables))
        raise _size_error(tables[some].num_rows, sizes[some])
    expected = [leaf.shape for leaf in jax.tree.leaves(states[0])]
    given = [leaf.shape for leaf in leaves]
    if given != expected:
        raise ValueError(
            "lazy needs gradients of the shapes of the parameters; for such gradients "
            f"the inner state would hold arrays of shapes {expected}, but it holds "
            f"{given}."
        )
    owners = jax.tree.leaves(jax.tree_util.tree_map_with_path(owner, *states))
    return [None if i < 0 else i for i in owners]


def shapes_of_none(
    init: Callable[[Any], Any],
    treedef: Any,
    grads: list[Any],
    params: list[Any],
    leaves: list[Any],
    known: dict[Any, Any],
) -> list[Any]:
    """The shapes of parameters whose gradient is `None`, where there is one.

    `None` where there is none, and in the places of all other gradients. The state was
    made for the parameters, and decides: what `update` is given may hold none of them,
    or leaves that are not trained, if the transformation does not read them.

    Args:
      init: That of the transformation.
      treedef: The structure of the gradients.
      grads: The gradients.
      params: The parameters, or `None` for each.
      leaves: The arrays of the state.
      known: Some earlier results.

    Raises:
      ValueError: If neither the parameters nor the state tell.
    """
    shapes, given = [*map(_shape_of, grads)], [leaf.shape for leaf in leaves]
    missing = [i for i, x in enumerate(shapes) if x is None]
    named = {i: _shape_of(x) for i in missing if _has_shape(x := params[i])}
    key = treedef, str(shapes), str(named), str(given)
    if key in known:
        return known[key]

    def new_shapes(found: dict[int, Any]) -> list[tuple[int, ...]]:
        state = init, treedef.unflatten([found.get(i, x) for i, x in enumerate(shapes)])
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(*state))]

    def guesses() -> Iterator[dict[int, Any]]:
        yield named
        yield {i: x for i, x in named.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        yield {}
        # Vectors of sizes that nothing has stand for the parameters: where a new state
        # holds [1009], the given one holds an array of the shape that is sought, or, if
        # it has one number for each row, of its first axis: of several the longest.
        used = {size for x in (*leaves, *shapes) if x is not None for size in x.shape}
        unused = (size for size in itertools.count(1009) if size not in used)
        found = {i: jax.ShapeDtypeStruct((next(unused),), jnp.float32) for i in missing}
        made = new_shapes(found)
        if len(made) == len(given):
            for i, x in found.items():
                own = [y for y, z in zip(leaves, made, strict=True) if z == x.shape]
                found[i] = _shape_of(max(own, key=jnp.ndim)) if own else x
        yield found

    fits = (x for x in guesses() if new_shapes(x) == given)
    found = next(fits, None)
    if found is None and not named:
        raise ValueError(
            "lazy needs the parameters where a gradient is None and the state does not "
            "tell their shapes. Call update(updates, state, params)."
        )
    own = [(named if found is None else found).get(i) for i in range(len(grads))]
    return known.setdefault(key, own)


def _check_same_operations(
    update: Callable[[list[Any]], Any],
    shapes: list[Any],
    owners: list[int | None],
    tables: dict[int, TableSize],
) -> None:
    """Raises unless an update does to the touched rows what it does to a table."""
    rows = {i: table.num_rows for i, table in tables.items()}
    # Two rows for none: of arrays without elements JAX computes less.
    few = {i: table.nse or min(2, table.num_rows) for i, table in tables.items()}
    whole = _resized(shapes, owners, tables, rows)
    expected, error = attempt(_operations, update, whole)
    if error is not None:  # it takes no tables, so there is nothing to compare with
        return
    largest = tables[max(rows, key=lambda i: rows[i])]
    # The mask of the module's example: (mul, add) of the table, nothing of few rows.
    touched = _resized(shapes, owners, tables, few)
    found, error = attempt(_operations, update, touched)
    if error is not None:
        raise _size_error(largest.num_rows, largest.nse, error) from error
    if found != expected:
        raise _size_error(largest.num_rows, largest.nse)


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


def _size_error(rows: int, nse: Any, cause: Any = None) -> ValueError:
    words = ""
    if cause is not None:
        first = str(cause).partition("\n")[0].rstrip(".:")
        words = f" (these rows raise {type(cause).__name__}: {first})"
    return ValueError(
        "lazy runs the inner transformation on the touched rows of a table only, and "
        f"this one behaves differently for the whole table ({rows} rows) and for its "
        f"touched rows ({nse}): it depends on the number of rows, as masks and labels "
        f"that are computed from the sizes of parameters do{words}. Call such a "
        "function with the parameters first, and give the tree that it returns, as in "
        "optax.masked(inner, mask(params))."
    )


def _resized(
    shapes: list[Any],
    owners: Iterable[int | None],
    tables: dict[int, TableSize],
    num_rows: dict[int, int],
) -> list[Any]:
    """The shapes, of which those with rows of a table have so many, along one axis."""

    def resized(x: Any, i: Any) -> Any:
        if x is None or i not in num_rows:
            return x
        shape = (num_rows[i], *x.shape[tables[i].n_sparse :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return list(map(resized, shapes, owners))


def _has_shape(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, int | float | complex)


def _shape_of(x: Any) -> Any:
    if x is None:
        return None
    # A NumPy array of 64-bit numbers has the type that it gets as an array of JAX.
    dtype = jnp.result_type(x) if jnp.isscalar(x) else x.dtype
    dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)


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
    shapes, held = ([*map(_shape_of, some)] for some in (arrays, leaves))
    tables = {i: TableSize(x.shape, 1, 0) for i, x in enumerate(shapes) if x.shape}
    try:
        owners = find_owners(inner.init, treedef, tables, shapes, held)
    except ValueError:  # what lazy cannot lift, it cannot lay out
        return state
    for n, (leaf, i) in enumerate(zip(leaves, owners, strict=True)):
        if i is not None and leaf.shape == shapes[i].shape[: leaf.ndim]:
            leaves[n] = shard_axes_like(arrays[i], leaf, range(leaf.ndim))
    return structure.unflatten(leaves)
