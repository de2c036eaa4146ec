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

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from .._jax_extras.sharding import first_row, mesh_of
from .._jax_extras.varying_axes import vary
from .._rows.padding import in_bounds, row_bounds
from .backward_slice import as_closed
from .expressions import (
    Expression,
    StaleTable,
    arrays_of,
    expressions_below,
    with_arrays,
)
from .rules_calls import without_tables
from .walk import BagEntries, Request, Results, Walk


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def shard_map(walk: Walk, eqn: JaxprEqn, needed: Any, *args: Any) -> Results:
    params = eqn.params
    mesh, check_vma = params["mesh"], params["check_vma"]
    manual = tuple(x for x in mesh.axis_names if x in params["newly_manual_axes"])
    body = as_closed(params["jaxpr"])
    tables = [i for i, x in enumerate(args) if isinstance(x, Expression)]
    below, specs, shapes = _split(eqn, [args[i] for i in tables], tables)

    def values(arrays: Any, plain: Any) -> list[Any]:
        local = with_arrays(below, arrays, lambda x: shapes[x])
        rest = iter(plain)
        return [local[x] if isinstance(x, Expression) else next(rest) for x in args]

    # JAX cannot say over which axes columns vary without check_vma, and rows of which
    # each device has some columns are no rows of the table.
    depths = walk.program.depths
    by_leaf = {leaf.index: specs[args[i]] for i in tables for leaf in args[i].leaves}
    whole = frozenset(
        i
        for i, spec in by_leaf.items()
        if any(map(_mesh_axes, spec[depths.get(i, 1) :]))
    )
    local_shapes = frozenset(shapes[args[i]] for i in tables)
    unknown = values([arrays_of(x) for x in below], [None] * (len(args) - len(tables)))
    requests, results = walk.plan(body, unknown, needed, local_shapes, whole)
    without_tables(walk, eqn, needed, results)

    def axes_of(request: Request) -> tuple[str, ...]:
        axes = request.axes if check_vma else manual
        return tuple(x for x in manual if x in axes)

    outer, delta_specs = [], []
    for request in requests:
        axes, spec = axes_of(request), by_leaf[request.leaf.index]
        size = math.prod(mesh.shape[x] for x in axes)
        global_shape = tuple(
            n * math.prod(mesh.shape[x] for x in _mesh_axes(entry))
            for n, entry in zip(
                request.shape, (*spec, *[None] * len(request.shape)), strict=False
            )
        )
        outer.append(
            request._replace(
                shape=global_shape,
                count=size * request.count,
                axes=tuple(x for x in request.axes if x not in manual),
                constant=None,
            )
        )
        delta_specs.append(spec if request.is_whole else PartitionSpec(axes))
    deltas = walk.request(outer)
    if walk.is_plan:
        return [None] * len(eqn.outvars)
    if mesh_of(*deltas).explicit_axes:
        deltas = list(map(jax.reshard, deltas, delta_specs))

    def function(arrays: Any, plain: Any, deltas: Any) -> Any:
        inner = walk.inside(deltas, local_shapes, whole)
        results = inner.evaluate(body, values(arrays, plain), needed)
        rows = []
        for request, own, ids in zip(requests, outer, inner.rows, strict=True):
            spec = by_leaf[request.leaf.index]
            if isinstance(ids, BagEntries):
                own_ids = _global_ids(ids.ids, request, spec, own.shape)
                ids = ids._replace(ids=own_ids)
            else:
                ids = _global_ids(ids, request, spec, own.shape)
            if check_vma:
                cast = functools.partial(vary, axes=axes_of(request))
                ids = jax.tree.map(cast, ids)
            rows.append(ids)
        return [inner.dense(x) for x in results], rows

    plain = [x for x in args if not isinstance(x, Expression)]
    plain_specs = [
        spec
        for x, spec in zip(args, params["in_specs"], strict=True)
        if not isinstance(x, Expression)
    ]
    results, rows = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=([_specs_of(x, specs[x]) for x in below], plain_specs, delta_specs),
        out_specs=(
            list(params["out_specs"]),
            [PartitionSpec(axes_of(x)) for x in requests],
        ),
        axis_names=set(manual),
        check_vma=check_vma,
    )([arrays_of(x) for x in below], plain, deltas)
    walk.rows += rows
    return list(results)


def _split(
    eqn: JaxprEqn, args: list[Expression], places: list[int]
) -> tuple[list[Expression], dict[Any, PartitionSpec], dict[Any, Any]]:
    """What tables are computed of, how it is split, and the shapes of the parts.

    All operands of an elementwise function are split as its result is.
    """
    specs: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}
    inner: list[Any] = eqn.params["jaxpr"].invars
    for value, place in zip(args, places, strict=True):
        for x in expressions_below([value]):
            specs.setdefault(x, eqn.params["in_specs"][place])
            shapes.setdefault(x, inner[place].aval.shape)
    return expressions_below(args), specs, shapes


def _specs_of(value: Expression, spec: PartitionSpec) -> Any:
    """How the arrays of one expression lie: as the table does, scalars everywhere."""

    def of(x: Any) -> PartitionSpec:
        return PartitionSpec(*spec[: jnp.ndim(x)])

    if isinstance(value.source, StaleTable):
        everywhere = jax.tree.map(lambda _: PartitionSpec(), value.source)
        rows = jax.tree.map(of, value.source.rows)
        return everywhere._replace(array=spec, rows=rows)
    return jax.tree.map(of, arrays_of(value))


def _global_ids(
    ids: jax.Array, request: Request, spec: PartitionSpec, shape: tuple[int, ...]
) -> jax.Array:
    """The ids of this device's rows in the whole table."""
    entries = (*spec, *[None] * request.depth)[: request.depth]
    shifts = [
        first_row(_mesh_axes(entry), size, ids.dtype)
        for entry, size in zip(entries, request.shape, strict=False)
    ]
    valid = in_bounds(ids, request.shape)
    shifted = ids + jnp.stack(shifts)[None, :]
    return jnp.where(valid[:, None], shifted, row_bounds(shape, ids))
