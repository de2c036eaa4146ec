"""What the tests of the routed exchange share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import optax_sparse_adam as osa

P = PartitionSpec


def make_mesh(sizes, names):
    number = int(np.prod(sizes))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, types, devices=jax.devices()[:number])


def on_mesh(mesh, in_specs, out_specs, check_vma=True):
    """A decorator: `jax.jit(jax.shard_map(...))`."""
    kwargs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}

    def decorator(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, **kwargs))

    return decorator


def exact(rng, shape):
    """Multiples of 1/32 below 1: sums of products are exact, in any order."""
    return (rng.integers(-31, 32, shape) / 32).astype(np.float32)


def weighted_loss(table, ids, weights, axis_name, **sizes):
    rows = osa.sharded_lookup(table, ids, axis_name, **sizes)
    return jnp.sum(rows * rows * weights), rows


def lookup_and_gradient(mesh, axis_name, check_vma=True, **sizes):
    """`(table, ids, weights) -> (rows, data, indices)`; indices in the whole table.

    The gradient is taken on each device; the rows of all of them lie side by side.
    """
    along = P(mesh.axis_names)

    def local(table, ids, weights):
        loss = partial(weighted_loss, axis_name=axis_name, **sizes)
        (_, rows), grad = osa.value_and_grad(loss, has_aux=True)(table, ids, weights)
        first = jax.lax.axis_index(axis_name) * len(table)
        inside = (grad.indices >= 0) & (grad.indices < len(table))
        return rows, grad.data, jnp.where(inside, grad.indices + first, -1)

    # With check_vma, gradients are sums over the axes over which the table is the same.
    shards = P(axis_name) if check_vma else along
    specs = (P(axis_name), along, along)
    return on_mesh(mesh, specs, (along, shards, shards), check_vma)(local)
