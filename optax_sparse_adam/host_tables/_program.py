"""A compiled function that an interrupt does not spoil."""

from collections.abc import Callable
from typing import Any


class Program:
    """Calls what JAX has compiled, and makes it again after a call that did not return.

    Problem: after an interrupt each call took half a second, or raised RecursionError.
    Cause: what is interrupted while JAX lowers it is lowered and compiled in all calls
    from then on, or found to be in the middle of it. Remedy: a program is kept while
    its calls return. Safe: the next call makes another one. Test:
    `test_programs_that_are_interrupted_when_they_begin` in
    `tests/host_tables/test_loaders.py`.

    Args:
      make: Compiles a function that JAX has not seen before.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]]):
        self._make = make
        self._program: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        program, self._program = self._program or self._make(), None
        result = program(*args)
        self._program = program
        return result
