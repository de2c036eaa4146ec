"""An operation that has an array laid out as another one is, over Auto mesh axes.

How an array lies over Auto axes is known to the partitioner only, so that it must be
told: by Shardy's `sdy.sharding_group`. JAX had `jax.experimental.shard_alike` for it up
to 0.10, and has no function for it since 0.11. Here it is written with what JAX offers
for new primitives (https://docs.jax.dev/en/latest/jax-primitives.html).
"""

import functools
import itertools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir

# Far from the numbers that JAX's own shard_alike, where there is one, gives its groups.
_groups = itertools.count(2**32)

_shard_alike_p = Primitive("shard_alike_to")


def shard_alike(like: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x`, laid out as `like`, an array of the same shape, is.

    Source: https://openxla.org/shardy/sdy_dialect#sdysharding_group_sdyshardinggroupop
    """
    # The number is a parameter: JAX lowers equal equations once, and then these would
    # all be of one group.
    return _shard_alike_p.bind(like, x, group=next(_groups))


def _impl(like: jax.Array, x: jax.Array, **params: Any) -> jax.Array:
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_shard_alike_p.bind, **params))(like, x)


def _lower(context: mlir.LoweringRuleContext, like: Any, x: Any, *, group: int) -> Any:
    config: Any = jax.config
    # The partitioner before Shardy, which JAX gives up, has no such operation.
    if config.jax_use_shardy_partitioner:
        sdy.sharding_group(like, group)
        sdy.sharding_group(x, group)
    return [x]


def _batch(arrays: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    (size,) = {x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None}
    first = [
        batching.bdim_at_front(x, axis, size)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    return _shard_alike_p.bind(*first, **params), 0


_shard_alike_p.def_impl(_impl)
_shard_alike_p.def_abstract_eval(lambda like, x, **params: x)
mlir.register_lowering(_shard_alike_p, _lower)
batching.primitive_batchers[_shard_alike_p] = _batch
ad.defjvp(_shard_alike_p, None, lambda tangent, *primals, **params: tangent)
