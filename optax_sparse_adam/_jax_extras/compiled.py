"""Formulas that are one program also where they are called outside of one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax


def compiled(
    function: Callable[..., Any], static_argnames: Sequence[str] = ()
) -> Callable[..., Any]:
    """`function`, which outside of a program is compiled as a whole.

    Problem: a first read of stale rows outside of a program takes seconds. Cause: JAX
    compiles each operation on its own, for each shape and type. Remedy: one `jax.jit`.
    Safe, as it holds no arrays, donates none, and inside of a program, or under
    `jax.disable_jit`, is the function itself. Test: `test_few_programs` in
    `tests/optimizers/test_exact_adam_eager.py`.
    """
    program = jax.jit(function, static_argnames=static_argnames, inline=True)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        return (function if is_traced else program)(*args, **kwargs)

    return call
