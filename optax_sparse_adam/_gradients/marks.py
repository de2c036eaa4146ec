"""`sparse=`: which leaves are to have row-sparse gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import leaf_name
from .expressions import is_array

Sparse = Any  # None | bool | tree of bool | Callable[[KeyPath, Any], bool]


def marks_of(sparse: Sparse, tree: Any) -> list[bool | None]:
    """For each leaf: row-sparse (`True`), dense (`False`), or as it comes (`None`)."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    if sparse is None:
        return [None] * len(pairs)
    if sparse is True:
        arrays = [leaf if is_array(leaf) else None for _, leaf in pairs]
        return [(x is not None and is_real(x)) or None for x in arrays]
    what = "The leaves of `sparse` must be"
    if is_predicate(sparse):
        marks = [sparse(*pair) for pair in pairs]
        what = "The predicate `sparse` must return"
    else:
        try:
            marks = jax.tree.leaves(jax.tree.broadcast(sparse, tree))
        except ValueError as error:
            raise ValueError(
                "`sparse` must be a tree of booleans like the differentiated argument, "
                f"or a prefix of it: {error}"
            ) from None
    for (path, _), mark in zip(pairs, marks, strict=True):
        if not isinstance(mark, bool | np.bool_):
            raise ValueError(
                f"{what} booleans, got {mark!r} of type {type(mark).__name__} at "
                f"{leaf_name(path)}."
            )
    return list(map(bool, marks))


def is_real(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def is_predicate(sparse: Sparse) -> bool:
    """Whether it is called; a tree of booleans may have `__call__`, as models have."""
    leaves = jax.tree.leaves(sparse)
    are_marks = bool(leaves) and all(isinstance(x, bool | np.bool_) for x in leaves)
    return callable(sparse) and not are_marks


def requires_sparse(sparse: Sparse) -> bool:
    return is_predicate(sparse) or any(map(bool, jax.tree.leaves(sparse)))
