"""The rules of the interpreter for `shard_map` and for sums over its axes.

The rows of all devices leave `shard_map` side by side, so a sum of rows over devices
needs no communication there: it is the rows of all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from .._jax_extras.sharding import first_row
from .._rows.gather_scatter import in_bounds, row_bounds
from .interpreter import Blame, Context, Results, Verdict
from .symbolic_values import Deferred, Part, RowSum, dense, padded, table


def psum(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Leaves the sum over devices to whoever takes the rows of all of them."""
    axes = frozenset(eqn.params["axes"])
    if eqn.params.get("axis_index_groups") is not None:
        return NotImplemented
    if not all(isinstance(x, RowSum) and x.is_plain and x.parts for x in args):
        return NotImplemented
    return [RowSum(x.shape, x.dtype, x.parts, axes=axes) for x in args]


class _Layouts(Exception):
    """Raised with the layouts of the results, once a first trace has found them."""


def shard_map(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Gives the rows of all devices their ids in the whole table."""
    params, outer = eqn.params, list[Any](eqn.outvars)
    body = ClosedJaxpr(params["jaxpr"], ())
    is_table = [isinstance(arg, Deferred) and arg.is_table for arg in args]
    inner = list[Any](body.jaxpr.invars + body.jaxpr.outvars)
    concerned = [*is_table, *map(context.is_table, outer)]
    local_shapes = [x.aval.shape for x, c in zip(inner, concerned, strict=True) if c]
    local = context._replace(shapes=frozenset(local_shapes))

    def run(finish: Callable[[list[Any]], Any], out_specs: Any) -> Any:
        def function(*arrays: jax.Array) -> Any:
            pairs = zip(arrays, is_table, strict=True)
            return finish(
                local.evaluate(body, [table(x) if t else x for x, t in pairs])
            )

        return jax.shard_map(
            function,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=out_specs,
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*map(dense, args))

    def look(results: list[Any]) -> Any:
        raise _Layouts([*map(_layout, results, params["out_specs"])])

    def finish(results: list[Any]) -> list[Any]:
        return [
            dense(value) if axes is None else _global_rows(value, spec, var.aval.shape)
            for value, axes, spec, var in zip(
                results, layouts, params["out_specs"], outer, strict=True
            )
        ]

    layouts: list[tuple[str, ...] | None] = []
    try:
        run(look, params["out_specs"])
    except _Layouts as error:
        (layouts,) = error.args
    specs = [
        spec if axes is None else PartitionSpec(axes)
        for spec, axes in zip(params["out_specs"], layouts, strict=True)
    ]
    return [
        value
        if axes is None
        else RowSum(var.aval.shape, var.aval.dtype, (Part(*value),))
        for value, axes, var in zip(run(finish, specs), layouts, outer, strict=True)
    ]


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _layout(value: Any, spec: PartitionSpec) -> tuple[str, ...] | None:
    """The mesh axes along which the devices' rows are laid side by side.

    `None` for what leaves as an array.
    """
    if not isinstance(value, RowSum) or value.carry is not None:
        return None
    if any(_mesh_axes(entry) for entry in spec[value.depth :]):
        return None
    shards = [axis for entry in spec for axis in _mesh_axes(entry)]
    return (*sorted(value.axes), *shards)


def _global_rows(
    value: RowSum, spec: PartitionSpec, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The rows of this device with their ids in the whole table."""
    part = padded(value, value.number, value.depth)
    indices = part.indices
    valid = in_bounds(indices, value.shape)
    entries = (*spec, *[None] * value.depth)[: value.depth]
    shifts = [
        first_row(_mesh_axes(entry), size, indices.dtype)
        for entry, size in zip(entries, value.shape, strict=False)
    ]
    shifted = indices + jnp.stack(shifts)[None, :]
    return jnp.where(valid[:, None], shifted, row_bounds(shape, indices)), part.data


def judge(
    context: Context, eqn: JaxprEqn, verdict_of: Callable[[Any], Verdict]
) -> Sequence[Verdict]:
    jaxpr = eqn.params["jaxpr"]
    outer: list[Any] = list(eqn.outvars)
    shapes = [
        inner.aval.shape
        for inner, var in zip(jaxpr.outvars, outer, strict=True)
        if context.is_table(var)
    ]
    local = context._replace(shapes=frozenset(shapes))
    results = local.judge(jaxpr, [verdict_of(atom) for atom in eqn.invars])
    return [
        verdict if context.is_table(var) else Blame(eqn)
        for verdict, var in zip(results, outer, strict=True)
    ]
