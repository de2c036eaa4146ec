"""The optimisers that can be measured, by name."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_sparse_adam as osa

from .._command_line import InputError

RATE = 1e-3
_LIFTS: dict[str, Callable[..., Any]] = {
    "lazy_": osa.lazy,
    "per_row_": lambda inner: osa.lazy(osa.per_row(inner)),
}


def _is_optimizer(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    return next(iter(inspect.signature(function).parameters), "") == "learning_rate"


def optimizer_names() -> list[str]:
    """The public optimisers of this package: those that take a learning rate first."""
    return [name for name, value in vars(osa).items() if _is_optimizer(value)]


def make_optimizer(name: str) -> optax.GradientTransformationExtraArgs:
    """Makes an optimiser: one of ours, or `lazy_X` or `per_row_X` of optax's X.

    Raises:
      InputError: If there is none of this name, or it cannot be row-sparse.
    """
    if name in optimizer_names():
        return getattr(osa, name)(RATE)
    for prefix, lift in _LIFTS.items():
        inner: Any = getattr(optax, name.removeprefix(prefix), None)
        if name.startswith(prefix) and _is_optimizer(inner):
            return _checked(name, lift(inner(RATE)))
    raise InputError(
        f"--optimizer must be one of {', '.join(optimizer_names())}, or lazy_X or "
        f"per_row_X with an optimizer X of optax, got {name!r}; lazy_adam is "
        "osa.lazy(optax.adam)"
    )


def _checked(name: str, tx: Any) -> Any:
    try:
        jax.eval_shape(tx.init, jax.ShapeDtypeStruct((4, 2), jnp.float32))
    except ValueError as error:
        raise InputError(
            f"--optimizer must work on some rows of a table, got {name!r}: {error}"
        ) from None
    return tx
