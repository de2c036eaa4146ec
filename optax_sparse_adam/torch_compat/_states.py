"""States of torch's optimisers as the state of a transformation, and back.

What torch keeps of a parameter is a dictionary, which its `state_dict` finds by the
parameter's position in the optimiser, and an optimiser in memory by the parameter:

    {"step": 3, "exp_avg": [1000, 8], "exp_avg_sq": [1000, 8]}

Positions say nothing of where a parameter is among those of JAX, and tables of one
shape would be taken for each other in silence. So a tree with one dictionary for each
parameter goes in, and comes out; whose it is says its place in the tree.

Known limit: states of Adam, AdamW and SparseAdam. The formula and its options are the
transformation's; torch keeps them in `param_groups`, which nothing here reads. A state
does not say what its numbers are: that of `optax.adamax`, with a maximum in the place
of `nu`, is of Adam's type, and torch's RAdam has the keys of Adam, for `optax.radam`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._exact_adam.state import ExactAdamState
from .._optimizers.sparse_adam import ScaleBySparseAdamState
from ._formulas import scalar
from ._parameter import as_numpy

State = TypeVar("State")

_Moments = ScaleBySparseAdamState, optax.ScaleByAdamState, ExactAdamState
_FIELDS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
_COUNTS = "count", "gradient_step"
_EXAMPLE = '{"step": 3, "exp_avg": mu, "exp_avg_sq": nu}'


def to_state(tx: optax.GradientTransformation, params: Any, states: Any) -> Any:
    """The state of a transformation that goes on where torch's optimisers were.

    Each part of an `optax.partition`, of `sparse_adam`, `optax.adam`, `optax.adamw`,
    `exact_adam`, or of `lazy`, a chain or `optax.inject_hyperparams` of these, gets the
    moments of its parameters and their step, and a schedule beside it the step. What
    remembers otherwise, such as `optax.ema`, begins as a new one. Not for
    `optax.adamax`, which has a maximum where Adam has `exp_avg_sq`, in a state of the
    same type.

    Args:
      tx: The transformation, with the options that the optimisers had in torch.
      params: The parameters.
      states: A tree like them, with what torch keeps of each: a dictionary of `step`,
        `exp_avg` and `exp_avg_sq`, with tensors of torch, or arrays of NumPy or JAX.
        From an optimiser it is `optimizer.state[parameter]`; from a `state_dict` it is
        `state_dict["state"][i]`, where `i` counts the parameters in the order of the
        groups. `None` for a parameter of which neither keeps moments. If a parameter
        was transposed on its way to JAX, so are its two moments.

    Returns:
      The state, with arrays of its own, where and of the types that `tx.init` has them.

    Raises:
      ValueError: If a state has other arrays than these, or of another shape than the
        parameter; if one has no place in the state of `tx`, or `tx` keeps moments of a
        parameter without one; if `tx` counts the steps of each row, as `per_row`; if
        parameters that `tx` counts together have made different numbers of steps, as
        torch counts those of each.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import torch_compat
      >>> params = {"table": jnp.zeros((9, 2)), "w": jnp.ones(2)}
      >>> labels = {"table": "tables", "w": "rest"}
      >>> parts = {"tables": osa.sparse_adam(1e-3), "rest": optax.adam(1e-3)}
      >>> tx = optax.partition(parts, labels)
      >>> def saved(x):  # by torch.save(optimizer.state_dict())
      ...     return {"state": {0: {"step": 3, "exp_avg": x, "exp_avg_sq": x**2}}}
      >>> sparse, dense = saved(jnp.ones((9, 2))), saved(jnp.ones(2))
      >>> states = {"table": sparse["state"][0], "w": dense["state"][0]}
      >>> state = torch_compat.to_state(tx, params, states)
      >>> state.inner_states["tables"].inner_state.count
      Array(3, dtype=int32)
      >>> torch_compat.from_state(params, state)["table"]["step"]
      3
    """
    names, treedef = _names(params)
    torch_states = [
        _checked(*x) for x in zip(names, _up_to(treedef, states), strict=True)
    ]
    used: set[int] = set()

    def filled(node: Any) -> tuple[Any, int]:
        """Moments of torch in place of those of `tx.init`, and their step."""
        _refuse_by_row("to_state", node)
        trees: dict[str, Any] = {}
        steps: dict[str, int] = {}
        for key, field in _FIELDS.items():
            placed: list[Any] = []
            for i, x in enumerate(_up_to(treedef, getattr(node, field))):
                if not _is_masked(x):
                    _refuse_none(names[i], torch_states[i])
                    steps[names[i]] = _step(names[i], torch_states[i])
                    placed.append(_placed(names[i], key, torch_states[i][key], x))
                    used.add(i)
            structure: Any = jax.tree.structure(getattr(node, field))
            trees[field] = structure.unflatten(placed)
        if len({*steps.values()}) > 1:
            raise ValueError(
                "to_state needs parameters that have made equally many steps, where "
                "the transformation has one count for them; torch counts those of "
                f"each, and has {steps}. Give parameters of another step a part of "
                "their own in optax.partition."
            )
        step = next(iter(steps.values()), 0)
        return node._replace(count=_count(step, node.count), **trees), step

    state = _by_part(tx.init(params), filled, _common_step(names, torch_states))
    for i, (name, torch_state) in enumerate(zip(names, torch_states, strict=True)):
        if i not in used and torch_state.keys() & _FIELDS.keys():
            raise ValueError(
                f"to_state has a state of torch for {name}, of which the "
                "transformation keeps no two moments as Adam does: it would be lost. "
                "Give this parameter an Adam; or None in place of its state."
            )
    return state


def from_state(params: Any, state: Any) -> Any:
    """What torch's optimisers keep of each parameter: the inverse of `to_state`.

    Args:
      params: The parameters, of which only the tree matters.
      state: The state of such a transformation. Under `exact_adam` call `flush` first.

    Returns:
      A tree like the parameters, with a dictionary of `step`, `exp_avg` and
      `exp_avg_sq` for each, in copies of NumPy; `None` where the state has no moments.
      The step is a Python integer for torch's SparseAdam, and an array for its Adam.

    Raises:
      ValueError: If rows of `exact_adam` are stale, or the state has no moments, or
        counts the steps of each row.
    """
    names, treedef = _names(params)
    results: list[Any] = [None] * len(names)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _Moments))
    for node in (x for x in nodes if isinstance(x, _Moments)):
        if isinstance(node, ExactAdamState) and np.any(
            np.asarray(node.values_until) != np.asarray(node.clock)
        ):
            raise ValueError(
                "from_state needs moments of now, and this state of exact_adam has "
                "rows whose updates are to come. Call params, state = "
                "optax_sparse_adam.flush(params, state) first."
            )
        _refuse_by_row("from_state", node)
        step = int(node.count)
        is_sparse = isinstance(node, ScaleBySparseAdamState)
        for key, field in _FIELDS.items():
            for i, x in enumerate(_up_to(treedef, getattr(node, field))):
                if not _is_masked(x):
                    # An array for each: torch keeps it, and counts in place.
                    count = step if is_sparse else np.array(step, np.float32)
                    results[i] = results[i] or {"step": count}
                    results[i][key] = np.array(as_numpy(x))
    if not any(results):
        raise ValueError(
            "from_state needs the state of a transformation that keeps two moments of "
            f"its parameters, as Adam does; got a {type(state).__name__} without."
        )
    return treedef.unflatten(results)


def _by_part(state: State, filled: Callable[[Any], Any], common: int | None) -> State:
    """A state whose moments are filled, with counts as they say, in each partition."""
    steps = set[int]()
    is_part = (*_Moments, optax.transforms.PartitionState)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, is_part)
    )
    leaves: Any = [x for _, x in pairs]
    for i, x in enumerate(leaves):
        if isinstance(x, _Moments):
            leaves[i], step = filled(x)
            steps.add(step)
        elif isinstance(x, optax.transforms.PartitionState):
            parts = x.inner_states.items()
            inner_states = {
                name: _by_part(part, filled, common) for name, part in parts
            }
            leaves[i] = x._replace(inner_states=inner_states)
    for i, (path, x) in enumerate(pairs):
        name = getattr(path[-1], "name", "") if path else ""
        if name in _COUNTS and jnp.ndim(x) == 0 and not _remembers(path, pairs):
            (step,) = steps if len(steps) == 1 else (common,)
            if step is None:
                raise ValueError(
                    "to_state has no step for the count at "
                    f"{jax.tree_util.keystr(path)}: the transformation has no moments "
                    "beside it, and torch's steps of the parameters differ. Keep what "
                    "counts, such as a schedule, in the part of optax.partition that "
                    "it belongs to."
                )
            leaves[i] = _count(step, x)
    result: State = jax.tree.unflatten(treedef, leaves)
    return result


def _remembers(path: tuple[Any, ...], pairs: list[tuple[Any, Any]]) -> bool:
    """Whether there are moments beside a count, which are new, and so is the count.

    `EmaState(count, ema)` divides by what `count` steps leave of its zeros. A state of
    a schedule has a count alone. Those with a state inside count for that one.
    """
    count, parent = path[-1].name, path[:-1]
    beside = [
        (other[len(parent)], x)
        for other, x in pairs
        if other[: len(parent)] == parent and other != path
    ]
    has_inner = any("inner" in getattr(key, "name", "") for key, _ in beside)
    is_floating = (jnp.issubdtype(x.dtype, jnp.floating) for _, x in beside)
    return count == "count" and not has_inner and any(is_floating)


def _names(params: Any) -> tuple[list[str], Any]:
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    return [jax.tree_util.keystr(path) or "the parameter" for path, _ in pairs], treedef


def _up_to(treedef: Any, tree: Any) -> list[Any]:
    """What a tree has for each parameter: of a subtree that is masked, the mask."""

    def spread(x: Any, part: Any) -> Any:
        return jax.tree.map(lambda _: x, part) if _is_masked(x) else x

    params = treedef.unflatten(range(treedef.num_leaves))
    try:
        if any(map(_is_masked, jax.tree.leaves(tree, is_leaf=_is_masked))):
            tree = jax.tree.map(spread, tree, params, is_leaf=_is_masked)
        parts: list[Any] = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            "torch_compat needs a tree like the parameters, with a state for each, "
            f"as {_EXAMPLE}; got another one: {error}"
        ) from None
    return parts


def _checked(name: str, state: Any) -> dict[str, Any]:
    """The state of a parameter, if it is one of torch's Adam or SparseAdam."""
    state = {} if state is None else state
    keys = [*state] if hasattr(state, "keys") else None
    if keys not in ([], ["step"]) and {*(keys or [])} != {"step", *_FIELDS}:
        what = type(state).__name__ if keys is None else f"one of {', '.join(keys)}"
        raise ValueError(
            f"to_state needs a state of torch's Adam, AdamW or SparseAdam, {_EXAMPLE}, "
            f"for {name}; got {what}. Of amsgrad and of other optimisers there is no "
            "state here that means the same; of a whole state_dict give "
            'state_dict["state"][i].'
        )
    return dict(state)


def _common_step(names: list[str], states: list[dict[str, Any]]) -> int | None:
    pairs = zip(names, states, strict=True)
    steps = {_step(name, x) for name, x in pairs if "step" in x}
    return steps.pop() if len(steps) == 1 else None


def _refuse_by_row(function: str, node: Any) -> None:
    if getattr(node.count, "ndim", 1):
        raise ValueError(
            f"{function} needs a transformation that counts steps as torch does, one "
            "for all rows of a table; got one that counts those of each, as "
            "optax_sparse_adam.per_row does. Take its state from tx.init."
        )


def _refuse_none(name: str, state: dict[str, Any]) -> None:
    if not state.keys() >= _FIELDS.keys():
        raise ValueError(
            f"to_state needs torch's state of {name}, of which the transformation "
            "keeps moments, got none: torch has none before a parameter's first step. "
            "Give such parameters a part of their own in optax.partition, and here a "
            "step of 0 with zeros."
        )


def _step(name: str, state: dict[str, Any]) -> int:
    step = scalar(state["step"])
    if step != int(step) or step < 0:
        raise ValueError(f"to_state needs a count of steps for {name}, got {step}.")
    return int(step)


def _placed(name: str, key: str, value: Any, like: jax.Array) -> jax.Array:
    array = as_numpy(value)
    if array.shape != like.shape:
        raise ValueError(
            f"to_state needs {key} of {name} in the shape {like.shape}, got "
            f"{array.shape}. A parameter that was transposed or joined on its way from "
            "torch needs its moments so, too."
        )
    return jax.device_put(np.array(array, like.dtype), like.sharding)


def _count(step: int, like: Any) -> jax.Array:
    return jnp.array(step, like.dtype)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
