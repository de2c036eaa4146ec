"""What a step of `exact_adam` is given, leaf by leaf."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._rows.checks import is_bcoo, is_leaf, leaves_like
from .rows import RowState
from .state import ExactAdamState, rows_by_parameter


class StepLeaves(NamedTuple):
    """Gradients and parameters, and what the state knows of their rows.

    Attributes:
      treedef: The structure of the gradients.
      names: The path of each gradient, for errors.
      grads: Each a BCOO, an array or `None`.
      params: Each an array, or `None` where none were given.
      rows: Of each parameter that the state has, by its place among the gradients; in
        the order of the state's arrays. Where parameter 0 is masked, the first is 1.
      decays: For each of `rows`, whether the parameter decays.
      is_dense: For each of `rows`, whether its gradient is an array.
    """

    treedef: Any
    names: list[str]
    grads: list[Any]
    params: list[Any]
    rows: dict[int, RowState]
    decays: np.ndarray
    is_dense: np.ndarray

    @classmethod
    def of(
        cls, updates: optax.Updates, state: ExactAdamState, params: Any, marks: Any
    ) -> "StepLeaves":
        """The leaves; `marks` is the tree of what decays, or `None` if nothing does.

        Raises:
          ValueError: If the trees differ, or the state belongs to other parameters.
        """
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_leaf)
        grads = [grad for _, grad in paths]
        olds: list[Any] = [None] * len(grads)
        if params is not None:
            olds = leaves_like(treedef, params, "Parameters", "gradients")
        decays = [False] * len(grads)
        if marks is not None:
            decays = treedef.flatten_up_to(marks)
        nus = leaves_like(treedef, state.nu, "The moments", "gradients")
        shaped = [nu if old is None else old for old, nu in zip(olds, nus, strict=True)]
        shapes = [None if x is None else jnp.shape(x) for x in shaped]
        rows = rows_by_parameter(state, shapes, treedef)
        is_dense = [not (grads[i] is None or is_bcoo(grads[i])) for i in rows]
        return cls(
            treedef=treedef,
            names=[jax.tree_util.keystr(path) for path, _ in paths],
            grads=grads,
            params=olds,
            rows=rows,
            decays=np.array([decays[i] for i in rows], bool),
            is_dense=np.array(is_dense, bool),
        )

    def dense_names(self) -> dict[int, str]:
        """Names of the parameters with dense gradients, by their places in `rows`."""
        pairs = enumerate(self.rows)
        return {place: self.names[i] for place, i in pairs if self.is_dense[place]}
