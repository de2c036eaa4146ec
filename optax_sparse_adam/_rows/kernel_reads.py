"""Lookups by the kernel for CPUs: which types it takes is asked here, and only here.

Which gathers are such lookups, `_gradients/reading.py` says.
"""

import functools
from collections.abc import Callable

import jax

from ..native import _calls as native


def reader_of_rows(
    table: jax.Array, ids: jax.Array, stale: native.Stale | None = None
) -> Callable[[jax.Array, jax.Array, float | None], jax.Array] | None:
    """`native.look_up_rows`, or where rows are stale that of their values.

    `None` where XLA is to look these rows up.
    """

    def of_stale(table: jax.Array, ids: jax.Array, fill: float | None) -> jax.Array:
        assert stale is not None
        return native.look_up_stale_rows(table, stale, ids, fill)

    call = native.look_up_rows if stale is None else of_stale
    return call if native.supports_lookup(table, ids, stale) else None


def reader_of_bags(
    table: jax.Array, ids: jax.Array, num_bags: int
) -> Callable[..., jax.Array] | None:
    """`native.read_bags` of so many bags, or `None` where XLA is to look them up."""
    if not native.supports_lookup(table, ids, in_bags=True):
        return None
    return functools.partial(native.read_bags, num_bags)
