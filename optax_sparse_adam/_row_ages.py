"""Which is later: tables and their state, or rows that were taken of them."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax_extras.varying_axes import axes_of_type
from ._row_tables import Table, copied, shape_of

# Numbers of a state that are clocks, also where they are floats.
_CLOCKS = ("clock", "count", "step", "steps", "t", "step_count", "gradient_step")
# Integers of a state that are no clocks: what begins again at zero, in those of optax,
# and what need not grow, in that of `exact_adam`.
_NO_CLOCKS = (
    *("cooldown_count", "notfinite_count", "num_not_finite", "plateau_count"),
    *("num_linesearch_steps", "micro_step", "steps_since_sync", "origin", "lead"),
)


def _name_of(path: Any) -> str:
    return getattr(path[-1], "name", getattr(path[-1], "key", "")) if path else ""


def _is_clock(name: str, x: Any, kind: Any) -> bool:
    if jnp.issubdtype(kind, np.signedinteger):
        return name not in _NO_CLOCKS
    # A raw key of random numbers is a vector of `uint32`; a rate or a loss is a float.
    is_count = jnp.issubdtype(kind, np.unsignedinteger) or name in _CLOCKS
    return np.ndim(x) == 0 and is_count and name not in _NO_CLOCKS


def _varies(x: Any) -> bool:
    return bool(axes_of_type(jax.typeof(x)))


def is_older(
    state: Any, states: list[Any], owners: list[Table | None], params: Any
) -> Any:
    """Whether rows are of an earlier step than the tables, by what the state counts.

    So it is if a scalar is smaller and none is larger. Those whose names say that they
    count decide first; then integers of other names, as a wrapper of the user's may
    have; then numbers in arrays: the counts of `per_row` for another table, some of
    which `reset_rows` has set back. `mini_step` of `optax.MultiSteps` begins again, and
    counts where its `gradient_step` is the same. Not the moments of parameters that
    have such names: these are floats, and their paths end with the parameter's. A table
    has such a scalar, too, in `optax.novograd`.
    """
    of_params, _ = jax.tree_util.tree_flatten_with_path(params)
    names = [path for path, _ in of_params if path]
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    # `count` of reduce_on_plateau and of apply_every begins again, too; that of
    # `exact_adam` may be set.
    beside = "plateau_count", "grad_acc", "clock"
    are_set_back = {
        path[:i]
        for path, _ in paths
        for i in range(len(path))
        if _name_of(path[: i + 1]) in beside
    }
    steps = {
        path[:-1]: (old, new)
        for (path, old), new in zip(paths, states, strict=True)
        if _name_of(path) == "gradient_step" and new is not None
    }
    named: list[Any] = []
    others: list[Any] = []
    arrays: list[Any] = []
    for (path, old), new, table in zip(paths, states, owners, strict=True):
        _, kind = shape_of("put_rows", old)
        name = _name_of(path)
        is_clock = name == "clock" or path[:-1] not in are_set_back
        is_moment = any(path[-len(x) :] == x for x in names)
        is_clock &= not (is_moment and jnp.issubdtype(kind, jnp.inexact))
        is_clock &= _is_clock(name, old, kind)
        if table is None and new is not None and is_clock:
            of_name = named if name in _CLOCKS else others
            if name == "mini_step" and path[:-1] in steps:
                is_same = operator.eq(*steps[path[:-1]])
                old, new = (jnp.where(is_same, x, 0) for x in (old, new))
            (arrays if np.ndim(old) else of_name).append((old, new))

    def is_any(compare: Any, pairs: list[Any]) -> Any:
        found = (jnp.any(compare(new, old)) for old, new in pairs)
        return functools.reduce(operator.or_, found, np.False_)

    if named:  # inside of `shard_map` others differ from one device to the next
        arrays = [x for x in arrays if not any(map(_varies, x))]
    older = is_any(operator.lt, arrays)
    for pairs in others, named:
        is_smaller, is_larger = (is_any(x, pairs) for x in (operator.lt, operator.gt))
        older = ~is_larger & (is_smaller | older)
    return older


def newer(
    rests: Any, tree: Any, tables: list[Table | None], rows: list[Any]
) -> list[Any]:
    """What is to be written: all rows, and of other leaves those of the later step."""

    def later(x: Any, table: Table | None, new: Any) -> Any:
        if table is not None or new is None:
            return new
        if not isinstance(rests, jax.core.Tracer):
            return None if rests else new
        if not isinstance(x, jax.Array):
            raise TypeError(
                "put_rows writes arrays of NumPy when it is called, and needs counts "
                "that are known then; got traced ones. Call it outside of jit, and "
                "compile the step on the rows."
            )
        return jnp.where(rests, x, copied(new, x))

    return [*map(later, jax.tree.leaves(tree), tables, rows)]
