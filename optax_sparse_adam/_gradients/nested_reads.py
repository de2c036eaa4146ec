"""Gradients and values that a loss takes in itself, by the state that it is read by.

A gradient penalty, or a score of a model in its own loss:

    def loss(table):  # is read up to date by the call around it
        inner = osa.grad(score, read=state)(table)
        return score(table) + jnp.sum(inner.data ** 2)

    grad = osa.grad(loss, read=state)(table)

The outer call evaluates the program of `loss` with rows that are up to date, so what
the loss itself reads is, too: brought up to date once more it would move on. So an
argument of the loss is read as it is. What is computed of it, as `2 * table`, cannot be
told from another table, and is refused where it is read by the same state.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._rows.stale import contains_stale


class _Reading(NamedTuple):
    """What a loss that is being traced is given, inside and outside of it."""

    inside: Sequence[Any]
    outside: Sequence[Any]
    state: set[int]


class _Readings(threading.local):
    now: tuple[_Reading, ...] = ()


_READINGS = _Readings()


@contextlib.contextmanager
def reading(inside: Any, outside: Any, read: Any) -> Iterator[None]:
    """While a function of these arguments is traced, which is read by this state."""
    if read is None or not contains_stale(read):
        yield
        return
    before = _READINGS.now
    leaves = jax.tree.leaves(inside), jax.tree.leaves(outside)
    _READINGS.now = (*before, _Reading(*leaves, _arrays(read)))
    try:
        yield
    finally:
        _READINGS.now = before


def is_read_around(leaf: Any, read: Any) -> bool:
    """Whether a leaf is brought up to date by a call around this one.

    Raises:
      ValueError: If it is computed from what is, as far as that is seen.
    """
    for around in _READINGS.now:
        if any(leaf is x for x in around.inside):
            return True
        is_same = isinstance(leaf, jax.core.Tracer) and around.state & _arrays(read)
        if is_same and not any(leaf is x for x in around.outside):
            raise ValueError(
                "A loss that is read by a state takes gradients and values in itself "
                "of its own argument, whose rows are up to date there; got `read` of "
                "the same state for an array that was computed in the loss. Leave "
                "`read` out there."
            )
    return False


def _arrays(tree: Any) -> set[int]:
    leaves = jax.tree.leaves(tree)
    return {id(x) for x in leaves if isinstance(x, jax.Array | np.ndarray)}
