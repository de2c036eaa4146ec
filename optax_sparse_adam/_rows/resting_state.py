"""The state of `exact_adam`: what is known of rows that rest, and where it is kept."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .ways import Constants


class ExactAdamState(NamedTuple):
    """State of `exact_adam` and of `exact_adamw`.

    On a mesh, what has rows (`mu`, `nu`, `last` and `log_decay`) is sharded as the
    parameters are along theirs; the rest is a few numbers.

    Attributes:
      count: Number of updates so far, an `int32` scalar.
      mu: Tree like the parameters: moving average of the gradient, of each row as it
        was after the row's last update.
      nu: Tree like the parameters: moving average of the squared gradient, alike.
      last: Tree like the parameters, without their last axis: step of each row's last
        update, `int32`.
      log_decay: Two trees like `last`: logarithm of the weight decay from the beginning
        to the last update, and what rounding left of it; `()` without weight decay.
      since: Tree like the parameters: rows that were last updated at this step, or
        before, hold their value after it, not their resting point. A scalar each.
      ways: Tree like the parameters: the way since that step, and the way ahead, at the
        Chebyshev nodes, `[2, nodes]` each.
      decay: Tree like the parameters: `log_decay` of now, `[2]` each; `()` without.
      constants: Of the optimiser.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    mu: Any
    nu: Any
    last: Any
    log_decay: tuple[Any, ...]
    since: Any
    ways: Any
    decay: Any
    constants: Constants


class RowState(NamedTuple):
    """What is known of each row of one parameter, or of some; see `ExactAdamState`."""

    mu: jax.Array
    nu: jax.Array
    last: jax.Array
    log_decay: tuple[jax.Array, ...]


class Whole(NamedTuple):
    """What is known of a parameter as a whole; see `ExactAdamState`."""

    since: jax.Array
    ways: jax.Array
    decay: jax.Array | None


def is_exact(node: Any) -> bool:
    return isinstance(node, ExactAdamState)


def exact_states(state: Any, name: str) -> tuple[list[Any], Any]:
    """The state of an optimiser, cut into states of `exact_adam` and other leaves.

    Raises:
      ValueError: If it holds none of them.
    """
    nodes, structure = jax.tree.flatten(state, is_leaf=is_exact)
    if not any(map(is_exact, nodes)):
        raise ValueError(
            f"{name} needs the state of an optimiser that contains exact_adam or "
            f"exact_adamw, got {jax.tree.structure(state)}. No other optimiser has "
            "rows that are to be brought up to date."
        )
    return nodes, structure


def _columns(state: ExactAdamState, treedef: Any) -> tuple[list[list[Any]], Any]:
    """The trees of a state as lists by parameter, and the structure of the trees.

    They have the structure of the parameters, or holes where `optax.masked` keeps some
    away. Or that of the same parameters in other containers, in the same order: Flax
    has `nnx.Param`s in a module's state and none in that of its optimiser.
    """
    own: Any = jax.tree.structure(
        state.nu, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    like = own if own.num_leaves == treedef.num_leaves else treedef
    trees = [state.mu, state.nu, state.last, *state.log_decay, state.since, state.ways]
    if state.log_decay:
        trees.append(state.decay)
    return [like.flatten_up_to(tree) for tree in trees], like


def _part(column: tuple[Any, ...]) -> tuple[RowState, Whole]:
    mu, nu, last, *rest = column
    *log_decay, since, ways, decay = rest if len(rest) > 2 else (*rest, None)
    return RowState(mu, nu, last, tuple(log_decay)), Whole(since, ways, decay)


def held_by(
    state: ExactAdamState, params: list[Any], treedef: Any
) -> dict[int, tuple[RowState, Whole]]:
    """What is known of each parameter, by its place; not of those that are masked.

    Raises:
      ValueError: If the state belongs to other parameters.
    """
    why = "the shapes differ"
    try:
        columns, _ = _columns(state, treedef)
        held = {
            i: _part(column)
            for i, column in enumerate(zip(*columns, strict=True))
            if jax.tree.leaves(column)  # a hole is a node without leaves
        }
        same = (rows.nu.shape == jnp.shape(params[i]) for i, (rows, _) in held.items())
        if all(same):
            return held
    except (AttributeError, ValueError):  # which print the arrays
        why = "the structures differ"
    raise ValueError(
        "The state of exact_adam must belong to the parameters, which have the "
        f"structure {treedef}; got a state for {jax.tree.structure(state.nu)}: {why}"
    )


def replace_held(
    state: ExactAdamState, treedef: Any, parts: dict[int, tuple[RowState, Whole]]
) -> ExactAdamState:
    """The state with other parts, in the places of `held_by`."""
    columns, like = _columns(state, treedef)
    for i, (rows, whole) in parts.items():
        news = (*rows[:3], *rows.log_decay, *whole)
        for column, new in zip(columns, news, strict=False):
            column[i] = new
    mu, nu, last, *trees = map(like.unflatten, columns)
    *log_decay, since, ways, decay = trees if state.log_decay else (*trees, ())
    return state._replace(
        mu=mu,
        nu=nu,
        last=last,
        log_decay=tuple(log_decay),
        since=since,
        ways=ways,
        decay=decay,
    )
