"""Which arrays of a state have rows of a table, and what goes by their number.

Nothing but the transformation can tell. It is traced for tables with other numbers of
rows, without memory or computation, and compared. An array of the state whose first
axis follows the number of rows of a table holds its rows. And a mask or a label may be
a function of the parameters: where only some rows are updated, it is called with these,
and one by size would choose other leaves than for the table, but has then other
operations:

    mask = lambda tree: jax.tree.map(lambda x: x.size > 1000, tree)
    optax.add_decayed_weights(0.1, mask)
    # operations of a [1000, 4] table: mul add;  of its [3, 4] touched rows: none

Known limit: choices that change constants only. What takes no dense gradients of whole
tables, as what reads `grad.nse`, is compared by `untouched_rows` on a host.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from .attempt import attempt
from .lazy_leaves import Leaves, Trees

# `stochastic_rounding` draws bits once for two arrays of one shape, and the compact
# rows of two tables may have one by chance.
_DRAWS = frozenset(["random_bits", "shift_left", "shift_right_logical", "or"])


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

    @property
    def num_touched(self) -> int:
        """Two for none: of arrays without elements JAX computes less."""
        return self.nse or min(2, self.num_rows)


def unused_sizes(arrays: list[Any]) -> Iterator[int]:
    """Sizes that no axis of these arrays has."""
    used = {size for x in arrays if x is not None for size in x.shape}
    return (size for size in itertools.count(1009) if size not in used)


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
    unused = unused_sizes(shapes)
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
        raise size_error(name, tables[some].num_rows, sizes[some])
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
    extra_args: dict[str, Any],
    name: str,
) -> None:
    """Raises for a transformation that does other things to some rows of each table.

    Args:
      tx: The transformation.
      params: The tree of shapes and types of the parameters.
      tables: The tables among them; of no touched rows two are taken.
      owners: Which table's rows each array of the state holds.
      extra_args: What the update takes besides.
      name: Who needs it, for errors.

    Raises:
      ValueError: If so. Not if the update raises for whole tables, as one does that
        wants other extra arguments.
    """
    state = jax.eval_shape(tx.init, params)
    trees, shapes = Trees.of(params, state, params)
    # `tables` counts arrays; here each `None` among the parameters is a leaf, too.
    places = iter(range(len(shapes.params)))
    numbers = [None if x is None else next(places) for x in shapes.params]
    of_params = [i if i in tables else None for i in numbers]
    every_owner = Leaves(of_params, owners, of_params)
    few = {i: table.num_touched for i, table in tables.items()}
    resized = functools.partial(_resized, tables=tables, num_rows=few)
    of_few = trees.grads.unflatten(map(resized, shapes.params, of_params))
    if jax.tree.structure(jax.eval_shape(tx.init, of_few)) != trees.state:
        some = next(iter(tables))
        raise size_error(name, tables[some].num_rows, few[some])
    update = functools.partial(trees.update, tx, extra_args)
    check_same_operations(update, shapes, every_owner, tables, name)


def check_same_operations(
    update: Callable[[Leaves[Any]], Any],
    shapes: Leaves[Any],
    owners: Leaves[int | None],
    tables: dict[int, TableSize],
    name: str = "lazy",
) -> None:
    """Raises unless an update does to the touched rows what it does to a table."""

    def operations(num_rows: dict[int, int]) -> list[Any]:
        resized = functools.partial(_resized, tables=tables, num_rows=num_rows)
        return operations_of(jax.make_jaxpr(update)(shapes.map(resized, owners)))

    rows = {i: table.num_rows for i, table in tables.items()}
    few = {i: table.num_touched for i, table in tables.items()}
    expected, error = attempt(operations, rows)
    if error is not None:  # it takes no tables, so there is nothing to compare with
        return
    at = max(rows, key=lambda i: rows[i])
    largest = tables[at]
    # The mask of the module's example: (mul, add) of the table, nothing of few rows.
    of_few, error = attempt(operations, few)
    if error is not None:
        raise size_error(name, largest.num_rows, few[at], error) from error
    if of_few != expected:
        raise size_error(name, largest.num_rows, few[at])


def operations_of(closed: ClosedJaxpr) -> list[Any]:
    """The operations of a program, of what, and how many axes their results have."""

    def of_jaxpr(jaxpr: Any) -> Iterator[Any]:
        # Inputs and results by number: `mul` of one leaf is not that of another.
        numbers = {var: i for i, var in enumerate(jaxpr.invars)}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _DRAWS:
                continue
            # Sizes differ between a table and its touched rows; ranks must not.
            ranks = (len(getattr(var.aval, "shape", ())) for var in eqn.outvars)
            operands = (numbers.get(x) for x in eqn.invars if isinstance(x, Var))
            yield eqn.primitive.name, *ranks, *operands
            for param in jax.tree.leaves(eqn.params):
                if isinstance(param, ClosedJaxpr | Jaxpr):
                    yield from of_jaxpr(getattr(param, "jaxpr", param))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
        yield "return", *(numbers.get(x) for x in jaxpr.outvars if isinstance(x, Var))

    return list(of_jaxpr(closed.jaxpr))


def size_error(name: str, rows: int, nse: Any, cause: Any = None) -> ValueError:
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
