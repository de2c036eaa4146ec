"""Brings all rows of a table up to date."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._rows.map_rows import Tables, map_all_rows
from .._rows.resting_rows import (
    Constants,
    RowState,
    Whole,
    compute_type,
    exact_states,
    held_by,
    is_exact,
    move_rows,
    replace_held,
    rows_now,
    stamp,
)
from .exact_schedule import hold_values

Params = TypeVar("Params")
State = TypeVar("State")


def _flush_rows(
    tables: Tables, _: Tables, whole: Whole, constants: Constants, count: jax.Array
) -> Tables:
    param, mu, nu, last, *decays = tables
    rows = RowState(mu, nu, last, tuple(decays))
    dtype = compute_type(param, rows)
    rows = rows._replace(mu=mu.astype(dtype), nu=nu.astype(dtype))
    moved = move_rows(rows, whole, constants, count)
    last, log_decay = stamp(rows, whole, count)
    moments = moved.mu.astype(mu.dtype), moved.nu.astype(nu.dtype)
    return rows_now(param, moved), *moments, last, *log_decay


@jax.jit
def _flush(
    param: jax.Array,
    rows: RowState,
    whole: Whole,
    constants: Constants,
    count: jax.Array,
) -> tuple[jax.Array, RowState, Whole]:
    tables = (param, rows.mu, rows.nu, rows.last, *rows.log_decay)
    tables = map_all_rows(_flush_rows, tables, whole, constants, count)
    param, mu, nu, last, *decays = tables
    rows = RowState(mu, nu, last, tuple(decays))
    return param, rows, hold_values(whole, count)


def flush(params: Params, state: State) -> tuple[Params, State]:
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    nodes, structure = exact_states(state, "flush")
    for n, node in enumerate(nodes):
        if not is_exact(node):
            continue
        parts = held_by(node, leaves, treedef)
        for i, (rows, whole) in parts.items():
            args = rows, whole, node.constants, node.count
            leaves[i], *parts[i] = _flush(jnp.asarray(leaves[i]), *args)
        nodes[n] = replace_held(node, treedef, parts)
    return treedef.unflatten(leaves), structure.unflatten(nodes)
