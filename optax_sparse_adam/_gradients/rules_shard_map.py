"""The rule of a walk for `shard_map`.

Each device looks rows up in its own part of the table. The deltas of all devices lie
side by side outside of the `shard_map`, along the mesh axes over which the rows vary,
and so do the row ids, which count from the first row of the whole table there. For a
table split by rows over two devices with 500 rows each:

    device   ids inside    ids outside    delta inside    delta outside
    0        [3, 7]        [3, 7]         [2, D]          [4, D], its rows 0 and 1
    1        [3, 0]        [503, 500]     [2, D]                  its rows 2 and 3

So a gradient needs no communication for its rows, whatever the batch is split by.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from .._jax_extras.sharding import first_row, mesh_axes, mesh_of, partitions_of
from .._jax_extras.varying_axes import vary
from .._rows.padding import in_bounds, row_bounds
from .backward_slice import as_closed
from .expressions import Expression, map_arrays
from .lookups import Promises
from .walk import Request, Results, Walk


def shard_map(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    params = eqn.params
    mesh, check_vma = params["mesh"], params["check_vma"]
    # Others may be manual already, by a shard_map around this one.
    manual = tuple(x for x in mesh.axis_names if x in params["newly_manual_axes"])
    body = as_closed(params["jaxpr"])
    invars: list[Any] = body.jaxpr.invars
    inner = [var.aval.shape for var in invars]
    triples = list(zip(args, params["in_specs"], inner, strict=True))
    leaves = _leaves(walk, eqn, args)
    # Inside, a table has the shape of the part that one device has.
    unknown = [
        dataclasses.replace(x, shape=shape) if isinstance(x, Expression) else None
        for x, _, shape in triples
    ]
    requests, results = walk.plan(body, unknown)
    walk.results_as_arrays(eqn, results)

    def axes_of(request: Request) -> tuple[str, ...]:
        return tuple(x for x in manual if x in request.axes or not check_vma)

    # With ids P("x") on a mesh of 4 x 2, axes "x" and "y", four batches are looked up,
    # and there are four deltas. Devices that differ in "y" only share one, and
    # `shard_map` adds their derivatives up. Without check_vma nothing says that rows
    # are equal along "y": then there are eight deltas, whose sum is the same.
    outer = [
        x._replace(
            shape=leaves[x.leaf.index][1],
            count=x.count * math.prod(mesh.shape[axis] for axis in axes_of(x)),
            axes=tuple(axis for axis in x.axes if axis not in manual),
            constant=None,
            promises=Promises(),
        )
        for x in requests
    ]
    deltas = walk.request(outer)
    if walk.is_plan:
        return [None] * len(eqn.outvars)
    # An expression enters as its arrays, and is built again of their parts inside.
    arrays = [_arrays(x, spec) for x, spec, _ in triples]
    row_specs = [PartitionSpec(axes_of(x)) for x in requests]
    whole = [leaf for leaf in walk.whole_deltas if leaf.index in leaves]
    whole_specs = [leaves[leaf.index][0] for leaf in whole]
    specs = ([specs for _, specs in arrays], row_specs, whole_specs)
    of_whole = [walk.whole_deltas[leaf] for leaf in whole]
    operands = ([x for x, _ in arrays], deltas, of_whole)
    if mesh_of(*deltas).explicit_axes:  # where layouts are types, which must fit
        operands = (operands[0], *jax.tree.map(jax.reshard, operands[1:], specs[1:]))

    def function(arrays: Any, deltas: Any, of_whole: Any) -> Any:
        values = [
            _with_arrays(x, shards, shape)
            for (x, _, shape), shards in zip(triples, arrays, strict=True)
        ]
        whole_deltas = dict(zip(whole, of_whole, strict=True))
        results, rows = walk.evaluate_inside(body, values, deltas, whole=whole_deltas)
        for i, request in enumerate(requests):
            spec, shape = leaves[request.leaf.index]
            ids = _global_ids(rows[i].ids, request, spec, shape)
            rows[i] = rows[i]._replace(ids=ids)
            if check_vma:
                cast = functools.partial(vary, axes=axes_of(request))
                rows[i] = jax.tree.map(cast, rows[i])
        return results, rows

    results, rows = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=(list(params["out_specs"]), row_specs),
        axis_names=set(manual),
        check_vma=check_vma,
    )(*operands)
    walk.entries += rows
    return list(results)


def _leaves(walk: Walk, eqn: JaxprEqn, args: Sequence[Any]) -> dict[int, Any]:
    """For the leaves that enter, by index: how each is split, and its whole shape."""
    leaves: dict[int, Any] = {}
    for x, spec in zip(args, eqn.params["in_specs"], strict=True):
        for leaf in x.leaves if isinstance(x, Expression) else ():
            # Ids of one table that is split in two ways count from two first rows.
            if leaves.setdefault(leaf.index, (spec, x.shape))[0] != spec:
                walk.as_array(eqn, x)
    for index, (spec, shape) in leaves.items():
        # With P(None, "x"), each device looks up some columns of a row. Their entries
        # side by side would be no rows of the table, so each device adds its columns to
        # its part of one delta of the table's shape.
        depth = walk.program.depths.get(index, len(shape))
        if walk.is_plan and any(map(mesh_axes, partitions_of(spec)[depth:])):
            walk.program.whole_leaves.add(index)
    return leaves


def _arrays(x: Any, spec: PartitionSpec) -> tuple[list[Any], list[PartitionSpec]]:
    """The arrays that an operand is computed from, and how they are split."""
    if not isinstance(x, Expression):
        return [x], [spec]
    arrays, specs = [], []

    # All operands of an elementwise function are split as its result is: those of
    # `tanh(t * c * 2)` are t and c by P("x", None), and 2 by P(). What exact Adam knows
    # of each row, `[rows]`, is split by P("x").
    def collect(array: Any, has_rows: bool) -> Any:
        arrays.append(array)
        ndim = jnp.ndim(array) if has_rows else 0
        layout = jax.typeof(array).sharding.spec
        specs.append(
            PartitionSpec(
                *partitions_of(spec)[:ndim], reduced=layout.reduced & spec.reduced
            )
        )
        return array

    map_arrays(x, collect)
    return arrays, specs


def _with_arrays(x: Any, arrays: list[Any], shape: tuple[int, ...]) -> Any:
    """The operand with the parts of its arrays that a device has."""
    rest = iter(arrays)
    if not isinstance(x, Expression):
        return next(rest)
    return map_arrays(x, lambda array, has_rows: next(rest), shape)


def _global_ids(
    ids: jax.Array, request: Request, spec: PartitionSpec, shape: tuple[int, ...]
) -> jax.Array:
    """The ids of this device's rows in the whole table; others stay out of bounds."""
    entries = (*partitions_of(spec), *[None] * request.depth)[: request.depth]
    shifts = [
        first_row(mesh_axes(entry), size, ids.dtype)
        for entry, size in zip(entries, request.shape, strict=False)
    ]
    valid = in_bounds(ids, request.shape)
    shifted = ids + jnp.stack(shifts)[None, :]
    return jnp.where(valid[:, None], shifted, row_bounds(shape, ids))
