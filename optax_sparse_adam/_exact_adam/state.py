"""The state of `exact_adam`, and the parameters that it belongs to."""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._jax_extras.compiled import compiled
from .._rows.stale import class_names, contains_stale
from .kernel_arrays import KernelArrays, stale_arrays
from .remaining_update import Constants
from .rows import RowState, TableState
from .stale_table import StaleTable


class ExactAdamState(NamedTuple):
    """State of `exact_adam` and of `exact_adamw`.

    On a mesh, what has rows (`mu`, `nu`, `last` and `log_decay`) is sharded as the
    parameters are along theirs; the rest is a few numbers.

    `count` is what the schedules are called with, and may be set after `flush`. Rows
    are dated by `clock`, which counts the updates since `init`, whatever `count` says.

    Attributes:
      count: Number of updates so far, an `int32` scalar.
      mu: Tree like the parameters: moving average of the gradient, of each row as it
        was after the row's last update.
      nu: Tree like the parameters: moving average of the squared gradient, likewise.
      last: Tree like the parameters, without their last axis: the `clock` of each row's
        last update, `int32`.
      log_decay: Two trees like `last`: logarithm of the weight decay from the beginning
        to the last update, and what rounding left of it; `()` without weight decay.
      clock: Number of updates since `init`, an `int32` scalar.
      origin: `count - clock` as the last update has left them.
      values_until: For each array of parameters, in their order: rows that were last
        updated at this time, or before, hold their value after it, not their projected
        final value.
      remaining: For each of them, the sum of the updates since that time, and the
        remaining update, at the Chebyshev nodes, `[parameters, 2, nodes]`.
      decay: For each of them, the present `log_decay`, `[parameters, 2]`; `()` without.
      constants: Of the optimiser.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    mu: Any
    nu: Any
    last: Any
    log_decay: tuple[Any, ...]
    clock: jax.Array
    origin: jax.Array
    values_until: jax.Array
    remaining: jax.Array
    decay: Any
    constants: Constants

    def stale_rows(
        self, shapes: Sequence[tuple[int, ...] | None], treedef: Any
    ) -> dict[int, StaleTable]:
        """What brings each parameter up to date; see `StaleState` in `_rows`."""
        rows = rows_by_parameter(self, shapes, treedef)
        states, arrays = _of_each(table_states(self), self.constants)
        return {
            i: StaleTable(row_state, states[place], self.constants, arrays.at(place))
            for place, (i, row_state) in enumerate(rows.items())
        }

    def refuse_stale(self, names: dict[int, str]) -> jax.Array:
        """Whether one of these parameters has rows that do not hold their values.

        Raises:
          ValueError: If that is known. In a program it is NaN instead.
        """
        args = self.values_until, self.clock, np.array([*names], int)
        is_stale, is_any = _stale_among(*args)
        if not isinstance(is_any, jax.core.Tracer) and is_any:
            name = [*names.values()][int(np.argmax(is_stale))] or "the table"
            raise ValueError(
                "exact_adam takes a dense gradient only where all rows hold their "
                f"values; got one of {name}, whose rows are stale since a row-sparse "
                "gradient, or since a step that did not use it. Such a gradient comes "
                "from tied weights, weight decay in the loss, jax.grad and todense(). "
                "Call params, state = flush(params, state) before it; or make all its "
                "gradients dense, by `sparse`."
            )
        return is_any

    def refuse_changes(self, state: Any) -> None:
        _refuse_changes(state)


def is_exact(node: Any) -> bool:
    return isinstance(node, ExactAdamState)


def table_states(state: ExactAdamState) -> TableState:
    """What is known of all parameters, as arrays with an axis for them in front."""
    decay = state.decay if state.log_decay else None
    of_each = state.values_until, state.remaining, decay
    return TableState(state.clock, state.origin, *of_each)


@compiled
def _stale_among(
    values_until: jax.Array, clock: jax.Array, places: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Which of these parameters have stale rows, and whether one has."""
    is_stale = values_until[places] != clock
    return is_stale, is_stale.any()


@compiled
def _of_each(
    tables: TableState, constants: Constants
) -> tuple[list[TableState], KernelArrays]:
    """What brings rows up to date: of each parameter, and of all for the kernel."""
    states = tables.with_polynomials()
    each = [states.at(place) for place in range(len(tables.values_until))]
    return each, stale_arrays(states, constants)


# Transformations that change updates after the one whose state is in theirs.
_CHANGES = (
    *("LookaheadState", "MechanicState", "SAMState"),
    *("ScheduleFreeState", "StochasticRoundingState"),
)


def _refuse_changes(state: Any) -> None:
    """Raises where something is seen to change the updates of `exact_adam`.

    The state of `optax.chain` is a tuple of the states of its parts, in their order;
    that of `optax.named_chain` is an OrderedDict.
    """

    # `jax.tree.leaves` calls it at each node from the outside in, as `is_leaf`.
    def check(node: Any) -> bool:
        if type(node).__name__ == "ConditionallyTransformState" and any(
            is_exact(x) and x.log_decay for x in jax.tree.leaves(node, is_leaf=is_exact)
        ):
            raise ValueError(
                "exact_adamw cannot be inside conditionally_transform, which adds a "
                "gradient itself to parameters where it does nothing else: stale rows "
                "would decay on the way to it. Use optax.conditionally_mask."
            )
        if type(node).__name__ == "MultiStepsState" and contains_stale(node):
            raise ValueError(
                "exact_adam cannot be inside optax.MultiSteps, which holds updates "
                "back by which stale rows are read. To accumulate gradients, let one "
                "gradient span the micro-batches: value_and_grad of a loss that runs a "
                "jax.lax.scan over them, as in docs/recipes.md."
            )
        if type(node).__name__ in _CHANGES and contains_stale(node):
            raise ValueError(
                "Nothing may change the updates of exact_adam, by which stale rows "
                f"are read; got it inside a transformation with {type(node).__name__}. "
                "Use optax.adam there, or exact_adam without it."
            )
        if type(node) in (tuple, list, OrderedDict):
            parts = node.values() if isinstance(node, OrderedDict) else node
            behind = [*itertools.dropwhile(lambda x: not contains_stale(x), parts)][1:]
            if behind:
                raise ValueError(
                    "Nothing may follow exact_adam in a chain, as it would change "
                    "updates by which stale rows are read; got "
                    f"{class_names(tuple(behind))} behind it. Clip and scale gradients "
                    "before it, scale moves by its learning rate, train groups of "
                    "parameters apart, or freeze some, by optax.partition in place of "
                    "a chain of optax.masked, and average what flush returns. Of "
                    "several arguments (`argnums`) give one state, tx.init((a, b)). (A "
                    "plain tuple is taken for the state of a chain: let that of a "
                    "wrapper of your own be a NamedTuple.)"
                )
        return is_exact(node)

    jax.tree.leaves(state, is_leaf=check)


def _is_hole(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def _trees(state: ExactAdamState) -> tuple[Any, ...]:
    return state.mu, state.nu, state.last, *state.log_decay


def _parameter_indices(state: ExactAdamState, treedef: Any) -> list[int]:
    """For each array of parameters of a state, its index among those of `treedef`.

    A state has the structure of the parameters, with holes where `optax.masked` keeps
    some away, or whole branches. Or it has that of the same parameters, by their names,
    in other containers: Flax has `nnx.Param`s in a module's state and none in that of
    its optimiser.

    Raises:
      ValueError: If the structure is another.
    """
    # For parameters {"a": x, "b": {"c": y, "d": z}} and a state of "b" alone, the
    # state's {"a": MaskedNode, "b": {"c": nu, "d": nu}} has the branches 0, 1, 2, and 0
    # is a hole.
    indices = treedef.unflatten(range(treedef.num_leaves))
    structure: Any
    parts, structure = jax.tree.flatten(state.nu, is_leaf=_is_hole)
    try:
        branches = structure.flatten_up_to(indices)
    except ValueError:
        named = jax.tree_util.tree_leaves_with_path(
            state.nu, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
        )
        parts = [x for _, x in named]
        branches = _same_names(
            [path for path, _ in named],
            [path for path, _ in jax.tree_util.tree_leaves_with_path(indices)],
        )
    pairs = zip(parts, branches, strict=True)
    leaves = [jax.tree.leaves(branch) for part, branch in pairs if not _is_hole(part)]
    return [index for (index,) in leaves]


def _same_names(paths: Sequence[Any], others: Sequence[Any]) -> list[int]:
    """For each path the index of that with the same names.

    A wrapper adds names: one of the whole tree in front of all, one of an array behind.

    Raises:
      ValueError: If there is not one for each.
    """

    def names_of(paths: Sequence[Any]) -> list[list[str]]:
        key_name = functools.partial(jax.tree_util.keystr, simple=True)
        names = [[key_name((key,)) for key in path] for path in paths]
        levels = (len({*level}) == 1 for level in zip(*names))  # noqa: B905
        count = sum(itertools.takewhile(bool, levels))
        return [x[count:] for x in names]

    left, indices = dict(enumerate(names_of(others))), []
    for own in names_of(paths):
        pairs = ((i, zip(own, other)) for i, other in left.items())  # noqa: B905
        same = (i for i, pair in pairs if all(x == y for x, y in pair))
        if (index := next(same, None)) is None:
            raise ValueError
        del left[index]
        indices.append(index)
    if left:
        raise ValueError
    return indices


def rows_by_parameter(
    state: ExactAdamState, shapes: Sequence[tuple[int, ...] | None], treedef: Any
) -> dict[int, RowState]:
    """What is known of the rows of each parameter, by its index; not of masked ones.

    They are in the order of the state's arrays with an axis for parameters. `shapes`
    are those of the parameters, `None` where it is not known.

    Raises:
      ValueError: If the state belongs to other parameters.
    """
    rule = "The state of exact_adam must belong to the parameters"
    ranks = [len(shape) for shape in shapes if shape is not None]
    if getattr(state.nu, "ndim", 0) == 1 and ranks and ranks != [1]:
        raise ValueError(
            f"{rule}; got one vector for {treedef.num_leaves} of them, as made by "
            "optax.flatten, in which nothing has rows. Use exact_adam without it."
        )
    try:
        columns = [jax.tree.leaves(tree) for tree in _trees(state)]
        indices = _parameter_indices(state, treedef)
        pairs = zip(indices, zip(*columns, strict=True), strict=True)
        rows = {index: RowState.of(*arrays) for index, arrays in pairs}
    except (AttributeError, TypeError, ValueError):  # which print the arrays
        raise ValueError(
            f"{rule}, in a tree of {treedef.num_leaves} leaves; got one whose moments "
            "lie in another tree. Make the state by init of the same parameters, as "
            "tx.init((a, b)) of several arguments, or pass those that it was made of "
            "(in Flax argnums=nnx.DiffState(0, optimizer.wrt))."
        ) from None

    def check(arrays: dict[str, Any], shape: tuple[int, ...], what: str) -> None:
        for name, array in arrays.items():
            if jnp.shape(array) != shape:
                raise ValueError(
                    f"{rule}: `{name}` of shape {jnp.shape(array)} must have the shape "
                    f"{shape} for {what}. Make the state by init, or grow and restore "
                    "all its arrays like the parameter."
                )

    for index, (mu, nu, last, log_decay) in rows.items():
        param_shape = shapes[index]
        shape = jnp.shape(nu) if param_shape is None else tuple(param_shape)
        decays = {f"log_decay[{i}]": x for i, x in enumerate(log_decay)}
        what = f"a parameter of shape {shape}"
        check({"mu": mu, "nu": nu}, shape, what)
        check({"last": last, **decays}, shape[: max(1, len(shape) - 1)], what)
    fields, size = state._asdict(), len(rows)
    degree = jnp.shape(state.remaining)[-1:]
    expected: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("count", "clock", "origin"), ()),
        **{"values_until": (size,), "remaining": (size, 2, *degree)},
        **({"decay": (size, 2)} if state.log_decay else {}),
    }
    for name, wanted in expected.items():
        check({name: fields[name]}, wanted, f"{size} parameters")
    return rows


def replaced(
    state: ExactAdamState, rows: Sequence[RowState], tables: TableState
) -> ExactAdamState:
    """The state with other rows of all its parameters, in their order, and tables."""
    trees = [
        jax.tree.unflatten(jax.tree.structure(tree), [x.arrays[i] for x in rows])
        for i, tree in enumerate(_trees(state))
    ]
    decay = () if tables.decay is None else tables.decay
    fields = tables._asdict() | RowState.of(*trees)._asdict() | {"decay": decay}
    del fields["single"]
    return state._replace(**fields)


def clocks_of(state: Any) -> list[tuple[Any, Any]]:
    """The clock and the present decay of each state of `exact_adam` in this one."""
    nodes = filter(is_exact, jax.tree.leaves(state, is_leaf=is_exact))
    return [(node.clock, node.decay) for node in nodes]


def begin_now(state: Any, clocks: list[tuple[Any, Any]]) -> Any:
    """A new state whose rows begin at these clocks, with the decay until then behind.

    With moments of zeros, the value of such a row is what the table holds.
    """
    left = iter(clocks)

    def begun(node: Any) -> Any:
        if not is_exact(node):
            return node
        clock, decay = next(left)
        last = jax.tree.map(lambda x: jnp.full_like(x, clock), node.last)
        treedef: Any = jax.tree.structure(node.last)
        log_decay = tuple(
            treedef.unflatten(
                jnp.full_like(x, decay[i, part])
                for i, x in enumerate(jax.tree.leaves(tree))
            )
            for part, tree in enumerate(node.log_decay)
        )
        return node._replace(last=last, log_decay=log_decay)

    return jax.tree.map(begun, state, is_leaf=is_exact)


def refuse_other_dates(state: Any, row_state: Any, has_rows: Any) -> Any:
    """Whether rows of one state may be put into another.

    A row is stored by its value or by its projected final value, and `values_until`
    says of a whole parameter which: of rows and table it must be the same, or nothing
    has moved yet, in the one or in the other. (Moments may come from another optimiser,
    with its count.) `has_rows` says which leaves are of tables.

    Returns:
      `True`, or an array of JAX that a program knows when it runs.

    Raises:
      ValueError: If it is known that they may not.
    """
    trees = [
        [*filter(is_exact, jax.tree.leaves(tree, is_leaf=is_exact))]
        for tree in (state, row_state, has_rows)
    ]
    fits: Any = True
    for node, of_rows, flags in zip(*trees, strict=True):
        is_put = np.array(jax.tree.leaves(flags.nu), bool)
        if not is_put.any() or of_rows.values_until is None or of_rows.clock is None:
            continue
        is_same = (node.values_until == of_rows.values_until)[is_put].all()
        is_same |= (node.clock == 0) & (node.count == 0)
        if not node.log_decay:  # what decays is dated since the last `flush`
            is_same |= (of_rows.clock == 0) & (of_rows.count == 0)
        fits = fits & is_same
    if isinstance(fits, jax.core.Tracer):
        return fits
    if not fits:
        raise ValueError(
            "put_rows takes rows of exact_adam that were taken since the last flush of "
            "their table, and have not been flushed themselves nor had a dense "
            "gradient: what is stored of a row means another number after these. Take "
            "the rows again; or begin them with their values by reset_rows, of "
            "osa.evaluate(lambda rows: rows, read=row_state)(rows)."
        )
    return True
