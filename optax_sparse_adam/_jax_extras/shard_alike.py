"""Lays an array out as another one is, over Auto mesh axes.

Problem: the state of a table must lie on a mesh as the table does. Cause: only the
partitioner knows how an array lies over Auto axes; no Python value tells. Remedy:
Shardy's `sdy.sharding_group`, which gives the members of a group one layout. JAX had
`jax.experimental.shard_alike` for it up to 0.10, and has no function since 0.11, so
this is a primitive of our own (https://docs.jax.dev/en/latest/jax-primitives.html). It
is safe: its value is its operand. Test: `tests/collectives/test_sharded_init.py`.
"""

import functools
import itertools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir

# JAX's own shard_alike, in versions that have it, counts its groups from 0.
_groups = itertools.count(2**32)

_shard_alike_p = Primitive("shard_alike_to")


def shard_alike(like: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x`, laid out as `like`, an array of the same shape, is.

    Source: https://openxla.org/shardy/sdy_dialect#sdysharding_group_sdyshardinggroupop
    """
    # JAX lowers equal equations once. The group id makes them differ; otherwise all
    # parameters of one shape would be in one group.
    return _shard_alike_p.bind(like, x, group=next(_groups))


def _impl(like: jax.Array, x: jax.Array, **params: Any) -> jax.Array:
    # Without `jit`, `bind` would call this function again, without an end.
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_shard_alike_p.bind, **params))(like, x)


def _lower(context: mlir.LoweringRuleContext, like: Any, x: Any, *, group: int) -> Any:
    config: Any = jax.config
    # GSPMD, the partitioner before Shardy, has no such operation.
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
