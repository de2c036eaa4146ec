"""Gradients in errors of JAX and optax, which name them by their type."""

from typing import Any

from jax.experimental.sparse import BCOO

_BCOOType: Any = type(BCOO)


class NamedInErrors(_BCOOType):  # type: ignore[misc]
    """The type of a type that says what to do where an error names it.

    Problem: `optax.add_decayed_weights`, called by hand, raises "pytree structure
    error: different types at key path", and `optax.apply_if_finite` "cond branch
    outputs must have the same pytree structure". Cause: JAX compares trees of arrays,
    and nothing of this package is called. Remedy: both name the types of what they got,
    by their `repr`. Safe, because nobody computes with that; a tree's text has the name
    alone.
    Test: `test_errors_of_jax_say_what_to_do` in `tests/gradients/test_errors.py`.
    """

    def __repr__(cls) -> str:
        return (
            f"{super().__repr__()} (a row-sparse gradient or update, which functions "
            "of dense ones do not take: put optax.add_decayed_weights and the like "
            "inside optax_sparse_adam.lazy, in front of an exact_adam; give "
            "optax.apply_if_finite gradients that optax_sparse_adam.coalesce has "
            "returned)"
        )
