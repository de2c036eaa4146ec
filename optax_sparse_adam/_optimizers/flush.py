"""Brings all rows of a table up to date."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._rows.coalesce import accumulator_dtype
from .._rows.resting_rows import ExactAdamState, RowState, Whole, move_rows, rows_now


def _is_exact(node):
    return isinstance(node, ExactAdamState)


def flush(params, state):
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_exact)
    leaves, ptree = jax.tree.flatten(params)
    for n, node in enumerate(nodes):
        if not _is_exact(node):
            continue
        cols = [ptree.flatten_up_to(x) for x in node[1:6]]
        for i, (mu, nu, last, dec, whole) in enumerate(zip(*cols)):
            if not hasattr(mu, "dtype"):
                continue
            dtype = accumulator_dtype(mu.dtype, nu.dtype, leaves[i].dtype)
            rows = RowState(mu.astype(dtype), nu.astype(dtype), last, dec)
            moved = move_rows(rows, whole, node.shared, node.count)
            leaves[i] = rows_now(leaves[i], moved)
            cols[0][i] = moved.mu.astype(mu.dtype)
            cols[1][i] = moved.nu.astype(nu.dtype)
            cols[2][i] = jnp.full_like(last, node.count)
            cols[3][i] = tuple(jnp.broadcast_to(x.astype(d.dtype), last.shape) for x, d in zip(node.shared.log_decay, dec))
            cols[4][i] = Whole(node.count, jnp.zeros_like(whole.way))
        nodes[n] = ExactAdamState(node.count, *map(ptree.unflatten, cols), node.shared)
    return ptree.unflatten(leaves), treedef.unflatten(nodes)
