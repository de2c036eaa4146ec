"""The variables of NNX modules: what a function does to them, by their identity."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ._gradients.arguments import is_mutable_variable
from ._gradients.tracing import as_places
from ._gradients.value_and_grad import current_tables


def variables_of(tree: Any) -> list[nnx.Variable[Any]]:
    nodes = (node for _, node in nnx.iter_graph(tree))
    return [x for x in nodes if isinstance(x, nnx.Variable)]


def raw_values(tree: Any) -> dict[Any, Any]:
    """What variables have now, by their paths."""
    pairs = nnx.iter_graph(tree)
    return {p: x.get_raw_value() for p, x in pairs if isinstance(x, nnx.Variable)}


def leaves_of(variables: Sequence[nnx.Variable[Any]]) -> dict[tuple[int, int], Any]:
    """What variables have now: a leaf by the `id` of its variable, and its place."""
    return {
        (id(variable), k): leaf
        for variable in variables
        for k, leaf in enumerate(jax.tree.leaves(variable.get_raw_value()))
    }


def set_leaves(variable: nnx.Variable[Any], new: Mapping[int, Any]) -> None:
    """Sets some leaves of what a variable has, by their places."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(variable.get_raw_value())
    if any(new.get(k, x) is not x for k, x in enumerate(leaves)):
        changed = (new.get(k, x) for k, x in enumerate(leaves))
        variable.set_raw_value(treedef.unflatten(changed))


@jax.jit
def as_result(x: Any) -> Any:
    """The same values, as another tracer."""
    return x


def values_of_now(
    args: Sequence[Any], argnums: Any, state: Any, pairs: Sequence[tuple[Any, Any]]
) -> list[Any]:
    """What variables that a function has assigned are now, by what they were and are.

    One that was given a table that is stored ahead of its values is given these. A
    function that assigns such a table is refused.
    """
    if all(new is old for old, new in pairs):
        return [new for _, new in pairs]
    chosen = [args[place] for place in as_places(argnums)]
    tree = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
    sources = current_tables(tree, state)
    tables = {
        id(leaf): source
        for leaf, source in zip(jax.tree.leaves(tree), sources, strict=True)
        if source.stale is not None
    }
    if any(new is not old and id(old) in tables for old, new in pairs):
        raise ValueError(
            "The function assigns or replaces a variable that `exact_adam` trains, and "
            "that is read by `read=`. It sees rows as they are now; what is stored are "
            "rows as they were at their last step. Change the variable between two "
            "steps, after `flax_nnx.flush(model, optimizer)`."
        )
    return [
        tables[id(new)].values(lambda x: x)
        if new is not old and id(new) in tables
        else new
        for old, new in pairs
    ]


def is_mutable(item: tuple[Any, Any]) -> bool:
    """Whether a node of a graph, with its path, is a mutable variable."""
    node = item[1]
    return isinstance(node, nnx.Variable) and (is_mutable_variable(node) or node.ref)


def write(variable: Any, value: Any) -> None:
    """Writes into the mutable array of a variable, which whoever shares it sees."""
    raw = variable.get_raw_value()
    if nnx.variablelib.is_array_ref(raw):
        raw[...] = value
    else:
        variable.set_raw_value(value)
