"""Several processes that do one thing: all of them, or none.

What one of them cannot do alone, such as to write its part of a checkpoint, is known to
all before any goes on. With one process nothing is sent.
"""

import contextlib
import uuid
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextlib.contextmanager
def together(function: str) -> Iterator[None]:
    """Raises in all processes if one of them raises; what is inside sends nothing.

    Args:
      function: What the user called, for errors.

    Raises:
      RuntimeError: In the other processes.
    """
    if jax.process_count() == 1:
        yield
        return
    error = None
    try:
        yield
    except Exception as exception:
        error = exception
    has_failed = multihost_utils.process_allgather(np.array(error is not None))
    if error is not None:
        raise error
    if has_failed.any():
        raise RuntimeError(
            f"{function} has raised in the processes {np.flatnonzero(has_failed)} of "
            f"{jax.process_count()}, and was given up in all of them. What is to be "
            "done is in the errors of those."
        )


def new_name() -> str:
    """A name that no other checkpoint has, the same in all processes."""
    drawn = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    if jax.process_count() == 1:
        return drawn.tobytes().hex()
    return np.asarray(multihost_utils.broadcast_one_to_all(drawn)).tobytes().hex()
