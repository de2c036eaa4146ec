"""Stale rows: what whoever reads a table needs to know of them.

An optimiser may let rows rest, and store what brings them up to date when they are
read; `exact_adam` does. Its state is a `StaleState`, found in that of any optimiser
that holds it (`stale_states`), and tells of each parameter what `StaleRows` says:
gradients read tables by it, and know no optimiser.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..native._calls import Stale


class StaleRows(Protocol):
    """What brings the rows of one table up to date; a pytree."""

    @property
    def clock(self) -> jax.Array:
        """The time that they are brought up to, which a gradient carries."""

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        """Arrays with a row for each row of the table, or a number: `[num_rows]`."""

    @property
    def shared(self) -> Any:
        """What all rows have in common: a tree of arrays."""

    @property
    def decays(self) -> bool:
        """Whether values are not what is stored plus something, but a part of it."""

    @staticmethod
    def value_of(
        row: jax.Array, rows_of_tables: tuple[jax.Array, ...], shared: Any
    ) -> jax.Array:
        """Rows as they are now, of those that are stored; each is treated alone.

        As `Formula.rows`: a function of the rows `[..., *row_shape]`, of those of
        `tables`, `[..., *row_shape]` or one number each, `[...]` or with axes of length
        1 behind, and of `shared`. The result has the type of the rows. It is traceable
        with one row, so that a kernel can be made of it.
        """

    def for_cpu(self) -> Stale:
        """All of it as the arrays of the kernel for CPUs (`native`)."""

    def map(self, function: Callable[[Any, bool], Any]) -> "StaleRows":
        """Applies `function(array, has_rows)` to all arrays."""


class StaleState(Protocol):
    """A node of an optimiser's state, by which tables are read."""

    def stale_rows(
        self, shapes: Sequence[tuple[int, ...] | None], treedef: Any
    ) -> dict[int, StaleRows]:
        """Of each parameter that it belongs to, by its index; see `rows_by_parameter`.

        In the order of the state. The structure of all parameters is `treedef`.
        """

    def refuse_stale(self, names: dict[int, str]) -> jax.Array:
        """Raises, as far as is known, if one of them has stale rows; else says so.

        `names` by their places in the order of `stale_rows`.
        """

    def refuse_changes(self, state: Any) -> None:
        """Raises where something in the state of the optimiser changes its updates."""


STORED = "optax_sparse_adam_stored_rows"


def knows_stored_rows() -> AbstractContextManager[None]:
    """Around what reads a table as it is stored, and knows what its rows are then.

    It names the equations that are traced in it, for `refuse_stored_reads`; and for
    `row_flow`, which lets them have rows and indices, as those of `coalesce`.
    """
    return jax.named_scope(STORED)


def is_stale_state(node: Any) -> bool:
    return hasattr(type(node), "stale_rows")


def contains_stale(state: Any) -> bool:
    return any(map(is_stale_state, jax.tree.leaves(state, is_leaf=is_stale_state)))


def stale_states(state: Any, name: str, params: Any) -> list[StaleState]:
    """The nodes of an optimiser's state by which tables are read, of arrays of JAX.

    Most optimisers have none: their rows are always up to date.

    Raises:
      ValueError: If it is seen to be no state of an optimiser of these parameters, or
        holds one whose updates are seen to be changed by another transformation.
    """
    leaves = jax.tree.leaves(state, is_leaf=is_stale_state)
    nodes = [x for x in leaves if is_stale_state(x)]
    if not nodes:
        _refuse_no_state(state, name, params)
        return []
    nodes[0].refuse_changes(state)
    return [jax.tree.map(_as_jax, node) for node in nodes]


def _refuse_no_state(state: Any, name: str, params: Any) -> None:
    """Raises where something is seen not to be an optimiser's state."""
    rule = f"{name} needs the state of an optimiser of the parameters"
    if contains_stale(params):
        raise ValueError(
            f"{rule}, and of these by themselves; got a state where the parameters "
            "should be. Pass the parameters first, then the state."
        )
    treedef: Any
    structure: Any
    leaves, treedef = jax.tree.flatten(state)
    param_leaves, structure = jax.tree.flatten(params)
    kinds = jax.Array, np.ndarray, np.generic, int, float, jax.ShapeDtypeStruct
    if not all(isinstance(x, kinds) for x in leaves):
        raise ValueError(
            f"{rule}, got {class_names(state)}. Pass what `init` and `update` return, "
            "not the optimiser itself."
        )
    same = treedef == structure and all(map(operator.is_, leaves, param_leaves))
    if leaves and same:
        raise ValueError(f"{rule}, got the parameters themselves. Pass its state.")
    # A first moment is like the parameters, in all transformations.
    for node in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")):
        mu = getattr(node, "mu", None)
        if mu is None or jax.tree.structure(mu) != structure:
            continue  # others of them are kept elsewhere, or masked
        for moment, param in zip(jax.tree.leaves(mu), param_leaves, strict=True):
            if jnp.shape(moment) != jnp.shape(param):
                raise ValueError(
                    f"{rule}, got one whose `mu` has the shape {jnp.shape(moment)} for "
                    f"a parameter of shape {jnp.shape(param)}. Make the state by init "
                    "of the same parameters, or let it grow with them."
                )


def _as_jax(x: Any) -> Any:
    """A checkpoint may have arrays of NumPy."""
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def refuse_stale_states(state: Any, name: str) -> None:
    """Raises if tables are read by this state, where `name` cannot be around it."""
    if contains_stale(state):
        raise ValueError(
            f"{name} cannot be around exact_adam, whose stale rows are read by the "
            f"updates that it has made itself. Put {name} around optax.adam, inside "
            "lazy, or use exact_adam without it."
        )


def class_names(state: Any) -> str:
    """The class of a state, and the classes in it, by which its user knows it."""
    name = type(state).__name__
    if type(state) in (tuple, list) and state:
        return f"{name}({', '.join(map(class_names, state))})"
    return name
