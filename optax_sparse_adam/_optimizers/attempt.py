"""Functions of the user that are called to see what they take."""

from collections.abc import Callable
from typing import Any


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """The result of `function(*args)`, or what it has raised in its place.

    The one place that goes on after whatever was raised. Problem: a transformation
    takes row-sparse gradients, or only those whose rows occur once, or dense ones; or
    it does other things to a whole table than to some rows. Cause: in optax it is two
    functions, and nothing but a call tells what they take, nor what they raise if they
    do not take it. Remedy: each form is traced, apart from the program in which this is
    called, and what is raised is returned. Safe, as nothing of a trace that fails stays
    there, and no exception is lost: whoever asks raises it, unless another form serves.
    Test: `tests/gradients/test_wrappers.py` and `tests/optimizers/test_lazy_sizes.py`.
    """
    try:
        return function(*args), None
    except Exception as error:
        return None, error
