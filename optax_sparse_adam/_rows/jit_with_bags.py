"""`jax.jit` for functions of this package that take a gradient, and its bags with it.

To `jax.jit` of a user, as to any function of trees, a gradient of bags is one row of
values for each entry (see `bag_gradient`), and its bags are lost.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from .bag_gradient import BagEntries
from .canary import CanaryBCOO

T = TypeVar("T")


def jit_with_bags(function: Callable[..., T], **options: Any) -> Callable[..., T]:
    """`jax.jit`, to which a gradient of bags is its bags and what guards it."""

    @functools.partial(jax.jit, **options)
    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> T:
        return function(*map(_opened, args), **kwargs)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        result: T = compiled(*map(_closed, args), **kwargs)
        return result

    return call


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("bags", "canary", "guard"),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class _Bags:
    """What is kept of a gradient of bags."""

    bags: BagEntries
    canary: jax.Array
    guard: jax.Array
    layout: NamedSharding | None


def _closed(x: Any) -> Any:
    if isinstance(x, CanaryBCOO) and x.bags is not None:
        return _Bags(x.bags, x.canary, x.guard, x.layout)
    return x


def _opened(x: Any) -> Any:
    if isinstance(x, _Bags):
        grad = CanaryBCOO.of_bags(x.bags)
        grad.canary, grad.guard, grad.layout = x.canary, x.guard, x.layout
        return grad
    return x
