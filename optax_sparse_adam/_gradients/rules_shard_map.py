"""The rules of the interpreter for `shard_map` and for sums over its axes.

The rows of all devices leave `shard_map` side by side, so a sum of rows over devices
needs no communication there: it is the rows of all of them. Anything before that may
differ by device, such as a factor, gets the sum: each device gathers the rows of all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from .._jax_extras.sharding import first_row
from .._rows.padding import in_bounds, row_bounds
from .analysis import Analysis, Obstacle, Obstacles, Rule
from .interpreter import Context, Results
from .symbolic_values import (
    Deferred,
    Origin,
    Part,
    RowSum,
    all_gather_parts,
    padded,
    vary_parts,
)


def psum(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Sums nothing yet: `RowSum.axes` names the mesh axes to sum over.

    `all_gather_parts` or `RowSum.dense` do so later, before anything that may differ by
    device. With `check_vma`, a `pvary` comes before that. Without it nothing tells, so
    the rows of all devices are gathered at once.
    """
    axes = frozenset(eqn.params["axes"])
    if eqn.params.get("axis_index_groups") is not None:
        return NotImplemented
    if not all(isinstance(x, RowSum) and x.is_plain and x.parts for x in args):
        return NotImplemented
    varying = (vary_parts(x, tuple(axes)) for x in args)
    sums = [RowSum(x.shape, x.dtype, x.parts, axes=axes) for x in varying]
    if eqn.primitive.name == "psum_invariant":
        return sums
    return [all_gather_parts(x, to="varying") for x in sums]


def _shard_map(context: Context, eqn: JaxprEqn, *args: Any) -> Results:
    """Gives the rows of all devices their ids in the whole table."""
    if not context.passes_table(eqn, args):
        return NotImplemented
    params, outer = eqn.params, list[Any](eqn.outvars)
    body = ClosedJaxpr(params["jaxpr"], ())
    wanted = context.wanted(eqn)
    origins = [arg.origin if isinstance(arg, Deferred) else None for arg in args]
    pairs = zip(body.jaxpr.invars, origins, strict=True)
    shapes = frozenset(var.aval.shape for var, origin in pairs if origin is not None)
    arrays = [
        context.dense(arg) if origin is None else origin.arrays
        for arg, origin in zip(args, origins, strict=True)
    ]
    in_specs = tuple(
        spec if origin is None else _specs_of_state(origin, spec)
        for spec, origin in zip(params["in_specs"], origins, strict=True)
    )

    def run(finish: Callable[..., list[Any]], out_specs: Any) -> Any:
        def function(*arrays: Any) -> Any:
            inner = context.in_new_trace()._replace(shapes=shapes)
            pairs = zip(arrays, origins, strict=True)
            values = [x if own is None else own.make(*x) for x, own in pairs]
            return tuple(finish(inner, inner.evaluate(body, values, wanted)))

        return jax.shard_map(
            function,
            mesh=params["mesh"],
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*arrays)

    layouts: list[tuple[str, ...] | None] = []

    def find_layouts(inner: Context, results: list[Any]) -> list[Any]:
        rules = zip(results, wanted, params["out_specs"], strict=True)
        layouts[:] = [_layout(x, spec) if want else None for x, want, spec in rules]
        return list(map(inner.dense, results))

    def finish(inner: Context, results: list[Any]) -> list[Any]:
        return [
            inner.dense(value)
            if axes is None
            else _global_rows(value, spec, var.aval.shape)
            for value, axes, spec, var in zip(
                results, layouts, params["out_specs"], outer, strict=True
            )
        ]

    # The arrays that rows leave as, and their specs, are known after a first trace.
    jax.eval_shape(lambda: run(find_layouts, params["out_specs"]))
    specs = tuple(
        spec if axes is None else PartitionSpec(axes)
        for spec, axes in zip(params["out_specs"], layouts, strict=True)
    )
    return [
        value
        if axes is None
        else RowSum(var.aval.shape, var.aval.dtype, (Part(*value),))
        for value, axes, var in zip(run(finish, specs), layouts, outer, strict=True)
    ]


def _specs_of_state(origin: Origin, spec: PartitionSpec) -> Any:
    """How the arrays of a value lie: what has rows as they do, numbers everywhere."""
    rows, numbers = origin.arrays[:2], origin.arrays[2:]
    of_rows = jax.tree.map(lambda x: PartitionSpec(*spec[: x.ndim]), rows)
    return (*of_rows, *jax.tree.map(lambda _: PartitionSpec(), numbers))


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
    if not value.axes.isdisjoint(shards):  # each device's copy of one sum
        return None
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


def _demand(
    analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool]
) -> Sequence[bool]:
    return [False] * len(eqn.invars)  # sums of rows are made inside


def _obstacles(
    analysis: Analysis, eqn: JaxprEqn, wanted: Sequence[bool], operands: Obstacles
) -> Obstacles:
    outside = [Obstacle(eqn)] * len(operands)
    return analysis.obstacles(eqn.params["jaxpr"], wanted, outside)


SHARD_MAP = Rule(_shard_map, _demand, _obstacles)
