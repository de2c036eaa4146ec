"""The loss on the rows of a batch, and which rows these are: walks over its program.

A walk (`_gradients.walk`) evaluates the loss with an `Expression` in the place of each
table. Here it has the shape of the whole table and an array of K of its rows, and each
lookup reads the row `i` at its place among these:

    loss         table[ids]                        ids [7, 900, 7], 1,000 rows
    compact      rows[searchsorted(unique, ids)]   unique [7, 900, 1000]; [0, 1, 0]

`unique` is sorted, so places are in the order of the rows: duplicates add up in the
order in which they do in memory, to the same bits. The compact loss is a function like
others, which `value_and_grad`, `make_train_step` and `evaluate` take.

The same walk notes the ids. Loops, branches and checkpoints hand them outside, as they
do for gradients. What is left of the loss when nothing else is asked for is a small
program, and it may not read rows: see `RowIds`. Both programs return a `fingerprint` of
the ids: where a loss computes others in each, as of `np.random`, the step is refused.
What is computed of floats on the way to ids the step takes from the small program: see
`_way_to_ids.py`, and for tables on the device `_device_tables.py`.

Known limits: ids that depend on looked-up rows, lookups in a `while_loop`, a `vmap`
over tables and their ids; all of them raise.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._gradients import rules
from .._gradients.backward_slice import BackwardSlice
from .._gradients.expressions import (
    Expression,
    Leaf,
    operands_first,
    table,
)
from .._gradients.lookups import (
    Lookup,
    lookup_of_gather,
    lookup_of_rows,
    lookup_of_slice,
    reads_rows,
)
from .._gradients.row_slices import LookupEntries
from .._gradients.tracing import jit_enabled, trace
from .._gradients.walk import Program, Request, Results, Walk, on_mesh_of_context
from .._jax_extras.jaxprs import call_of
from .._jax_extras.varying_axes import axes_of_type
from .._rows.bag_sums import add_up
from .._rows.lookups import look_up_bags, look_up_rows, sum_bags
from .._rows.source import Mode, Source
from ._callbacks import without_callbacks
from ._device_tables import RULES as RULES_ON_DEVICE
from ._device_tables import (
    is_on_device,
    is_table_on_device,
    on_arrays,
    read_on_device,
)
from ._partition import Partition
from ._residuals import Number, ResidualWalk

LARGEST_ID = 2**31 - 1


class Whole(NamedTuple):
    """A table that is elsewhere.

    Attributes:
      name: For errors.
      shape: Of all of it.
      dtype: Its type.
      partition: The order of its rows in the arrays of a batch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    partition: Partition


class CompactTable(NamedTuple):
    """K rows of a table, as `Expression.source`.

    Attributes:
      array: The rows, `[K, ...]`.
      unique: Their positions `[K]`, ascending: without a mesh their numbers; of
        padding, the table's number of rows.
      partition: Of the table.
      stale: Always `None`; `make_train_step` brings rows up to date by itself.
    """

    array: jax.Array
    unique: jax.Array
    partition: Partition
    stale: None = None

    def map(self, function: Callable[[Any, bool], Any]) -> "CompactTable":
        return self._replace(array=function(self.array, True))


class _Everything(set[Any]):
    def __contains__(self, _: object) -> bool:
        return True

    def __and__(self, other: Any) -> Any:
        return other


class _EveryUse(BackwardSlice):
    """A slice in which each use counts, also one without a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.variables = _Everything()

    def operands(self, eqn: JaxprEqn) -> Sequence[bool]:
        return [True] * len(eqn.invars)


@dataclasses.dataclass(frozen=True)
class _Program(Program):
    """A program with host tables.

    Attributes:
      tables: By the index of their leaf.
      lines: Where the user's program looks each of them up.
    """

    tables: Mapping[int, Whole] = dataclasses.field(default_factory=dict)
    lines: dict[int, set[str]] = dataclasses.field(default_factory=dict)

    def constant(self, array: Any) -> Any:
        """As it is: who differentiates the compact loss says how it is read."""
        return array


def _places(lookup: Lookup, source: Any) -> jax.Array:
    """Where among the K rows each index reads; K where it is out of bounds."""
    ids = lookup.rows(1)[:, 0].astype(jnp.int32)
    unique = on_mesh_of_context(source.unique)
    position = on_mesh_of_context(source.partition.position(ids))
    place = jnp.searchsorted(unique, position).astype(jnp.int32)
    return jnp.where(ids < lookup.shape[0], place, len(source.array))


def _look_up(lookup: Lookup, source: Any, rows: jax.Array) -> jax.Array:
    """The same lookup, in the K rows, as whoever walks over it next would see it."""
    place = _places(lookup, source).reshape(lookup.indices.shape[:-1])
    column = lookup.dims.start_index_map.index(0)
    indices = lookup.indices.astype(jnp.int32)
    columns = [indices[..., k] for k in range(indices.shape[-1])]
    columns[column] = place
    return lax.gather(rows, jnp.stack(columns, axis=-1), **lookup.params)


def _read(value: Expression, lookup: Lookup) -> jax.Array:
    """The lookup among the K rows; of a function of tables, in that of the K rows.

    For `tanh(2 * t)[ids]` it is `tanh(2 * rows)[places]`: who differentiates it, or
    evaluates it, sees what is there in memory, and computes it at these places only.
    """
    tables = [x for x in operands_first([value]) if x.source is not None]
    sources: Any = {id(x.source): x.source for x in tables}
    if len(sources) == 1:
        (source,) = sources.values()
        values = {x: x.function(source.array) for x in tables}
        last = lookup.shape[0] - 1

        def take(array: jax.Array) -> jax.Array:
            return array[jnp.minimum(source.partition.rows_at(source.unique), last)]

        rows = value.select(take, None, values)
        return _look_up(lookup, source, rows)

    def read(clamped: Lookup) -> jax.Array:
        # Of two tables, each has other rows.
        values = {
            x: x.function(_look_up(clamped, x.source, x.source.array))  # type: ignore[union-attr]
            for x in tables
        }
        return value.select(clamped.read, None, values)

    return lookup.read_and_fill(read)


def _entries(lookup: Lookup) -> LookupEntries:
    """The ids of a lookup; the number of rows where it is known to read none.

    In place of an id that is out of bounds against a promise: the id below zero, or
    above the number of rows one more, which the host finds.
    """
    rows, size = lookup.rows(1), lookup.shape[0]
    if lookup.params["mode"] == Mode.PROMISE_IN_BOUNDS:
        ids = lookup._columns([0])
        above = jnp.minimum(ids, LARGEST_ID - 1) + 1
        rows = jnp.where(ids < 0, ids, jnp.where(ids >= size, above, ids))
    else:  # distinct padding, where ids are promised to be unique
        rows = jnp.minimum(rows, size)
    return LookupEntries(rows)


def _note_ids(walk: Walk, eqn: JaxprEqn, value: Expression, lookup: Lookup) -> None:
    program: Any = walk.program
    calls = (eqn, *reversed(program.calls))
    lines = (source_info_util.summarize(x.source_info) for x in calls)
    line = next(filter(None, lines), "")
    names = [program.tables[x.index].name for x in value.leaves]
    if 0 in lookup.dims.operand_batching_dims:
        raise ValueError(
            "Tables in host memory are looked up by one id for each row; "
            f"{', '.join(names)} is looked up under a vmap over tables and their ids "
            f"at {line}. Make one table [tables * rows, ...] of them, and look up "
            "`table * rows + id`."
        )
    axes = axes_of_type(eqn.outvars[0].aval)
    for leaf in value.leaves:
        program.lines.setdefault(leaf.index, set()).add(line)
    requests = [
        Request(leaf, value.shape, lookup.count, 1, axes, is_whole=True)
        for leaf in value.leaves
    ]
    walk.request(requests)
    if not walk.is_plan:
        walk.entries += [_entries(lookup) for _ in requests]


def _look_up_rows(
    walk: Any, eqn: JaxprEqn, value: Expression, lookup: Lookup
) -> jax.Array | None:
    """Rows of a table, or of a function of one; in a plan `None`."""
    if value.leaves:
        _note_ids(walk, eqn, value, lookup)
        return None if walk.is_plan else _read(value, lookup)
    return None if walk.is_plan else read_on_device(walk, value, lookup)


def _gather(walk: Walk, eqn: JaxprEqn, value: Any, ids: Any) -> Results:
    if not isinstance(value, Expression) or isinstance(ids, Expression):
        return NotImplemented
    aval: Any = eqn.invars[1].aval
    lookup = lookup_of_gather(eqn, value.shape, aval if walk.is_plan else ids)
    is_refused = value.leaves and 0 in lookup.dims.operand_batching_dims
    if is_table_on_device(value) or not (reads_rows(lookup) or is_refused):
        return NotImplemented
    return [_look_up_rows(walk, eqn, value, lookup)]


def _slice(walk: Walk, eqn: JaxprEqn, value: Any, *starts: Any) -> Results:
    if not isinstance(value, Expression) or is_table_on_device(value):
        return NotImplemented
    lookup = lookup_of_slice(eqn, value.shape, None if walk.is_plan else starts)
    if lookup is None:
        return NotImplemented
    return [_look_up_rows(walk, eqn, value, lookup)]


_LOOKUPS = look_up_bags, look_up_rows


def _jit(walk: Walk, eqn: JaxprEqn, *args: Any) -> Results:
    call, rule = call_of(eqn), rules.RULES["jit"]
    is_of_table = call is not None and isinstance(args[0], Expression)
    if call is None or call.function not in _LOOKUPS or not is_of_table:
        is_ours = eqn.params["name"].startswith("optax_sparse_adam_")
        return (on_arrays(rule) if is_ours else rule)(walk, eqn, *args)
    if is_table_on_device(args[0]):
        return on_arrays(rule)(walk, eqn, *args)
    args = args[0], *(walk.as_array(eqn, x) for x in args[1:])
    if call.function is look_up_bags:
        return _bag_lookup(walk, eqn, *args)
    ids = eqn.invars[1].aval if walk.is_plan else jnp.asarray(args[1])
    lookup = lookup_of_rows(args[0].shape, ids, call.params)
    return [_look_up_rows(walk, eqn, args[0], lookup)]


def _bag_lookup(
    walk: Walk, eqn: JaxprEqn, value: Expression, ids: Any, *operands: Any
) -> Results:
    out: Any = eqn.outvars[0].aval
    aval: Any = eqn.invars[1].aval
    lookup = lookup_of_rows(value.shape, aval if walk.is_plan else jnp.asarray(ids))
    rows = None if value.is_table else _look_up_rows(walk, eqn, value, lookup)
    if value.is_table:
        _note_ids(walk, eqn, value, lookup)
    if walk.is_plan:
        return [None]
    rest, num_bags = list(operands), out.shape[0]
    segments = rest.pop(0) if aval.ndim == 1 else None
    weights = rest[0] if rest else None
    if rows is not None:
        return [add_up(num_bags, rows, segments, weights)]
    source: Any = value.source
    places = _places(lookup, source).reshape(ids.shape)
    return [sum_bags(num_bags, Source(source.array), places, segments, weights)]


RULES = RULES_ON_DEVICE | {
    "gather": _gather,
    "slice": _slice,
    "dynamic_slice": _slice,
    "jit": _jit,
}


def evaluate_compact(
    fun: Callable[..., Any],
    tables: Mapping[int, Whole],
    params: Any,
    uniques: Sequence[Any] | None,
    args: Any,
    residuals: Mapping[Number, Any],
) -> tuple[Any, list[jax.Array], ResidualWalk, dict[str, set[str]]]:
    """`fun(params, *args)` where some leaves of the parameters are K rows.

    Args:
      fun: Any function that JAX can trace.
      tables: By the index of their leaf.
      params: With `[K, ...]` in the place of each table.
      uniques: For each table the positions of its K rows; or `None` to ask for ids
        alone: then callbacks, such as `jax.debug.print`, are not called.
      args: Further arguments.
      residuals: Values of the small program, by their numbers.

    Returns:
      The result; for each table the ids of its lookups, as `_entries` says; the walk,
      which knows what it computed; and where the program looks tables up.
    """
    tree: Any
    leaves, tree = jax.tree.flatten(params)
    whole = [
        jax.ShapeDtypeStruct(*tables[i][1:3]) if i in tables else x
        for i, x in enumerate(leaves)
    ]
    with jit_enabled():
        closed, to_result, _ = trace(fun, (tree.unflatten(whole), *args), (0,))
        if uniques is None:
            closed = ClosedJaxpr(without_callbacks(closed.jaxpr), closed.consts)
            uniques = [jnp.zeros(1, jnp.int32)] * len(tables)
    values, rows = list(leaves), dict(zip(tables, uniques, strict=True))
    for i, (_, shape, dtype, partition) in tables.items():
        source: Any = CompactTable(leaves[i], rows[i], partition)
        leaf = (Leaf(i, jnp.dtype(dtype)),)  # of tables of integers, too
        values[i] = dataclasses.replace(
            table(Source(leaves[i])), shape=shape, leaves=leaf, source=source
        )
    for i, x in enumerate(leaves):
        is_array = hasattr(x, "dtype") and jnp.ndim(x)
        if i not in tables and is_array and jnp.issubdtype(x.dtype, jnp.inexact):
            values[i] = table(Source(x))
    program = _Program(RULES, _EveryUse(), tables=tables)
    requests, _ = Walk(program).plan(closed, values)
    for i, (primitive, line) in program.dense_uses.items():
        raise ValueError(
            f"{tables[i].name} is in host memory, where only its rows can be looked "
            f"up, as by `table[ids]`, but all of it is used by `{primitive}` at {line}."
            " Take its rows first; leave weight decay to the optimiser; or keep this "
            "table on the device."
        )
    deltas = [jnp.zeros(x.delta.shape, x.delta.dtype) for x in requests]
    passed = jax.tree.leaves((args, getattr(fun, "keywords", {})))
    arrays = (x for x in passed if isinstance(x, jax.Array))
    is_known = any(not isinstance(x, jax.core.Tracer) for x in arrays)
    walk = ResidualWalk(program, iter(deltas), residuals, is_known=is_known)
    results = [
        walk.dense(x) if is_on_device(x) else x for x in walk.evaluate(closed, values)
    ]
    for x in results:
        if isinstance(x, Expression):
            name = tables[x.leaves[0].index].name if x.leaves else "a table"
            raise ValueError(
                f"The function returns all of {name}, which is in host memory. Return "
                "the rows that are looked up."
            )
    ids: dict[int, list[jax.Array]] = {i: [] for i in tables}
    for request, entries in zip(requests, walk.entries, strict=True):
        ids[request.leaf.index].append(entries.ids.ravel().astype(jnp.int32))
    empty = jnp.zeros(0, jnp.int32)
    joined = [jnp.concatenate([empty, *x]) for x in ids.values()]
    lines = {tables[i].name: x for i, x in program.lines.items()}
    result = to_result([jnp.asarray(x) for x in results])
    return result, joined, walk, lines


def fingerprint(ids: Sequence[jax.Array]) -> jax.Array:
    """A number, uint32, that is another one if one of the ids is."""
    flat = jnp.concatenate([*ids]).astype(jnp.uint32)
    place = jnp.arange(len(flat), dtype=jnp.uint32)
    # As in MurmurHash3, of the id and of where it is.
    mixed = (flat ^ place * np.uint32(0x9E3779B1)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 15) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed, dtype=jnp.uint32)
