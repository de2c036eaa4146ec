"""Evaluates a loss and its derivatives, with respect to rows where that is enough."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.errors import InconclusiveDimensionOperation
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxprs_in_params

from .._jax_extras.compiled import compiled
from .._jax_extras.jaxprs import name_and_params
from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import vary, varying_axes
from .._rows.source import Source
from .arguments import leaf_name
from .backward_slice import BackwardSlice
from .expressions import (
    Expression,
    arrays_among,
    as_jax,
    is_array,
    merge,
    table,
)
from .lookups import Promises
from .row_slices import LookupEntries, RowSlices, to_bcoo
from .rules import RULES
from .walk import Program, Request, Walk


def evaluate_with_gradients(
    closed: ClosedJaxpr,
    are_stored: list[bool],
    paths: list[Any],
    wanted: list[bool | None],
    tables: list[Source],
    are_stale: Callable[[list[int]], Any],
    sizes: Mapping[int, int],
) -> tuple[list[Any], list[Any]]:
    """The results of the jaxpr, and the derivative of the first one by each leaf.

    Args:
      closed: The jaxpr, a function of the leaves.
      are_stored: Of each result, as in `Walk.result`.
      paths: Of the leaves.
      wanted: For each leaf: row-sparse (`True`), dense (`False`), or as it comes.
      tables: The leaves.
      are_stale: Says whether leaves that are used as a whole have rows that do not hold
        their values. The loss, and with it all gradients, is NaN then.
      sizes: Of leaves that are a part of a table, how many rows that has.
    """
    # What the loss shows is read before tables are written: see `_order_after`.
    shown = _shown(closed.jaxpr)
    of_results = [*are_stored[1:], *(False for _ in shown)]
    jaxpr = closed.jaxpr.replace(outvars=[*closed.jaxpr.outvars, *shown])
    closed = ClosedJaxpr(jaxpr, closed.consts)
    program = Program(RULES, BackwardSlice(jaxpr))
    args, requests = _plan(program, closed, paths, tables, wanted, sizes)
    dense = [i for i, x in enumerate(args) if not isinstance(x, Expression)]
    is_wrong = are_stale(dense)

    def function(deltas: list[Any], of_whole: list[Any], arrays: list[Any]) -> Any:
        whole_deltas = dict(zip(whole, of_whole, strict=True))
        walk = Walk(program, iter(deltas), whole_deltas)
        results = walk.evaluate(closed, merge(args, arrays))
        if isinstance(is_wrong, jax.Array):
            results[0] *= jnp.where(is_wrong, jnp.nan, 1).astype(results[0].dtype)
        # Arrays as they are, with their weak types.
        return results[0], (
            [*map(walk.result, results[1:], of_results)],
            walk.entries,
        )

    # JAX differentiates with respect to deltas, and to the leaves that are arrays.
    # Inside `shard_map` deltas vary over the axes that rows do, as a cotangent must.
    deltas = [vary(jnp.zeros(x.delta.shape, x.delta.dtype), x.axes) for x in requests]
    whole = list(dict.fromkeys(x.leaf for x in requests if x.is_whole))
    of_whole = [
        vary(jnp.zeros(tables[i].array.shape, dtype), varying_axes(tables[i].array))
        for i, dtype in whole
    ]
    # `of_deltas` has the gradients of looked-up rows, `rows` their ids, lookup by
    # lookup; `totals` those of the leaves in `whole`; `of_arrays` the dense gradients.
    (value, (aux_results, rows)), (of_deltas, totals, of_arrays) = jax.value_and_grad(
        function, argnums=(0, 1, 2), has_aux=True, allow_int=True
    )(deltas, of_whole, arrays_among(args))
    everything = list(map(as_jax, (value, *aux_results)))  # some are Python's numbers
    # Rows are read once more for the gradient of `w` in `checkpoint(t[i] @ w)`, and of
    # the weights of bags. That of the table does not depend on it.
    more = jax.tree.leaves((of_deltas, of_arrays)) if program.reread else []
    after = _order_after([*everything, *more])
    slices: dict[int, list[RowSlices]] = {i: [] for i in range(len(tables))}
    for request, entries, values in zip(requests, rows, of_deltas, strict=True):
        i = request.leaf.index
        gathered = _of_all_devices(request, tables[i].array, entries, values)
        slices[i].append(after(gathered))
    of_leaves = iter(of_arrays)
    grads = []
    for i, (arg, source) in enumerate(zip(args, tables, strict=True)):
        if isinstance(arg, Expression):
            pairs = zip(whole, totals, strict=True)
            own_totals = [x for leaf, x in pairs if leaf.index == i]
            depth = program.depths.get(i, 1)
            of_leaf = [x for x in requests if x.leaf.index == i]
            facts = depth, _promises(of_leaf), _bag_length(of_leaf)
            grads.append(to_bcoo(slices[i], own_totals, source, *facts))
        else:
            grads.append(next(of_leaves))
    return everything[: len(everything) - len(shown)], grads


def _promises(requests: list[Request]) -> Promises:
    """What holds of the entries of a leaf; two lookups, or devices, may share rows."""
    if len(requests) != 1 or requests[0].axes:
        return Promises()
    return requests[0].promises


def _bag_length(requests: list[Request]) -> int | None:
    """How many entries a bag of a leaf has, if all have as many."""
    bags = requests[0].bags if len(requests) == 1 else None
    if bags is None or not bags.is_regular:
        return None
    is_known = isinstance(bags.entries, int) and isinstance(bags.bags, int)
    return bags.entries // bags.bags or None if is_known and bags.bags else None


def _plan(
    program: Program,
    closed: ClosedJaxpr,
    paths: list[Any],
    tables: list[Source],
    wanted: list[bool | None],
    sizes: Mapping[int, int],
) -> tuple[list[Any], list[Request]]:
    """Expressions for leaves whose gradients are row-sparse, else arrays; and requests.

    Planned again until nothing changes, as each plan finds out more: which leaves have
    other uses than lookups, how many axes are indexed, and of which leaves more rows
    are looked up than there are. Rows of all steps of a loop could need any multiple of
    the memory that `jax.grad` needs; such a leaf has one delta, of its own shape.
    """
    arrays = [source.array for source in tables]
    able = [
        mark is not False
        and is_array(array)
        and jnp.ndim(array) > 0
        and bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))
        for mark, array in zip(wanted, arrays, strict=True)
    ]
    # For a table that is looked up as t[ids] and in a loop also as t[i, j]: the first
    # plan meets both, each with its own number of axes; the second one knows that one
    # axis is indexed in both; the third one finds nothing new.
    while True:
        before = *able, program.depths.copy(), program.whole_leaves.copy()
        pairs = enumerate(zip(tables, able, strict=True))
        args = [table(x, i) if can else x.array for i, (x, can) in pairs]
        # Plans hold what was known when they were made.
        program.plans.clear()
        requests, _ = Walk(program).plan(closed, args)
        for i, path in enumerate(paths):
            leaf_requests = [x for x in requests if x.leaf.index == i]
            use = program.dense_uses.get(i)
            if wanted[i] and (use is not None or not able[i]):
                raise ValueError(_refusal(path, use))
            able[i] = able[i] and use is None
            # Where the user wants it row-sparse, it is so, though every row is read.
            if not wanted[i]:
                able[i] = able[i] and not _reads_every_row(leaf_requests)
            if not leaf_requests:
                continue
            shape = jnp.shape(arrays[i])
            shape = sizes.get(i, shape[0]), *shape[1 : program.depths[i]]
            rows = math.prod(shape)
            if not isinstance(rows, int):
                raise ValueError(
                    "A row-sparse gradient needs a table of a known number of rows, "
                    f"got {rows} of {leaf_name(path)}. Give it a number; or take a "
                    "dense gradient, by sparse=False."
                )
            count = sum(_num_entries(x, arrays[i]) for x in leaf_requests)
            try:
                is_whole = count > rows
            except InconclusiveDimensionOperation:
                raise ValueError(_unknown_size(path, count, rows)) from None
            if is_whole:
                program.whole_leaves.add(i)
        if before == (*able, program.depths, program.whole_leaves):
            return args, requests


def _axes_to_gather(request: Request, leaf: Any) -> tuple[str, ...]:
    """Mesh axes over which rows vary and their table does not.

    Inside of `shard_map`, `jax.grad` sums the gradient of such a table over them.
    """
    table_axes = varying_axes(leaf) if request.axes else ()
    return tuple(axis for axis in request.axes if axis not in table_axes)


def _num_entries(request: Request, leaf: Any) -> int:
    """How many entries a request adds to a gradient, those of all devices."""
    sizes = jax.sharding.get_abstract_mesh().shape
    devices = math.prod(sizes[axis] for axis in _axes_to_gather(request, leaf))
    return request.num_entries * devices


def _of_all_devices(
    request: Request, leaf: Any, entries: LookupEntries, values: jax.Array
) -> RowSlices:
    """The gradient of the rows of one lookup; inside of `shard_map`, of all devices."""
    slices = entries, values
    slices = jax.tree.map(functools.partial(vary, axes=request.axes), slices)
    if axes := _axes_to_gather(request, leaf):
        gather = functools.partial(
            lax.all_gather, axis_name=axes, tiled=True, to="invarying"
        )
        slices = jax.tree.map(gather, slices)
    entries, values = slices
    if entries.segments is not None and request.bags is not None:
        # Segments count within one call. A loop of 3 steps, each with 4 entries in 2
        # bags, has 12 entries and 6 bags: segment 1 of the last step is 1 + 2 * 2 = 5.
        call = jnp.arange(entries.ids.shape[0], dtype=jnp.int32)
        call = call // max(request.bags.entries, 1)
        segments = entries.segments + call * request.bags.bags
        entries = entries._replace(segments=segments)
    return entries, values


def _shown(jaxpr: Jaxpr) -> list[Any]:
    """The arrays that `jax.debug.print` and other effects of the loss read."""
    # Of a loop with a `jax.debug.print` inside, the operands are not what it shows.
    effects = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.effects and not list(jaxprs_in_params(name_and_params(eqn)[1]))
    ]
    return [
        atom
        for eqn in effects
        for atom in eqn.invars
        if isinstance(atom, Var) and isinstance(atom.aval, ShapedArray)
    ]


def _reads_every_row(requests: list[Request]) -> bool:
    """Whether all lookups of a table are at constant indices that leave no row out.

    So are those of stacked layers that a Python loop takes one by one. All rows of a
    table, each once, are the dense gradient already.
    """
    rows = {x.constant for x in requests}
    return bool(rows) and None not in rows and len(rows) == requests[0].shape[0]


def _order_after(results: list[jax.Array]) -> Callable[[RowSlices], RowSlices]:
    """Makes a gradient depend on all that the call shows, without changing it.

    XLA updates a table in place only where it knows that every read of the old rows
    comes before; else it copies the table to be safe. Reads that the gradient does not
    depend on are those of a loss that is linear in a table, and of auxiliary outputs
    (https://openxla.org/xla/aliasing; an `optimization_barrier` would say so, but XLA
    drops it on CPUs before it looks). So one element of each result is compared with
    infinity: none is above. Inside shard_map, a value that varies over more axes than
    the gradient would make it vary there as well, and is left out.
    (tests/gradients/test_cost_of_steps.py)
    """
    numeric = [
        x
        for x in results
        if is_array(x)
        and x.size
        and x.dtype != jax.dtypes.float0
        and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    ]

    @functools.cache
    def is_above_infinity(axes: frozenset[str]) -> jax.Array | None:
        values = [x for x in numeric if axes.issuperset(varying_axes(x))]
        return _is_above_infinity(values)[0] if values else None

    def after(slices: RowSlices) -> RowSlices:
        entries, values = slices
        never = is_above_infinity(frozenset(varying_axes(values)))
        if never is not None:
            # Ids of padding, if it were true; XLA does not know that it never is.
            entries = entries._replace(ids=jnp.where(never, -1, entries.ids))
        return entries, values

    return after


@compiled
def _is_above_infinity(values: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Whether an element of these arrays is, which none is; and the elements.

    In the latter `jax.debug_nans` sees a loss that is NaN.
    """
    place = jnp.int32(0)
    if values[0].ndim == 0:  # the loss, unless it is left out
        place = (_as_float(values[0]) > jnp.inf).astype(jnp.int32)
    elements = jnp.stack([_some_element(x, place) for x in values])
    return jnp.any(elements > jnp.inf), elements


def _as_float(x: jax.Array) -> jax.Array:
    return jnp.real(x).astype(jnp.float32)


def _some_element(x: jax.Array, place: jax.Array) -> jax.Array:
    """A float32 scalar for which all of `x` is computed.

    An element at a place that XLA does not know: with a known one it would look into a
    concatenation or a pad, and compute no more than this element. On a mesh, where a
    slice would gather all of `x`, the largest.
    """
    if x.ndim and mesh_of(x).empty:
        x = lax.dynamic_slice(x, (place,) * x.ndim, (1,) * x.ndim)
    return _as_float(jnp.max(x))


def _unknown_size(path: Any, count: Any, rows: int) -> str:
    return (
        f"A program with symbolic sizes looks up {count} of the {rows} rows of "
        f"{leaf_name(path)}. Whether {count} may be more than {rows} decides about the "
        "form of its gradient. Give the sizes numbers, or say it by a constraint of "
        f'jax.export.symbolic_shape: constraints=["{count} <= {rows}"].'
    )


def _refusal(path: Any, use: tuple[str, str] | None) -> str:
    obstacle = "is no table of real numbers"
    if use is not None:
        obstacle = f"is used by `{use[0]}` at {use[1]}"
    return (
        f"`sparse` requests a row-sparse gradient for {leaf_name(path)}, but that leaf "
        f"{obstacle}. Only row lookups such as `table[ids]` have row-sparse gradients. "
        "Let this leaf have a dense gradient; or stop the gradient of that use with "
        "jax.lax.stop_gradient; or, if that is weight decay, leave it to the optimiser."
    )
