"""Row-sparse gradients by the logs of JAX's backward pass: a prototype, and its price.

`python benchmarks/gradients_by_logs.py`, with JAX 0.12 and Python 3.12 or newer, prints
a table of CPU seconds to trace a gradient: by the package, by logs, and by `jax.grad`.

`jax.custom_vjp.defvjp_with_logs` lets a backward rule hand values out by the side:

    delta = logged("table 0", zeros, ids, probe)     at each lookup
    rows  = inject(gather(table, ids), delta)        as in `_gradients/walk.py`
    loss, vjp = jax.vjp(function, probe)
    _, logs = vjp.with_logs(1.0)                     {"table 0": (ids, cotangent)}

`probe` is a scalar that changes nothing, the one argument that JAX differentiates. JAX
itself stacks the logs of a `scan`, keeps those of the branches of a `cond` apart, and
lays those of the devices of a `shard_map` side by side. So there is no plan, no request
for each delta, no delta that a rule hands on, and no backward slice: what the loss does
not depend on has no cotangent. The dense gradient of a leaf is a log, too, made where
the program begins, and it is there only if the leaf has other uses than lookups.

`evaluate_with_gradients` takes the place of the package's function of this name. What
was found, and the decision, is in CONTRIBUTING.md.
"""

import collections
import contextlib
import functools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from optax_sparse_adam._gradients import differentiate, rules, rules_calls
from optax_sparse_adam._gradients import rules_shard_map as sharded
from optax_sparse_adam._gradients.backward_slice import as_closed, scan_sizes
from optax_sparse_adam._gradients.expressions import (
    Expression,
    Leaf,
    Table,
    arrays_among,
    as_jax,
    inject,
    is_array,
    merge,
    table,
)
from optax_sparse_adam._gradients.lookups import Lookup, Promises, lookup_of_rows
from optax_sparse_adam._gradients.reading import look_up
from optax_sparse_adam._gradients.row_slices import LookupEntries, RowSlices, to_bcoo
from optax_sparse_adam._gradients.walk import (
    Bags,
    Program,
    Request,
    Walk,
    on_mesh_of_context,
)
from optax_sparse_adam._jax_extras.jaxprs import name_and_params, name_in_jaxprs
from optax_sparse_adam._jax_extras.sharding import mesh_axes, partitions_of
from optax_sparse_adam._jax_extras.varying_axes import (
    axes_of_type,
    vary,
    vary_like,
)
from optax_sparse_adam._rows.bags import add_up, sum_bags
from optax_sparse_adam._rows.padding import expand_like, row_bounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def logged(key: str, x: Any, entries: LookupEntries, probe: jax.Array) -> Any:
    """`x`; logs the entries and the cotangent of `x`, which has no other derivative."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def logged_on_the_way(
    key: str, x: Any, entries: LookupEntries, probe: jax.Array
) -> Any:
    """`x` with its derivative; logs the entries."""
    return x


@jax.custom_vjp
def watched(leaves: dict[str, Any], probe: jax.Array) -> Any:
    """The leaves; logs the cotangents of those that have one, by their keys."""
    return leaves


def _keep(key: str, x: Any, entries: LookupEntries, probe: jax.Array) -> Any:
    # A branch that is not taken logs zeros, which are no ids then.
    ids = vary_like(entries.ids + 1, x)
    return x, entries._replace(ids=ids)


def _log(key: str, entries: LookupEntries, cotangent: jax.Array) -> Any:
    return (None, None, None), {key: (entries, cotangent)}


def _log_ids(key: str, entries: LookupEntries, cotangent: jax.Array) -> Any:
    return (cotangent, None, None), {key: (entries, None)}


def _keep_leaves(leaves: Any, probe: Any) -> Any:
    return {key: x.value for key, x in leaves.items()}, None


def _log_unless_zero(_: None, cotangents: dict[str, Any]) -> Any:
    pairs = cotangents.items()
    logs = {key: x for key, x in pairs if not isinstance(x, SymbolicZero)}
    return (dict.fromkeys(cotangents), None), logs


if not hasattr(jax.custom_vjp, "defvjp_with_logs"):
    sys.exit(f"Logs of the backward pass need JAX 0.12; this is {jax.__version__}.")
logged.defvjp_with_logs(_keep, _log)
logged_on_the_way.defvjp_with_logs(_keep, _log_ids)
watched.defvjp_with_logs(_keep_leaves, _log_unless_zero, symbolic_zeros=True)


class Everything:
    """In place of a backward slice: any use may matter."""

    def operands(self, eqn: Any) -> list[bool]:
        return [True] * len(eqn.invars)


class Known(NamedTuple):
    """What a trace found out, and the next one has to know before."""

    depths: dict[int, int]
    whole: frozenset[int]
    dense: frozenset[int]


class LogWalk(Walk):
    """A walk whose deltas are logged: nothing is planned, and rules only recurse."""

    def __init__(self, program: Program, known: Known, probe: Any, whole: Any):
        super().__init__(program, iter(()), whole)
        self.known, self.probe = known, probe
        self.counts: dict[Any, int] = collections.Counter()
        self.found: dict[str, Request] = {}
        self.is_inner = False
        self.global_ids: Callable[[Request, Any], tuple[Request, Any]] | None = None

    def child(self, **changes: Any) -> "LogWalk":
        """A walk in a function that JAX traces by itself."""
        walk = LogWalk(self.program, self.known, self.probe, self.whole_deltas)
        walk.counts, walk.found = self.counts, self.found
        walk.is_inner, walk.global_ids = True, self.global_ids
        for name, value in changes.items():
            setattr(walk, name, value)
        return walk

    def arrays(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        return [self.differentiable(x) for x in self.evaluate(as_closed(closed), args)]

    def differentiable(self, value: Any) -> Any:
        """The array of any value; what its leaves get is their dense gradient."""
        if not isinstance(value, Expression):
            return value
        wholes = {leaf: on_mesh_of_context(self.whole(leaf)) for leaf in value.leaves}
        if value.is_table and wholes and value.source.stale is None:
            whole = wholes[value.leaves[0]]
            if jax.typeof(whole) == jax.typeof(value.source.array):
                return whole
        return value.select(lambda x: x, wholes)

    def whole(self, leaf: Leaf) -> Any:
        return self.whole_deltas[leaf.index].astype(leaf.dtype)

    def as_array(self, eqn: Any, value: Any) -> Any:
        if isinstance(value, Expression):
            line = source_info_util.summarize(eqn.source_info)
            for leaf in value.leaves:
                use = name_and_params(eqn)[0], line
                self.program.dense_uses.setdefault(leaf.index, use)
        return self.differentiable(value)

    def depth_of(self, leaf: Leaf, depth: int) -> int:
        depths = self.program.depths
        depths[leaf.index] = min(depth, depths.get(leaf.index, depth))
        return self.known.depths.get(leaf.index, depth)

    def log(self, request: Request, x: Any, entries: LookupEntries) -> Any:
        """`x`, logged under a key that the same lookup of another branch has, too."""
        x = vary(x, request.axes)
        if self.is_inner:
            request = request._replace(constant=None, promises=Promises())
        if self.global_ids is not None:
            request, ids = self.global_ids(request, entries.ids)
            entries = entries._replace(ids=ids)
        kind = f"{request.leaf} {request.bags is None} {request.depth}"
        key = f"{kind} {self.counts[kind]}"
        self.counts[kind] += 1
        other = self.found.get(key, request)
        self.found[key] = max(request, other, key=lambda x: x.count)
        log = logged_on_the_way if request.is_whole else logged
        return log(key, x, entries, self.probe)

    def request_for(self, lookup: Lookup, value: Any, axes: Any) -> Any:
        deltas = {}
        for leaf in value.leaves:
            depth = self.depth_of(leaf, lookup.depth)
            entries = LookupEntries(lookup.rows(depth))
            request = Request(leaf, value.shape, lookup.count, depth, axes)
            request = request._replace(
                constant=lookup.constant, promises=lookup.promises
            )
            if leaf.index in self.known.whole:
                read = lookup.read(on_mesh_of_context(self.whole(leaf)))
                request = request._replace(is_whole=True)
                deltas[leaf] = self.log(request, read, entries)
            else:
                zeros = jnp.zeros(request.delta.shape, request.delta.dtype)
                delta = on_mesh_of_context(self.log(request, zeros, entries))
                deltas[leaf] = lookup.windows(delta, depth)
        return deltas or None


def bag_lookup(walk: LogWalk, eqn: Any, value: Any, *operands: Any) -> Any:
    if not isinstance(value, Expression):
        return NotImplemented
    out, ids_type = eqn.outvars[0].aval, eqn.invars[1].aval
    num_bags, axes, is_flat = out.shape[0], axes_of_type(out), ids_type.ndim == 1
    ids, *rest = (walk.as_array(eqn, x) for x in operands)
    ids = jnp.asarray(ids)
    segments = rest.pop(0) if is_flat else None
    weights = rest[0] if rest else None
    lookup = lookup_of_rows(value.shape, ids)
    if value.source is None:
        deltas = walk.request_for(lookup, value, axes)
        return [add_up(num_bags, look_up(value, lookup, deltas), segments, weights)]
    if value.is_table and value.source.stale is None:
        array = jnp.asarray(value.source.array)
        sums = sum_bags(num_bags, array, ids, segments, weights)
    else:
        sums = add_up(num_bags, look_up(value, lookup, None), segments, weights)
    for leaf in value.leaves:
        depth = walk.depth_of(leaf, 1)
        request = Request(leaf, value.shape, ids.size, depth, axes, is_whole=True)
        if leaf.index in walk.known.whole:
            whole = on_mesh_of_context(walk.whole(leaf))
            read = sum_bags(num_bags, whole, ids, segments, weights)
            delta = walk.log(request, read, LookupEntries(lookup.rows(1)))
        else:
            bags = Bags(ids.size, num_bags, out.dtype, weights is not None)
            request = request._replace(count=num_bags, is_whole=False, bags=bags)
            bag = jnp.arange(ids.size, dtype=jnp.int32) // ids.shape[-1]
            own = bag if segments is None else segments
            of_ids = None if weights is None else lax.stop_gradient(weights.ravel())
            zeros = jnp.zeros(out.shape, out.dtype)
            delta = walk.log(request, zeros, LookupEntries(lookup.rows(1), own, of_ids))
        sums = inject(sums, on_mesh_of_context(delta).astype(sums.dtype))
    return [sums]


# Each of these applies JAX's own function to the body, evaluated by a walk.


def remat(walk: LogWalk, eqn: Any, *args: Any) -> Any:
    params = name_and_params(eqn)[1]
    flags = params["prevent_cse"]

    def function(arrays: Any, probe: Any) -> Any:
        return walk.child(probe=probe).arrays(params["jaxpr"], merge(args, arrays))

    prevent_cse = any(flags) if isinstance(flags, tuple) else flags
    if prevent_cse and params is not eqn.params:
        prevent_cse = True, True
    checkpointed = jax.checkpoint(
        function, prevent_cse=prevent_cse, policy=params["policy"]
    )
    return checkpointed(arrays_among(args), walk.probe)


def scan(walk: LogWalk, eqn: Any, *args: Any) -> Any:
    params, body = eqn.params, as_closed(eqn.params["jaxpr"])
    first, carried = scan_sizes(eqn)
    ends = body.jaxpr.outvars[:carried]
    begins = body.jaxpr.invars[first : first + carried]
    # A carried table that no step changes is closed over.
    args = tuple(
        x
        if i < first or (i < first + carried and begins[i - first] is ends[i - first])
        else walk.as_array(eqn, x)
        for i, x in enumerate(args)
    )
    consts, carry = args[:first], args[first : first + carried]

    def step(own: Any, xs: Any) -> Any:
        inner = walk.child()
        results = inner.evaluate(body, [*consts, *merge(carry, own), *xs])
        plain = [
            inner.differentiable(x)
            for x, begin in zip(results, carry, strict=False)
            if not isinstance(begin, Expression)
        ]
        return plain, [inner.differentiable(x) for x in results[carried:]]

    end, ys = lax.scan(
        step,
        arrays_among(carry),
        list(args[first + carried :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*merge(carry, end), *ys]


def cond(walk: LogWalk, eqn: Any, index: Any, *args: Any) -> Any:
    before = walk.counts.copy()  # the same lookups of two branches share a key

    def run(branch: Any) -> Any:
        inner = walk.child(counts=before.copy())
        results = inner.arrays(branch, args)
        walk.counts |= inner.counts
        return results

    runs = [functools.partial(run, x) for x in eqn.params["branches"]]
    return list(rules_calls._switch(eqn, index, runs))


def shard_map(walk: LogWalk, eqn: Any, *args: Any) -> Any:
    params, body = eqn.params, as_closed(eqn.params["jaxpr"])
    mesh, specs = params["mesh"], params["in_specs"]
    manual = tuple(x for x in mesh.axis_names if x in params["newly_manual_axes"])
    inner = [var.aval.shape for var in body.jaxpr.invars]
    leaves: dict[int, Any] = {}
    for place, (x, spec) in enumerate(zip(args, specs, strict=True)):
        for leaf in x.leaves if isinstance(x, Expression) else ():
            if leaves.setdefault(leaf.index, (spec, x.shape))[0] != spec:
                args = [*args]  # split in two ways, its ids count from two rows
                args[place] = walk.as_array(eqn, x)
    for index, (spec, shape) in leaves.items():
        depth = walk.program.depths.get(index, len(shape))
        if any(map(mesh_axes, partitions_of(spec)[depth:])):
            walk.program.whole_leaves.add(index)
    triples = list(zip(args, specs, inner, strict=True))
    arrays = [sharded._arrays(x, spec) for x, spec, _ in triples]
    whole = {i: walk.whole_deltas[i] for i in leaves}

    def global_ids(request: Request, ids: Any) -> Any:
        if request.leaf.index in leaves:
            spec, shape = leaves[request.leaf.index]
            ids = sharded._global_ids(ids, request, spec, shape)
            axes = tuple(axis for axis in request.axes if axis not in manual)
            request = request._replace(shape=shape, axes=axes)
        return (request, ids) if outer is None else outer(request, ids)

    outer = walk.global_ids

    def function(parts: Any, whole: Any, probe: Any) -> Any:
        values = [
            sharded._with_arrays(x, own, shape)
            for (x, _, shape), own in zip(triples, parts, strict=True)
        ]
        changes = {"whole_deltas": whole, "global_ids": global_ids, "probe": probe}
        return walk.child(**changes).arrays(body, values)

    results = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(
            [spec for _, spec in arrays],
            {i: leaves[i][0] for i in whole},
            PartitionSpec(),
        ),
        out_specs=list(params["out_specs"]),
        axis_names=set(manual),
        check_vma=params["check_vma"],
    )([x for x, _ in arrays], whole, walk.probe)
    return list(results)


def _jit(walk: Any, eqn: Any, *args: Any) -> Any:
    if eqn.params["name"] == name_in_jaxprs("bag_lookup"):
        results = bag_lookup(walk, eqn, *args)
        if results is not NotImplemented:
            return results
        return rules_calls.call(walk, eqn, *args)
    return rules._jit(walk, eqn, *args)


RULES: dict[str, Any] = {
    **rules.RULES,
    "jit": _jit,
    "remat2": remat,
    "scan": scan,
    "cond": cond,
    "shard_map": shard_map,
}


class Trace(NamedTuple):
    """What JAX's backward pass gives for what is `known`."""

    value: Any
    others: list[Any]
    of_arrays: list[Any]
    logs: dict[str, Any]
    requests: dict[str, Request]
    program: Program


def evaluate_with_gradients(
    closed: ClosedJaxpr,
    paths: list[Any],
    wanted: list[bool | None],
    tables: list[Table],
    are_stale: Callable[[list[int]], Any],
) -> tuple[list[Any], list[Any]]:
    """As that of `_gradients/differentiate.py`; traced again if it has to know more."""
    shown = differentiate._shown(closed.jaxpr)
    jaxpr = closed.jaxpr.replace(outvars=[*closed.jaxpr.outvars, *shown])
    closed = ClosedJaxpr(jaxpr, closed.consts)
    able = [
        mark is not False
        and is_array(x.array)
        and jnp.ndim(x.array) > 0
        and bool(jnp.issubdtype(jnp.result_type(x.array), jnp.floating))
        for mark, x in zip(wanted, tables, strict=True)
    ]
    for path, mark, can in zip(paths, wanted, able, strict=True):
        if mark and not can:
            raise ValueError(differentiate._refusal(path, None))
    dense = frozenset(i for i, can in enumerate(able) if not can)
    known = Known({}, frozenset(), dense)
    while True:
        is_wrong = are_stale(sorted(known.dense))
        trace = _differentiate(closed, tables, known, is_wrong)
        now = _known_by(trace, paths, wanted, tables, known)
        depths = [x.depth == now.depths[x.leaf.index] for x in trace.requests.values()]
        if all(depths) and now[1:] == known[1:]:
            break
        known = now
    everything = list(map(as_jax, (trace.value, *trace.others)))
    grads = _gradients(trace, tables, known, differentiate._order_after(everything))
    return everything[: len(everything) - len(shown)], grads


def _differentiate(
    closed: ClosedJaxpr, tables: list[Table], known: Known, is_wrong: Any
) -> Trace:
    program = Program(RULES, Everything())  # type: ignore[arg-type]
    own = [i for i in range(len(tables)) if i not in known.dense]
    args = [table(x, i) if i in own else x.array for i, x in enumerate(tables)]
    found: dict[str, Request] = {}

    def function(probe: Any, arrays: Any) -> Any:
        leaves = watched({str(i): jnp.asarray(tables[i].array) for i in own}, probe)
        whole = {int(key): x for key, x in leaves.items()}
        walk = LogWalk(program, known, probe, whole)
        results = walk.evaluate(closed, merge(args, arrays))
        found.update(walk.found)
        if isinstance(is_wrong, jax.Array):
            results[0] *= jnp.where(is_wrong, jnp.nan, 1).astype(results[0].dtype)
        return walk.differentiable(results[0]), [*map(walk.dense, results[1:])]

    inputs = jnp.zeros(()), arrays_among(args)
    value, vjp, others = jax.vjp(function, *inputs, has_aux=True)
    (_, of_arrays), logs = vjp.with_logs(jnp.ones_like(value))
    requests = {key: x for key, x in found.items() if key in logs}
    return Trace(value, others, of_arrays, logs, requests, program)


def _known_by(
    trace: Trace,
    paths: list[Any],
    wanted: list[bool | None],
    tables: list[Table],
    known: Known,
) -> Known:
    """What the trace found out; raises if a leaf cannot have the wanted form."""
    whole, dense = set(known.whole | trace.program.whole_leaves), set(known.dense)
    depths = dict(trace.program.depths)
    for i, source in enumerate(tables):
        own = {key: x for key, x in trace.requests.items() if x.leaf.index == i}
        is_used_whole = str(i) in trace.logs and i not in whole
        if wanted[i] and is_used_whole:
            use = trace.program.dense_uses.get(i)
            raise ValueError(differentiate._refusal(paths[i], use))
        if is_used_whole and source.stale is not None:
            dense.add(i)
        if own and not wanted[i] and differentiate._reads_every_row([*own.values()]):
            dense.add(i)
        if own and not is_used_whole:
            rows = math.prod(source.array.shape[: depths[i]])
            if sum(_num_entries(trace.logs[key]) for key in own) > rows:
                whole.add(i)
    return Known(depths, frozenset(whole - dense), frozenset(dense))


def _gradients(
    trace: Trace,
    tables: list[Table],
    known: Known,
    after: Callable[[RowSlices], RowSlices],
) -> list[Any]:
    slices: dict[int, list[RowSlices]] = {i: [] for i in range(len(tables))}
    for key, request in trace.requests.items():
        i = request.leaf.index
        entries, values = _flat(trace.logs[key], request)
        all_of_them = differentiate._of_all_devices(
            request, tables[i].array, entries, values
        )
        slices[i].append(after(all_of_them))
    of_arrays = iter(trace.of_arrays)
    grads: list[Any] = []
    for i, source in enumerate(tables):
        total = trace.logs.get(str(i))
        if i in known.dense:
            grads.append(next(of_arrays))
        elif total is None or i in known.whole:
            own = [x for x in trace.requests.values() if x.leaf.index == i]
            promises = differentiate._promises(own)
            totals = [] if total is None else [total]
            depth = trace.program.depths.get(i, 1)
            grads.append(to_bcoo(slices[i], totals, source, depth, promises))
        else:  # of lookups and of other uses
            for entries, values in slices[i]:
                index = tuple(entries.ids.T)
                if entries.segments is not None:
                    values = values[entries.segments]
                if entries.weights is not None:
                    values *= expand_like(entries.weights, values)
                total = total.at[index].add(values.astype(total.dtype), mode="drop")
            grads.append(total)
    return grads


def _num_entries(log: Any) -> int:
    if hasattr(log, "branches"):
        return max(_num_entries(x) for x in log.branches if x is not None)
    return math.prod(log[0].ids.shape[:-1])


def _flat(log: Any, request: Request) -> RowSlices:
    """The entries and cotangents of all steps, devices and branches, `[n, ...]`."""
    entries, values = _merged(log, request)
    ids = entries.ids.reshape(-1, request.depth)
    is_padding = jnp.all(ids == 0, axis=1, keepdims=True)
    ids = jnp.where(is_padding, row_bounds(request.shape, ids), ids - 1)
    flat = LookupEntries(
        ids, *(None if x is None else x.reshape(-1) for x in entries[1:])
    )
    if values is None:  # of a leaf whose gradient is a whole array
        return flat, jnp.zeros((len(ids), 0), request.leaf.dtype)
    return flat, values.reshape(-1, *request.delta.shape[1:])


def _merged(log: Any, request: Request) -> Any:
    """One log for the branches of a `cond`, of which all but one logged zeros."""
    if not hasattr(log, "branches"):
        return log
    own = [_merged(x, request) for x in log.branches if x is not None]
    if len(own) == 1:
        return own[0]
    ranks = 2, 1, 1, len(request.delta.shape)
    leaves = zip(*([*entries, values] for entries, values in own), strict=True)
    calls = jnp.size(log.index)
    sums = [
        None if arrays[0] is None else _sum_of_padded(arrays, rank, calls)
        for rank, arrays in zip(ranks, leaves, strict=True)
    ]
    if request.bags is not None and len({x.ids.size for x, _ in own}) > 1:
        raise NotImplementedError("branches with bags of unequal sizes")
    return LookupEntries(*sums[:3]), sums[3]


def _sum_of_padded(arrays: Sequence[Any], rank: int, calls: int) -> Any:
    # A branch with a loop of 3 steps logs `[calls, 3, n]`, another one `[calls, n]`.
    rows = [
        x.reshape(calls, x.size // max(1, calls * math.prod(row)), *row)
        for x in arrays
        for row in [x.shape[x.ndim - rank + 1 :]]
    ]
    size = max(x.shape[1] for x in rows)
    unpadded = [(0, 0)] * (rank - 1)
    return sum(jnp.pad(x, [(0, 0), (0, size - x.shape[1]), *unpadded]) for x in rows)


# What it costs to trace.

MODELS = {
    "26 tables, 3 layers": (26, 3),
    "2 tables, 24 layers": (2, 24),
    "2 tables, 24 steps of a scan, checkpointed": (2, 0),
}
WAYS = ("the package", "by logs", "jax.grad")


def in_a_scan(params: Any, ids: jax.Array) -> jax.Array:
    @jax.checkpoint
    def step(x: jax.Array, i: jax.Array) -> Any:
        rows = [t[i] for t in params["tables"].values()]
        return jnp.tanh(x + jnp.concatenate(rows)), None

    width = 32 * len(params["tables"])
    return jnp.sum(lax.scan(step, jnp.zeros(width), ids)[0] ** 2)


def measure(name: str, way: str) -> None:
    """What a process of its own runs and prints: the second of two gradients.

    JAX has then imported, and traced, what any gradient needs.
    """
    import compile_times

    import optax_sparse_adam as osa

    value_and_grad: Any = jax.value_and_grad if way == WAYS[2] else osa.value_and_grad
    replaced = by_logs() if way == WAYS[1] else contextlib.nullcontext()
    tables, layers = MODELS[name]
    with replaced:
        for sizes in ((1, 1), (tables, layers)):
            loss, params, ids = compile_times.model(*sizes)
            if not layers:
                loss, ids = in_a_scan, jnp.zeros(24, jnp.int32)
            start = time.process_time()
            jax.jit(value_and_grad(loss)).trace(params, ids)
            seconds = time.process_time() - start
    print(f"{seconds:.2f}")


@contextlib.contextmanager
def by_logs() -> Iterator[None]:
    """`osa.value_and_grad`, and what is made of it, differentiates by logs."""
    from optax_sparse_adam._gradients import value_and_grad as module

    before = module.evaluate_with_gradients
    module.evaluate_with_gradients = evaluate_with_gradients
    try:
        yield
    finally:
        module.evaluate_with_gradients = before


def main() -> None:
    print("| CPU seconds to trace | " + " | ".join(WAYS) + " |")
    print("|---" * (1 + len(WAYS)) + "|", flush=True)
    for name in MODELS:
        cells = []
        for way in WAYS:
            command = [sys.executable, __file__, "--measure", name, way]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            cells.append(found.stdout.strip())
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    measure(*sys.argv[2:]) if "--measure" in sys.argv else main()
