"""Checks of what is to be differentiated, with the way out for models of libraries.

Flax and Equinox are never imported here: who passes an object of theirs has done that.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import valid_jaxtype

_NNX = (
    "Use `optax_sparse_adam.flax_nnx.value_and_grad` without `graph=False`, which does "
    "what `nnx.value_and_grad` does; or split the module by `graph, params, rest = "
    "nnx.split(model, nnx.Param, ...)` and differentiate `params`."
)
_EQUINOX = (
    "With Equinox, split the model by `params, static = eqx.partition(model, "
    "eqx.is_inexact_array)`, differentiate `params`, and call `eqx.combine(params, "
    "static)` in the loss."
)
_OTHER = "Let the loss take it by another argument, or close over it."


def check_argnums(argnums: Any) -> None:
    """Refuses `nnx.DiffState`; what else is wrong JAX says."""
    for argnum in argnums if isinstance(argnums, Sequence) else (argnums,):
        if _is(argnum, "flax.nnx", "DiffState"):
            raise TypeError(
                "`argnums` must be an integer or a sequence of integers, got "
                f"{argnum!r}. `optax_sparse_adam.flax_nnx.value_and_grad` takes "
                "`nnx.DiffState`."
            )


def check_modules(tree: Any) -> None:
    """Refuses modules with more than parameters."""
    for path, module in _nodes(tree, "flax.nnx", "Pytree"):
        for inner, variable in _nodes(module, "flax.nnx", "Variable"):
            if not _is(variable, "flax.nnx", "Param"):
                raise TypeError(
                    "`value_and_grad` takes NNX modules that hold `nnx.Param`s only, "
                    "and would lose what the loss does to other variables. "
                    f"{leaf_name((*path, *inner))} is of the type "
                    f"`{type(variable).__name__}`. {_NNX}"
                )


def check_leaves(tree: Any, *, allow_int: bool = False) -> None:
    """Refuses leaves without a gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        what = f"of the type `{type(leaf).__name__}`"
        if isinstance(leaf, np.ndarray):  # of texts, or of another order of bytes
            what += f" of {leaf.dtype}"
        if is_mutable_variable(leaf):
            raise TypeError(
                f"{leaf_name(path)} is a mutable variable of Flax (`hijax=True`), of "
                "which JAX makes no gradient. Differentiate ordinary ones, "
                "`nnx.with_vars(params, hijax=False)`, of the `params` of `nnx.split("
                "model, nnx.Param, ...)`. What the loss does to all others stays."
            )
        if valid_jaxtype(leaf):
            aval = jax.typeof(leaf)
            # A value of another type, such as one of `jax.experimental.hijax`, is an
            # argument of what JAX differentiates, which may refuse it; a mutable array
            # it would refuse in words of its own transpose.
            is_ref = isinstance(leaf, jax.Ref)
            if not isinstance(aval, ShapedArray) and not is_ref:
                continue
            is_inexact = not is_ref and jnp.issubdtype(aval.dtype, jnp.inexact)
            if is_inexact or (allow_int and not is_ref):
                continue
            what = f"`{aval.str_short()}`"
        remedy = _NNX if _nodes(tree, "flax.nnx", "Pytree") else _OTHER
        remedy = _EQUINOX if _nodes(tree, "equinox", "Module") else remedy
        if _is(leaf, "optax_sparse_adam.torch_compat", "Parameter"):
            remedy = "Give its `data`, as in loss_and_grad(table.data, ids)."
        raise TypeError(
            "`value_and_grad` differentiates arrays and numbers that are real or "
            f"complex; {leaf_name(path)} is {what}. {remedy}"
        )


def refuse_new_state(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, or an error where it adds to an NNX module what nobody would see.

    JAX differentiates a copy of the module, and drops it with all that is new in it,
    such as what `sow` stores.
    """

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        modules = [x for _, x in _nodes((args, kwargs), "flax.nnx", "Pytree")]
        structures: list[Any] = [jax.tree.structure(x) for x in modules]
        out = fun(*args, **kwargs)
        for module, structure in zip(modules, structures, strict=True):
            if structure != jax.tree.structure(module):
                raise TypeError(
                    "`value_and_grad` takes NNX modules whose variables and attributes "
                    "stay the same in the loss, and would lose what this loss does to "
                    f"a `{type(module).__name__}`. {_NNX}"
                )
        return out

    return checked


def leaf_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path) or "the differentiated argument"


def is_mutable_variable(x: Any) -> bool:
    """Whether it is a variable of Flax of a type that JAX calls hijax."""
    return _is(x, "flax.nnx.variablelib", "HijaxVariable")


def _is(x: Any, library: str, name: str) -> bool:
    """`isinstance(x, library.name)`, `False` where the library is not imported."""
    return isinstance(x, getattr(sys.modules.get(library), name, ()))


def _nodes(tree: Any, library: str, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    def is_leaf(x: Any) -> bool:
        return _is(x, library, name)

    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(path, x) for path, x in pairs if is_leaf(x)]
