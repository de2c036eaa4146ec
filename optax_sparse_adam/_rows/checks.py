"""Checks of gradients and trees: what counts as a gradient, and errors for the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .canary import CanaryBCOO, check_indices

_AS_REAL = (
    "Keep complex numbers as one real table of twice the columns, real parts and then "
    "imaginary ones: see docs/complex_tables.md."
)


def refuse_complex(leaf: Any, name: str) -> None:
    """Raises for a complex parameter; `name` is that of the optimiser."""
    if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise ValueError(
            f"{name} does not support complex parameters, got {jnp.result_type(leaf)} "
            f"of shape {jnp.shape(leaf)}. {_AS_REAL}"
        )


def refuse_masked(x: Any, name: str) -> None:
    """Raises for a masked array, of which NumPy takes what is masked for values."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} takes plain arrays, got a masked one of shape {x.shape}. Pass "
            "x.compressed(), without what is masked; or x.filled(value), with an id "
            "that is padding in its place."
        )


def remedy_of(dtype: Any, remedy: str) -> str:
    """What to do with gradients that are not real: `remedy` with integers."""
    return _AS_REAL if jnp.issubdtype(dtype, jnp.complexfloating) else remedy


def is_bcoo(x: Any) -> bool:
    return isinstance(x, BCOO)


def is_leaf(x: Any) -> bool:
    """What counts as one gradient: an array, a BCOO, or `None`."""
    return x is None or isinstance(x, BCOO)


def leaves_like(treedef: Any, tree: Any, what: str, other: str) -> list[Any]:
    """The leaves of a tree, at those of another one.

    Raises:
      ValueError: If the tree does not have these leaves.
    """
    why = "a part of the tree stands where one leaf should"
    try:
        parts = list(treedef.flatten_up_to(tree))
        kinds = (jax.tree.structure(part, is_leaf=is_leaf) for part in parts)
        if all(map(jax.tree_util.treedef_is_leaf, kinds)):
            return parts
    except ValueError as error:  # JAX goes on with the values of an array
        why = str(error).split(", got ")[0].split("; value: ")[0]
    raise ValueError(
        f"{what} must have the tree structure of the {other}, {treedef}, got "
        f"{jax.tree.structure(tree, is_leaf=is_leaf)}: {why}"
    )


def new_rows_like(params: Any, ids: Any, rows: Any) -> list[Any]:
    """The leaves of rows at those of parameters, which stand where there are no ids."""
    try:
        rows = jax.tree.map(
            lambda x, param, new: param if x is None else new,
            *(ids, params, rows),
            is_leaf=lambda x: x is None,
        )
    finally:  # a wrong tree is refused in these words
        treedef = jax.tree.structure(params)
        leaves = leaves_like(treedef, rows, "The rows", "parameters")
    return leaves


def check_dense(grads: Any, name: str, call: str) -> None:
    """Raises `TypeError` if a leaf of the gradients is a BCOO."""
    if any(map(is_bcoo, jax.tree.leaves(grads, is_leaf=is_bcoo))):
        raise TypeError(
            f"{name} takes dense gradients, got a BCOO. Put it inside lazy: "
            f"optax_sparse_adam.lazy({call})."
        )


def check_bcoo(grad: BCOO, shape: tuple[int, ...] | None = None) -> BCOO:
    """Raises unless `grad` is a row-sparse gradient of a table of this shape.

    All faults but one are static, and are raised while tracing. Only a running program
    knows the values of a canary (see `canary`).

    Raises:
      TypeError: If the indices or the data have the wrong kind of type.
      ValueError: If the shape is not the table's, the layout is not row-sparse, or the
        indices are seen to have been changed.
    """
    check_indices(grad)
    if not jnp.issubdtype(grad.dtype, jnp.floating):
        raise TypeError(
            "A row-sparse gradient must have floating-point values, got "
            f"{grad.dtype} (shape {grad.shape}). Integer and complex tables cannot be "
            "trained. " + remedy_of(grad.dtype, "Leave integers out of the parameters.")
        )
    if grad.n_batch != 0 and grad.n_sparse >= 1:
        axes = "0" if grad.n_batch == 1 else str(tuple(range(grad.n_batch)))
        raise ValueError(
            "A row-sparse gradient must have n_batch == 0, got a batch of gradients, "
            f"as vmap makes it (n_batch == {grad.n_batch}, shape {grad.shape}). Add "
            f"them up: `g.sum({axes})` is one gradient with the entries of all; divide "
            "it by their number for the mean."
        )
    if grad.n_batch != 0 or grad.n_sparse < 1:
        raise ValueError(
            "A row-sparse gradient must have n_batch == 0 and n_sparse >= 1, got "
            f"n_batch == {grad.n_batch} and n_sparse == {grad.n_sparse} (shape "
            f"{grad.shape}). Use BCOO.update_layout(n_batch=0, n_dense=...) to convert."
        )
    stored = (grad.nse, *grad.shape[grad.n_sparse :])
    # Without a look at the values, which bags would expand.
    data_shape = grad.shape_of_data if isinstance(grad, CanaryBCOO) else grad.data.shape
    if data_shape != stored:
        raise ValueError(
            "A row-sparse gradient must hold one row of values for each index, each of "
            f"the shape of a table's row: values of shape {stored}, got "
            f"{data_shape} (nse == {stored[0]}, shape {grad.shape}). Whatever "
            "slices or reshapes the values must give the BCOO another shape."
        )
    if shape is not None and tuple(grad.shape) != tuple(shape):
        raise ValueError(
            "A row-sparse gradient must have the shape of its table, got a gradient of "
            f"shape {tuple(grad.shape)} for a table of shape {tuple(shape)}."
        )
    return grad
